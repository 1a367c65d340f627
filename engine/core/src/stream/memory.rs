//! What a stream takes in memory, and the gauges that the bounds on memory look at.
//!
//! Whoever changes a stream's bytes calls [`StreamState::count_memory`] before the lock goes: the gauges move by the
//! difference to what they knew. `shard/write` asks them whether there is room, `shard/class` whether to spill,
//! `shard/space` what a checkpoint will need on disk.
//!
//! Invariant `I-MEMORY-1`: each gauge is the sum of what `counted` says over all streams.

use crate::metrics::{Counter, Metrics};
use crate::model::Extent;
use crate::stream::handle::Stream;
use crate::stream::producers::Producers;
use crate::stream::state::{Life, StreamState};

/// A stream's handle with its state, a path of usual length, and its places in the directory.
const STREAM_MEMORY_BYTES: u64 = size_of::<Stream>() as u64 + 160;
/// What a producer takes in the catalog.
const PRODUCER_ENTRY_BYTES: u64 = 192;

/// What the gauges know of one stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    logged: u64,
    volatile: u64,
    kept: u64,
    listed: u64,
    remembered: u64,
}

impl StreamState {
    /// Bytes and index that a checkpoint or a spill will take out of memory.
    fn hot_memory(&self) -> u64 {
        let flushing = self.flushing.as_ref().map_or(0, |hot| hot.memory_len());
        self.hot.memory_len() + flushing
    }

    /// What an `ephemeral` stream takes beside that: it cannot leave memory while it has bytes that only this
    /// process knows of, be they in files.
    fn kept_memory(&self) -> u64 {
        if !self.has_volatile_bytes() || self.life == Life::Gone {
            return 0;
        }
        let twice = self.unsettled.as_ref().map_or(0, |all| all.memory_len());
        STREAM_MEMORY_BYTES
            + self.spilled.len() as u64 * size_of::<Extent>() as u64
            + self.remembered_producers()
            + twice
    }

    fn remembered_producers(&self) -> u64 {
        self.producers.here().map_or(0, Producers::memory_len)
    }

    /// What the next checkpoint writes into the catalog for the stream's producers.
    fn listed_producers(&self) -> u64 {
        match self.producers.here() {
            Some(all) if self.dirty => all.len() as u64 * PRODUCER_ENTRY_BYTES,
            _ => 0,
        }
    }

    /// Memory of a stream that was read for one question, beside its bytes: it has none.
    pub fn looked_at_memory(&self) -> u64 {
        let extents = self.extents.len() * size_of::<Extent>();
        let epochs = self.later_epochs.len() * size_of::<(u64, u64)>();
        let damaged = std::mem::size_of_val(self.damaged());
        STREAM_MEMORY_BYTES + self.remembered_producers() + (extents + epochs + damaged) as u64
    }

    /// Brings the gauges up to date with this stream.
    pub fn count_memory(&mut self, metrics: &Metrics) {
        let hot = self.hot_memory();
        let listed = self.listed_producers();
        let remembered = self.remembered_producers();
        let now = if self.is_volatile() {
            Counted {
                logged: 0,
                volatile: hot,
                kept: self.kept_memory(),
                listed,
                remembered,
            }
        } else {
            Counted {
                logged: hot,
                volatile: 0,
                kept: 0,
                listed,
                remembered,
            }
        };
        self.count(metrics, now);
    }

    /// The stream leaves memory. Returns what its producers took.
    pub fn uncount_memory(&mut self, metrics: &Metrics) -> u64 {
        let remembered = self.counted.remembered;
        self.count(metrics, Counted::default());
        remembered
    }

    fn count(&mut self, metrics: &Metrics, now: Counted) {
        let before = std::mem::replace(&mut self.counted, now);
        shift(&metrics.hot_bytes, before.logged, now.logged);
        shift(&metrics.ephemeral_bytes, before.volatile, now.volatile);
        shift(&metrics.ephemeral_kept_bytes, before.kept, now.kept);
        shift(&metrics.dirty_producer_bytes, before.listed, now.listed);
        shift(&metrics.producer_bytes, before.remembered, now.remembered);
    }
}

fn shift(gauge: &Counter, before: u64, now: u64) {
    if now > before {
        gauge.add(now - before);
    } else if now < before {
        gauge.sub(before - now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Class, StreamId};
    use crate::stream::change::{Change, What};

    #[test]
    fn the_gauges_follow_a_stream_through_its_life() {
        let metrics = Metrics::default();
        let mut state = StreamState::new(StreamId(1), Class::Ephemeral, 0);
        state.count_memory(&metrics);
        assert_eq!(metrics.ephemeral_kept_bytes.get(), 0, "it may leave memory");
        for _ in 0..1000 {
            state.push_bytes(b"x", 1);
            state.count_memory(&metrics);
        }
        assert!(metrics.ephemeral_bytes.get() >= 1000 * 33);
        assert_eq!(metrics.ephemeral_kept_bytes.get(), STREAM_MEMORY_BYTES);
        state.flushing = Some(std::sync::Arc::new(std::mem::take(&mut state.hot)));
        state.count_memory(&metrics);
        assert!(
            metrics.ephemeral_bytes.get() >= 1000 * 33,
            "still in memory"
        );
        state.flushing = None;
        state.apply(&Change::plain(1, 0, What::Purge));
        state.count_memory(&metrics);
        assert_eq!(metrics.ephemeral_bytes.get(), 0);
        assert_eq!(metrics.ephemeral_kept_bytes.get(), 0);
        assert_eq!(metrics.hot_bytes.get(), 0);
    }
}
