//! The log's whole frames applied to the new catalog, those behind a hole too.
//!
//! Replay itself does the work. This stands before it: where a stream's next append does not begin at its end, the
//! bytes between were in damaged frames, and are filled with zeros and marked so that positions stay what they were.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::codec::adopt::{self, UsedUp};
use crate::codec::{Frame, FrameKind};
use crate::error::EngineError;
use crate::io::BootId;
use crate::log::cold::ColdStore;
use crate::log::directory::Directory;
use crate::log::replay::{OpenedStreams, Replay};
use crate::log::stage;
use crate::metrics::Metrics;
use crate::model::StreamId;
use crate::stream::change::{Change, What};
use crate::stream::handle::Stream;
use crate::stream::offsets::Losses;
use crate::stream::state::Life;
use crate::verify::log_scan::frames_of;
use crate::verify::repair::rebuild::mark_damaged;
use crate::verify::repair::{Meta, OldLog, Repaired, io_failed};
use crate::verify::shadow::decode;

const FILL_BYTES: u64 = 1 << 20;

pub struct Salvage<'a> {
    directory: &'a Directory,
    cold: &'a ColdStore,
    metrics: &'a Metrics,
    replay: Replay<OpenedStreams<'a>>,
    repaired: &'a mut Repaired,
    /// Frames of streams whose creation is lost.
    homeless: BTreeMap<StreamId, u64>,
}

/// What the log has told beside the streams.
pub struct Learnt {
    pub losses: Losses,
    pub highest_epoch: u64,
    pub boot_id: Option<BootId>,
}

