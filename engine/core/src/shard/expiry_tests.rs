//! What a wall clock that is set does to streams that expire: nothing to a sliding TTL, everything to a date. And to forks
//! of streams whose bytes are made to last for them: nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::Config;
use crate::io::tests::TestDirectory;
use crate::io::{Clock, Doors};
use crate::model::Class;
use crate::shard::adopt::{CommitRequest, CommitStage};
use crate::shard::engine::{Engine, Undone};
use crate::shard::write::WriteScratch;
use crate::stream::append::AppendRequest;
use crate::stream::lifecycle::{CreateRequest, ForkRequest};

const BEGIN_MS: u64 = 1_700_000_000_000;
const TTL_S: u64 = 60;
const HOUR_MS: u64 = 3_600_000;

/// Clocks that move as they are told to.
struct Clocks {
    wall_ms: AtomicU64,
    monotonic_us: AtomicU64,
}

impl Clocks {
    fn pass_ms(&self, by_ms: u64) {
        self.wall_ms.fetch_add(by_ms, Ordering::Relaxed);
        self.monotonic_us.fetch_add(by_ms * 1000, Ordering::Relaxed);
    }

    fn set_ms(&self, wall_ms: u64) {
        self.wall_ms.store(wall_ms, Ordering::Relaxed);
    }
}

impl Clock for Clocks {
    fn wall_ms(&self) -> u64 {
        self.wall_ms.load(Ordering::Relaxed)
    }

    fn monotonic_us(&self) -> u64 {
        self.monotonic_us.load(Ordering::Relaxed)
    }
}

fn clocks() -> Arc<Clocks> {
    Arc::new(Clocks {
        wall_ms: AtomicU64::new(BEGIN_MS),
        monotonic_us: AtomicU64::new(5_000_000),
    })
}

fn with_engine<T>(
    directory: &TestDirectory,
    clocks: &Arc<Clocks>,
    work: impl FnOnce(&Engine) -> T,
) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let mut doors = Doors::real(directory.path()).expect("doors");
    doors.clock = Arc::clone(clocks) as Arc<dyn Clock>;
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    let engine = opened.engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}

fn create(engine: &Engine, path: &str, request: CreateRequest<'_>) {
    let created = engine.create(path, &request, b"", engine.now_ms());
    assert!(created.is_ok_and(|created| created.new));
}

fn sliding() -> CreateRequest<'static> {
    CreateRequest {
        ttl_seconds: Some(TTL_S),
        ..CreateRequest::default()
    }
}

/// Whether the stream is there after the sweeper has been around.
fn lives(engine: &Engine, path: &str) -> bool {
    engine.sweep_expired(engine.now_ms());
    engine.local_tail(path).expect("told").is_some()
}

/// The ways in which a stream is used: each begins its TTL again.
fn use_by(engine: &Engine, path: &str, how: &str) {
    let stream = engine.find(path).ok().flatten().expect("there");
    match how {
        "append" => {
            let request = AppendRequest {
                content_type: Some(b"application/octet-stream"),
                ..AppendRequest::default()
            };
            let (now_ms, mut scratch) = (engine.now_ms(), WriteScratch::default());
            let appended = engine.append(&stream, &request, b"x", Ok(1), now_ms, &mut scratch);
            assert!(appended.is_ok());
        }
        "commit" => {
            let epoch = engine.steady_ms();
            let id = format!("stage-{epoch}");
            let staged = engine.local_stage(&id, &[(path, b"x")]);
            let request = CommitRequest {
                producer: "job",
                epoch,
                streams: vec![path],
                stages: vec![CommitStage {
                    id: &id,
                    checksum: staged.expect("staged").record.head.checksum,
                }],
            };
            engine.local_commit(&request).expect("committed");
        }
        _ => engine.renew(&stream, &mut stream.lock()),
    }
}

#[test]
fn a_wall_clock_that_is_set_neither_ends_nor_prolongs_a_sliding_ttl() {
    for to_ms in [BEGIN_MS + HOUR_MS, BEGIN_MS - HOUR_MS] {
        for how in ["append", "commit", "read"] {
            let (directory, clocks) = (TestDirectory::new(), clocks());
            with_engine(&directory, &clocks, |engine| {
                create(engine, "used", sliding());
                create(engine, "idle", sliding());
                clocks.set_ms(to_ms);
                assert!(lives(engine, "used") && lives(engine, "idle"), "{how}");
                clocks.pass_ms(TTL_S * 1000 - 1);
                assert!(lives(engine, "used") && lives(engine, "idle"), "{how}");
                use_by(engine, "used", how);
                clocks.pass_ms(1);
                assert!(!lives(engine, "idle"), "{how}: its time is over");
                clocks.set_ms(BEGIN_MS);
                clocks.pass_ms(TTL_S * 1000 - 2);
                assert!(lives(engine, "used"), "{how}: it was used");
                clocks.pass_ms(1);
                assert!(!lives(engine, "used"), "{how}: its time is over");
            });
        }
    }
}

