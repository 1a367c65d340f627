//! Where removed streams ended.
//!
//! A reader that comes back and finds its stream gone asks here whether it had read everything. Each removal (delete or
//! expiry) leaves one ending: the frame of the removal carries it, replay finds it there again, and the checkpoint
//! that takes the stream out of the catalog puts the ending in, with the same transaction. All endings are in
//! memory too, so that a question costs no look at the disk.
//!
//! Invariants
//! - `I-ENDING-1` A removal that was acknowledged is remembered through any crash, until it is among neither the newest
//!   [`ENDINGS_MAX`] nor those that fit, or is older than [`ENDINGS_MAX_AGE_MS`]. The oldest are forgotten first.
//! - `I-ENDING-2` An ending never changes: it is the tail at the removal, whatever is lost or restored later.
//! - `I-ENDING-3` Only removals that are synced are told or written to the catalog.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::codec::{Frame, FrameKind, Reader};
use crate::limits::{ENDINGS_MAX, ENDINGS_MAX_AGE_MS, ENDINGS_MAX_BYTES};
use crate::model::{Offset, StreamId};
use crate::stream::handle::Stream;
use crate::stream::offsets::{self, Losses};
use crate::stream::snapshot;
use crate::stream::state::StreamState;

/// What an ending takes in memory beside its name: itself, its places in two trees, and what those waste.
const OVERHEAD_BYTES: usize = 192;

/// The tail of a stream that is gone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ending {
    pub name: Arc<str>,
    pub incarnation: StreamId,
    pub tail: Offset,
    pub records: u64,
    /// Epoch of the newest record: the tail's own may have begun behind it.
    pub newest_epoch: u64,
    pub time_ms: u64,
}

/// What the frame of a removal carries: the epoch of the newest record, and how many there are.
pub type EndingPayload = [u8; 16];

impl Ending {
    /// The ending of a stream that is removed now.
    pub fn of(stream: &Stream, state: &StreamState, losses: &Losses, time_ms: u64) -> Ending {
        Ending {
            name: (*stream.path).into(),
            incarnation: stream.id,
            tail: offsets::applied_tail(state, losses),
            records: state.records,
            newest_epoch: offsets::newest_epoch(state),
            time_ms,
        }
    }

    pub fn payload(&self) -> EndingPayload {
        let mut payload = EndingPayload::default();
        payload[..8].copy_from_slice(&self.newest_epoch.to_le_bytes());
        payload[8..].copy_from_slice(&self.records.to_le_bytes());
        payload
    }

    /// The frame that removes the stream.
    pub fn frame<'a>(&self, kind: FrameKind, payload: &'a EndingPayload) -> Frame<'a> {
        Frame {
            position: self.tail.position,
            epoch: self.tail.epoch,
            payload,
            ..Frame::control(kind, self.incarnation, self.time_ms)
        }
    }

    /// What the frame of a removal says. One of an older version says nothing: then the stream as it was rebuilt does.
    pub fn of_frame(
        frame: &Frame<'_>,
        stream: &Stream,
        state: &StreamState,
        losses: &Losses,
    ) -> Ending {
        let rebuilt = Ending::of(stream, state, losses, frame.time_ms);
        let mut reader = Reader::new(frame.payload);
        let (Some(newest_epoch), Some(records)) = (reader.u64(), reader.u64()) else {
            return rebuilt;
        };
        Ending {
            tail: Offset {
                epoch: frame.epoch,
                position: frame.position,
            },
            records,
            newest_epoch,
            ..rebuilt
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut value = Vec::with_capacity(56 + self.name.len());
        let numbers = [
            self.incarnation.0,
            self.tail.epoch,
            self.tail.position,
            self.records,
            self.newest_epoch,
            self.time_ms,
        ];
        for number in numbers {
            value.extend_from_slice(&number.to_le_bytes());
        }
        value.extend_from_slice(self.name.as_bytes());
        snapshot::seal(&mut value);
        value
    }

    /// `None`: the bytes are not an ending.
    pub fn decode(value: &[u8]) -> Option<Ending> {
        let bytes = snapshot::unseal(value)?;
        let mut reader = Reader::new(bytes);
        let incarnation = StreamId(reader.u64()?);
        let tail = Offset {
            epoch: reader.u64()?,
            position: reader.u64()?,
        };
        let (records, newest_epoch, time_ms) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let name = std::str::from_utf8(&bytes[48..]).ok()?;
        Some(Ending {
            name: name.into(),
            incarnation,
            tail,
            records,
            newest_epoch,
            time_ms,
        })
    }

    fn memory_len(&self) -> usize {
        OVERHEAD_BYTES + self.name.len()
    }
}