impl<'a> Salvage<'a> {
    pub fn new(
        directory: &'a Directory,
        cold: &'a ColdStore,
        metrics: &'a Metrics,
        meta: &Meta,
        repaired: &'a mut Repaired,
    ) -> Salvage<'a> {
        let streams = OpenedStreams {
            directory,
            cold,
            metrics,
        };
        let losses = meta.losses.clone();
        let replay = Replay::new(streams, losses, meta.highest_epoch, meta.boot_id);
        Salvage {
            directory,
            cold,
            metrics,
            replay,
            repaired,
            homeless: BTreeMap::new(),
        }
    }

    pub fn run(&mut self, log: &OldLog) -> Result<(), EngineError> {
        let mut frames = 0;
        for piece in &log.judged.pieces {
            let file = &log.files[piece.file];
            let run = &file.runs[piece.run];
            let visited: Result<(), Failed> =
                frames_of(file, run, piece.from, piece.to, &mut |frame, _| {
                    if frame.sequence <= log.checkpoint {
                        return Ok(());
                    }
                    frames += 1;
                    self.frame(frame).map_err(Failed)
                });
            visited.map_err(|failed| failed.0)?;
        }
        self.repaired
            .did(format!("{frames} frames of the log were applied"));
        self.tell_damage(log)
    }

    fn tell_damage(&mut self, log: &OldLog) -> Result<(), EngineError> {
        let lost = log.judged.damage.iter();
        let lost = lost.filter(|damage| damage.from < damage.to && damage.to > log.checkpoint + 1);
        for damage in lost {
            let name = log.files.get(damage.file).map_or("wal", |file| &file.name);
            let mut seems = Vec::new();
            for id in damage.suspects(&log.files) {
                seems.extend(self.find(id)?.map(|stream| stream.path.to_string()));
            }
            let seems = match seems.is_empty() {
                true => String::new(),
                false => format!("; they seem to be of {}", seems.join(", ")),
            };
            let what = format!(
                "frames {}..{} of the log ({name} at byte {}): what they did, closes and deletes included, is \
                 undone{seems}",
                damage.from, damage.to, damage.byte
            );
            self.repaired.gave_up(None, what);
        }
        Ok(())
    }

    fn frame(&mut self, frame: &Frame<'_>) -> Result<(), EngineError> {
        match frame.kind {
            FrameKind::Start | FrameKind::CleanStop => {}
            FrameKind::Create => self.clear_path(frame)?,
            kind => {
                let Some(stream) = self.find(frame.stream)? else {
                    *self.homeless.entry(frame.stream).or_default() += 1;
                    if kind == FrameKind::Purge {
                        self.homeless.remove(&frame.stream);
                    }
                    return Ok(());
                };
                let appends = matches!(kind, FrameKind::Append | FrameKind::Adopt);
                if appends && !self.make_room(&stream, frame) {
                    return Ok(());
                }
            }
        }
        let found = self.find(frame.stream)?;
        let applied_before = found
            .as_ref()
            .map_or(0, |stream| stream.lock().applied_sequence);
        if let Err(error) = self.replay.apply(frame) {
            let path = found.map(|stream| stream.path.clone());
            let error = EngineError::from(error);
            self.repaired.gave_up(path.as_deref(), error.detail);
        } else if let Some(stream) = found.filter(|_| frame.kind == FrameKind::Adopt)
            && frame.sequence > applied_before
        {
            self.mark_adopted(&stream, frame);
        }
        Ok(())
    }

    /// Marks what is damaged in bytes that a commit took over.
    fn mark_adopted(&mut self, stream: &Arc<Stream>, frame: &Frame<'_>) {
        let mut state = stream.lock();
        let mut start = frame.position;
        for section in adopt::decode(frame.payload).unwrap_or_default() {
            let examined = self
                .cold
                .staged_file(&section)
                .and_then(|file| stage::examine(&*file, &section));
            let whole = vec![(0, section.len)];
            for (from, to) in examined.unwrap_or(whole) {
                let (from, to) = (start + from, start + to);
                if mark_damaged(&mut state, from, to) {
                    let what = format!("bytes {from}..{to}: what a commit took over is damaged");
                    self.repaired.gave_up(Some(&stream.path), what);
                }
            }
            start += section.len;
        }
    }

    fn find(&self, id: StreamId) -> Result<Option<Arc<Stream>>, EngineError> {
        self.directory.get_by_id(id).map_err(super::catalog_failed)
    }

    /// A new stream at a path whose old one was deleted in a damaged frame.
    fn clear_path(&mut self, frame: &Frame<'_>) -> Result<(), EngineError> {
        let Some(created) = decode(frame.extra) else {
            return Ok(());
        };
        let found = self.directory.get(&created.path);
        let Some(existing) = found.map_err(super::catalog_failed)? else {
            return Ok(());
        };
        if existing.id < frame.stream {
            let mut state = existing.lock();
            if state.life != Life::Gone {
                self.directory.mark_dirty(&existing, &mut state.dirty);
                state.apply(&Change::plain(frame.sequence, frame.time_ms, What::Purge));
                state.count_memory(self.metrics);
            }
        }
        Ok(())
    }

    /// Brings a stream to where its next append begins. `false`: the append cannot be kept.
    fn make_room(&mut self, stream: &Arc<Stream>, frame: &Frame<'_>) -> bool {
        let mut state = stream.lock();
        if frame.payload.is_empty() || frame.sequence <= state.applied_sequence {
            return true;
        }
        let (tail, position) = (state.tail, frame.position);
        if position < tail {
            let what = format!(
                "the append of frame {} at {position}: the stream already ends at {tail}",
                frame.sequence
            );
            self.repaired.gave_up(Some(&stream.path), what);
            return false;
        }
        if position > tail && state.life != Life::Gone {
            self.directory.mark_dirty(stream, &mut state.dirty);
            let zeros = vec![0u8; FILL_BYTES.min(position - tail) as usize];
            while state.tail < position {
                let piece = (position - state.tail).min(FILL_BYTES) as usize;
                state.fill(&zeros[..piece]);
            }
            state.count_memory(self.metrics);
            mark_damaged(&mut state, tail, position);
            let what = format!("bytes {tail}..{position}: they were in damaged frames of the log");
            self.repaired.gave_up(Some(&stream.path), what);
        }
        true
    }

    /// Stages that the next start must not offer again.
    pub fn used_up(&self) -> Vec<UsedUp> {
        self.replay.used_up.clone()
    }

    pub fn finish(self) -> Learnt {
        for (id, frames) in &self.homeless {
            let what = format!(
                "stream {} whole: {frames} frames of the log belong to it, but its creation is lost",
                id.0
            );
            self.repaired.gave_up(None, what);
        }
        Learnt {
            losses: self.replay.losses.clone(),
            highest_epoch: self.replay.highest_epoch,
            boot_id: self.replay.boot_id,
        }
    }
}

/// Carries an engine error through the frame walk, which can also fail by itself.
struct Failed(EngineError);

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Failed {
        Failed(io_failed(error))
    }
}
