//! Applying frames of the log to streams: what recovery and verification do for each valid frame.
//!
//! Frames that a stream's catalog entry already reflects are skipped, so replay may begin anywhere at or before
//! the last checkpoint, and running it twice gives the same. What a frame does to its stream is said in
//! `stream/change`; here is which stream that is, and what the log tells beside.

use std::collections::HashSet;
use std::sync::Arc;

use crate::codec::adopt::{self, UsedUp};
use crate::codec::{Frame, FrameKind, Reader};
use crate::error::EngineError;
use crate::io::BootId;
use crate::log::cold::ColdStore;
use crate::log::directory::Directory;
use crate::log::endings::Ending;
use crate::metrics::Metrics;
use crate::model::{Adopted, ContentType, StreamId};
use crate::stream::change::{Change, Section, adopted, check_position};
use crate::stream::handle::Stream;
use crate::stream::offsets::{Loss, Losses};
use crate::stream::snapshot;
use crate::stream::state::{Life, StreamState};

/// Stands for an unknown boot id in a start frame.
pub const NO_BOOT_ID: BootId = [0; 16];

/// The streams that frames are applied to.
pub trait Streams {
    type Error;

    fn by_path(&mut self, path: &str) -> Result<Option<Arc<Stream>>, Self::Error>;
    fn by_id(&mut self, id: StreamId) -> Result<Option<Arc<Stream>>, Self::Error>;
    fn intern(&self, content_type: &str) -> Arc<ContentType>;
    fn insert(&mut self, stream: &Arc<Stream>);
    /// What a commit takes over from staged packs, each with its index.
    fn sections(
        &mut self,
        frame: &Frame<'_>,
        adopted: Vec<Adopted>,
    ) -> Result<Vec<Section>, Self::Error>;
    /// A stream is about to be removed.
    fn ending(&mut self, stream: &Stream, state: &StreamState, frame: &Frame<'_>, losses: &Losses);
    /// A frame has been applied.
    fn changed(&mut self, stream: &Arc<Stream>, state: &mut StreamState);
}

pub enum NotApplied<E> {
    /// It contradicts its stream, or does not decode.
    Unfit {
        stream: Option<Box<str>>,
        what: String,
    },
    /// The streams could not be asked.
    Failed(E),
}

impl<E> From<E> for NotApplied<E> {
    fn from(error: E) -> NotApplied<E> {
        NotApplied::Failed(error)
    }
}

/// What replay has learnt beside the streams.
pub struct Replay<S> {
    pub streams: S,
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

impl<S: Streams> Replay<S> {
    pub fn new(
        streams: S,
        losses: Losses,
        highest_epoch: u64,
        boot_id: Option<BootId>,
    ) -> Replay<S> {
        Replay {
            streams,
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

    pub fn apply(&mut self, frame: &Frame<'_>) -> Result<(), NotApplied<S::Error>> {
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

    fn start(&mut self, frame: &Frame<'_>) -> Result<(), NotApplied<S::Error>> {
        let mut reader = Reader::new(frame.payload);
        let loss = Loss::decode(&mut reader);
        let boot_id = reader.take(size_of::<BootId>());
        let (Some(loss), Some(boot_id)) = (loss, boot_id) else {
            return Err(unfit(None, frame, "the start frame does not decode"));
        };
        self.losses.add(loss);
        self.highest_epoch = self.highest_epoch.max(loss.epoch);
        self.boot_id = boot_id.try_into().ok().filter(|id| *id != NO_BOOT_ID);
        Ok(())
    }

    fn create(&mut self, frame: &Frame<'_>) -> Result<(), NotApplied<S::Error>> {
        let decoded = snapshot::decode(frame.extra, &|text| self.streams.intern(text))
            .filter(|stream| stream.id == frame.stream);
        let Some(stream) = decoded else {
            return Err(unfit(None, frame, "the configuration does not decode"));
        };
        if let Some(existing) = self.streams.by_path(&stream.path)? {
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
        let fits = Change::of(frame, &[]);
        state.apply(&fits.map_err(|what| unfit(Some(&stream), frame, what))?);
        state.publish_applied();
        self.streams.changed(&stream, &mut state);
        drop(state);
        self.streams.insert(&stream);
        Ok(())
    }

    fn change(&mut self, frame: &Frame<'_>) -> Result<(), NotApplied<S::Error>> {
        let found = match self.last.take() {
            // Frames of one stream often follow each other.
            Some(last) if last.id == frame.stream => Some(last),
            _ => self.streams.by_id(frame.stream)?,
        };
        self.note_used_up(frame);
        let Some(stream) = found else {
            if frame.kind == FrameKind::Purge {
                self.unknown.remove(&frame.stream);
            } else {
                self.unknown.insert(frame.stream);
            }
            return Ok(());
        };
        let applied = self.change_stream(&stream, frame);
        self.last = Some(stream);
        applied
    }

    fn change_stream(
        &mut self,
        stream: &Arc<Stream>,
        frame: &Frame<'_>,
    ) -> Result<(), NotApplied<S::Error>> {
        let mut state = stream.lock();
        if frame.sequence <= state.applied_sequence {
            return Ok(());
        }
        let says = |what: &str| unfit(Some(stream), frame, what);
        let sections = match adopted(frame).map_err(says)? {
            none if none.is_empty() => Vec::new(),
            adopted => self.streams.sections(frame, adopted)?,
        };
        let change = Change::of(frame, &sections).map_err(says)?;
        check_position(&state, frame, &change).map_err(|what| says(&what))?;
        let removes = matches!(frame.kind, FrameKind::SoftDelete | FrameKind::Purge);
        // A stream ends once: what is purged after a soft delete has ended with that.
        if removes && state.life == Life::Live && !stream.is_reserved() {
            self.streams.ending(stream, &state, frame, &self.losses);
        }
        state.apply(&change);
        // An epoch that was taken for nothing is in no other frame: the next start must not take it again.
        self.highest_epoch = self.highest_epoch.max(state.class_since);
        state.publish_applied();
        self.streams.changed(stream, &mut state);
        if state.life == Life::SoftDeleted && state.fork_count == 0 {
            self.unneeded.push(stream.id);
        }
        Ok(())
    }

    /// A stage that was copied must not wait for another commit, whatever became of its streams.
    fn note_used_up(&mut self, frame: &Frame<'_>) {
        if frame.kind == FrameKind::Adopt {
            self.used_up.extend(adopt::decode_used_up(frame.payload));
        }
    }

    /// To be asked after the last frame: streams with frames that neither the catalog nor a create knows.
    pub fn unknown(&self) -> Vec<StreamId> {
        let mut unknown: Vec<StreamId> = self.unknown.iter().copied().collect();
        unknown.sort_unstable();
        unknown
    }
}

fn unfit<E>(stream: Option<&Arc<Stream>>, frame: &Frame<'_>, what: &str) -> NotApplied<E> {
    NotApplied::Unfit {
        stream: stream.map(|stream| stream.path.clone()),
        what: format!(
            "frame {} of stream {} cannot be applied: {what}",
            frame.sequence, frame.stream.0
        ),
    }
}

/// The streams of a directory that is opened.
pub struct OpenedStreams<'a> {
    pub directory: &'a Directory,
    pub cold: &'a ColdStore,
    pub metrics: &'a Metrics,
}

impl Streams for OpenedStreams<'_> {
    type Error = EngineError;

    fn by_path(&mut self, path: &str) -> Result<Option<Arc<Stream>>, EngineError> {
        self.directory
            .get(path)
            .map_err(|error| disagree(error.to_string()))
    }

    fn by_id(&mut self, id: StreamId) -> Result<Option<Arc<Stream>>, EngineError> {
        self.directory
            .get_by_id(id)
            .map_err(|error| disagree(error.to_string()))
    }

    fn intern(&self, content_type: &str) -> Arc<ContentType> {
        self.directory.intern(content_type)
    }

    fn insert(&mut self, stream: &Arc<Stream>) {
        self.directory.insert(stream);
    }

    /// Takes over staged bytes again. Their pack was synced before the frame was written and is kept until a checkpoint
    /// has placed them, so that one which is not there is damage of what was promised, as in the log itself.
    fn sections(
        &mut self,
        frame: &Frame<'_>,
        adopted: Vec<Adopted>,
    ) -> Result<Vec<Section>, EngineError> {
        let index = |section: &Adopted| {
            self.cold.relative_index(section).map_err(|error| {
                EngineError::new(
                    "log_damaged",
                    format!(
                        "frame {} of stream {} has committed staged bytes that are not there: {error}",
                        frame.sequence, frame.stream.0
                    ),
                )
            })
        };
        let indexes: Result<Vec<_>, EngineError> = adopted.iter().map(index).collect();
        let indexes = indexes?;
        self.cold.adopt(&adopted);
        Ok(adopted.into_iter().zip(indexes).collect())
    }

    fn ending(&mut self, stream: &Stream, state: &StreamState, frame: &Frame<'_>, losses: &Losses) {
        let ending = Ending::of_frame(frame, stream, state, losses);
        self.directory.endings.note(frame.sequence, ending);
    }

    fn changed(&mut self, stream: &Arc<Stream>, state: &mut StreamState) {
        self.directory.mark_dirty(stream, &mut state.dirty);
        state.count_memory(self.metrics);
    }
}

impl Replay<OpenedStreams<'_>> {
    /// To be asked after the last frame.
    pub fn finish(&self) -> Result<(), EngineError> {
        match self.unknown().first() {
            None => Ok(()),
            Some(id) => Err(disagree(format!(
                "the log has frames of stream {} which the catalog does not know; was the catalog replaced?",
                id.0
            ))),
        }
    }
}

impl From<NotApplied<EngineError>> for EngineError {
    fn from(reason: NotApplied<EngineError>) -> EngineError {
        match reason {
            NotApplied::Unfit { what, .. } => disagree(what),
            NotApplied::Failed(error) => error,
        }
    }
}

fn disagree(what: String) -> EngineError {
    EngineError::new("log_and_catalog_disagree", what)
}
