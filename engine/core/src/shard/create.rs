//! Create and fork: a stream comes to be in one frame with its first content.
//!
//! The new stream is in the directory before its frame is staged, but locked: whoever finds it waits until it
//! is staged, and replies about it wait for its commit number.

use std::sync::Arc;

use crate::codec::{Frame, FrameKind};
use crate::error::ErrorCode;
use crate::limits::{CONTENT_TYPE_MAX_BYTES, COSTLY_BODY_BYTES, PURGES_PER_REQUEST_MAX};
use crate::model::{Class, ContentType, Gate, Media, Offset, Stage, StreamId};
use crate::refusal::Refusal;
use crate::shard::engine::{Engine, Undone};
use crate::stream::change::{Append, Change, What};
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
    /// Final with the rest, behind the gate.
    pub class: Class,
    pub gate: Gate,
}

/// What was at the path, and which version of the catalog said so.
struct Found {
    stream: Option<Arc<Stream>>,
    version: u64,
}

/// Where a fork leaves its source, worked out before any lock is taken for good.
struct ForkPoint {
    source: Arc<Stream>,
    anchor: u64,
    records: u64,
    line: Line,
    prefix: Content,
}

/// One append's bytes in stored form, with its number of records.
#[derive(Default)]
struct Content {
    wire: Vec<u8>,
    records: u32,
}

/// What a create begins with: an append each, of which either may be empty.
struct FirstContent {
    /// What a sub-offset takes along.
    prefix: Content,
    body: Content,
}

impl FirstContent {
    /// The append that goes with the create itself, and the one behind it.
    fn split(&self) -> (&Content, Option<&Content>) {
        match (self.prefix.wire.is_empty(), self.body.wire.is_empty()) {
            (true, _) => (&self.body, None),
            (false, true) => (&self.prefix, None),
            (false, false) => (&self.prefix, Some(&self.body)),
        }
    }

    fn len(&self) -> usize {
        self.prefix.wire.len() + self.body.wire.len()
    }

    fn records(&self) -> u64 {
        u64::from(self.prefix.records) + u64::from(self.body.records)
    }
}

impl Found {
    fn id(&self) -> Option<StreamId> {
        self.stream.as_ref().map(|stream| stream.id)
    }
}