/// Changes of the catalog's endings that go with a checkpoint.
#[derive(Default)]
pub struct Unwritten {
    /// By the sequence of their removal.
    pub put: Vec<(u64, Vec<u8>)>,
    /// Everything before this sequence is forgotten.
    pub forget_below: u64,
}

#[derive(Default)]
pub struct Endings {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    by_sequence: BTreeMap<u64, Ending>,
    by_name: BTreeMap<(Arc<str>, StreamId), u64>,
    /// Those that the catalog does not have yet.
    unwritten: BTreeSet<u64>,
    bytes: usize,
}

impl Endings {
    /// Remembers a removal by the sequence of its frame. Called under the stream's lock, so that a checkpoint which
    /// sees the stream gone also sees this.
    pub fn note(&self, sequence: u64, ending: Ending) {
        let mut known = self.known.lock();
        let now_ms = ending.time_ms;
        if known.insert(sequence, ending) {
            known.unwritten.insert(sequence);
        }
        known.forget(now_ms);
    }

    /// Takes over what the catalog has. Returns how many of them do not decode.
    pub fn recall(&self, rows: Vec<(u64, Vec<u8>)>) -> usize {
        let mut known = self.known.lock();
        let count = rows.len();
        let decoded = rows
            .into_iter()
            .filter_map(|(sequence, value)| Some((sequence, Ending::decode(&value)?)));
        let mut good = 0;
        for (sequence, ending) in decoded {
            known.insert(sequence, ending);
            good += 1;
        }
        count - good
    }

    /// How one incarnation ended, or the newest removed one of a name; `synced` is how far the log is.
    pub fn find(
        &self,
        name: &str,
        incarnation: Option<StreamId>,
        synced: u64,
        now_ms: u64,
    ) -> Option<Ending> {
        let mut known = self.known.lock();
        known.forget(now_ms);
        let name: Arc<str> = name.into();
        let (from, to) = incarnation.map_or((StreamId(0), StreamId(u64::MAX)), |id| (id, id));
        let mut of_name = known.by_name.range((Arc::clone(&name), from)..=(name, to));
        let (_, sequence) = of_name.rfind(|(_, sequence)| **sequence <= synced)?;
        known.by_sequence.get(sequence).cloned()
    }

    /// All of them in the order of their removal.
    pub fn all(&self) -> Vec<(u64, Ending)> {
        let known = self.known.lock();
        let all = known.by_sequence.iter();
        all.map(|(sequence, ending)| (*sequence, ending.clone()))
            .collect()
    }

    /// What the catalog lacks of the removals up to a sequence, and what it need not have any more.
    pub fn unwritten(&self, up_to: u64, now_ms: u64) -> Unwritten {
        let mut known = self.known.lock();
        known.forget(now_ms);
        let due = known.unwritten.range(..=up_to);
        let put = due.filter_map(|sequence| {
            let ending = known.by_sequence.get(sequence)?;
            Some((*sequence, ending.encode()))
        });
        Unwritten {
            put: put.collect(),
            forget_below: known.first(),
        }
    }

    /// The catalog has these now.
    pub fn written(&self, done: &Unwritten) {
        let mut known = self.known.lock();
        for (sequence, _) in &done.put {
            known.unwritten.remove(sequence);
        }
    }
}

impl Known {
    /// Whether it is news.
    fn insert(&mut self, sequence: u64, ending: Ending) -> bool {
        if self.by_sequence.contains_key(&sequence) {
            return false;
        }
        let key = (Arc::clone(&ending.name), ending.incarnation);
        self.bytes += ending.memory_len();
        self.by_name.insert(key, sequence);
        self.by_sequence.insert(sequence, ending);
        true
    }

    fn first(&self) -> u64 {
        let first = self.by_sequence.first_key_value();
        first.map_or(u64::MAX, |(sequence, _)| *sequence)
    }

    /// Forgets from the oldest on until the bounds hold.
    fn forget(&mut self, now_ms: u64) {
        while let Some(oldest) = self.by_sequence.first_entry() {
            let ending = oldest.get();
            let too_old = now_ms.saturating_sub(ending.time_ms) > ENDINGS_MAX_AGE_MS;
            if !too_old && self.bytes <= ENDINGS_MAX_BYTES && self.by_name.len() <= ENDINGS_MAX {
                return;
            }
            let (sequence, ending) = oldest.remove_entry();
            self.bytes -= ending.memory_len();
            self.by_name.remove(&(ending.name, ending.incarnation));
            self.unwritten.remove(&sequence);
        }
    }
}

#[cfg(test)]
#[path = "endings_tests.rs"]
mod tests;
