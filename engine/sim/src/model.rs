//! The oracle: what the operations mean, written down a second time, small and without any I/O.
//!
//! A [`World`] is the state of all streams after some operations. It knows nothing of logs, batches or files; the
//! only traces of durability are which part of a stream readers may see, and how often its tail may have been lost.
//!
//! Invariants
//! - `I-WORLD-1` A stream's pieces are its appends, in order, byte for byte, a fork's inherited ones included.
//! - `I-WORLD-2` A stream that is dead and needed by no fork is not in the world.

use std::collections::BTreeMap;
use std::sync::Arc;

use millstream_core::error::ErrorCode;

/// One append as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub bytes: Arc<[u8]>,
    pub records: u64,
}

impl Piece {
    pub fn new(bytes: &[u8], records: u64) -> Piece {
        Piece {
            bytes: bytes.into(),
            records,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Producer {
    pub epoch: u64,
    pub seq: u64,
    /// How often the stream's tail may have been lost when this producer wrote last.
    pub losses: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    pub id: u8,
    pub epoch: u64,
    pub seq: u64,
}

#[derive(Clone, Debug)]
pub struct StreamModel {
    pub id: u64,
    pub path: &'static str,
    pub json: bool,
    /// `false` = memory: acknowledged before it is in any file.
    pub fsync: bool,
    pub ttl: bool,
    /// How many long sleeps there had been when it was created; it lives through none.
    pub born_in_sleep: u64,
    pub deleted: bool,
    pub closed: bool,
    pub closed_by: Option<Tag>,
    pub source: Option<u64>,
    pub ever_forked: bool,
    pub pieces: Vec<Piece>,
    /// Pieces and close that readers may see.
    pub visible: usize,
    pub visible_closed: bool,
    pub producers: BTreeMap<u8, Producer>,
    pub stream_seq: Option<Vec<u8>>,
    pub losses: u64,
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

    pub fn expired(&self, sleeps: u64) -> bool {
        self.ttl && self.born_in_sleep < sleeps
    }

    pub fn publish(&mut self) {
        self.visible = self.pieces.len();
        self.visible_closed = self.closed;
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

    pub fn publish_all(&mut self) {
        self.streams.values_mut().for_each(StreamModel::publish);
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

    /// Does what an accepted append does, all of it at once.
    pub fn append(&mut self, path: &str, wish: &AppendWish) {
        let Some(stream) = self.at_mut(path) else {
            return;
        };
        stream.pieces.extend(wish.piece.clone());
        if let Some(tag) = wish.tag {
            let state = Producer {
                epoch: tag.epoch,
                seq: tag.seq,
                losses: stream.losses,
            };
            stream.producers.insert(tag.id, state);
        }
        if wish.stream_seq.is_some() {
            stream.stream_seq.clone_from(&wish.stream_seq);
        }
        if wish.close {
            stream.closed = true;
            stream.closed_by = wish.tag;
        }
        if !stream.fsync && !wish.close {
            stream.publish();
        }
    }
}

fn judge_producer(stream: &StreamModel, tag: Tag) -> Outcome {
    let Some(known) = stream.producers.get(&tag.id) else {
        let lost = !stream.fsync && stream.losses > 0;
        return if tag.seq == 0 || lost {
            Outcome::Accept
        } else {
            Outcome::Refuse(ErrorCode::ProducerGap)
        };
    };
    if tag.epoch < known.epoch {
        return Outcome::Refuse(ErrorCode::ProducerFenced);
    }
    if !stream.fsync && known.losses < stream.losses {
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
        seq if seq <= known.seq => Outcome::Duplicate,
        seq if seq == known.seq + 1 => Outcome::Accept,
        _ => Outcome::Refuse(ErrorCode::ProducerGap),
    }
}
