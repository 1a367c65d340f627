//! Up the chain of a fork's sources: which stream owns a position, a record or a time, and where its part ends.
//!
//! Every read of inherited bytes comes through here, piece by piece; `stream::line` says how the way up is short. A
//! request passes a bounded number of pieces, so that what it does on a reactor does not grow with the chain.

use std::io;
use std::sync::Arc;

use crate::limits::{FORK_PIECES_MAX, STAGED_PIECES_MAX};
use crate::model::StreamId;
use crate::shard::engine::Engine;
use crate::stream::handle::Stream;
use crate::stream::line::{Line, Mark};

impl Engine {
    /// The nearest of a stream and its ancestors that `owns`, and where its ownership ends as seen from the stream.
    fn climb(
        &self,
        stream: &Arc<Stream>,
        owns: impl Fn(&Mark) -> bool,
    ) -> io::Result<(Arc<Stream>, u64)> {
        let mut owner = Arc::clone(stream);
        let mut limit = u64::MAX;
        loop {
            let next = {
                let state = owner.lock();
                match &state.fork {
                    Some(fork) if !owns(&state.mark()) => {
                        limit = limit.min(state.start);
                        fork.line.next(&owns)
                    }
                    _ => {
                        drop(state);
                        return Ok((owner, limit));
                    }
                }
            };
            owner = self.ancestor(next)?;
        }
    }

    fn ancestor(&self, id: StreamId) -> io::Result<Arc<Stream>> {
        self.metrics.fork_lookups.add(1);
        let found = self.directory.get_by_id(id).map_err(io::Error::other)?;
        found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "a fork's source is missing"))
    }

    /// The stream that owns the byte at `position`, and where its ownership ends as seen from `stream`.
    pub fn owner_of(&self, stream: &Arc<Stream>, position: u64) -> io::Result<(Arc<Stream>, u64)> {
        self.climb(stream, |mark| mark.start <= position)
    }

    /// The stream that owns the record with this number (from 0).
    pub(super) fn owner_of_record(
        &self,
        stream: &Arc<Stream>,
        number: u64,
    ) -> io::Result<Arc<Stream>> {
        self.climb(stream, |mark| mark.start_records <= number)
            .map(|(owner, _)| owner)
    }

    /// The stream that has the first append at or after a time, if it comes before the returned end of its part; else
    /// the first append there is the one.
    pub(super) fn owner_at_time(
        &self,
        stream: &Arc<Stream>,
        time_ms: u64,
    ) -> io::Result<(Arc<Stream>, u64)> {
        self.climb(stream, |mark| mark.time_ms < time_ms)
    }

    /// Where one request has passed as many inherited or staged pieces as it may, if that is before `end`; else `end`.
    pub fn pieces_end(&self, stream: &Arc<Stream>, position: u64, end: u64) -> io::Result<u64> {
        let own = stream.lock().start;
        let mut staged = STAGED_PIECES_MAX;
        let mut at = position;
        for _ in 0..FORK_PIECES_MAX {
            if at >= own.min(end) {
                return Ok(stream.lock().staged_end(at, end, &mut staged));
            }
            let (owner, limit) = self.owner_of(stream, at)?;
            at = owner.lock().staged_end(at, limit.min(end), &mut staged);
            if staged == 0 {
                break;
            }
        }
        Ok(at.min(end))
    }

    /// The way up of a fork that leaves `source` at `anchor`. Called without any lock.
    pub(super) fn line_below(
        &self,
        source: &Arc<Stream>,
        anchor: u64,
        time_ms: u64,
    ) -> io::Result<Line> {
        let (parent, _) = self.owner_of(source, anchor.saturating_sub(1))?;
        let (mark, near) = {
            let state = parent.lock();
            (state.mark(), state.jump())
        };
        let far = if near.depth == 0 {
            near
        } else {
            self.ancestor(near.id)?.lock().jump()
        };
        Ok(Line::below(mark, near, far, time_ms))
    }
}

#[cfg(test)]
#[path = "lineage_tests.rs"]
mod tests;
