//! Applying frames of the log to streams: what recovery does for each valid frame.
//!
//! Frames that a stream's catalog entry already reflects are skipped, so replay may begin anywhere at or before
//! the last checkpoint, and running it twice gives the same.

use std::collections::HashSet;
use std::sync::Arc;

use crate::codec::adopt::{self, UsedUp};
use crate::codec::{AppendExtra, FLAG_CLOSE, Frame, FrameKind, Reader};
use crate::error::EngineError;
use crate::io::BootId;
use crate::log::cold::ColdStore;
use crate::log::directory::Directory;
use crate::log::endings::Ending;
use crate::metrics::Metrics;
use crate::model::{Adopted, Class, StreamId};
use crate::stream::handle::Stream;
use crate::stream::offsets::{Loss, Losses};
use crate::stream::snapshot;
use crate::stream::state::{AppliedAdopt, AppliedAppend, Life, StreamState};

/// Stands for an unknown boot id in a start frame.
pub const NO_BOOT_ID: BootId = [0; 16];

/// What replay has learnt beside the streams.
pub struct Replay<'a> {
    directory: &'a Directory,
    cold: &'a ColdStore,
    metrics: &'a Metrics,
    /// The stream of the last frame.
    last: Option<Arc<Stream>>,
    /// Frames for streams that nobody knows: their purge must follow, or the log and the catalog disagree.
    unknown: HashSet<StreamId>,
    pub losses: Losses,
    pub highest_epoch: u64,
    /// Boot id of the newest start; `None` = unknown.
    pub boot_id: Option<BootId>,
    /// The newest frame was the mark of a clean shutdown.
    pub clean: bool,
    pub frames: u64,
    /// Soft-deleted streams that no fork needs any more.
    pub unneeded: Vec<StreamId>,
    /// Stages whose bytes were copied.
    pub used_up: Vec<UsedUp>,
}

impl<'a> Replay<'a> {
    pub fn new(
        directory: &'a Directory,
        cold: &'a ColdStore,
        metrics: &'a Metrics,
        losses: Losses,
        highest_epoch: u64,
        boot_id: Option<BootId>,
    ) -> Replay<'a> {
        Replay {
            directory,
            cold,
            metrics,
            last: None,
            unknown: HashSet::new(),
            losses,
            highest_epoch,
            boot_id,
            clean: false,
            frames: 0,
            unneeded: Vec::new(),
            used_up: Vec::new(),
        }
    }

    pub fn apply(&mut self, frame: &Frame<'_>) -> Result<(), EngineError> {
        self.frames += 1;
        self.highest_epoch = self.highest_epoch.max(frame.stream.0).max(frame.epoch);
        self.clean = frame.kind == FrameKind::CleanStop;
        match frame.kind {
            FrameKind::Create => self.create(frame),
            FrameKind::Start => self.start(frame),
            FrameKind::CleanStop => Ok(()),
            _ => self.change(frame),
        }
    }

    fn start(&mut self, frame: &Frame<'_>) -> Result<(), EngineError> {
        let mut reader = Reader::new(frame.payload);
        let loss = Loss::decode(&mut reader);
        let boot_id = reader.take(size_of::<BootId>());
        let (Some(loss), Some(boot_id)) = (loss, boot_id) else {
            return Err(disagree(frame, "the start frame does not decode"));
        };
        self.losses.add(loss);
        self.highest_epoch = self.highest_epoch.max(loss.epoch);
        self.boot_id = boot_id.try_into().ok().filter(|id| *id != NO_BOOT_ID);
        Ok(())
    }

    fn create(&mut self, frame: &Frame<'_>) -> Result<(), EngineError> {
        let decoded = snapshot::decode(frame.extra, |text| self.directory.intern(text));
        let stream = decoded.ok_or_else(|| disagree(frame, "the configuration does not decode"))?;
        let found = self
            .directory
            .get(&stream.path)
            .map_err(|error| disagree(frame, &error.to_string()))?;
        if let Some(existing) = found {
            if existing.id == frame.stream {
                return Ok(());
            }
            if existing.id > frame.stream {
                // The path has been taken over since; the purge of this one is in the log too.
                self.unknown.insert(frame.stream);
                return Ok(());
            }
        }
        let stream = Arc::new(stream);
        let mut state = stream.lock();
        state.applied_sequence = frame.sequence;
        state.control_sequence = frame.sequence;
        if !frame.payload.is_empty() {
            state.push_bytes(frame.payload, frame.records);
            state.count_memory(self.metrics);
        }
        state.publish_applied();
        self.directory.mark_dirty(&stream, &mut state.dirty);
        drop(state);
        self.directory.insert(&stream);
        Ok(())
    }

    fn change(&mut self, frame: &Frame<'_>) -> Result<(), EngineError> {
        let found = match &self.last {
            // Frames of one stream often follow each other.
            Some(last) if last.id == frame.stream => Some(Arc::clone(last)),
            _ => self
                .directory
                .get_by_id(frame.stream)
                .map_err(|error| disagree(frame, &error.to_string()))?,
        };
        self.last.clone_from(&found);
        self.note_used_up(frame);
        let Some(stream) = found else {
            if frame.kind == FrameKind::Purge {
                self.unknown.remove(&frame.stream);
            } else {
                self.unknown.insert(frame.stream);
            }
            return Ok(());
        };
        let mut state = stream.lock();
        if frame.sequence <= state.applied_sequence {
            return Ok(());
        }
        self.directory.mark_dirty(&stream, &mut state.dirty);
        match frame.kind {
            FrameKind::Append => apply_append(&mut state, frame)?,
            FrameKind::Adopt => self.adopt(&mut state, frame)?,
            FrameKind::SoftDelete | FrameKind::Purge => {
                self.note_ending(&stream, &state, frame);
                state.apply_delete(frame.kind == FrameKind::Purge, frame.sequence);
            }
            FrameKind::ForkAdded => state.fork_count += 1,
            FrameKind::ForkReleased => state.fork_count = state.fork_count.saturating_sub(1),
            FrameKind::Touch => touch(&mut state, frame.time_ms),
            FrameKind::Configure => configure(&mut state, frame)?,
            FrameKind::Create | FrameKind::Start | FrameKind::CleanStop => {}
        }
        state.applied_sequence = frame.sequence;
        state.publish_applied();
        state.count_memory(self.metrics);
        self.note_unneeded(&stream, &state);
        Ok(())
    }

    /// A stream ends once: what is purged after a soft delete has ended with that.
    fn note_ending(&self, stream: &Stream, state: &StreamState, frame: &Frame<'_>) {
        if state.life == Life::Live && !stream.is_reserved() {
            let ending = Ending::of_frame(frame, stream, state, &self.losses);
            self.directory.endings.note(frame.sequence, ending);
        }
    }

    /// A stage that was copied must not wait for another commit, whatever became of its streams.
    fn note_used_up(&mut self, frame: &Frame<'_>) {
        if frame.kind == FrameKind::Adopt {
            self.used_up.extend(adopt::decode_used_up(frame.payload));
        }
    }

    /// Takes over staged bytes again. Their pack was synced before the frame was written and is kept until a checkpoint
    /// has placed them, so that one which is not there is damage of what was promised, as in the log itself.
    fn adopt(&self, state: &mut StreamState, frame: &Frame<'_>) -> Result<(), EngineError> {
        let extra = AppendExtra::decode(frame.flags, frame.extra);
        let (Some(producer), Some(adopted)) = (
            extra.and_then(|extra| extra.producer),
            adopt::decode(frame.payload),
        ) else {
            return Err(disagree(frame, "the staged sections do not decode"));
        };
        let adopted: Vec<Adopted> = adopted
            .into_iter()
            .filter(|section| section.len > 0)
            .collect();
        // Without bytes it tells of a commit to a stream whose bytes go through no frame: then it has no place.
        if !adopted.is_empty() {
            check_position(state, frame)?;
        }
        let mut sections = Vec::with_capacity(adopted.len());
        for section in &adopted {
            let index = self.cold.relative_index(section).map_err(|error| {
                EngineError::new(
                    "log_damaged",
                    format!(
                        "frame {} of stream {} has committed staged bytes that are not there: {error}",
                        frame.sequence, frame.stream.0
                    ),
                )
            })?;
            sections.push((*section, index));
        }
        self.cold.adopt(&adopted);
        state.apply_adopt(&AppliedAdopt {
            sequence: frame.sequence,
            time_ms: frame.time_ms,
            epoch: frame.epoch,
            producer,
            sections: &sections,
        });
        Ok(())
    }

    fn note_unneeded(&mut self, stream: &Stream, state: &StreamState) {
        if state.life == Life::SoftDeleted && state.fork_count == 0 {
            self.unneeded.push(stream.id);
        }
    }

    /// To be asked after the last frame.
    pub fn finish(&self) -> Result<(), EngineError> {
        match self.unknown.iter().next() {
            None => Ok(()),
            Some(id) => Err(EngineError::new(
                "log_and_catalog_disagree",
                format!(
                    "the log has frames of stream {} which the catalog does not know; was the catalog replaced?",
                    id.0
                ),
            )),
        }
    }
}

