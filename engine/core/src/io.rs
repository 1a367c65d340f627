//! The engine's doors: clock, randomness and disk as small traits.
//!
//! Everything below `log` reaches the outside world through these, so that a simulation can put its
//! own clock, its own random numbers and a faulty disk in their place and replay a run from a seed.
//! This module sits at the bottom of the layers and knows nothing about streams.
//!
//! Invariants:
//! - paths are relative to the data directory, separated by `/`, without `.`, `..` or empty parts;
//! - nothing here retries a failed sync: a second sync after a failure proves nothing;
//! - every descriptor is close-on-exec.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

#[cfg(test)]
#[path = "io_tests.rs"]
pub(crate) mod tests;

pub mod sabotage;

/// Time. The wall clock may jump in both directions, the monotonic clock never goes back.
pub trait Clock: Send + Sync {
    /// Milliseconds since the Unix epoch.
    fn wall_ms(&self) -> u64;
    /// Microseconds since an arbitrary moment that is fixed for the life of the process.
    fn monotonic_us(&self) -> u64;
}

/// Randomness fit for identifiers and keys.
pub trait Random: Send + Sync {
    fn next_u64(&self) -> u64;
}

/// How a file is opened. Everything but `Read` may also write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenMode {
    /// Must exist; reading only.
    Read,
    /// Must exist.
    ReadWrite,
    /// Must not exist.
    CreateNew,
    /// Content of an existing file is kept.
    CreateOrOpen,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    pub name: String,
    pub len: u64,
    pub is_dir: bool,
}

/// The data directory. The empty path names the directory itself.
pub trait Disk: Send + Sync {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>>;
    fn create_dir_all(&self, path: &str) -> io::Result<()>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Unlinks a file (not a directory).
    fn remove(&self, path: &str) -> io::Result<()>;
    /// The entries of a directory, sorted by name.
    fn list(&self, dir: &str) -> io::Result<Vec<DirEntry>>;
    /// Makes creations, renames and removals inside `dir` durable.
    fn sync_dir(&self, dir: &str) -> io::Result<()>;
    /// Bytes that an unprivileged process may still write.
    fn free_bytes(&self) -> io::Result<u64>;
}

/// One open file, without a cursor: safe to share between threads.
pub trait DiskFile: Send + Sync {
    /// May be short; 0 means end of file. See [`read_exact_at`].
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize>;
    /// Like `read_at`, for bytes that nobody will want again soon: what was not in the page cache before is not
    /// kept there.
    fn read_once_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.read_at(buffer, position)
    }
    /// May be short. See [`write_all_at`].
    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize>;
    /// fdatasync: the bytes, and the length needed to read them.
    fn sync(&self) -> io::Result<()>;
    /// fsync: also the remaining metadata.
    fn sync_all(&self) -> io::Result<()>;
    fn len(&self) -> io::Result<u64>;
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// The descriptor, where there is one, for calls that move bytes inside the kernel.
    fn raw_fd(&self) -> Option<RawFd> {
        None
    }
}

/// All doors together, cheap to clone and to hand to every part of the engine.
#[derive(Clone)]
pub struct Doors {
    pub clock: Arc<dyn Clock>,
    pub random: Arc<dyn Random>,
    pub disk: Arc<dyn Disk>,
    /// Which run of the kernel this is: page cache outlives a process, not a boot. `None` = unknown.
    pub boot_id: Option<BootId>,
}

pub type BootId = [u8; 16];

impl Doors {
    /// The real clock, the kernel's randomness and a directory of the real file system.
    pub fn real(root: impl AsRef<Path>) -> io::Result<Doors> {
        Ok(Doors {
            clock: Arc::new(SystemClock),
            random: Arc::new(SystemRandom),
            disk: Arc::new(RealDisk::open(root)?),
            boot_id: kernel_boot_id(),
        })
    }
}

/// The kernel's own name for this boot. Unreadable or of another shape is unknown, which counts as a reboot.
fn kernel_boot_id() -> Option<BootId> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).ok()?;
    (digits.len() == 32).then(|| number.to_be_bytes())
}

/// Fills `buffer` from `position`, through interruptions and short reads.
/// A file that ends before that is `UnexpectedEof`.
pub fn read_exact_at(file: &dyn DiskFile, buffer: &mut [u8], position: u64) -> io::Result<()> {
    let read = read_up_to_at(file, buffer, position)?;
    if read == buffer.len() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::UnexpectedEof,
        format!(
            "file ends at byte {}, {} bytes short of a read at {position}",
            position.saturating_add(read as u64),
            buffer.len() - read
        ),
    ))
}

/// Reads until `buffer` is full or the file ends; returns how many bytes were read.
pub fn read_up_to_at(file: &dyn DiskFile, buffer: &mut [u8], position: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], advance(position, done)?) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes all of `bytes` at `position`, through interruptions and short writes.
pub fn write_all_at(file: &dyn DiskFile, bytes: &[u8], position: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], advance(position, done)?) {
            Ok(0) => {
                return Err(io::Error::new(
                    io::ErrorKind::WriteZero,
                    format!("the file took only {done} of {} bytes", bytes.len()),
                ));
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn advance(position: u64, done: usize) -> io::Result<u64> {
    position.checked_add(done as u64).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "file position overflows 64 bits",
        )
    })
}

