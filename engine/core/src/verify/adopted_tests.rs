//! Verification, repair and backup of what a commit took over before its first checkpoint.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::shard::adopt::{CommitRequest, CommitStage};
use crate::shard::backup::BackupOptions;
use crate::shard::backup::tests::restore;
use crate::shard::engine::Engine;
use crate::verify::{repair_directory, verify_directory};

/// Runs `work` beside the commit thread and maintenance; ends with the clean mark, without a checkpoint.
fn with_engine<T>(directory: &Path, work: impl FnOnce(&Engine) -> T) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory).expect("doors");
    let opened = Engine::open(config, doors, &mut |_| {});
    let engine = opened.expect("opens").engine;
    let (committing, maintaining) = (Arc::clone(&engine), Arc::clone(&engine));
    let memory = engine.memory_without_clients();
    let commit = std::thread::spawn(move || committing.shard.run_commit_thread());
    let maintenance = std::thread::spawn(move || maintaining.run_maintenance(memory));
    let result = work(&engine);
    engine.maintenance.stop();
    maintenance.join().expect("maintenance thread");
    assert!(engine.write_clean_mark(std::time::Duration::from_secs(10)));
    engine.shard.stop_threads();
    commit.join().expect("commit thread");
    result
}

fn rows(seed: usize) -> Vec<Vec<u8>> {
    (0..500)
        .map(|number| vec![(seed + number) as u8; 1_000])
        .collect()
}

/// Commits half a megabyte to each stream.
fn commit(engine: &Engine, id: &str, epoch: u64, paths: &[&str]) {
    let rows = rows(epoch as usize);
    let rows: Vec<(&str, &[u8])> = paths
        .iter()
        .flat_map(|path| rows.iter().map(move |row| (*path, &row[..])))
        .collect();
    let staged = engine.local_stage(id, &rows).expect("staged");
    let committed = engine.local_commit(&CommitRequest {
        producer: "p",
        epoch,
        streams: Vec::new(),
        stages: vec![CommitStage {
            id,
            checksum: staged.record.head.checksum,
        }],
    });
    assert!(!committed.expect("committed").duplicate);
}

fn prepare(directory: &Path) {
    with_engine(directory, |engine| {
        for path in ["a", "b"] {
            engine
                .local_create(path, "application/octet-stream", None)
                .expect("created");
            engine.local_append(path, b"before").expect("appended");
        }
        commit(engine, "one", 1, &["a", "b"]);
        engine.local_append("a", b"behind").expect("appended");
        let waiting = engine.local_stage("waits", &[("a", b"not yet")]);
        waiting.expect("staged");
    });
}

fn whole(behind: &[u8]) -> Vec<u8> {
    [b"before", &rows(1).concat()[..], behind].concat()
}

fn content(engine: &Engine, path: &str) -> Vec<u8> {
    let (mut body, mut offset) = (Vec::new(), "-1".to_owned());
    loop {
        let read = engine.local_read(path, &offset, 1 << 20).expect("read");
        body.extend_from_slice(&read.body);
        offset = read.next.to_string();
        if read.up_to_date {
            return body;
        }
    }
}

fn largest_pack(directory: &Path) -> PathBuf {
    let files = std::fs::read_dir(directory.join("packs")).expect("lists");
    let files = files.map(|entry| entry.expect("entry").path());
    files
        .max_by_key(|path| path.metadata().map_or(0, |metadata| metadata.len()))
        .expect("there are packs")
}

fn overwrite(file: &Path, position: u64) {
    let opened = std::fs::OpenOptions::new().write(true).open(file);
    opened
        .expect("opens")
        .write_all_at(b"damage", position)
        .expect("writes");
}

#[test]
fn a_directory_with_adopted_and_waiting_stages_is_clean() {
    let directory = TestDirectory::new();
    prepare(directory.path());
    let report = verify_directory(directory.path(), &mut |_, _| true).expect("verifies");
    assert!(report.is_clean(), "{:?}", report.findings);
    assert_eq!(report.notes, 0, "{:?}", report.findings);
    with_engine(directory.path(), |engine| {
        assert_eq!(content(engine, "a"), whole(b"behind"));
        assert_eq!(content(engine, "b"), whole(b""));
        assert_eq!(engine.stages.waiting().0, 1);
    });
}

#[test]
fn damaged_bytes_are_found_and_repaired_to_a_gap() {
    let directory = TestDirectory::new();
    prepare(directory.path());
    overwrite(&largest_pack(directory.path()), 200_000);
    let report = verify_directory(directory.path(), &mut |_, _| true).expect("verifies");
    assert_eq!(report.errors, 1, "{:?}", report.findings);
    let found = format!("{:?}", report.findings);
    assert!(
        found.contains(".pack") && found.contains("commit took over"),
        "{found}"
    );
    let outcome = repair_directory(directory.path(), &mut |_, _| true).expect("repairs");
    let after = outcome.after.expect("looked again");
    assert!(after.is_clean(), "{:?}", after.findings);
    with_engine(directory.path(), |engine| {
        let intact = content(engine, "b").len() + content(engine, "a").len();
        assert_eq!(intact, whole(b"behind").len() + whole(b"").len() - 1_000);
    });
}

#[test]
fn a_missing_pack_is_found_and_costs_only_its_commit() {
    let directory = TestDirectory::new();
    prepare(directory.path());
    std::fs::remove_file(largest_pack(directory.path())).expect("removed");
    let report = verify_directory(directory.path(), &mut |_, _| true).expect("verifies");
    assert_eq!(report.errors, 2, "{:?}", report.findings);
    let outcome = repair_directory(directory.path(), &mut |_, _| true).expect("repairs");
    let after = outcome.after.expect("looked again");
    assert!(after.is_clean(), "{:?}", after.findings);
    with_engine(directory.path(), |engine| {
        assert_eq!(content(engine, "a"), b"beforebehind", "with a gap between");
        assert_eq!(content(engine, "b"), b"before");
    });
}

#[test]
fn a_backup_holds_what_its_log_took_over() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let (kept, to) = (place.path().join("backup"), place.path().join("restored"));
    prepare(directory.path());
    with_engine(directory.path(), |engine| {
        let mut seen = String::new();
        let made = engine.backup_to(&kept, &BackupOptions::default(), &mut |progress| {
            if seen != progress.phase {
                seen = progress.phase.to_owned();
                match progress.phase {
                    // Behind the checkpoint, before the catalog is read: only the log has it.
                    "catalog" => commit(engine, "two", 2, &["b"]),
                    // The checkpoint places and copies while the backup goes on.
                    "log" => engine.maintenance.request_checkpoint(),
                    _ => {}
                }
            }
            true
        });
        made.expect("backup");
    });
    restore(&kept, &to);
    let report = verify_directory(&to, &mut |_, _| true).expect("verifies");
    assert!(report.is_clean(), "{:?}", report.findings);
    with_engine(&to, |engine| {
        assert_eq!(content(engine, "a"), whole(b"behind"));
        let second = rows(2).concat();
        assert_eq!(content(engine, "b"), whole(&second));
        engine.maintenance.request_checkpoint();
    });
}
