//! What appends in memory alone have changed of an `ephemeral` stream beside its bytes, and what it was before.
//!
//! After a restart the stream ends where its bytes in files end ([`StreamState::lasting_tail`]). Its producers and its
//! `Stream-Seq` must be those of that place: what they tell of lost bytes would refuse their repetition, and what they
//! do not tell of kept ones would store them twice. So a snapshot writes [`Unsettled::at`] that place.
//!
//! Invariant `I-UNSETTLED-1`: for each place where a restart may find the end (the last checkpoint's, and that of one
//! which is being written), the value that held there is known.

use std::collections::HashMap;

use crate::codec::is_committer;
use crate::stream::producers::{ProducerState, Producers};
use crate::stream::state::{ClosedBy, Keep, StreamState};

#[derive(Debug, Default)]
pub struct Unsettled {
    producers: HashMap<Box<[u8]>, Trail<ProducerState>>,
    stream_seq: Trail<Box<[u8]>>,
    /// Who closed the stream did so with the bytes up to the tail.
    closed_with_bytes: bool,
}

/// The places where the stream may end after a restart.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    /// Of what a checkpoint has.
    kept: u64,
    /// Of what one will have that is being written; the same if none is.
    taken: u64,
}

/// The newest value of something came with the bytes up to `end`; before them it had these, each from its end on.
#[derive(Debug)]
struct Trail<T> {
    end: u64,
    before: Vec<(u64, T)>,
}

impl<T> Default for Trail<T> {
    fn default() -> Trail<T> {
        Trail {
            end: 0,
            before: Vec::new(),
        }
    }
}

impl<T> Trail<T> {
    /// Bytes up to `end` replace the value.
    fn replace(&mut self, value: Option<T>, end: u64, ends: Ends) {
        if self.end <= ends.taken {
            let needed = self.before.partition_point(|(end, _)| *end <= ends.kept);
            self.before.drain(..needed.saturating_sub(1));
            if self.end <= ends.kept {
                self.before.clear();
            }
            self.before.extend(value.map(|value| (self.end, value)));
        }
        self.end = end;
    }

    /// The value where the stream ends at `tail`, if it is not `newest`.
    fn at<'a>(&'a self, tail: u64, newest: Option<&'a T>) -> Option<&'a T> {
        if self.end <= tail {
            return newest;
        }
        let held = self.before.iter().rev().find(|(end, _)| *end <= tail);
        held.map(|(_, value)| value)
    }
}

impl Unsettled {
    /// What it takes in memory, about.
    pub fn memory_len(&self) -> u64 {
        let each = size_of::<(Box<[u8]>, Trail<ProducerState>)>() + size_of::<ProducerState>() + 64;
        (self.producers.len() * each) as u64
    }
}

impl StreamState {
    fn ends(&self) -> Ends {
        let taken = match self.keep {
            Keep::Taken => self
                .flushing
                .as_ref()
                .map_or(self.file_end(), |hot| hot.end()),
            Keep::No | Keep::Wanted => self.cold_end(),
        };
        Ends {
            kept: self.cold_end(),
            taken,
        }
    }

    /// Call before what is remembered of a producer is replaced. Commits are in the log, whatever becomes of the bytes.
    pub(super) fn leave_producer(&mut self, id: &[u8]) {
        if !self.is_volatile() || is_committer(id) {
            return;
        }
        let (ends, tail, known) = (self.ends(), self.tail, self.producer(id));
        let producers = self.logged.producers.all();
        let unsettled = &mut self.unsettled.get_or_insert_default().producers;
        if unsettled.len() > 2 * producers.map_or(0, Producers::len) + 16 {
            unsettled.retain(|id, _| producers.is_some_and(|all| all.get(id).is_some()));
        }
        match unsettled.get_mut(id) {
            Some(trail) => trail.replace(known, tail, ends),
            None => {
                let mut trail = Trail::default();
                trail.replace(known, tail, ends);
                unsettled.insert(id.into(), trail);
            }
        }
    }

    /// The same for `Stream-Seq`.
    pub(super) fn leave_stream_seq(&mut self) {
        if self.is_volatile() {
            let (ends, tail) = (self.ends(), self.tail);
            let known = self.logged.stream_seq.clone();
            let unsettled = self.unsettled.get_or_insert_default();
            unsettled.stream_seq.replace(known, tail, ends);
        }
    }

    /// Call when a producer closes the stream with bytes.
    pub(super) fn close_with_bytes(&mut self) {
        if self.is_volatile() {
            self.unsettled.get_or_insert_default().closed_with_bytes = true;
        }
    }

