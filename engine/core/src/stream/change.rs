//! What a frame of the log does to its stream: said once, for live requests, recovery and verification.
//!
//! A live request decides, stages a frame, and applies the same change that replay will read from that frame. The one
//! exception are bytes of `ephemeral` streams, which no frame has: their change is applied without one.
//!
//! Invariants
//! - `I-CHANGE-1` Applying depends on the state and the change alone: no clock, no order of a hash.
//! - `I-CHANGE-2` What [`Change::of`] reads from a frame is what was applied when that frame was staged.

use crate::codec::{
    AppendExtra, FLAG_CLOSE, FLAG_TOUCHES, Frame, FrameKind, ProducerTag, Reader, adopt,
};
use crate::io::sabotage::{self, Sabotage};
use crate::model::{Adopted, Class, IndexEntry};
use crate::stream::hot::Hot;
use crate::stream::producers::{ProducerState, Remembered};
use crate::stream::state::{ClosedBy, Life, StreamState};

/// Bytes in a staged pack, with their relative index.
pub type Section = (Adopted, Vec<IndexEntry>);

/// One change of one stream.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// Of its frame.
    pub sequence: u64,
    pub time_ms: u64,
    pub epoch: u64,
    /// Whether an append tells that the stream was used, too.
    pub renews: bool,
    pub what: What<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum What<'a> {
    /// The first content of a stream that begins as its configuration says.
    Create {
        payload: &'a [u8],
        records: u32,
    },
    /// Bytes, producer tuple, `Stream-Seq` and close are one step.
    Append(Append<'a>),
    /// A commit of staged bytes: all sections, the producer tuple and one time for all are one step.
    Adopt {
        producer: ProducerTag<'a>,
        sections: &'a [Section],
    },
    SoftDelete,
    Purge,
    ForkAdded,
    ForkReleased,
    /// A sliding TTL was renewed.
    Touch,
    Class {
        class: Class,
        since: u64,
    },
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Append<'a> {
    pub payload: &'a [u8],
    pub records: u32,
    pub close: bool,
    pub extra: AppendExtra<'a>,
}

impl<'a> Change<'a> {
    /// What a frame says. `sections`: what an adopting frame names ([`adopted`]), each with its index.
    pub fn of(frame: &Frame<'a>, sections: &'a [Section]) -> Result<Change<'a>, &'static str> {
        let extra = || AppendExtra::decode(frame.flags, frame.extra);
        let what = match frame.kind {
            FrameKind::Create => What::Create {
                payload: frame.payload,
                records: frame.records,
            },
            FrameKind::Append => What::Append(Append {
                payload: frame.payload,
                records: frame.records,
                close: frame.flags & FLAG_CLOSE != 0,
                extra: match extra().ok_or("the producer tuple does not decode")? {
                    _ if sabotage::is(Sabotage::ReplayDiffers) => AppendExtra::default(),
                    extra => extra,
                },
            }),
            FrameKind::Adopt => What::Adopt {
                producer: extra()
                    .and_then(|extra| extra.producer)
                    .ok_or(STAGED_SECTIONS)?,
                sections,
            },
            FrameKind::SoftDelete => What::SoftDelete,
            FrameKind::Purge => What::Purge,
            FrameKind::ForkAdded => What::ForkAdded,
            FrameKind::ForkReleased => What::ForkReleased,
            FrameKind::Touch => What::Touch,
            FrameKind::Configure => {
                let class = frame.extra.first().copied().and_then(Class::from_u8);
                let since = Reader::new(frame.payload).u64();
                let (class, since) = class.zip(since).ok_or("the class does not decode")?;
                What::Class { class, since }
            }
            FrameKind::Start | FrameKind::CleanStop => return Err("it is of no stream"),
        };
        Ok(Change {
            sequence: frame.sequence,
            time_ms: frame.time_ms,
            epoch: frame.epoch,
            renews: frame.flags & FLAG_TOUCHES == 0,
            what,
        })
    }