impl Engine {
    pub fn create(
        &self,
        path: &str,
        request: &CreateRequest<'_>,
        body: &[u8],
        now_ms: u64,
    ) -> Result<Created, Undone> {
        let mut found = self.look_up(path)?;
        if let Some(stream) = &found.stream {
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
        let mut fork = request
            .fork
            .as_ref()
            .map(|fork| self.fork_point(fork, request, now_ms))
            .transpose()?;
        let content_type = self.content_type_for(request, fork.as_ref())?;
        let prefix = fork.as_mut().map(|fork| std::mem::take(&mut fork.prefix));
        let content = self.first_content(&content_type, body, prefix)?;
        if found.version != self.directory.catalog().version() {
            // All that took its time: somebody may have come, been written and left memory.
            let now = self.look_up(path)?;
            if now.id() != found.id() {
                return Err(Undone::Wait);
            }
            found = now;
        }
        self.stage_create(path, request, &found, fork, content_type, content, now_ms)
    }

    fn look_up(&self, path: &str) -> Result<Found, Undone> {
        // In this order: what is written behind the look makes the version another.
        let version = self.directory.catalog().version();
        let stream = self.directory.get(path)?;
        Ok(Found { stream, version })
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
            class: state.class,
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

    /// The create's first bytes in stored form. They go into the log as one group, which has the bound of an append.
    fn first_content(
        &self,
        content_type: &ContentType,
        body: &[u8],
        prefix: Option<Content>,
    ) -> Result<FirstContent, Undone> {
        let mut content = FirstContent {
            prefix: prefix.unwrap_or_default(),
            body: Content::default(),
        };
        if !body.is_empty() && content_type.media == Media::Json {
            if body.len() >= COSTLY_BODY_BYTES {
                self.shard.open()?.admit(body.len(), false)?;
            }
            content.body.records = json::flatten_into(body, &mut content.body.wire)
                .map_err(|error| Undone::refused(json_refusal(&error)))?;
        } else if !body.is_empty() {
            content.body = Content {
                wire: body.to_vec(),
                records: 1,
            };
        }
        if content.len() > self.config.append_max_bytes + 1 {
            return Err(Undone::refused(ErrorCode::PayloadTooLarge));
        }
        Ok(content)
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
                None if state.is_volatile() && self.kept_since(&state, request) => state.cold_end(),
                None => state.visible.tail,
                Some(offset) => self.fork_anchor(&state, offset)?,
            };
            if state.is_volatile() && anchor > state.cold_end() {
                // The fork will need these bytes for longer than the process lives. For a checkpoint that may not come
                // nobody waits.
                if self.metrics.wal_full.get() > 0 {
                    return Err(Undone::refused(ErrorCode::StorageFull));
                }
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
        if !self.is_boundary(&source, anchor).map_err(Undone::refused)? {
            return Err(invalid());
        }
        let records = self
            .records_at(&source, anchor)
            .map_err(|error| Undone::refused(self.read_failed(&source, error)))?;
        let line = self
            .line_below(&source, anchor, time_ms)
            .map_err(|error| Undone::refused(self.read_failed(&source, error)))?;
        let (wire, records_taken) = match fork.sub_offset {
            0 => (Vec::new(), 0),
            _ if matches!(self.prefix_is_at_hand(&source, anchor), Ok(false)) => {
                return Err(Undone::Wait);
            }
            count => self.sub_offset_prefix(&source, anchor, count)?,
        };
        Ok(ForkPoint {
            source,
            anchor,
            records,
            line,
            prefix: Content {
                wire,
                records: records_taken,
            },
        })
    }

    /// Whether everything that an `ephemeral` source had when the request came has been kept since.
    fn kept_since(&self, source: &StreamState, request: &CreateRequest<'_>) -> bool {
        let received_ms = match request.received_ms {
            0 => self.steady_ms(),
            earlier => earlier,
        };
        source.kept_ms > received_ms
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
        found: &Found,
        fork: Option<ForkPoint>,
        content_type: Arc<ContentType>,
        content: FirstContent,
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
        let times = (now_ms, self.steady_ms());
        let initial = initial_state(id, class, request, leaves.as_ref(), &self.losses, times);
        if content.len() > 0 {
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
        let replaced = found.stream.as_ref();
        if !self
            .directory
            .insert_if_current(&stream, replaced, found.version)
        {
            // Somebody else was faster: look again.
            return Err(Undone::Wait);
        }
        let (first, behind) = content.split();
        let stored = |content: &Content| !content.wire.is_empty() && !state.is_volatile();
        let create = Frame {
            records: if stored(first) { first.records } else { 0 },
            position: state.start,
            epoch: state.last_epoch(),
            extra: &config,
            payload: if stored(first) { &first.wire } else { &[] },
            ..Frame::control(FrameKind::Create, id, now_ms)
        };
        let appends = behind.filter(|behind| stored(behind)).map(|behind| Frame {
            records: behind.records,
            position: state.start + first.wire.len() as u64,
            epoch: create.epoch,
            payload: &behind.wire,
            ..Frame::control(FrameKind::Append, id, state.last_time_ms)
        });
        self.directory.mark_dirty(&stream, &mut state.dirty);
        if let (Some(point), Some(source)) = (&fork, &mut source_state) {
            self.directory.mark_dirty(&point.source, &mut source.dirty);
        }
        let visible = Visible {
            tail: state.tail + content.len() as u64,
            records: state.records + content.records(),
            closed: state.closed,
        };
        let frames = (create, appends);
        let staged = self.push_create(&stream, &mut state, frames, visible, fork.as_ref());
        let Staged {
            fork_added,
            created,
            newest,
        } = match staged {
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
            payload: &first.wire,
            records: first.records,
        };
        state.apply(&Change::plain(created, now_ms, what));
        if let Some(behind) = behind {
            let what = What::Append(Append {
                payload: &behind.wire,
                records: behind.records,
                ..Append::default()
            });
            let time_ms = state.last_time_ms;
            state.apply(&Change::plain(newest, time_ms, what));
        }
        self.metrics.creates.add(1);
        state.count_memory(&self.metrics);
        let (offset, closed) = (self.applied_tail(&state), state.closed);
        drop(state);
        Ok(Created {
            stream,
            new: true,
            offset,
            closed,
            class,
            gate: Gate::synced(newest),
        })
    }

    /// Stages the create, with what goes behind it, as one group.
    fn push_create(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        (create, appends): (Frame<'_>, Option<Frame<'_>>),
        visible: Visible,
        fork: Option<&ForkPoint>,
    ) -> Result<Staged, crate::shard::batch::NotStaged> {
        let mut open = self.shard.open()?;
        let appended_len = appends.map_or(0, |frame| frame.encoded_len());
        open.admit(create.encoded_len() + appended_len + 64, false)?;
        open.touch(stream, state, visible, Stage::Synced);
        let fork_added = fork.map(|point| {
            open.push(
                Frame::control(FrameKind::ForkAdded, point.source.id, create.time_ms),
                true,
            )
        });
        let created = open.push(create, appends.is_some());
        let newest = appends.map_or(created, |frame| open.push(frame, false));
        open.wants(newest, Stage::Synced);
        Ok(Staged {
            fork_added,
            created,
            newest,
        })
    }
}

/// The sequences of a create's frames.
struct Staged {
    fork_added: Option<u64>,
    created: u64,
    newest: u64,
}

pub fn json_refusal(error: &json::JsonError) -> Refusal {
    Refusal::with(
        ErrorCode::JsonInvalid,
        format!("{} at byte {}.", error.reason, error.position),
    )
}
