//! Create and fork: a stream comes to be in one frame with its first content.
//!
//! The new stream is in the directory before its frame is staged, but locked: whoever finds it waits until it
//! is staged, and replies about it wait for its commit number.

use std::sync::Arc;

use crate::codec::{Frame, FrameKind};
use crate::error::ErrorCode;
use crate::limits::{CONTENT_TYPE_MAX_BYTES, PURGES_PER_REQUEST_MAX};
use crate::model::{ContentType, Gate, Media, Offset, Stage};
use crate::refusal::Refusal;
use crate::shard::engine::{Engine, Undone};
use crate::stream::change::{Change, What};
use crate::stream::handle::Stream;
use crate::stream::json;
use crate::stream::lifecycle::{
    CreateRequest, ForkRequest, Leaves, initial_state, same_configuration,
};
use crate::stream::line::Line;
use crate::stream::offsets::{self, Gap, GapReason};
use crate::stream::snapshot;
use crate::stream::state::{Life, StreamState, Visible};

pub struct Created {
    pub stream: Arc<Stream>,
    /// `false`: it was there already, with the same configuration.
    pub new: bool,
    pub offset: Offset,
    pub closed: bool,
    pub gate: Gate,
}

/// Where a fork leaves its source, worked out before any lock is taken for good.
struct ForkPoint {
    source: Arc<Stream>,
    anchor: u64,
    records: u64,
    line: Line,
    prefix: Vec<u8>,
    prefix_records: u32,
}

impl Engine {
    pub fn create(
        &self,
        path: &str,
        request: &CreateRequest<'_>,
        body: &[u8],
        now_ms: u64,
    ) -> Result<Created, Undone> {
        let found = self.directory.get(path)?;
        if let Some(stream) = &found {
            let mut state = stream.lock();
            if self.has_expired(&state, now_ms) {
                self.expire(stream, &mut state, now_ms)?;
            }
            match state.life {
                Life::Live => return self.answer_existing(stream, &state, request),
                Life::SoftDeleted if state.fork_count == 0 => {
                    drop(state);
                    self.purge_unneeded(stream.id, now_ms, PURGES_PER_REQUEST_MAX);
                    return Err(Undone::Wait);
                }
                Life::SoftDeleted => {
                    let gate = self.reveal_gate(&state);
                    let refusal = Refusal::with(
                        ErrorCode::StreamConflict,
                        "The path belongs to a deleted stream that forks still use.",
                    );
                    return Err(Undone::Refused { refusal, gate });
                }
                Life::Gone => {}
            }
        }
        let fork = request
            .fork
            .as_ref()
            .map(|fork| self.fork_point(fork, request, now_ms))
            .transpose()?;
        let content_type = self.content_type_for(request, fork.as_ref())?;
        let content = self.first_content(&content_type, body, fork.as_ref())?;
        self.stage_create(
            path,
            request,
            found.as_ref(),
            fork,
            content_type,
            content,
            now_ms,
        )
    }

    fn answer_existing(
        &self,
        stream: &Arc<Stream>,
        state: &StreamState,
        request: &CreateRequest<'_>,
    ) -> Result<Created, Undone> {
        let gate = self.reveal_gate(state);
        if !same_configuration(state, &stream.content_type, request) {
            return Err(Undone::Refused {
                refusal: ErrorCode::StreamConflict.into(),
                gate,
            });
        }
        let offset = if gate.is_open() {
            self.visible_tail(state)
        } else {
            self.applied_tail(state)
        };
        Ok(Created {
            stream: Arc::clone(stream),
            new: false,
            offset,
            closed: state.closed,
            gate,
        })
    }

    fn content_type_for(
        &self,
        request: &CreateRequest<'_>,
        fork: Option<&ForkPoint>,
    ) -> Result<Arc<ContentType>, Undone> {
        if request
            .content_type
            .is_some_and(|text| text.len() > CONTENT_TYPE_MAX_BYTES)
        {
            return Err(Undone::refused(Refusal::with(
                ErrorCode::BadRequest,
                "Content-Type is longer than 256 bytes.",
            )));
        }
        Ok(match (request.content_type, fork) {
            (_, Some(fork)) => Arc::clone(&fork.source.content_type),
            (Some(text), None) => self.directory.intern(text),
            (None, None) => self.directory.intern(ContentType::DEFAULT),
        })
    }

