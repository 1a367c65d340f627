//! Maintenance: log files are prepared ahead, checkpoints written, expired streams swept, idle ones evicted.
//! One thread, woken by need or by the clock; nothing here is on the way of a request.

use crate::report;
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::io::{release_memory, resident_bytes};
use crate::limits::WAL_SPARE_FILES;
use crate::log::checkpoint::{Checkpoint, CheckpointError};
use crate::log::wal::{WalFile, file_name, prepare_new, prepare_recycled};
use crate::model::{Extent, FileRef, StreamId};
use crate::shard::commit::RetainedFile;
use crate::shard::ebb::{self, Ebb};
use crate::shard::engine::Engine;
use crate::stream::snapshot;
use crate::stream::state::Life;

/// The pause between two looks at what is needed, within a checkpoint too.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const WAIT_SYNCED: Duration = Duration::from_secs(60);
/// How long after a checkpoint that failed the next one is tried: longer each time, up to the second bound.
const RETRY_US: u64 = 500_000;
const RETRY_MAX_US: u64 = 4_000_000;
/// With this much in the log and nobody writing, a checkpoint is made: it frees memory and shortens a restart.
const QUIET_CHECKPOINT_BYTES: u64 = 1 << 20;
const QUIET_US: u64 = 2_000_000;
/// A pack is mostly dead when less than a third of it is alive; a few at a time are emptied.
const MOSTLY_DEAD_FACTOR: u64 = 3;
const PACKS_LEFT_AT_ONCE: usize = 4;
/// Streams looked at per sweep step while the catalog is walked for expiries.
const EXPIRY_SCAN_PAGE: usize = 2_000;

#[derive(Default)]
pub struct Maintenance {
    wishes: Mutex<Wishes>,
    changed: Condvar,
    checkpoint_wanted: AtomicBool,
    /// Packs that the next checkpoint empties.
    leave_packs: Mutex<HashSet<u32>>,
    /// Pieces of work that checkpoints have done.
    pieces: AtomicU64,
    /// The log is free up to here, unless a pin holds it.
    checkpointed: AtomicU64,
    /// Held from taking a log file's generation to handing it over: files are filled in the order of their generations.
    preparing: Mutex<()>,
    /// Bytes of `ephemeral` streams cannot leave memory now, and that was told.
    pub spill_fails: AtomicBool,
}

#[derive(Default)]
struct Wishes {
    stop: bool,
    purges: Vec<StreamId>,
    /// Spilled bytes of deleted streams.
    spilled: Vec<Extent>,
}

impl Maintenance {
    pub fn request_checkpoint(&self) {
        if !self.checkpoint_wanted.swap(true, Ordering::AcqRel) {
            self.changed.notify_all();
        }
    }

    pub fn request_purge(&self, stream: StreamId) {
        self.wishes.lock().purges.push(stream);
    }

    /// Gives spilled bytes back, by the thread that may wait for the disk.
    pub fn request_release(&self, spilled: &[Extent]) {
        if !spilled.is_empty() {
            self.wishes.lock().spilled.extend_from_slice(spilled);
        }
    }

    /// A number that grows while a checkpoint gets on.
    pub fn pieces_done(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }

    pub fn stop(&self) {
        self.wishes.lock().stop = true;
        self.changed.notify_all();
    }

    pub fn wake(&self) {
        self.changed.notify_all();
    }

    fn take_wishes(&self) -> Wishes {
        let mut wishes = self.wishes.lock();
        let stop = wishes.stop;
        std::mem::replace(
            &mut *wishes,
            Wishes {
                stop,
                ..Wishes::default()
            },
        )
    }

    /// Sleeps until somebody wants something or the time is up. Returns `false` when it is time to stop.
    fn wait(&self, timeout: Duration) -> bool {
        let mut wishes = self.wishes.lock();
        if !wishes.stop && !self.checkpoint_wanted.load(Ordering::Acquire) {
            self.changed.wait_for(&mut wishes, timeout);
        }
        !wishes.stop
    }
}

/// Notices when nothing has been written for a while.
#[derive(Default)]
struct Quiet {
    sequence: u64,
    since_us: u64,
}

impl Quiet {
    fn lasts(&mut self, sequence: u64, now_us: u64) -> bool {
        if sequence != self.sequence {
            *self = Quiet {
                sequence,
                since_us: now_us,
            };
        }
        now_us.saturating_sub(self.since_us) >= QUIET_US
    }
}

