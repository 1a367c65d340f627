//! Where streams end, and which place in them a number, a time, a byte or an offset means.
//!
//! For `/v1/tails`: one look at a stream's state under its lock, and searches of its index. A *place* is the offset
//! where an append begins with the number of a record in it.
//!
//! Invariants
//! - `I-TAIL-1` Only what is visible and final is told: who asks for a stream whose creation, end or class is not synced
//!   yet asks again later. No thread waits here.
//! - `I-TAIL-2` A place is never behind the visible tail.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use crate::limits::TAILS_STREAMS_MAX;
use crate::log::endings::Ending;
use crate::model::{Class, ContentType, Offset, StreamId, is_reserved};
use crate::refusal::Refusal;
use crate::shard::batch::NotStaged;
use crate::shard::engine::{Engine, Undone};
use crate::shard::plan::ReadFrom;
use crate::stream::handle::Stream;
use crate::stream::locate::Key;
use crate::stream::offsets::{self, Gap, ReadStart};
use crate::stream::snapshot;
use crate::stream::state::{Life, StreamState};

/// Where an append begins, and a record of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    pub offset: Offset,
    pub number: u64,
}

/// What a stream is and where it ends, seen at one moment.
pub struct Tail {
    pub name: Box<str>,
    pub incarnation: StreamId,
    pub content_type: Arc<ContentType>,
    pub class: Class,
    pub closed: bool,
    pub first: Place,
    pub tail: Place,
    pub bytes: u64,
    /// Time of the newest visible record; `None` if there is none.
    pub time_ms: Option<u64>,
    pub epochs: u64,
}

/// Streams that an answer is about.
pub struct Matching {
    pub streams: Vec<Arc<Stream>>,
    /// The last name that was looked at, if there are more behind it.
    pub next: Option<Box<str>>,
}

/// Which place is wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    Number(u64),
    TimeMs(u64),
    Byte(u64),
    Offset(Box<str>),
}

pub struct Found {
    pub place: Place,
    /// Time of the append at the place; `None` at the tail.
    pub time_ms: Option<u64>,
    /// What a read from there would report.
    pub gap: Option<Gap>,
}

impl Engine {
    /// A stream as it is for readers; `None` if it is not there. `Undone::Wait` while that is not final. Behind a log that has
    /// failed nothing becomes final any more: then as it was last.
    pub fn settled_tail(&self, stream: &Arc<Stream>) -> Result<Option<Tail>, Undone> {
        if self.shard.failed() {
            let (state, synced) = (stream.lock(), self.shard.synced());
            return Ok(state.was_live(synced).then(|| self.tail_of(stream, &state)));
        }
        self.if_settled(stream, |state| self.tail_of(stream, state))
    }

    /// Looks at a stream that is there and final; `Undone::Wait` while it is not the latter.
    pub fn if_settled<T>(
        &self,
        stream: &Arc<Stream>,
        look: impl FnOnce(&mut StreamState) -> T,
    ) -> Result<Option<T>, Undone> {
        let mut state = stream.lock();
        self.end_if_expired(stream, &mut state)?;
        match self.check_final(&state) {
            Ok(()) => Ok((state.life == Life::Live).then(|| look(&mut state))),
            Err(_) if self.shard.failed() => Err(NotStaged::Failed.into()),
            Err(undone) => {
                let gate = self.control_gate(&state);
                drop(state);
                self.shard.want(gate);
                Err(undone)
            }
        }
    }

    /// Whether what a stream is, is final; `Undone::Wait` if not. Behind a log that has failed what is visible stays readable:
    /// all is told as it was last. Of an end nobody is told that a restart may take back.
    pub fn check_final(&self, state: &StreamState) -> Result<(), Undone> {
        let synced = self.shard.synced();
        let was_last = || self.shard.failed() && state.life == Life::Live && state.was_live(synced);
        if state.control_sequence <= synced || was_last() {
            return Ok(());
        }
        Err(Undone::Wait)
    }

    fn tail_of(&self, stream: &Stream, state: &StreamState) -> Tail {
        let begun = self.losses.tail_epoch(state) != state.last_epoch();
        Tail {
            name: stream.path.clone(),
            incarnation: stream.id,
            content_type: Arc::clone(&stream.content_type),
            class: state.class_at(self.shard.synced()),
            closed: state.visible.closed,
            first: Place {
                offset: offsets::offset_before(state, &self.losses, 0),
                number: 0,
            },
            tail: self.tail_place(state),
            bytes: state.visible.tail,
            time_ms: newest_time(state),
            epochs: 1 + state.later_epochs.len() as u64 + u64::from(begun),
        }
    }

