//! Restore: a data directory from a backup, checked byte by byte, with new epochs.
//!
//! Everything happens in a directory of its own inside the target. When all files are copied and their checksums
//! compared, the engine lives once over them: every stream begins a new epoch, so that an offset of the server that
//! was backed up leads to a gap and never to other bytes. Then the parts move to their places, the format file last.
//!
//! Invariants
//! - `I-RESTORE-1` Nothing that was there is touched: the target does not exist, or is empty.
//! - `I-RESTORE-2` Without a format file no server runs: a restore that was cut off, wherever, is never served.
//! - `I-RESTORE-3` A restore that fails removes what it wrote.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::Config;
use crate::io::{Disk, OpenMode, RealDisk, read_up_to_at};
use crate::log::format::{FORMAT, FORMAT_FILE, RESTORE_DIRECTORY};
use crate::log::lock::DirectoryLock;
use crate::serve::server::Server;
use crate::shard::backup::BackupError;
use crate::shard::backup::manifest::{
    FileRecord, MANIFEST_FILE, SequentialWriter, read_files, read_mark,
};

const LOCK_FILE: &str = "lock";
/// What a fresh file system has in its root.
const NOT_OURS: &str = "lost+found";
const PIECE_BYTES: usize = 1 << 20;
const STOP_DEADLINE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreProgress {
    pub phase: &'static str,
    pub bytes_done: u64,
    pub bytes_total: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreSummary {
    pub files: u64,
    pub bytes: u64,
}

/// Is told how far it is after every piece; `false` cancels.
pub type Tell<'a> = &'a mut dyn FnMut(RestoreProgress) -> bool;

/// Makes `data_dir` a data directory with what the backup holds.
pub fn restore(
    backup: &Path,
    data_dir: &Path,
    tell: Tell<'_>,
) -> Result<RestoreSummary, BackupError> {
    let from = open_backup(backup)?;
    let manifest = read_mark(&from).map_err(|why| incomplete(backup, &why))?;
    let target = Target::claim(data_dir)?;
    let restored = target.fill(&from, &manifest, tell);
    if restored.is_err() {
        target.give_up();
    }
    restored
}

fn open_backup(backup: &Path) -> Result<RealDisk, BackupError> {
    // Opening a disk makes its directory, which must not happen to a mistyped name.
    if !backup.is_dir() {
        return Err(incomplete(backup, "there is no such directory"));
    }
    RealDisk::open(backup).map_err(|error| BackupError::at(&backup.display().to_string(), &error))
}

fn incomplete(backup: &Path, why: &str) -> BackupError {
    BackupError::new("backup_incomplete", format!("{}: {why}", backup.display()))
}

fn damaged(path: &str, what: &str) -> BackupError {
    BackupError::new("backup_damaged", format!("{path} of the backup {what}"))
}

/// The directory that is being made.
struct Target {
    root: PathBuf,
    partial: PathBuf,
    created: bool,
    /// Held to the end: no server may start here meanwhile.
    _lock: DirectoryLock,
}

impl Target {
    fn claim(root: &Path) -> Result<Target, BackupError> {
        let name = root.display().to_string();
        let explain = |error: io::Error| BackupError::at(&name, &error);
        let created = match fs::DirBuilder::new().mode(0o700).create(root) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(explain(error)),
        };
        if !created {
            for entry in fs::read_dir(root).map_err(explain)? {
                let found = entry.map_err(explain)?.file_name();
                if found != NOT_OURS {
                    let what = format!("{name} is not empty: it has {found:?}");
                    return Err(BackupError::new("restore_refused", what));
                }
            }
        }
        let lock = DirectoryLock::acquire(root)
            .map_err(|error| BackupError::new("restore_refused", error.detail))?;
        Ok(Target {
            root: root.to_owned(),
            partial: root.join(RESTORE_DIRECTORY),
            created,
            _lock: lock,
        })
    }

    fn fill(
        &self,
        from: &RealDisk,
        manifest: &FileRecord,
        tell: Tell<'_>,
    ) -> Result<RestoreSummary, BackupError> {
        fs::create_dir(&self.partial)?;
        let to = RealDisk::open(&self.partial)?;
        let mut copy = Copy {
            from,
            to: &to,
            tell,
            progress: RestoreProgress {
                phase: "checking",
                ..RestoreProgress::default()
            },
            files: 0,
        };
        copy.check_manifest(manifest)?;
        copy.progress.phase = "copying";
        read_files(from, &mut |record| copy.copy(&record))?;
        copy.sync_names()?;
        let summary = RestoreSummary {
            files: copy.files,
            bytes: copy.progress.bytes_done,
        };
        copy.progress.phase = "opening";
        copy.look()?;
        self.begin_new_epochs()?;
        self.move_into_place()?;
        Ok(summary)
    }

    /// The one life of the engine that makes every stream's next byte belong to a new epoch.
    fn begin_new_epochs(&self) -> Result<(), BackupError> {
        let config = Config {
            data_dir: self.partial.display().to_string(),
            listen: false,
            reactors: 1,
            restored: true,
            // Prewritten for this one life only.
            append_max_bytes: 1 << 20,
            wal_file_bytes: 0,
            ..Config::default()
        };
        let failed = |detail: String| BackupError::new("restore_failed", detail);
        let server = Server::open(config, &mut |_| {}).map_err(|error| failed(error.detail))?;
        server.stop(STOP_DEADLINE);
        if let Some(trouble) = server.engine.shard.trouble() {
            return Err(failed(format!("the engine ended with {trouble}")));
        }
        Ok(())
    }

    /// Everything but the format file, then that one.
    fn move_into_place(&self) -> Result<(), BackupError> {
        let sync = |path: &Path| fs::File::open(path)?.sync_all();
        for entry in fs::read_dir(&self.partial)? {
            let name = entry?.file_name();
            if name != FORMAT_FILE && name != LOCK_FILE {
                fs::rename(self.partial.join(&name), self.root.join(&name))?;
            }
        }
        sync(&self.root)?;
        fs::rename(self.partial.join(FORMAT_FILE), self.root.join(FORMAT_FILE))?;
        fs::remove_dir_all(&self.partial)?;
        sync(&self.root)?;
        if let Some(parent) = self.root.canonicalize()?.parent() {
            sync(parent)?;
        }
        Ok(())
    }

    /// Removes everything that was written; says so if that fails as well.
    fn give_up(&self) {
        let removed = if self.created {
            fs::remove_dir_all(&self.root)
        } else {
            self.empty()
        };
        if let Err(error) = removed {
            crate::report!(
                "{} could not be cleared after a failed restore: {error}",
                self.root.display()
            );
        }
    }

    fn empty(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            if entry.file_name() == NOT_OURS {
                continue;
            }
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// Files on their way.
struct Copy<'a> {
    from: &'a RealDisk,
    to: &'a RealDisk,
    tell: Tell<'a>,
    progress: RestoreProgress,
    files: u64,
}

impl Copy<'_> {
    fn look(&mut self) -> Result<(), BackupError> {
        if (self.tell)(self.progress) {
            return Ok(());
        }
        Err(BackupError::new("restore_cancelled", "it was cancelled"))
    }

    /// Compares the list with the mark, and counts what it lists.
    fn check_manifest(&mut self, manifest: &FileRecord) -> Result<(), BackupError> {
        self.read(manifest, |_, _| Ok(()))?;
        let total = &mut self.progress.bytes_total;
        read_files(self.from, &mut |record| {
            *total += record.bytes;
            Ok::<(), BackupError>(())
        })
        .map_err(|error| damaged(MANIFEST_FILE, &error.detail))?;
        self.look()
    }

    fn copy(&mut self, record: &FileRecord) -> Result<(), BackupError> {
        if let Some((directory, _)) = record.path.rsplit_once('/') {
            self.to.create_dir_all(directory)?;
        }
        let explain = |error: io::Error| BackupError::at(&record.path, &error);
        let mut out = SequentialWriter::create(self.to, &record.path).map_err(explain)?;
        self.read(record, |copy, bytes| {
            out.write(bytes).map_err(explain)?;
            copy.progress.bytes_done += bytes.len() as u64;
            copy.look()
        })?;
        out.finish().map_err(explain)?;
        self.files += 1;
        Ok(())
    }

    /// Reads one file of the backup, hands its bytes on, and compares length and checksum.
    fn read(
        &mut self,
        record: &FileRecord,
        mut take: impl FnMut(&mut Self, &[u8]) -> Result<(), BackupError>,
    ) -> Result<(), BackupError> {
        let path = &record.path;
        let file = self
            .from
            .open(path, OpenMode::Read)
            .map_err(|error| damaged(path, &format!("cannot be opened: {error}")))?;
        let length = file.len()?;
        if length != record.bytes {
            let what = format!("has {length} bytes, {} were written", record.bytes);
            return Err(damaged(path, &what));
        }
        let (mut position, mut crc) = (0, 0);
        let mut piece = vec![0; PIECE_BYTES.min(length as usize)];
        while position < length {
            let count = read_up_to_at(&*file, &mut piece, position)
                .map_err(|error| damaged(path, &format!("cannot be read: {error}")))?;
            if count == 0 {
                return Err(damaged(path, &format!("ends at byte {position}")));
            }
            crc = crc32c::crc32c_append(crc, &piece[..count]);
            position += count as u64;
            take(self, &piece[..count])?;
        }
        if crc != record.crc {
            return Err(damaged(path, "fails its checksum"));
        }
        Ok(())
    }

    /// Directories innermost first, then the mark that this is a data directory.
    fn sync_names(&self) -> Result<(), BackupError> {
        for name in self.to.list("")?.into_iter().filter(|entry| entry.is_dir) {
            for inner in self.to.list(&name.name)? {
                if inner.is_dir {
                    self.to.sync_dir(&format!("{}/{}", name.name, inner.name))?;
                }
            }
            self.to.sync_dir(&name.name)?;
        }
        let mut format = SequentialWriter::create(self.to, FORMAT_FILE)?;
        format.write(FORMAT)?;
        format.finish()?;
        Ok(self.to.sync_dir("")?)
    }
}
