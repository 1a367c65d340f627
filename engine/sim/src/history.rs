//! What a crash may leave behind, and what clients have seen.
//!
//! Each operation adds a step: the newest sequence in the log, and the world as it is then. After a crash the engine
//! says how far the log reached; the world of that step, and no other, must be there. Beside it stand all offsets
//! ever handed out with the bytes they name: none may ever name others.

use std::collections::BTreeMap;

use millstream_core::model::Offset;

use crate::model::{Piece, StreamModel, World};

#[derive(Default)]
pub struct History {
    /// Since the last start, oldest first; the first one is what that start found.
    steps: Vec<(u64, World)>,
    /// Everything up to this sequence was acknowledged, or shown as if it were.
    promised: u64,
    /// Path and incarnation, then offset: the appends that lie before it.
    observed: BTreeMap<(&'static str, u64), BTreeMap<Offset, Vec<Piece>>>,
}

impl History {
    pub fn restart(&mut self, sequence: u64, world: World) {
        self.steps = vec![(sequence, world)];
        self.promised = sequence;
    }

    pub fn note(&mut self, sequence: u64, world: &World) {
        self.steps.push((sequence, world.clone()));
    }

    pub fn promise(&mut self, sequence: u64) {
        self.promised = self.promised.max(sequence);
    }

    pub fn promised(&self) -> u64 {
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

    /// Notes that a client was given this offset with these appends before it.
    pub fn observe(
        &mut self,
        stream: &StreamModel,
        offset: Offset,
        pieces: usize,
    ) -> Result<(), String> {
        let named = &stream.pieces[..pieces];
        let of_stream = self.observed.entry((stream.path, stream.id)).or_default();
        match of_stream.get(&offset) {
            None => {
                of_stream.insert(offset, named.to_vec());
                Ok(())
            }
            Some(before) if before == named => Ok(()),
            Some(before) => Err(format!(
                "offset {offset} of {} names two byte strings: {} appends before, {} now",
                stream.path,
                before.len(),
                named.len()
            )),
        }
    }

    /// All offsets clients know of a path, with the incarnation each belongs to.
    pub fn observed_at(&self, path: &'static str) -> impl Iterator<Item = (u64, Offset, &[Piece])> {
        self.observed
            .range((path, 0)..=(path, u64::MAX))
            .flat_map(|((_, id), offsets)| {
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
