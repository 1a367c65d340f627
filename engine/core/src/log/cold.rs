//! Cold storage: the one door to checkpointed bytes and their index.
//!
//! A stream's extents (from the catalog) say which file holds which range; this module turns a position,
//! a record number or a time into bytes and index entries. Below the shard, above `segment`, `pack` and
//! `index`; writing is in `cold::writer`.
//!
//! Invariants:
//! - a read inside the extents is whole or an error, never short and never from beyond an extent;
//! - file lengths and directory listings are never evidence of content: only extents are;
//! - files are unlinked only after the catalog has durably stopped naming them (the caller's order).
//!
//! A reader that holds extents from before a checkpoint can find its pack unlinked (`NotFound`): it fetches
//! the stream's extents again and repeats the read.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

pub use self::block::{Appends, check_one};
pub use self::check::{Checker, Fault, Progress, Trouble, is_damage};
use self::files::{FileKey, OpenFiles};
pub use self::spill::SpillPiece;
pub use self::staged::extent_of;
pub use self::writer::{CheckpointSummary, CheckpointWriter};
use super::index::{self, end_of};
use super::pack::{self, PACKS_DIRECTORY, section_bytes};
use super::pins::Pins;
use super::segment::{self, Part, SEGMENTS_DIRECTORY};
use crate::io::sabotage::{self, Sabotage};
use crate::io::{Disk, DiskFile, read_exact_at};
use crate::model::{Extent, FileRef, IndexEntry, StreamId};

mod adopted;
mod block;
mod check;
mod files;
mod rewrite;
mod segments;
mod spill;
mod staged;
mod writer;

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
#[path = "cold_tests.rs"]
mod tests;

pub const OPEN_FILES_MAX_DEFAULT: usize = 256;

/// What is to be true of the bytes of an extent that were read from a position on.
type PieceCheck<'a> = dyn Fn(&Extent, u64, &[u8]) -> io::Result<()> + 'a;

/// Entries read at once while index entries are iterated.
const ITERATE_ENTRIES: u32 = 4096;

/// A pack on disk and how much of it is still named by the catalog.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackUsage {
    pub number: u32,
    pub live_bytes: u64,
    pub file_bytes: u64,
}

/// Where the bytes at a position lie in one file, for a caller that moves them itself.
pub struct Piece {
    pub file: Arc<dyn DiskFile>,
    pub file_position: u64,
    pub len: u64,
    pub extent: Extent,
}

impl Piece {
    /// Whether the file has `len` bytes of the piece, which begins at `position` of the stream.
    pub fn check_length(&self, position: u64, len: u64) -> io::Result<()> {
        let (file_len, wanted) = (self.file.len()?, self.file_position.saturating_add(len));
        if file_len >= wanted {
            return Ok(());
        }
        let error = io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!(
                "{} ends at byte {file_len}, not {wanted}",
                FileKey::data(self.extent.file).path()
            ),
        );
        Err(Trouble::data(
            &self.extent,
            position,
            position.saturating_add(len),
            &error,
        ))
    }
}

pub struct ColdStore {
    disk: Arc<dyn Disk>,
    files: OpenFiles,
    /// How many files a checkpoint may hold open; the rest of the budget is the readers'.
    write_files_max: usize,
    next_pack: Mutex<u32>,
    spilled: Mutex<spill::Spilled>,
    kept: Mutex<staged::Kept>,
    /// Segment directories whose own creation is known to be durable.
    durable_buckets: Mutex<[bool; 256]>,
    pub pins: Pins,
    /// Segments of removed streams that a pin keeps.
    pinned_segments: Mutex<Vec<(StreamId, u32)>>,
}

impl ColdStore {
    /// Opens the storage, creating its directories. Opens no per-stream file.
    pub fn new(disk: Arc<dyn Disk>, open_files_max: usize) -> io::Result<ColdStore> {
        disk.create_dir_all(SEGMENTS_DIRECTORY)?;
        disk.create_dir_all(PACKS_DIRECTORY)?;
        spill::discard_all(&*disk)?;
        disk.sync_dir("")?;
        let numbers = disk.list(PACKS_DIRECTORY)?;
        let last = numbers
            .iter()
            .filter_map(|entry| pack::parse_name(&entry.name))
            .max();
        let next_pack = match last {
            None => 0,
            Some(number) => number.checked_add(1).ok_or_else(pack_numbers_used_up)?,
        };
        let write_files_max = (open_files_max / 4).max(2);
        Ok(ColdStore {
            files: OpenFiles::new(disk.clone(), open_files_max.saturating_sub(write_files_max)),
            disk,
            write_files_max,
            next_pack: Mutex::new(next_pack),
            spilled: Mutex::default(),
            kept: Mutex::default(),
            durable_buckets: Mutex::new([false; 256]),
            pins: Pins::default(),
            pinned_segments: Mutex::default(),
        })
    }