    fn tail_place(&self, state: &StreamState) -> Place {
        Place {
            offset: self.visible_tail(state),
            number: state.visible.records,
        }
    }

    /// Nobody is told that a stream has expired before the log says so: a restart, or a clock that was set, would bring it
    /// back.
    fn end_if_expired(&self, stream: &Arc<Stream>, state: &mut StreamState) -> Result<(), Undone> {
        let now_ms = self.now_ms();
        if self.has_expired(state, now_ms) {
            self.expire(stream, state, now_ms)?;
            self.shard.kick();
        }
        Ok(())
    }

    /// The same for one that is about to be told of with others. Returns it, and the number of the frame that must be final
    /// then. A log that has failed says nothing more: then it is told of as it was.
    pub fn end_expired(&self, path: &str) -> Result<(Option<Arc<Stream>>, u64), Undone> {
        let Some(stream) = self.find_to_read(path)? else {
            return Ok((None, 0));
        };
        if self.shard.failed() {
            return Ok((Some(stream), 0));
        }
        let sequence = {
            let mut state = stream.lock();
            self.end_if_expired(&stream, &mut state)?;
            state.control_sequence
        };
        Ok((Some(stream), sequence))
    }

    /// Where a removed stream ended: that incarnation, or the newest removed one of the name.
    pub fn ending(&self, name: &str, incarnation: Option<StreamId>) -> Option<Ending> {
        let (synced, now_ms) = (self.shard.synced(), self.now_ms());
        self.directory
            .endings
            .find(name, incarnation, synced, now_ms)
    }

    /// Every stream whose name matches, in memory or not; with `after` those of one page behind that name. What they are
    /// need not be final.
    pub fn all_matching(
        &self,
        prefix: &str,
        after: Option<&str>,
        matches: &dyn Fn(&str) -> Result<bool, Undone>,
    ) -> Result<Matching, Undone> {
        let behind = after.unwrap_or_default();
        let cached = self.directory.cached_below(prefix);
        let known: HashSet<&str> = cached.iter().map(|stream| &*stream.path).collect();
        let mut streams = Vec::new();
        for stream in &cached {
            if *stream.path > *behind && !stream.is_reserved() && matches(&stream.path)? {
                streams.push(self.as_told_last(Arc::clone(stream)));
            }
        }
        let mut count = 0;
        let mut undone = Ok(());
        self.directory.catalog().scan(
            prefix.as_bytes(),
            behind.as_bytes(),
            usize::MAX,
            &mut |path, value| {
                let Ok(path) = std::str::from_utf8(path) else {
                    return true;
                };
                if known.contains(path) || is_reserved(path) {
                    return true;
                }
                match matches(path) {
                    Ok(true) => {}
                    Ok(false) => return true,
                    Err(error) => {
                        undone = Err(error);
                        return false;
                    }
                }
                let decoded = snapshot::unseal(value).and_then(|bytes| {
                    snapshot::decode_to_read(bytes, &|text| self.directory.intern(text))
                });
                // What is only kept for forks is not there for readers.
                let there = decoded.filter(|stream| stream.lock().life == Life::Live);
                count += usize::from(there.is_some());
                streams.extend(there.map(Arc::new));
                count <= TAILS_STREAMS_MAX
            },
        )?;
        undone?;
        let mut next = None;
        if after.is_some() && streams.len() > TAILS_STREAMS_MAX {
            streams.sort_unstable_by(|one, other| one.path.cmp(&other.path));
            streams.truncate(TAILS_STREAMS_MAX);
            next = streams.last().map(|stream| stream.path.clone());
        }
        // All ends together, before the first is looked at. What expires is in memory, but for the first moments.
        let mut there = Vec::with_capacity(streams.len());
        for stream in streams {
            if !stream.expires {
                there.push(stream);
                continue;
            }
            there.extend(self.end_expired(&stream.path)?.0);
        }
        Ok(Matching {
            streams: there,
            next,
        })
    }

