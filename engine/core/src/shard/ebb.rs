//! When memory goes back to the system.
//!
//! Allocators keep what they are given back, and some of it is much and comes back all at once: what was held for clients
//! that did not read, bytes that went to files, producers of streams that left memory. Maintenance looks at it each
//! round; when it has fallen and stays low, what the allocator keeps is released.

use crate::limits::{EBB_MIN_BYTES, EBB_US};
use crate::metrics::Metrics;

/// Bytes that clients make the server hold.
pub fn held_for_clients(metrics: &Metrics) -> u64 {
    metrics.client_bytes.get() + metrics.inflight_bytes.get() + metrics.pipeline_answer_bytes.get()
}

/// Bytes that streams take in memory until they are in files.
pub fn held_for_streams(metrics: &Metrics) -> u64 {
    metrics.hot_bytes.get()
        + metrics.ephemeral_bytes.get()
        + metrics.ephemeral_kept_bytes.get()
        + metrics.producer_bytes.get()
}

/// The highest that was held since the last release, and since when it is less than half of that.
#[derive(Default)]
pub struct Ebb {
    peak: u64,
    low_since_us: Option<u64>,
}

impl Ebb {
    /// Whether it is time to release memory. Under a load that goes up and down it never is: it would be taken again.
    pub fn is_over(&mut self, held: u64, now_us: u64) -> bool {
        self.peak = self.peak.max(held);
        if self.peak < EBB_MIN_BYTES || held > self.peak / 2 {
            self.low_since_us = None;
            return false;
        }
        let since_us = *self.low_since_us.get_or_insert(now_us);
        let over = now_us.saturating_sub(since_us) >= EBB_US;
        if over {
            *self = Ebb::default();
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_once_when_much_was_held_and_little_is_for_a_while() {
        let mut ebb = Ebb::default();
        assert!(!ebb.is_over(EBB_MIN_BYTES, 0));
        assert!(!ebb.is_over(0, 1));
        assert!(!ebb.is_over(0, EBB_US));
        assert!(ebb.is_over(0, EBB_US + 1));
        assert!(!ebb.is_over(0, 10 * EBB_US));
    }

    #[test]
    fn what_rises_again_or_never_was_much_is_left_alone() {
        let mut ebb = Ebb::default();
        for round in 0..10 {
            assert!(!ebb.is_over(EBB_MIN_BYTES, round * EBB_US));
            assert!(!ebb.is_over(0, round * EBB_US + 1));
        }
        let mut ebb = Ebb::default();
        assert!(!ebb.is_over(EBB_MIN_BYTES - 1, 0));
        assert!(!ebb.is_over(0, 1));
        assert!(!ebb.is_over(0, 10 * EBB_US));
    }
}
