//! Append and close: decide, stage, apply. The middle of the append walk.

use std::sync::Arc;

use crate::codec::{AppendExtra, FLAG_CLOSE, Frame, FrameKind, ProducerTag};
use crate::error::ErrorCode;
use crate::io::sabotage::{self, Sabotage};
use crate::limits::{
    HOT_BYTES_FACTOR, HOT_BYTES_MIN, PRODUCER_BYTES_MIN, PRODUCER_BYTES_PER_CACHED_STREAM,
};
use crate::model::{Class, Gate, Offset, Stage};
use crate::refusal::Refusal;
use crate::shard::batch::{NotStaged, OpenBatch};
use crate::shard::engine::{Engine, Undone};
use crate::stream::append::{AppendDecision, AppendRequest, decide};
use crate::stream::change::{Append, Change, What};
use crate::stream::handle::Stream;
use crate::stream::state::{Life, StreamState, Visible};

/// What became of an append.
pub struct Appended {
    /// The tail behind it.
    pub offset: Offset,
    pub closed: bool,
    /// The producer's epoch and highest accepted sequence, if it sent a tuple.
    pub producer: Option<(u64, u64)>,
    pub duplicate: bool,
    pub class: Class,
    /// What to wait for before this may be told.
    pub gate: Gate,
}

/// Staging buffers that live as long as their reactor.
#[derive(Default)]
pub struct WriteScratch {
    extra: Vec<u8>,
}

impl Engine {
    /// Appends `wire` (already in stored form) with `records` messages, or closes, or both.
    pub fn append(
        &self,
        stream: &Arc<Stream>,
        request: &AppendRequest<'_>,
        wire: &[u8],
        records: Result<u32, Refusal>,
        now_ms: u64,
        scratch: &mut WriteScratch,
    ) -> Result<Appended, Undone> {
        let mut state = stream.lock();
        let record_count = records.as_ref().copied().unwrap_or(0);
        if let Some(known) = self.decided(stream, &mut state, request, records, now_ms)? {
            return Ok(known);
        }
        let epoch = self.losses.tail_epoch(&state);
        self.stage_append(
            stream,
            &mut state,
            request,
            wire,
            record_count,
            epoch,
            now_ms,
            scratch,
        )
    }

    /// What can be told of an append before its body of about `bytes` is looked through: that it is a repetition, refused, or
    /// has to wait. `None`: the body decides.
    pub fn known_of_append(
        &self,
        stream: &Arc<Stream>,
        request: &AppendRequest<'_>,
        bytes: usize,
        now_ms: u64,
    ) -> Result<Option<Appended>, Undone> {
        let mut state = stream.lock();
        let known = self.decided(stream, &mut state, request, Ok(1), now_ms)?;
        if known.is_some() {
            return Ok(known);
        }
        if state.changing {
            return Err(Undone::Wait);
        }
        self.check_room(&state, request.close)?;
        if !state.is_volatile() {
            let weak = !state.class.waits_for_sync();
            admit(&*self.shard.open()?, bytes, weak, request.close)?;
        }
        Ok(None)
    }

    /// The decision about an append where that is not to take it.
    fn decided(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        request: &AppendRequest<'_>,
        records: Result<u32, Refusal>,
        now_ms: u64,
    ) -> Result<Option<Appended>, Undone> {
        self.check_life(stream, state, now_ms)?;
        let tail = self.applied_tail(state);
        match decide(state, &stream.content_type, request, records, tail) {
            AppendDecision::Accept => Ok(None),
            AppendDecision::Duplicate { epoch, last_seq } => {
                self.metrics.append_duplicates.add(1);
                self.renew(stream, state);
                Ok(Some(self.nothing_new(state, tail, Some((epoch, last_seq)))))
            }
            AppendDecision::AlreadyClosed => Ok(Some(self.nothing_new(state, tail, None))),
            AppendDecision::Refuse(refusal) => Err(Undone::Refused {
                refusal,
                gate: self.reveal_gate(state),
            }),
        }
    }

