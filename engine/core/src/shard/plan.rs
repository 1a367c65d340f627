//! Where a read begins and what one answer carries: planned here for catch-up, long-poll and SSE, for callers in the
//! same process, for the places of `/v1/tails` and for the ranges of `/v1/read`.
//!
//! Invariants
//! - `I-PLAN-1` A read begins at a boundary between appends, or is refused; what it cannot have is a gap in front of it.
//! - `I-PLAN-2` No window spans a possible loss or a damaged range, and one that ends before a loss is not up to date: the
//!   gap is told by the next.
//! - `I-PLAN-3` What takes the stream's lock itself is called through [`Reading::unlocked`].

use std::io;
use std::sync::Arc;

use parking_lot::MutexGuard;

use crate::error::ErrorCode;
use crate::io::sabotage::{self, Sabotage};
use crate::limits::STAGED_PIECES_MAX;
use crate::model::{Class, Offset};
use crate::refusal::Refusal;
use crate::shard::engine::Engine;
use crate::stream::handle::Stream;
use crate::stream::locate::Known;
use crate::stream::offsets::{self, Gap, ReadStart};
use crate::stream::state::StreamState;

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

/// The part of a stream that one answer carries, with everything about it seen at one moment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub start: u64,
    pub end: u64,
    pub next: Offset,
    pub up_to_date: bool,
    pub closed: bool,
    pub class: Class,
    /// No crash takes these bytes any more.
    pub lasting: bool,
}

/// A stream that is being read. Its lock is held from the first look to the last byte, and given up only while files or
/// ancestors are asked: so most reads take it once.
pub struct Reading<'a> {
    engine: &'a Engine,
    stream: &'a Arc<Stream>,
    pub state: MutexGuard<'a, StreamState>,
}

impl Engine {
    pub fn reading<'a>(&'a self, stream: &'a Arc<Stream>) -> Reading<'a> {
        Reading {
            engine: self,
            stream,
            state: stream.lock(),
        }
    }

    /// Whether an append ended exactly here.
    pub fn is_boundary(&self, stream: &Arc<Stream>, position: u64) -> Result<bool, Refusal> {
        self.reading(stream).is_boundary(position)
    }
}