/// The machine's clocks.
#[derive(Clone, Copy, Default, Debug)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn wall_ms(&self) -> u64 {
        // A clock set before 1970 reads as 0: callers only ever take the maximum with what they know.
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_millis() as u64)
    }

    fn monotonic_us(&self) -> u64 {
        static ORIGIN: OnceLock<Instant> = OnceLock::new();
        ORIGIN.get_or_init(Instant::now).elapsed().as_micros() as u64
    }
}

/// The kernel's random numbers (`getrandom`).
#[derive(Clone, Copy, Default, Debug)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn next_u64(&self) -> u64 {
        let mut bytes = [0u8; 8];
        loop {
            // SAFETY: the pointer and the length describe the local array, which outlives the call.
            let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
            if count == bytes.len() as isize {
                return u64::from_ne_bytes(bytes);
            }
            let error = io::Error::last_os_error();
            // Requests of up to 256 bytes are never short and fail only by a signal that arrives
            // before the kernel's pool is seeded. Anything else means no getrandom at all, and
            // guessable identifiers would be worse than stopping.
            assert!(
                count >= 0 || error.kind() == io::ErrorKind::Interrupted,
                "getrandom failed: {error}"
            );
        }
    }
}

/// A directory of the real file system.
#[derive(Clone, Debug)]
pub struct RealDisk {
    root: PathBuf,
}

impl RealDisk {
    /// Creates the directory if it is missing.
    pub fn open(root: impl AsRef<Path>) -> io::Result<RealDisk> {
        fs::create_dir_all(&root)?;
        // Absolute from here on: a later change of the working directory must not move the data.
        Ok(RealDisk {
            root: fs::canonicalize(root)?,
        })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn resolve(&self, path: &str) -> io::Result<PathBuf> {
        if path.is_empty() {
            return Ok(self.root.clone());
        }
        let bad =
            |part: &str| part.is_empty() || part == "." || part == ".." || part.contains('\0');
        if path.split('/').any(bad) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("path {path:?} leaves or bends the data directory"),
            ));
        }
        Ok(self.root.join(path))
    }
}

impl Disk for RealDisk {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        // The standard library opens every file with O_CLOEXEC.
        let mut options = OpenOptions::new();
        options.read(true).write(mode != OpenMode::Read);
        match mode {
            OpenMode::Read | OpenMode::ReadWrite => {}
            OpenMode::CreateNew => {
                options.create_new(true);
            }
            OpenMode::CreateOrOpen => {
                options.create(true).truncate(false);
            }
        }
        let file = options.open(self.resolve(path)?)?;
        Ok(Arc::new(RealFile { file }))
    }

    fn create_dir_all(&self, path: &str) -> io::Result<()> {
        fs::create_dir_all(self.resolve(path)?)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.resolve(from)?, self.resolve(to)?)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        fs::remove_file(self.resolve(path)?)
    }

    fn list(&self, dir: &str) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(self.resolve(dir)?)? {
            let entry = entry?;
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // Removed by another thread since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            // Every name the engine makes is ASCII; a foreign one cannot be passed to `open` as text.
            if let Ok(name) = entry.file_name().into_string() {
                entries.push(DirEntry {
                    name,
                    len: metadata.len(),
                    is_dir: metadata.is_dir(),
                });
            }
        }
        entries.sort_unstable_by(|left, right| left.name.cmp(&right.name));
        Ok(entries)
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        File::open(self.resolve(dir)?)?.sync_all()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let path = std::ffi::CString::new(self.root.as_os_str().as_bytes())?;
        let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: the path is a valid C string and `answer` has the size and alignment statvfs wants.
        if unsafe { libc::statvfs(path.as_ptr(), answer.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: statvfs returned 0, so it has filled the whole structure.
        let answer = unsafe { answer.assume_init() };
        Ok(answer.f_bavail.saturating_mul(answer.f_frsize))
    }
}

struct RealFile {
    file: File,
}

impl RealFile {
    /// What the page cache holds from `position` on; `None` if the disk would have to be asked.
    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> Option<usize> {
        let position = libc::off_t::try_from(position).ok()?;
        let piece = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: the descriptor is open as long as `self`, and the one piece describes `buffer`, which is
        // borrowed for writing until the call returns.
        let count =
            unsafe { libc::preadv2(self.file.as_raw_fd(), &piece, 1, position, libc::RWF_NOWAIT) };
        // Nothing is the end of the file; errors are those of the plain read that follows.
        usize::try_from(count).ok().filter(|count| *count > 0)
    }

    /// A hint to the kernel; if it is not taken, only memory is used less well.
    fn advise(&self, position: u64, len: usize, advice: libc::c_int) {
        if let (Ok(position), Ok(len)) = (position.try_into(), len.try_into()) {
            // SAFETY: takes numbers only; the descriptor is open as long as `self`.
            unsafe { libc::posix_fadvise(self.file.as_raw_fd(), position, len, advice) };
        }
    }
}

impl DiskFile for RealFile {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.file.read_at(buffer, position)
    }

    fn read_once_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        if let Some(count) = self.read_cached_at(buffer, position) {
            return Ok(count);
        }
        // Without reading ahead: pages that it brings in would then pass for somebody else's.
        self.advise(position, 0, libc::POSIX_FADV_RANDOM);
        let count = self.file.read_at(buffer, position)?;
        self.advise(position, count, libc::POSIX_FADV_DONTNEED);
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        self.file.write_at(bytes, position)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }
}