    /// A change that is nothing but its kind.
    pub fn plain(sequence: u64, time_ms: u64, what: What<'a>) -> Change<'a> {
        Change {
            sequence,
            time_ms,
            epoch: 0,
            renews: false,
            what,
        }
    }
}

const STAGED_SECTIONS: &str = "the staged sections do not decode";

/// The sections that an adopting frame takes over; none for any other.
pub fn adopted(frame: &Frame<'_>) -> Result<Vec<Adopted>, &'static str> {
    if frame.kind != FrameKind::Adopt {
        return Ok(Vec::new());
    }
    let mut sections = adopt::decode(frame.payload).ok_or(STAGED_SECTIONS)?;
    sections.retain(|section| section.len > 0);
    Ok(sections)
}

/// Whether a frame's bytes go on where the stream ends. One without bytes may tell of a stream whose bytes go through no
/// frame: then it has no place.
pub fn check_position(
    state: &StreamState,
    frame: &Frame<'_>,
    change: &Change<'_>,
) -> Result<(), String> {
    let has_bytes = match change.what {
        What::Append(append) => !append.payload.is_empty(),
        What::Adopt { sections, .. } => !sections.is_empty(),
        _ => false,
    };
    if !has_bytes || frame.position == state.tail {
        return Ok(());
    }
    Err(format!(
        "it appends at {} but the stream ends at {}",
        frame.position, state.tail
    ))
}

impl StreamState {
    /// The only way in which what the log decides is changed.
    pub fn apply(&mut self, change: &Change<'_>) {
        debug_assert!(change.sequence > self.applied_sequence || self.is_volatile());
        assert!(!self.producers.are_left_out(), "I-PRODUCERS-1");
        self.logged.applied_sequence = change.sequence;
        match change.what {
            What::Create { payload, records } => {
                self.reveal_control(change.sequence);
                self.logged.created_sequence = change.sequence;
                if !payload.is_empty() {
                    self.push_bytes(payload, records);
                }
            }
            What::Append(append) => {
                self.apply_append(change, &append);
                self.log_access(change.time_ms, change.renews);
            }
            What::Adopt { producer, sections } => {
                self.apply_adopt(change, &producer, sections);
                self.log_access(change.time_ms, change.renews);
            }
            What::SoftDelete => {
                self.reveal_control(change.sequence);
                self.remove_at(change.sequence);
                self.logged.life = Life::SoftDeleted;
            }
            What::Purge => {
                self.reveal_control(change.sequence);
                self.remove_at(change.sequence);
                self.logged.life = Life::Gone;
                self.logged.producers = Remembered::Nobody;
                self.unsettled = None;
                let end = Hot::starting_at(self.tail);
                let hot = std::mem::replace(&mut self.hot, end);
                self.abandon(&hot);
            }
            What::ForkAdded => self.logged.fork_count += 1,
            What::ForkReleased => {
                self.logged.fork_count = self.fork_count.saturating_sub(1);
            }
            What::Touch => self.log_access(change.time_ms, true),
            What::Class { class, since } => {
                self.reveal_control(change.sequence);
                self.begin_epoch(change.epoch);
                // Whoever enters or leaves `ephemeral` has everything in a checkpoint.
                self.unsettled = None;
                self.logged.class_sequence = change.sequence;
                self.logged.class_before = self.logged.class;
                self.logged.class = class;
                self.logged.class_since = since;
            }
        }
    }

    fn reveal_control(&mut self, sequence: u64) {
        self.logged.reveal_sequence = sequence;
        self.logged.control_sequence = sequence;
    }

    /// Called before its life ends, for good or not.
    fn remove_at(&mut self, sequence: u64) {
        if self.life == Life::Live {
            self.logged.removed_sequence = sequence;
        }
    }

    fn apply_append(&mut self, change: &Change<'_>, append: &Append<'_>) {
        self.logged.reveal_sequence = change.sequence;
        self.logged.last_time_ms = self.last_time_ms.max(change.time_ms);
        if !append.payload.is_empty() || append.close {
            self.begin_epoch(change.epoch);
        }
        if !append.payload.is_empty() {
            self.push_bytes(append.payload, append.records);
        }
        if let Some(tag) = &append.extra.producer {
            self.remember_producer(tag, change);
        }
        if let Some(seq) = append.extra.stream_seq {
            self.leave_stream_seq();
            self.logged.stream_seq = Some(seq.into());
        }
        if append.close {
            if !append.payload.is_empty() {
                self.close_with_bytes();
            }
            self.logged.closed = true;
            self.logged.control_sequence = change.sequence;
            self.logged.closed_by = append.extra.producer.map(|tag| {
                Box::new(ClosedBy {
                    id: tag.id.into(),
                    epoch: tag.epoch,
                    seq: tag.seq,
                })
            });
        }
    }

    fn apply_adopt(&mut self, change: &Change<'_>, tag: &ProducerTag<'_>, sections: &[Section]) {
        self.logged.reveal_sequence = change.sequence;
        self.logged.last_time_ms = self.last_time_ms.max(change.time_ms);
        if !sections.is_empty() {
            self.begin_epoch(change.epoch);
        }
        for (section, index) in sections {
            self.push_section(section, index);
        }
        self.remember_producer(tag, change);
    }

    /// For repair: bytes that are lost, so that what follows them keeps its place.
    pub fn fill(&mut self, zeros: &[u8]) {
        self.push_bytes(zeros, 0);
    }

    /// Adds bytes to the hot tail with their index entry.
    pub(super) fn push_bytes(&mut self, payload: &[u8], records: u32) {
        debug_assert_eq!(self.hot.end(), self.tail);
        self.hot.push(payload);
        self.logged.tail += payload.len() as u64;
        self.logged.records += u64::from(records);
        self.hot.index.push(IndexEntry {
            end: self.logged.tail,
            records: self.logged.records,
            time_ms: self.logged.last_time_ms,
            crc: crc32c::crc32c(payload),
        });
    }

    /// Adds bytes that lie in a staged pack, with their index moved to where they stand now.
    fn push_section(&mut self, section: &Adopted, index: &[IndexEntry]) {
        debug_assert_eq!(self.hot.end(), self.tail);
        let (start, base_records, time_ms) = (self.tail, self.records, self.last_time_ms);
        self.hot.push_file(*section);
        self.hot.index.extend(index.iter().map(|entry| IndexEntry {
            end: start + entry.end,
            records: base_records + entry.records,
            time_ms,
            crc: entry.crc,
        }));
        self.logged.tail += section.len;
        self.logged.records += section.records;
    }

    fn begin_epoch(&mut self, epoch: u64) {
        if epoch > self.last_epoch() {
            let tail = self.tail;
            self.logged.later_epochs.push((epoch, tail));
        }
    }

    /// The last one that the log tells holds, also where it is an earlier time: the clock was wrong before.
    fn log_access(&mut self, time_ms: u64, renews: bool) {
        if let Some(expiry) = self.logged.expiry.as_mut().filter(|_| renews) {
            expiry.logged_access_ms = time_ms;
        }
    }

    fn remember_producer(&mut self, tag: &ProducerTag<'_>, change: &Change<'_>) {
        self.leave_producer(tag.id);
        let before = self.producer(tag.id);
        let state = ProducerState::after(before, tag, change.time_ms, change.epoch);
        self.logged.producers.all_mut().remember(tag.id, state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::StreamId;

    #[test]
    fn only_a_frame_with_bytes_has_a_place() {
        let mut state = StreamState::new(StreamId(1), Class::Ephemeral, 0);
        state.push_bytes(b"in memory alone", 1);
        let at_zero = |kind, payload| Frame {
            payload,
            ..Frame::control(kind, StreamId(1), 0)
        };
        let mut extra = Vec::new();
        let producer = ProducerTag {
            id: b"\0spark",
            epoch: 0,
            seq: 0,
        };
        AppendExtra {
            producer: Some(producer),
            stream_seq: None,
        }
        .encode(&mut extra);
        let tells = Frame {
            flags: crate::codec::FLAG_PRODUCER,
            extra: &extra,
            ..at_zero(FrameKind::Adopt, &[])
        };
        let closes = at_zero(FrameKind::Append, &[]);
        let appends = at_zero(FrameKind::Append, b"x");
        for (frame, fits) in [(tells, true), (closes, true), (appends, false)] {
            let change = Change::of(&frame, &[]).expect("it decodes");
            let checked = check_position(&state, &frame, &change);
            assert_eq!(checked.is_ok(), fits, "{frame:?}");
        }
    }
}
