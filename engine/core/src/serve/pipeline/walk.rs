//! Through the ranges of a read: which appends come next, which of their records are rows, and which gaps lie between.
//!
//! Like any read it goes through one stretch at a time, within an epoch and around damage; unlike others it goes on
//! behind the gap, which is noted. Damage that is met on the way is looked into and then gone around.
//!
//! Invariants
//! - `I-WALK-1` Rows come in the order of the ranges, and within a range in the order of their numbers.
//! - `I-WALK-2` Where the window ends, `next` names the first record that is not in it: windows put one behind the
//!   other are the ranges, no more and no less.
//!   It ends when it is full, or when so much was looked through for it that others have waited long enough: ranges that
//!   want little of large appends may ask for very much. That is behind a block at the earliest, so windows get on.
//! - `I-WALK-3` Every gap between two rows, or at the end of a range, is noted in exactly one window.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::ErrorCode;
use crate::limits::READ_GAPS_MAX;
use crate::model::{IndexEntry, Media, Offset, StreamId};
use crate::refusal::Refusal;
use crate::serve::pipeline::arrow::Encoder;
use crate::serve::pipeline::read::{Range, Read};
use crate::serve::pipeline::waits::Asker;
use crate::shard::engine::{Engine, Undone};
use crate::shard::pull::Block;
use crate::shard::tails::Place;
use crate::stream::handle::Stream;
use crate::stream::offsets::{self, Gap};

/// Looks at one stretch that fail before the read does.
const ATTEMPTS_MAX: u32 = 8;

/// Where the next request goes on.
pub struct Next {
    pub range: usize,
    pub place: Place,
}

pub struct Walk<'a> {
    pub(super) engine: &'a Arc<Engine>,
    pub(super) read: &'a Read,
    asker: &'a Asker,
    pub(super) encoder: Encoder,
    /// Appends of a stream from a position on; a range that begins where the last one did finds them here.
    pub(super) block: Block,
    held: Option<(StreamId, u64)>,
    /// Bytes of all blocks.
    looked_through: u64,
    /// Where the messages end of the append of the block that begins at that position, and is sound.
    pub(super) ends: Vec<u32>,
    pub(super) ends_of: Option<u64>,
    pub gaps: Vec<(usize, Gap)>,
    pub next: Option<Next>,
}

/// A range under way.
pub(super) struct Course {
    pub(super) number: usize,
    pub(super) stream: Arc<Stream>,
    pub(super) json: bool,
    /// The boundary that the walk has come to, the offset it is known by, and the number of the next record.
    pub(super) position: u64,
    pub(super) offset: Offset,
    pub(super) record: u64,
    /// Number of the first record of the append at `position`.
    pub(super) base: u64,
    /// Where the range ends: all of what lies before `end`, and of the append there the records below `end_record`.
    pub(super) end: u64,
    pub(super) end_record: u64,
    pub(super) end_epoch: u64,
    /// What is certainly missing before the end that the client named.
    pub(super) end_gap: Option<Gap>,
    pub(super) to: Place,
}

/// How a stretch came to its end.
pub(super) enum Stretch {
    /// On to the next one.
    Done,
    /// The window is full.
    Full,
}

