//! Listings page by page, over streams in the catalog, in memory, in both and in neither.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::limits::LIST_LOOKS_SPARE;
use crate::shard::engine::{Engine, Undone};
use crate::stream::lifecycle::{CreateRequest, ForkRequest};
use crate::stream::state::Life;

const STREAMS: usize = 3000;
const PAGE: usize = 100;

fn create(engine: &Engine, path: &str) {
    let request = CreateRequest {
        ttl_seconds: Some(3600),
        ..CreateRequest::default()
    };
    create_as(engine, path, &request);
}

fn create_as(engine: &Engine, path: &str, request: &CreateRequest<'_>) {
    until_done(engine, || {
        engine.create(path, request, b"", engine.now_ms())
    });
}

/// Repeats what must wait for the log; waits for no sync of its own.
fn until_done<T>(engine: &Engine, attempt: impl Fn() -> Result<T, Undone>) {
    for _ in 0..1000 {
        match attempt() {
            Ok(_) => return,
            Err(Undone::Wait) => engine.shard.kick(),
            Err(Undone::Refused { refusal, .. }) => panic!("{}", refusal.sentence()),
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("the log is stuck");
}

/// Every page, and the most streams that one of them looked at.
fn pages(engine: &Engine) -> (Vec<String>, u64) {
    let (mut paths, mut most) = (Vec::new(), 0);
    let mut after = String::new();
    loop {
        let before = engine.metrics.list_looks.get();
        let page = engine.list("s/", &after, PAGE).expect("listed");
        most = most.max(engine.metrics.list_looks.get() - before);
        assert!(page.streams.len() <= PAGE);
        paths.extend(page.streams.into_iter().map(|info| info.path));
        let Some(next) = page.next else {
            return (paths, most);
        };
        assert!(next > after && paths.last().is_none_or(|last| *last <= next));
        after = next;
    }
}

/// Runs `work` beside the commit thread.
fn with_engine(work: impl FnOnce(&Engine)) {
    let directory = TestDirectory::new();
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
    work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
}

#[test]
fn a_walk_shows_no_stream_as_it_was_before_a_checkpoint_that_it_meets() {
    with_engine(|engine| {
        for path in ["a", "b", "c", "d"] {
            let created = engine.local_create(path, "text/plain", None);
            assert!(created.expect("created"));
        }
        engine.checkpoint().expect("checkpoint");
        engine.directory.evict(0);
        // Acknowledged before the walk begins, and in memory alone.
        assert!(engine.local_delete("b").expect("deleted"));
        engine.local_append("c", b"more").expect("appended");
        let mut seen = Vec::new();
        let walked = engine.directory.walk("", "", &|_| true, &mut |stream| {
            if &*stream.path == "a" {
                engine.checkpoint().expect("checkpoint");
                engine.directory.evict(0);
            }
            let state = stream.lock();
            let live = state.life == Life::Live;
            seen.push((stream.path.to_string(), live, state.visible.tail));
            true
        });
        assert!(walked.is_ok());
        let expected = [("a", 0), ("c", 4), ("d", 0)];
        assert_eq!(seen, expected.map(|(path, tail)| (path.into(), true, tail)));
    });
}

#[test]
fn a_page_costs_what_is_on_it() {
    with_engine(check_pages);
}

fn check_pages(engine: &Engine) {
    let mut expected = BTreeSet::new();
    for number in 0..STREAMS {
        let path = format!("s/{:05}", number * 7 % STREAMS);
        create(engine, &path);
        expected.insert(path);
        if number == STREAMS / 2 {
            // One half is in the catalog and, because it expires, in memory too.
            engine.checkpoint().expect("checkpoint");
        }
    }
    for number in (0..STREAMS).step_by(40) {
        let path = format!("s/{number:05}");
        assert!(engine.local_delete(&path).expect("deleted"));
        expected.remove(&path);
        if number % 80 == 0 {
            create(engine, &path);
            expected.insert(path);
        }
    }
    engine
        .local_create("r", "text/plain", None)
        .expect("created");
    engine
        .local_create("t", "text/plain", None)
        .expect("created");
    let (paths, most) = pages(engine);
    assert!(paths.iter().eq(&expected), "{} paths", paths.len());
    assert!(most <= 4 * PAGE as u64, "{most} looks for a page of {PAGE}");
    engine.checkpoint().expect("checkpoint");
    let (paths, most) = pages(engine);
    assert!(paths.iter().eq(&expected), "{} paths", paths.len());
    assert!(most <= 2 * PAGE as u64, "{most} looks for a page of {PAGE}");
}

#[test]
fn a_page_looks_at_few_streams_that_are_not_on_it() {
    with_engine(|engine| {
        let source = |number: usize| format!("s/{number:05}");
        const GONE: usize = LIST_LOOKS_SPARE + 2 * PAGE;
        create(engine, "a");
        for number in 0..GONE {
            create_as(engine, &source(number), &CreateRequest::default());
        }
        for number in 0..GONE {
            let fork = ForkRequest {
                source_path: &source(number),
                offset: None,
                sub_offset: 0,
            };
            let request = CreateRequest {
                fork: Some(fork),
                ..CreateRequest::default()
            };
            create_as(engine, &format!("t/{number:05}"), &request);
        }
        create(engine, "s/z");
        for number in 0..GONE {
            let stream = engine.directory.get(&source(number)).expect("read");
            let stream = stream.expect("there");
            until_done(engine, || engine.delete(&stream, engine.now_ms()));
        }
        for _ in ["in memory", "in the catalog"] {
            let (paths, most) = pages(engine);
            assert_eq!(paths, ["s/z"]);
            assert!(most <= 2 * (PAGE + LIST_LOOKS_SPARE) as u64, "{most} looks");
            let before = engine.metrics.list_looks.get();
            assert!(engine.list_one("s/").expect("answer").is_none());
            assert!(engine.list_one("s/00000").expect("answer").is_none());
            let found = engine.list_one("s/z").expect("answer").expect("there");
            assert_eq!(found.path, "s/z");
            assert_eq!(engine.metrics.list_looks.get() - before, 3);
            engine.checkpoint().expect("checkpoint");
            engine.directory.evict(0);
        }
    });
}
