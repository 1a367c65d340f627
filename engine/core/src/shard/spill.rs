//! Room for `ephemeral` streams: how much memory they may take, and files for what does not fit.
//!
//! Called by `write` before an append, and by the maintenance thread, which moves bytes and index out of memory.
//!
//! Invariants
//! - `I-SPILL-1` What streams take beside their bytes cannot go to files, so no stream gets its first byte when that
//!   takes three quarters of the bound: what is left is room for bytes.
//! - `I-SPILL-2` A stream has few spilled extents for many bytes: those that are no larger than what follows them
//!   are written again together with it, so that each byte is written a few times and extents do not add up.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::ErrorCode;
use crate::log::cold::SpillPiece;
use crate::model::{Extent, IndexEntry};
use crate::refusal::Refusal;
use crate::report;
use crate::shard::engine::{Engine, Undone};
use crate::stream::handle::Stream;
use crate::stream::hot::Hot;
use crate::stream::state::{Life, StreamState};

/// Memory that one spill file makes free: what is read back and copied at a time.
const SPILL_FILE_BYTES: u64 = 32 << 20;
/// A spilled extent of at least this many bytes, its index included, stays where it is.
const SPILL_MERGE_BYTES: u64 = 1 << 20;

impl Engine {
    /// Memory for bytes and index: what the streams themselves leave of the bound, and a quarter of it in any case.
    fn volatile_room(&self) -> u64 {
        let bound = self.config.ephemeral_bytes_max;
        let kept = self.metrics.ephemeral_kept_bytes.get();
        bound.saturating_sub(kept).max(bound / 4)
    }

    /// Whether an `ephemeral` stream may take more memory now.
    pub(super) fn check_volatile_room(&self, state: &StreamState) -> Result<(), Undone> {
        if self.metrics.ephemeral_bytes.get() > self.volatile_room().saturating_mul(2) {
            self.maintenance.wake();
            return Err(Undone::refused(Refusal::with(
                ErrorCode::ServerBusy,
                "Ephemeral streams have more bytes than memory may hold; they are being moved to disk.",
            )));
        }
        let kept_max = self.config.ephemeral_bytes_max / 4 * 3;
        if !state.has_volatile_bytes() && self.metrics.ephemeral_kept_bytes.get() > kept_max {
            return Err(Undone::refused(Refusal::with(
                ErrorCode::ServerBusy,
                "Too many ephemeral streams have records; delete some, or raise ephemeral_bytes_max.",
            )));
        }
        Ok(())
    }

    /// Moves bytes of `ephemeral` streams to files until memory is half empty again.
    pub fn spill_volatile(&self) {
        let room = self.volatile_room();
        if self.metrics.ephemeral_bytes.get() <= room {
            return;
        }
        let mut streams = self.directory.volatile();
        while self.metrics.ephemeral_bytes.get() > room / 2 && !streams.is_empty() {
            let mut given = Vec::new();
            let mut bytes = 0;
            while bytes < SPILL_FILE_BYTES {
                let Some(stream) = streams.pop() else { break };
                if let Some(piece) = give(&stream) {
                    bytes += piece.memory_len();
                    given.push(piece);
                }
            }
            if let Err(error) = self.spill(&mut given) {
                given.iter().for_each(|given| self.take_back(given));
                // Who appends asks for it again and again: it is told once.
                if !self.maintenance.spill_fails.swap(true, Ordering::Relaxed) {
                    report!("bytes of ephemeral streams could not be moved out of memory: {error}");
                }
                return;
            }
            if self.maintenance.spill_fails.swap(false, Ordering::Relaxed) {
                report!("bytes of ephemeral streams can be moved out of memory again");
            }
        }
    }