impl<'a> Walk<'a> {
    pub fn new(
        engine: &'a Arc<Engine>,
        read: &'a Read,
        asker: &'a Asker,
        encoder: Encoder,
    ) -> Walk<'a> {
        Walk {
            engine,
            read,
            asker,
            encoder,
            block: Block::default(),
            held: None,
            looked_through: 0,
            ends: Vec::new(),
            ends_of: None,
            gaps: Vec::new(),
            next: None,
        }
    }

    pub fn rows(&mut self) -> u64 {
        self.encoder.close_batch();
        self.encoder.rows()
    }

    pub fn finish(self) -> Vec<Vec<u8>> {
        self.encoder.finish()
    }

    pub fn run(&mut self) -> Result<(), Undone> {
        let read = self.read;
        for (number, range) in read.ranges.iter().enumerate() {
            self.check_wanted().map_err(Undone::refused)?;
            if self.is_full() {
                self.stop_before(number, range);
                return Ok(());
            }
            match self.run_range(number, range) {
                Ok(()) if self.next.is_some() => return Ok(()),
                Ok(()) => {}
                // What was read is good; the next request begins with what failed, and is told of it.
                Err(_) if self.has_something() => {
                    self.stop_before(number, range);
                    return Ok(());
                }
                Err(undone) => return Err(name_range(undone, number, range)),
            }
        }
        Ok(())
    }

    fn has_something(&self) -> bool {
        self.progress() > 0
    }

    fn is_full(&self) -> bool {
        self.encoder.bytes() >= self.read.max_bytes
            || self.gaps.len() >= READ_GAPS_MAX
            || self.has_looked_enough()
    }

    fn has_looked_enough(&self) -> bool {
        self.looked_through >= self.read.looked_through_max
    }

    /// Whether somebody still waits for the window, and may.
    fn check_wanted(&self) -> Result<(), Refusal> {
        if self.engine.stopping.load(Ordering::Acquire) || self.asker.is_gone() {
            return Err(ErrorCode::ShuttingDown.into());
        }
        Ok(())
    }

    fn stop_before(&mut self, number: usize, range: &Range) {
        self.next = Some(Next {
            range: number,
            place: range.from,
        });
    }

    fn run_range(&mut self, number: usize, range: &Range) -> Result<(), Undone> {
        let stream = self.find(range)?;
        if range.from == range.to {
            return Ok(());
        }
        let engine = self.engine;
        let (mut course, gap) = engine
            .past_damage(|| begin(engine, number, range, &stream))
            .map_err(Undone::refused)?;
        let before = self.progress();
        self.gaps.extend(gap.map(|gap| (number, gap)));
        self.expect(&course);
        let mut attempts = 0;
        while self.gaps.len() < READ_GAPS_MAX {
            let version = engine.damage_version();
            match self.stretch(&mut course) {
                Ok(None) => {
                    self.gaps.extend(course.end_gap.map(|gap| (number, gap)));
                    return Ok(());
                }
                Ok(Some(Stretch::Done)) => attempts = 0,
                Ok(Some(Stretch::Full)) => return Ok(()),
                Err(_) if engine.damage_version() != version && attempts < ATTEMPTS_MAX => {
                    attempts += 1;
                }
                Err(refusal) if self.progress() == before => return Err(Undone::refused(refusal)),
                // The next request begins with what failed.
                Err(_) => break,
            }
        }
        self.stop_at(&course);
        Ok(())
    }

    /// Grows with every row and every gap.
    fn progress(&self) -> usize {
        self.encoder.bytes() + self.gaps.len()
    }

    fn find(&self, range: &Range) -> Result<Arc<Stream>, Undone> {
        let stream = self
            .engine
            .find(&range.stream)?
            .ok_or_else(Engine::missing)?;
        let other = range.incarnation.filter(|wanted| *wanted != stream.id);
        self.engine
            .if_settled(&stream, |state| {
                if other.is_none() {
                    self.engine.renew(&stream, state);
                }
            })?
            .ok_or_else(Engine::missing)?;
        match other {
            Some(wanted) => Err(Undone::refused(Refusal::with(
                ErrorCode::StreamRecreated,
                format!("The incarnation is {}, not {}.", stream.id.0, wanted.0),
            ))),
            None => Ok(stream),
        }
    }

    /// Goes to the end of the epoch, to the next damage, through some inherited pieces, or to the end of the range. `None`:
    /// it is there.
    fn stretch(&mut self, course: &mut Course) -> Result<Option<Stretch>, Refusal> {
        self.cross_epoch(course);
        let engine = self.engine;
        let stream = Arc::clone(&course.stream);
        let failed = |error| engine.read_failed(&stream, error);
        let inside = course.position < course.end;
        // Damage may have reached beyond the end.
        if course.position > course.end || (!inside && course.record >= course.end_record) {
            return course.check_end().map(|()| None);
        }
        if let Some(end) = engine
            .damage_end(&course.stream, course.position)
            .map_err(failed)?
        {
            self.pass_damage(course, end)?;
            return Ok(Some(Stretch::Done));
        }
        let limit = if inside { course.end } else { u64::MAX };
        let (epoch_end, visible) = {
            let state = course.stream.lock();
            (
                offsets::epoch_end_after(&state, course.position),
                state.visible.tail,
            )
        };
        let end = limit.min(epoch_end).min(visible);
        let end = engine
            .pieces_end(&course.stream, course.position, end)
            .map_err(failed)?;
        let end = engine
            .damage_start(&course.stream, course.position, end)
            .map_err(failed)?;
        if end <= course.position {
            return Err(number_of_another(course.to, course.base));
        }
        self.read_stretch(course, end).map(Some)
    }

    /// Notes the gap of an epoch that begins here and that the range goes into.
    fn cross_epoch(&mut self, course: &mut Course) {
        let gap = offsets::gap_at(&course.stream.lock(), &self.engine.losses, course.position);
        let crossed = gap.filter(|gap| {
            let within = course.position < course.end || gap.to.epoch <= course.end_epoch;
            gap.to.epoch > course.offset.epoch && within
        });
        if let Some(gap) = crossed {
            course.offset = gap.to;
            self.gaps.push((course.number, gap));
        }
    }

    /// Notes damage and goes behind it, to the end of the range at most.
    fn pass_damage(&mut self, course: &mut Course, end: u64) -> Result<(), Refusal> {
        let engine = self.engine;
        let records = engine
            .records_at(&course.stream, end)
            .map_err(|error| engine.read_failed(&course.stream, error))?;
        let (from, to) = {
            let state = course.stream.lock();
            let to = offsets::offset_before(&state, &engine.losses, end);
            (course.offset, to)
        };
        let gap = Gap {
            from,
            to,
            reason: offsets::GapReason::Corruption,
            certain: true,
        };
        self.gaps.push((course.number, gap));
        course.position = end;
        course.offset = to;
        (course.record, course.base) = (records, records);
        Ok(())
    }

    /// Turns the appends up to `end` into rows, as far as the window goes.
    fn read_stretch(&mut self, course: &mut Course, end: u64) -> Result<Stretch, Refusal> {
        let epoch = {
            let state = course.stream.lock();
            offsets::offset_before(&state, &self.engine.losses, course.position).epoch
        };
        while course.position < end && !self.range_is_done(course) {
            self.check_wanted()?;
            let mut block = std::mem::take(&mut self.block);
            let result = match self.pull(course, end, &mut block) {
                Ok(true) => self.take_block(course, &block, epoch),
                Ok(false) => Ok(self.stop_at(course)),
                Err(error) => Err(self.engine.read_failed(&course.stream, error)),
            };
            self.block = block;
            if result.is_err() {
                self.held = None;
            }
            if let Stretch::Full = result? {
                return Ok(Stretch::Full);
            }
        }
        Ok(Stretch::Done)
    }

    /// Fills the block from where the range is. `false`: enough was looked through for this window.
    fn pull(&mut self, course: &Course, end: u64, block: &mut Block) -> io::Result<bool> {
        let wanted = Some((course.stream.id, course.position));
        if self.held == wanted && block.entries().last().is_some_and(|last| last.end <= end) {
            return Ok(true);
        }
        if self.has_looked_enough() {
            return Ok(false);
        }
        (self.held, self.ends_of) = (None, None);
        self.engine
            .pull(&course.stream, course.position, end, block)?;
        self.held = wanted;
        let last = block.entries().last().map_or(0, |last| last.end);
        self.looked_through += last.saturating_sub(course.position);
        Ok(true)
    }

    fn stop_at(&mut self, course: &Course) -> Stretch {
        self.next = Some(Next {
            range: course.number,
            place: Place {
                offset: course.offset,
                number: course.record,
            },
        });
        Stretch::Full
    }
}

