//! The oracle: what the operations mean, written down a second time, small and without any I/O.
//!
//! A [`World`] is the state of all streams after some operations. It knows nothing of batches or files; the only
//! traces of durability are which watermark each append waits for, and the epoch of each tail.
//!
//! Invariants
//! - `I-WORLD-1` A stream's pieces are its appends, in order, byte for byte, a fork's inherited ones included.
//! - `I-WORLD-2` A stream that is dead and needed by no fork is not in the world.

mod stream;

use std::collections::BTreeMap;

use millstream_core::error::ErrorCode;
use millstream_core::model::{Class, Gate, Offset, Stage};

pub use self::stream::{
    Piece, Producer, StreamModel, Tag, committer_bytes, committer_name, producer_bytes,
};

/// The log's watermarks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Marks {
    pub written: u64,
    pub synced: u64,
}

impl Marks {
    /// Everything has come as far as it can: what a start leaves.
    pub const ALL: Marks = Marks {
        written: u64::MAX,
        synced: u64::MAX,
    };

    pub fn reach(self, gate: Gate) -> bool {
        match gate.stage {
            Stage::Applied => true,
            Stage::Written => gate.sequence <= self.written,
            Stage::Synced => gate.sequence <= self.synced,
        }
    }
}

/// What an append asks for.
#[derive(Clone, Debug)]
pub struct AppendWish {
    pub tag: Option<Tag>,
    pub stream_seq: Option<Vec<u8>>,
    pub close: bool,
    pub piece: Option<Piece>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Accept,
    Duplicate,
    AlreadyClosed,
    Refuse(ErrorCode),
    /// Deleted, and the clean-up of its family decides between 404 and 410.
    RefuseDead,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    Absent,
    Live,
    /// Dead, but a living fork reads it: the path stays taken.
    Kept,
    /// Dead; whether its path is free already depends on clean-up.
    Fading,
}

#[derive(Clone, Debug, Default)]
pub struct World {
    pub streams: BTreeMap<u64, StreamModel>,
    pub paths: BTreeMap<&'static str, u64>,
    /// Streams that were deleted, by incarnation.
    pub endings: BTreeMap<u64, EndingModel>,
    /// Stages that were committed, by id, with the producer and its epoch.
    pub committed: BTreeMap<String, (u8, u64)>,
}

/// Where a stream was when it was deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndingModel {
    pub path: &'static str,
    pub tail: Offset,
    pub records: u64,
    /// The frame of the delete.
    pub sequence: u64,
    pub time_ms: u64,
}

/// What one stage holds for one stream.
#[derive(Clone, Debug)]
pub struct ShareModel {
    pub stream: u64,
    pub path: &'static str,
    pub pieces: Vec<Piece>,
}

/// A stage that its client was told of.
#[derive(Clone, Debug)]
pub struct StageModel {
    pub id: String,
    pub checksum: u32,
    pub shares: Vec<ShareModel>,
}

impl World {
    pub fn at(&self, path: &str) -> Option<&StreamModel> {
        self.streams.get(self.paths.get(path)?)
    }

    pub fn at_mut(&mut self, path: &str) -> Option<&mut StreamModel> {
        self.streams.get_mut(self.paths.get(path)?)
    }

    pub fn is_dead(&self, stream: &StreamModel, sleeps: u64) -> bool {
        stream.deleted || stream.expired(sleeps)
    }

    pub fn children(&self, id: u64) -> impl Iterator<Item = &StreamModel> {
        self.streams
            .values()
            .filter(move |stream| stream.source == Some(id))
    }

    /// Whether a living stream reads this one's bytes, itself included.
    pub fn needed(&self, stream: &StreamModel, sleeps: u64) -> bool {
        !self.is_dead(stream, sleeps)
            || self
                .children(stream.id)
                .any(|child| self.needed(child, sleeps))
    }

    pub fn standing(&self, path: &str, sleeps: u64) -> Standing {
        match self.at(path) {
            None => Standing::Absent,
            Some(stream) if !self.is_dead(stream, sleeps) => Standing::Live,
            Some(stream) if self.needed(stream, sleeps) => Standing::Kept,
            Some(stream) if stream.source.is_some() || stream.ever_forked => Standing::Fading,
            Some(_) => Standing::Absent,
        }
    }

