//! The writing side of cold storage: one checkpoint's pass over its dirty streams.
//!
//! Called by the checkpoint between "these bytes are safe in the WAL" and the catalog commit. Small pieces
//! go to a shared pack, big ones to the stream's own segment; pieces that piled up in packs are
//! merged on the way, so that a stream's extents are segments first and then few packs.
//!
//! Invariants:
//! - bytes are written at an extent's end, never at a file's end: leftovers of a dead checkpoint are overwritten;
//! - nothing inside an extent that the catalog names is ever written to again;
//! - `finish` returns only after all bytes, and the names of new files, are synced; after any error the
//!   whole checkpoint is void: drop the writer (which removes its packs), forget the changed extents, keep the WAL;
//! - bytes are copied out of packs only if they match their checksums. If not, they stay where they are (so
//!   that the damage stays visible) and the summary names the stream;
//! - a bounded number of files is open; a file is synced before it is closed.

use crate::report;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::adopted::AdoptedFiles;
use super::files::FileKey;
use super::segments::SegmentFiles;
use super::staged::extent_of;
use super::{ColdStore, live_bytes};
use crate::log::index::{INDEX_ENTRY_BYTES, check_order, encode, end_of};
use crate::log::pack::{
    PACK_EXTENTS_MAX, PACK_MAX_BYTES, PACKS_DIRECTORY, PackWriter, section_bytes,
};
use crate::log::segment::{SEGMENT_MAX_BYTES, SEGMENT_MIN_BYTES};
use crate::model::{Adopted, Extent, FileRef, IndexEntry, StreamId};

/// What a finished checkpoint wrote.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CheckpointSummary {
    /// Stream bytes written, those moved between files included.
    pub bytes: u64,
    /// Numbers of the new packs.
    pub packs: Vec<u32>,
    /// How many times a piece was written to a segment.
    pub segments: u64,
    /// Changes of live bytes per pack, for `Catalog::commit`.
    pub pack_live: Vec<(u32, i64)>,
    /// Streams with bytes in a pack or segment that could not be read back.
    pub damaged: Vec<StreamId>,
}

/// A run of pack extents, read back and checked.
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) base_records: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) index: Vec<IndexEntry>,
}

/// New bytes of a stream, in order, with their index.
#[derive(Clone, Copy)]
pub(super) struct Pending<'b> {
    start: u64,
    base_records: u64,
    bytes: &'b [u8],
    index: &'b [IndexEntry],
}

pub struct CheckpointWriter<'a> {
    pub(super) store: &'a ColdStore,
    pub(super) pack: Option<PackWriter>,
    segments: SegmentFiles<'a>,
    adopted: AdoptedFiles<'a>,
    /// Called between two pieces of work.
    meanwhile: &'a dyn Fn(),
    pack_live: BTreeMap<u32, i64>,
    pub(super) damaged: BTreeSet<StreamId>,
    summary: CheckpointSummary,
    failed: bool,
}