    fn spill(&self, given: &mut [Given]) -> io::Result<()> {
        if given.is_empty() {
            return Ok(());
        }
        let mut merged = Vec::with_capacity(given.len());
        for given in given.iter_mut() {
            merged.push(self.load_merged(given).unwrap_or_else(|_| {
                // Damage is found and told by readers; it does not keep the rest in memory.
                given.merged.clear();
                Default::default()
            }));
        }
        let pieces: Vec<SpillPiece<'_>> = given
            .iter()
            .zip(&merged)
            .map(|(given, (bytes, index))| {
                let first = given.merged.first();
                SpillPiece {
                    stream: given.stream.id,
                    start: first.map_or(given.hot.start, |extent| extent.start),
                    base_records: first.map_or(given.base_records, |extent| extent.base_records),
                    bytes: [&[bytes.as_slice()], given.hot.pieces().as_slice()].concat(),
                    index: [index, &given.hot.index],
                }
            })
            .collect();
        let extents = self.cold.spill(&pieces)?;
        for (given, extent) in given.iter().zip(extents) {
            self.metrics.spilled_bytes.add(given.hot.len());
            self.place(given, extent)?;
        }
        Ok(())
    }

    /// Bytes and index of the extents that are written again.
    fn load_merged(&self, given: &Given) -> io::Result<(Vec<u8>, Vec<IndexEntry>)> {
        let Some(first) = given.merged.first() else {
            return Ok(Default::default());
        };
        let mut bytes = vec![0; (given.hot.start - first.start) as usize];
        self.cold
            .read_checked(&given.merged, first.start, &mut bytes)?;
        let index = self.cold.entries(&given.merged, first.start, usize::MAX)?;
        Ok((bytes, index))
    }

    /// Puts the extent in the place of the bytes and of the extents that are in it now.
    fn place(&self, given: &Given, extent: Extent) -> io::Result<()> {
        let mut state = given.stream.lock();
        state.flushing = None;
        if state.life == Life::Gone {
            state.count_memory(&self.metrics);
            drop(state);
            return self.cold.release_spilled(&[extent]);
        }
        let mut spilled = state.spilled.as_ref().clone();
        spilled.truncate(spilled.len() - given.merged.len());
        spilled.push(extent);
        state.spilled = Arc::new(spilled);
        let last = given.hot.index.last();
        state.spilled_records = last.map_or(given.base_records, |entry| entry.records);
        state.count_memory(&self.metrics);
        drop(state);
        // Who reads them meanwhile looks a second time.
        self.cold.release_spilled(&given.merged)
    }

    fn take_back(&self, given: &Given) {
        let mut state = given.stream.lock();
        if state.flushing.take().is_some() && state.life != Life::Gone {
            state.hot = given.hot.followed_by(&state.hot);
        }
        state.count_memory(&self.metrics);
    }
}

/// Bytes that a stream gives out of memory.
struct Given {
    stream: Arc<Stream>,
    hot: Arc<Hot>,
    base_records: u64,
    /// The last spilled extents, which go into the new one.
    merged: Vec<Extent>,
}

impl Given {
    /// What it takes in memory while it is written.
    fn memory_len(&self) -> u64 {
        self.hot.memory_len() + self.merged.iter().map(Extent::memory_len).sum::<u64>()
    }
}

fn give(stream: &Arc<Stream>) -> Option<Given> {
    let mut state = stream.lock();
    if !state.is_volatile() || state.hot.is_empty() || state.flushing.is_some() {
        return None;
    }
    state.hot.freeze();
    let tail = state.tail;
    let hot = Arc::new(std::mem::replace(&mut state.hot, Hot::starting_at(tail)));
    state.flushing = Some(Arc::clone(&hot));
    Some(Given {
        stream: Arc::clone(stream),
        merged: no_larger_than(hot.memory_len(), &state.spilled).to_vec(),
        hot,
        base_records: state.file_records(),
    })
}

/// The last extents, each no larger than everything behind it.
fn no_larger_than(mut behind: u64, extents: &[Extent]) -> &[Extent] {
    let mut from = extents.len();
    while let Some(extent) = from.checked_sub(1).and_then(|at| extents.get(at)) {
        if extent.memory_len() > behind || extent.memory_len() >= SPILL_MERGE_BYTES {
            break;
        }
        behind += extent.memory_len();
        from -= 1;
    }
    &extents[from..]
}
