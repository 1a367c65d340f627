//! Backup: a consistent copy of a running engine, pinned at one commit number, without stopping anybody.
//!
//! A checkpoint first, so that the log is short. Then files are pinned, the catalog is copied in one read
//! transaction, and the commit number is what was synced at that moment: frames from the catalog's checkpoint up to
//! it make the log of the copy. The log is let go then, and the bytes that the copied catalog names are copied and
//! checked for as long as it takes. The list of files comes last, and behind it the mark that all of it is there.
//! Sits beside maintenance; runs in a thread of its caller. The way back is `millstream.server.restore` in Python.
//!
//! Invariants
//! - `I-BACKUP-1` The commit number is at or above everything the copied catalog reflects, and at or above everything
//!   that was acknowledged before the backup was asked for (ephemeral records excepted: they have no frame).
//! - `I-BACKUP-2` The mark is written when every other file and name is synced; a failed or cancelled backup is removed.
//! - `I-BACKUP-3` Memory is bounded by a few buffers and the log's largest batch, whatever there is to copy.
//! - `I-BACKUP-4` No checkpoint lies between the copied catalog and the commit number: a frame may rest on one, as do
//!   those with which a stream enters or leaves `ephemeral`, or is forked out of it.

use crate::report;
use std::fmt;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::io::{Disk, RealDisk};
use crate::log::catalog::{CATALOG_FILE, Catalog, CatalogError};
use crate::log::checkpoint::META_CHECKPOINT;
use crate::log::wal::WAL_DIR;
use crate::shard::engine::Engine;

mod files;
mod log;
pub mod manifest;

#[cfg(test)]
#[path = "backup_tests.rs"]
pub(crate) mod tests;

use self::files::{Census, copy_packs, copy_segments, record_of};
use self::log::copy_log;
use self::manifest::{ManifestWriter, write_mark};

const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(600);
/// How often the caller is asked whether to go on.
const TELL_EVERY_US: u64 = 100_000;
/// Damage is counted to the end but told only so often.
const DAMAGE_TOLD_MAX: usize = 20;
/// What a stopping server spends on removing an unfinished backup.
const STOP_REMOVAL_US: u64 = 700_000;
/// Left free at the destination.
const SPACE_MARGIN_BYTES: u64 = 4 << 20;

#[derive(Clone, Copy, Debug, Default)]
pub struct BackupOptions {
    /// 0 = as fast as it goes.
    pub rate_bytes_per_second: u64,
    /// Copies damaged ranges as they are instead of failing.
    pub allow_damage: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupProgress {
    pub phase: &'static str,
    pub bytes_done: u64,
    /// 0 until it is known.
    pub bytes_total: u64,
}

/// Is told how far it is, a few times per second; `false` cancels.
pub type Tell<'a> = &'a mut dyn FnMut(BackupProgress) -> bool;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackupSummary {
    pub commit_number: u64,
    pub checkpoint: u64,
    pub taken_at_ms: u64,
    pub streams: u64,
    pub files: u64,
    pub bytes: u64,
    pub damaged: u64,
    /// The first findings, a sentence each.
    pub damage: Vec<String>,
}

/// Why there is no backup.
#[derive(Debug)]
pub struct BackupError {
    pub code: &'static str,
    pub detail: String,
}

impl BackupError {
    pub fn new(code: &'static str, detail: impl Into<String>) -> BackupError {
        let detail = detail.into();
        BackupError { code, detail }
    }

    pub fn at(what: &str, error: &io::Error) -> BackupError {
        BackupError::new("backup_failed", format!("{what}: {error}"))
    }
}

impl fmt::Display for BackupError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({})", self.detail, self.code)
    }
}

impl std::error::Error for BackupError {}

impl From<io::Error> for BackupError {
    fn from(error: io::Error) -> BackupError {
        BackupError::new("backup_failed", error.to_string())
    }
}

impl From<CatalogError> for BackupError {
    fn from(error: CatalogError) -> BackupError {
        BackupError::new("backup_failed", error.to_string())
    }
}

impl Engine {
    /// Makes the directory `to`, which must not exist, and a backup in it. On failure it is removed again.
    pub fn backup_to(
        &self,
        to: &Path,
        options: &BackupOptions,
        tell: Tell<'_>,
    ) -> Result<BackupSummary, BackupError> {
        let name = to.display().to_string();
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(to)
            .map_err(|error| BackupError::at(&name, &error))?;
        let made = RealDisk::open(to)
            .map_err(|error| BackupError::at(&name, &error))
            .and_then(|disk| self.backup(Arc::new(disk), options, tell))
            .and_then(|summary| {
                let parent = to.parent().unwrap_or(Path::new("/"));
                std::fs::File::open(parent)
                    .and_then(|parent| parent.sync_all())
                    .map_err(|error| BackupError::at(&name, &error))?;
                Ok(summary)
            });
        made.map_err(|mut error| {
            if let Err(left) = self.remove_unfinished(to) {
                error.detail = format!("{}; {name} could not be removed: {left}", error.detail);
                report!("an unfinished backup could not be removed from {name}: {left}");
            }
            error
        })
    }

