//! Group commit in two stages: a batch is written, then synced; each stage has its watermark.
//!
//! Whoever calls does the work: the commit thread writes and syncs, a reactor with nothing better to do does the
//! same inline, a reactor with `disk` appends writes by itself, and while a sync runs the write thread writes
//! what does not wait for it. Batches in which everybody waits for the sync grow until it is their turn.
//!
//! Invariants
//! - `I-COMMIT-1` `synced` moves only after a successful sync of everything up to it, left files included.
//! - `I-COMMIT-2` What is visible moves before its watermark, and the watermark before anybody is rung: who has
//!   an acknowledgement can read what it acknowledges.
//!   A sync may overtake the writer of its newest batch, so that what is visible is the highest of what both say, and
//!   `written` is moved by the writer alone.
//! - `I-COMMIT-3` After a failed or short write or sync nothing is written any more and no sync is tried
//!   again: a second sync would prove nothing.
//! - `I-COMMIT-4` Writing never waits for a sync: `writer` is taken inside `syncer` or alone, never the other way.

use crate::report;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::codec::seal_batch;
use crate::io::{Disk, Doors, OpenMode, write_all_at};
use crate::log::wal::{FAILED_MARK, WalCursor, WalFile};
use crate::metrics::Metrics;
use crate::model::{Gate, Stage};
use crate::shard::ack::{Mailbox, Waiters};
use crate::shard::batch::{NotStaged, OpenBatch, SealedBatch, Touched};
use crate::shard::changes::Changes;
use crate::shard::fault::Fault;
use crate::shard::feed::Feed;
use crate::shard::threads::{Wake, Work};
use crate::shard::times::RecentCommits;
use crate::stream::handle::Stream;
use crate::stream::state::Life;

/// A commit that takes longer counts as stalled for health checks.
const STALLED_US: u64 = 5_000_000;
/// Weak appends seen within this time keep reactors from syncing by themselves: the next one would wait for it.
const WEAK_RECENT_US: u64 = 1_000_000;
/// Beside weak appends syncs begin no closer to each other than this.
const SYNC_PACE_US: u64 = 500;

/// A log file that is no longer written to, and the last sequence in it.
pub struct RetainedFile {
    pub file: Arc<WalFile>,
    pub last_sequence: u64,
}

pub struct Shard {
    doors: Doors,
    metrics: Arc<Metrics>,
    open: Mutex<OpenBatch>,
    writer: Mutex<Writer>,
    syncer: Mutex<Syncer>,
    unsynced: Mutex<Unsynced>,
    written: AtomicU64,
    synced: AtomicU64,
    failed: AtomicBool,
    /// Moving average of a sync, for the choice between inline and thread; the longest there is until one was measured.
    sync_us: AtomicU64,
    disk_sync_us: u64,
    fault: Fault,
    /// When the write and the sync under way began; 0 = none is.
    writing_since_us: AtomicU64,
    syncing_since_us: AtomicU64,
    /// When the last sync began.
    sync_began_us: AtomicU64,
    /// When an append that does not wait for the sync was last seen.
    weak_seen_us: AtomicU64,
    pub waiters: Waiters,
    pub feed: Feed,
    pub changes: Changes,
    pub mailboxes: Vec<Mailbox>,
    pub retained: Mutex<Vec<RetainedFile>>,
    pub recent: RecentCommits,
    work: Work,
}

/// Streams to be looked at by each reactor, kept between commits for their memory.
type Woken = Vec<Vec<Arc<Stream>>>;

struct Writer {
    spare: Vec<u8>,
    woken: Woken,
}

struct Syncer {
    woken: Woken,
}

/// Written but not synced.
#[derive(Default)]
struct Unsynced {
    /// In the order of their sequences; a sync covers all of them.
    files: Vec<Arc<WalFile>>,
    /// What becomes visible with the sync.
    touched: Vec<Touched>,
    up_to: u64,
    /// When the oldest `disk` frame was written; 0 = there is none.
    disk_since_us: u64,
}