    /// Reads bytes from `position` on; returns how many, which is less than the buffer only at the end of
    /// the last extent.
    pub fn read(&self, extents: &[Extent], position: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_pieces(extents, position, buffer, &|_, _, _| Ok(()))
    }

    /// Like [`ColdStore::read`]; every append that is read whole matches its checksum, or it is an error.
    pub fn read_checked(
        &self,
        extents: &[Extent],
        position: u64,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
        self.read_pieces(extents, position, buffer, &|extent, from, bytes| {
            self.verify(extent, from, bytes)
        })
    }

    fn read_pieces(
        &self,
        extents: &[Extent],
        position: u64,
        buffer: &mut [u8],
        check: &PieceCheck<'_>,
    ) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let from = position.saturating_add(done as u64);
            let Some((extent, at)) = locate(extents, from)? else {
                break;
            };
            let wanted =
                (buffer.len() - done).min(usize::try_from(extent.len - at).unwrap_or(usize::MAX));
            let piece = &mut buffer[done..done + wanted];
            self.read_piece(extent, at, piece)
                .map_err(|error| Trouble::data(extent, from, from + wanted as u64, &error))?;
            check(extent, from, piece)?;
            done += wanted;
        }
        Ok(done)
    }

    fn read_piece(&self, extent: &Extent, at: u64, piece: &mut [u8]) -> io::Result<()> {
        let key = FileKey::data(extent.file);
        let file = self.files.get(key)?;
        read_exact_at(&*file, piece, extent.file_position.saturating_add(at))
            .map_err(|error| key.explain(error))
    }

    /// The file that holds the byte at `position` and how many bytes follow there. `None` beyond the extents.
    pub fn piece(&self, extents: &[Extent], position: u64) -> io::Result<Option<Piece>> {
        let Some((extent, at)) = locate(extents, position)? else {
            return Ok(None);
        };
        let trouble = |error| Trouble::data(extent, position, position.saturating_add(1), &error);
        let file = self
            .files
            .get(FileKey::data(extent.file))
            .map_err(trouble)?;
        let file_position = extent.file_position.saturating_add(at);
        Ok(Some(Piece {
            file,
            file_position,
            len: extent.len - at,
            extent: *extent,
        }))
    }

    /// First entry with `end >= position`.
    pub fn entry_at_or_after(
        &self,
        extents: &[Extent],
        position: u64,
    ) -> io::Result<Option<IndexEntry>> {
        let from = extents.partition_point(|extent| end_of(extent) < position);
        self.first_entry(&extents[from..], &|entry| entry.end < position)
    }

    /// Last entry with `end <= position`: the boundary a window may end on.
    pub fn entry_at_or_before(
        &self,
        extents: &[Extent],
        position: u64,
    ) -> io::Result<Option<IndexEntry>> {
        let upto = extents.partition_point(|extent| extent.start < position);
        // The extent that contains the position may have no entry before it; then the one before has.
        for extent in extents[..upto].iter().rev() {
            let after = self.search(extent, &|entry| entry.end <= position)?.0;
            if let Some(number) = after.checked_sub(1) {
                return self.entry(extent, number).map(Some);
            }
        }
        Ok(None)
    }

    /// First entry with `records >= records`: the append that holds that record.
    pub fn entry_by_records(
        &self,
        extents: &[Extent],
        records: u64,
    ) -> io::Result<Option<IndexEntry>> {
        let upto = extents.partition_point(|extent| extent.base_records < records);
        self.first_entry(&extents[upto.saturating_sub(1)..], &|entry| {
            entry.records < records
        })
    }

    /// First entry with `time_ms >= time_ms`.
    pub fn entry_by_time(
        &self,
        extents: &[Extent],
        time_ms: u64,
    ) -> io::Result<Option<IndexEntry>> {
        // Extents carry no time: halve by the last entry of each.
        let (mut low, mut high) = (0, extents.len());
        while low < high {
            let middle = low + (high - low) / 2;
            let extent = &extents[middle];
            let before = match extent.index_count.checked_sub(1) {
                Some(last) => self.entry(extent, last)?.time_ms < time_ms,
                None => false,
            };
            if before {
                low = middle + 1
            } else {
                high = middle
            }
        }
        self.first_entry(&extents[low..], &|entry| entry.time_ms < time_ms)
    }

    /// Entries with `end > from_position` in order, at most `limit`: go on from the last one's `end`.
    pub fn entries(
        &self,
        extents: &[Extent],
        from_position: u64,
        limit: usize,
    ) -> io::Result<Vec<IndexEntry>> {
        let mut entries = Vec::new();
        let from = extents.partition_point(|extent| end_of(extent) <= from_position);
        for extent in &extents[from..] {
            let mut number = self.search(extent, &|entry| entry.end <= from_position)?.0;
            while number < extent.index_count && entries.len() < limit {
                let wanted = u32::try_from(limit - entries.len()).unwrap_or(u32::MAX);
                let count = wanted.min(extent.index_count - number).min(ITERATE_ENTRIES);
                let block = self.read_index(extent, number, count)?;
                block
                    .iter()
                    .try_for_each(|entry| index::check_inside(extent, entry))
                    .map_err(|error| Trouble::index(extent, &error))?;
                entries.extend(block);
                number += count;
            }
            if entries.len() >= limit {
                break;
            }
        }
        Ok(entries)
    }

    /// Starts a checkpoint. One at a time: two would write to the same segments. `meanwhile` is called again and again.
    pub fn begin_checkpoint<'a>(&'a self, meanwhile: &'a dyn Fn()) -> CheckpointWriter<'a> {
        CheckpointWriter::new(self, meanwhile)
    }

    /// Unlinks the segment files of a removed stream (packs: see [`pack_release`]). The catalog must have
    /// durably forgotten the extents, and no fork may use them.
    pub fn remove_stream(&self, extents: &[Extent]) -> io::Result<()> {
        let segments = extents.iter().filter_map(|extent| match extent.file {
            FileRef::Segment { owner, number } => Some((owner, number)),
            FileRef::Pack { .. } | FileRef::Spill { .. } => None,
        });
        if self.pins.files.defers() {
            self.pinned_segments.lock().extend(segments);
            return Ok(());
        }
        for (owner, number) in segments {
            self.remove_segment(owner, number)?;
        }
        Ok(())
    }

    /// Unlinks the segments that a pin has kept.
    pub fn remove_unpinned(&self) -> io::Result<()> {
        let segments = std::mem::take(&mut *self.pinned_segments.lock());
        for (owner, number) in segments {
            self.remove_segment(owner, number)?;
        }
        Ok(())
    }

    fn remove_segment(&self, owner: StreamId, number: u32) -> io::Result<()> {
        let file = FileRef::Segment { owner, number };
        self.remove_file(FileKey {
            file,
            part: Part::Data,
        })?;
        self.remove_file(FileKey {
            file,
            part: Part::Index,
        })
    }

    /// Unlinks a pack without live bytes.
    pub fn remove_pack(&self, number: u32) -> io::Result<()> {
        self.remove_file(FileKey::data(FileRef::Pack { number }))
    }

    fn remove_file(&self, key: FileKey) -> io::Result<()> {
        self.files.forget(key);
        match self.disk.remove(&key.path()) {
            // Removed before a crash that came before the caller could note it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(key.explain(error)),
            Ok(()) => Ok(()),
        }
    }

    /// Every pack on disk with its live bytes from the catalog, but for stages and what was adopted from them. A
    /// pack that the catalog does not name has none: it is dead, or left by a checkpoint that did not finish. To be
    /// called by the thread that runs checkpoints, between a catalog commit and the next `begin_checkpoint`: a pack
    /// being written is not named yet.
    pub fn pack_usage(&self, live: &[(u32, u64)]) -> io::Result<Vec<PackUsage>> {
        let live: BTreeMap<u32, u64> = live.iter().copied().collect();
        let entries = self.disk.list(PACKS_DIRECTORY)?;
        // Asked behind the listing: a stage that is in it was kept before.
        let kept = self.kept.lock();
        Ok(entries
            .iter()
            .filter_map(|entry| {
                let number = pack::parse_name(&entry.name).filter(|number| !kept.holds(*number))?;
                let live_bytes = live.get(&number).copied().unwrap_or(0);
                Some(PackUsage {
                    number,
                    live_bytes,
                    file_bytes: entry.len,
                })
            })
            .collect())
    }

    /// Which streams have a section in a pack, sorted. A stream that has left the pack since is still
    /// listed: its extents tell.
    pub fn pack_streams(&self, number: u32) -> io::Result<Vec<StreamId>> {
        let file = self.files.get(FileKey::data(FileRef::Pack { number }))?;
        let mut streams = Vec::new();
        pack::walk(&*file, number, &mut |section| streams.push(section.stream))?;
        streams.sort_unstable();
        streams.dedup();
        Ok(streams)
    }

    /// Unlinks segments for which `is_live` says no: left by a checkpoint that died before its stream was
    /// removed, or by a crash between catalog commit and unlink. Returns how many files went. Must not
    /// run beside a checkpoint, whose new segments no catalog names yet.
    pub fn sweep_segments(
        &self,
        is_live: &mut dyn FnMut(StreamId, u32) -> bool,
    ) -> io::Result<u64> {
        let mut removed = 0;
        for bucket in self.disk.list(SEGMENTS_DIRECTORY)? {
            if !bucket.is_dir {
                continue;
            }
            for entry in self
                .disk
                .list(&format!("{SEGMENTS_DIRECTORY}/{}", bucket.name))?
            {
                if let Some((owner, number, part)) = segment::parse_name(&entry.name)
                    && !is_live(owner, number)
                {
                    self.remove_file(FileKey {
                        file: FileRef::Segment { owner, number },
                        part,
                    })?;
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }

    /// The first entry of `extents` for which `before` is false; usually found in the first extent.
    fn first_entry(
        &self,
        extents: &[Extent],
        before: &dyn Fn(&IndexEntry) -> bool,
    ) -> io::Result<Option<IndexEntry>> {
        for extent in extents {
            if let (_, Some(entry)) = self.search(extent, before)? {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    fn search(
        &self,
        extent: &Extent,
        before: &dyn Fn(&IndexEntry) -> bool,
    ) -> io::Result<(u32, Option<IndexEntry>)> {
        let key = FileKey::index(extent.file);
        let search = || {
            let file = self.files.get(key)?;
            index::search(&*file, extent, before).map_err(|error| key.explain(error))
        };
        search().map_err(|error| Trouble::index(extent, &error))
    }

    fn entry(&self, extent: &Extent, number: u32) -> io::Result<IndexEntry> {
        let block = self.read_index(extent, number, 1)?;
        let entry = block.first().copied().ok_or(io::ErrorKind::UnexpectedEof)?;
        index::check_inside(extent, &entry).map_err(|error| Trouble::index(extent, &error))?;
        Ok(entry)
    }

    fn read_index(&self, extent: &Extent, first: u32, count: u32) -> io::Result<Vec<IndexEntry>> {
        let mut entries = Vec::new();
        self.read_index_into(extent, first, count, &mut Vec::new(), &mut entries)?;
        Ok(entries)
    }

    fn read_index_into(
        &self,
        extent: &Extent,
        first: u32,
        count: u32,
        bytes: &mut Vec<u8>,
        entries: &mut Vec<IndexEntry>,
    ) -> io::Result<()> {
        let key = FileKey::index(extent.file);
        let mut read = || {
            let file = self.files.get(key)?;
            index::read_entries_into(&*file, extent.index_position, first, count, bytes, entries)
                .map_err(|error| key.explain(error))
        };
        read().map_err(|error| Trouble::index(extent, &error))
    }
}

/// What removing `extents` takes from the packs, for `Catalog::commit`.
pub fn pack_release(extents: &[Extent]) -> Vec<(u32, i64)> {
    extents
        .iter()
        .filter_map(|extent| match extent.file {
            FileRef::Pack { number } => Some((number, -live_bytes(extent))),
            FileRef::Segment { .. } | FileRef::Spill { .. } => None,
        })
        .collect()
}

fn live_bytes(extent: &Extent) -> i64 {
    i64::try_from(section_bytes(extent.len, extent.index_count)).unwrap_or(i64::MAX)
}

fn pack_numbers_used_up() -> io::Error {
    io::Error::other("all pack numbers are used")
}

/// The extent with the byte at `position` and the offset in it; `None` beyond the last extent.
fn locate(extents: &[Extent], position: u64) -> io::Result<Option<(&Extent, u64)>> {
    let number = extents.partition_point(|extent| end_of(extent) <= position);
    let Some(extent) = extents.get(number) else {
        return Ok(None);
    };
    match position.checked_sub(extent.start) {
        Some(at) if sabotage::is(Sabotage::StaleExtent) => {
            let stale = &extents[number.saturating_sub(1)];
            Ok(Some((if at < stale.len { stale } else { extent }, at)))
        }
        Some(at) => Ok(Some((extent, at))),
        None => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "position {position} lies before the extent that starts at {}",
                extent.start
            ),
        )),
    }
}
