//! Delete and expiry: soft while forks need the bytes, for good otherwise, up the chain of sources.

use std::sync::Arc;

use crate::codec::{FRAME_HEADER_BYTES, Frame, FrameKind};
use crate::error::ErrorCode;
use crate::limits::PURGES_PER_REQUEST_MAX;
use crate::log::endings::Ending;
use crate::model::{Gate, Stage, StreamId};
use crate::shard::engine::{Engine, Undone};
use crate::stream::change::{Change, What};
use crate::stream::handle::Stream;
use crate::stream::state::{Life, StreamState};

impl Engine {
    /// Deletes a stream for a client. Returns what to wait for.
    pub fn delete(&self, stream: &Arc<Stream>, now_ms: u64) -> Result<Gate, Undone> {
        let _at_hand = self.unneeded_above(stream)?;
        let (gate, release) = {
            let mut state = stream.lock();
            self.check_life(stream, &mut state, now_ms)?;
            self.remove_locked(stream, &mut state, now_ms)?
        };
        self.metrics.deletes.add(1);
        // The chain above goes step by step; each step is a group of its own and restartable.
        if let Some(source) = release {
            self.purge_unneeded(source, now_ms, PURGES_PER_REQUEST_MAX);
        }
        Ok(Gate::synced(gate))
    }

    /// The sources that the end of this stream leaves unneeded, and the first one that stays: all that the walk up the
    /// chain needs. Whoever must not wait has them fetched before anything changes, so that with the acknowledgement
    /// of the delete their paths are free.
    fn unneeded_above(&self, stream: &Stream) -> Result<Vec<Arc<Stream>>, Undone> {
        let mut above: Vec<Arc<Stream>> = Vec::new();
        while above.len() < PURGES_PER_REQUEST_MAX {
            let source = {
                let below = above.last().map_or(stream, |last| last);
                let state = below.lock();
                let unneeded = match above.is_empty() {
                    true => state.fork_count == 0,
                    false => state.life == Life::SoftDeleted && state.fork_count == 1,
                };
                state
                    .fork
                    .as_ref()
                    .filter(|_| unneeded)
                    .map(|fork| fork.source)
            };
            let Some(id) = source else { break };
            match self.directory.get_by_id(id) {
                Ok(Some(source)) => above.push(source),
                Err(error) if error.would_block() => return Err(Undone::Wait),
                // The walk comes to the same, and maintenance goes on with it.
                Ok(None) | Err(_) => break,
            }
        }
        Ok(above)
    }

    /// Turns an expired stream into a deleted one; the 404 that follows waits for its frame.
    pub fn expire(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        now_ms: u64,
    ) -> Result<(), Undone> {
        let (_, release) = self.remove_locked(stream, state, now_ms)?;
        self.metrics.deletes.add(1);
        if let Some(source) = release {
            self.maintenance.request_purge(source);
        }
        Ok(())
    }

    /// Stages the delete of a live stream whose lock is held. A purge also gives back the source's fork count,
    /// which the caller does with the returned id once this lock is released.
    fn remove_locked(
        &self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        now_ms: u64,
    ) -> Result<(u64, Option<StreamId>), Undone> {
        let soft = state.fork_count > 0;
        // A fork's purge goes with its source's release in one group, so it needs both locks: the fork is
        // hidden at once and purged by the chain walk.
        let kind = if soft || state.fork.is_some() {
            FrameKind::SoftDelete
        } else {
            FrameKind::Purge
        };
        self.directory.mark_dirty(stream, &mut state.dirty);
        let ending = Ending::of(stream, state, &self.losses, now_ms);
        let payload = ending.payload();
        let frame = ending.frame(kind, &payload);
        let sequence = {
            let mut open = self.shard.open()?;
            open.admit(frame.encoded_len(), true)?;
            open.touch(stream, state, state.visible, Stage::Synced);
            let sequence = open.push(frame, false);
            open.wants(sequence, Stage::Synced);
            sequence
        };
        if !stream.is_reserved() {
            self.directory.endings.note(sequence, ending);
        }
        let release = (kind == FrameKind::SoftDelete && !soft).then_some(stream.id);
        let what = match kind {
            FrameKind::Purge => What::Purge,
            _ => What::SoftDelete,
        };
        state.apply(&Change::plain(sequence, now_ms, what));
        state.count_memory(&self.metrics);
        self.release_spilled(state);
        Ok((sequence, release))
    }

