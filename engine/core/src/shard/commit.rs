//! Group commit: one write, one sync, then the watermarks move.
//!
//! Whoever calls [`Shard::commit`] does the work: the commit thread, or a reactor with nothing better to do.
//! While a sync runs, the next batch grows.
//!
//! Invariants
//! - `I-COMMIT-1` `synced` moves only after a successful sync of everything up to it, left files included.
//! - `I-COMMIT-2` What is visible moves before `synced`, and `synced` before anybody is rung: who has an
//!   acknowledgement can read what it acknowledges.
//! - `I-COMMIT-3` After a failed or short write or sync nothing is written any more and no sync is tried
//!   again: a second sync would prove nothing.

use crate::report;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::codec::seal_batch;
use crate::io::{Doors, write_all_at};
use crate::log::wal::{WalCursor, WalFile};
use crate::metrics::Metrics;
use crate::shard::ack::{Mailbox, Waiters};
use crate::shard::batch::{NotStaged, OpenBatch, SealedBatch, Touched};
use crate::shard::fault::Fault;
use crate::shard::feed::Feed;
use crate::stream::handle::Stream;

/// A commit that takes longer counts as stalled for health checks.
const STALLED_US: u64 = 5_000_000;

/// A log file that is no longer written to, and the last sequence in it.
pub struct RetainedFile {
    pub file: Arc<WalFile>,
    pub last_sequence: u64,
}

pub struct Shard {
    doors: Doors,
    metrics: Arc<Metrics>,
    open: Mutex<OpenBatch>,
    committer: Mutex<Committer>,
    synced: AtomicU64,
    failed: AtomicBool,
    /// Moving average of a sync, for the choice between inline and thread.
    sync_us: AtomicU64,
    fault: Fault,
    /// When the commit under way began; 0 = none is.
    busy_since_us: AtomicU64,
    pub waiters: Waiters,
    pub feed: Feed,
    pub mailboxes: Vec<Mailbox>,
    pub retained: Mutex<Vec<RetainedFile>>,
    work: Mutex<Work>,
    work_changed: Condvar,
}

#[derive(Default)]
struct Work {
    pending: bool,
    stop: bool,
}

struct Committer {
    spare: Vec<u8>,
    woken: Vec<Vec<Arc<Stream>>>,
    /// Written but not synced: weak batches do not wait, the next sync covers them.
    unsynced: Option<Arc<WalFile>>,
}

impl Shard {
    pub fn new(
        doors: Doors,
        metrics: Arc<Metrics>,
        cursor: WalCursor,
        next_sequence: u64,
        retained: Vec<RetainedFile>,
        mailboxes: Vec<Mailbox>,
        fault: Fault,
    ) -> Shard {
        let woken = mailboxes.iter().map(|_| Vec::new()).collect();
        Shard {
            doors,
            metrics,
            open: Mutex::new(OpenBatch::new(cursor, next_sequence)),
            committer: Mutex::new(Committer {
                spare: Vec::new(),
                woken,
                unsynced: None,
            }),
            synced: AtomicU64::new(next_sequence - 1),
            failed: AtomicBool::new(false),
            sync_us: AtomicU64::new(0),
            fault,
            busy_since_us: AtomicU64::new(0),
            waiters: Waiters::default(),
            feed: Feed::default(),
            mailboxes,
            retained: Mutex::new(retained),
            work: Mutex::default(),
            work_changed: Condvar::new(),
        }
    }

