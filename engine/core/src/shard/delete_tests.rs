//! Where removed streams ended: told at once, after a replay, after a checkpoint, from a backup, and not when damaged.

use std::path::Path;
use std::sync::Arc;

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::log::endings::{Ending, Unwritten};
use crate::model::{Class, Offset};
use crate::shard::backup::BackupOptions;
use crate::shard::backup::tests::restore;
use crate::shard::engine::Engine;
use crate::stream::lifecycle::{CreateRequest, ForkRequest};
use crate::verify::{repair_directory, verify_directory};

/// Runs `work` beside the commit thread; the end is as after a kill.
fn with_engine<T>(directory: &Path, work: impl FnOnce(&Engine) -> T) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory).expect("doors");
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    let engine = opened.engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}

/// Creates a stream of two records, deletes it, and says how it must be remembered.
fn come_and_go(engine: &Engine, path: &str, class: Class) -> Ending {
    let created = engine.local_create(path, "text/plain", Some(class));
    assert!(created.expect("created"));
    engine.local_append(path, b"one").expect("appended");
    let tail = engine.local_append(path, b"three").expect("appended");
    let Ok(Some(stream)) = engine.find(path) else {
        panic!("{path} is there");
    };
    assert_eq!(engine.ending(path, None), None, "it lives");
    assert!(engine.local_delete(path).expect("deleted"));
    let found = engine.ending(path, None).expect("remembered");
    let expected = Ending {
        name: path.into(),
        incarnation: stream.id,
        tail,
        records: 2,
        newest_epoch: stream.id.0,
        time_ms: found.time_ms,
    };
    assert_eq!(found, expected);
    expected
}

fn remembered(engine: &Engine, endings: &[Ending]) {
    for ending in endings {
        let found = engine.ending(&ending.name, Some(ending.incarnation));
        assert_eq!(found.as_ref(), Some(ending));
    }
}

fn removed_in_all_classes(engine: &Engine) -> Vec<Ending> {
    let classes = [Class::Ephemeral, Class::Memory, Class::Disk, Class::Fsync];
    let mut endings: Vec<Ending> = classes
        .into_iter()
        .map(|class| come_and_go(engine, class.name(), class))
        .collect();
    // Twice the same name: the newest one is told, the older one if it is asked for.
    endings.push(come_and_go(engine, "again", Class::Fsync));
    let newest = come_and_go_again(engine);
    assert_eq!(engine.ending("again", None).as_ref(), Some(&newest));
    endings.push(newest);
    endings
}

fn come_and_go_again(engine: &Engine) -> Ending {
    let created = engine.local_create("again", "text/plain", None);
    assert!(created.expect("created"));
    let tail = engine.local_tail("again").expect("asked").expect("there");
    assert!(engine.local_delete("again").expect("deleted"));
    let found = engine.ending("again", None).expect("remembered");
    assert_eq!((found.tail, found.records), (tail, 0));
    found
}

#[test]
fn replay_and_checkpoint_remember_the_same() {
    let directory = TestDirectory::new();
    let endings = with_engine(directory.path(), removed_in_all_classes);
    for _ in 0..2 {
        with_engine(directory.path(), |engine| remembered(engine, &endings));
    }
    with_engine(directory.path(), |engine| {
        engine.checkpoint().expect("checkpoint");
        remembered(engine, &endings);
        let rows = engine.directory.catalog().endings().expect("read");
        assert_eq!(rows.len(), endings.len());
    });
    for _ in 0..2 {
        with_engine(directory.path(), |engine| {
            remembered(engine, &endings);
            engine.checkpoint().expect("checkpoint");
        });
    }
}

#[test]
fn a_source_ends_with_its_delete_and_not_with_its_purge() {
    let directory = TestDirectory::new();
    let fork_source = |engine: &Engine| {
        engine
            .local_create("source", "text/plain", Some(Class::Memory))
            .expect("created");
        let tail = engine.local_append("source", b"inherited").expect("tail");
        let request = CreateRequest {
            fork: Some(ForkRequest {
                source_path: "source",
                offset: None,
                sub_offset: 0,
            }),
            ..CreateRequest::default()
        };
        let created = engine.create("fork", &request, b"", engine.now_ms());
        assert!(created.is_ok());
        assert!(engine.local_delete("source").expect("deleted"));
        tail
    };
    let tail: Offset = with_engine(directory.path(), fork_source);
    let ended = |engine: &Engine, path: &str| {
        let found = engine.ending(path, None).expect("remembered");
        (found.tail, found.records)
    };
    with_engine(directory.path(), |engine| {
        // The start has begun a new epoch, but not for what had ended before.
        assert_eq!(ended(engine, "source"), (tail, 1));
        engine
            .checkpoint()
            .expect("the source is kept for its fork");
        assert!(engine.local_delete("fork").expect("deleted"));
        assert_eq!(ended(engine, "fork").1, 1, "with what it inherited");
        engine.checkpoint().expect("both leave the catalog");
        let rows = engine.directory.catalog().endings().expect("read");
        assert_eq!(rows.len(), 2);
    });
    with_engine(directory.path(), |engine| {
        assert_eq!(ended(engine, "source"), (tail, 1));
    });
}

#[test]
fn a_backup_takes_them_along_and_a_restore_leaves_them_as_they_are() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let (kept, to) = (place.path().join("backup"), place.path().join("restored"));
    let endings = with_engine(directory.path(), |engine| {
        let mut endings = vec![come_and_go(engine, "in the catalog", Class::Memory)];
        engine.checkpoint().expect("checkpoint");
        let mut seen = false;
        let backup = engine.backup_to(&kept, &BackupOptions::default(), &mut |progress| {
            if progress.phase == "catalog" && !std::mem::replace(&mut seen, true) {
                endings.push(come_and_go(engine, "in the log", Class::Memory));
            }
            true
        });
        backup.expect("backup");
        endings
    });
    restore(&kept, &to);
    with_engine(&to, |engine| remembered(engine, &endings));
}

#[test]
fn a_damaged_one_is_found_and_a_repair_keeps_the_others() {
    let directory = TestDirectory::new();
    let endings = with_engine(directory.path(), |engine| {
        let endings = removed_in_all_classes(engine);
        engine.checkpoint().expect("checkpoint");
        let catalog = engine.directory.catalog();
        let mut put = catalog.endings().expect("read");
        put.truncate(1);
        put[0].1[30] ^= 1;
        let damaged = Unwritten {
            put,
            forget_below: 0,
        };
        let written = catalog.commit_with(&[], &[], &[], &damaged);
        written.expect("damaged");
        endings
    });
    let report = verify_directory(directory.path(), &mut |_, _| true).expect("verified");
    assert_eq!(report.errors, 1, "{:?}", report.findings);
    assert!(report.findings[0].what.contains("does not decode"));
    let outcome = repair_directory(directory.path(), &mut |_, _| true).expect("repaired");
    let repaired = outcome.repaired.expect("repaired");
    assert_eq!(repaired.given_up.len(), 1, "{:?}", repaired.given_up);
    assert!(outcome.after.expect("a second look").is_clean());
    with_engine(directory.path(), |engine| {
        remembered(engine, &endings[1..]);
        let lost = &endings[0];
        assert_eq!(engine.ending(&lost.name, None), None);
    });
}