    /// Removes a directory that was made a moment ago with mode 0700, so that everything in it is ours. A server that
    /// stops has little time: what it leaves has no mark and is no backup.
    fn remove_unfinished(&self, path: &Path) -> io::Result<()> {
        if !self.stopping.load(Ordering::Acquire) {
            return std::fs::remove_dir_all(path);
        }
        let until_us = self.doors.clock.monotonic_us() + STOP_REMOVAL_US;
        self.remove_until(path, until_us)
    }

    fn remove_until(&self, path: &Path, until_us: u64) -> io::Result<()> {
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            if self.doors.clock.monotonic_us() > until_us {
                return Err(io::Error::other("the server stopped before it was removed"));
            }
            if entry.file_type()?.is_dir() {
                self.remove_until(&entry.path(), until_us)?;
            } else {
                std::fs::remove_file(entry.path())?;
            }
        }
        std::fs::remove_dir(path)
    }

    /// Makes a backup in an empty directory.
    pub fn backup(
        &self,
        to: Arc<dyn Disk>,
        options: &BackupOptions,
        tell: Tell<'_>,
    ) -> Result<BackupSummary, BackupError> {
        let staged = self.shard.staged();
        let mut job = Job::new(self, to, *options, tell);
        job.phase("checkpoint")?;
        self.checkpoint_for_backup(staged)?;
        let files_pin = self.cold.pins.files.hold();
        let log_pin = self.cold.pins.log.hold();
        let mut manifest = ManifestWriter::create(&*job.to)?;

        job.phase("catalog")?;
        let (census, commit) = job.copy_catalog()?;
        job.check_space(&census)?;

        job.phase("log")?;
        let (from, to) = (Arc::clone(&self.doors.disk), Arc::clone(&job.to));
        let log = copy_log(
            &*from,
            &*to,
            self.first_generation,
            census.checkpoint,
            commit,
            &mut |bytes| job.wrote(bytes),
        )?;
        manifest.add(&log.record)?;
        drop(log_pin);

        job.phase("packs")?;
        let catalog = Catalog::open(Arc::clone(&to))?;
        copy_packs(&mut job, &catalog, &log.adopted, &mut manifest)?;
        job.phase("segments")?;
        copy_segments(&mut job, &catalog, &mut manifest)?;
        drop(files_pin);
        // Closing it may write; its checksum is taken behind that.
        drop(catalog);
        job.finish(manifest, &census, commit)
    }

    /// Asks for checkpoints until one covers `staged`: everything acknowledged before is then in the catalog, and
    /// this run's part of the log is all that a backup needs.
    fn checkpoint_for_backup(&self, staged: u64) -> Result<(), BackupError> {
        let metrics = &self.metrics;
        while checkpoint_of(self.directory.catalog())? < staged {
            let (done, failed) = (metrics.checkpoints.get(), metrics.checkpoint_failures.get());
            self.maintenance.request_checkpoint();
            let ended = || {
                self.stopping.load(Ordering::Acquire)
                    || self.shard.failed()
                    || metrics.checkpoints.get() > done
                    || metrics.checkpoint_failures.get() > failed
            };
            let in_time = self.shard.waiters.wait_until(ended, CHECKPOINT_TIMEOUT);
            self.go_on()?;
            if !in_time || metrics.checkpoint_failures.get() > failed {
                let why = "the checkpoint that begins a backup failed; the server's log says why";
                return Err(BackupError::new("backup_failed", why));
            }
        }
        Ok(())
    }

    fn go_on(&self) -> Result<(), BackupError> {
        if self.stopping.load(Ordering::Acquire) {
            return Err(BackupError::new(
                "backup_cancelled",
                "the server is stopping",
            ));
        }
        if self.shard.failed() {
            return Err(BackupError::new("backup_failed", "the log has failed"));
        }
        Ok(())
    }
}

/// What a catalog's log begins behind; 0 before the first checkpoint.
fn checkpoint_of(catalog: &Catalog) -> Result<u64, CatalogError> {
    let number = catalog.meta(META_CHECKPOINT)?;
    let number = number.and_then(|bytes| bytes.try_into().ok());
    Ok(number.map_or(0, u64::from_le_bytes))
}

/// A backup under way: where it goes, how far it is, what it has found.
struct Job<'a> {
    engine: &'a Engine,
    to: Arc<dyn Disk>,
    options: BackupOptions,
    tell: Tell<'a>,
    progress: BackupProgress,
    began_us: u64,
    told_us: u64,
    full_before: bool,
    damaged: u64,
    damage: Vec<String>,
}

impl<'a> Job<'a> {
    fn new(engine: &'a Engine, to: Arc<dyn Disk>, options: BackupOptions, tell: Tell<'a>) -> Self {
        let now_us = engine.doors.clock.monotonic_us();
        Job {
            engine,
            to,
            options,
            tell,
            progress: BackupProgress {
                phase: "",
                bytes_done: 0,
                bytes_total: 0,
            },
            began_us: now_us,
            told_us: now_us,
            full_before: engine.metrics.wal_full.get() != 0,
            damaged: 0,
            damage: Vec::new(),
        }
    }

