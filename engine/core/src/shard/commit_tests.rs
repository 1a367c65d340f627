//! What is shown only moves forward, however writer and syncer overtake each other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::model::{Class, Stage};
use crate::shard::engine::Engine;
use crate::shard::write::{Appended, WriteScratch};
use crate::stream::append::AppendRequest;
use crate::stream::handle::Stream;

/// An engine on which nothing is committed unless the test does it.
fn engine_with(directory: &TestDirectory, class: Class, paths: &[&str]) -> Arc<Engine> {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    let engine = opened.engine;
    std::thread::scope(|scope| {
        let committing = scope.spawn(|| engine.shard.run_commit_thread());
        for path in paths {
            let created = engine.local_create(path, "text/plain", Some(class));
            assert!(created.expect("created"));
        }
        engine.shard.stop_threads();
        committing.join().expect("commit thread");
    });
    engine
}

fn stream(engine: &Engine, path: &str) -> Arc<Stream> {
    let found = engine.find(path).ok().flatten();
    found.expect("there")
}

fn append(engine: &Engine, stream: &Arc<Stream>, bytes: &[u8], close: bool) -> Appended {
    let request = AppendRequest {
        content_type: Some(b"text/plain"),
        body_empty: bytes.is_empty(),
        close,
        ..AppendRequest::default()
    };
    let (records, now_ms) = (Ok(u32::from(!bytes.is_empty())), engine.now_ms());
    let mut scratch = WriteScratch::default();
    let appended = engine.append(stream, &request, bytes, records, now_ms, &mut scratch);
    appended.ok().expect("staged")
}

/// A batch is written and handed to the sync; before the writer has shown anything of it, the sync is over. The lock of
/// the batch's first stream holds the writer there.
#[test]
fn a_sync_that_overtakes_the_writer_stays_shown_and_acknowledges_nothing_unseen() {
    let directory = TestDirectory::new();
    let engine = engine_with(&directory, Class::Disk, &["held", "closed"]);
    let shard = &engine.shard;
    let (held, closed) = (stream(&engine, "held"), stream(&engine, "closed"));
    let waits = append(&engine, &held, b"seen when acknowledged", false);
    assert_eq!(waits.gate.stage, Stage::Written);
    append(&engine, &closed, b"last", false);
    let closing = append(&engine, &closed, b"", true);
    assert_eq!(closing.gate.stage, Stage::Synced);

    let pause = held.lock();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| shard.write(shard.writer.lock(), None));
        let deadline = Instant::now() + Duration::from_secs(60);
        while shard.unsynced.lock().files.is_empty() {
            assert!(Instant::now() < deadline, "the batch was never written");
            std::thread::yield_now();
        }
        assert!(shard.sync(&mut shard.syncer.lock(), None));
        assert!(shard.reached(closing.gate), "the close is acknowledged");
        assert!(closed.lock().visible.closed);
        let unseen = pause.visible.tail < pause.tail;
        let acknowledged = shard.reached(waits.gate);
        drop(pause);
        assert!(writing.join().expect("writer"));
        assert!(unseen && !acknowledged, "acknowledged before it is visible");
    });
    assert!(shard.reached(waits.gate));
    assert!(closed.lock().visible.closed, "a close was taken back");
    assert_eq!(closed.lock().visible.tail, 4);
    assert_eq!(held.lock().visible.tail, 22);
}

/// A delete says nothing new about tail and close: what its batch shows of them stays.
#[test]
fn a_delete_in_the_batch_of_a_close_takes_nothing_back() {
    let directory = TestDirectory::new();
    let engine = engine_with(&directory, Class::Fsync, &["source"]);
    let source = stream(&engine, "source");
    append(&engine, &source, b"last", true);
    engine
        .delete(&source, engine.now_ms())
        .ok()
        .expect("staged");
    assert!(engine.shard.commit(None));
    let state = source.lock();
    assert!(state.visible.closed);
    assert_eq!(state.visible.tail, 4);
}
