//! Reading: from an offset to bytes. A position is served by the stream that owns it (a fork's source below
//! the fork point), and there by extents, then bytes being checkpointed, then the hot tail.
//!
//! What is copied is checked against its checksums on the way; bytes that the kernel moves are not, they are the
//! scrub's. Damage that is met is looked into at once (`damage`), so that the next try finds it recorded.
//!
//! Nothing here buffers: `fill` copies the next piece into the caller's buffer, so a stalled reader holds
//! neither memory, nor a thread, nor a descriptor.

use std::io;
use std::sync::Arc;

use crate::error::ErrorCode;
use crate::limits::TAIL_RECORDS_MAX;
use crate::log::cold::Piece;
use crate::model::{IndexEntry, Media};
use crate::refusal::Refusal;
use crate::shard::engine::{Engine, Undone};
use crate::shard::marks::Append;
use crate::shard::staged::WholeAppends;
use crate::stream::handle::Stream;
use crate::stream::hot::SharedBytes;
use crate::stream::locate::{Key, Known, Source};

impl Engine {
    /// Copies bytes from `position` on into `buffer`, as many as one piece holds. The caller keeps the range
    /// within what is visible; 0 means that the bytes are not there any more.
    pub fn fill(
        &self,
        stream: &Arc<Stream>,
        position: u64,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
        let (owner, limit) = self.owner_of(stream, position)?;
        self.sound(&owner, || self.fill_from(&owner, limit, position, buffer))
    }

    fn fill_from(
        &self,
        owner: &Arc<Stream>,
        limit: u64,
        position: u64,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
        let room = buffer
            .len()
            .min(usize::try_from(limit - position).unwrap_or(usize::MAX));
        let buffer = &mut buffer[..room];
        let state = owner.lock();
        match state.locate(position) {
            Source::Memory(hot) => Ok(hot.copy(position, buffer)),
            Source::Staged(hot, part) => {
                let end = position.saturating_add(room as u64).min(part.end());
                let appends = WholeAppends::between(hot, position, end);
                drop(state);
                self.fill_staged(owner, &part, &appends, position, buffer)
            }
            Source::Files(extents) => {
                drop(state);
                self.cold.read_checked(&extents, position, buffer)
            }
            Source::Nowhere => Ok(0),
        }
    }

    /// Bytes from `position` on that can be sent as they lie in memory, without a copy; `None` where there are
    /// none (the caller copies with [`Engine::fill`]). The second value bounds how many belong to the stream.
    pub fn shared(
        &self,
        stream: &Arc<Stream>,
        position: u64,
    ) -> io::Result<Option<(SharedBytes, u64)>> {
        let (owner, limit) = self.owner_of(stream, position)?;
        let mut state = owner.lock();
        state.share(position);
        let shared = match state.locate(position) {
            Source::Memory(hot) => hot.shared(position),
            _ => None,
        };
        Ok(shared.map(|bytes| (bytes, limit - position)))
    }

    /// The file that holds the bytes from `position` on, for the kernel to move; `None` if they are in memory.
    pub fn in_file(&self, stream: &Arc<Stream>, position: u64) -> io::Result<Option<Piece>> {
        let (owner, limit) = self.owner_of(stream, position)?;
        self.sound(&owner, || self.look_in_file(&owner, limit, position))
    }

    fn look_in_file(
        &self,
        owner: &Arc<Stream>,
        limit: u64,
        position: u64,
    ) -> io::Result<Option<Piece>> {
        let state = owner.lock();
        match state.locate(position) {
            Source::Memory(_) | Source::Nowhere => Ok(None),
            Source::Staged(_, part) => {
                drop(state);
                self.staged_piece(owner, &part, limit, position).map(Some)
            }
            Source::Files(extents) => {
                drop(state);
                let found = self.cold.piece(&extents, position)?;
                Ok(found.map(|piece| Piece {
                    len: piece.len.min(limit - position),
                    ..piece
                }))
            }
        }
    }

    /// Makes sure that files which hold a range are there and long enough, before somebody is promised its bytes.
    pub fn check_files(&self, stream: &Arc<Stream>, mut position: u64, end: u64) -> io::Result<()> {
        while position < end {
            let (owner, limit) = self.owner_of(stream, position)?;
            let piece = self.sound(&owner, || {
                let piece = self.look_in_file(&owner, limit, position)?;
                let Some(piece) = piece else { return Ok(None) };
                let len = piece.len.min(end - position);
                piece.check_length(position, len).map(|()| Some(len))
            })?;
            position = match piece {
                Some(len) => position.saturating_add(len),
                // In memory here; what was committed behind it may lie in a file.
                None => match owner.lock().next_staged(position) {
                    Some(start) if start < limit => start,
                    // The fork's own bytes follow its source's.
                    _ if limit < end => limit,
                    _ => return Ok(()),
                },
            };
        }
        Ok(())
    }

