//! Where a read begins and what one answer carries: planned here for catch-up, long-poll and SSE, for callers in the
//! same process, for the places of `/v1/tails` and for the ranges of `/v1/read`.
//!
//! Invariants
//! - `I-PLAN-1` A read begins at a boundary between appends, or is refused; what it cannot have is a gap in front of it.
//! - `I-PLAN-2` No window spans a possible loss or a damaged range, and one that ends before a loss is not up to date: the
//!   gap is told by the next.

use std::sync::Arc;

use crate::error::ErrorCode;
use crate::io::sabotage::{self, Sabotage};
use crate::model::Offset;
use crate::refusal::Refusal;
use crate::shard::engine::Engine;
use crate::stream::handle::Stream;
use crate::stream::offsets::{self, Gap, ReadStart};

/// What a reader names as its beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadFrom {
    Start,
    /// Only what comes.
    Now,
    At(Offset),
    /// So many visible records before the tail.
    Last(u64),
    /// The first append at or after a time.
    Since(u64),
}

impl ReadFrom {
    /// `-1`, `now` or an offset.
    pub fn parse(text: &[u8]) -> Result<ReadFrom, Refusal> {
        match text {
            b"-1" => Ok(ReadFrom::Start),
            b"now" => Ok(ReadFrom::Now),
            text => match Offset::parse(text) {
                Some(Offset::START) => Ok(ReadFrom::Start),
                Some(offset) => Ok(ReadFrom::At(offset)),
                None => Err(ErrorCode::OffsetInvalid.into()),
            },
        }
    }
}

/// Where and how a read begins.
pub struct ReadPlan {
    pub position: u64,
    pub gap: Option<Gap>,
    /// The client named an offset that no other life of the path can have given it.
    pub minted: bool,
    pub now: bool,
}

/// The part of a stream that one answer carries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub start: u64,
    pub end: u64,
    pub next: Offset,
    pub up_to_date: bool,
    pub closed: bool,
}

impl Engine {
    pub fn plan_read(&self, stream: &Arc<Stream>, from: ReadFrom) -> Result<ReadPlan, Refusal> {
        let failed = |error| self.read_failed(stream, error);
        let position = match from {
            ReadFrom::At(offset) => {
                let start = self.resolve_boundary(stream, offset)?;
                return Ok(ReadPlan {
                    position: start.position,
                    gap: start.gap,
                    // What a fork inherits has the names of its source: another fork at this path may go on differently.
                    minted: offset.epoch >= stream.id.0,
                    now: false,
                });
            }
            ReadFrom::Start => 0,
            ReadFrom::Now => stream.lock().visible.tail,
            ReadFrom::Last(count) => self.position_of_last(stream, count).map_err(failed)?,
            ReadFrom::Since(time_ms) => self.position_at_time(stream, time_ms).map_err(failed)?,
        };
        let start = self.read_start(stream, ReadStart::at(position))?;
        Ok(ReadPlan {
            position: start.position,
            gap: start.gap,
            minted: false,
            now: from == ReadFrom::Now,
        })
    }

    /// A read from a position that the server chose, behind damage if there is some.
    pub fn read_start(&self, stream: &Arc<Stream>, start: ReadStart) -> Result<ReadStart, Refusal> {
        self.skip_damage(stream, start, None)
            .map_err(|error| self.read_failed(stream, error))
    }

    /// A read from an offset, behind damage; one that no append begins or ends at is refused.
    pub fn resolve_boundary(
        &self,
        stream: &Arc<Stream>,
        asked: Offset,
    ) -> Result<ReadStart, Refusal> {
        let failed = |error| self.read_failed(stream, error);
        let (start, tail) = {
            let state = stream.lock();
            let start = offsets::resolve(&state, &self.losses, asked)?;
            (start, state.visible.tail)
        };
        let named = (asked != Offset::START).then_some(asked);
        let start = self.skip_damage(stream, start, named).map_err(failed)?;
        let checked = start.gap.is_some() || start.position == tail;
        if !checked && !self.is_boundary(stream, start.position).map_err(failed)? {
            self.doubt(stream, start.position).map_err(failed)?;
            return Err(Refusal::with(
                ErrorCode::OffsetInvalid,
                "No append of this stream ends at this offset.",
            ));
        }
        Ok(start)
    }

    /// The window that begins at `position`, with everything about it seen at one moment.
    pub fn window(
        &self,
        stream: &Arc<Stream>,
        position: u64,
        window_bytes: u64,
    ) -> Result<Window, Refusal> {
        let visible = stream.lock().visible;
        let end = self
            .window_end(stream, position, window_bytes, visible.tail)
            .map_err(|error| self.read_failed(stream, error))?;
        let (next, boundary) = if end > position && !sabotage::is(Sabotage::PlanSkipsGap) {
            offsets::offset_behind_bytes(&stream.lock(), &self.losses, end)
        } else {
            let next = offsets::offset_after(&stream.lock(), &self.losses, end);
            (next, false)
        };
        let up_to_date = end == visible.tail && !boundary;
        Ok(Window {
            start: position,
            end,
            next,
            up_to_date,
            closed: visible.closed && up_to_date,
        })
    }
}
