//! Tests of the doors, and two disks for the tests above them: a temporary directory of the real file
//! system, and a disk in memory that loses what was not synced.

use super::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// A directory that goes away with the test.
pub(crate) struct TestDirectory {
    path: PathBuf,
}

impl TestDirectory {
    pub(crate) fn new() -> TestDirectory {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("millstream-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        TestDirectory { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(RealDisk::open(&self.path).unwrap())
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.path).unwrap();
    }
}

#[derive(Default)]
struct Node {
    current: Mutex<Vec<u8>>,
    durable: Mutex<Vec<u8>>,
}

#[derive(Clone, Default)]
struct Names {
    files: BTreeMap<String, Arc<Node>>,
    directories: BTreeSet<String>,
}

#[derive(Default)]
struct Shared {
    operations: AtomicU64,
    /// The operation from which on everything fails; 0 is never.
    fail_from: AtomicU64,
    open_now: AtomicUsize,
    open_peak: AtomicUsize,
}

/// A disk in memory. `power_cut` takes it back to what was synced, and to a random part of the rest.
#[derive(Default)]
pub(crate) struct CrashDisk {
    current: Mutex<Names>,
    durable: Mutex<Names>,
    shared: Arc<Shared>,
}

impl CrashDisk {
    pub(crate) fn new() -> Arc<CrashDisk> {
        Arc::new(CrashDisk::default())
    }

    pub(crate) fn operations(&self) -> u64 {
        self.shared.operations.load(Ordering::Relaxed)
    }

    /// Every changing operation from this number on fails; 0 heals the disk.
    pub(crate) fn fail_from(&self, operation: u64) {
        self.shared.fail_from.store(operation, Ordering::Relaxed);
    }

    pub(crate) fn open_peak(&self) -> usize {
        self.shared.open_peak.load(Ordering::Relaxed)
    }

    pub(crate) fn flip_bit(&self, path: &str, byte: u64, bit: u8) {
        let names = self.current.lock();
        names.files[path].current.lock()[byte as usize] ^= 1 << bit;
    }

    pub(crate) fn file_len(&self, path: &str) -> Option<usize> {
        self.current
            .lock()
            .files
            .get(path)
            .map(|node| node.current.lock().len())
    }

    pub(crate) fn truncate(&self, path: &str, len: usize) {
        self.current.lock().files[path].current.lock().truncate(len);
    }

    /// Loses names that were not synced; of unsynced bytes each 512-byte sector survives or not by `seed`.
    pub(crate) fn power_cut(&self, mut seed: u64) {
        let mut durable = self.durable.lock();
        let directories = durable.directories.clone();
        durable
            .files
            .retain(|path, _| directories.contains(parent(path)));
        for node in durable.files.values() {
            let mut after = node.durable.lock();
            for (sector, bytes) in node.current.lock().chunks(512).enumerate() {
                seed = seed
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                if seed >> 63 == 1 {
                    let end = sector * 512 + bytes.len();
                    let len = after.len().max(end);
                    after.resize(len, 0);
                    after[sector * 512..end].copy_from_slice(bytes);
                }
            }
            *node.current.lock() = after.clone();
        }
        *self.current.lock() = durable.clone();
    }
}

impl Shared {
    fn step(&self) -> io::Result<()> {
        let operation = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let fail_from = self.fail_from.load(Ordering::Relaxed);
        if fail_from != 0 && operation >= fail_from {
            return Err(io::Error::other(format!(
                "injected at operation {operation}"
            )));
        }
        Ok(())
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

impl Disk for CrashDisk {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let mut names = self.current.lock();
        let known = names.files.get(path).cloned();
        let node = match (known, mode) {
            (Some(_), OpenMode::CreateNew) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Some(node), _) => node,
            (None, OpenMode::Read | OpenMode::ReadWrite) => {
                return Err(io::ErrorKind::NotFound.into());
            }
            (None, OpenMode::CreateNew | OpenMode::CreateOrOpen) => {
                self.shared.step()?;
                if !parent(path).is_empty() && !names.directories.contains(parent(path)) {
                    return Err(io::ErrorKind::NotFound.into());
                }
                let node = Arc::new(Node::default());
                names.files.insert(path.to_owned(), node.clone());
                node
            }
        };
        let open = self.shared.open_now.fetch_add(1, Ordering::Relaxed) + 1;
        self.shared.open_peak.fetch_max(open, Ordering::Relaxed);
        Ok(Arc::new(CrashFile {
            node,
            shared: self.shared.clone(),
        }))
    }

