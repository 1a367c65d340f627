//! The frames of a commit for one stream, and how they are applied.
//!
//! Invariant: applying does what a replay of the same frames would do, but for the bytes of an `ephemeral` stream, which
//! no frame has.

use crate::codec::adopt::{self, UsedUp};
use crate::codec::{AppendExtra, FLAG_PRODUCER, FRAME_HEADER_BYTES, Frame, FrameKind, ProducerTag};
use crate::model::{Adopted, Media};
use crate::shard::batch::OpenBatch;
use crate::shard::engine::Engine;
use crate::stream::change::{Append, Change, Section, What};

use super::{Locked, Share};

pub(super) struct StreamFrames {
    pub(super) rows: u64,
    pub(super) len: u64,
    kind: Kind,
    /// Stages that this commit uses up without adopting them; told with the first stream.
    used_up: Vec<u8>,
    position: u64,
    epoch: u64,
    time_ms: u64,
}

enum Kind {
    /// Bytes in the log, cut after each of these with so many records: one frame each.
    Copied(Vec<(usize, u32)>),
    /// Only the producer is in the log.
    Volatile,
    /// Where the bytes lie.
    Adopted(Vec<u8>),
}

impl StreamFrames {
    /// What the frames take in the log.
    pub(super) fn size(&self, extra_len: usize) -> usize {
        let payload = match &self.kind {
            Kind::Copied(_) => self.len as usize,
            Kind::Volatile => 0,
            Kind::Adopted(payload) => payload.len(),
        };
        self.count() as usize * FRAME_HEADER_BYTES + extra_len + payload + self.used_up.len()
    }

    /// How many frames there are.
    pub(super) fn count(&self) -> u64 {
        match &self.kind {
            Kind::Copied(cuts) => cuts.len() as u64 + u64::from(self.leads()),
            Kind::Volatile | Kind::Adopted(_) => 1,
        }
    }

    /// Whether a frame of its own goes before the copied bytes, with the producer.
    fn leads(&self) -> bool {
        matches!(self.kind, Kind::Copied(_)) && !self.used_up.is_empty()
    }

    fn change<'a>(&self, sequence: u64, what: What<'a>) -> Change<'a> {
        Change {
            sequence,
            time_ms: self.time_ms,
            epoch: self.epoch,
            renews: false,
            what,
        }
    }

    /// Says with this stream which stages are used up.
    pub(super) fn use_up(&mut self, stages: &[UsedUp]) {
        adopt::encode_used_up(stages, &mut self.used_up);
    }

    /// Stages the frames; returns the sequence of the first. `more`: frames of other streams follow in the group.
    pub(super) fn push(
        &self,
        open: &mut OpenBatch,
        entry: &Locked<'_>,
        extra: &[u8],
        more: bool,
    ) -> u64 {
        let first = Frame {
            flags: FLAG_PRODUCER,
            position: self.position,
            epoch: self.epoch,
            extra,
            ..Frame::control(FrameKind::Append, entry.stream.id, self.time_ms)
        };
        let adopts = Frame {
            kind: FrameKind::Adopt,
            ..first
        };
        match &self.kind {
            Kind::Volatile if self.used_up.is_empty() => open.push(first, more),
            Kind::Volatile => {
                let payload = &self.used_up;
                open.push(Frame { payload, ..adopts }, more)
            }
            Kind::Adopted(payload) => {
                let payload = &[&payload[..], &self.used_up].concat();
                open.push(Frame { payload, ..adopts }, more)
            }
            Kind::Copied(cuts) => {
                let bytes = entry.share.and_then(|share| share.bytes.as_deref());
                let (mut at, first_sequence) = (0, open.next_sequence);
                if self.leads() {
                    let payload = &self.used_up;
                    open.push(Frame { payload, ..adopts }, true);
                }
                for (number, (end, records)) in cuts.iter().enumerate() {
                    let plain = Frame {
                        flags: 0,
                        extra: &[],
                        ..first
                    };
                    let frame = Frame {
                        records: *records,
                        position: self.position + at as u64,
                        payload: bytes.and_then(|bytes| bytes.get(at..*end)).unwrap_or(&[]),
                        ..if number == 0 && !self.leads() {
                            first
                        } else {
                            plain
                        }
                    };
                    at = *end;
                    open.push(frame, more || number + 1 < cuts.len());
                }
                first_sequence
            }
        }
    }
}