impl Reading<'_> {
    pub fn stream(&self) -> &Arc<Stream> {
        self.stream
    }

    /// Does something that needs the stream's lock itself, or takes long.
    pub fn unlocked<T>(&mut self, work: impl FnOnce() -> T) -> T {
        MutexGuard::unlocked(&mut self.state, work)
    }

    /// Asks files or ancestors.
    fn ask<T>(
        &mut self,
        look: impl FnOnce(&Engine, &Arc<Stream>) -> io::Result<T>,
    ) -> Result<T, Refusal> {
        let (engine, stream) = (self.engine, self.stream);
        self.unlocked(|| look(engine, stream).map_err(|error| engine.read_failed(stream, error)))
    }

    pub fn plan(&mut self, from: ReadFrom) -> Result<ReadPlan, Refusal> {
        let position = match from {
            ReadFrom::At(offset) => {
                let start = self.resolve_boundary(offset)?;
                return Ok(ReadPlan {
                    position: start.position,
                    gap: start.gap,
                    // What a fork inherits has the names of its source: another fork at this path may go on differently.
                    minted: offset.epoch >= self.stream.id.0,
                    now: false,
                });
            }
            ReadFrom::Start => 0,
            ReadFrom::Now => self.state.visible.tail,
            ReadFrom::Last(count) => {
                self.ask(|engine, stream| engine.position_of_last(stream, count))?
            }
            ReadFrom::Since(time_ms) => {
                self.ask(|engine, stream| engine.position_at_time(stream, time_ms))?
            }
        };
        let start = self.start(ReadStart::at(position))?;
        Ok(ReadPlan {
            position: start.position,
            gap: start.gap,
            minted: false,
            now: from == ReadFrom::Now,
        })
    }

    /// A read from a position that the server chose, behind damage if there is some.
    pub fn start(&mut self, start: ReadStart) -> Result<ReadStart, Refusal> {
        self.behind_damage(start, None)
    }

    /// Moves a read that would start in damaged bytes behind them. `asked` is the offset that the client named.
    fn behind_damage(
        &mut self,
        start: ReadStart,
        asked: Option<Offset>,
    ) -> Result<ReadStart, Refusal> {
        if self.state.is_sound_from(start.position) {
            return Ok(start);
        }
        let end = self.ask(|engine, stream| engine.damage_end(stream, start.position))?;
        Ok(end.map_or(start, |end| {
            offsets::behind_damage(&self.state, &self.engine.losses, start, asked, end)
        }))
    }

    /// A read from an offset, behind damage; one that no append begins or ends at is refused.
    pub fn resolve_boundary(&mut self, asked: Offset) -> Result<ReadStart, Refusal> {
        let start = offsets::resolve(&self.state, &self.engine.losses, asked)?;
        let tail = self.state.visible.tail;
        let named = (asked != Offset::START).then_some(asked);
        let start = self.behind_damage(start, named)?;
        let checked = start.gap.is_some() || start.position == tail;
        if !checked && !self.is_boundary(start.position)? {
            self.ask(|engine, stream| engine.doubt(stream, start.position))?;
            return Err(Refusal::with(
                ErrorCode::OffsetInvalid,
                "No append of this stream ends at this offset.",
            ));
        }
        Ok(start)
    }

    fn is_boundary(&mut self, position: u64) -> Result<bool, Refusal> {
        // A fork begins between two appends, whatever became of its source's index.
        let begins = position == 0 || position == self.state.start;
        if begins || self.boundary_at_or_before(position)? == position {
            return Ok(true);
        }
        self.ask(|engine, stream| engine.is_damage_edge(stream, position))
    }

    fn boundary_at_or_before(&mut self, limit: u64) -> Result<u64, Refusal> {
        if limit > self.state.start
            && let Known::Here(boundary) = self.state.boundary(limit)
        {
            return Ok(boundary);
        }
        self.ask(|engine, stream| engine.boundary_at_or_before(stream, limit))
    }

    /// The window that begins at `position`.
    pub fn window(&mut self, position: u64, window_bytes: u64) -> Result<Window, Refusal> {
        let visible = self.state.visible;
        let end = self.window_end(position, window_bytes, visible.tail)?;
        let (state, losses) = (&self.state, &self.engine.losses);
        let (next, boundary) = if end > position && !sabotage::is(Sabotage::PlanSkipsGap) {
            offsets::offset_behind_bytes(state, losses, end)
        } else {
            (offsets::offset_after(state, losses, end), false)
        };
        let up_to_date = end == visible.tail && !boundary;
        let class = state.class_at(self.engine.shard.synced());
        Ok(Window {
            start: position,
            end,
            next,
            up_to_date,
            closed: visible.closed && up_to_date,
            class,
            lasting: class.waits_for_sync() || end <= state.cold_end(),
        })
    }

    /// Where a window that begins at `position` ends: at most `window` bytes on, on a record boundary, before
    /// the next possible loss, before the next damaged range and behind a bounded number of inherited and staged
    /// pieces; a single larger append still goes out whole.
    pub(super) fn window_end(
        &mut self,
        position: u64,
        window: u64,
        tail: u64,
    ) -> Result<u64, Refusal> {
        let end = tail.min(offsets::loss_after(&self.state, position));
        let limit = position.saturating_add(window);
        let near = end.min(limit);
        let sound = if self.state.is_sound_from(position) {
            let mut staged = STAGED_PIECES_MAX;
            self.state.staged_end(position, near, &mut staged)
        } else {
            self.ask(|engine, stream| {
                let near = engine.pieces_end(stream, position, near)?;
                engine.damage_start(stream, position, near)
            })?
        };
        if sound < limit || end <= limit {
            return Ok(sound.max(position));
        }
        let boundary = self.boundary_at_or_before(limit)?;
        if boundary > position {
            return Ok(boundary);
        }
        self.ask(|engine, stream| {
            let boundary = engine.boundary_after(stream, position)?;
            engine.damage_start(stream, position, boundary)
        })
    }

    /// Makes sure that files which hold a window are there and long enough, before somebody is promised its bytes.
    pub fn check_files(&mut self, window: &Window) -> Result<(), Refusal> {
        self.ask(|engine, stream| engine.check_files(stream, window.start, window.end))
    }

    /// Adds the bytes of a window as they are stored. Whole appends, so that what comes from a file is checked.
    pub fn copy(&mut self, window: &Window, out: &mut Vec<u8>) -> Result<(), Refusal> {
        let mut position = window.start;
        while position < window.end {
            let wanted = (window.end - position) as usize;
            let held = self.state.bytes_held(position);
            let count = if held.is_empty() {
                let filled = out.len();
                out.resize(filled + wanted, 0);
                let count = self.ask(|engine, stream| {
                    match engine.fill(stream, position, &mut out[filled..])? {
                        0 => Err(io::ErrorKind::UnexpectedEof.into()),
                        count => Ok(count),
                    }
                })?;
                out.truncate(filled + count);
                count
            } else {
                let count = held.len().min(wanted);
                out.extend_from_slice(&held[..count]);
                count
            };
            position += count as u64;
        }
        Ok(())
    }
}
