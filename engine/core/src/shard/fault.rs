//! Faults of the log on demand, for tests of a real process: a slow sync, and one call that fails.
//!
//! Sits between `commit` and the log's files. Outside tests both settings are absent, and each call costs
//! one comparison.
//!
//! Invariants
//! - a call is counted once, also when several threads write and sync at the same time;
//! - exactly one call fails; what follows is the log's own decision (`I-COMMIT-3`);
//! - a failed or short call says so: it never returns success for bytes that it did not pass on.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::config::LogFault;
use crate::io::{DiskFile, write_all_at};

/// Counts the calls since the start of the process and fails the one that was asked for.
pub struct Fault {
    sync_delay: Duration,
    fail: Option<LogFault>,
    syncs: AtomicU64,
    writes: AtomicU64,
}

impl Fault {
    pub fn new(sync_delay_ms: u64, fail: Option<LogFault>) -> Fault {
        Fault {
            sync_delay: Duration::from_millis(sync_delay_ms),
            fail,
            syncs: AtomicU64::new(0),
            writes: AtomicU64::new(0),
        }
    }

    /// Called where the log is about to sync a file, instead of nothing. Sleeps if the disk is to be slow.
    pub fn before_sync(&self) -> io::Result<()> {
        if !self.sync_delay.is_zero() {
            std::thread::sleep(self.sync_delay);
        }
        let Some(LogFault::Sync(wanted)) = self.fail else {
            return Ok(());
        };
        if self.syncs.fetch_add(1, Ordering::Relaxed) + 1 == wanted {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    /// Called where the log is about to write a batch. A short write leaves the first half in the file.
    pub fn before_write(&self, file: &dyn DiskFile, bytes: &[u8], position: u64) -> io::Result<()> {
        let (wanted, short) = match self.fail {
            Some(LogFault::Write(wanted)) => (wanted, false),
            Some(LogFault::Short(wanted)) => (wanted, true),
            Some(LogFault::Sync(_)) | None => return Ok(()),
        };
        if self.writes.fetch_add(1, Ordering::Relaxed) + 1 != wanted {
            return Ok(());
        }
        if !short {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let half = &bytes[..bytes.len() / 2];
        write_all_at(file, half, position)?;
        Err(io::Error::new(
            io::ErrorKind::WriteZero,
            format!("the file took only {} of {} bytes", half.len(), bytes.len()),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::OpenMode;
    use crate::io::tests::TestDirectory;

    #[test]
    fn only_the_named_call_fails() {
        let directory = TestDirectory::new();
        let file = directory.disk().open("log", OpenMode::CreateNew).unwrap();
        for text in ["write:2", "short:2"] {
            let fault = Fault::new(0, LogFault::parse(text));
            let results: Vec<bool> = (0..4)
                .map(|_| fault.before_write(&*file, b"12345678", 0).is_ok())
                .collect();
            assert_eq!(results, [true, false, true, true], "{text}");
            assert!(fault.before_sync().is_ok());
        }
        assert_eq!(file.len().unwrap(), 4, "half of the short write is there");
        let fault = Fault::new(0, LogFault::parse("sync:1"));
        assert!(fault.before_write(&*file, b"1", 0).is_ok());
        assert!(fault.before_sync().is_err());
        assert!(fault.before_sync().is_ok());
    }

    #[test]
    fn misspelt_faults_are_none() {
        for text in ["", "sync", "sync:", "sync:0", "sync:x", "read:1", "sync:-1"] {
            assert_eq!(LogFault::parse(text), None, "{text}");
        }
    }
}