/// When a checkpoint that failed is tried again.
#[derive(Default)]
struct Retry {
    pause_us: u64,
    not_before_us: u64,
}

impl Retry {
    fn later(&mut self, now_us: u64) {
        self.pause_us = (self.pause_us * 2).clamp(RETRY_US, RETRY_MAX_US);
        self.not_before_us = now_us + self.pause_us;
    }

    fn is_owed(&self) -> bool {
        self.pause_us > 0
    }

    fn is_time(&self, now_us: u64) -> bool {
        now_us >= self.not_before_us
    }
}

impl Engine {
    /// Gives back what the allocator keeps, when that is much.
    fn release_unheld(&self, ebb: &mut Ebb, now_us: u64) {
        if !ebb.is_due(now_us) {
            return;
        }
        let held = ebb::held(&self.metrics);
        if resident_bytes().is_some_and(|resident| ebb.is_over(resident, held, now_us)) {
            release_memory();
        }
    }

    /// What the process takes before it has clients: they may be there before the maintenance thread has a turn.
    pub fn memory_without_clients(&self) -> Ebb {
        let mut ebb = Ebb::default();
        self.release_unheld(&mut ebb, self.doors.clock.monotonic_us());
        ebb
    }

    /// The maintenance thread's loop.
    pub fn run_maintenance(&self, mut ebb: Ebb) {
        let mut expiry_cursor: Option<Vec<u8>> = Some(Vec::new());
        let mut last_sweep_us = 0;
        let mut quiet = Quiet::default();
        let mut retry = Retry::default();
        self.prepare_spares();
        self.sweep_orphans();
        loop {
            if !self.maintenance.wait(LOOK_AGAIN) {
                return;
            }
            let now_ms = self.now_ms();
            self.purge_requested();
            self.free_unpinned();
            self.prepare_spares();
            self.spill_volatile();
            let retained = self.metrics.wal_retained_bytes.get();
            if retained >= QUIET_CHECKPOINT_BYTES
                && quiet.lasts(self.shard.staged(), self.doors.clock.monotonic_us())
            {
                self.maintenance.request_checkpoint();
            }
            let wanted = self.maintenance.checkpoint_wanted.load(Ordering::Acquire)
                || retained >= self.config.checkpoint_bytes
                || retry.is_owed();
            if wanted && retry.is_time(self.doors.clock.monotonic_us()) {
                self.checkpoint_and_report(&mut retry);
                if self.producers_exhausted() {
                    self.directory.evict(self.config.streams_cached_max);
                }
            } else {
                // It is owed anyway; nobody shall wake this thread for it meanwhile.
                self.maintenance
                    .checkpoint_wanted
                    .store(false, Ordering::Release);
            }
            self.load_expiring(&mut expiry_cursor);
            let now_us = self.doors.clock.monotonic_us();
            self.release_unheld(&mut ebb, now_us);
            if now_us.saturating_sub(last_sweep_us) >= self.config.sweep_interval_ms * 1000 {
                last_sweep_us = now_us;
                self.sweep_expired(now_ms);
                self.sweep_stages(now_ms);
                self.directory.evict(self.config.streams_cached_max);
            }
        }
    }

    /// Removes segment files that no stream names: left by a crash between a catalog commit and an unlink.
    fn sweep_orphans(&self) {
        let swept = self.cold.sweep_segments(&mut |owner, number| {
            if self.stopping.load(Ordering::Acquire) {
                return true;
            }
            match self.directory.get_by_id(owner) {
                Ok(Some(stream)) => {
                    let wanted = FileRef::Segment { owner, number };
                    let state = stream.lock();
                    state.extents.iter().any(|extent| extent.file == wanted)
                }
                Ok(None) => false,
                // What cannot be judged stays.
                Err(_) => true,
            }
        });
        match swept {
            Ok(0) => {}
            Ok(count) => report!("removed {count} files of deleted streams"),
            Err(error) => report!("segment files could not be listed: {error}"),
        }
    }

    /// Purges what was asked for since the last look.
    pub fn purge_requested(&self) {
        let Wishes {
            purges, spilled, ..
        } = self.maintenance.take_wishes();
        if let Err(error) = self.cold.release_spilled(&spilled) {
            report!("spilled bytes could not be removed; the next start will remove them: {error}");
        }
        let now_ms = self.now_ms();
        purges
            .into_iter()
            .for_each(|stream| self.purge_unneeded(stream, now_ms, usize::MAX));
    }