    fn phase(&mut self, name: &'static str) -> Result<(), BackupError> {
        self.progress.phase = name;
        self.told_us = 0;
        self.look()
    }

    /// Counts bytes, keeps to the rate, and ends the backup if anything says so.
    fn wrote(&mut self, bytes: u64) -> Result<(), BackupError> {
        self.progress.bytes_done += bytes;
        self.look()?;
        let rate = self.options.rate_bytes_per_second;
        if rate == 0 {
            return Ok(());
        }
        let due_us = self.progress.bytes_done.saturating_mul(1_000_000) / rate;
        loop {
            let now_us = self.engine.doors.clock.monotonic_us();
            let early_us = due_us.saturating_sub(now_us.saturating_sub(self.began_us));
            if early_us == 0 {
                return Ok(());
            }
            let pause = Duration::from_micros(early_us.min(TELL_EVERY_US));
            let stopping = || self.engine.stopping.load(Ordering::Acquire);
            self.engine.shard.waiters.wait_until(stopping, pause);
            self.look()?;
        }
    }

    fn look(&mut self) -> Result<(), BackupError> {
        self.engine.go_on()?;
        if !self.full_before && self.engine.metrics.wal_full.get() != 0 {
            let why = "the server's disk is full; writes go before a backup";
            return Err(BackupError::new("backup_failed", why));
        }
        let now_us = self.engine.doors.clock.monotonic_us();
        if self.told_us != 0 && now_us.saturating_sub(self.told_us) < TELL_EVERY_US {
            return Ok(());
        }
        self.told_us = now_us.max(1);
        if (self.tell)(self.progress) {
            return Ok(());
        }
        Err(BackupError::new("backup_cancelled", "it was cancelled"))
    }

    /// Notes damage in what was copied; `Err` unless damage is allowed.
    fn damage(&mut self, finding: String) -> Result<(), BackupError> {
        if !self.options.allow_damage {
            return Err(BackupError::new("backup_damaged", finding));
        }
        self.damaged += 1;
        if self.damage.len() < DAMAGE_TOLD_MAX {
            self.damage.push(finding);
        }
        Ok(())
    }

    /// Copies the catalog as it is now, and counts what it names. Returns also what was synced at that moment.
    fn copy_catalog(&mut self) -> Result<(Census, u64), BackupError> {
        let copy = Catalog::open(Arc::clone(&self.to))?;
        let mut census = Census::default();
        let mut ended = None;
        let engine = self.engine;
        let catalog = engine.directory.catalog();
        let synced = || engine.shard.synced();
        let copied = catalog.copy_into(&copy, synced, &mut |path, value| {
            let seen = match census.add(path, value) {
                Ok(()) => self.look(),
                Err(finding) => self.damage(finding),
            };
            seen.map_err(|error| {
                ended = Some(error);
                io::Error::other("ended")
            })
        });
        if let Some(error) = ended {
            return Err(error);
        }
        let commit = copied?;
        census.checkpoint = checkpoint_of(&copy)?;
        census.add_packs(&*self.engine.doors.disk, &copy.packs()?);
        Ok((census, commit))
    }

    fn check_space(&mut self, census: &Census) -> Result<(), BackupError> {
        self.progress.bytes_total = census.bytes;
        let free = self.to.free_bytes()?;
        let need = census.bytes.saturating_add(SPACE_MARGIN_BYTES);
        if free < need {
            let why = format!("the backup needs about {need} bytes, {free} are free");
            return Err(BackupError::new("backup_failed", why));
        }
        Ok(())
    }

    /// Syncs all names, writes the list and then the mark.
    fn finish(
        mut self,
        mut manifest: ManifestWriter,
        census: &Census,
        commit: u64,
    ) -> Result<BackupSummary, BackupError> {
        self.phase("finishing")?;
        manifest.add(&record_of(&*self.to, CATALOG_FILE)?)?;
        for directory in files::directories(&*self.to)? {
            self.to.sync_dir(&directory)?;
        }
        self.to.sync_dir(WAL_DIR)?;
        let summary = BackupSummary {
            commit_number: commit,
            checkpoint: census.checkpoint,
            taken_at_ms: self.engine.now_ms(),
            streams: census.streams,
            files: manifest.files,
            bytes: manifest.bytes,
            damaged: self.damaged,
            damage: self.damage,
        };
        let list = manifest.finish(&[
            ("commit_number", summary.commit_number),
            ("checkpoint", summary.checkpoint),
            ("taken_at_ms", summary.taken_at_ms),
            ("streams", summary.streams),
            ("file_count", summary.files),
            ("bytes", summary.bytes),
            ("damaged", summary.damaged),
        ])?;
        self.to.sync_dir("")?;
        write_mark(&*self.to, &list)?;
        Ok(summary)
    }
}