impl Engine {
    pub(super) fn frames_of(&self, entry: &Locked<'_>, copies: bool, now_ms: u64) -> StreamFrames {
        let state = &entry.state;
        let share = entry.share;
        let json = entry.stream.content_type.media == Media::Json;
        let (kind, position) = match share {
            Some(_) if state.is_volatile() => (Kind::Volatile, state.cold_end()),
            Some(share) if copies => (Kind::Copied(cuts_of(share, json)), state.tail),
            share => {
                let sections: Vec<Adopted> = share.map_or(Vec::new(), sections_of);
                let mut payload = Vec::with_capacity(sections.len() * adopt::ADOPTED_BYTES);
                adopt::encode(&sections, &mut payload);
                (Kind::Adopted(payload), state.tail)
            }
        };
        StreamFrames {
            rows: share.map_or(0, |share| share.rows),
            len: share.map_or(0, |share| share.len),
            kind,
            used_up: Vec::new(),
            position,
            epoch: self.losses.tail_epoch(state),
            time_ms: now_ms.max(state.last_time_ms),
        }
    }

    pub(super) fn apply_share(
        &self,
        entry: &mut Locked<'_>,
        frames: &StreamFrames,
        first_sequence: u64,
        tag: &ProducerTag<'_>,
    ) {
        let Some(share) = entry.share else { return };
        let bytes = share.bytes.as_deref().unwrap_or(&[]);
        match &frames.kind {
            Kind::Adopted(_) => {
                // Before the lock goes: whoever tidies packs must find it kept.
                self.cold.adopt(&sections_of(share));
                entry.adopt(frames, first_sequence, *tag, &share.sections);
            }
            Kind::Copied(cuts) => {
                let (mut at, leads) = (0, frames.leads());
                if leads {
                    entry.adopt(frames, first_sequence, *tag, &[]);
                }
                for (number, (end, records)) in cuts.iter().enumerate() {
                    let sequence = first_sequence + u64::from(leads) + number as u64;
                    let payload = bytes.get(at..*end).unwrap_or(&[]);
                    let producer = (number == 0 && !leads).then_some(*tag);
                    entry.append(frames, sequence, payload, *records, producer);
                    at = *end;
                }
            }
            Kind::Volatile => {
                let mut at = 0;
                for (number, (end, records)) in index_cuts(share).enumerate() {
                    let payload = bytes.get(at..end).unwrap_or(&[]);
                    let producer = (number == 0).then_some(*tag);
                    entry.append(frames, first_sequence, payload, records, producer);
                    at = end;
                }
            }
        }
        if !entry.state.class.waits_for_sync() {
            let newest = first_sequence + frames.count() - 1;
            entry.state.hold_until_synced(newest);
        }
        entry.state.count_memory(&self.metrics);
        self.renew(entry.stream, &mut entry.state);
    }
}

impl Locked<'_> {
    fn append(
        &mut self,
        frames: &StreamFrames,
        sequence: u64,
        payload: &[u8],
        records: u32,
        producer: Option<ProducerTag<'_>>,
    ) {
        let append = Append {
            payload,
            records,
            close: false,
            extra: AppendExtra {
                producer,
                stream_seq: None,
            },
        };
        self.state
            .apply(&frames.change(sequence, What::Append(append)));
    }

    fn adopt(
        &mut self,
        frames: &StreamFrames,
        sequence: u64,
        producer: ProducerTag<'_>,
        sections: &[Section],
    ) {
        let what = What::Adopt { producer, sections };
        self.state.apply(&frames.change(sequence, what));
    }
}

fn sections_of(share: &Share) -> Vec<Adopted> {
    share.sections.iter().map(|(section, _)| *section).collect()
}

/// Where the bytes of a copied share are cut: JSON nowhere, other streams behind each record.
fn cuts_of(share: &Share, json: bool) -> Vec<(usize, u32)> {
    if json {
        return vec![(share.len as usize, share.rows as u32)];
    }
    index_cuts(share).collect()
}

/// The ends of all appends of a share, over its sections, each with its number of records.
fn index_cuts(share: &Share) -> impl Iterator<Item = (usize, u32)> {
    let mut base = 0;
    share.sections.iter().flat_map(move |(section, index)| {
        let start = base;
        base += section.len;
        let mut records = 0;
        index.iter().map(move |entry| {
            let count = entry.records - records;
            records = entry.records;
            ((start + entry.end) as usize, count as u32)
        })
    })
}