    fn create_dir_all(&self, path: &str) -> io::Result<()> {
        self.shared.step()?;
        let mut part = path;
        while !part.is_empty() {
            self.current.lock().directories.insert(part.to_owned());
            part = parent(part);
        }
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.shared.step()?;
        let mut names = self.current.lock();
        let node = names.files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        names.files.insert(to.to_owned(), node);
        Ok(())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.shared.step()?;
        let removed = self.current.lock().files.remove(path);
        removed
            .map(|_| ())
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn list(&self, dir: &str) -> io::Result<Vec<DirEntry>> {
        let names = self.current.lock();
        let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
        let files = names
            .files
            .iter()
            .filter(|(path, _)| parent(path) == dir)
            .map(|(path, node)| DirEntry {
                name: name(path),
                len: node.current.lock().len() as u64,
                is_dir: false,
            });
        let directories = names.directories.iter().filter(|path| parent(path) == dir);
        let directories = directories.map(|path| DirEntry {
            name: name(path),
            len: 0,
            is_dir: true,
        });
        Ok(files.chain(directories).collect())
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        self.shared.step()?;
        let (current, mut durable) = (self.current.lock(), self.durable.lock());
        durable.directories.insert(String::new());
        durable.files.retain(|path, _| parent(path) != dir);
        durable
            .directories
            .retain(|path| path.is_empty() || parent(path) != dir);
        for (path, node) in current.files.iter().filter(|(path, _)| parent(path) == dir) {
            durable.files.insert(path.clone(), node.clone());
        }
        for path in current
            .directories
            .iter()
            .filter(|path| parent(path) == dir)
        {
            durable.directories.insert(path.clone());
        }
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }
}

struct CrashFile {
    node: Arc<Node>,
    shared: Arc<Shared>,
}

impl Drop for CrashFile {
    fn drop(&mut self) {
        self.shared.open_now.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DiskFile for CrashFile {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let bytes = self.node.current.lock();
        let rest = bytes.get(position as usize..).unwrap_or(&[]);
        // Short on purpose: callers must go on.
        let count = rest.len().min(buffer.len()).min(8192);
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        self.shared.step()?;
        let count = bytes.len().min(300_000);
        let mut current = self.node.current.lock();
        let end = position as usize + count;
        let len = current.len().max(end);
        current.resize(len, 0);
        current[position as usize..end].copy_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn sync(&self) -> io::Result<()> {
        self.shared.step()?;
        let current = self.node.current.lock();
        *self.node.durable.lock() = current.clone();
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.node.current.lock().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.shared.step()?;
        self.node.current.lock().resize(len as usize, 0);
        Ok(())
    }
}

#[test]
fn a_real_file_keeps_what_is_written_where_it_is_written() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    disk.create_dir_all("a/b").unwrap();
    let file = disk.open("a/b/file", OpenMode::CreateNew).unwrap();
    write_all_at(&*file, b"world", 6).unwrap();
    write_all_at(&*file, b"hello ", 0).unwrap();
    file.sync().unwrap();
    file.sync_all().unwrap();
    disk.sync_dir("a/b").unwrap();
    let mut buffer = [0u8; 11];
    let reader = disk.open("a/b/file", OpenMode::Read).unwrap();
    read_exact_at(&*reader, &mut buffer, 0).unwrap();
    assert_eq!(&buffer, b"hello world");
    assert_eq!(reader.len().unwrap(), 11);
    let short = read_exact_at(&*reader, &mut buffer, 1).unwrap_err();
    assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(read_up_to_at(&*reader, &mut buffer, 6).unwrap(), 5);
    assert!(
        write_all_at(&*reader, b"x", 0).is_err(),
        "opened for reading only"
    );
    file.set_len(3).unwrap();
    assert_eq!(reader.len().unwrap(), 3);
}

#[test]
fn open_modes_differ_in_what_they_demand() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let kind = |mode| disk.open("file", mode).err().map(|error| error.kind());
    assert_eq!(kind(OpenMode::Read), Some(io::ErrorKind::NotFound));
    assert_eq!(kind(OpenMode::ReadWrite), Some(io::ErrorKind::NotFound));
    let file = disk.open("file", OpenMode::CreateOrOpen).unwrap();
    write_all_at(&*file, b"kept", 0).unwrap();
    assert_eq!(
        kind(OpenMode::CreateNew),
        Some(io::ErrorKind::AlreadyExists)
    );
    assert_eq!(
        disk.open("file", OpenMode::CreateOrOpen)
            .unwrap()
            .len()
            .unwrap(),
        4
    );
}

#[test]
fn names_are_listed_renamed_and_removed() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    disk.create_dir_all("sub").unwrap();
    let file = disk.open("b", OpenMode::CreateNew).unwrap();
    write_all_at(&*file, b"123", 0).unwrap();
    disk.rename("b", "a").unwrap();
    let entry = |name: &str, len, is_dir| (name.to_owned(), len, is_dir);
    let listed = |disk: &dyn Disk| -> Vec<(String, u64, bool)> {
        let entries = disk.list("").unwrap().into_iter();
        entries
            .map(|e| (e.name, if e.is_dir { 0 } else { e.len }, e.is_dir))
            .collect()
    };
    assert_eq!(
        listed(&*disk),
        [entry("a", 3, false), entry("sub", 0, true)]
    );
    disk.remove("a").unwrap();
    assert_eq!(listed(&*disk), [entry("sub", 0, true)]);
    assert!(disk.free_bytes().unwrap() > 0);
}

