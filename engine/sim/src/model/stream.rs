//! One stream as the oracle sees it: its appends in order, and how far each has to come before readers see it.
//!
//! Invariants
//! - `I-PIECE-1` A piece is one append, byte for byte. It keeps the stage of the class it was written under.
//! - `I-PIECE-2` What is visible is a prefix: nothing shows before everything in front of it may.

use std::collections::BTreeMap;
use std::sync::Arc;

use millstream_core::model::{Class, Gate, Offset, Stage};

use super::Marks;

/// One append as it is stored.
#[derive(Clone, Debug)]
pub struct Piece {
    pub bytes: Arc<[u8]>,
    pub records: u64,
    /// What acknowledgement and visibility wait for.
    pub gate: Gate,
    /// Only this process has it.
    pub volatile: bool,
    /// The producer that sent it.
    pub tag: Option<Tag>,
}

impl Piece {
    pub fn new(bytes: &[u8], records: u64) -> Piece {
        Piece {
            bytes: bytes.into(),
            records,
            gate: Gate::OPEN,
            volatile: false,
            tag: None,
        }
    }

    pub fn reached(&self, marks: Marks) -> bool {
        marks.reach(self.gate)
    }
}

/// Equal in what readers get.
impl PartialEq for Piece {
    fn eq(&self, other: &Piece) -> bool {
        // Most comparisons are of one piece with its own copy.
        let same = Arc::ptr_eq(&self.bytes, &other.bytes) || self.bytes == other.bytes;
        same && self.records == other.records
    }
}

impl Eq for Piece {}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Producer {
    pub epoch: u64,
    pub seq: u64,
    /// The stream's epoch when this producer wrote last.
    pub stream_epoch: u64,
    /// Numbers that it left out after a possible loss: from, and up to but not including.
    pub skipped: (u64, u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    pub id: u8,
    pub epoch: u64,
    pub seq: u64,
}

impl Tag {
    pub fn id_bytes(self) -> [u8; 1] {
        producer_bytes(self.id)
    }
}

/// The id that a producer of appends sends.
pub fn producer_bytes(id: u8) -> [u8; 1] {
    [b'a' + id]
}

/// The name of a producer of commits, and the id under which the engine remembers it.
pub fn committer_name(id: u8) -> String {
    format!("query-{id}")
}

pub fn committer_bytes(id: u8) -> Vec<u8> {
    format!("\0{}", committer_name(id)).into_bytes()
}

#[derive(Clone, Debug)]
pub struct StreamModel {
    pub id: u64,
    pub path: &'static str,
    pub json: bool,
    pub class: Class,
    pub ttl: bool,
    /// How many long sleeps there had been when it was created; it lives through none.
    pub born_in_sleep: u64,
    pub deleted: bool,
    pub closed: bool,
    pub closed_by: Option<Tag>,
    /// What showing the close waits for.
    pub close_gate: Gate,
    pub source: Option<u64>,
    pub ever_forked: bool,
    pub pieces: Vec<Piece>,
    pub producers: BTreeMap<u8, Producer>,
    /// Epoch of each producer of commits: it lives as long as the stream, in every class.
    pub committers: BTreeMap<u8, u64>,
    pub stream_seq: Option<Vec<u8>>,
    /// Epoch of the tail.
    pub epoch: u64,
    /// Newest frame that changed what the stream is (create, close, delete, class), and newest one at all.
    pub control: u64,
    pub newest: u64,
}

impl StreamModel {
    pub fn bytes_of(&self, pieces: usize) -> u64 {
        let whole = self.pieces[..pieces].iter();
        whole.map(|piece| piece.bytes.len() as u64).sum()
    }

    pub fn records_of(&self, pieces: usize) -> u64 {
        self.pieces[..pieces]
            .iter()
            .map(|piece| piece.records)
            .sum()
    }

    pub fn tail(&self) -> u64 {
        self.bytes_of(self.pieces.len())
    }

    /// A fork's own bytes lie in an epoch of its own; until there are some, its tail is where its source was.
    pub fn enter_own_epoch(&mut self) {
        self.epoch = self.epoch.max(self.id);
    }

    pub fn tail_offset(&self) -> Offset {
        Offset {
            epoch: self.epoch,
            position: self.tail(),
        }
    }

    pub fn expired(&self, sleeps: u64) -> bool {
        self.ttl && self.born_in_sleep < sleeps
    }

    /// How many pieces readers may see.
    pub fn visible(&self, marks: Marks) -> usize {
        let shown = self.pieces.iter().take_while(|piece| piece.reached(marks));
        shown.count()
    }

    pub fn visible_closed(&self, marks: Marks) -> bool {
        self.closed && marks.reach(self.close_gate)
    }

    /// The number of pieces that end at this position, if one does.
    pub fn pieces_up_to(&self, position: u64) -> Option<usize> {
        let mut end = 0;
        let mut count = 0;
        while end < position {
            end += self.pieces.get(count)?.bytes.len() as u64;
            count += 1;
        }
        (end == position).then_some(count)
    }

    /// Whether a reply that was decided on this stream as it is now may go out.
    pub fn may_be_told(&self, marks: Marks) -> bool {
        let newest = Gate {
            sequence: self.newest,
            stage: self.class.stage(),
        };
        marks.reach(Gate::synced(self.control)) && marks.reach(newest)
    }

    /// Whether a crash may have cost this stream something, by its class.
    pub fn is_weak(&self) -> bool {
        self.class.stage() < Stage::Synced
    }
}
