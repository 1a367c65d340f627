//! Changing a stream's class, and what `ephemeral` streams need beside the log: keeping their bytes after all,
//! and files for those that memory has no room for.
//!
//! Invariants
//! - `I-CLASS-1` A change is one synced frame. Until it is synced nothing of the new class is told or shown.
//! - `I-CLASS-2` A stream enters or leaves `ephemeral` only when every byte it has is in a checkpoint: frames
//!   and bytes without frames never follow each other.

use std::sync::Arc;

use crate::codec::{FRAME_HEADER_BYTES, Frame, FrameKind};
use crate::error::ErrorCode;
use crate::log::cold::SpillPiece;
use crate::model::{Class, Extent, Gate, Stage};
use crate::refusal::Refusal;
use crate::report;
use crate::shard::engine::{Engine, Undone};
use crate::stream::handle::Stream;
use crate::stream::hot::Hot;
use crate::stream::state::{Keep, Life, StreamState, Visible};

/// Bytes of one spill file: what is written, and held twice, at a time.
const SPILL_FILE_BYTES: u64 = 32 << 20;

impl Engine {
    /// Gives a stream another class. `Wait`: its bytes are on their way to a checkpoint; appends wait with it
    /// until the change is made or [`Engine::abandon_class_change`] is called.
    pub fn set_class(
        &self,
        stream: &Arc<Stream>,
        class: Class,
        now_ms: u64,
    ) -> Result<Gate, Undone> {
        if let Some(needs) = class.needs() {
            let refusal = Refusal::with(
                ErrorCode::DurabilityUnavailable,
                format!("The class {needs}."),
            );
            return Err(Undone::refused(refusal));
        }
        let mut state = stream.lock();
        self.check_life(stream, &mut state, now_ms)?;
        if state.class == class {
            return Ok(self.control_gate(&state));
        }
        let crosses = class == Class::Ephemeral || state.is_volatile();
        if crosses && (state.cold_end() != state.tail || state.flushing.is_some()) {
            state.changing = true;
            if state.is_volatile() {
                self.keep_volatile(stream, &mut state);
            } else {
                self.directory.mark_dirty(stream, &mut state.dirty);
                self.maintenance.request_checkpoint();
            }
            return Err(Undone::Wait);
        }
        let sequence = self.stage_class(stream, &mut state, class, now_ms)?;
        state.changing = false;
        Ok(Gate::synced(sequence))
    }

    fn stage_class(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        class: Class,
        now_ms: u64,
    ) -> Result<u64, Undone> {
        let (epoch, since) = (self.applied_tail(state).epoch, self.highest_epoch());
        let visible = Visible {
            tail: state.tail,
            records: state.records,
            closed: state.closed,
        };
        self.directory.mark_dirty(stream, &mut state.dirty);
        let sequence = {
            let mut open = self.shard.open()?;
            open.admit(FRAME_HEADER_BYTES + 16, true)?;
            open.touch(stream, state, visible, Stage::Synced);
            let frame = Frame {
                epoch,
                position: state.tail,
                extra: &[class as u8],
                payload: &since.to_le_bytes(),
                ..Frame::control(FrameKind::Configure, stream.id, now_ms)
            };
            let sequence = open.push(frame, false);
            open.wants(sequence, Stage::Synced);
            sequence
        };
        state.apply_class(class, since, epoch, sequence);
        Ok(sequence)
    }

    /// Lets appends go on after a change of class that did not come about.
    pub fn abandon_class_change(&self, stream: &Stream) {
        stream.lock().changing = false;
    }

    /// Lets the next checkpoint write an `ephemeral` stream's bytes.
    pub fn keep_volatile(&self, stream: &Arc<Stream>, state: &mut StreamState) {
        if state.keep == Keep::No {
            state.keep = Keep::Wanted;
        }
        self.directory.mark_dirty(stream, &mut state.dirty);
        self.maintenance.request_checkpoint();
    }

    /// Moves bytes of `ephemeral` streams to files until memory is half empty again.
    pub fn spill_volatile(&self) {
        let bound = self.config.ephemeral_bytes_max;
        if self.metrics.ephemeral_bytes.get() <= bound {
            return;
        }
        let mut streams = self.directory.volatile();
        while self.metrics.ephemeral_bytes.get() > bound / 2 && !streams.is_empty() {
            let mut given = Vec::new();
            let mut bytes = 0;
            while bytes < SPILL_FILE_BYTES {
                let Some(stream) = streams.pop() else { break };
                if let Some(piece) = give(&stream) {
                    bytes += piece.hot.len();
                    given.push(piece);
                }
            }
            if let Err(error) = self.spill(&given) {
                given.iter().for_each(|given| self.take_back(given));
                report!("bytes of ephemeral streams could not be moved out of memory: {error}");
                return;
            }
        }
    }

    fn spill(&self, given: &[Given]) -> std::io::Result<()> {
        let bytes: Vec<_> = given.iter().map(|given| given.hot.contiguous()).collect();
        let pieces: Vec<SpillPiece<'_>> = given
            .iter()
            .zip(&bytes)
            .map(|(given, bytes)| SpillPiece {
                stream: given.stream.id,
                start: given.hot.start,
                base_records: given.base_records,
                bytes,
                index: &given.hot.index,
            })
            .collect();
        if pieces.is_empty() {
            return Ok(());
        }
        let extents = self.cold.spill(&pieces)?;
        for (given, extent) in given.iter().zip(extents) {
            self.metrics.ephemeral_bytes.sub(given.hot.len());
            self.metrics.spilled_bytes.add(given.hot.len());
            if !given.place(extent) {
                self.cold.release_spilled(&[extent])?;
            }
        }
        Ok(())
    }

    fn take_back(&self, given: &Given) {
        let mut state = given.stream.lock();
        if state.flushing.take().is_none() {
            return;
        }
        if state.life == Life::Gone {
            self.metrics.ephemeral_bytes.sub(given.hot.len());
        } else {
            state.hot = given.hot.followed_by(&state.hot);
        }
    }
}

/// Bytes that a stream gives out of memory.
struct Given {
    stream: Arc<Stream>,
    hot: Arc<Hot>,
    base_records: u64,
}

fn give(stream: &Arc<Stream>) -> Option<Given> {
    let mut state = stream.lock();
    if !state.is_volatile() || state.hot.is_empty() || state.flushing.is_some() {
        return None;
    }
    state.hot.freeze();
    let tail = state.tail;
    let hot = Arc::new(std::mem::replace(&mut state.hot, Hot::starting_at(tail)));
    state.flushing = Some(Arc::clone(&hot));
    Some(Given {
        stream: Arc::clone(stream),
        hot,
        base_records: state.file_records(),
    })
}

impl Given {
    /// Puts the extent in the place of the bytes; `false` if the stream is gone.
    fn place(&self, extent: Extent) -> bool {
        let mut state = self.stream.lock();
        state.flushing = None;
        if state.life == Life::Gone {
            return false;
        }
        let mut spilled = state.spilled.as_ref().clone();
        spilled.push(extent);
        state.spilled = Arc::new(spilled);
        state.spilled_records = self
            .hot
            .index
            .last()
            .map_or(self.base_records, |entry| entry.records);
        true
    }
}