#[test]
fn paths_cannot_leave_the_data_directory() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    for path in [
        "../x",
        "a/../../x",
        "/etc/x",
        "a//b",
        "./x",
        "a/",
        "a\0b",
        "..",
    ] {
        let refused = disk
            .open(path, OpenMode::CreateOrOpen)
            .err()
            .map(|error| error.kind());
        assert_eq!(refused, Some(io::ErrorKind::InvalidInput), "{path:?}");
        assert!(disk.create_dir_all(path).is_err(), "{path:?}");
        assert!(disk.remove(path).is_err(), "{path:?}");
    }
}

#[test]
fn descriptors_are_closed_on_exec() {
    let directory = TestDirectory::new();
    let file = directory.disk().open("file", OpenMode::CreateNew).unwrap();
    let descriptor = file.raw_fd().unwrap();
    // SAFETY: the descriptor is open for as long as `file` lives.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
}

#[test]
fn clocks_run_and_random_numbers_differ() {
    let doors = Doors::real(TestDirectory::new().path()).unwrap();
    assert!(doors.clock.wall_ms() > 1_600_000_000_000);
    let first = doors.clock.monotonic_us();
    while doors.clock.monotonic_us() == first {
        std::hint::spin_loop();
    }
    assert!(doors.clock.monotonic_us() > first);
    let numbers: BTreeSet<u64> = (0..1000).map(|_| doors.random.next_u64()).collect();
    assert_eq!(numbers.len(), 1000);
}

/// Takes and gives one byte at a time and is interrupted every other call.
struct Stubborn {
    bytes: Mutex<Vec<u8>>,
    calls: AtomicU64,
}

impl Stubborn {
    fn interrupt(&self) -> io::Result<()> {
        match self.calls.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => Err(io::ErrorKind::Interrupted.into()),
            _ => Ok(()),
        }
    }
}

impl DiskFile for Stubborn {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.interrupt()?;
        let byte = self.bytes.lock().get(position as usize).copied();
        Ok(byte.map_or(0, |byte| {
            buffer[0] = byte;
            1
        }))
    }
    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        self.interrupt()?;
        let mut stored = self.bytes.lock();
        if position as usize >= stored.len() {
            return Ok(0);
        }
        stored[position as usize] = bytes[0];
        Ok(1)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().len() as u64)
    }
    fn set_len(&self, _len: u64) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn helpers_go_on_through_short_and_interrupted_calls() {
    let file = Stubborn {
        bytes: Mutex::new(vec![0; 8]),
        calls: AtomicU64::new(0),
    };
    write_all_at(&file, b"12345678", 0).unwrap();
    let mut buffer = [0u8; 8];
    read_exact_at(&file, &mut buffer, 0).unwrap();
    assert_eq!(&buffer, b"12345678");
    assert_eq!(
        write_all_at(&file, b"12", 7).unwrap_err().kind(),
        io::ErrorKind::WriteZero
    );
    let overflow = read_exact_at(&file, &mut buffer, u64::MAX).unwrap_err();
    assert_eq!(overflow.kind(), io::ErrorKind::UnexpectedEof);
}