    fn checkpoint_and_report(&self, retry: &mut Retry) {
        match self.checkpoint() {
            Ok(()) => *retry = Retry::default(),
            Err(error) => {
                self.metrics.checkpoint_failures.add(1);
                if error.is_final() {
                    self.shard
                        .fail(&format!("the catalog could not be written: {error}"));
                    return;
                }
                report!("checkpoint failed and will be retried: {error}");
                retry.later(self.doors.clock.monotonic_us());
            }
        }
        self.shard.ring_all();
    }

    /// Writes a checkpoint and frees the log behind it.
    pub fn checkpoint(&self) -> Result<(), CheckpointError> {
        self.maintenance
            .checkpoint_wanted
            .store(false, Ordering::Release);
        self.check_checkpoint_space()
            .map_err(CheckpointError::Disk)?;
        let before_us = self.doors.clock.monotonic_us();
        let retained_before = self.metrics.wal_retained_bytes.get();
        let staged = self.shard.staged();
        let used_up = self.used_up_stages(staged).map_err(CheckpointError::Disk)?;
        let leave_packs = std::mem::take(&mut *self.maintenance.leave_packs.lock());
        let looked_us = Cell::new(before_us);
        Checkpoint {
            directory: &self.directory,
            cold: &self.cold,
            metrics: &self.metrics,
            losses: &self.losses,
            highest_epoch: self.highest_epoch(),
            boot_id: self.doors.boot_id,
            now_ms: self.now_ms(),
            steady_ms: self.steady_ms(),
            staged,
            used_up: &used_up,
            leave_packs: &leave_packs,
            // Comes before each part of a long checkpoint; streams change meanwhile.
            wait_synced: &|sequence| {
                self.watch_space();
                self.shard.wait_synced(sequence, WAIT_SYNCED)
            },
            // Others append meanwhile, and need the next log file.
            meanwhile: &|| {
                self.maintenance.pieces.fetch_add(1, Ordering::Relaxed);
                let now_us = self.doors.clock.monotonic_us();
                let pause_us = now_us.saturating_sub(looked_us.get());
                if u128::from(pause_us) >= LOOK_AGAIN.as_micros() {
                    looked_us.set(now_us);
                    self.prepare_spares();
                }
            },
        }
        .run()?;
        self.cold.settle_adopted();
        self.metrics.wal_retained_bytes.sub(retained_before);
        self.free_log(staged);
        if let Err(error) = self.tidy_packs() {
            report!("packs could not be compacted: {error}");
        }
        self.metrics.checkpoints.add(1);
        self.metrics
            .checkpoint_us
            .add(self.doors.clock.monotonic_us().saturating_sub(before_us));
        Ok(())
    }

    /// Recycles or removes log files that the checkpoint covers.
    fn free_log(&self, checkpoint: u64) {
        self.maintenance
            .checkpointed
            .store(checkpoint, Ordering::Release);
        if self.cold.pins.log.defers() {
            return;
        }
        let freed: Vec<RetainedFile> = {
            let mut retained = self.shard.retained.lock();
            let (free, keep) = retained
                .drain(..)
                .partition(|file| file.last_sequence <= checkpoint);
            *retained = keep;
            free
        };
        let _preparing = self.maintenance.preparing.lock();
        for file in freed {
            if let Err(error) = self.free_file(&file.file) {
                report!(
                    "could not free {}: {error}",
                    file_name(file.file.generation)
                );
            }
        }
    }

    /// Frees what was put off while a pin was held.
    pub fn free_unpinned(&self) {
        if self.cold.pins.log.take_owed() {
            self.free_log(self.maintenance.checkpointed.load(Ordering::Acquire));
        }
        if self.cold.pins.files.take_owed()
            && let Err(error) = self.cold.remove_unpinned().and_then(|()| self.tidy_packs())
        {
            report!(
                "files of deleted streams could not be removed; the next start will remove them: {error}"
            );
        }
    }

    fn free_file(&self, file: &WalFile) -> std::io::Result<()> {
        let spares = self
            .shard
            .open()
            .map_or(usize::MAX, |open| open.cursor.spare_count());
        if file.capacity == self.config.wal_file_bytes_effective() && spares <= WAL_SPARE_FILES {
            let recycled = prepare_recycled(&*self.doors.disk, file, self.next_generation())?;
            self.add_spare(recycled);
            return Ok(());
        }
        self.doors.disk.remove(&file_name(file.generation))
    }

