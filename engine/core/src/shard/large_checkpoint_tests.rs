//! A checkpoint of many stages: what it does at the disk, counted, and what goes on beside it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::config::Config;
use crate::io::tests::TestDirectory;
use crate::io::{DirEntry, Disk, DiskFile, Doors, OpenMode};
use crate::log::pack;
use crate::shard::adopt::{CommitRequest, CommitStage};
use crate::shard::engine::Engine;

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

struct CountingDisk {
    disk: Arc<dyn Disk>,
    counts: Arc<Counts>,
}

struct CountingFile {
    file: Arc<dyn DiskFile>,
    counts: Arc<Counts>,
}

impl Disk for CountingDisk {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let file = self.disk.open(path, mode)?;
        if path.starts_with("wal/") && mode == OpenMode::CreateNew {
            self.counts.log_files.fetch_add(1, Ordering::Relaxed);
        }
        let pack = path.strip_prefix("packs/").and_then(pack::parse_name);
        if pack.is_none_or(|number| u64::from(number) >= STAGES) {
            return Ok(file);
        }
        self.counts.opened.fetch_add(1, Ordering::Relaxed);
        let counts = Arc::clone(&self.counts);
        Ok(Arc::new(CountingFile { file, counts }))
    }
    fn create_dir_all(&self, path: &str) -> io::Result<()> {
        self.disk.create_dir_all(path)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn remove(&self, path: &str) -> io::Result<()> {
        self.disk.remove(path)
    }
    fn list(&self, dir: &str) -> io::Result<Vec<DirEntry>> {
        self.disk.list(dir)
    }
    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        self.disk.sync_dir(dir)
    }
    fn free_bytes(&self) -> io::Result<u64> {
        self.disk.free_bytes()
    }
}

impl DiskFile for CountingFile {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let read = self.file.read_at(buffer, position)?;
        let bytes = &self.counts.read_bytes;
        bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        self.file.write_at(bytes, position)
    }
    fn sync(&self) -> io::Result<()> {
        let counts = &self.counts;
        counts.synced.fetch_add(1, Ordering::Relaxed);
        let log_files = counts.log_files.load(Ordering::Relaxed);
        counts.log_files_before.store(log_files, Ordering::Relaxed);
        let pause = counts.sync_takes_ms.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(pause));
        self.file.sync()
    }
    fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all()
    }
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }
}

/// Runs `work` beside the commit thread; the end is as after a kill.
fn with_engine<T>(directory: &Path, work: impl FnOnce(&Engine, &Counts) -> T) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let mut doors = Doors::real(directory).expect("doors");
    let counts = Arc::new(Counts::default());
    doors.disk = Arc::new(CountingDisk {
        disk: Arc::clone(&doors.disk),
        counts: Arc::clone(&counts),
    });
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    let engine = opened.engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine, &counts);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
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
    with_engine(directory.path(), |engine, counts| {
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
    with_engine(directory.path(), |engine, _| {
        assert_eq!(engine.stages.waiting(), (0, 0), "a stage came back");
        check(engine);
    });
}

#[test]
fn a_checkpoint_of_many_stages_keeps_the_next_log_file_ready() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), |engine, counts| {
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
