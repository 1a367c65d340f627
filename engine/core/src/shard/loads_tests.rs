//! What a thread that must not wait is told, on a real directory: streams, absence, failures, and the bound.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::io::tests::TestDirectory;
use crate::io::wanted::{self, Key, Told, Wanted};
use crate::io::{Doors, OpenMode, check_at_hand, read_exact_at, write_all_at};
use crate::limits::LOADS_MAX;
use crate::shard::engine::{Engine, Undone};
use crate::stream::lifecycle::{CreateRequest, ForkRequest};
use crate::stream::state::Life;

fn open(directory: &TestDirectory) -> Arc<Engine> {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    opened.engine
}

/// Has what was noted fetched as the threads do, and is told of it.
fn fetch(engine: &Engine) -> Told {
    let wanted = wanted::take_noted().expect("something was noted");
    assert!(engine.submit_load(wanted, Some((0, 7)), false));
    let wanted = engine.loads.next().expect("it is queued");
    let key = wanted.key.clone();
    let (told, kept) = wanted::waiting(|| engine.fetch(wanted));
    engine.hand_out(&key, &told, kept.as_ref());
    let loaded = engine.loads.take_loaded(0).pop().expect("handed out");
    assert_eq!(loaded.conn, 7);
    wanted::tell(vec![(loaded.key.clone(), loaded.told.clone())]);
    told
}

#[test]
fn a_stream_is_found_after_it_was_fetched_and_absence_holds_until_the_catalog_changes() {
    let directory = TestDirectory::new();
    let engine = open(&directory);
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let create = |path: &str| {
        engine
            .local_create(path, "text/plain", None)
            .expect("created")
    };
    create("there");
    engine.checkpoint().expect("checkpoint");
    engine.directory.evict(0);
    let reactor = Arc::clone(&engine);
    let looked = std::thread::spawn(move || {
        wanted::never_wait();
        let find = |path: &str| reactor.find(path);
        assert!(matches!(find("there"), Err(Undone::Wait)));
        assert!(matches!(fetch(&reactor), Told::AtHand));
        assert!(matches!(find("there"), Ok(Some(_))));
        // The walk has not been through the catalog, so that every path may be there.
        assert!(matches!(find("absent"), Err(Undone::Wait)));
        assert!(matches!(fetch(&reactor), Told::Absent(_)));
        assert!(matches!(find("absent"), Ok(None)));
        assert!(matches!(find("other"), Err(Undone::Wait)));
    });
    looked.join().expect("told");
    // Made, written and gone from memory since it was told to be absent: that holds no more.
    let version = engine.directory.catalog().version();
    create("absent");
    engine.checkpoint().expect("checkpoint");
    engine.directory.evict(0);
    let reactor = Arc::clone(&engine);
    let looked = std::thread::spawn(move || {
        wanted::never_wait();
        let key = Key::Path("absent".into());
        wanted::tell(vec![(key.clone(), Told::Absent(version))]);
        assert!(matches!(reactor.find("absent"), Err(Undone::Wait)));
        assert!(wanted::take_noted().is_some_and(|wanted| wanted.key == key));
        // New paths need no look at all once the walk is through.
        let mut cursor = Some(Vec::new());
        while cursor.is_some() {
            reactor.load_expiring(&mut cursor);
        }
        assert!(matches!(reactor.find("new"), Ok(None)));
        assert!(matches!(reactor.find("absent"), Err(Undone::Wait)));
    });
    looked.join().expect("told");
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
}

#[test]
fn the_delete_of_a_last_fork_fetches_the_chain_that_it_purges() {
    let directory = TestDirectory::new();
    let engine = open(&directory);
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let chain = ["oldest", "middle", "fork"];
    let created = engine.local_create(chain[0], "text/plain", None);
    assert!(created.expect("created"));
    for pair in chain.windows(2) {
        let request = CreateRequest {
            fork: Some(ForkRequest {
                source_path: pair[0],
                offset: None,
                sub_offset: 0,
            }),
            ..CreateRequest::default()
        };
        let forked = engine.until_done(|| {
            let made = engine.create(pair[1], &request, b"", engine.now_ms())?;
            Ok(((), made.gate))
        });
        assert!(forked.is_ok());
    }
    assert!(engine.local_delete("middle").expect("hidden"));
    assert!(engine.local_delete("oldest").expect("hidden"));
    engine.checkpoint().expect("checkpoint");
    engine.directory.evict(0);
    let fork = engine.find("fork").ok().flatten().expect("loaded");
    let reactor = Arc::clone(&engine);
    let deleted = std::thread::spawn(move || {
        wanted::never_wait();
        while let Err(undone) = reactor.delete(&fork, reactor.now_ms()) {
            assert!(matches!(undone, Undone::Wait));
            assert!(matches!(fetch(&reactor), Told::AtHand));
        }
        for path in ["fork", "middle", "oldest"] {
            let stream = reactor.directory.in_memory_at(path);
            let life = stream.expect("was fetched").lock().life;
            assert_eq!(life, Life::Gone, "{path}");
        }
    });
    let deleted = deleted.join();
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    deleted.expect("gone at once");
}

#[test]
fn bytes_are_read_after_they_were_fetched_and_what_fails_fails_for_who_wanted_it() {
    let directory = TestDirectory::new();
    let engine = open(&directory);
    let file = engine
        .doors
        .disk
        .open("bytes", OpenMode::CreateNew)
        .unwrap();
    let bytes = vec![7u8; 300_000];
    write_all_at(&*file, &bytes, 0).unwrap();
    file.sync_all().unwrap();
    // SAFETY: takes numbers only; the descriptor is open as long as `file`.
    unsafe { libc::posix_fadvise(file.raw_fd().unwrap(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    let reader = std::thread::spawn(move || {
        wanted::never_wait();
        let mut buffer = vec![0; bytes.len()];
        // A file system in memory has everything at hand.
        while let Err(error) = read_exact_at(&*file, &mut buffer, 0) {
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
            assert!(matches!(fetch(&engine), Told::AtHand));
        }
        assert_eq!(buffer, bytes);
        assert!(check_at_hand(&*file, 0, bytes.len()).is_ok());
        let beyond = check_at_hand(&*file, 1 << 30, 10).unwrap_err();
        assert_eq!(beyond.kind(), std::io::ErrorKind::WouldBlock);
        assert!(matches!(fetch(&engine), Told::Failed(_)));
        let beyond = check_at_hand(&*file, 1 << 30, 10).unwrap_err();
        assert_eq!(beyond.kind(), std::io::ErrorKind::UnexpectedEof);
    });
    reader.join().expect("read");
}

#[test]
fn what_may_wait_is_bounded_but_for_answers_under_way() {
    let engine = open(&TestDirectory::new());
    let wanted = |number: usize| Wanted {
        key: Key::Stream(number as u64),
        fetch: None,
    };
    let submit = |number, under_way| engine.submit_load(wanted(number), Some((0, 1)), under_way);
    assert!((0..LOADS_MAX).all(|number| submit(number, false)));
    assert!(!submit(LOADS_MAX, false));
    assert!(submit(0, false), "others wait for it already");
    assert!(submit(LOADS_MAX, true));
    assert_eq!(engine.metrics.loads_waiting.get(), LOADS_MAX as u64 + 1);
    // A thread that stands still does not keep others from ending.
    engine.count_load_thread();
    assert!(
        !engine
            .loads
            .stop(Instant::now() + Duration::from_millis(10))
    );
}
