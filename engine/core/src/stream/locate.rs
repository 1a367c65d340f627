//! Where the bytes and the index entries of a stream's own part are: the one place that tells extents, staged packs, what
//! a checkpoint is writing, and the hot tail apart.
//!
//! Sits below everything that reads: `shard::read` and `shard::pull` ask here under the stream's lock, and read files
//! without it. Positions below `start` are an ancestor's (`shard::lineage`).
//!
//! Invariants
//! - `I-LOCATE-1` What is in memory is found there, whatever the extents say: they may name a file that is going.
//! - `I-LOCATE-2` Index entries in memory lie behind all those in files, so the two never answer the same question.

use std::sync::Arc;

use crate::model::{Extent, IndexEntry};
use crate::stream::hot::{FilePart, Hot};
use crate::stream::state::StreamState;

/// What holds the byte at a position.
pub enum Source<'s> {
    Memory(&'s Hot),
    /// A staged pack; its index is in memory.
    Staged(&'s Hot, FilePart),
    /// One of these, in a file with its index.
    Files(Arc<Vec<Extent>>),
    /// It is not there yet, or no longer.
    Nowhere,
}

/// Which index entry is wanted: the first one whose key is at least this (all keys grow along the index).
#[derive(Clone, Copy)]
pub enum Key {
    End(u64),
    Records(u64),
    Time(u64),
}

impl Key {
    fn reached(self, entry: &IndexEntry) -> bool {
        match self {
            Key::End(end) => entry.end >= end,
            Key::Records(records) => entry.records >= records,
            Key::Time(time) => entry.time_ms >= time,
        }
    }
}

/// What memory says about an index entry or a boundary.
pub enum Known<T> {
    Here(T),
    /// The index of these comes first; where it has none, it is this.
    Perhaps(Arc<Vec<Extent>>, T),
}

impl StreamState {
    /// What is in memory, newest first.
    fn held(&self) -> impl Iterator<Item = &Hot> {
        let flushing = self.flushing.as_deref();
        [Some(&self.hot), flushing].into_iter().flatten()
    }

    pub fn locate(&self, position: u64) -> Source<'_> {
        let mut held = self.held().filter(|hot| !hot.is_empty());
        match held.find(|hot| position >= hot.start) {
            Some(hot) if position >= hot.end() => Source::Nowhere,
            Some(hot) => match hot.in_file(position) {
                Some(part) => Source::Staged(hot, part),
                None => Source::Memory(hot),
            },
            None if position < self.file_end() => Source::Files(self.readable_extents()),
            None => Source::Nowhere,
        }
    }

    /// Bytes in memory from `position` on, as far as they lie together; none if they are elsewhere.
    pub fn bytes_held(&self, position: u64) -> &[u8] {
        if position < self.start {
            return &[];
        }
        match self.locate(position) {
            Source::Memory(hot) => hot.bytes(position),
            _ => &[],
        }
    }

    /// Whether everything from `position` on is the stream's own and sound.
    pub fn is_sound_from(&self, position: u64) -> bool {
        position >= self.start && self.damaged().is_empty()
    }

    /// Makes the growing buffer shareable, if the position is in it and it is worth it.
    pub fn share(&mut self, position: u64) {
        if position >= self.hot.start {
            self.hot.freeze();
        }
    }

    /// Where the next part behind `position` that lies in a staged pack begins.
    pub fn next_staged(&self, position: u64) -> Option<u64> {
        self.staged_from(position)
            .map(|part| part.start)
            .find(|start| *start > position)
    }

    /// Where the last of as many staged parts ends as are left to a window, if that is before `end`; else `end`.
    pub fn staged_end(&self, position: u64, end: u64, left: &mut usize) -> u64 {
        let parts = self.staged_from(position);
        for part in parts.take_while(|part| part.start < end) {
            *left -= 1;
            if *left == 0 {
                return part.end().min(end);
            }
        }
        end
    }

    /// What lies in staged packs from `position` on, in order.
    fn staged_from(&self, position: u64) -> impl Iterator<Item = FilePart> {
        let held = self.flushing.as_deref().into_iter().chain([&self.hot]);
        held.flat_map(move |hot| hot.file_parts_from(position))
            .filter(move |part| part.end() > position)
    }

    /// The newest entry in memory that ends at or before `limit`.
    pub fn last_entry_held(&self, limit: u64) -> Option<IndexEntry> {
        self.held().find_map(|hot| {
            let count = hot.index.partition_point(|entry| entry.end <= limit);
            hot.index[..count].last().copied()
        })
    }

    /// The first index entry that reaches the key.
    pub fn entry(&self, key: Key) -> Known<Option<IndexEntry>> {
        let mut held = self.flushing.as_deref().into_iter().chain([&self.hot]);
        let found = held.find_map(|hot| {
            let at = hot.index.partition_point(|entry| !key.reached(entry));
            hot.index.get(at).copied()
        });
        let behind_files = match key {
            Key::End(end) => end > self.file_end(),
            Key::Records(records) => records > self.file_records(),
            Key::Time(_) => self.file_end() == self.start,
        };
        if behind_files {
            Known::Here(found)
        } else {
            Known::Perhaps(self.readable_extents(), found)
        }
    }

    /// The last place at or before `limit` where an append ends or the stream's own part begins.
    pub fn boundary(&self, limit: u64) -> Known<u64> {
        match self.last_entry_held(limit) {
            Some(entry) => Known::Here(entry.end),
            // Extents hold whole appends.
            None if limit >= self.file_end() => Known::Here(self.file_end()),
            None => Known::Perhaps(self.readable_extents(), self.start),
        }
    }
}
