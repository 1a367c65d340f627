//! Which streams have changed since a moment, and a bell for those who wait for that.
//!
//! Time is counted in *stamps*. Whoever publishes a change writes the current stamp into the stream, under its lock;
//! whoever asks begins a new stamp first and then looks, also under the lock. So an append pays for a load and a
//! store, and nothing is counted per append. A *cursor* is the stamp that an answer began: what bears that stamp or
//! a later one is new to who holds it.
//!
//! Invariants
//! - `I-CHANGE-1` A change that an answer does not show bears its cursor's stamp or a later one: who locks the
//!   stream behind the asker reads the counter behind the asker, too.
//! - `I-CHANGE-2` A cursor of another process, or one that reaches farther back than what is remembered about
//!   removed and evicted streams, is answered completely.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::limits::REMOVED_STREAMS_MAX;

pub struct Changes {
    nonce: u64,
    stamp: AtomicU64,
    removed: Mutex<Removed>,
    /// Whether somebody waits: else ringing is one load.
    awaited: AtomicBool,
    /// How often the bell was rung.
    rings: Mutex<u64>,
    bell: Condvar,
}

#[derive(Default)]
struct Removed {
    /// Oldest first.
    names: VecDeque<(u64, Box<str>)>,
    /// Stamp of the newest name that was forgotten.
    forgotten: u64,
}

impl Changes {
    /// `nonce` tells this process from all others.
    pub fn new(nonce: u64) -> Changes {
        Changes {
            nonce,
            stamp: AtomicU64::new(1),
            removed: Mutex::default(),
            awaited: AtomicBool::new(false),
            rings: Mutex::new(0),
            bell: Condvar::new(),
        }
    }

    /// What a change that is published now bears. Read under the stream's lock.
    pub fn stamp(&self) -> u64 {
        self.stamp.load(Ordering::Acquire)
    }

    /// Begins a new stamp: changes from here on bear it.
    pub fn begin(&self) -> u64 {
        self.stamp.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// A stamp of this process as clients see it.
    pub fn cursor(&self, stamp: u64) -> String {
        format!("{:016x}-{stamp}", self.nonce)
    }

    /// The stamp of a cursor that this process has given out.
    pub fn parse(&self, cursor: &str) -> Option<u64> {
        let (nonce, stamp) = cursor.split_once('-')?;
        let ours = u64::from_str_radix(nonce, 16).ok()? == self.nonce;
        let stamp: u64 = stamp.parse().ok()?;
        (ours && stamp <= self.stamp()).then_some(stamp)
    }

    pub fn note_removed(&self, stamp: u64, path: &str) {
        let mut removed = self.removed.lock();
        if removed.names.len() >= REMOVED_STREAMS_MAX
            && let Some((stamp, _)) = removed.names.pop_front()
        {
            removed.forgotten = removed.forgotten.max(stamp);
        }
        removed.names.push_back((stamp, path.into()));
    }

    /// Names removed at a stamp or later with their stamps, and the stamp up to which some may be forgotten.
    pub fn removed_since(&self, stamp: u64) -> (u64, Vec<(Box<str>, u64)>) {
        let removed = self.removed.lock();
        let since = removed.names.iter().filter(|(at, _)| *at >= stamp);
        let names = since.map(|(at, name)| (name.clone(), *at)).collect();
        (removed.forgotten, names)
    }

    /// Set before a last look: a change behind that look finds it set, one before it is seen.
    pub fn set_awaited(&self, awaited: bool) {
        self.awaited.store(awaited, Ordering::SeqCst);
    }

    /// Tells who waits that something has changed. Called when the change can be seen.
    pub fn ring(&self) {
        if self.awaited.load(Ordering::Relaxed) {
            self.ring_now();
        }
    }

    pub fn ring_now(&self) {
        *self.rings.lock() += 1;
        self.bell.notify_all();
    }

    /// Waits for a ring behind those that were heard, or until `deadline`. Returns whether there was one.
    pub fn wait(&self, heard: &mut u64, deadline: Option<Instant>) -> bool {
        let mut rings = self.rings.lock();
        while *rings == *heard {
            match deadline {
                Some(at) if self.bell.wait_until(&mut rings, at).timed_out() => return false,
                Some(_) => {}
                None => self.bell.wait(&mut rings),
            }
        }
        *heard = *rings;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_are_of_one_process_and_never_of_the_future() {
        let changes = Changes::new(7);
        let stamp = changes.begin();
        assert_eq!(changes.parse(&changes.cursor(stamp)), Some(stamp));
        assert_eq!(changes.parse(&changes.cursor(stamp + 1)), None);
        assert_eq!(Changes::new(8).parse(&changes.cursor(stamp)), None);
        for bad in ["", "-", "x", "0-1", "zz-1", "-1"] {
            assert_eq!(changes.parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn removals_are_remembered_up_to_a_bound() {
        let changes = Changes::new(7);
        let first = changes.begin();
        changes.note_removed(first, "a");
        let second = changes.begin();
        changes.note_removed(second, "b");
        let names = |since| {
            let (forgotten, names) = changes.removed_since(since);
            (forgotten < since).then_some(names.len())
        };
        assert_eq!(
            (names(first), names(second), names(second + 1)),
            (Some(2), Some(1), Some(0))
        );
        for number in 0..REMOVED_STREAMS_MAX - 1 {
            changes.note_removed(second, &number.to_string());
        }
        assert_eq!(names(first), None, "the oldest one is forgotten");
        assert_eq!(names(second), Some(REMOVED_STREAMS_MAX));
    }
}