impl<'a> CheckpointWriter<'a> {
    pub(super) fn new(store: &'a ColdStore, meanwhile: &'a dyn Fn()) -> CheckpointWriter<'a> {
        CheckpointWriter {
            store,
            pack: None,
            segments: SegmentFiles::new(store),
            adopted: AdoptedFiles::new(store, meanwhile),
            meanwhile,
            pack_live: BTreeMap::new(),
            damaged: BTreeSet::new(),
            summary: CheckpointSummary::default(),
            failed: false,
        }
    }

    /// Writes a stream's pending `bytes` with their index entries behind its extents, and updates those in
    /// place. `start` is where the last extent ends. An error voids the whole checkpoint.
    pub fn add(
        &mut self,
        stream: StreamId,
        extents: &mut Vec<Extent>,
        start: u64,
        base_records: u64,
        bytes: &[u8],
        index: &[IndexEntry],
    ) -> io::Result<()> {
        let pending = Pending {
            start,
            base_records,
            bytes,
            index,
        };
        self.guard(|writer| writer.place(stream, extents, pending))
    }

    /// Places a section that a commit has adopted behind a stream's extents: its bytes stay where they are.
    pub fn adopt(
        &mut self,
        stream: StreamId,
        extents: &mut Vec<Extent>,
        start: u64,
        base_records: u64,
        section: &Adopted,
        index: &[IndexEntry],
    ) -> io::Result<()> {
        let extent = extent_of(section, start, base_records);
        self.guard(|writer| {
            check_place(extents, start, base_records, section.len, index)?;
            writer.adopted.place(stream, section, &extent, index)?;
            writer.account(&[extent], 1);
            extents.push(extent);
            Ok(())
        })
    }

    /// A staged pack of which this checkpoint has copied or given up sections: it must not be a stage again.
    pub fn spend(&mut self, pack: u32) -> io::Result<()> {
        self.guard(|writer| {
            writer.adopted.spend(pack);
            Ok(())
        })
    }

    /// Syncs every file written and the directories of new ones. Only after this may the catalog name the extents.
    pub fn finish(mut self) -> io::Result<CheckpointSummary> {
        self.guard(|writer| writer.sync_all())?;
        let mut summary = std::mem::take(&mut self.summary);
        summary.pack_live = std::mem::take(&mut self.pack_live)
            .into_iter()
            .filter(|(_, change)| *change != 0)
            .collect();
        summary.damaged = std::mem::take(&mut self.damaged).into_iter().collect();
        Ok(summary)
    }

    pub(super) fn guard<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> io::Result<T>,
    ) -> io::Result<T> {
        if self.failed {
            return Err(io::Error::other(
                "an earlier error has voided this checkpoint",
            ));
        }
        (self.meanwhile)();
        let result = work(self);
        self.failed = result.is_err();
        result
    }

    fn place(
        &mut self,
        stream: StreamId,
        extents: &mut Vec<Extent>,
        pending: Pending<'_>,
    ) -> io::Result<()> {
        check_pending(extents, &pending)?;
        if pending.bytes.is_empty() {
            return Ok(());
        }
        let run_from = trailing_run(extents);
        let run_bytes: u64 = extents[run_from..].iter().map(|extent| extent.len).sum();
        let many = extents.len() - run_from > PACK_EXTENTS_MAX;
        let big = pending.bytes.len() as u64 >= SEGMENT_MIN_BYTES;
        if !many && !big {
            let extent = self.write_pack(stream, None, pending)?;
            extents.push(extent);
            return Ok(());
        }
        let run = self.load(stream, &extents[run_from..])?;
        let number_floor = next_number(stream, extents);
        match run {
            Some(run) if !big && run_bytes + (pending.bytes.len() as u64) < SEGMENT_MIN_BYTES => {
                // Still small altogether: a file of its own would cost two syncs for a few bytes.
                let extent = self.write_pack(stream, Some(&run), pending)?;
                self.leave_packs(extents, run_from);
                extents.push(extent);
                Ok(())
            }
            Some(run) => {
                self.leave_packs(extents, run_from);
                self.write_segment(stream, extents, number_floor, run.pending())?;
                self.write_segment(stream, extents, number_floor, pending)
            }
            // The damaged run stays in its packs; a segment behind it ends the run, so that it is not
            // read again and does not grow.
            None => self.write_segment(stream, extents, number_floor, pending),
        }
    }

    pub(super) fn leave_packs(&mut self, extents: &mut Vec<Extent>, run_from: usize) {
        self.account(&extents[run_from..], -1);
        extents.truncate(run_from);
    }

    pub(super) fn account(&mut self, extents: &[Extent], sign: i64) {
        for extent in extents {
            if let FileRef::Pack { number } = extent.file {
                *self.pack_live.entry(number).or_default() += sign * live_bytes(extent);
            }
        }
    }

    /// Writes one section: the earlier `run`, if any, and the pending bytes behind it.
    pub(super) fn write_pack(
        &mut self,
        stream: StreamId,
        run: Option<&Run>,
        pending: Pending<'_>,
    ) -> io::Result<Extent> {
        let first = run.map_or(pending, Run::pending);
        let (run_bytes, run_index) =
            run.map_or((&[][..], &[][..]), |run| (&run.bytes[..], &run.index[..]));
        let pack = self.pack_with_room(section_bytes(
            (run_bytes.len() + pending.bytes.len()) as u64,
            (run_index.len() + pending.index.len()) as u32,
        ))?;
        let extent = pack.append(
            stream,
            first.start,
            first.base_records,
            &[run_bytes, pending.bytes],
            &[run_index, pending.index],
        )?;
        self.summary.bytes += extent.len;
        self.account(&[extent], 1);
        Ok(extent)
    }

    fn pack_with_room(&mut self, section: u64) -> io::Result<&mut PackWriter> {
        if let Some(full) = self
            .pack
            .take_if(|pack| pack.position() + section > PACK_MAX_BYTES)
        {
            full.finish()?;
        }
        match &mut self.pack {
            Some(pack) => Ok(pack),
            none => {
                let number = self.store.take_pack_number()?;
                self.summary.packs.push(number);
                Ok(none.insert(PackWriter::create(&*self.store.disk, number)?))
            }
        }
    }

    /// Appends to the stream's last segment where that is possible, else to a new one, and rolls over at
    /// `SEGMENT_MAX_BYTES` on an entry boundary.
    pub(super) fn write_segment(
        &mut self,
        stream: StreamId,
        extents: &mut Vec<Extent>,
        number_floor: u32,
        mut pending: Pending<'_>,
    ) -> io::Result<()> {
        while !pending.index.is_empty() {
            let grown = extents.last().copied().filter(
                |last| matches!(last.file, FileRef::Segment { owner, .. } if owner == stream),
            );
            let room = grown.map_or(SEGMENT_MAX_BYTES, |last| {
                SEGMENT_MAX_BYTES.saturating_sub(last.file_position.saturating_add(last.len))
            });
            let fits = pending
                .index
                .partition_point(|entry| entry.end - pending.start <= room);
            if let Some(last) = grown
                && fits > 0
                && last.index_count.checked_add(fits as u32).is_some()
                && self.may_grow(stream, &last)?
            {
                let (now, later) = pending.split(fits);
                let extent = self.write_piece(last, now)?;
                if let Some(last) = extents.last_mut() {
                    *last = extent;
                }
                pending = later;
                continue;
            }
            // One append larger than a segment still goes into one.
            let fresh_fits = pending
                .index
                .partition_point(|entry| entry.end - pending.start <= SEGMENT_MAX_BYTES)
                .max(1);
            let (now, later) = pending.split(fresh_fits);
            let number = next_number(stream, extents).max(number_floor);
            let empty = Extent {
                start: now.start,
                len: 0,
                file: self.segments.create(stream, number)?,
                file_position: 0,
                index_position: 0,
                index_count: 0,
                base_records: now.base_records,
            };
            extents.push(self.write_piece(empty, now)?);
            pending = later;
        }
        Ok(())
    }

    fn may_grow(&mut self, stream: StreamId, last: &Extent) -> io::Result<bool> {
        let whole = self.segments.open_to_grow(last)?;
        if !whole {
            self.damaged.insert(stream);
        }
        Ok(whole)
    }

    /// Writes bytes and index entries behind `extent`, whose files are open, and returns the grown extent.
    fn write_piece(&mut self, extent: Extent, piece: Pending<'_>) -> io::Result<Extent> {
        let mut encoded = Vec::with_capacity(piece.index.len() * INDEX_ENTRY_BYTES);
        piece
            .index
            .iter()
            .for_each(|entry| encode(entry, &mut encoded));
        let index_at = u64::from(extent.index_count) * INDEX_ENTRY_BYTES as u64;
        self.segments.write(
            FileKey::data(extent.file),
            piece.bytes,
            extent.file_position + extent.len,
        )?;
        self.segments.write(
            FileKey::index(extent.file),
            &encoded,
            extent.index_position + index_at,
        )?;
        self.summary.bytes += piece.bytes.len() as u64;
        self.summary.segments += 1;
        Ok(Extent {
            len: extent.len + piece.bytes.len() as u64,
            index_count: extent.index_count + piece.index.len() as u32,
            ..extent
        })
    }

    fn sync_all(&mut self) -> io::Result<()> {
        if let Some(pack) = self.pack.take() {
            pack.finish()?;
        }
        if !self.summary.packs.is_empty() {
            self.store.disk.sync_dir(PACKS_DIRECTORY)?;
        }
        self.adopted.sync_all()?;
        self.segments.sync_all()
    }
}