fn apply_append(state: &mut StreamState, frame: &Frame<'_>) -> Result<(), EngineError> {
    // A frame without bytes may close a stream whose bytes go through no frame: then it has no place.
    if !frame.payload.is_empty() {
        check_position(state, frame)?;
    }
    let extra = AppendExtra::decode(frame.flags, frame.extra)
        .ok_or_else(|| disagree(frame, "the producer tuple does not decode"))?;
    state.apply_append(&AppliedAppend {
        sequence: frame.sequence,
        position: state.tail,
        time_ms: frame.time_ms,
        epoch: frame.epoch,
        records: frame.records,
        close: frame.flags & FLAG_CLOSE != 0,
        extra,
        payload: frame.payload,
    });
    Ok(())
}

fn check_position(state: &StreamState, frame: &Frame<'_>) -> Result<(), EngineError> {
    if frame.position == state.tail {
        return Ok(());
    }
    Err(disagree(
        frame,
        &format!(
            "it appends at {} but the stream ends at {}",
            frame.position, state.tail
        ),
    ))
}

fn configure(state: &mut StreamState, frame: &Frame<'_>) -> Result<(), EngineError> {
    let class = frame.extra.first().copied().and_then(Class::from_u8);
    let since = Reader::new(frame.payload).u64();
    let (Some(class), Some(since)) = (class, since) else {
        return Err(disagree(frame, "the class does not decode"));
    };
    state.apply_class(class, since, frame.epoch, frame.sequence);
    Ok(())
}

fn touch(state: &mut StreamState, time_ms: u64) {
    if let Some(expiry) = state.expiry.as_mut() {
        expiry.last_access_ms = expiry.last_access_ms.max(time_ms);
        expiry.logged_access_ms = expiry.last_access_ms;
    }
}

fn disagree(frame: &Frame<'_>, what: &str) -> EngineError {
    EngineError::new(
        "log_and_catalog_disagree",
        format!(
            "frame {} of stream {} cannot be applied: {what}",
            frame.sequence, frame.stream.0
        ),
    )
}
