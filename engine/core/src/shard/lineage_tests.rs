//! Chains of forks on a real engine: how many ancestors a look costs, what is stored of the way up, and the end of a
//! chain in bounded steps.

use std::sync::Arc;

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::limits::{FORK_PIECES_MAX, PURGES_PER_REQUEST_MAX};
use crate::shard::engine::{Engine, Undone};
use crate::stream::handle::Stream;
use crate::stream::lifecycle::{CreateRequest, ForkRequest};
use crate::stream::state::Life;

const DEPTH: u64 = 1000;

fn with_engine<T>(directory: &TestDirectory, work: impl FnOnce(&Engine) -> T) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    let engine = opened.engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}

/// Tries again until the log has got on.
fn done<T>(engine: &Engine, mut step: impl FnMut() -> Result<T, Undone>) -> T {
    for _ in 0..10_000 {
        match step() {
            Ok(value) => return value,
            Err(Undone::Wait) => {
                engine.shard.kick();
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Err(Undone::Refused { refusal, .. }) => panic!("{}", refusal.sentence()),
        }
    }
    panic!("the log is stuck");
}

/// A chain in which every level has one byte of its own.
fn chain(engine: &Engine) -> Arc<Stream> {
    engine
        .local_create("0", "text/plain", None)
        .expect("created");
    engine.local_append("0", b"x").expect("appended");
    for level in 1..DEPTH {
        let source = (level - 1).to_string();
        let request = CreateRequest {
            fork: Some(ForkRequest {
                source_path: &source,
                offset: None,
                sub_offset: 0,
            }),
            ..CreateRequest::default()
        };
        let path = level.to_string();
        done(engine, || {
            let tail = engine.find(&source)?.expect("there").lock().visible.tail;
            if tail < level {
                return Err(Undone::Wait);
            }
            engine.create(&path, &request, b"x", engine.now_ms())
        });
    }
    let leaf = (DEPTH - 1).to_string();
    done(engine, || Ok(engine.find(&leaf)?.expect("there")))
}

#[test]
fn owners_are_few_lookups_away_also_after_a_restart() {
    let directory = TestDirectory::new();
    let check = |engine: &Engine, leaf: &Arc<Stream>| {
        let most = 3 * u64::from(DEPTH.ilog2());
        for position in 0..DEPTH {
            let before = engine.metrics.fork_lookups.get();
            let (owner, limit) = engine.owner_of(leaf, position).expect("found");
            assert_eq!(&*owner.path, position.to_string());
            assert!(limit == position + 1 || position == DEPTH - 1);
            let by_number = engine.owner_of_record(leaf, position).expect("found");
            assert!(Arc::ptr_eq(&owner, &by_number));
            let lookups = engine.metrics.fork_lookups.get() - before;
            assert!(lookups <= 2 * most, "{lookups} for {position}");
        }
        let end = |position| {
            let mut reading = engine.reading(leaf);
            reading
                .window_end(position, 1 << 20, DEPTH)
                .expect("an end")
        };
        assert_eq!(end(0), FORK_PIECES_MAX as u64);
        // Where few pieces are left the window ends at the tail.
        assert_eq!(end(DEPTH - 5), DEPTH);
    };
    with_engine(&directory, |engine| check(engine, &chain(engine)));
    with_engine(&directory, |engine| {
        let leaf = (DEPTH - 1).to_string();
        let leaf = done(engine, || Ok(engine.find(&leaf)?.expect("there")));
        check(engine, &leaf);
        engine.checkpoint().expect("checkpoint");
    });
    with_engine(&directory, |engine| {
        let leaf = (DEPTH - 1).to_string();
        let leaf = done(engine, || Ok(engine.find(&leaf)?.expect("there")));
        check(engine, &leaf);
    });
}

#[test]
fn a_delete_frees_a_long_chain_in_bounded_steps() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        chain(engine);
        let streams: Vec<Arc<Stream>> = (0..DEPTH)
            .map(|level| {
                done(engine, || {
                    Ok(engine.find(&level.to_string())?.expect("there"))
                })
            })
            .collect();
        let gone = || {
            let ended = |stream: &&Arc<Stream>| stream.lock().life == Life::Gone;
            streams.iter().filter(ended).count()
        };
        for stream in &streams {
            done(engine, || engine.delete(stream, engine.now_ms()));
        }
        assert_eq!(gone(), PURGES_PER_REQUEST_MAX);
        for _ in 0..1000 {
            engine.purge_requested();
            if gone() == streams.len() {
                return;
            }
            engine.shard.kick();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("{} of {} are gone", gone(), streams.len());
    });
}
