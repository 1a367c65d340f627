//! From appends to rows: the inner part of a read's walk, where every record passes.
//!
//! Appends of one record with plain columns go in runs, checked, counted and copied in loops of their own; all others
//! one by one. `walk` decides which appends come, this decides which of their records are rows, and where the window
//! ends.

use crate::error::ErrorCode;
use crate::model::{IndexEntry, Offset};
use crate::refusal::Refusal;
use crate::serve::pipeline::arrow::BATCH_ROWS_MAX;
use crate::serve::pipeline::walk::{Course, Next, Stretch, Walk};
use crate::shard::pull::Block;
use crate::shard::tails::Place;
use crate::stream::messages::message_ends_into;

impl Walk<'_> {
    pub(super) fn range_is_done(&self, course: &Course) -> bool {
        course.position >= course.end && course.record >= course.end_record
    }

    pub(super) fn take_block(
        &mut self,
        course: &mut Course,
        block: &Block,
        epoch: u64,
    ) -> Result<Stretch, Refusal> {
        let bytes = block.bytes();
        let from = course.position;
        // The stream's name and the epoch go in once per block and batch.
        let mut run = 0;
        let mut outcome = Ok(Stretch::Done);
        let mut left = block.entries();
        while let [entry, behind @ ..] = left {
            let here = &bytes[(course.position - from) as usize..];
            let singles = self.count_singles(course, left, run);
            if singles > 0 {
                let singles = &left[..singles];
                let (taken, failed) = self.take_singles(course, block, here, singles, epoch);
                run += taken;
                left = &left[taken..];
                if let Some(error) = failed {
                    outcome = Err(error);
                    break;
                }
                continue;
            }
            left = behind;
            let append = &bytes[(course.position - from) as usize..(entry.end - from) as usize];
            if self.ends_of != Some(course.position)
                && let Err(error) = block.check(append, entry)
            {
                self.engine.examine_block(block, &error);
                outcome = Err(self.engine.read_failed(&course.stream, error));
                break;
            }
            match self.take_append(course, append, entry, epoch, &mut run) {
                Ok(Stretch::Done) => {}
                other => {
                    outcome = other;
                    break;
                }
            }
            if self.range_is_done(course) {
                break;
            }
        }
        self.encoder.run(&course.stream.path, epoch, run);
        outcome
    }

    /// How many appends ahead are one row each, all of them wanted, and fit into batch and window.
    fn count_singles(&self, course: &Course, entries: &[IndexEntry], run: usize) -> usize {
        let inside = course.position < course.end && course.record == course.base;
        if !inside || !self.encoder.is_plain() {
            return 0;
        }
        let name = course.stream.path.len();
        let used = self.encoder.bytes() + run * name;
        let mut left = self.read.max_bytes.saturating_sub(used);
        let (mut start, mut base) = (course.position, course.base);
        let mut count = 0;
        for entry in entries.iter().take(self.encoder.room()) {
            let bytes = (entry.end - start) as usize + name + self.encoder.row_bytes();
            if entry.records != base + 1 || bytes > left {
                break;
            }
            left -= bytes;
            (start, base) = (entry.end, entry.records);
            count += 1;
        }
        count
    }

    /// Takes such appends, as far as they are sound. Returns how many, and what was wrong with the next one.
    fn take_singles(
        &mut self,
        course: &mut Course,
        block: &Block,
        bytes: &[u8],
        entries: &[IndexEntry],
        epoch: u64,
    ) -> (usize, Option<Refusal>) {
        let (sound, checked) = block.check_run(bytes, course.position, entries);
        let failed = checked.err().map(|error| {
            self.engine.examine_block(block, &error);
            self.engine.read_failed(&course.stream, error)
        });
        let entries = &entries[..sound];
        let comma = usize::from(course.json);
        self.encoder
            .singles(bytes, course.position, comma, course.record, entries);
        if let Some(last) = entries.last() {
            (course.base, course.record) = (last.records, last.records);
            course.position = last.end;
            course.offset = Offset {
                epoch,
                position: last.end,
            };
        }
        (sound, failed)
    }

    /// One append: usually one row, sometimes many, at the ends of a range some of them.
    #[inline]
    fn take_append(
        &mut self,
        course: &mut Course,
        append: &[u8],
        entry: &IndexEntry,
        epoch: u64,
        run: &mut usize,
    ) -> Result<Stretch, Refusal> {
        let begins = Offset {
            epoch,
            position: course.position,
        };
        let upto = course.records_wanted(entry)?;
        if entry.records - course.base == 1 {
            if course.record < upto {
                let value = &append[..append.len() - usize::from(course.json)];
                self.close_full_batch(course, epoch, run);
                if self.is_over(course, value.len(), *run) {
                    self.end_window(course, begins);
                    return Ok(Stretch::Full);
                }
                self.row(course.json, value);
                self.encoder.append(course.record, entry.time_ms, begins, 1);
                *run += 1;
            }
        } else if course.record < upto
            && let Stretch::Full = self.take_messages(course, append, entry, upto, begins, run)?
        {
            return Ok(Stretch::Full);
        }
        course.base = entry.records;
        course.record = entry.records;
        course.position = entry.end;
        course.offset = Offset {
            epoch,
            position: entry.end,
        };
        Ok(Stretch::Done)
    }

    fn take_messages(
        &mut self,
        course: &mut Course,
        append: &[u8],
        entry: &IndexEntry,
        upto: u64,
        begins: Offset,
        run: &mut usize,
    ) -> Result<Stretch, Refusal> {
        let mut ends = std::mem::take(&mut self.ends);
        let known = self.ends_of.take() == Some(begins.position);
        if !known {
            ends.clear();
            if course.json {
                message_ends_into(append, &mut ends);
            } else {
                self.joined_ends(course, begins.position, append.len(), &mut ends)?;
            }
        }
        if ends.len() as u64 != entry.records - course.base {
            return Err(Refusal::with(
                ErrorCode::Internal,
                format!("The append at {begins} cannot be split into records."),
            ));
        }
        let mut outcome = Stretch::Done;
        let upto = (upto - course.base) as usize;
        let mut from = (course.record - course.base) as usize;
        let comma = usize::from(course.json);
        while from < upto {
            self.close_full_batch(course, begins.epoch, run);
            let mut taken = 0;
            for message in from..upto.min(from + self.encoder.room()) {
                let start = message.checked_sub(1).map_or(0, |before| ends[before]) as usize;
                let value = &append[start..ends[message] as usize - comma];
                if self.is_over(course, value.len(), *run + taken) {
                    outcome = Stretch::Full;
                    break;
                }
                self.row(course.json, value);
                taken += 1;
            }
            self.encoder
                .append(course.record, entry.time_ms, begins, taken);
            *run += taken;
            course.record += taken as u64;
            from += taken;
            if let Stretch::Full = outcome {
                self.end_window(course, begins);
                break;
            }
        }
        (self.ends, self.ends_of) = (ends, Some(begins.position));
        Ok(outcome)
    }

    /// Where the two appends end that a byte stream's fork began with in older directories, under one entry: what its
    /// sub-offset took along, and its body.
    fn joined_ends(
        &self,
        course: &Course,
        position: u64,
        len: usize,
        ends: &mut Vec<u32>,
    ) -> Result<(), Refusal> {
        let owner = self.engine.owner_of(&course.stream, position);
        let (owner, _) = owner.map_err(|error| self.engine.read_failed(&course.stream, error))?;
        let state = owner.lock();
        let forked = state.fork.as_ref().filter(|_| state.start == position);
        let cut = forked.map_or(0, |fork| fork.sub_offset);
        if (1..len as u64).contains(&cut) {
            ends.extend([cut as u32, len as u32]);
        }
        Ok(())
    }

    /// Whether a row with this many bytes is one too many, behind `pending` rows whose names are not encoded yet. The
    /// first row of a window never is.
    #[inline]
    fn is_over(&self, course: &Course, len: usize, pending: usize) -> bool {
        let bytes = self.encoder.bytes() + pending * course.stream.path.len();
        bytes > 0 && bytes + len > self.read.max_bytes
    }

    #[inline]
    fn close_full_batch(&mut self, course: &Course, epoch: u64, run: &mut usize) {
        if self.encoder.room() == 0 {
            self.encoder
                .run(&course.stream.path, epoch, std::mem::take(run));
            self.encoder.close_batch();
            self.expect(course);
        }
    }

    /// Makes room for what the range, the window and the batch have left, about, so that buffers are seldom moved.
    pub(super) fn expect(&mut self, course: &Course) {
        let ahead = usize::try_from(course.end.saturating_sub(course.position));
        let window = self.read.max_bytes.saturating_sub(self.encoder.bytes());
        let most = ahead.unwrap_or(window).min(window);
        if self.encoder.bytes() == 0 {
            // Of the first batch the range itself says it: once, and no more than the answer may have.
            let records = course.to.number.saturating_sub(course.record).max(1);
            let bytes = course.end.saturating_sub(course.position);
            let mean = usize::try_from(bytes.div_ceil(records)).unwrap_or(window);
            let fit = window / (mean + self.encoder.row_bytes()).max(1);
            // A record has a byte at least, whatever the numbers say that a client has sent.
            let there = usize::try_from(records).unwrap_or(most).min(most);
            let rows = fit.min(there).min(BATCH_ROWS_MAX);
            return self.encoder.reserve(rows, (rows * mean).min(most));
        }
        self.encoder
            .reserve(0, most.min(self.encoder.likely_bytes()));
    }

    fn end_window(&mut self, course: &Course, begins: Offset) {
        self.next = Some(Next {
            range: course.number,
            place: Place {
                offset: begins,
                number: course.record,
            },
        });
    }

    #[inline]
    fn row(&mut self, json: bool, value: &[u8]) {
        self.encoder.value(value);
        if self.encoder.wants_key() {
            let path = self.read.key_path.as_ref();
            self.encoder
                .key(|out| json && path.is_some_and(|path| path.extract(value, out)));
        }
    }
}
