//! Reading bytes that a commit has adopted and no checkpoint has placed yet: they lie in a staged pack, their index is
//! in memory.
//!
//! Beside `read`, which finds the part. What is copied is checked as cold bytes are; what does not check, on a second
//! look, is recorded on the stream.

use std::io;
use std::sync::Arc;

use crate::log::cold::{Fault, Piece, extent_of, is_damage};
use crate::model::IndexEntry;
use crate::shard::engine::Engine;
use crate::stream::handle::Stream;
use crate::stream::hot::{FilePart, Hot};
use crate::stream::locate::Source;

/// Appends that a read covers whole: what can be checked.
pub struct WholeAppends {
    start: u64,
    entries: Vec<IndexEntry>,
}

impl WholeAppends {
    pub fn between(hot: &Hot, position: u64, end: u64) -> WholeAppends {
        let index = &hot.index;
        let at = index.partition_point(|entry| entry.end <= position);
        let before = at
            .checked_sub(1)
            .map_or(hot.start, |before| index[before].end);
        // A read that begins inside an append can check from the next one on.
        let (first, start) = match index.get(at) {
            Some(entry) if before != position => (at + 1, entry.end),
            _ => (at, position),
        };
        let behind = index.partition_point(|entry| entry.end <= end);
        let entries = index.get(first..behind).unwrap_or(&[]).to_vec();
        WholeAppends { start, entries }
    }

    /// About `wanted` bytes of a part from the boundary `position` on: one append at least, none that ends behind `end`.
    pub fn block(hot: &Hot, part: &FilePart, position: u64, end: u64, wanted: u64) -> WholeAppends {
        let end = end.min(part.end());
        let from = hot.index.partition_point(|entry| entry.end <= position);
        let rest = hot.index.get(from..).unwrap_or(&[]);
        let enough = position.saturating_add(wanted).min(end);
        let count = rest.partition_point(|entry| entry.end <= enough).max(1);
        let within = rest.partition_point(|entry| entry.end <= end);
        WholeAppends {
            start: position,
            entries: rest[..count.min(within)].to_vec(),
        }
    }

    pub fn entries(&self) -> &[IndexEntry] {
        &self.entries
    }

    /// The first one whose bytes do not match their checksum; `bytes` begin at `position`.
    fn first_bad(&self, position: u64, bytes: &[u8]) -> Option<(u64, u64)> {
        let mut start = self.start;
        for entry in &self.entries {
            let (from, to) = ((start - position) as usize, (entry.end - position) as usize);
            if bytes.get(from..to).map(crc32c::crc32c) != Some(entry.crc) {
                return Some((start, entry.end));
            }
            start = entry.end;
        }
        None
    }
}

impl Engine {
    /// Copies bytes of a part from `position` on, and checks the appends that are read whole.
    pub fn fill_staged(
        &self,
        owner: &Arc<Stream>,
        part: &FilePart,
        appends: &WholeAppends,
        position: u64,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
        let room = usize::try_from(part.end() - position).unwrap_or(usize::MAX);
        let count = buffer.len().min(room);
        let buffer = &mut buffer[..count];
        let mut look = || {
            self.cold
                .read_staged(&part.section, position - part.start, buffer)?;
            Ok(appends.first_bad(position, buffer))
        };
        let mut looked: io::Result<Option<(u64, u64)>> = look();
        if !matches!(looked, Ok(None)) {
            looked = look();
        }
        let end = position + count as u64;
        match looked {
            Ok(None) => Ok(count),
            Ok(Some((from, to))) => {
                let error = io::Error::new(io::ErrorKind::InvalidData, "bytes fail their checksum");
                self.record_staged(owner, part, from, to, &error);
                Err(error)
            }
            Err(error) => {
                self.record_staged(owner, part, position, end, &error);
                Err(error)
            }
        }
    }

    /// The file of a part, for the kernel to move its bytes.
    pub fn staged_piece(
        &self,
        owner: &Arc<Stream>,
        part: &FilePart,
        limit: u64,
        position: u64,
    ) -> io::Result<Piece> {
        let at = position - part.start;
        let opened = self.cold.staged_file(&part.section);
        let file = opened.or_else(|_| self.cold.staged_file(&part.section));
        let file = file.inspect_err(|error| {
            self.record_staged(owner, part, position, position + 1, error);
        })?;
        Ok(Piece {
            file,
            file_position: part.section.file_position + at,
            len: (part.section.len - at).min(limit - position),
            extent: extent_of(&part.section, part.start, 0),
        })
    }

    /// Records that appends between `from` and `to` cannot be read back, as far as the part still is where it was.
    fn record_staged(
        &self,
        owner: &Arc<Stream>,
        part: &FilePart,
        from: u64,
        to: u64,
        error: &io::Error,
    ) {
        let missing = error.kind() == io::ErrorKind::NotFound;
        if !missing && !is_damage(error) {
            return;
        }
        let extent = extent_of(&part.section, part.start, 0);
        let whole = Fault::whole(
            &extent,
            false,
            part.section.file_position,
            error.to_string(),
        );
        let range = {
            let state = owner.lock();
            // A checkpoint has placed it meanwhile: whoever reads again finds it in an extent.
            let hot = match state.locate(from) {
                Source::Staged(hot, found) if found.section == part.section => hot,
                _ => return,
            };
            if missing {
                (part.start, part.end())
            } else {
                whole_appends(&hot.index, part, from, to)
            }
        };
        let fault = Fault {
            start: range.0,
            end: range.1,
            byte: part.section.file_position + (range.0 - part.start),
            missing,
            ..whole
        };
        self.record(owner, &[fault]);
    }
}

/// The range of the appends that `from..to` touches.
fn whole_appends(index: &[IndexEntry], part: &FilePart, from: u64, to: u64) -> (u64, u64) {
    let first = index.partition_point(|entry| entry.end <= from);
    let last = index.partition_point(|entry| entry.end < to);
    let start = first.checked_sub(1).map_or(part.start, |at| index[at].end);
    let end = index.get(last).map_or(part.end(), |entry| entry.end);
    (start.max(part.start), end.min(part.end()))
}
