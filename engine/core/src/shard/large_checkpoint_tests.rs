//! A checkpoint of many stages: what it does at the disk, counted, and what goes on beside it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::io::OpenMode;
use crate::io::tests::TestDirectory;
use crate::log::pack;
use crate::shard::adopt::{CommitRequest, CommitStage};
use crate::shard::engine::Engine;
use crate::shard::watched_tests::{Watcher, with_engine};

/// More than a checkpoint keeps open.
const STAGES: u64 = 70;
const STREAMS: u64 = 20;
const SECTIONS: u64 = STAGES * STREAMS;
/// More bytes than go into the log.
const ROW: [u8; 200] = [b'r'; 200];

/// What was done to the stages, which are the first packs, and log files made.
#[derive(Default)]
struct Counts {
    opened: AtomicU64,
    read_bytes: AtomicU64,
    synced: AtomicU64,
    log_files: AtomicU64,
    /// Those that were there when a stage was synced last.
    log_files_before: AtomicU64,
    sync_takes_ms: AtomicU64,
}

impl Counts {
    fn take(&self) -> [u64; 3] {
        [&self.opened, &self.read_bytes, &self.synced].map(|count| count.swap(0, Ordering::Relaxed))
    }
}

impl Watcher for Counts {
    fn opens(&self, path: &str, mode: OpenMode) -> bool {
        if path.starts_with("wal/") && mode == OpenMode::CreateNew {
            self.log_files.fetch_add(1, Ordering::Relaxed);
        }
        let pack = path.strip_prefix("packs/").and_then(pack::parse_name);
        let is_stage = pack.is_some_and(|number| u64::from(number) < STAGES);
        self.opened
            .fetch_add(u64::from(is_stage), Ordering::Relaxed);
        is_stage
    }
    fn has_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
    fn syncs(&self) {
        self.synced.fetch_add(1, Ordering::Relaxed);
        let log_files = self.log_files.load(Ordering::Relaxed);
        self.log_files_before.store(log_files, Ordering::Relaxed);
        let pause = self.sync_takes_ms.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(pause));
    }
}

fn paths() -> Vec<String> {
    (0..STREAMS).map(|number| format!("s{number}")).collect()
}

/// One commit of many stages, each with a row for every stream.
fn commit(engine: &Engine) {
    let paths = paths();
    for path in &paths {
        let created = engine.local_create(path, "text/plain", None);
        assert!(created.expect("created"));
    }
    let rows: Vec<(&str, &[u8])> = paths.iter().map(|path| (&path[..], &ROW[..])).collect();
    let staged: Vec<_> = (0..STAGES)
        .map(|number| {
            engine
                .local_stage(&number.to_string(), &rows)
                .expect("staged")
        })
        .collect();
    let stages = staged.iter().map(|staged| CommitStage {
        id: &staged.record.head.id,
        checksum: staged.record.head.checksum,
    });
    let request = CommitRequest {
        producer: "job",
        epoch: 1,
        streams: Vec::new(),
        stages: stages.collect(),
    };
    engine.local_commit(&request).expect("committed");
    assert_eq!(engine.cold.adopted_sections(), SECTIONS);
}

fn check(engine: &Engine) {
    for path in paths() {
        let read = engine.local_read(&path, "-1", 1 << 20).expect("read");
        assert!(read.up_to_date && read.gap.is_none());
        assert_eq!(read.body, ROW.repeat(STAGES as usize));
    }
}

#[test]
fn a_checkpoint_opens_syncs_and_reads_each_stage_once() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), |engine, counts: &Counts| {
        commit(engine);
        let file_bytes = 1024 + STREAMS * (ROW.len() as u64 + 400);
        counts.take();
        engine.checkpoint().expect("checkpoint");
        let [opened, read_bytes, synced] = counts.take();
        assert_eq!(synced, STAGES);
        assert!(opened <= 2 * STAGES, "{opened} opened");
        let once = STAGES * file_bytes + SECTIONS * ROW.len() as u64;
        assert!(read_bytes <= once, "{read_bytes} bytes read");
        check(engine);
    });
    with_engine(directory.path(), |engine, _: &Counts| {
        assert_eq!(engine.stages.waiting(), (0, 0), "a stage came back");
        check(engine);
    });
}

#[test]
fn a_checkpoint_of_many_stages_keeps_the_next_log_file_ready() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), |engine, counts: &Counts| {
        commit(engine);
        counts.sync_takes_ms.store(2, Ordering::Relaxed);
        let before = counts.log_files.load(Ordering::Relaxed);
        engine.checkpoint().expect("checkpoint");
        let meanwhile = counts.log_files_before.load(Ordering::Relaxed);
        assert_eq!(meanwhile, before + 1, "nothing was prepared meanwhile");
        assert!(
            engine.maintenance.pieces_done() >= SECTIONS,
            "a stop sees it get on"
        );
    });
}
