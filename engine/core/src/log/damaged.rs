//! What is known to be damaged, over all streams: how many ranges, whom to look at next, and what is unsaved.
//!
//! The ranges themselves are on their streams (`stream::damage`); this is the sum that readiness and metrics tell,
//! and the meeting point of those who meet damage (reads, checkpoints) with the scrub that looks into it.
//!
//! Invariants
//! - the sum is exact once the catalog has been walked; before, it is at least what the last run knew;
//! - the list of suspects is bounded: who does not fit is met again by the next pass.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::limits::SUSPECTS_MAX;
use crate::metrics::Metrics;
use crate::model::StreamId;

pub struct Damaged {
    metrics: Arc<Metrics>,
    known: Mutex<Known>,
    changed: Condvar,
    /// Grows with every range that is recorded: who failed before and sees it grown tries again.
    version: AtomicU64,
}

#[derive(Default)]
struct Known {
    ranges: HashMap<StreamId, usize>,
    sum: u64,
    /// What the last run knew, until this one has counted for itself.
    told: u64,
    unsaved: bool,
    suspects: VecDeque<StreamId>,
    suspected: HashSet<StreamId>,
    stopped: bool,
}

impl Damaged {
    pub fn new(metrics: Arc<Metrics>) -> Damaged {
        Damaged {
            metrics,
            known: Mutex::default(),
            changed: Condvar::new(),
            version: AtomicU64::new(0),
        }
    }

    /// How many ranges the last run knew.
    pub fn tell(&self, ranges: u64) {
        let mut known = self.known.lock();
        known.told = ranges;
        self.publish(&known);
    }

    /// Every stream with damage has been noted.
    pub fn counted(&self) {
        let mut known = self.known.lock();
        known.told = 0;
        self.publish(&known);
    }

    /// A stream has this many damaged ranges.
    pub fn note(&self, stream: StreamId, ranges: usize) {
        let mut known = self.known.lock();
        let before = known.ranges.insert(stream, ranges).unwrap_or(0);
        known.sum = known.sum + ranges as u64 - before as u64;
        self.publish(&known);
    }

    /// A range was found that nobody knew; its stream has been noted.
    pub fn found(&self, to_be_saved: bool) {
        self.known.lock().unsaved |= to_be_saved;
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// The stream is no more.
    pub fn forget(&self, stream: StreamId) {
        let mut known = self.known.lock();
        if let Some(ranges) = known.ranges.remove(&stream) {
            known.sum -= ranges as u64;
            self.publish(&known);
        }
    }

    fn publish(&self, known: &Known) {
        self.metrics.damaged_ranges.set(known.sum.max(known.told));
    }

    pub fn ranges(&self) -> u64 {
        self.metrics.damaged_ranges.get()
    }

    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Whether something was found since the last call.
    pub fn take_unsaved(&self) -> bool {
        std::mem::take(&mut self.known.lock().unsaved)
    }

    /// Asks for a look at all of a stream soon.
    pub fn suspect(&self, stream: StreamId) {
        let mut known = self.known.lock();
        if known.suspects.len() < SUSPECTS_MAX && known.suspected.insert(stream) {
            known.suspects.push_back(stream);
            self.changed.notify_all();
        }
    }

    /// The same from somebody who meets the same damage again and again: only if none is known yet.
    pub fn suspect_unknown(&self, stream: StreamId) {
        if !self.known.lock().ranges.contains_key(&stream) {
            self.suspect(stream);
        }
    }

    pub fn next_suspect(&self) -> Option<StreamId> {
        let mut known = self.known.lock();
        let next = known.suspects.pop_front()?;
        known.suspected.remove(&next);
        Some(next)
    }

    /// Waits for a suspect, or until the time is up. `false`: it is time to stop.
    pub fn wait_for_suspect(&self, timeout: Duration) -> bool {
        let mut known = self.known.lock();
        if !known.stopped && known.suspects.is_empty() {
            self.changed.wait_for(&mut known, timeout);
        }
        !known.stopped
    }

    /// Waits until the time is up. `false`: it is time to stop.
    pub fn pause(&self, timeout: Duration) -> bool {
        let mut known = self.known.lock();
        let stopped = |known: &mut Known| !known.stopped;
        self.changed.wait_while_for(&mut known, stopped, timeout);
        !known.stopped
    }

    pub fn stop(&self) {
        self.known.lock().stopped = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_follows_its_streams_and_what_was_told_until_counted() {
        let metrics = Arc::new(Metrics::default());
        let damaged = Damaged::new(Arc::clone(&metrics));
        damaged.tell(3);
        damaged.note(StreamId(1), 2);
        assert_eq!(metrics.damaged_ranges.get(), 3, "the last run knew more");
        damaged.counted();
        assert_eq!(metrics.damaged_ranges.get(), 2);
        damaged.note(StreamId(1), 1);
        damaged.note(StreamId(2), 4);
        damaged.forget(StreamId(1));
        damaged.forget(StreamId(1));
        assert_eq!(damaged.ranges(), 4);
    }

    #[test]
    fn suspects_come_once_and_within_their_bound() {
        let damaged = Damaged::new(Arc::default());
        for id in [7, 8, 7] {
            damaged.suspect(StreamId(id));
        }
        assert_eq!(damaged.next_suspect(), Some(StreamId(7)));
        damaged.suspect(StreamId(7));
        assert_eq!(damaged.next_suspect(), Some(StreamId(8)));
        assert_eq!(damaged.next_suspect(), Some(StreamId(7)));
        assert_eq!(damaged.next_suspect(), None);
        (0..2 * SUSPECTS_MAX as u64).for_each(|id| damaged.suspect(StreamId(id)));
        assert_eq!(
            std::iter::from_fn(|| damaged.next_suspect()).count(),
            SUSPECTS_MAX
        );
    }
}