impl ColdStore {
    /// Unlinks packs that no catalog names and none will. One that stays is unlinked with the packs without live bytes.
    pub fn remove_void(&self, packs: &mut Vec<u32>) {
        for pack in packs.drain(..) {
            if let Err(error) = self.remove_pack(pack) {
                report!("a pack that was given up could not be removed yet: {error}");
            }
        }
    }
}

/// Of a checkpoint that was not finished: what it has in packs is not named by anybody, and space may be what it lacked.
impl Drop for CheckpointWriter<'_> {
    fn drop(&mut self) {
        self.store.remove_void(&mut self.summary.packs);
    }
}

impl Run {
    pub(super) fn pending(&self) -> Pending<'_> {
        Pending {
            start: self.start,
            base_records: self.base_records,
            bytes: &self.bytes,
            index: &self.index,
        }
    }
}

impl<'b> Pending<'b> {
    /// Cuts after `count` index entries (at least one).
    fn split(self, count: usize) -> (Pending<'b>, Pending<'b>) {
        let (now_index, later_index) = self.index.split_at(count);
        let (end, records) = now_index
            .last()
            .map_or((self.start, self.base_records), |last| {
                (last.end, last.records)
            });
        let (now_bytes, later_bytes) = self.bytes.split_at((end - self.start) as usize);
        (
            Pending {
                bytes: now_bytes,
                index: now_index,
                ..self
            },
            Pending {
                start: end,
                base_records: records,
                bytes: later_bytes,
                index: later_index,
            },
        )
    }
}