    pub fn live(&self, sleeps: u64) -> impl Iterator<Item = &StreamModel> {
        let of_paths = self.paths.values().filter_map(|id| self.streams.get(id));
        of_paths.filter(move |stream| !self.is_dead(stream, sleeps))
    }

    /// Puts a new stream at its path. A dead one there gives way.
    pub fn insert(&mut self, stream: StreamModel, sleeps: u64) {
        if let Some(source) = stream.source.and_then(|id| self.streams.get_mut(&id)) {
            source.ever_forked = true;
        }
        self.paths.insert(stream.path, stream.id);
        self.streams.insert(stream.id, stream);
        self.sweep(sleeps);
    }

    /// Forgets what nobody needs and no path names.
    fn sweep(&mut self, sleeps: u64) {
        let gone: Vec<u64> = self
            .streams
            .values()
            .filter(|stream| {
                self.paths.get(stream.path) != Some(&stream.id) && !self.needed(stream, sleeps)
            })
            .map(|stream| stream.id)
            .collect();
        gone.iter().for_each(|id| drop(self.streams.remove(id)));
    }

    /// The protocol's answer to an append, in its order of precedence.
    pub fn judge(&self, path: &str, wish: &AppendWish, sleeps: u64) -> Outcome {
        let stream = match (self.standing(path, sleeps), self.at(path)) {
            (Standing::Live, Some(stream)) => stream,
            (Standing::Kept, _) => return Outcome::Refuse(ErrorCode::StreamGone),
            (Standing::Fading, _) => return Outcome::RefuseDead,
            _ => return Outcome::Refuse(ErrorCode::StreamNotFound),
        };
        if wish.piece.is_none() && !wish.close {
            return Outcome::Refuse(ErrorCode::BodyEmpty);
        }
        if stream.closed {
            return match wish.tag {
                Some(tag) if stream.closed_by == Some(tag) => Outcome::Duplicate,
                None if wish.piece.is_none() => Outcome::AlreadyClosed,
                _ => Outcome::Refuse(ErrorCode::StreamClosed),
            };
        }
        let producer = wish
            .tag
            .map_or(Outcome::Accept, |tag| judge_producer(stream, tag));
        if producer != Outcome::Accept {
            return producer;
        }
        match (&wish.stream_seq, &stream.stream_seq) {
            (Some(seq), Some(last)) if seq <= last => Outcome::Refuse(ErrorCode::SequenceConflict),
            _ => Outcome::Accept,
        }
    }

    /// Whether the stream has what this producer sent, or was closed by it.
    pub fn has(&self, path: &str, tag: Option<Tag>) -> bool {
        self.at(path).is_some_and(|stream| {
            stream.closed_by == tag || stream.pieces.iter().any(|piece| piece.tag == tag)
        })
    }

    /// Does what an accepted append does, all of it at once. `sequence` is that of its frame, if it has one.
    pub fn append(&mut self, path: &str, wish: &AppendWish, sequence: u64, marks: Marks) {
        let Some(stream) = self.at_mut(path) else {
            return;
        };
        // Behind a change of what the stream is, everything waits for that change.
        let stage = if wish.close || stream.control > marks.synced {
            Stage::Synced
        } else {
            stream.class.stage()
        };
        let volatile = stream.class == Class::Ephemeral;
        let gate = Gate { sequence, stage };
        if wish.piece.is_some() {
            stream.enter_own_epoch();
        }
        stream.pieces.extend(wish.piece.clone().map(|piece| Piece {
            gate,
            volatile,
            tag: wish.tag,
            ..piece
        }));
        if let Some(tag) = wish.tag {
            let state = Producer {
                epoch: tag.epoch,
                seq: tag.seq,
                stream_epoch: stream.epoch,
                skipped: skipped_after(stream, tag),
            };
            stream.producers.insert(tag.id, state);
        }
        if wish.stream_seq.is_some() {
            stream.stream_seq.clone_from(&wish.stream_seq);
        }
        if !volatile || wish.close {
            stream.newest = sequence;
        }
        if wish.close {
            stream.closed = true;
            stream.closed_by = wish.tag;
            stream.control = sequence;
            stream.close_gate = gate;
        }
    }
}