    /// Whose repetition of the close a restart shall know: not of one that lost its bytes.
    pub fn lasting_closed_by(&self) -> Option<&ClosedBy> {
        let unsettled = self.unsettled.as_ref();
        let lost = unsettled.is_some_and(|unsettled| unsettled.closed_with_bytes)
            && self.lasting_tail().0 < self.tail;
        self.closed_by.as_deref().filter(|_| !lost)
    }

    /// What a restart shall know of the producers.
    pub fn lasting_producers(&self) -> impl Iterator<Item = (&[u8], &ProducerState)> {
        let (tail, _) = self.lasting_tail();
        let known = self.producers().into_iter().flat_map(|known| known.iter());
        known.filter_map(move |(id, newest)| {
            let trails = self.unsettled.as_ref().map(|all| &all.producers);
            let state = match trails.and_then(|trails| trails.get(id)) {
                Some(trail) => trail.at(tail, Some(newest))?,
                None => newest,
            };
            Some((&**id, state))
        })
    }

    /// The same of `Stream-Seq`.
    pub fn lasting_seq(&self) -> Option<&[u8]> {
        let newest = self.stream_seq.as_ref();
        let seq = match &self.unsettled {
            Some(unsettled) => unsettled.stream_seq.at(self.lasting_tail().0, newest),
            None => newest,
        };
        seq.map(|seq| &**seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{AppendExtra, ProducerTag};
    use crate::model::{Class, ContentType, StreamId};
    use crate::stream::change::{Append, Change, What};
    use crate::stream::snapshot;
    use std::sync::Arc;

    fn ends(kept: u64, taken: u64) -> Ends {
        Ends { kept, taken }
    }

    #[test]
    fn a_restart_finds_what_held_at_its_end() {
        let mut trail = Trail::default();
        trail.replace(Some("a log's"), 20, ends(10, 10));
        trail.replace(Some("at 20"), 30, ends(10, 10));
        assert_eq!(trail.at(10, Some(&"at 30")), Some(&"a log's"));
        assert_eq!(trail.at(30, Some(&"at 30")), Some(&"at 30"));
        // A checkpoint takes everything, and an append follows: whether it comes about or not, a value is known.
        trail.replace(Some("at 30"), 40, ends(10, 30));
        assert_eq!(trail.at(10, Some(&"at 40")), Some(&"a log's"));
        assert_eq!(trail.at(30, Some(&"at 40")), Some(&"at 30"));
        // It came about; a second one begins.
        trail.replace(Some("at 40"), 50, ends(30, 40));
        assert_eq!(trail.at(30, Some(&"at 50")), Some(&"at 30"));
        assert_eq!(trail.at(40, Some(&"at 50")), Some(&"at 40"));
        assert_eq!(trail.before.len(), 2);
        trail.replace(Some("at 50"), 60, ends(50, 50));
        assert_eq!(trail.before, [(50, "at 50")]);
    }

    #[test]
    fn what_began_in_memory_is_unknown_before() {
        let mut trail = Trail::default();
        trail.replace(None, 20, ends(10, 10));
        trail.replace(Some("at 20"), 30, ends(10, 10));
        assert_eq!(trail.at(10, Some(&"at 30")), None);
    }

    #[test]
    fn a_directory_of_before_vouches_for_no_producer_of_a_stream_in_memory() {
        let mut state = StreamState::new(StreamId(1), Class::Fsync, 0);
        for id in [&b"appender"[..], b"\0committer"] {
            let producer = ProducerTag {
                id,
                epoch: 0,
                seq: 0,
            };
            let extra = AppendExtra {
                producer: Some(producer),
                stream_seq: None,
            };
            state.apply(&Change::plain(
                state.applied_sequence + 1,
                0,
                What::Append(Append {
                    extra,
                    ..Append::default()
                }),
            ));
        }
        let class = What::Class {
            class: Class::Ephemeral,
            since: 0,
        };
        state.apply(&Change::plain(9, 0, class));
        let content_type = ContentType::new("text/plain");
        let mut bytes = Vec::new();
        snapshot::encode("s", &content_type, &state, &mut bytes);
        let known = |bytes: &[u8]| {
            let stream = snapshot::decode(bytes, &|text| Arc::new(ContentType::new(text)));
            let stream = stream.expect("it decodes");
            let state = stream.lock();
            [&b"appender"[..], b"\0committer"].map(|id| state.producer(id).is_some())
        };
        assert_eq!(known(&bytes), [true, true]);
        bytes[0] -= 1;
        assert_eq!(known(&bytes), [false, true]);
    }
}