    /// Reads a whole range; the range must be visible.
    pub fn read_range(
        &self,
        stream: &Arc<Stream>,
        mut position: u64,
        end: u64,
    ) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (end - position) as usize];
        let mut filled = 0;
        while position < end {
            let count = self.fill(stream, position, &mut bytes[filled..])?;
            if count == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "stream bytes are missing",
                ));
            }
            filled += count;
            position += count as u64;
        }
        Ok(bytes)
    }

    /// Reads what `owner` has. A checkpoint may move bytes between a look at the extents and the read: then a
    /// second look finds them. What fails is looked into.
    pub(super) fn sound<T>(
        &self,
        owner: &Arc<Stream>,
        mut look: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let result = match look() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => look(),
            result => result,
        };
        if let Err(error) = &result {
            self.examine(owner, error);
        }
        result
    }

    /// First entry of a stream's own index that reaches the key.
    pub(super) fn own_entry(
        &self,
        stream: &Arc<Stream>,
        key: Key,
    ) -> io::Result<Option<IndexEntry>> {
        self.sound(stream, || self.look_for_entry(stream, key))
    }

    fn look_for_entry(&self, stream: &Arc<Stream>, key: Key) -> io::Result<Option<IndexEntry>> {
        let known = stream.lock().entry(key);
        let (extents, held) = match known {
            Known::Here(entry) => return Ok(entry),
            Known::Perhaps(extents, held) => (extents, held),
        };
        let cold = match key {
            Key::End(end) => self.cold.entry_at_or_after(&extents, end)?,
            Key::Records(records) => self.cold.entry_by_records(&extents, records)?,
            Key::Time(time) => self.cold.entry_by_time(&extents, time)?,
        };
        Ok(cold.or(held))
    }

    /// Last boundary at or below `limit` in the own index of the stream that owns the byte before it.
    pub(super) fn boundary_at_or_before(
        &self,
        stream: &Arc<Stream>,
        limit: u64,
    ) -> io::Result<u64> {
        let (owner, _) = self.owner_of(stream, limit.saturating_sub(1))?;
        self.sound(&owner, || self.look_for_boundary(&owner, limit))
    }

    fn look_for_boundary(&self, owner: &Arc<Stream>, limit: u64) -> io::Result<u64> {
        let known = owner.lock().boundary(limit);
        let (extents, start) = match known {
            Known::Here(boundary) => return Ok(boundary),
            Known::Perhaps(extents, start) => (extents, start),
        };
        // Where an extent ends needs no search.
        let upto = extents.partition_point(|extent| extent.end() < limit);
        if extents
            .get(upto)
            .is_some_and(|extent| extent.end() == limit)
        {
            return Ok(limit);
        }
        let cold = self.cold.entry_at_or_before(&extents, limit)?;
        Ok(cold.map_or(start, |entry| entry.end))
    }

    /// First boundary beyond `position`.
    pub(super) fn boundary_after(&self, stream: &Arc<Stream>, position: u64) -> io::Result<u64> {
        let (owner, limit) = self.owner_of(stream, position)?;
        let entry = self.own_entry(&owner, Key::End(position + 1))?;
        entry
            .map(|entry| entry.end.min(limit))
            .ok_or_else(|| io::Error::other("no index entry behind a visible position"))
    }

    /// Records of the stream up to a boundary.
    pub fn records_at(&self, stream: &Arc<Stream>, position: u64) -> io::Result<u64> {
        if position == 0 {
            return Ok(0);
        }
        let (owner, _) = self.owner_of(stream, position - 1)?;
        if let Some(records) = owner.lock().records_at_seam(position) {
            return Ok(records);
        }
        let entry = self.own_entry(&owner, Key::End(position))?;
        entry
            .map(|entry| entry.records)
            .ok_or_else(|| io::Error::other("no index entry at a visible position"))
    }

    /// Number of the first of the last `count` visible records; `None` where that is the beginning or the tail.
    fn number_of_last(&self, stream: &Arc<Stream>, count: u64) -> Option<u64> {
        let records = stream.lock().visible.records;
        let number = records.saturating_sub(count.min(TAIL_RECORDS_MAX));
        (number > 0 && number < records).then_some(number)
    }

    /// Position where the last `count` visible records begin.
    pub fn position_of_last(&self, stream: &Arc<Stream>, count: u64) -> io::Result<u64> {
        let visible = stream.lock().visible;
        match self.number_of_last(stream, count) {
            Some(number) => self.position_of_record(stream, number),
            None if count == 0 => Ok(visible.tail),
            None => Ok(0),
        }
    }

    /// Whether that takes no long search. If not, it will soon.
    pub fn last_is_at_hand(&self, stream: &Arc<Stream>, count: u64) -> io::Result<bool> {
        let Some(number) = self.number_of_last(stream, count) else {
            return Ok(true);
        };
        let (append, skip) = self.append_with_record(stream, number)?;
        Ok(skip == 0 || self.at_hand(&append))
    }

    /// The append that holds a record, and how many of its messages come before that.
    fn append_with_record(&self, stream: &Arc<Stream>, number: u64) -> io::Result<(Append, u64)> {
        let owner = self.owner_of_record(stream, number)?;
        let entry = self.own_entry(&owner, Key::Records(number + 1))?;
        let end = entry.ok_or_else(no_entry)?.end;
        let start = self.boundary_at_or_before(&owner, end - 1)?;
        let skip = if owner.content_type.media == Media::Json {
            number.saturating_sub(self.records_at(&owner, start)?)
        } else {
            0
        };
        Ok((Append { owner, start, end }, skip))
    }

    /// Position where the record with this number (from 0) begins. Inside an append of several JSON messages
    /// the bytes themselves say where.
    fn position_of_record(&self, stream: &Arc<Stream>, number: u64) -> io::Result<u64> {
        let (append, skip) = self.append_with_record(stream, number)?;
        if self.damage_start(&append.owner, append.start, append.end)? < append.end {
            // Which bytes the record has cannot be told; the reader gets the gap.
            return Ok(append.start);
        }
        self.message_start(&append, skip)?.ok_or_else(no_entry)
    }

    /// Position where the first append at or after a time begins.
    pub fn position_at_time(&self, stream: &Arc<Stream>, time_ms: u64) -> io::Result<u64> {
        let tail = stream.lock().visible.tail;
        let (owner, limit) = self.owner_at_time(stream, time_ms)?;
        let limit = limit.min(tail);
        match self.own_entry(&owner, Key::Time(time_ms))? {
            Some(entry) if entry.end <= limit => self.boundary_at_or_before(&owner, entry.end - 1),
            _ => Ok(limit),
        }
    }

    /// The append that follows `anchor`, which is before the visible tail.
    fn append_behind(&self, stream: &Arc<Stream>, anchor: u64) -> io::Result<Append> {
        let (owner, _) = self.owner_of(stream, anchor)?;
        let end = self.boundary_after(stream, anchor)?;
        Ok(Append {
            owner,
            start: anchor,
            end,
        })
    }

    /// Whether [`Engine::sub_offset_prefix`] takes no long search. If not, it will soon.
    pub fn prefix_is_at_hand(&self, stream: &Arc<Stream>, anchor: u64) -> io::Result<bool> {
        if anchor >= stream.lock().visible.tail || self.damage_end(stream, anchor)?.is_some() {
            return Ok(true);
        }
        Ok(self.at_hand(&self.append_behind(stream, anchor)?))
    }

    /// The first `count` units (bytes, or JSON messages) of the append that follows `anchor`: what a fork with
    /// a sub-offset takes along. Returns the bytes and how many records they are.
    pub fn sub_offset_prefix(
        &self,
        stream: &Arc<Stream>,
        anchor: u64,
        count: u64,
    ) -> Result<(Vec<u8>, u32), Undone> {
        let failed = |error| Undone::refused(self.read_failed(stream, error));
        let invalid = |detail| Undone::refused(Refusal::with(ErrorCode::ForkOffsetInvalid, detail));
        let beyond = || invalid("Stream-Fork-Sub-Offset reaches beyond the append it counts in.");
        let tail = stream.lock().visible.tail;
        if anchor >= tail {
            return Err(beyond());
        }
        if self.damage_end(stream, anchor).map_err(failed)?.is_some() {
            return Err(invalid(
                "The append that Stream-Fork-Sub-Offset counts in is damaged.",
            ));
        }
        let append = self.append_behind(stream, anchor).map_err(failed)?;
        let json = stream.content_type.media == Media::Json;
        let (cut, records) = if json {
            let records = u32::try_from(count).map_err(|_| beyond())?;
            let cut = self.message_start(&append, count).map_err(failed)?;
            (cut.ok_or_else(beyond)?, records)
        } else {
            (anchor.saturating_add(count), 1)
        };
        if cut > append.end.min(tail) {
            return Err(beyond());
        }
        // Nothing is copied that the log has no room for: it would be copied again at every look.
        let len = usize::try_from(cut - anchor).unwrap_or(usize::MAX);
        if len > self.config.append_max_bytes + 1 {
            return Err(Undone::refused(ErrorCode::PayloadTooLarge));
        }
        self.shard.open()?.admit(len, false)?;
        let bytes = self.first_bytes(&append, cut).map_err(failed)?;
        Ok((bytes, records))
    }
}

fn no_entry() -> io::Error {
    io::Error::other("no index entry for a visible record")
}
