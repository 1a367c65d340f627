//! When recent batches were written and synced, for those who ask where the time went.
//!
//! Bounded: old commits are forgotten. A reply asks right after its commit, so it finds its own.

use std::collections::VecDeque;

use parking_lot::Mutex;

/// Writes and syncs remembered.
const REMEMBERED: usize = 256;

/// One commit as a reply sees it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct CommitTimes {
    pub write_began_us: u64,
    pub write_ended_us: u64,
    pub sync_began_us: u64,
    pub sync_ended_us: u64,
}

impl CommitTimes {
    pub fn write_us(&self) -> u64 {
        self.write_ended_us.saturating_sub(self.write_began_us)
    }

    pub fn sync_us(&self) -> u64 {
        self.sync_ended_us.saturating_sub(self.sync_began_us)
    }
}

#[derive(Clone, Copy)]
struct Span {
    up_to: u64,
    began_us: u64,
    ended_us: u64,
}

#[derive(Default)]
pub struct RecentCommits {
    writes: Mutex<VecDeque<Span>>,
    syncs: Mutex<VecDeque<Span>>,
}

impl RecentCommits {
    pub fn wrote(&self, up_to: u64, began_us: u64, ended_us: u64) {
        remember(&self.writes, up_to, began_us, ended_us);
    }

    pub fn synced(&self, up_to: u64, began_us: u64, ended_us: u64) {
        remember(&self.syncs, up_to, began_us, ended_us);
    }

    /// The write and the sync that covered a sequence.
    pub fn of(&self, sequence: u64) -> CommitTimes {
        let (write, sync) = (find(&self.writes, sequence), find(&self.syncs, sequence));
        CommitTimes {
            write_began_us: write.map_or(0, |span| span.began_us),
            write_ended_us: write.map_or(0, |span| span.ended_us),
            sync_began_us: sync.map_or(0, |span| span.began_us),
            sync_ended_us: sync.map_or(0, |span| span.ended_us),
        }
    }
}

fn remember(spans: &Mutex<VecDeque<Span>>, up_to: u64, began_us: u64, ended_us: u64) {
    let mut spans = spans.lock();
    if spans.len() == REMEMBERED {
        spans.pop_front();
    }
    spans.push_back(Span {
        up_to,
        began_us,
        ended_us,
    });
}

fn find(spans: &Mutex<VecDeque<Span>>, sequence: u64) -> Option<Span> {
    let spans = spans.lock();
    let at = spans.partition_point(|span| span.up_to < sequence);
    spans.get(at).copied()
}
