//! An engine on the real disk with somebody who watches its calls: to count them, or to let them stand still.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::config::Config;
use crate::io::{DirEntry, Disk, DiskFile, Doors, OpenMode};
use crate::shard::engine::Engine;

/// What is told before a call is made, and how much a read has given.
pub(super) trait Watcher: Default + Send + Sync + 'static {
    /// Whether the calls on this file are told, too.
    fn opens(&self, path: &str, mode: OpenMode) -> bool;
    fn reads(&self) {}
    fn has_read(&self, _bytes: usize) {}
    fn syncs(&self) {}
    fn syncs_directory(&self, _path: &str) {}
}

struct WatchedDisk<W> {
    disk: Arc<dyn Disk>,
    watcher: Arc<W>,
}

struct WatchedFile<W> {
    file: Arc<dyn DiskFile>,
    watcher: Arc<W>,
}

impl<W: Watcher> Disk for WatchedDisk<W> {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let file = self.disk.open(path, mode)?;
        if !self.watcher.opens(path, mode) {
            return Ok(file);
        }
        let watcher = Arc::clone(&self.watcher);
        Ok(Arc::new(WatchedFile { file, watcher }))
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
        self.watcher.syncs_directory(dir);
        self.disk.sync_dir(dir)
    }
    fn free_bytes(&self) -> io::Result<u64> {
        self.disk.free_bytes()
    }
}

impl<W: Watcher> DiskFile for WatchedFile<W> {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.watcher.reads();
        let read = self.file.read_at(buffer, position)?;
        self.watcher.has_read(read);
        Ok(read)
    }
    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        self.file.write_at(bytes, position)
    }
    fn sync(&self) -> io::Result<()> {
        self.watcher.syncs();
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
pub(super) fn with_engine<T, W: Watcher>(
    directory: &Path,
    work: impl FnOnce(&Engine, &W) -> T,
) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let mut doors = Doors::real(directory).expect("doors");
    let watcher = Arc::new(W::default());
    doors.disk = Arc::new(WatchedDisk {
        disk: Arc::clone(&doors.disk),
        watcher: Arc::clone(&watcher),
    });
    let opened = Engine::open(config, doors, &mut |_| {}).expect("opens");
    let engine = opened.engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine, &watcher);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}
