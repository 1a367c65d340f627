//! A disk that is slow to read, on demand, for tests of a real process.
//!
//! Stands before the real one where `MILLSTREAM_FAULT_READ_DELAY_MS` asks for it. It has a page cache of its own that is
//! empty at the start: the first read of each block, and the first opening of each file, takes its time, whatever the
//! kernel has. The log is left out: it is read at the start only.
//!
//! Invariant: it only waits. Bytes, lengths and errors are those of the disk behind it.

use std::collections::HashSet;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{DirEntry, Disk, DiskFile, OpenMode};

const BLOCK_BYTES: u64 = 64 * 1024;
const LOG_DIRECTORY: &str = "wal/";

pub struct SlowDisk {
    disk: Arc<dyn Disk>,
    cache: Arc<Cache>,
}

struct Cache {
    delay: Duration,
    /// Blocks by file and number. Grows with what a test reads.
    warm: Mutex<HashSet<(String, u64)>>,
}

impl Cache {
    fn missing(&self, path: &str, position: u64, len: usize) -> Vec<(String, u64)> {
        if len == 0 || path.starts_with(LOG_DIRECTORY) {
            return Vec::new();
        }
        let last = position.saturating_add(len as u64 - 1) / BLOCK_BYTES;
        let warm = self.warm.lock();
        (position / BLOCK_BYTES..=last)
            .map(|block| (path.to_owned(), block))
            .filter(|block| !warm.contains(block))
            .collect()
    }

    fn fetch(&self, missing: Vec<(String, u64)>) {
        if !missing.is_empty() {
            std::thread::sleep(self.delay);
            self.warm.lock().extend(missing);
        }
    }
}

impl SlowDisk {
    pub fn new(disk: Arc<dyn Disk>, delay_ms: u64) -> SlowDisk {
        let cache = Cache {
            delay: Duration::from_millis(delay_ms),
            warm: Mutex::default(),
        };
        SlowDisk {
            disk,
            cache: Arc::new(cache),
        }
    }
}

impl Disk for SlowDisk {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let file = self.disk.open(path, mode)?;
        if mode == OpenMode::Read {
            self.cache.fetch(self.cache.missing(path, u64::MAX, 1));
        }
        Ok(Arc::new(SlowFile {
            file,
            path: path.to_owned(),
            cache: Arc::clone(&self.cache),
        }))
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

struct SlowFile {
    file: Arc<dyn DiskFile>,
    path: String,
    cache: Arc<Cache>,
}

impl SlowFile {
    fn missing(&self, position: u64, len: usize) -> Vec<(String, u64)> {
        self.cache.missing(&self.path, position, len)
    }
}

impl DiskFile for SlowFile {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.cache.fetch(self.missing(position, buffer.len()));
        self.file.read_at(buffer, position)
    }

    fn read_once_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.cache.fetch(self.missing(position, buffer.len()));
        self.file.read_once_at(buffer, position)
    }

    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<Option<usize>> {
        if self.is_cached(position, buffer.len()) {
            self.file.read_cached_at(buffer, position)
        } else {
            Ok(None)
        }
    }

    fn is_cached(&self, position: u64, len: usize) -> bool {
        self.missing(position, len).is_empty()
    }

    fn another(&self) -> Option<Arc<dyn DiskFile>> {
        Some(Arc::new(SlowFile {
            file: Arc::clone(&self.file),
            path: self.path.clone(),
            cache: Arc::clone(&self.cache),
        }))
    }

    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        self.file.write_at(bytes, position)
    }

    fn sync(&self) -> io::Result<()> {
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

    fn send_to(&self, socket: RawFd, position: u64, count: usize) -> Option<io::Result<usize>> {
        self.cache.fetch(self.missing(position, count));
        self.file.send_to(socket, position, count)
    }

    fn raw_fd(&self) -> Option<RawFd> {
        self.file.raw_fd()
    }
}