impl Course {
    /// Up to which record an append belongs to the range.
    #[inline]
    pub(super) fn records_wanted(&self, entry: &IndexEntry) -> Result<u64, Refusal> {
        if self.record > entry.records || entry.records < self.base {
            let place = Place {
                offset: self.offset,
                number: self.record,
            };
            return Err(number_of_another(place, self.base));
        }
        if self.position < self.end {
            return Ok(entry.records);
        }
        if self.end_record > entry.records {
            return Err(number_of_another(self.to, self.base));
        }
        Ok(self.end_record)
    }

    /// Whether the end is what the client thought it was: that record at that offset.
    fn check_end(&self) -> Result<(), Refusal> {
        let named = self.position == self.end && self.end_record > 0;
        if named && self.record > self.end_record {
            return Err(number_of_another(self.to, self.base));
        }
        Ok(())
    }
}

/// Finds both ends of a range.
fn begin(
    engine: &Engine,
    number: usize,
    range: &Range,
    stream: &Arc<Stream>,
) -> Result<(Course, Option<Gap>), Refusal> {
    let failed = |error| engine.read_failed(stream, error);
    let start = engine.reading(stream).resolve_boundary(range.from.offset)?;
    let (end, offset) = {
        let state = stream.lock();
        let end = offsets::resolve(&state, &engine.losses, range.to.offset)?;
        let offset = match (start.gap, range.from.offset) {
            (Some(gap), _) => gap.to,
            (None, Offset::START) => offsets::offset_before(&state, &engine.losses, 0),
            (None, offset) => offset,
        };
        (end, offset)
    };
    let records = engine.records_at(stream, start.position).map_err(failed)?;
    let record = match start.gap {
        Some(_) => records,
        None if range.from.number >= records => range.from.number,
        None => return Err(number_of_another(range.from, records)),
    };
    if end.position < start.position && start.gap.is_none() {
        return Err(Refusal::with(
            ErrorCode::BadRequest,
            "The range ends before it begins.",
        ));
    }
    let checked = end.gap.is_some() || end.position == stream.lock().visible.tail;
    if !checked && !engine.is_boundary(stream, end.position)? {
        engine.doubt(stream, end.position).map_err(failed)?;
        return Err(Refusal::with(
            ErrorCode::OffsetInvalid,
            "The range does not end where an append of this stream ends.",
        ));
    }
    // An end in an older epoch than the bytes there: nothing behind the position belongs to the range.
    let end_record = match end.gap {
        Some(_) => 0,
        None => range.to.number,
    };
    let mut end_gap = end.gap.filter(|gap| gap.certain);
    let mut start_gap = start.gap;
    if let (Some(gap), Some(certain)) = (&mut start_gap, end_gap)
        && gap.to == certain.to
    {
        // All of the range is lost: that is one gap.
        gap.certain = true;
        end_gap = None;
    }
    let course = Course {
        number,
        stream: Arc::clone(stream),
        json: stream.content_type.media == Media::Json,
        position: start.position,
        offset,
        record,
        base: records,
        end: end.position,
        end_record,
        end_epoch: range.to.offset.epoch,
        end_gap,
        to: range.to,
    };
    Ok((course, start_gap))
}

fn number_of_another(place: Place, records: u64) -> Refusal {
    Refusal::with(
        ErrorCode::OffsetInvalid,
        format!(
            "Record {} is not at {}, which begins with record {records}.",
            place.number, place.offset
        ),
    )
}

/// Says which of several ranges an error is about.
fn name_range(undone: Undone, number: usize, range: &Range) -> Undone {
    undone.saying(|sentence| format!("ranges[{number}] ({:?}): {sentence}", range.stream))
}