    /// The create's first bytes in stored form: what a sub-offset takes along, then the body.
    fn first_content(
        &self,
        content_type: &ContentType,
        body: &[u8],
        fork: Option<&ForkPoint>,
    ) -> Result<(Vec<u8>, u32), Undone> {
        let (mut wire, mut records) = fork.map_or((Vec::new(), 0), |fork| {
            (fork.prefix.clone(), fork.prefix_records)
        });
        if body.is_empty() {
            return Ok((wire, records));
        }
        if content_type.media == Media::Json {
            records += json::flatten_into(body, &mut wire)
                .map_err(|error| Undone::refused(json_refusal(&error)))?;
        } else {
            wire.extend_from_slice(body);
            records += 1;
        }
        if wire.len() > self.config.append_max_bytes + 1 {
            return Err(Undone::refused(ErrorCode::PayloadTooLarge));
        }
        Ok((wire, records))
    }

    fn fork_point(
        &self,
        fork: &ForkRequest<'_>,
        request: &CreateRequest<'_>,
        now_ms: u64,
    ) -> Result<ForkPoint, Undone> {
        let missing = || Undone::refused(ErrorCode::ForkSourceMissing);
        let source = self.directory.get(fork.source_path)?.ok_or_else(missing)?;
        let (anchor, time_ms) = {
            let mut state = source.lock();
            if self.has_expired(&state, now_ms) {
                self.expire(&source, &mut state, now_ms)?;
            }
            let gate = self.reveal_gate(&state);
            match state.life {
                Life::Live if state.control_sequence > self.shard.synced() => {
                    return Err(Undone::Wait);
                }
                Life::Live => {}
                Life::SoftDeleted => {
                    return Err(Undone::Refused {
                        refusal: ErrorCode::ForkSourceGone.into(),
                        gate,
                    });
                }
                Life::Gone => {
                    return Err(Undone::Refused {
                        refusal: ErrorCode::ForkSourceMissing.into(),
                        gate,
                    });
                }
            }
            if request
                .content_type
                .is_some_and(|text| !source.content_type.matches(text.as_bytes()))
            {
                return Err(Undone::refused(ErrorCode::ContentTypeMismatch));
            }
            let anchor = match fork.offset {
                // The tail moves on while its bytes are made to last: what the request could know is enough.
                None if state.is_volatile() && kept_since(&state, request, now_ms) => {
                    state.cold_end()
                }
                None => state.visible.tail,
                Some(offset) => self.fork_anchor(&state, offset)?,
            };
            if state.is_volatile() && anchor > state.cold_end() {
                // The fork will need these bytes for longer than the process lives.
                self.keep_volatile(&source, &mut state);
                return Err(Undone::Wait);
            }
            // Times go on from the source's, whatever the clock has done since (`I-LINE-2`).
            (anchor, now_ms.max(state.last_time_ms))
        };
        let invalid = || {
            Undone::refused(Refusal::with(
                ErrorCode::ForkOffsetInvalid,
                "No append of the source ends at this offset.",
            ))
        };
        if !self
            .is_boundary(&source, anchor)
            .map_err(|error| Undone::refused(self.read_failed(&source, error)))?
        {
            return Err(invalid());
        }
        let records = self
            .records_at(&source, anchor)
            .map_err(|error| Undone::refused(self.read_failed(&source, error)))?;
        let line = self
            .line_below(&source, anchor, time_ms)
            .map_err(|error| Undone::refused(self.read_failed(&source, error)))?;
        let (prefix, prefix_records) = match fork.sub_offset {
            0 => (Vec::new(), 0),
            _ if matches!(self.prefix_is_at_hand(&source, anchor), Ok(false)) => {
                return Err(Undone::Wait);
            }
            count => self
                .sub_offset_prefix(&source, anchor, count)
                .map_err(Undone::refused)?,
        };
        Ok(ForkPoint {
            source,
            anchor,
            records,
            line,
            prefix,
            prefix_records,
        })
    }

    fn fork_anchor(&self, state: &StreamState, offset: Offset) -> Result<u64, Undone> {
        let refuse =
            |detail: String| Undone::refused(Refusal::with(ErrorCode::ForkOffsetInvalid, detail));
        let start = offsets::resolve(state, &self.losses, offset)
            .map_err(|refusal| refuse(refusal.sentence().to_owned()))?;
        // With a restore another life of the path may be lost, which had other bytes before this offset.
        let foreign = |gap: &Gap| {
            let restored = gap.reason == GapReason::Restore;
            restored && !offsets::has_epoch(state, &self.losses, offset.epoch)
        };
        if start.gap.is_some_and(|gap| gap.certain || foreign(&gap)) {
            return Err(refuse(format!(
                "Offset {offset} is in a gap of the source."
            )));
        }
        Ok(start.position)
    }

