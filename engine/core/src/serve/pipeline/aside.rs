//! Reads, stages, commits and large writes that must wait for the log: put aside, so that no worker waits with them.
//!
//! One thread waits for the log on behalf of all, and puts them back into the queue when it has come farther. There they
//! begin anew: looking through a body of megabytes once more for each step of the log would leave no time for anything else,
//! so each waits at least as long again as it has waited. What waits for room waits for a checkpoint, which is no step of
//! the log: it is tried again after a while in any case.
//!
//! Invariants: as many are put aside as the queue may hold (`I-PIPE-2`), each for `LOG_PATIENCE` at most and about as many times
//! as that can be doubled.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::ErrorCode;
use crate::limits::{LOG_PATIENCE, PIPELINE_QUEUE_MAX};
use crate::refusal::Refusal;
use crate::serve::pipeline::Job;
use crate::serve::pipeline::pool::{LOOK_AGAIN, Pipeline};

/// The longest pause between two tries, and the shortest between two looks that found nobody whose time has come.
const PAUSE_MAX: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_millis(2);

#[derive(Default)]
pub struct Aside {
    jobs: Mutex<Vec<Tried>>,
    came: Condvar,
}

/// Since when a job waits for the log, and how far that had come before it was tried last.
#[derive(Clone, Copy)]
pub struct Waited {
    since: Instant,
    synced: u64,
}

struct Tried {
    job: Box<Job>,
    /// How far the log had come before.
    synced: u64,
    /// Not again before that, if the log moves; again then, if it does not; and not later than that.
    again: Instant,
    anyway: Instant,
    until: Instant,
}

impl Pipeline {
    /// Takes a job that must wait for the log, which had come to `synced` before it was tried.
    pub(super) fn put_aside(&self, mut job: Box<Job>, synced: u64) {
        let now = Instant::now();
        let waited = *job.waited.get_or_insert(Waited { since: now, synced });
        let until = waited.since + LOG_PATIENCE;
        let pause = (now - waited.since).min(PAUSE_MAX);
        let moved = waited.synced < synced;
        job.waited = Some(Waited { synced, ..waited });
        let mut jobs = self.aside.jobs.lock();
        let refusal = if self.engine.stopping.load(Ordering::Acquire) {
            ErrorCode::ShuttingDown.into()
        } else if now > until || self.engine.shard.failed() {
            Refusal::with(
                ErrorCode::ServerBusy,
                "The log made no progress while the request waited.",
            )
        } else if jobs.len() >= PIPELINE_QUEUE_MAX {
            Refusal::with(
                ErrorCode::ServerBusy,
                "Too many requests are waiting for the log.",
            )
        } else {
            jobs.push(Tried {
                job,
                synced,
                again: if moved { now + pause } else { now },
                anyway: now + pause.max(LOOK_AGAIN),
                until,
            });
            drop(jobs);
            self.engine.shard.kick();
            self.aside.came.notify_one();
            return;
        };
        drop(jobs);
        self.refuse(*job, refusal);
    }

    /// A thread's loop; ends after [`Pipeline::stop`].
    pub fn bring_back(&self) {
        let shard = &self.engine.shard;
        while let Some(tried) = self.wait_for_aside() {
            let moved = || shard.synced() > tried || shard.failed();
            shard.waiters.wait_until(moved, LOOK_AGAIN);
            let now = Instant::now();
            let all = shard.failed() || self.engine.stopping.load(Ordering::Acquire);
            let ready = |tried: &mut Tried| {
                let moved = shard.synced() > tried.synced && now >= tried.again;
                let may_succeed = moved || now >= tried.anyway;
                all || may_succeed || now > tried.until || tried.job.is_abandoned()
            };
            let back: Vec<_> = self.aside.jobs.lock().extract_if(.., ready).collect();
            if back.is_empty() {
                self.rest(now + REST);
            }
            self.queue_again(back.into_iter().map(|tried| tried.job));
        }
    }

    /// Returns when there are some: the least that the log had come to. `None`: the end.
    fn wait_for_aside(&self) -> Option<u64> {
        let mut jobs = self.aside.jobs.lock();
        loop {
            if self.stopped() {
                return None;
            }
            match jobs.iter().map(|tried| tried.synced).min() {
                Some(synced) => return Some(synced),
                None => self.aside.came.wait(&mut jobs),
            }
        }
    }

    /// Ends the thread; what is put aside is dropped.
    pub(super) fn stop_aside(&self) {
        // Under the lock: it sees the end before it waits, or is woken.
        self.aside.jobs.lock().clear();
        self.aside.came.notify_all();
    }
}
