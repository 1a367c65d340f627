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

use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

#[cfg(test)]
#[path = "io_tests.rs"]
pub(crate) mod tests;

mod real;
pub mod sabotage;
pub mod slow;
pub mod wanted;

pub use self::real::RealDisk;
use self::wanted::{Fetch, Key, Told};

/// One read of bytes that are only to be in the page cache.
const READ_THROUGH_BYTES: usize = 256 * 1024;

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
    /// Like `read_at`, but `None` where the disk would have to be asked.
    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<Option<usize>> {
        self.read_at(buffer, position).map(Some)
    }
    /// Whether the kernel could move these bytes without asking the disk.
    fn is_cached(&self, _position: u64, _len: usize) -> bool {
        true
    }
    /// Another owner of the open file, for a thread that reads it later; `None` where reading never waits.
    fn another(&self) -> Option<Arc<dyn DiskFile>> {
        None
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
    /// Moves bytes to a socket inside the kernel; `None` where that is not possible.
    fn send_to(&self, _socket: RawFd, _position: u64, _count: usize) -> Option<io::Result<usize>> {
        None
    }
    /// The descriptor, where there is one.
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

/// What the process takes of the machine's memory.
pub fn resident_bytes() -> Option<u64> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?;
    let resident: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    // SAFETY: takes no pointers.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Some(resident * u64::try_from(page_bytes).ok()?)
}

/// Gives memory that the allocator keeps back to the system, as far as the allocator can.
pub fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers, and takes the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
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

/// Reads until `buffer` is full or the file ends; returns how many bytes were read. `WouldBlock` where the thread
/// must not wait for them (`wanted`).
pub fn read_up_to_at(file: &dyn DiskFile, buffer: &mut [u8], position: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match read_some_at(file, &mut buffer[done..], advance(position, done)?) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn read_some_at(file: &dyn DiskFile, buffer: &mut [u8], position: u64) -> io::Result<usize> {
    if wanted::may_wait() {
        return file.read_at(buffer, position);
    }
    if let Some(count) = file.read_cached_at(buffer, position)? {
        return Ok(count);
    }
    fetched(file, position, buffer.len())?;
    file.read_at(buffer, position)
}

/// Before the kernel moves bytes of a file: `WouldBlock` if that would wait for the disk and the thread must not.
pub fn check_at_hand(file: &dyn DiskFile, position: u64, len: usize) -> io::Result<()> {
    if wanted::may_wait() || file.is_cached(position, len) {
        return Ok(());
    }
    fetched(file, position, len)
}

/// Whether bytes that are not in the page cache were there a moment ago (`I-WAIT-1`).
fn fetched(file: &dyn DiskFile, position: u64, len: usize) -> io::Result<()> {
    let key = Key::Bytes {
        file: file.raw_fd().unwrap_or(-1),
        position,
        len,
    };
    let fetch = || -> Option<Fetch> {
        let file = file.another()?;
        Some(Box::new(move || read_through(&*file, position, len)))
    };
    match wanted::want(key, fetch) {
        Some(Told::Failed(failure)) => Err(failure.into()),
        Some(_) => Ok(()),
        None => Err(wanted::would_block()),
    }
}

/// Reads bytes only to have them in the page cache. A file that ends before them is an error only if it has none.
fn read_through(file: &dyn DiskFile, position: u64, len: usize) -> io::Result<()> {
    let mut scratch = vec![0; len.min(READ_THROUGH_BYTES)];
    let mut done = 0;
    while done < len {
        let room = scratch.len().min(len - done);
        match file.read_at(&mut scratch[..room], advance(position, done)?) {
            Ok(0) if done == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // What was read before is of use; the next look finds the error.
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
