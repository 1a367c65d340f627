//! Listings page by page, over streams in the catalog, in memory, in both and in neither.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::shard::engine::{Engine, Undone};
use crate::stream::lifecycle::CreateRequest;
use crate::stream::state::Life;

const STREAMS: usize = 3000;
const PAGE: usize = 100;

fn create(engine: &Engine, path: &str) {
    let request = CreateRequest {
        ttl_seconds: Some(3600),
        ..CreateRequest::default()
    };
    for _ in 0..1000 {
        match engine.create(path, &request, b"", engine.now_ms()) {
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
    loop {
        let after: String = paths.last().cloned().unwrap_or_default();
        let before = engine.metrics.list_looks.get();
        let page = engine.list("s/", &after, PAGE).unwrap_or_default();
        most = most.max(engine.metrics.list_looks.get() - before);
        if page.is_empty() {
            return (paths, most);
        }
        paths.extend(page.into_iter().map(|info| info.path));
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
