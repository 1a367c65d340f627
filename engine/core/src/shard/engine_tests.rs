//! The engine without sockets, on a real directory: checkpoints, packs, restarts.

use std::sync::Arc;

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::model::Class;
use crate::shard::engine::{Engine, Undone};
use crate::stream::lifecycle::CreateRequest;

/// Runs `work` with an engine whose commit thread is running.
fn with_engine<T>(directory: &TestDirectory, work: impl FnOnce(&Engine) -> T) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let engine = Engine::open(config, doors, &mut |_| {})
        .expect("opens")
        .engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}

fn fill(engine: &Engine, count: usize) {
    for number in 0..count {
        let path = format!("s/{number}");
        assert!(
            engine
                .local_create(&path, "text/plain", None)
                .expect("created")
        );
        engine
            .local_append(&path, format!("record {number}").as_bytes())
            .expect("appended");
    }
}

fn content(engine: &Engine, number: usize) -> String {
    let read = engine
        .local_read(&format!("s/{number}"), "-1", 1 << 20)
        .expect("read");
    String::from_utf8(read.body).expect("text")
}

#[test]
fn a_create_waits_for_memory_in_every_class_that_has_a_log() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        engine.metrics.hot_bytes.add(1 << 40);
        for class in [Class::Fsync, Class::Disk, Class::Memory] {
            let request = CreateRequest {
                content_type: Some("text/plain"),
                class: Some(class),
                ..CreateRequest::default()
            };
            let created = engine.create("s", &request, b"first", engine.now_ms());
            assert!(matches!(created, Err(Undone::Wait)), "{class:?}");
        }
        engine.metrics.hot_bytes.sub(1 << 40);
    });
}

#[test]
fn streams_leave_mostly_dead_packs_and_stay_readable() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        fill(engine, 100);
        engine.checkpoint().expect("first checkpoint");
        let packs = engine.directory.catalog().packs().expect("packs");
        assert_eq!(packs.len(), 1, "small streams share one pack");
        for number in 10..100 {
            assert!(
                engine
                    .local_delete(&format!("s/{number}"))
                    .expect("deleted")
            );
        }
        engine.checkpoint().expect("the catalog forgets them");
        engine.checkpoint().expect("the rest moves out");
        let left = engine.directory.catalog().packs().expect("packs");
        assert!(
            left.iter().all(|(number, _)| *number != packs[0].0),
            "{left:?}"
        );
        assert!((0..10).all(|number| content(engine, number) == format!("record {number}")));
    });
    with_engine(&directory, |engine| {
        assert!((0..10).all(|number| content(engine, number) == format!("record {number}")));
        assert_eq!(
            engine
                .list("s/", "", 1000)
                .map(|listed| listed.streams.len())
                .unwrap_or(0),
            10
        );
    });
}

#[test]
fn a_restart_without_a_clean_mark_finds_everything_again() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        fill(engine, 20);
        engine.checkpoint().expect("checkpoint");
        engine.local_append("s/3", b" and more").expect("appended");
        assert!(engine.local_delete("s/4").expect("deleted"));
    });
    for _ in 0..3 {
        with_engine(&directory, |engine| {
            assert_eq!(content(engine, 3), "record 3 and more");
            assert!(engine.local_tail("s/4").expect("answer").is_none());
            assert_eq!(
                engine
                    .list("", "", 1000)
                    .map(|listed| listed.streams.len())
                    .unwrap_or(0),
                19
            );
        });
    }
}

#[test]
fn a_failed_checkpoint_loses_nothing_and_the_next_one_works() {
    let directory = TestDirectory::new();
    let (packs, aside) = (
        directory.path().join("packs"),
        directory.path().join("packs-aside"),
    );
    with_engine(&directory, |engine| {
        fill(engine, 5);
        engine.checkpoint().expect("first checkpoint");
        engine.local_append("s/1", b" one").expect("appended");
        std::fs::rename(&packs, &aside).expect("packs are away");
        assert!(engine.checkpoint().is_err(), "there is nowhere to write to");
        engine
            .local_append("s/1", b" two")
            .expect("appended after the failure");
        assert!(engine.checkpoint().is_err());
        engine.local_append("s/1", b" three").expect("appended");
        std::fs::rename(&aside, &packs).expect("packs are back");
        engine.checkpoint().expect("everything is written now");
        assert_eq!(content(engine, 1), "record 1 one two three");
        assert_eq!(engine.metrics.hot_bytes.get(), 0);
    });
    with_engine(&directory, |engine| {
        assert_eq!(content(engine, 1), "record 1 one two three")
    });
}

#[test]
fn the_feed_forgets_answers_about_what_was_watched_before() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        let feed = &engine.shard.feed;
        engine
            .local_create("x/1", "text/plain", None)
            .expect("created");
        let owned = |text: &str| [text.to_owned()];
        let changed = || {
            engine.local_append("x/1", b"more").expect("appended");
            let taken = feed.take(std::time::Duration::from_millis(50)).0;
            taken.iter().map(|dirty| dirty.1.len()).collect::<Vec<_>>()
        };
        feed.watch(&[], &owned("y/*"));
        assert!(changed().is_empty());
        assert!(changed().is_empty());
        feed.watch(&owned("x/*"), &[]);
        assert!(changed().is_empty(), "a name is no glob");
        feed.watch(&owned("x/1"), &[]);
        assert_eq!(changed(), [0]);
        feed.watch(&[], &owned("x/*"));
        assert_eq!(changed(), [1]);
        feed.unwatch(&[], &owned("x/*"));
        assert_eq!(changed(), [0]);
        feed.unwatch(&owned("x/1"), &[]);
        assert!(changed().is_empty());
    });
}

#[test]
fn the_feed_compares_only_where_changes_are_taken() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        let feed = &engine.shard.feed;
        feed.watch(&[], &["x/*".to_owned()]);
        feed.while_comparing(|| {
            for name in ["x/1", "y/1"] {
                engine
                    .local_create(name, "text/plain", None)
                    .expect("created");
                engine.local_append(name, b"more").expect("appended");
            }
        });
        let (taken, overflow) = feed.take(std::time::Duration::from_secs(1));
        assert_eq!(taken.len(), 1);
        assert_eq!((&*taken[0].0, overflow), ("x/1", false));
    });
}