    fn nothing_new(
        &self,
        state: &StreamState,
        offset: Offset,
        producer: Option<(u64, u64)>,
    ) -> Appended {
        Appended {
            offset,
            closed: state.closed,
            producer,
            duplicate: true,
            class: state.class,
            gate: self.reveal_gate(state),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn stage_append(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        request: &AppendRequest<'_>,
        wire: &[u8],
        records: u32,
        epoch: u64,
        now_ms: u64,
        scratch: &mut WriteScratch,
    ) -> Result<Appended, Undone> {
        if state.changing {
            return Err(Undone::Wait);
        }
        self.check_room(state, request.close)?;
        if let Some(tag) = request.producer.filter(|_| !request.close) {
            self.check_producer_room(state, &tag)?;
        }
        let extra = AppendExtra {
            producer: request.producer,
            stream_seq: request.stream_seq,
        };
        let append = Append {
            payload: wire,
            records,
            close: request.close,
            extra,
        };
        let change = Change {
            sequence: 0,
            time_ms: now_ms.max(state.last_time_ms),
            epoch,
            renews: false,
            what: What::Append(append),
        };
        let gate = if state.is_volatile() && !request.close {
            self.apply_volatile(stream, state, change)?
        } else {
            self.stage_frame(stream, state, change, &append, &mut scratch.extra)?
        };
        self.renew(stream, state);
        self.metrics.appends.add(1);
        self.metrics.append_bytes.add(wire.len() as u64);
        Ok(Appended {
            offset: self.applied_tail(state),
            closed: state.closed,
            producer: request.producer.map(|tag| (tag.epoch, tag.seq)),
            duplicate: false,
            class: state.class,
            gate,
        })
    }

    /// Stages the append's frame and applies it. An `ephemeral` stream gets here only to be closed: its frame
    /// has no bytes, which stay in memory alone, and does not say who sent them.
    fn stage_frame(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        mut change: Change<'_>,
        append: &Append<'_>,
        extra: &mut Vec<u8>,
    ) -> Result<Gate, Undone> {
        let volatile = state.is_volatile();
        let (position, payload, records): (u64, &[u8], u32) = if volatile {
            (state.cold_end(), &[], 0)
        } else {
            (state.tail, append.payload, append.records)
        };
        let mut told = append.extra;
        if volatile && !append.payload.is_empty() {
            told.producer = None;
        }
        extra.clear();
        told.encode(extra);
        let frame = Frame {
            flags: told.flags() | if append.close { FLAG_CLOSE } else { 0 },
            records,
            position,
            epoch: change.epoch,
            extra,
            payload,
            ..Frame::control(FrameKind::Append, stream.id, change.time_ms)
        };
        let visible = Visible {
            tail: state.tail + append.payload.len() as u64,
            records: state.records + u64::from(append.records),
            closed: state.closed || append.close,
        };
        let stage = if append.close {
            Stage::Synced
        } else {
            self.append_stage(state)
        };
        let weak = !state.class.waits_for_sync();
        self.directory.mark_dirty(stream, &mut state.dirty);
        let sequence = {
            let mut open = self.shard.open()?;
            admit(&open, frame.encoded_len(), weak, append.close)?;
            open.touch(stream, state, visible, stage);
            let sequence = open.push(frame, false);
            open.wants(sequence, stage);
            sequence
        };
        if weak {
            self.shard.saw_weak();
        }
        change.sequence = sequence;
        state.apply(&change);
        if stage == Stage::Synced {
            state.held_sequence = sequence;
        }
        if stage == Stage::Applied || sabotage::is(Sabotage::ShowEarly) {
            state.publish_applied();
            state.changed = self.shard.changes.stamp();
        }
        state.count_memory(&self.metrics);
        // Nothing to wait for: a `memory` append is done.
        Ok(match stage {
            Stage::Applied => Gate::OPEN,
            stage => Gate { sequence, stage },
        })
    }

    /// An append that ends with the process: no frame, nothing to wait for once the stream itself is final.
    fn apply_volatile(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        mut change: Change<'_>,
    ) -> Result<Gate, Undone> {
        if self.append_stage(state) == Stage::Synced {
            return Err(Undone::Wait);
        }
        if self.shard.failed() {
            return Err(NotStaged::Failed.into());
        }
        change.sequence = state.applied_sequence;
        state.apply(&change);
        state.publish_applied();
        state.changed = self.shard.changes.stamp();
        state.count_memory(&self.metrics);
        self.shard.saw_weak();
        self.shard.wake_readers(stream);
        Ok(Gate::OPEN)
    }

    /// Memory has a bound: strong appends wait for the checkpoint that makes room, weak ones are refused, unless they are
    /// synced (`lasting`: a close, a create) and wait anyway.
    pub(super) fn check_room(&self, state: &StreamState, lasting: bool) -> Result<(), Undone> {
        if state.is_volatile() {
            return if lasting {
                Ok(())
            } else {
                self.check_volatile_room(state)
            };
        }
        if !self.hot_bytes_exhausted() || self.shard.failed() {
            return Ok(());
        }
        self.maintenance.request_checkpoint();
        Err(if state.class.waits_for_sync() || lasting {
            Undone::Wait
        } else {
            weak_refused()
        })
    }

    /// What streams remember of producers has a bound over all of them. Streams that are not used leave memory to keep it;
    /// where that is not enough, nobody new is remembered.
    pub(super) fn check_producer_room(
        &self,
        state: &StreamState,
        tag: &ProducerTag<'_>,
    ) -> Result<(), Undone> {
        if !self.producers_exhausted() || state.producer(tag.id).is_some() {
            return Ok(());
        }
        // Those that a checkpoint has written may leave.
        if self.metrics.dirty_producer_bytes.get() > self.producer_bytes_max() / 8 {
            self.maintenance.request_checkpoint();
        }
        Err(Undone::refused(Refusal::with(
            ErrorCode::ServerBusy,
            "Streams in memory remember too many producers for a new one; streams_cached_max bounds them.",
        )))
    }

    pub(super) fn producers_exhausted(&self) -> bool {
        self.metrics.producer_bytes.get() > self.producer_bytes_max()
    }

    /// Does at once what is done now and then otherwise: one look after another may load more than there is room for.
    pub(super) fn make_producer_room(&self) {
        if self.producers_exhausted() {
            self.directory.evict(self.config.streams_cached_max);
        }
    }

    /// Twice what eviction leaves.
    fn producer_bytes_max(&self) -> u64 {
        let streams = self.config.streams_cached_max as u64;
        let bytes = streams.saturating_mul(2 * PRODUCER_BYTES_PER_CACHED_STREAM);
        bytes.max(PRODUCER_BYTES_MIN)
    }

    /// Room in memory for a commit, which waits in every class that has a log.
    pub fn check_commit_room(&self, state: &StreamState) -> Result<(), Undone> {
        if state.is_volatile() {
            return self.check_room(state, false);
        }
        if self.hot_bytes_exhausted() && !self.shard.failed() {
            self.maintenance.request_checkpoint();
            return Err(Undone::Wait);
        }
        Ok(())
    }

    /// Room for the index of what a commit takes over. It waits for the checkpoint that makes room, until nothing is left
    /// that a checkpoint is worth while for; more than all room it is never given.
    pub(super) fn check_index_room(&self, bytes: u64) -> Result<(), Undone> {
        let (hot_bytes, bound) = (self.metrics.hot_bytes.get(), self.hot_bytes_max());
        if bytes > bound {
            return Err(Undone::refused(Refusal::with(
                ErrorCode::PayloadTooLarge,
                format!(
                    "The index of the commit's records would take {bytes} bytes of memory, more than the {bound} that \
                     checkpoint_bytes allows; commit fewer records at once."
                ),
            )));
        }
        let little = hot_bytes <= self.config.checkpoint_bytes;
        if little || hot_bytes.saturating_add(bytes) <= bound || self.shard.failed() {
            return Ok(());
        }
        self.maintenance.request_checkpoint();
        Err(Undone::Wait)
    }

    /// A stream that is not live refuses everything; one that has expired is deleted first.
    pub fn check_life(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        now_ms: u64,
    ) -> Result<(), Undone> {
        if self.has_expired(state, now_ms) {
            self.expire(stream, state, now_ms)?;
        }
        let code = match state.life {
            Life::Live => return Ok(()),
            // Nobody needs it: its purge is only a step away.
            Life::SoftDeleted if state.fork_count == 0 => ErrorCode::StreamNotFound,
            Life::SoftDeleted => ErrorCode::StreamGone,
            Life::Gone => ErrorCode::StreamNotFound,
        };
        Err(Undone::Refused {
            refusal: code.into(),
            gate: self.control_gate(state),
        })
    }

    fn hot_bytes_exhausted(&self) -> bool {
        self.metrics.hot_bytes.get() > self.hot_bytes_max()
    }

    fn hot_bytes_max(&self) -> u64 {
        let factor = self
            .config
            .checkpoint_bytes
            .saturating_mul(HOT_BYTES_FACTOR);
        factor.max(HOT_BYTES_MIN)
    }
}

fn admit(open: &OpenBatch, bytes: usize, weak: bool, close: bool) -> Result<(), Undone> {
    match open.admit(bytes, close) {
        Err(NotStaged::Wait) if weak && !close => Err(weak_refused()),
        admitted => Ok(admitted?),
    }
}

/// A weak append does not wait for room: whoever sends it prefers to know.
fn weak_refused() -> Undone {
    Undone::refused(Refusal::with(
        ErrorCode::ServerBusy,
        "The log cannot keep up, and an append of this class does not wait for it.",
    ))
}
