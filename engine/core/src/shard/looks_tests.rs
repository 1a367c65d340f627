//! Those who only read do without the producers of streams that have left memory; those who decide never do.

use std::sync::Arc;

use crate::codec::ProducerTag;
use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::io::wanted::{Key, Wanted};
use crate::limits::{PRODUCER_BYTES_MIN, PRODUCERS_PER_STREAM_MAX};
use crate::shard::engine::Engine;
use crate::shard::write::{Appended, WriteScratch};
use crate::stream::append::AppendRequest;

const PRODUCERS: usize = 300;

fn producer(number: usize) -> String {
    format!("{number:0>200}")
}

fn append(engine: &Engine, path: &str, number: usize, seq: u64) -> Appended {
    let stream = engine.find(path).ok().flatten().expect("it is there");
    let id = producer(number);
    let request = AppendRequest {
        content_type: Some(b"text/plain"),
        producer: Some(ProducerTag {
            id: id.as_bytes(),
            epoch: 0,
            seq,
        }),
        ..AppendRequest::default()
    };
    let now_ms = engine.now_ms();
    let mut scratch = WriteScratch::default();
    let appended = engine.append(&stream, &request, b"x", Ok(1), now_ms, &mut scratch);
    appended.ok().expect("appended")
}

/// Streams with many producers each, which have left memory.
fn fill(engine: &Engine, streams: usize, producers: usize) {
    for stream in 0..streams {
        let path = format!("s/{stream}");
        assert!(engine.local_create(&path, "text/plain", None).is_ok());
        for number in 0..producers {
            assert!(!append(engine, &path, number, 0).duplicate);
            if number % 5000 == 4999 {
                engine.shard.kick();
                engine.local_append(&path, b"y").expect("the log has room");
            }
        }
    }
    leave(engine);
}

fn leave(engine: &Engine) {
    engine.checkpoint().expect("checkpoint");
    engine.directory.evict(0);
    assert_eq!(engine.metrics.producer_bytes.get(), 0);
}

fn with_engine(directory: &TestDirectory, work: impl FnOnce(&Arc<Engine>)) {
    let config = Config {
        listen: false,
        reactors: 1,
        streams_cached_max: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    let engine = opened.engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
}

#[test]
fn who_only_reads_brings_no_producers_into_memory() {
    with_engine(&TestDirectory::new(), |engine| {
        fill(engine, 3, PRODUCERS);
        let all = engine.all_matching("s/", None, &|_| Ok(true));
        let all = all.ok().expect("found").streams;
        assert_eq!(all.len(), 3);
        for stream in &all {
            let mut state = stream.lock();
            state.count_memory(&engine.metrics);
            state.dirty = false;
        }
        assert_eq!(engine.metrics.producer_bytes.get(), 0, "a pattern");
        let mut seen = 0;
        let walked = engine.directory.walk("", "", &|_| true, &mut |stream| {
            seen += 1;
            stream.lock().count_memory(&engine.metrics);
            true
        });
        assert!(walked.is_ok() && seen == 3);
        assert_eq!(engine.metrics.producer_bytes.get(), 0, "a listing");
        let held: Vec<_> = (0..3)
            .map(|number| engine.find_to_read(&format!("s/{number}")))
            .map(|found| found.ok().flatten().expect("it is there"))
            .collect();
        for stream in &held {
            assert_eq!(
                engine
                    .settled_tail(stream)
                    .ok()
                    .flatten()
                    .expect("told")
                    .bytes,
                300
            );
        }
        assert_eq!(engine.metrics.producer_bytes.get(), 0, "a read");
    });
}

#[test]
fn a_stream_that_is_read_knows_its_producers_when_one_appends() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        fill(engine, 1, PRODUCERS);
        let read = engine.find_to_read("s/0").ok().flatten().expect("read");
        assert!(append(engine, "s/0", 7, 0).duplicate);
        assert!(engine.metrics.producer_bytes.get() > 0);
        let written = engine.find("s/0").ok().flatten().expect("found");
        assert!(Arc::ptr_eq(&read, &written), "one handle");
        assert!(!append(engine, "s/0", 7, 1).duplicate);
        drop((read, written));
        leave(engine);
        let by_id = engine.find_to_read("s/0").ok().flatten().expect("read").id;
        let by_id = engine.directory.get_by_id(by_id).expect("found");
        let by_id = by_id.expect("it is there");
        assert!(by_id.lock().producer(producer(7).as_bytes()).is_some());
        assert!(append(engine, "s/0", 7, 1).duplicate);
    });
    with_engine(&directory, |engine| {
        assert!(engine.find_to_read("s/0").ok().flatten().is_some());
        assert!(append(engine, "s/0", 7, 1).duplicate);
    });
}

#[test]
fn damage_that_a_reader_finds_is_written_with_the_producers() {
    let directory = TestDirectory::new();
    with_engine(&directory, |engine| {
        fill(engine, 1, PRODUCERS);
        let read = engine.find_to_read("s/0").ok().flatten().expect("read");
        {
            let mut state = read.lock();
            assert!(state.add_damage((3, 5), true));
            engine.directory.mark_dirty(&read, &mut state.dirty);
        }
        drop(read);
        leave(engine);
        let read = engine.find_to_read("s/0").ok().flatten().expect("read");
        assert_eq!(read.lock().damaged(), [(3, 5)]);
        assert!(append(engine, "s/0", PRODUCERS - 1, 0).duplicate);
    });
}

/// Eviction comes now and then; appends of known producers to many streams load more than there is room for meanwhile.
#[test]
fn loads_above_the_bound_let_others_leave_at_once() {
    with_engine(&TestDirectory::new(), |engine| {
        fill(engine, 1, PRODUCERS_PER_STREAM_MAX);
        let loaded = engine.find("s/0").ok().flatten().expect("found");
        let path = Key::Path(loaded.path.clone());
        let each = engine.metrics.producer_bytes.get();
        assert!(each > 0);
        drop(loaded);
        // As if others had taken the rest.
        engine.metrics.producer_bytes.add(PRODUCER_BYTES_MIN);
        engine.count_load_thread();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        std::thread::scope(|scope| {
            scope.spawn(|| engine.run_loads());
            for (done, key) in [(1, path), (2, Key::Path("s/absent".into()))] {
                assert!(engine.submit_load(Wanted { key, fetch: None }, Some((0, 1)), true));
                while engine.metrics.loads.get() < done || engine.metrics.loads_waiting.get() > 0 {
                    assert!(std::time::Instant::now() < deadline);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                // Who waited has looked.
                drop(engine.loads.take_loaded(0));
            }
            assert!(engine.loads.stop(deadline));
        });
        assert_eq!(engine.metrics.producer_bytes.get(), PRODUCER_BYTES_MIN);
        engine.metrics.producer_bytes.sub(PRODUCER_BYTES_MIN);
    });
}