/// Whether an extent is one of those that pile up in packs. Large ones were adopted, and stay by themselves.
pub(super) fn is_small(extent: &Extent) -> bool {
    matches!(extent.file, FileRef::Pack { .. }) && extent.len < SEGMENT_MIN_BYTES
}

/// The number of the first extent of the run of small packs at the end.
fn trailing_run(extents: &[Extent]) -> usize {
    extents.len()
        - extents
            .iter()
            .rev()
            .take_while(|extent| is_small(extent))
            .count()
}

/// The first segment number that none of the stream's own extents uses.
pub(super) fn next_number(stream: StreamId, extents: &[Extent]) -> u32 {
    let own = extents.iter().filter_map(|extent| match extent.file {
        FileRef::Segment { owner, number } if owner == stream => Some(number.saturating_add(1)),
        _ => None,
    });
    own.max().unwrap_or(0)
}

/// A caller's mistake here would corrupt a stream silently, so it is refused loudly.
fn check_pending(extents: &[Extent], pending: &Pending<'_>) -> io::Result<()> {
    let len = pending.bytes.len() as u64;
    check_place(
        extents,
        pending.start,
        pending.base_records,
        len,
        pending.index,
    )
}

fn check_place(
    extents: &[Extent],
    start: u64,
    base_records: u64,
    len: u64,
    index: &[IndexEntry],
) -> io::Result<()> {
    let refuse = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
    if let Some(last) = extents.last()
        && end_of(last) != start
    {
        return refuse(format!(
            "bytes start at {start}, extents end at {}",
            end_of(last)
        ));
    }
    check_order(start, base_records, len, index).or_else(refuse)
}