    /// A deleted stream's spilled bytes are of use to nobody, whatever becomes of the delete.
    fn release_spilled(&self, state: &mut StreamState) {
        if state.life == Life::Gone {
            let spilled = std::mem::take(&mut state.spilled);
            self.maintenance.request_release(&spilled);
        }
    }

    /// Purges a soft-deleted stream that no fork needs, then its source if that was waiting for it, and so on, for some
    /// steps; maintenance does the rest.
    pub fn purge_unneeded(&self, first: StreamId, now_ms: u64, steps: usize) {
        let mut next = first;
        for _ in 0..steps {
            match self.purge_step(next, now_ms) {
                Ok(Some(source)) => next = source,
                Ok(None) => return,
                Err(()) => break,
            }
        }
        self.maintenance.request_purge(next);
    }

    /// One step: purge of `id` and release of its source, as one group. `Err` = try again later.
    fn purge_step(&self, id: StreamId, now_ms: u64) -> Result<Option<StreamId>, ()> {
        let Some(stream) = self.directory.get_by_id(id).map_err(|_| ())? else {
            return Ok(None);
        };
        let source_id = stream.lock().fork.as_ref().map(|fork| fork.source);
        let source = match source_id {
            Some(source) => self.directory.get_by_id(source).map_err(|_| ())?,
            None => None,
        };
        // Lock order: by stream id; a source is always older than its fork.
        let mut source_state = source.as_ref().map(|source| source.lock());
        let mut state = stream.lock();
        if state.life != Life::SoftDeleted || state.fork_count > 0 {
            return Ok(None);
        }
        self.directory.mark_dirty(&stream, &mut state.dirty);
        if let (Some(source), Some(source_state)) = (&source, &mut source_state) {
            self.directory.mark_dirty(source, &mut source_state.dirty);
        }
        let (purged, released) = {
            let mut open = self.shard.open().map_err(|_| ())?;
            open.admit(2 * FRAME_HEADER_BYTES, true).map_err(|_| ())?;
            let visible = state.visible;
            open.touch(&stream, &mut state, visible, Stage::Synced);
            let purged = open.push(
                Frame::control(FrameKind::Purge, id, now_ms),
                source.is_some(),
            );
            let released = source.as_ref().map(|source| {
                open.push(
                    Frame::control(FrameKind::ForkReleased, source.id, now_ms),
                    false,
                )
            });
            open.wants(released.unwrap_or(purged), Stage::Synced);
            (purged, released)
        };
        state.apply(&Change::plain(purged, now_ms, What::Purge));
        state.count_memory(&self.metrics);
        self.release_spilled(&mut state);
        self.shard.kick();
        let (Some(source), Some(mut source_state), Some(released)) =
            (source.as_ref(), source_state, released)
        else {
            return Ok(None);
        };
        source_state.apply(&Change::plain(released, now_ms, What::ForkReleased));
        let unneeded = source_state.life == Life::SoftDeleted && source_state.fork_count == 0;
        Ok(unneeded.then_some(source.id))
    }

    /// Renews a sliding TTL, with a frame now and then that nobody waits for.
    pub fn renew(&self, stream: &Arc<Stream>, state: &mut StreamState) {
        let Some(now_ms) = state.renew(|| self.steady_ms()) else {
            return;
        };
        self.directory.mark_dirty(stream, &mut state.dirty);
        if let Ok(mut open) = self.shard.open()
            && open.admit(FRAME_HEADER_BYTES, false).is_ok()
        {
            let sequence = open.push(Frame::control(FrameKind::Touch, stream.id, now_ms), false);
            state.apply(&Change::plain(sequence, now_ms, What::Touch));
        }
    }

    pub fn has_expired(&self, state: &StreamState, now_ms: u64) -> bool {
        state.expiry.is_some() && state.expired(now_ms, self.steady_ms())
    }

    /// Deletes the stream if it has expired; for the sweeper.
    pub fn sweep(&self, stream: &Arc<Stream>, now_ms: u64) -> Result<bool, Undone> {
        let mut state = stream.lock();
        if !self.has_expired(&state, now_ms) {
            return Ok(false);
        }
        self.expire(stream, &mut state, now_ms)?;
        Ok(true)
    }

    /// What a missing stream is refused with.
    pub fn missing() -> Undone {
        Undone::refused(ErrorCode::StreamNotFound)
    }
}

#[cfg(test)]
#[path = "delete_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "expiry_tests.rs"]
mod expiry_tests;