impl World {
    /// Whether all streams of a stage are there for a commit.
    pub fn all_live(&self, stage: &StageModel, sleeps: u64) -> bool {
        stage.shares.iter().all(|share| {
            let found = self.streams.get(&share.stream);
            found.is_some_and(|stream| {
                self.paths.get(share.path) == Some(&share.stream) && !self.is_dead(stream, sleeps)
            })
        })
    }

    /// Epochs of a producer in all streams that a commit names: those that were staged for, and those at their paths now.
    pub fn committer_epochs(&self, stage: &StageModel, producer: u8) -> Vec<u64> {
        let staged = stage.shares.iter().map(|share| Some(share.stream));
        let now = stage
            .shares
            .iter()
            .map(|share| self.paths.get(share.path).copied());
        let streams = staged.chain(now).flatten();
        let streams = streams.filter_map(|id| self.streams.get(&id));
        let known = streams.filter_map(|stream| stream.committers.get(&producer));
        known.copied().collect()
    }

    /// The answer to a commit, in its order of precedence; that streams may be dead is left out.
    pub fn judge_commit(&self, stage: &StageModel, producer: u8, epoch: u64) -> Outcome {
        let known = self.committer_epochs(stage, producer);
        if known.contains(&epoch) {
            return Outcome::Duplicate;
        }
        if known.iter().any(|known| *known > epoch) {
            return Outcome::Refuse(ErrorCode::ProducerFenced);
        }
        if self.committed.contains_key(&stage.id) {
            return Outcome::Refuse(ErrorCode::StageGone);
        }
        let mut streams = stage
            .shares
            .iter()
            .filter_map(|share| self.streams.get(&share.stream));
        if streams.any(|stream| stream.closed) {
            return Outcome::Refuse(ErrorCode::StreamClosed);
        }
        Outcome::Accept
    }

    /// Does what an accepted commit does, to all streams at once.
    pub fn commit(&mut self, stage: &StageModel, producer: u8, epoch: u64, sequence: u64) {
        for share in &stage.shares {
            let Some(stream) = self.streams.get_mut(&share.stream) else {
                continue;
            };
            let volatile = stream.class == Class::Ephemeral;
            stream.enter_own_epoch();
            stream.pieces.extend(share.pieces.iter().map(|piece| Piece {
                gate: Gate::synced(sequence),
                volatile,
                ..piece.clone()
            }));
            stream.committers.insert(producer, epoch);
            stream.newest = sequence;
            if stream.is_weak() {
                // What is appended behind it waits for it.
                stream.control = sequence;
            }
        }
        self.committed.insert(stage.id.clone(), (producer, epoch));
    }
}

fn judge_producer(stream: &StreamModel, tag: Tag) -> Outcome {
    let Some(known) = stream.producers.get(&tag.id) else {
        return if tag.seq == 0 || stream.epoch > stream.id {
            Outcome::Accept
        } else {
            Outcome::Refuse(ErrorCode::ProducerGap)
        };
    };
    if tag.epoch < known.epoch {
        return Outcome::Refuse(ErrorCode::ProducerFenced);
    }
    // Whoever may have lost something is taken at its word; what is known of it is there, and stays a repetition.
    let lost = known.stream_epoch < stream.epoch;
    if lost && (tag.epoch > known.epoch || tag.seq > known.seq) {
        return Outcome::Accept;
    }
    if tag.epoch > known.epoch {
        return if tag.seq == 0 {
            Outcome::Accept
        } else {
            Outcome::Refuse(ErrorCode::ProducerEpochInvalid)
        };
    }
    match tag.seq {
        seq if known.skipped.0 <= seq && seq < known.skipped.1 => {
            Outcome::Refuse(ErrorCode::ProducerGap)
        }
        seq if seq <= known.seq => Outcome::Duplicate,
        seq if seq == known.seq + 1 => Outcome::Accept,
        _ => Outcome::Refuse(ErrorCode::ProducerGap),
    }
}

/// What a producer has left out once its append is taken.
fn skipped_after(stream: &StreamModel, tag: Tag) -> (u64, u64) {
    let known = stream.producers.get(&tag.id);
    let Some(known) = known.filter(|known| known.epoch == tag.epoch) else {
        return (0, tag.seq);
    };
    let next = known.seq + 1;
    match known.skipped {
        old if tag.seq <= next => old,
        (from, to) if from < to => (from, tag.seq),
        _ => (next, tag.seq),
    }
}
