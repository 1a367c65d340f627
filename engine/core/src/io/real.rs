//! The real file system behind the disk door.
//!
//! Invariants: those of `io`; a read that must not wait asks the page cache only, where the file system can tell.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::{DirEntry, Disk, DiskFile, OpenMode};

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
        Ok(Arc::new(RealFile {
            file: Arc::new(file),
        }))
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
    file: Arc<File>,
}

impl RealFile {
    /// What the page cache holds from `position` on. Where it holds nothing that is `EAGAIN`.
    fn read_without_waiting(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let position = libc::off_t::try_from(position).map_err(io::Error::other)?;
        let piece = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: the descriptor is open as long as `self`, and the one piece describes `buffer`, which is
        // borrowed for writing until the call returns.
        let count =
            unsafe { libc::preadv2(self.file.as_raw_fd(), &piece, 1, position, libc::RWF_NOWAIT) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Whether every page of a range is in the page cache; `None` if the kernel does not tell.
    fn cached_pages(&self, position: u64, len: usize) -> Option<bool> {
        const CACHESTAT: libc::c_long = 451;
        let range = [position, len as u64];
        // In the cache, dirty, in write-back, evicted, evicted lately.
        let mut counts = [0u64; 5];
        // SAFETY: the kernel reads two and writes five numbers of 64 bits, which is what the arrays are.
        let result = unsafe {
            libc::syscall(
                CACHESTAT,
                self.file.as_raw_fd(),
                range.as_ptr(),
                counts.as_mut_ptr(),
                0,
            )
        };
        let last = position.checked_add(len as u64)?.checked_sub(1)?;
        let pages = last / page_bytes() - position / page_bytes() + 1;
        (result == 0).then_some(counts[0] >= pages)
    }

    /// The same where the kernel is older (before 6.5): a byte here and there.
    fn samples_are_cached(&self, position: u64, len: usize) -> bool {
        const STEP_BYTES: usize = 16 * 1024;
        let mut byte = [0u8];
        (0..len).step_by(STEP_BYTES).all(|at| {
            let read = self.read_cached_at(&mut byte, position.saturating_add(at as u64));
            !matches!(read, Ok(None))
        })
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
        // Nothing is the end of the file; errors are those of the plain read that follows.
        if let Ok(count @ 1..) = self.read_without_waiting(buffer, position) {
            return Ok(count);
        }
        // Without reading ahead: pages that it brings in would then pass for somebody else's.
        self.advise(position, 0, libc::POSIX_FADV_RANDOM);
        let count = self.file.read_at(buffer, position)?;
        self.advise(position, count, libc::POSIX_FADV_DONTNEED);
        Ok(count)
    }

    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<Option<usize>> {
        match self.read_without_waiting(buffer, position) {
            Ok(count) => Ok(Some(count)),
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => Ok(None),
                // A file system that cannot say, such as one in memory.
                Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
                    self.read_at(buffer, position).map(Some)
                }
                _ => Err(error),
            },
        }
    }

    fn is_cached(&self, position: u64, len: usize) -> bool {
        self.cached_pages(position, len)
            .unwrap_or_else(|| self.samples_are_cached(position, len))
    }

    fn another(&self) -> Option<Arc<dyn DiskFile>> {
        Some(Arc::new(RealFile {
            file: Arc::clone(&self.file),
        }))
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

    fn send_to(&self, socket: RawFd, position: u64, count: usize) -> Option<io::Result<usize>> {
        let mut offset = libc::off_t::try_from(position).ok()?;
        // SAFETY: `offset` is a live variable that the kernel updates; the caller holds the socket, `self` the file.
        let sent = unsafe { libc::sendfile(socket, self.file.as_raw_fd(), &mut offset, count) };
        Some(usize::try_from(sent).map_err(|_| io::Error::last_os_error()))
    }

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }
}

fn page_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    // SAFETY: takes a number and gives one.
    *BYTES.get_or_init(|| match unsafe { libc::sysconf(libc::_SC_PAGESIZE) } {
        bytes @ 1.. => bytes as u64,
        _ => 4096,
    })
}
