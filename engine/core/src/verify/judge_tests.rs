//! The judgement on a log by its numbers: what counts, what a crash has cut, what is damage.

use std::sync::Arc;

use super::*;
use crate::io::OpenMode;
use crate::io::tests::TestDirectory;

/// A run of sequences `first..next` whose headers prove that everything up to `synced` was synced.
fn run(first: u64, next: u64, synced: u64) -> Run {
    Run {
        first,
        next,
        complete: next,
        start_byte: 128 + first * 100,
        end_byte: 128 + next * 100,
        synced,
    }
}

fn log(files: &[&[Run]]) -> Vec<ScannedFile> {
    let directory = TestDirectory::new();
    std::fs::write(directory.path().join("file"), b"").expect("written");
    let file = directory.disk().open("file", OpenMode::Read).expect("open");
    let scanned = files.iter().enumerate().map(|(number, runs)| ScannedFile {
        name: format!("wal/{number}"),
        generation: number as u64 + 1,
        file: Arc::clone(&file),
        header_whole: true,
        begins_whole: true,
        runs: runs.to_vec(),
        trailing_synced: 0,
        hopeless: false,
        suspects: Vec::new(),
    });
    scanned.collect()
}

fn counted(judged: &Judgement) -> Vec<(usize, u64, u64)> {
    let pieces = judged.pieces.iter();
    pieces
        .map(|piece| (piece.file, piece.from, piece.to))
        .collect()
}

fn lost(judged: &Judgement) -> Vec<(u64, u64)> {
    let damage = judged.damage.iter();
    damage.map(|damage| (damage.from, damage.to)).collect()
}

#[test]
fn a_log_without_holes_counts_whole() {
    let judged = judge(&log(&[&[run(1, 10, 5)], &[], &[run(10, 20, 15)]]), 0);
    assert_eq!(counted(&judged), [(0, 1, 10), (2, 10, 20)]);
    assert_eq!(
        (lost(&judged), judged.next, judged.discarded),
        (vec![], 20, 0)
    );
    let empty = judge(&log(&[&[]]), 7);
    assert_eq!((lost(&empty), empty.next), (vec![], 8));
}

#[test]
fn behind_a_hole_that_nothing_proves_is_nothing() {
    let files = log(&[&[run(1, 10, 5), run(12, 15, 9)], &[run(15, 20, 9)]]);
    let judged = judge(&files, 0);
    assert_eq!(counted(&judged), [(0, 1, 10)]);
    assert_eq!(
        (lost(&judged), judged.next, judged.discarded),
        (vec![], 10, 8)
    );
}

#[test]
fn a_hole_that_was_synced_is_damage_and_what_is_behind_it_counts() {
    for proof_in_the_next_file in [false, true] {
        let (here, later) = if proof_in_the_next_file {
            (9, 10)
        } else {
            (10, 9)
        };
        let files = log(&[&[run(1, 10, 5), run(12, 15, here)], &[run(15, 20, later)]]);
        let judged = judge(&files, 0);
        assert_eq!(lost(&judged), [(10, 12)]);
        assert_eq!(judged.damage[0].byte, 128 + 1000);
        assert_eq!(counted(&judged), [(0, 1, 10), (0, 12, 15), (1, 15, 20)]);
        assert_eq!(judged.next, 20);
    }
}

#[test]
fn a_start_that_cut_at_the_hole_goes_on_in_its_own_file() {
    let torn: &[Run] = &[run(1, 10, 5), run(12, 15, 9)];
    // Written by the same run of the server as the torn file, behind the hole.
    let same_run: &[Run] = &[run(15, 17, 9)];
    let next_start: &[Run] = &[run(8, 30, 25)];
    let judged = judge(&log(&[torn, same_run, next_start]), 0);
    assert_eq!(counted(&judged), [(0, 1, 10), (2, 10, 30)]);
    assert_eq!((lost(&judged), judged.discarded), (vec![], 5));
}

#[test]
fn a_bad_header_alone_is_a_hole_without_frames() {
    let mut files = log(&[&[run(1, 5, 0)], &[run(5, 9, 6)]]);
    files[1].begins_whole = false;
    let judged = judge(&files, 0);
    assert_eq!(lost(&judged), [(5, 5)]);
    assert_eq!((judged.damage[0].file, judged.damage[0].byte), (1, 64));
    assert_eq!(judged.next, 9);
    files[1].runs[0].synced = 4;
    assert_eq!(
        judge(&files, 0).next,
        5,
        "nothing proves it: the log ends before"
    );
}

#[test]
fn missing_files_are_damage_at_both_ends() {
    assert_eq!(lost(&judge(&log(&[&[run(5, 9, 4)]]), 2)), [(3, 5)]);
    assert_eq!(lost(&judge(&log(&[&[run(5, 9, 4)]]), 4)), []);
    assert_eq!(lost(&judge(&log(&[&[run(1, 5, 4)]]), 7)), [(5, 8)]);
    // Nothing up to the checkpoint is needed: a freed file may be back without its neighbour.
    let back = judge(&log(&[&[run(1, 5, 4)], &[run(8, 12, 9)]]), 7);
    assert_eq!((lost(&back), back.next), (vec![], 12));
}

#[test]
fn an_open_group_at_the_end_does_not_count_but_before_damage_it_does() {
    let mut files = log(&[&[run(1, 10, 5)]]);
    files[0].runs[0].complete = 8;
    let judged = judge(&files, 0);
    assert_eq!((counted(&judged), judged.next), (vec![(0, 1, 8)], 8));
    files[0].runs.push(run(12, 15, 11));
    let judged = judge(&files, 0);
    assert_eq!(counted(&judged), [(0, 1, 10), (0, 12, 15)]);
    assert_eq!(lost(&judged), [(10, 12)]);
}

#[test]
fn headers_without_whole_frames_prove_too() {
    let mut files = log(&[&[run(1, 10, 5)]]);
    files[0].trailing_synced = 9;
    assert_eq!(lost(&judge(&files, 0)), []);
    files[0].trailing_synced = 12;
    assert_eq!(lost(&judge(&files, 0)), [(10, 13)]);
}
