//! What is shown only moves forward, however writer and syncer overtake each other; and nothing is told that is not final.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::codec::ProducerTag;
use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::model::{Class, Stage};
use crate::shard::engine::{Engine, Undone};
use crate::shard::write::{Appended, WriteScratch};
use crate::stream::append::AppendRequest;
use crate::stream::handle::Stream;
use crate::stream::lifecycle::CreateRequest;

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
        close,
        ..AppendRequest::default()
    };
    append_as(engine, stream, bytes, request)
}

fn append_as(
    engine: &Engine,
    stream: &Arc<Stream>,
    bytes: &[u8],
    request: AppendRequest<'_>,
) -> Appended {
    let request = AppendRequest {
        content_type: Some(b"text/plain"),
        body_empty: bytes.is_empty(),
        ..request
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

/// The create of a weak stream is being synced when an append comes, which is shown with the next sync. Who repeats it, or
/// the create, is told no earlier.
#[test]
fn a_repetition_is_acknowledged_when_the_append_can_be_read() {
    let directory = TestDirectory::new();
    for class in [Class::Disk, Class::Memory] {
        let engine = engine_with(&directory, class, &[]);
        let shard = &engine.shard;
        let request = CreateRequest {
            content_type: Some("text/plain"),
            class: Some(class),
            ..CreateRequest::default()
        };
        let create = || {
            let created = engine.create(class.name(), &request, b"", engine.now_ms());
            created.ok().expect("staged")
        };
        let created = create();
        assert!(shard.write(shard.writer.lock(), None));
        let once = || {
            let producer = Some(ProducerTag {
                id: b"p",
                epoch: 0,
                seq: 0,
            });
            let request = AppendRequest {
                producer,
                ..AppendRequest::default()
            };
            append_as(&engine, &created.stream, b"once", request)
        };
        let (first, again) = (once(), once());
        assert_eq!((first.duplicate, again.duplicate), (false, true));
        let named = create();
        assert!(!named.new && named.offset == first.offset);
        let gates = [first.gate, again.gate, named.gate];
        assert!(shard.sync(&mut shard.syncer.lock(), None));
        assert!(shard.reached(created.gate));
        let hidden = created.stream.lock().visible.tail == 0;
        assert!(hidden, "it is in the next batch");
        let told = gates.into_iter().chain([once().gate]);
        assert_eq!(told.filter(|gate| shard.reached(*gate)).count(), 0);
        assert!(shard.commit(None));
        assert_eq!(created.stream.lock().visible.tail, 4);
        assert!(gates.iter().all(|gate| shard.reached(*gate)));
    }
}

/// What a stream is told to be while a change waits for its sync is the class before it: that must have been in force.
#[test]
fn a_change_of_class_waits_for_the_one_before() {
    let directory = TestDirectory::new();
    let engine = engine_with(&directory, Class::Fsync, &["stream"]);
    let stream = stream(&engine, "stream");
    let told = || stream.lock().class_at(engine.shard.synced());
    let change = |class| engine.set_class(&stream, class, engine.now_ms());
    let first = change(Class::Disk).ok().expect("staged");
    assert!(!engine.shard.reached(first));
    let next = change(Class::Memory);
    assert_eq!(told(), Class::Fsync, "nothing else was ever in force");
    assert!(matches!(next, Err(Undone::Wait)));
    assert!(engine.shard.commit(None));
    assert_eq!(told(), Class::Disk);
    let next = change(Class::Memory).ok().expect("staged");
    assert_eq!(told(), Class::Disk);
    assert!(engine.shard.commit(None) && engine.shard.reached(next));
    assert_eq!(told(), Class::Memory);
}