    /// Opens the batch for staging. Taken after the stream's lock, never before it.
    pub fn open(&self) -> Result<MutexGuard<'_, OpenBatch>, NotStaged> {
        if self.failed() {
            return Err(NotStaged::Failed);
        }
        Ok(self.open.lock())
    }

    pub fn synced(&self) -> u64 {
        self.synced.load(Ordering::SeqCst)
    }

    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub fn last_sync_us(&self) -> u64 {
        self.sync_us.load(Ordering::Relaxed)
    }

    /// Newest sequence given out.
    pub fn staged(&self) -> u64 {
        self.open.lock().next_sequence - 1
    }

    /// Lets the commit thread look.
    pub fn kick(&self) {
        let mut work = self.work.lock();
        if !std::mem::replace(&mut work.pending, true) {
            self.work_changed.notify_one();
        }
    }

    /// The commit thread's loop; ends after [`Shard::stop_thread`] and a last commit.
    pub fn run_commit_thread(&self) {
        loop {
            {
                let mut work = self.work.lock();
                while !work.pending && !work.stop {
                    self.work_changed.wait(&mut work);
                }
                work.pending = false;
                if work.stop {
                    break;
                }
            }
            while self.commit(None) {}
        }
        while self.commit(None) {}
    }

    pub fn stop_thread(&self) {
        self.work.lock().stop = true;
        self.work_changed.notify_all();
    }

    /// Commits the open batch if nobody else is committing. `None` = somebody else is.
    pub fn try_commit(&self, reactor: usize) -> Option<bool> {
        let committer = self.committer.try_lock()?;
        self.metrics.batches_inline.add(1);
        Some(self.commit_locked(committer, Some(reactor)))
    }

    /// Commits the open batch. Returns whether there was anything to do.
    pub fn commit(&self, reactor: Option<usize>) -> bool {
        self.commit_locked(self.committer.lock(), reactor)
    }

    fn commit_locked(
        &self,
        mut committer: MutexGuard<'_, Committer>,
        reactor: Option<usize>,
    ) -> bool {
        if self.failed() {
            return false;
        }
        let mut sealed = {
            let mut open = self.open.lock();
            if open.is_empty() && !(open.needs_sync && committer.unsynced.is_some()) {
                open.needs_sync = false;
                return false;
            }
            open.seal(std::mem::take(&mut committer.spare))
        };
        self.busy_since_us
            .store(self.doors.clock.monotonic_us().max(1), Ordering::Relaxed);
        let written = self.write(&mut committer, &mut sealed);
        self.busy_since_us.store(0, Ordering::Relaxed);
        if let Err(error) = written {
            self.fail(&error.to_string());
            return false;
        }
        self.publish(&mut committer, &mut sealed, reactor);
        // One large batch must not keep its memory for ever.
        if sealed.bytes.capacity() <= 4 << 20 {
            committer.spare = sealed.bytes;
        }
        true
    }

    fn write(&self, committer: &mut Committer, sealed: &mut SealedBatch) -> std::io::Result<()> {
        if sealed.frames > 0 {
            let placement = sealed
                .placement
                .take()
                .ok_or_else(|| std::io::Error::other("a staged batch has no room in the log"))?;
            if let Some(left) = placement.left {
                // Nothing in the next file may count as synced before everything in this one is.
                if committer.unsynced.is_some() {
                    self.sync(&left)?;
                }
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
            committer.unsynced = Some(placement.file);
            self.metrics.batches.add(1);
            self.metrics.batch_bytes.add(sealed.bytes.len() as u64);
            self.metrics
                .wal_retained_bytes
                .add(sealed.bytes.len() as u64);
        }
        if sealed.needs_sync
            && let Some(file) = committer.unsynced.take()
        {
            self.sync(&file)?;
        }
        Ok(())
    }

    fn sync(&self, file: &WalFile) -> std::io::Result<()> {
        let before = self.doors.clock.monotonic_us();
        self.fault.before_sync()?;
        file.file.sync()?;
        let took = self.doors.clock.monotonic_us().saturating_sub(before);
        let average = self.sync_us.load(Ordering::Relaxed);
        self.sync_us
            .store((average * 7 + took) / 8, Ordering::Relaxed);
        self.metrics.sync_us.add(took);
        Ok(())
    }

    fn publish(&self, committer: &mut Committer, sealed: &mut SealedBatch, reactor: Option<usize>) {
        let mut noted = false;
        for Touched { stream, visible } in sealed.touched.drain(..) {
            let watchers = {
                let mut state = stream.lock();
                if visible.tail >= state.visible.tail {
                    state.visible = visible;
                }
                stream.watchers()
            };
            // Asked after the tail has moved: who begins to watch later sees the new tail itself.
            if self.feed.is_active() {
                self.feed.note(&stream);
                noted = true;
            }
            let mut mask = watchers;
            while mask != 0 {
                let number = mask.trailing_zeros() as usize;
                mask &= mask - 1;
                committer.woken[number].push(Arc::clone(&stream));
            }
        }
        if committer.unsynced.is_none() {
            self.synced.store(sealed.last_sequence, Ordering::SeqCst);
        }
        for (number, woken) in committer.woken.iter_mut().enumerate() {
            let waiting = self.mailboxes[number].is_waiting();
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
        if noted {
            self.feed.deliver();
        }
    }

    /// What keeps the log from doing its work, in one word; `None` = nothing.
    pub fn trouble(&self) -> Option<&'static str> {
        let since_us = self.busy_since_us.load(Ordering::Relaxed);
        if self.failed() {
            Some("log_failed")
        } else if since_us > 0
            && self.doors.clock.monotonic_us().saturating_sub(since_us) > STALLED_US
        {
            Some("log_stalled")
        } else {
            None
        }
    }

    /// Stops all writes for good: what is on disk can only be judged by a restart.
    pub fn fail(&self, error: &str) {
        self.failed.store(true, Ordering::Release);
        self.metrics.wal_failed.set(1);
        report!("the log failed and takes no more writes until a restart: {error}");
        self.ring_all();
    }

    pub fn ring_all(&self) {
        self.mailboxes.iter().for_each(Mailbox::ring);
        self.waiters.notify();
    }

    /// Waits until everything up to `sequence` is synced. `false`: the log failed or time is up.
    pub fn wait_synced(&self, sequence: u64, timeout: Duration) -> bool {
        if self.synced() < sequence {
            self.open.lock().needs_sync = true;
            self.kick();
        }
        self.waiters
            .wait_until(|| self.synced() >= sequence || self.failed(), timeout)
            && self.synced() >= sequence
    }
}