#[test]
fn a_date_is_one_of_the_wall_clock() {
    let (directory, clocks) = (TestDirectory::new(), clocks());
    with_engine(&directory, &clocks, |engine| {
        let request = CreateRequest {
            expires_at_ms: Some(BEGIN_MS + HOUR_MS),
            ..CreateRequest::default()
        };
        create(engine, "dated", request);
        assert!(lives(engine, "dated"));
        clocks.set_ms(BEGIN_MS + HOUR_MS);
        assert!(!lives(engine, "dated"));
    });
}

#[test]
fn across_a_restart_a_sliding_ttl_goes_by_the_wall_clock() {
    let (directory, clocks) = (TestDirectory::new(), clocks());
    with_engine(&directory, &clocks, |engine| {
        create(engine, "s", sliding());
        engine.local_append("s", b"logged").expect("appended");
    });
    clocks.set_ms(BEGIN_MS + TTL_S * 500);
    with_engine(&directory, &clocks, |engine| assert!(lives(engine, "s")));
    clocks.set_ms(BEGIN_MS + HOUR_MS);
    with_engine(&directory, &clocks, |engine| assert!(!lives(engine, "s")));
}

/// Uses a stream for three times its TTL while the wall clock is `off_ms` wrong, which is right at both ends.
fn use_under_a_wrong_clock(
    directory: &TestDirectory,
    clocks: &Arc<Clocks>,
    how: &str,
    off_ms: i64,
) {
    let checkpoints = how.ends_with('!');
    with_engine(directory, clocks, |engine| {
        create(engine, "s", sliding());
        clocks.set_ms(BEGIN_MS.saturating_add_signed(off_ms));
        for _ in 0..6 {
            clocks.pass_ms(TTL_S * 500);
            assert!(lives(engine, "s"), "{how}: it is used");
            use_by(engine, "s", how.trim_end_matches('!'));
        }
        if checkpoints {
            engine.checkpoint().expect("checkpoint");
        }
    });
    clocks.set_ms(BEGIN_MS + TTL_S * 3000);
}

#[test]
fn a_wall_clock_that_was_set_neither_ends_nor_prolongs_a_ttl_behind_a_restart() {
    for off_ms in [HOUR_MS as i64, -(HOUR_MS as i64)] {
        for how in ["append", "commit", "read", "append!", "commit!", "read!"] {
            let (directory, clocks) = (TestDirectory::new(), clocks());
            use_under_a_wrong_clock(&directory, &clocks, how, off_ms);
            with_engine(&directory, &clocks, |engine| {
                assert!(lives(engine, "s"), "{how}: used just now, {off_ms}");
                clocks.pass_ms(TTL_S * 1000 - 1);
                assert!(lives(engine, "s"), "{how}: its time is not over, {off_ms}");
                // What may not have been logged is a tenth of the TTL.
                clocks.pass_ms(TTL_S * 100 + 1);
                assert!(!lives(engine, "s"), "{how}: its time is over, {off_ms}");
            });
        }
    }
}

#[test]
fn a_clock_that_was_wrong_at_an_earlier_start_is_forgotten_with_the_next_access() {
    let (directory, clocks) = (TestDirectory::new(), clocks());
    clocks.set_ms(BEGIN_MS + HOUR_MS);
    with_engine(&directory, &clocks, |engine| create(engine, "s", sliding()));
    clocks.set_ms(BEGIN_MS);
    with_engine(&directory, &clocks, |engine| use_by(engine, "s", "append"));
    clocks.set_ms(BEGIN_MS + TTL_S * 1100);
    with_engine(&directory, &clocks, |engine| {
        assert!(!lives(engine, "s"));
    });
}

/// Forks the source where it ends; its bytes are written for the fork first, if they are not.
fn fork(engine: &Engine, path: &str, source_path: &str) -> Vec<u8> {
    let request = CreateRequest {
        fork: Some(ForkRequest {
            source_path,
            offset: None,
            sub_offset: 0,
        }),
        ..CreateRequest::default()
    };
    let attempt = || engine.create(path, &request, b"", engine.now_ms());
    let mut made = attempt();
    if matches!(made, Err(Undone::Wait)) {
        engine.checkpoint().expect("checkpoint");
        made = attempt();
    }
    assert!(made.is_ok_and(|created| created.new), "{path}");
    engine.local_read(path, "-1", 1_000).expect("read").body
}

#[test]
fn a_wall_clock_that_is_set_takes_nothing_from_a_fork_of_bytes_in_memory() {
    for to_ms in [BEGIN_MS + HOUR_MS, BEGIN_MS - HOUR_MS] {
        let (directory, clocks) = (TestDirectory::new(), clocks());
        with_engine(&directory, &clocks, |engine| {
            let ephemeral = CreateRequest {
                class: Some(Class::Ephemeral),
                ..CreateRequest::default()
            };
            create(engine, "source", ephemeral);
            engine.local_append("source", b"one,").expect("appended");
            assert_eq!(fork(engine, "before", "source"), b"one,");
            clocks.set_ms(to_ms);
            clocks.pass_ms(1);
            engine.local_append("source", b"two,").expect("appended");
            assert_eq!(fork(engine, "behind", "source"), b"one,two,");
        });
    }
}
