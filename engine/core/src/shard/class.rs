//! Changing a stream's class, and keeping the bytes of `ephemeral` streams after all.
//!
//! Invariants
//! - `I-CLASS-1` A change is one synced frame. Until it is synced nothing of the new class is told or shown, and no other
//!   change follows.
//! - `I-CLASS-2` A stream enters or leaves `ephemeral` only when every byte it has is in a checkpoint: frames
//!   and bytes without frames never follow each other.

use std::sync::Arc;

use crate::codec::{FRAME_HEADER_BYTES, Frame, FrameKind};
use crate::error::ErrorCode;
use crate::model::{Class, Gate, Stage};
use crate::refusal::Refusal;
use crate::shard::engine::{Engine, Undone};
use crate::stream::change::{Change, What};
use crate::stream::handle::Stream;
use crate::stream::state::{Keep, StreamState, Visible};

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
        if state.class_sequence > self.shard.synced() {
            // Until that one is final the stream is told to be of the class before it.
            return Err(Undone::Wait);
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
        let (epoch, since) = (self.losses.tail_epoch(state), self.highest_epoch());
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
        state.apply(&Change {
            sequence,
            time_ms: now_ms,
            epoch,
            renews: false,
            what: What::Class { class, since },
        });
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
}
