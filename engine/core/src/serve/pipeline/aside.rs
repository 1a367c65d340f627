//! Reads of streams that are not final yet: put aside, so that no worker waits with them.
//!
//! One thread waits for the log on behalf of all, and puts them back into the queue when it has come farther. There they
//! begin anew, which costs little: a read that has come to something is answered with that, and does not wait.
//!
//! Invariants: as many are put aside as the queue may hold (`I-PIPE-2`), each for `PATIENCE` at most.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::ErrorCode;
use crate::limits::PIPELINE_QUEUE_MAX;
use crate::refusal::Refusal;
use crate::serve::pipeline::Job;
use crate::serve::pipeline::pool::{LOOK_AGAIN, Pipeline};
use crate::shard::engine::Undone;

const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
pub struct Aside {
    /// With how far the log had come before each was tried.
    jobs: Mutex<Vec<(Box<Job>, u64)>>,
    came: Condvar,
}

impl Pipeline {
    /// Takes a read that must wait for the log, which had come to `synced` before it was tried.
    pub(super) fn put_aside(&self, mut job: Box<Job>, synced: u64) {
        let since = *job.waits_since.get_or_insert_with(Instant::now);
        let mut jobs = self.aside.jobs.lock();
        let refusal = if self.engine.stopping.load(Ordering::Acquire) {
            ErrorCode::ShuttingDown.into()
        } else if since.elapsed() > PATIENCE {
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
            jobs.push((job, synced));
            drop(jobs);
            self.aside.came.notify_one();
            return;
        };
        drop(jobs);
        let (reactor, conn) = (job.reactor, job.conn);
        drop(job);
        self.finish(reactor, conn, Err(Undone::refused(refusal)));
    }

    /// A thread's loop; ends after [`Pipeline::stop`].
    pub fn bring_back(&self) {
        let shard = &self.engine.shard;
        while let Some(tried) = self.wait_for_aside() {
            let moved = || shard.synced() > tried || shard.failed();
            shard.waiters.wait_until(moved, LOOK_AGAIN);
            let now = Instant::now();
            let all = shard.failed() || self.engine.stopping.load(Ordering::Acquire);
            let ready = |(job, tried): &mut (Box<Job>, u64)| {
                let late = job.waits_since.is_some_and(|since| now > since + PATIENCE);
                all || late || job.asker.is_gone() || shard.synced() > *tried
            };
            let back: Vec<_> = self.aside.jobs.lock().extract_if(.., ready).collect();
            self.queue_again(back.into_iter().map(|(job, _)| job));
        }
    }

    /// Returns when there are some: the least that the log had come to. `None`: the end.
    fn wait_for_aside(&self) -> Option<u64> {
        let mut jobs = self.aside.jobs.lock();
        loop {
            if self.stopped() {
                return None;
            }
            match jobs.iter().map(|(_, tried)| *tried).min() {
                Some(tried) => return Some(tried),
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
