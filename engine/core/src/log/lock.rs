//! The exclusive lock on a data directory: two servers on one directory would destroy each other's log.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::EngineError;

/// Held as long as the engine lives; the kernel releases it with the process, however that ends.
pub struct DirectoryLock {
    _file: File,
}

impl DirectoryLock {
    pub fn acquire(root: &Path) -> Result<DirectoryLock, EngineError> {
        std::fs::create_dir_all(root).map_err(|error| {
            EngineError::io(&format!("data directory {}", root.display()), error)
        })?;
        let path = root.join("lock");
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|error| EngineError::io(&path.display().to_string(), error))?;
        // SAFETY: flock takes a descriptor that `file` keeps open; it has no memory effects.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let detail = format!(
                "the data directory {} is in use by another server",
                root.display()
            );
            return Err(EngineError::new("directory_locked", detail));
        }
        Ok(DirectoryLock { _file: file })
    }
}
