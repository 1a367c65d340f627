//! Moving what lies in packs: into fewer sections, or out of a pack that is mostly dead.
//!
//! Part of the writer, whose invariants hold: bytes are copied only if they match their checksums; if not, they stay
//! where they are and the summary names the stream.

use std::collections::HashSet;
use std::io;

use super::files::FileKey;
use super::writer::{CheckpointWriter, Run, is_small, next_number};
use crate::io::read_exact_at;
use crate::log::index::{INDEX_ENTRY_BYTES, check_bytes, decode_all, read_entries};
use crate::log::segment::SEGMENT_MIN_BYTES;
use crate::model::{Extent, FileRef, IndexEntry, StreamId};

/// No small section is larger: below `SEGMENT_MIN_BYTES` of bytes, at most one index entry for each. A catalog
/// entry that says otherwise is damaged and must not make us allocate what it says.
const SECTION_READ_MAX_BYTES: u64 = SEGMENT_MIN_BYTES * (2 + INDEX_ENTRY_BYTES as u64);

/// How much of a large section is held in memory while it moves; one larger append is held whole.
const MOVE_BYTES: u64 = 4 << 20;
/// Index entries of a large section looked at together.
const MOVE_ENTRIES: u32 = 32 * 1024;

impl CheckpointWriter<'_> {
    /// Copies all small pack extents of a stream into a new pack, or into a segment if they are big enough, and large
    /// ones out of the packs in `leaving`, so that those packs can be unlinked.
    pub fn rewrite(
        &mut self,
        stream: StreamId,
        extents: &mut Vec<Extent>,
        leaving: &HashSet<u32>,
    ) -> io::Result<()> {
        self.guard(|writer| writer.rewrite_runs(stream, extents, leaving))
    }

    fn rewrite_runs(
        &mut self,
        stream: StreamId,
        extents: &mut Vec<Extent>,
        leaving: &HashSet<u32>,
    ) -> io::Result<()> {
        let number_floor = next_number(stream, extents);
        let mut rest: &[Extent] = extents;
        let mut rewritten: Vec<Extent> = Vec::with_capacity(extents.len());
        while let Some(first) = rest.first() {
            let run_len = rest.iter().take_while(|extent| is_small(extent)).count();
            if run_len == 0 {
                rest = &rest[1..];
                if !leaves(first, leaving)
                    || !self.move_large(stream, first, number_floor, &mut rewritten)?
                {
                    rewritten.push(*first);
                }
                continue;
            }
            let (old, behind) = rest.split_at(run_len);
            rest = behind;
            let Some(run) = self.load(stream, old)? else {
                rewritten.extend_from_slice(old);
                continue;
            };
            if run.bytes.len() as u64 >= SEGMENT_MIN_BYTES {
                self.write_segment(stream, &mut rewritten, number_floor, run.pending())?;
            } else {
                rewritten.push(self.write_pack(stream, None, run.pending())?);
            }
            self.account(old, -1);
        }
        *extents = rewritten;
        Ok(())
    }

    /// Reads pack extents back and checks them; `None` (and the stream noted as damaged) if they do not check.
    pub(super) fn load(&mut self, stream: StreamId, extents: &[Extent]) -> io::Result<Option<Run>> {
        let Some(first) = extents.first() else {
            return Ok(Some(Run {
                start: 0,
                base_records: 0,
                bytes: Vec::new(),
                index: Vec::new(),
            }));
        };
        // A stream added twice in one checkpoint has bytes in the pack that is still buffered.
        if let Some(pack) = &mut self.pack
            && extents.iter().any(|extent| {
                extent.file
                    == FileRef::Pack {
                        number: pack.number(),
                    }
            })
        {
            pack.flush()?;
        }
        let mut run = Run {
            start: first.start,
            base_records: first.base_records,
            bytes: Vec::new(),
            index: Vec::new(),
        };
        for extent in extents {
            let Some((bytes, index)) = self.load_section(extent)? else {
                self.damaged.insert(stream);
                return Ok(None);
            };
            run.bytes.extend_from_slice(&bytes);
            run.index.extend_from_slice(&index);
        }
        Ok(Some(run))
    }

    /// One read for bytes and index, which lie side by side in a pack. `None` is damage: missing, short,
    /// unreadable or failing its checksums. A file that merely cannot be opened now is an error.
    fn load_section(&self, extent: &Extent) -> io::Result<Option<(Vec<u8>, Vec<IndexEntry>)>> {
        let index_bytes = u64::from(extent.index_count) * INDEX_ENTRY_BYTES as u64;
        let Some(index_at) = extent
            .index_position
            .checked_sub(extent.file_position)
            .filter(|at| {
                *at >= extent.len && at.saturating_add(index_bytes) <= SECTION_READ_MAX_BYTES
            })
        else {
            return Ok(None);
        };
        let file = match self.store.files.get(FileKey::data(extent.file)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut section = vec![0u8; (index_at + index_bytes) as usize];
        if read_exact_at(&*file, &mut section, extent.file_position).is_err() {
            return Ok(None);
        }
        let Ok(index) = decode_all(&section[index_at as usize..]) else {
            return Ok(None);
        };
        section.truncate(extent.len as usize);
        let good = check_bytes(extent.start, extent.base_records, &section, &index).is_ok();
        Ok(good.then_some((section, index)))
    }

    /// Copies a large section into segments, piece by piece. `false`: it is damaged and stays where it is.
    fn move_large(
        &mut self,
        stream: StreamId,
        extent: &Extent,
        number_floor: u32,
        rewritten: &mut Vec<Extent>,
    ) -> io::Result<bool> {
        // All of it is looked at before any of it moves: half a section cannot stay behind.
        if !self.each_piece(extent, &mut |_, _| Ok(()))? {
            self.damaged.insert(stream);
            return Ok(false);
        }
        let moved = self.each_piece(extent, &mut |writer, run| {
            writer.write_segment(stream, rewritten, number_floor, run.pending())
        })?;
        if !moved {
            return Err(io::Error::other(
                "a section that was whole a moment ago is not",
            ));
        }
        self.account(std::slice::from_ref(extent), -1);
        Ok(true)
    }

    /// Visits a section in pieces that end with an append, each checked. `false`: one does not check.
    fn each_piece(
        &mut self,
        extent: &Extent,
        visit: &mut dyn FnMut(&mut Self, &Run) -> io::Result<()>,
    ) -> io::Result<bool> {
        let key = FileKey::data(extent.file);
        let file = match self.store.files.get(key) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let (mut number, mut start, mut records) = (0, extent.start, extent.base_records);
        while number < extent.index_count {
            let count = MOVE_ENTRIES.min(extent.index_count - number);
            let Ok(mut index) = read_entries(&*file, extent.index_position, number, count) else {
                return Ok(false);
            };
            let fits = index.partition_point(|entry| entry.end.saturating_sub(start) <= MOVE_BYTES);
            index.truncate(fits.max(1));
            let end = index.last().map_or(start, |entry| entry.end);
            if end <= start || end > extent.end() {
                return Ok(false);
            }
            let mut bytes = vec![0; (end - start) as usize];
            let at = extent.file_position + (start - extent.start);
            if read_exact_at(&*file, &mut bytes, at).is_err()
                || check_bytes(start, records, &bytes, &index).is_err()
            {
                return Ok(false);
            }
            let run = Run {
                start,
                base_records: records,
                bytes,
                index,
            };
            visit(self, &run)?;
            number += run.index.len() as u32;
            start = end;
            records = run.index.last().map_or(records, |entry| entry.records);
        }
        Ok(start == extent.end())
    }
}

fn leaves(extent: &Extent, leaving: &HashSet<u32>) -> bool {
    matches!(extent.file, FileRef::Pack { number } if leaving.contains(&number))
}