impl Shard {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        doors: Doors,
        metrics: Arc<Metrics>,
        cursor: WalCursor,
        next_sequence: u64,
        retained: Vec<RetainedFile>,
        mailboxes: Vec<Mailbox>,
        disk_sync_ms: u64,
        fault: Fault,
    ) -> Shard {
        let nonce = doors.random.next_u64();
        let woken = || mailboxes.iter().map(|_| Vec::new()).collect();
        Shard {
            doors,
            metrics,
            open: Mutex::new(OpenBatch::new(cursor, next_sequence)),
            writer: Mutex::new(Writer {
                spare: Vec::new(),
                woken: woken(),
            }),
            syncer: Mutex::new(Syncer { woken: woken() }),
            unsynced: Mutex::default(),
            written: AtomicU64::new(next_sequence - 1),
            synced: AtomicU64::new(next_sequence - 1),
            failed: AtomicBool::new(false),
            sync_us: AtomicU64::new(u64::MAX),
            disk_sync_us: disk_sync_ms * 1000,
            fault,
            writing_since_us: AtomicU64::new(0),
            syncing_since_us: AtomicU64::new(0),
            sync_began_us: AtomicU64::new(0),
            weak_seen_us: AtomicU64::new(0),
            waiters: Waiters::default(),
            feed: Feed::default(),
            changes: Changes::new(nonce),
            mailboxes,
            retained: Mutex::new(retained),
            recent: RecentCommits::default(),
            work: Work::default(),
        }
    }

    /// Opens the batch for staging. Taken after the stream's lock, never before it.
    pub fn open(&self) -> Result<MutexGuard<'_, OpenBatch>, NotStaged> {
        if self.failed() {
            return Err(NotStaged::Failed);
        }
        Ok(self.open.lock())
    }

    /// Newest sequence that is in the log file.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    pub fn synced(&self) -> u64 {
        self.synced.load(Ordering::SeqCst)
    }

    /// Whether what the gate waits for has come.
    pub fn reached(&self, gate: Gate) -> bool {
        match gate.stage {
            Stage::Applied => true,
            Stage::Written => gate.sequence <= self.written(),
            Stage::Synced => gate.sequence <= self.synced(),
        }
    }

    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// How long a sync takes of late.
    pub fn usual_sync_us(&self) -> u64 {
        self.sync_us.load(Ordering::Relaxed)
    }

    /// Newest sequence given out.
    pub fn staged(&self) -> u64 {
        self.open.lock().next_sequence - 1
    }

    /// Notes that there are appends which must not wait for a sync.
    pub fn saw_weak(&self) {
        self.weak_seen_us
            .store(self.doors.clock.monotonic_us().max(1), Ordering::Relaxed);
    }

    pub fn weak_is_recent(&self) -> bool {
        let seen_us = self.weak_seen_us.load(Ordering::Relaxed);
        seen_us != 0 && self.doors.clock.monotonic_us().saturating_sub(seen_us) < WEAK_RECENT_US
    }

    /// Lets the threads look: the commit thread, or the write thread while that one syncs.
    pub fn kick(&self) {
        self.work.kick(self.open.lock().weak_frames > 0);
    }

    /// The commit thread's loop; ends after [`Shard::stop_threads`] and a last commit.
    pub fn run_commit_thread(&self) {
        while self.work.wait_commit(self.disk_sync_due_in()) == Wake::Work {
            self.pace();
            while self.commit(None) {
                self.pace();
            }
        }
        while self.commit(None) {}
    }

    /// Beside weak appends strong ones are gathered for a moment: a sync costs processor time and wakes that
    /// the weak would feel, and one sync serves all who have come. Meanwhile the write thread writes.
    fn pace(&self) {
        let began_us = self.sync_began_us.load(Ordering::Relaxed);
        let since_us = self.doors.clock.monotonic_us().saturating_sub(began_us);
        if since_us < SYNC_PACE_US && self.weak_is_recent() {
            self.work.begin_sync();
            std::thread::sleep(Duration::from_micros(SYNC_PACE_US - since_us));
            self.work.end_sync();
        }
    }

    /// The write thread's loop: it has work only while a sync runs.
    pub fn run_write_thread(&self) {
        while self.work.wait_write() == Wake::Work {
            let weak = self.open.lock().weak_frames > 0;
            if weak {
                self.write(self.writer.lock(), None);
            }
        }
    }

    pub fn stop_threads(&self) {
        self.work.stop();
    }

    /// How long the oldest unsynced `disk` frame may still wait; `None` = there is none.
    fn disk_sync_due_in(&self) -> Option<Duration> {
        let since_us = self.unsynced.lock().disk_since_us;
        let age_us = self.doors.clock.monotonic_us().saturating_sub(since_us);
        (since_us != 0).then(|| Duration::from_micros(self.disk_sync_us.saturating_sub(age_us)))
    }

    /// Writes and syncs if nobody else is syncing. `None` = somebody else is.
    pub fn try_commit(&self, reactor: usize) -> Option<bool> {
        let syncer = self.syncer.try_lock()?;
        self.metrics.batches_inline.add(1);
        Some(self.commit_locked(syncer, Some(reactor)))
    }

    /// Writes the open batch and syncs what somebody waits for. Returns whether there was anything to do.
    pub fn commit(&self, reactor: Option<usize>) -> bool {
        self.commit_locked(self.syncer.lock(), reactor)
    }

    fn commit_locked(&self, mut syncer: MutexGuard<'_, Syncer>, reactor: Option<usize>) -> bool {
        let wrote = self.write(self.writer.lock(), reactor);
        let wanted = self.open.lock().sync_target > self.synced();
        let due = self.disk_sync_due_in().is_some_and(|left| left.is_zero());
        let synced = (wanted || due) && self.sync(&mut syncer, reactor);
        wrote || synced
    }

    /// Writes the open batch by a reactor itself, unless somebody is writing.
    pub fn try_write(&self, reactor: usize) -> Option<bool> {
        Some(self.write(self.writer.try_lock()?, Some(reactor)))
    }

    fn write(&self, mut writer: MutexGuard<'_, Writer>, reactor: Option<usize>) -> bool {
        if self.failed() {
            return false;
        }
        let mut sealed = {
            let mut open = self.open.lock();
            if open.is_empty() {
                return false;
            }
            open.seal(std::mem::take(&mut writer.spare))
        };
        let began_us = self.now_us();
        self.writing_since_us.store(began_us, Ordering::Relaxed);
        let written = self.write_batch(&mut sealed);
        self.writing_since_us.store(0, Ordering::Relaxed);
        let file = match written {
            Ok(file) => file,
            Err(error) => {
                self.fail(&error.to_string());
                return false;
            }
        };
        let mut touched = std::mem::take(&mut sealed.touched);
        let ended_us = self.now_us();
        self.recent.wrote(sealed.last_sequence, began_us, ended_us);
        let first_disk = self.note_unsynced(file, &sealed, &mut touched, ended_us);
        let noted = self.show(&mut touched, &mut writer.woken);
        self.written
            .fetch_max(sealed.last_sequence, Ordering::SeqCst);
        self.ring(&mut writer.woken, Stage::Written, reactor, noted);
        // One large batch must not keep its memory for ever.
        if sealed.bytes.capacity() <= 4 << 20 {
            writer.spare = std::mem::take(&mut sealed.bytes);
        }
        if first_disk {
            // The commit thread sets its clock.
            self.kick();
        }
        true
    }

    fn write_batch(&self, sealed: &mut SealedBatch) -> io::Result<Arc<WalFile>> {
        let placement = sealed
            .placement
            .take()
            .ok_or_else(|| io::Error::other("a staged batch has no room in the log"))?;
        if let Some(left) = placement.left {
            self.retained.lock().push(RetainedFile {
                file: left,
                last_sequence: sealed.first_sequence - 1,
            });
        }
        let header = sealed.header(placement.file.generation, self.synced());
        seal_batch(&mut sealed.bytes, &header);
        let log = &*placement.file.file;
        self.fault
            .before_write(log, &sealed.bytes, placement.position)?;
        write_all_at(log, &sealed.bytes, placement.position)?;
        self.metrics.batches.add(1);
        self.metrics.batch_bytes.add(sealed.bytes.len() as u64);
        self.metrics
            .wal_retained_bytes
            .add(sealed.bytes.len() as u64);
        Ok(placement.file)
    }

    /// Hands a written batch to the next sync, with what becomes visible only then. Returns whether the
    /// `disk` clock begins to run.
    fn note_unsynced(
        &self,
        file: Arc<WalFile>,
        sealed: &SealedBatch,
        touched: &mut Vec<Touched>,
        now_us: u64,
    ) -> bool {
        let mut unsynced = self.unsynced.lock();
        let known = unsynced
            .files
            .last()
            .is_some_and(|last| Arc::ptr_eq(last, &file));
        if !known {
            unsynced.files.push(file);
        }
        if touched.iter().all(|entry| entry.stage == Stage::Synced) {
            unsynced.touched.append(touched);
        } else {
            let later = touched.extract_if(.., |entry| entry.stage == Stage::Synced);
            unsynced.touched.extend(later);
        }
        unsynced.up_to = sealed.last_sequence;
        let first_disk = sealed.has_disk && unsynced.disk_since_us == 0;
        if first_disk {
            unsynced.disk_since_us = now_us;
        }
        first_disk
    }

    fn sync(&self, syncer: &mut Syncer, reactor: Option<usize>) -> bool {
        if self.failed() {
            return false;
        }
        let Unsynced {
            files,
            mut touched,
            up_to,
            ..
        } = std::mem::take(&mut *self.unsynced.lock());
        if files.is_empty() {
            return false;
        }
        let began_us = self.now_us();
        self.sync_began_us.store(began_us, Ordering::Relaxed);
        self.syncing_since_us.store(began_us, Ordering::Relaxed);
        self.work.begin_sync();
        let result = files.iter().try_for_each(|file| self.sync_file(file));
        self.work.end_sync();
        self.syncing_since_us.store(0, Ordering::Relaxed);
        if let Err(error) = result {
            self.fail(&error.to_string());
            return false;
        }
        self.recent.synced(up_to, began_us, self.now_us());
        let noted = self.show(&mut touched, &mut syncer.woken);
        self.synced.store(up_to, Ordering::SeqCst);
        self.ring(&mut syncer.woken, Stage::Synced, reactor, noted);
        true
    }

    fn sync_file(&self, file: &WalFile) -> io::Result<()> {
        let before = self.doors.clock.monotonic_us();
        self.fault.before_sync()?;
        file.file.sync()?;
        let took = self.doors.clock.monotonic_us().saturating_sub(before);
        let average = match self.sync_us.load(Ordering::Relaxed) {
            u64::MAX => took,
            known => (known * 7 + took) / 8,
        };
        self.sync_us.store(average, Ordering::Relaxed);
        self.metrics.sync_us.add(took);
        Ok(())
    }

    /// Moves what is visible and collects who waits for it. Returns whether the change feed has something.
    fn show(&self, touched: &mut Vec<Touched>, woken: &mut Woken) -> bool {
        let mut noted = false;
        for Touched {
            stream, visible, ..
        } in touched.drain(..)
        {
            let watchers = {
                let mut state = stream.lock();
                state.visible = state.visible.max(visible);
                state.changed = self.changes.stamp();
                if state.life != Life::Live {
                    self.changes.note_removed(state.changed, &stream.path);
                }
                stream.watchers()
            };
            // Asked after the tail has moved: who begins to watch later sees the new tail itself.
            if self.feed.is_active() {
                noted |= self.feed.note(&stream);
            }
            add_woken(woken, watchers, &stream);
        }
        noted
    }

    /// Lets those look who wait for `stage`, and the readers of changed streams.
    fn ring(&self, woken: &mut Woken, stage: Stage, reactor: Option<usize>, noted: bool) {
        for (number, woken) in woken.iter_mut().enumerate() {
            let waiting = self.mailboxes[number].is_waiting(stage);
            let has_woken = !woken.is_empty();
            if has_woken {
                self.mailboxes[number].add_woken(woken);
            }
            // The committing reactor looks by itself when it returns.
            if (waiting || has_woken) && reactor != Some(number) {
                self.mailboxes[number].ring();
            }
        }
        self.waiters.notify();
        self.changes.ring();
        if noted {
            self.feed.deliver();
        }
    }

    /// Tells readers of a stream whose appends go through no batch.
    pub fn wake_readers(&self, stream: &Arc<Stream>) {
        let watchers = stream.watchers();
        if watchers != 0 {
            let mut woken: Woken = self.mailboxes.iter().map(|_| Vec::new()).collect();
            add_woken(&mut woken, watchers, stream);
            self.ring(&mut woken, Stage::Applied, None, false);
        }
        self.changes.ring();
        if self.feed.is_active() && self.feed.note(stream) {
            self.feed.deliver();
        }
    }

    fn now_us(&self) -> u64 {
        self.doors.clock.monotonic_us().max(1)
    }

    /// What keeps the log from doing its work, in one word; `None` = nothing.
    pub fn trouble(&self) -> Option<&'static str> {
        let now_us = self.doors.clock.monotonic_us();
        let stalled = [&self.writing_since_us, &self.syncing_since_us]
            .into_iter()
            .map(|since| since.load(Ordering::Relaxed))
            .any(|since_us| since_us > 0 && now_us.saturating_sub(since_us) > STALLED_US);
        if self.failed() {
            Some("log_failed")
        } else if stalled {
            Some("log_stalled")
        } else {
            None
        }
    }

    /// Stops all writes for good: what is on disk can only be judged by a restart.
    pub fn fail(&self, error: &str) {
        if self.failed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.metrics.wal_failed.set(1);
        report!("the log failed and takes no more writes until a restart: {error}");
        // Pages that a failed sync has dropped look as if they had never been written.
        if let Err(error) = leave_failed_mark(&*self.doors.disk) {
            report!("the failure could not be recorded in the data directory: {error}");
        }
        self.ring_all();
    }

    pub fn ring_all(&self) {
        self.mailboxes.iter().for_each(Mailbox::ring);
        self.waiters.notify();
        self.changes.ring_now();
    }

    /// Waits until everything up to `sequence` is synced. `false`: the log failed or time is up.
    pub fn wait_synced(&self, sequence: u64, timeout: Duration) -> bool {
        self.wait_for(Gate::synced(sequence), timeout)
    }

    /// Has the log do what opens the gate.
    pub fn want(&self, gate: Gate) {
        if gate.stage == Stage::Synced {
            let mut open = self.open.lock();
            open.sync_target = open.sync_target.max(gate.sequence);
        }
        self.kick();
    }

    /// Waits until the gate opens. `false`: the log failed or time is up.
    pub fn wait_for(&self, gate: Gate, timeout: Duration) -> bool {
        if self.reached(gate) {
            return true;
        }
        self.want(gate);
        self.waiters
            .wait_until(|| self.reached(gate) || self.failed(), timeout)
            && self.reached(gate)
    }
}

fn add_woken(woken: &mut Woken, mut watchers: u64, stream: &Arc<Stream>) {
    while watchers != 0 {
        let number = watchers.trailing_zeros() as usize;
        watchers &= watchers - 1;
        woken[number].push(Arc::clone(stream));
    }
}

fn leave_failed_mark(disk: &dyn Disk) -> io::Result<()> {
    disk.open(FAILED_MARK, OpenMode::CreateOrOpen)?.sync_all()?;
    disk.sync_dir("")
}

#[cfg(test)]
#[path = "commit_tests.rs"]
mod tests;
