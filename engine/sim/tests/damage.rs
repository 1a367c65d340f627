//! One disk with everything on it, and hundreds of copies of it with one bit flipped each: in the log, in packs, in
//! segments, in the catalog. None may make a server show wrong bytes.

mod common;

use common::{append, checkpoint, create, life, plan, tail_of};
use millstream_core::model::Class;
use millstream_sim::plan::{Damage, End, FileKind, Op};
use millstream_sim::run::{Bugs, Summary, run};

const FLIPS: u64 = if cfg!(debug_assertions) { 40 } else { 400 };

fn workload() -> Vec<Op> {
    vec![
        create(0, Class::Fsync, 100, None),
        create(1, Class::Memory, 50, None),
        create(3, Class::Disk, 60, None),
        Op::Commit,
        append(0, 700, Some(0)),
        append(1, 80, None),
        append(3, 36_000, Some(0)),
        Op::Commit,
        checkpoint(Vec::new()),
        create(2, Class::Fsync, 20, tail_of(0)),
        append(2, 40_000, None),
        append(3, 900, Some(0)),
        Op::Commit,
        checkpoint(vec![append(0, 90, Some(0)), Op::Commit]),
        append(0, 120, Some(0)),
        append(1, 130, None),
        Op::Commit,
        append(2, 140, None),
        Op::Commit,
        append(3, 150, Some(0)),
        Op::Commit,
    ]
}

fn flip_many(kind: FileKind) -> Summary {
    let mut flipped = life(Vec::new(), None, End::PowerCut);
    flipped.damages = (0..FLIPS).map(|dice| Damage { kind, dice }).collect();
    let mut total = Summary::default();
    for end in [End::ProcessCrash, End::CleanStop { power_cut: true }] {
        let lives = vec![life(workload(), None, end), flipped.clone()];
        match run(&plan(7, lives), Bugs::default()) {
            Ok(summary) => total.add(&summary),
            Err(failed) => panic!("{end:?}: {}", failed.problem),
        }
    }
    total
}

#[test]
fn a_flipped_bit_in_the_log_is_refused_or_cut_off() {
    let summary = flip_many(FileKind::Log);
    assert!(summary.damages_refused > 10 && summary.damages_refused < summary.damages);
}

#[test]
fn a_flipped_bit_in_a_pack_never_shows() {
    assert_eq!(flip_many(FileKind::Pack).damages_refused, 0);
}

#[test]
fn a_flipped_bit_in_a_segment_never_shows() {
    assert_eq!(flip_many(FileKind::Segment).damages_refused, 0);
}

#[test]
fn a_flipped_bit_in_the_catalog_never_shows() {
    assert!(flip_many(FileKind::Catalog).damages > 10);
}