    #[allow(clippy::too_many_arguments)]
    fn stage_create(
        &self,
        path: &str,
        request: &CreateRequest<'_>,
        replaced: Option<&Arc<Stream>>,
        fork: Option<ForkPoint>,
        content_type: Arc<ContentType>,
        (wire, records): (Vec<u8>, u32),
        now_ms: u64,
    ) -> Result<Created, Undone> {
        // The source is locked first: it is older, and locks go by stream id.
        let mut source_state = fork.as_ref().map(|fork| fork.source.lock());
        if source_state
            .as_ref()
            .is_some_and(|state| state.life != Life::Live)
        {
            return Err(Undone::Wait);
        }
        let id = self.take_epoch(now_ms)?;
        let leaves = fork.as_ref().zip(source_state.as_deref());
        let leaves = leaves.map(|(point, source)| Leaves {
            source,
            anchor: point.anchor,
            records: point.records,
            line: point.line,
        });
        let class = request.class.unwrap_or(self.config.durability);
        let mut initial = initial_state(id, class, request, leaves.as_ref(), &self.losses, now_ms);
        initial.note_access(self.steady_ms());
        if !wire.is_empty() {
            // A create is synced in every class that has a log, so it waits in each.
            self.check_room(&initial, !initial.is_volatile())?;
        }
        let mut config = Vec::with_capacity(160 + path.len());
        snapshot::encode(path, &content_type, &initial, &mut config);
        if config.len() > u16::MAX as usize {
            return Err(Undone::refused(Refusal::with(
                ErrorCode::Internal,
                "The source has too many epochs to be forked.",
            )));
        }
        let stream = Arc::new(Stream::new(id, path, content_type, initial));
        let mut state = stream.lock();
        if !self.directory.insert_if_current(&stream, replaced) {
            // Somebody else was faster: look again.
            return Err(Undone::Wait);
        }
        let position = state.start;
        let volatile = state.is_volatile();
        let frame = Frame {
            records: if volatile { 0 } else { records },
            position,
            epoch: state.last_epoch(),
            extra: &config,
            payload: if volatile { &[] } else { &wire },
            ..Frame::control(FrameKind::Create, id, now_ms)
        };
        self.directory.mark_dirty(&stream, &mut state.dirty);
        if let (Some(point), Some(source)) = (&fork, &mut source_state) {
            self.directory.mark_dirty(&point.source, &mut source.dirty);
        }
        let visible = Visible {
            tail: state.tail + wire.len() as u64,
            records: state.records + u64::from(records),
            closed: state.closed,
        };
        let staged = self.push_create(&stream, &mut state, frame, visible, fork.as_ref());
        let (sequence, fork_added) = match staged {
            Ok(sequences) => sequences,
            Err(reason) => {
                // Nothing was staged: the stream never was.
                state.withdraw();
                self.directory.withdraw(&stream, replaced);
                drop(state);
                return Err(reason.into());
            }
        };
        if let (Some(source), Some(sequence)) = (&mut source_state, fork_added) {
            source.apply(&Change::plain(sequence, now_ms, What::ForkAdded));
        }
        let what = What::Create {
            payload: &wire,
            records,
        };
        state.apply(&Change::plain(sequence, now_ms, what));
        self.metrics.creates.add(1);
        state.count_memory(&self.metrics);
        let (offset, closed) = (self.applied_tail(&state), state.closed);
        drop(state);
        Ok(Created {
            stream,
            new: true,
            offset,
            closed,
            gate: Gate::synced(sequence),
        })
    }

    fn push_create(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        frame: Frame<'_>,
        visible: Visible,
        fork: Option<&ForkPoint>,
    ) -> Result<(u64, Option<u64>), crate::shard::batch::NotStaged> {
        let mut open = self.shard.open()?;
        open.admit(frame.encoded_len() + 64, false)?;
        open.touch(stream, state, visible, Stage::Synced);
        let added = fork.map(|point| {
            open.push(
                Frame::control(FrameKind::ForkAdded, point.source.id, frame.time_ms),
                true,
            )
        });
        let sequence = open.push(frame, false);
        open.wants(sequence, Stage::Synced);
        Ok((sequence, added))
    }
}

/// Whether everything that an `ephemeral` source had when the request came has been kept since.
fn kept_since(source: &StreamState, request: &CreateRequest<'_>, now_ms: u64) -> bool {
    let received_ms = match request.received_ms {
        0 => now_ms,
        earlier => earlier,
    };
    source.kept_ms > received_ms
}

pub fn json_refusal(error: &json::JsonError) -> Refusal {
    Refusal::with(
        ErrorCode::JsonInvalid,
        format!("{} at byte {}.", error.reason, error.position),
    )
}
