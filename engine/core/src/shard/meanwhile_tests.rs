//! What comes to a path while a create or a checkpoint stands still at the disk.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::ErrorCode;
use crate::io::OpenMode;
use crate::io::tests::TestDirectory;
use crate::model::Offset;
use crate::shard::adopt::{CommitRequest, CommitStage};
use crate::shard::engine::Engine;
use crate::shard::watched_tests::{Watcher, with_engine};
use crate::stream::lifecycle::{CreateRequest, ForkRequest};

const PACKS: &str = "packs";

/// What stands still next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    ReadPack,
    SyncPacks,
}

/// One call of a kind says that it was reached, and stands still until the test has ended its `Still`.
#[derive(Default)]
struct Holds(Mutex<Option<Held>>);

struct Held {
    call: Call,
    says: Sender<()>,
    waits: Receiver<()>,
}

struct Still {
    reached: Receiver<()>,
    /// Dropped with the rest when a test fails: nothing stands still for ever.
    _go_on: Sender<()>,
}

impl Holds {
    fn hold(&self, call: Call) -> Still {
        let ((says, reached), (_go_on, waits)) = (channel(), channel());
        *self.0.lock() = Some(Held { call, says, waits });
        Still { reached, _go_on }
    }

    fn pass(&self, call: Call) {
        let taken = self.0.lock().take_if(|held| held.call == call);
        if let Some(held) = taken {
            held.says.send(()).ok();
            held.waits.recv().ok();
        }
    }
}

impl Still {
    fn is_reached(&self) {
        let reached = self.reached.recv_timeout(Duration::from_secs(60));
        reached.expect("the call was never made");
    }
}

impl Watcher for Holds {
    fn opens(&self, path: &str, _mode: OpenMode) -> bool {
        path.starts_with(PACKS)
    }
    fn reads(&self) {
        self.pass(Call::ReadPack);
    }
    fn syncs_directory(&self, path: &str) {
        if path == PACKS {
            self.pass(Call::SyncPacks);
        }
    }
}

fn create(engine: &Engine, path: &str) {
    let created = engine.local_create(path, "text/plain", None);
    assert!(created.expect("created"));
}

/// Whether the fork is a new stream.
fn fork(engine: &Engine, path: &str, source_path: &str, offset: Offset) -> Result<bool, ErrorCode> {
    let request = CreateRequest {
        fork: Some(ForkRequest {
            source_path,
            offset: Some(offset),
            sub_offset: 0,
        }),
        ..CreateRequest::default()
    };
    let made = engine.until_done(|| {
        let created = engine.create(path, &request, b"", engine.now_ms())?;
        Ok((created.new, created.gate))
    });
    made.map_err(|refusal| refusal.code)
}

fn content(engine: &Engine, path: &str) -> Vec<u8> {
    let read = engine.local_read(path, "-1", 1 << 20).expect("read");
    assert!(read.up_to_date && read.gap.is_none());
    read.body
}

fn commit(engine: &Engine, epoch: u64, path: &str, rows: &[&[u8]]) {
    let id = format!("stage-{epoch}");
    let rows: Vec<(&str, &[u8])> = rows.iter().map(|row| (path, *row)).collect();
    let staged = engine.local_stage(&id, &rows).expect("staged");
    let request = CommitRequest {
        producer: "job",
        epoch,
        streams: Vec::new(),
        stages: vec![CommitStage {
            id: &id,
            checksum: staged.record.head.checksum,
        }],
    };
    engine.local_commit(&request).expect("committed");
}

fn packs(directory: &Path) -> usize {
    let listed = std::fs::read_dir(directory.join(PACKS));
    listed.expect("lists").count()
}

/// The late create stands at the cold bytes of its source. Who comes meanwhile is acknowledged, written to the catalog and
/// leaves memory: nothing there tells the late one of him.
#[test]
fn a_create_that_was_slow_meets_the_stream_that_came_meanwhile() {
    for (late, kind) in [
        (Err(ErrorCode::StreamConflict), "plain"),
        (Ok(false), "fork"),
    ] {
        let directory = TestDirectory::new();
        let middle = with_engine(directory.path(), |engine, _: &Holds| {
            create(engine, "source");
            let append = |_| {
                engine
                    .local_append("source", &[b's'; 300])
                    .expect("appended")
            };
            let offsets: Vec<Offset> = (0..100).map(append).collect();
            engine.checkpoint().expect("checkpoint");
            offsets[50]
        });
        let acknowledged = with_engine(directory.path(), |engine, holds: &Holds| {
            let still = holds.hold(Call::ReadPack);
            std::thread::scope(|scope| {
                let slow = scope.spawn(|| fork(engine, "path", "source", middle));
                still.is_reached();
                match kind {
                    "plain" => create(engine, "path"),
                    _ => assert_eq!(fork(engine, "path", "source", middle), Ok(true)),
                }
                engine
                    .local_append("path", b"acknowledged")
                    .expect("appended");
                engine.checkpoint().expect("checkpoint");
                engine.directory.evict(0);
                assert!(engine.directory.in_memory_at("path").is_none());
                drop(still);
                assert_eq!(slow.join().expect("ends"), late);
            });
            content(engine, "path")
        });
        assert!(
            acknowledged.ends_with(b"acknowledged"),
            "{kind}: it was replaced"
        );
        with_engine(directory.path(), |engine, _: &Holds| {
            assert_eq!(content(engine, "path"), acknowledged);
        });
    }
}

/// The checkpoint has its number and stands before the streams that it takes. One of them comes and goes behind that
/// number: a restart replays its commit, and needs the pack.
#[test]
fn a_stream_that_comes_and_goes_during_a_checkpoint_is_replayed() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), |engine, holds: &Holds| {
        create(engine, "stays");
        // The removed file of a stage that was copied makes the checkpoint sync the directory.
        commit(engine, 1, "stays", &[b"copied"]);
        engine.sweep_stages(engine.now_ms());
        assert_eq!(packs(directory.path()), 0);
        let still = holds.hold(Call::SyncPacks);
        std::thread::scope(|scope| {
            let checkpoint = scope.spawn(|| engine.checkpoint());
            still.is_reached();
            create(engine, "short");
            commit(engine, 2, "short", &[&[b'y'; 1000][..]; 1000]);
            assert_eq!(
                engine.cold.adopted_sections(),
                1,
                "read where it was staged"
            );
            assert!(engine.local_delete("short").expect("deleted"));
            drop(still);
            checkpoint.join().expect("ends").expect("checkpoint");
        });
    });
    for _ in 0..2 {
        with_engine(directory.path(), |engine, _: &Holds| {
            assert!(engine.local_tail("short").expect("told").is_none());
            assert_eq!(content(engine, "stays"), b"copied");
            engine.checkpoint().expect("checkpoint");
            assert_eq!(
                packs(directory.path()),
                1,
                "the pack has gone with its stream"
            );
        });
    }
}
