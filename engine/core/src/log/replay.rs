//! Applying frames of the log to streams: what recovery does for each valid frame.
//!
//! Frames that a stream's catalog entry already reflects are skipped, so replay may begin anywhere at or before
//! the last checkpoint, and running it twice gives the same.

use std::collections::HashSet;
use std::sync::Arc;

use crate::codec::{AppendExtra, FLAG_CLOSE, Frame, FrameKind, Reader};
use crate::error::EngineError;
use crate::log::directory::Directory;
use crate::metrics::Metrics;
use crate::model::StreamId;
use crate::stream::handle::Stream;
use crate::stream::offsets::Losses;
use crate::stream::snapshot;
use crate::stream::state::{AppliedAppend, Life, StreamState};

/// What replay has learnt beside the streams.
pub struct Replay<'a> {
    directory: &'a Directory,
    metrics: &'a Metrics,
    /// Frames for streams that nobody knows: their purge must follow, or the log and the catalog disagree.
    unknown: HashSet<StreamId>,
    pub losses: Losses,
    pub highest_epoch: u64,
    /// The newest frame was the mark of a clean shutdown.
    pub clean: bool,
    pub frames: u64,
    /// Soft-deleted streams that no fork needs any more.
    pub unneeded: Vec<StreamId>,
}

impl<'a> Replay<'a> {
    pub fn new(
        directory: &'a Directory,
        metrics: &'a Metrics,
        losses: Losses,
        highest_epoch: u64,
    ) -> Replay<'a> {
        Replay {
            directory,
            metrics,
            unknown: HashSet::new(),
            losses,
            highest_epoch,
            clean: false,
            frames: 0,
            unneeded: Vec::new(),
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
        let epoch = Reader::new(frame.payload)
            .u64()
            .ok_or_else(|| disagree(frame, "the start frame is too short"))?;
        if epoch != 0 && !self.losses.unclean_starts.contains(&epoch) {
            self.losses.unclean_starts.push(epoch);
        }
        self.highest_epoch = self.highest_epoch.max(epoch);
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
            self.metrics.hot_bytes.add(frame.payload.len() as u64);
        }
        state.publish_applied();
        self.directory.mark_dirty(&stream, &mut state.dirty);
        drop(state);
        self.directory.insert(&stream);
        Ok(())
    }

    fn change(&mut self, frame: &Frame<'_>) -> Result<(), EngineError> {
        let found = self
            .directory
            .get_by_id(frame.stream)
            .map_err(|error| disagree(frame, &error.to_string()))?;
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
            FrameKind::SoftDelete | FrameKind::Purge => {
                let freed = state.apply_delete(frame.kind == FrameKind::Purge, frame.sequence);
                self.metrics.hot_bytes.sub(freed);
            }
            FrameKind::ForkAdded => state.fork_count += 1,
            FrameKind::ForkReleased => state.fork_count = state.fork_count.saturating_sub(1),
            FrameKind::Touch => touch(&mut state, frame.time_ms),
            FrameKind::Create | FrameKind::Start | FrameKind::CleanStop => {}
        }
        state.applied_sequence = frame.sequence;
        state.publish_applied();
        self.metrics
            .hot_bytes
            .add(if frame.kind == FrameKind::Append {
                frame.payload.len() as u64
            } else {
                0
            });
        self.note_unneeded(&stream, &state);
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
    if frame.position != state.tail {
        return Err(disagree(
            frame,
            &format!(
                "it appends at {} but the stream ends at {}",
                frame.position, state.tail
            ),
        ));
    }
    let extra = AppendExtra::decode(frame.flags, frame.extra)
        .ok_or_else(|| disagree(frame, "the producer tuple does not decode"))?;
    state.apply_append(&AppliedAppend {
        sequence: frame.sequence,
        position: frame.position,
        time_ms: frame.time_ms,
        epoch: frame.epoch,
        records: frame.records,
        close: frame.flags & FLAG_CLOSE != 0,
        extra,
        payload: frame.payload,
    });
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
