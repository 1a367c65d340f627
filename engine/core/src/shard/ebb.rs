//! When memory goes back to the system.
//!
//! Allocators keep what they are given back, and some of it is much and comes back all at once: what was held for clients
//! that did not read, bytes that went to files, producers of streams that left memory, bodies of the control plane.
//! Maintenance compares what the process takes with what is known to be held; when much more lies between the two than it
//! did before, and stays there, what the allocator keeps is released.

use crate::limits::{EBB_MIN_BYTES, EBB_MUCH_BYTES, EBB_PAUSE_MAX_US, EBB_PAUSE_US, EBB_US};
use crate::metrics::Metrics;

/// Bytes that clients and streams make the server hold, as far as they are counted.
pub fn held(metrics: &Metrics) -> u64 {
    [
        &metrics.client_bytes,
        &metrics.inflight_bytes,
        &metrics.pipeline_answer_bytes,
        &metrics.hot_bytes,
        &metrics.ephemeral_bytes,
        &metrics.ephemeral_kept_bytes,
        &metrics.producer_bytes,
    ]
    .iter()
    .map(|gauge| gauge.get())
    .sum()
}

#[derive(Default)]
pub struct Ebb {
    /// When the process was last asked what it takes.
    looked_us: Option<u64>,
    /// The least that the process took beside what was held, as far as that can be told.
    least: Option<u64>,
    /// Since when it takes much more than that.
    apart_since_us: Option<u64>,
    /// When memory was last released, and how long it is left alone from there.
    released: Option<(u64, u64)>,
}

impl Ebb {
    /// Asking costs the kernel some work: four times in the shortest time that counts are enough.
    pub fn is_due(&mut self, now_us: u64) -> bool {
        let passed = |at| now_us.saturating_sub(at) >= EBB_US / 4;
        let due = self.looked_us.is_none_or(passed);
        if due {
            self.looked_us = Some(now_us);
        }
        due
    }

    /// Whether it is time to release memory. What is in use and counted by nobody is looked at more and more rarely.
    pub fn is_over(&mut self, resident: u64, held: u64, now_us: u64) -> bool {
        let beside = resident.saturating_sub(held);
        // Of much that is held some may not be here: a body counts from the moment that it is announced.
        let least = match self.least {
            Some(least) if held > EBB_MIN_BYTES / 2 => least,
            known => known.map_or(beside, |least| least.min(beside)),
        };
        self.least = Some(least);
        let more = beside.saturating_sub(least);
        if more < EBB_MIN_BYTES {
            self.apart_since_us = None;
            self.released = self.released.map(|(at, _)| (at, EBB_PAUSE_US));
            return false;
        }
        let since_us = *self.apart_since_us.get_or_insert(now_us);
        // Memory that threads give back to each other has holes: under load they grow to several times of what is in use.
        let much = more >= EBB_MUCH_BYTES;
        let rested = |(at, pause)| now_us.saturating_sub(at) >= if much { EBB_US } else { pause };
        let over = now_us.saturating_sub(since_us) >= EBB_US && self.released.is_none_or(rested);
        if over {
            let pause = self.released.map_or(EBB_PAUSE_US, |(_, pause)| 2 * pause);
            self.released = Some((now_us, pause.min(EBB_PAUSE_MAX_US)));
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 40 << 20;
    const MUCH: u64 = BASE + EBB_MIN_BYTES;

    #[test]
    fn memory_that_nobody_holds_is_released() {
        let mut ebb = Ebb::default();
        assert!(!ebb.is_over(BASE, 0, 0));
        assert!(!ebb.is_over(MUCH, EBB_MIN_BYTES, 1), "it is held");
        assert!(!ebb.is_over(MUCH, 0, 2));
        assert!(!ebb.is_over(MUCH, 0, EBB_US + 1));
        assert!(ebb.is_over(MUCH, 0, EBB_US + 2));
        assert!(!ebb.is_over(BASE, 0, EBB_US + 3), "it is gone");
    }

    #[test]
    fn the_first_look_is_due_whatever_the_clock_says() {
        let mut ebb = Ebb::default();
        assert!(
            ebb.is_due(1),
            "what there is without clients is not known later"
        );
        assert!(!ebb.is_due(EBB_US / 4));
        assert!(ebb.is_due(EBB_US / 4 + 1));
    }

    #[test]
    fn much_is_released_without_a_pause() {
        let mut ebb = Ebb::default();
        assert!(!ebb.is_over(BASE, 0, 0));
        let resident = BASE + EBB_MUCH_BYTES;
        assert!(!ebb.is_over(resident, 0, 1));
        for times in 1..20 {
            assert!(ebb.is_over(resident, 0, 1 + times * EBB_US));
            assert!(!ebb.is_over(resident, 0, 2 + times * EBB_US));
        }
    }

    #[test]
    fn what_stays_is_looked_at_more_and_more_rarely() {
        let mut ebb = Ebb::default();
        assert!(!ebb.is_over(BASE, 0, 0));
        let over: Vec<u64> = (0..4000)
            .map(|tenth| tenth * 100_000)
            .filter(|now_us| ebb.is_over(MUCH, 0, *now_us))
            .collect();
        let pauses: Vec<u64> = over.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(
            pauses[..3],
            [EBB_PAUSE_US, 2 * EBB_PAUSE_US, 4 * EBB_PAUSE_US]
        );
        assert!(pauses.iter().all(|pause| *pause <= EBB_PAUSE_MAX_US));
    }

    #[test]
    fn what_was_announced_and_never_came_is_not_missed_later() {
        let mut ebb = Ebb::default();
        assert!(!ebb.is_over(BASE, 0, 0));
        assert!(!ebb.is_over(BASE, 4 * EBB_MIN_BYTES, 1));
        for round in 0..10 {
            assert!(!ebb.is_over(BASE + EBB_MIN_BYTES / 2, 0, round * EBB_US));
        }
    }

    #[test]
    fn what_is_taken_again_is_left_alone() {
        let mut ebb = Ebb::default();
        assert!(!ebb.is_over(BASE, 0, 0));
        for round in 0..10 {
            assert!(!ebb.is_over(MUCH, 0, round * EBB_US));
            assert!(!ebb.is_over(MUCH, EBB_MIN_BYTES, round * EBB_US + 1));
        }
    }
}