    /// Where something is in a stream.
    pub fn find_place(&self, stream: &Arc<Stream>, wanted: &Wanted) -> Result<Found, Refusal> {
        self.past_damage(|| match wanted {
            Wanted::Offset(text) => self.place_of_offset(stream, text),
            Wanted::Number(number) => {
                let position = self.append_of_record(stream, *number);
                self.place_at(stream, self.known(stream, position)?, Some(*number))
            }
            Wanted::TimeMs(time_ms) => {
                let position = self.position_at_time(stream, *time_ms);
                self.place_at(stream, self.known(stream, position)?, None)
            }
            Wanted::Byte(byte) => {
                let position = self.boundary_at_or_after(stream, *byte);
                self.place_at(stream, self.known(stream, position)?, None)
            }
        })
    }

    fn known<T>(&self, stream: &Stream, found: io::Result<T>) -> Result<T, Refusal> {
        found.map_err(|error| self.read_failed(stream, error))
    }

    /// Where the append begins that holds a record; the visible tail if there is none yet.
    fn append_of_record(&self, stream: &Arc<Stream>, number: u64) -> io::Result<u64> {
        let visible = stream.lock().visible;
        if number >= visible.records {
            return Ok(visible.tail);
        }
        let owner = self.owner_of_record(stream, number)?;
        let entry = self
            .own_entry(&owner, Key::Records(number + 1))?
            .ok_or_else(|| io::Error::other("no index entry for a visible record"))?;
        self.boundary_at_or_before(&owner, entry.end - 1)
    }

    /// First append boundary at or behind a byte position, at most the visible tail.
    fn boundary_at_or_after(&self, stream: &Arc<Stream>, byte: u64) -> io::Result<u64> {
        let tail = stream.lock().visible.tail;
        if byte == 0 || byte >= tail {
            return Ok(byte.min(tail));
        }
        let (owner, limit) = self.owner_of(stream, byte - 1)?;
        let entry = self.own_entry(&owner, Key::End(byte))?;
        Ok(entry.map_or(tail, |entry| entry.end.min(limit).min(tail)))
    }

    /// The place at an append boundary, or at a record of the append that begins there.
    fn place_at(
        &self,
        stream: &Arc<Stream>,
        position: u64,
        number: Option<u64>,
    ) -> Result<Found, Refusal> {
        let read = self.reading(stream).start(ReadStart::at(position))?;
        if read.gap.is_some() {
            return self.found(stream, read, None, None);
        }
        let offset = {
            let state = stream.lock();
            if position >= state.visible.tail {
                return Ok(Found {
                    place: self.tail_place(&state),
                    time_ms: None,
                    gap: None,
                });
            }
            offsets::offset_before(&state, &self.losses, position)
        };
        self.found(stream, read, Some(offset), number)
    }

    fn place_of_offset(&self, stream: &Arc<Stream>, text: &str) -> Result<Found, Refusal> {
        match ReadFrom::parse(text.as_bytes())? {
            ReadFrom::At(asked) => {
                let start = self.reading(stream).resolve_boundary(asked)?;
                self.found(stream, start, Some(asked), None)
            }
            ReadFrom::Now => {
                let tail = stream.lock().visible.tail;
                self.place_at(stream, tail, None)
            }
            _ => self.place_at(stream, 0, None),
        }
    }

    /// Number and time of the append where a read begins. `offset` is its name unless a gap gives it another.
    fn found(
        &self,
        stream: &Arc<Stream>,
        start: ReadStart,
        offset: Option<Offset>,
        number: Option<u64>,
    ) -> Result<Found, Refusal> {
        let position = start.position;
        let behind = start.gap.map(|gap| gap.to).or(offset);
        let offset = behind
            .unwrap_or_else(|| offsets::offset_before(&stream.lock(), &self.losses, position));
        let number = match number {
            Some(number) => number,
            None => self.known(stream, self.records_at(stream, position))?,
        };
        let time_ms = if position < stream.lock().visible.tail {
            let (owner, _) = self.known(stream, self.owner_of(stream, position))?;
            let entry = self.known(stream, self.own_entry(&owner, Key::End(position + 1)))?;
            entry.map(|entry| entry.time_ms)
        } else {
            None
        };
        Ok(Found {
            place: Place { offset, number },
            time_ms,
            gap: start.gap,
        })
    }
}

/// Time of the newest visible record, as far as memory tells.
fn newest_time(state: &StreamState) -> Option<u64> {
    let visible = state.visible;
    if visible.records == 0 {
        return None;
    }
    let newest = state.last_entry_held(visible.tail);
    Some(newest.map_or(state.last_time_ms, |entry| entry.time_ms))
}

#[cfg(test)]
#[path = "looks_tests.rs"]
mod tests;
