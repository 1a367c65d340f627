//! What a crash may leave behind, and what clients have seen.
//!
//! Each operation adds a step: the newest sequence in the log, and the world as it is then. After a crash the engine
//! says how far the log reached; the world of that step, and no other, must be there. Beside it stand all offsets
//! ever handed out with the bytes they name: none may ever name others.

use std::collections::{BTreeMap, VecDeque};

use millstream_core::model::{Offset, Stage};

use crate::model::{Marks, Piece, StreamModel, World};

#[derive(Default)]
pub struct History {
    /// Since the last start, oldest first; the first one is what that start found.
    steps: Vec<(u64, World)>,
    /// How far clients were told, or shown, that things have come.
    promised: Marks,
    /// Path and incarnation, then offset: the appends that lie before it.
    observed: BTreeMap<(&'static str, u64), BTreeMap<Offset, Vec<Piece>>>,
    /// Incarnation: the appends that were acknowledged.
    acknowledged: BTreeMap<u64, Vec<Piece>>,
    /// Sequence and time of `disk` appends that were acknowledged, and may not be synced yet.
    disk_acknowledged: VecDeque<(u64, u64)>,
    /// Where written batches end, and up to where each of them says at least that the log is synced.
    batches: Vec<(u64, u64)>,
}

impl History {
    pub fn restart(&mut self, sequence: u64, world: World) {
        self.steps = vec![(sequence, world)];
        self.promised = Marks {
            written: sequence,
            synced: sequence,
        };
        self.disk_acknowledged.clear();
        self.batches.clear();
    }

    pub fn first_sequence(&self) -> u64 {
        self.steps.first().map_or(0, |(sequence, _)| *sequence)
    }

    /// Up to where a log that holds everything up to `end` proves by itself that it was synced.
    pub fn proven(&self, end: u64) -> u64 {
        let whole = self.batches.iter().filter(|(last, _)| *last <= end);
        whole.map(|(_, proof)| *proof).max().unwrap_or(0)
    }

    pub fn note(&mut self, sequence: u64, world: &World) {
        self.steps.push((sequence, world.clone()));
    }

    pub fn promise(&mut self, marks: Marks) {
        if marks.written > self.promised.written {
            self.batches.push((marks.written, self.promised.synced));
        }
        self.promised.synced = self.promised.synced.max(marks.synced);
        self.promised.written = self.promised.written.max(marks.written).max(marks.synced);
        let synced = self.promised.synced;
        self.disk_acknowledged
            .retain(|(sequence, _)| *sequence > synced);
    }

    pub fn promised(&self) -> Marks {
        self.promised
    }

    /// Worlds that a log which ends at `cut` may stand for. A cut inside an operation of several groups may be the
    /// world before it or behind it: the checks ignore what clean-up still has to do.
    pub fn worlds_at(&self, cut: u64) -> Vec<&World> {
        let upto = self.steps.partition_point(|(sequence, _)| *sequence <= cut);
        let Some((sequence, world)) = upto.checked_sub(1).and_then(|at| self.steps.get(at)) else {
            return Vec::new();
        };
        let mut worlds = vec![world];
        if *sequence < cut {
            worlds.extend(self.steps.get(upto).map(|(_, world)| world));
        }
        worlds
    }

    /// Notes that a client was told that these appends are there. Returns how many records are new to it.
    pub fn acknowledge(&mut self, stream: &StreamModel, pieces: usize, now_ms: u64) -> u64 {
        let named = &stream.pieces[..pieces];
        let known = self.acknowledged.entry(stream.id).or_default();
        let new: u64 = named
            .iter()
            .skip(known.len())
            .map(|piece| piece.records)
            .sum();
        if named.len() > known.len() {
            *known = named.to_vec();
        }
        if let Some(piece) = named.last()
            && piece.gate.stage == Stage::Written
            && piece.gate.sequence > self.promised.synced
        {
            self.disk_acknowledged
                .push_back((piece.gate.sequence, now_ms));
        }
        new
    }

    /// The `disk` append that has been waiting longest for its sync: its sequence, and since when.
    pub fn oldest_unsynced_disk(&self) -> Option<(u64, u64)> {
        self.disk_acknowledged.front().copied()
    }

    /// Compares what was acknowledged with what a start has found. Returns how many records are gone.
    pub fn settle_losses(&mut self, stream: &StreamModel) -> u64 {
        let Some(known) = self.acknowledged.get_mut(&stream.id) else {
            return 0;
        };
        let kept = known
            .iter()
            .zip(&stream.pieces)
            .take_while(|(before, now)| before == now)
            .count();
        known.drain(kept..).map(|piece| piece.records).sum()
    }

    /// Notes that a client was given this offset with these appends before it.
    pub fn observe(
        &mut self,
        stream: &StreamModel,
        offset: Offset,
        pieces: usize,
    ) -> Result<(), String> {
        let named = &stream.pieces[..pieces];
        // Of whatever life of the path: a client does not know which one it has to do with.
        for ((_, id), offsets) in self.observed_lives(stream.path) {
            if let Some(before) = offsets.get(&offset).filter(|before| *before != named) {
                return Err(format!(
                    "offset {offset} of {} names two byte strings: {} appends of incarnation {id} before, \
                     {} of {} now",
                    stream.path,
                    before.len(),
                    named.len(),
                    stream.id,
                ));
            }
        }
        let of_stream = self.observed.entry((stream.path, stream.id)).or_default();
        of_stream.entry(offset).or_insert_with(|| named.to_vec());
        Ok(())
    }

    fn observed_lives(
        &self,
        path: &'static str,
    ) -> impl Iterator<Item = (&(&'static str, u64), &BTreeMap<Offset, Vec<Piece>>)> {
        self.observed.range((path, 0)..=(path, u64::MAX))
    }

    /// All offsets clients know of a path, with the incarnation each belongs to.
    pub fn observed_at(&self, path: &'static str) -> impl Iterator<Item = (u64, Offset, &[Piece])> {
        self.observed_lives(path).flat_map(|((_, id), offsets)| {
            offsets
                .iter()
                .map(move |(offset, pieces)| (*id, *offset, pieces.as_slice()))
        })
    }

    pub fn highest_epoch_seen(&self, stream: &StreamModel) -> u64 {
        let of_stream = self.observed.get(&(stream.path, stream.id));
        of_stream
            .and_then(|offsets| offsets.keys().map(|offset| offset.epoch).max())
            .unwrap_or(0)
    }
}
