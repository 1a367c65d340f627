//! Append and close: decide, stage, apply. The middle of the append walk.

use std::sync::Arc;

use crate::codec::{AppendExtra, FLAG_CLOSE, Frame, FrameKind};
use crate::error::ErrorCode;
use crate::model::Offset;
use crate::refusal::Refusal;
use crate::shard::engine::{Engine, Undone};
use crate::stream::append::{AppendDecision, AppendRequest, decide};
use crate::stream::handle::Stream;
use crate::stream::state::{AppliedAppend, Life, StreamState, Visible};

/// What became of an append.
pub struct Appended {
    /// The tail behind it.
    pub offset: Offset,
    pub closed: bool,
    /// The producer's epoch and highest accepted sequence, if it sent a tuple.
    pub producer: Option<(u64, u64)>,
    pub duplicate: bool,
    /// Commit number to wait for before this may be told; 0 = none.
    pub gate: u64,
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
        self.check_life(stream, &mut state, now_ms)?;
        let tail = self.applied_tail(&state);
        let record_count = records.as_ref().copied().unwrap_or(0);
        match decide(&state, &stream.content_type, request, records, tail) {
            AppendDecision::Accept => {}
            AppendDecision::Duplicate { epoch, last_seq } => {
                self.metrics.append_duplicates.add(1);
                self.renew_for_read(stream, &mut state, now_ms);
                return Ok(self.nothing_new(&state, tail, Some((epoch, last_seq))));
            }
            AppendDecision::AlreadyClosed => return Ok(self.nothing_new(&state, tail, None)),
            AppendDecision::Refuse(refusal) => {
                return Err(Undone::Refused {
                    refusal,
                    gate: self.reveal_gate(&state),
                });
            }
        }
        self.stage_append(
            stream,
            &mut state,
            request,
            wire,
            record_count,
            tail.epoch,
            now_ms,
            scratch,
        )
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
        if self.hot_bytes_exhausted() && !self.shard.failed() {
            self.maintenance.request_checkpoint();
            return Err(Undone::Wait);
        }
        let extra = AppendExtra {
            producer: request.producer,
            stream_seq: request.stream_seq,
        };
        scratch.extra.clear();
        extra.encode(&mut scratch.extra);
        let time_ms = now_ms.max(state.last_time_ms);
        let frame = Frame {
            flags: extra.flags() | if request.close { FLAG_CLOSE } else { 0 },
            records,
            position: state.tail,
            epoch,
            extra: &scratch.extra,
            payload: wire,
            ..Frame::control(FrameKind::Append, stream.id, time_ms)
        };
        let visible = Visible {
            tail: state.tail + wire.len() as u64,
            records: state.records + u64::from(records),
            closed: state.closed || request.close,
        };
        let waits = state.class.waits_for_sync() || request.close;
        self.directory.mark_dirty(stream, &mut state.dirty);
        let sequence = {
            let mut open = self.shard.open()?;
            open.admit(frame.encoded_len(), request.close)?;
            open.needs_sync |= waits;
            open.all_wait_for_sync &= waits;
            open.touch(stream, state, visible);
            open.push(frame, false)
        };
        state.apply_append(&AppliedAppend {
            sequence,
            position: state.tail,
            time_ms,
            epoch,
            records,
            close: request.close,
            extra,
            payload: wire,
        });
        if !waits {
            state.publish_applied();
        }
        self.metrics.appends.add(1);
        self.metrics.append_bytes.add(wire.len() as u64);
        self.metrics.hot_bytes.add(wire.len() as u64);
        Ok(Appended {
            offset: self.applied_tail(state),
            closed: state.closed,
            producer: request.producer.map(|tag| (tag.epoch, tag.seq)),
            duplicate: false,
            // An append to a stream whose creation may still be lost waits for that, in every class.
            gate: if waits {
                sequence
            } else {
                self.reveal_gate(state)
            },
        })
    }

    /// A stream that is not live refuses everything; one that has expired is deleted first.
    pub fn check_life(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        now_ms: u64,
    ) -> Result<(), Undone> {
        if state.expired(now_ms) {
            self.expire(stream, state, now_ms)?;
        }
        let code = match state.life {
            Life::Live => return Ok(()),
            // Nobody needs it: its purge is only a step away.
            Life::SoftDeleted if state.fork_count == 0 => ErrorCode::StreamNotFound,
            Life::SoftDeleted => ErrorCode::StreamGone,
            Life::Gone => ErrorCode::StreamNotFound,
        };
        let gate = if state.control_sequence > self.shard.synced() {
            state.control_sequence
        } else {
            0
        };
        Err(Undone::Refused {
            refusal: code.into(),
            gate,
        })
    }

    fn hot_bytes_exhausted(&self) -> bool {
        self.metrics.hot_bytes.get()
            > self.config.checkpoint_bytes * crate::limits::HOT_BYTES_FACTOR
    }
}