    fn next_generation(&self) -> u64 {
        self.highest_generation.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn add_spare(&self, file: WalFile) {
        self.note_space(|open| {
            open.cursor.add_spare(file);
            open.storage_full = false;
        });
        self.shard.ring_all();
    }

    /// Keeps prewritten files ready behind the current one.
    pub fn prepare_spares(&self) {
        if self.watch_space() {
            self.maintenance.request_checkpoint();
        }
        let Some(_preparing) = self.maintenance.preparing.try_lock() else {
            return;
        };
        loop {
            match self.shard.open() {
                Ok(open) if open.cursor.spare_count() < WAL_SPARE_FILES => {}
                _ => return,
            }
            if let Err(error) = self.check_log_space() {
                self.report_no_spare(&error);
                return;
            }
            match prepare_new(
                &*self.doors.disk,
                self.next_generation(),
                self.config.wal_file_bytes_effective(),
            ) {
                Ok(file) => self.add_spare(file),
                Err(error) => {
                    self.report_no_spare(&error);
                    return;
                }
            }
        }
    }

    /// Unlinks packs without live bytes and asks the streams in mostly dead ones to move out with the next
    /// checkpoint.
    fn tidy_packs(&self) -> std::io::Result<()> {
        let live = self
            .directory
            .catalog()
            .packs()
            .map_err(std::io::Error::other)?;
        let mut leaving = HashSet::new();
        for pack in self.cold.pack_usage(&live)? {
            if pack.live_bytes == 0 {
                if !self.cold.pins.files.defers() {
                    self.cold.remove_pack(pack.number)?;
                }
            } else if pack.live_bytes * MOSTLY_DEAD_FACTOR < pack.file_bytes
                && leaving.len() < PACKS_LEFT_AT_ONCE
            {
                leaving.insert(pack.number);
                self.mark_for_moving(pack.number)?;
            }
        }
        *self.maintenance.leave_packs.lock() = leaving;
        Ok(())
    }

    fn mark_for_moving(&self, pack: u32) -> std::io::Result<()> {
        for id in self.cold.pack_streams(pack)? {
            if let Some(stream) = self
                .directory
                .get_by_id(id)
                .map_err(std::io::Error::other)?
            {
                let mut state = stream.lock();
                self.directory.mark_dirty(&stream, &mut state.dirty);
            }
        }
        Ok(())
    }

    /// Walks the catalog once after a start, a page at a time, so that untouched streams expire too and all paths are
    /// known.
    pub fn load_expiring(&self, cursor: &mut Option<Vec<u8>>) {
        let Some(after) = cursor.take() else { return };
        let mut last = None;
        let mut expiring = Vec::new();
        let result =
            self.directory
                .catalog()
                .scan(b"", &after, EXPIRY_SCAN_PAGE, &mut |path, value| {
                    last = Some(path.to_vec());
                    self.directory.catalog().known.add(path);
                    if snapshot::has_expiry(value) || snapshot::is_unneeded(value) {
                        expiring.push(path.to_vec());
                    }
                    !self.stopping.load(Ordering::Acquire)
                });
        if let Err(error) = result {
            report!("the catalog could not be searched for expiring streams: {error}");
            return;
        }
        if self.stopping.load(Ordering::Acquire) {
            return;
        }
        for path in expiring {
            let Ok(path) = std::str::from_utf8(&path) else {
                continue;
            };
            match self.directory.get(path) {
                Ok(Some(stream)) => {
                    let state = stream.lock();
                    if state.life == Life::SoftDeleted && state.fork_count == 0 {
                        self.maintenance.request_purge(stream.id);
                    }
                }
                Ok(None) => {}
                Err(error) => report!("an expiring stream could not be loaded: {error}"),
            }
        }
        if last.is_none() {
            self.directory.catalog().known.complete();
        }
        *cursor = last;
    }

    pub fn sweep_expired(&self, now_ms: u64) {
        for stream in self.directory.expiring(now_ms, self.steady_ms()) {
            match self.sweep(&stream, now_ms) {
                Ok(true) => self.shard.kick(),
                Ok(false) => {}
                // No room in the log now; the next sweep tries again.
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
#[path = "large_checkpoint_tests.rs"]
mod tests;
