//! Zeros in the place of bytes whose index is lost: a segment of their own, with an index that is in order.
//!
//! Searching a stream goes through the indexes of its extents, so a damaged one cannot stay. The range is marked as
//! damaged beside this, and nobody is ever sent the zeros.
//!
//! Invariant: a filler is written to a number that neither an extent nor a file of the stream has.

use std::io;

use crate::io::{Disk, OpenMode, write_all_at};
use crate::log::audit::{Bad, Fault};
use crate::log::index::{self, INDEX_ENTRY_BYTES};
use crate::log::segment::{self, Part, SEGMENTS_DIRECTORY, bucket, bucket_directory, parse_name};
use crate::model::{Extent, FileRef, IndexEntry, StreamId};

const PIECE_BYTES: usize = 1 << 20;

/// Makes segments of zeros for one stream.
pub struct Fillers<'d> {
    disk: &'d dyn Disk,
    owner: StreamId,
    next_number: u32,
}

impl<'d> Fillers<'d> {
    pub fn new(disk: &'d dyn Disk, owner: StreamId, extents: &[Extent]) -> io::Result<Fillers<'d>> {
        let named = extents.iter().filter_map(|extent| match extent.file {
            FileRef::Segment { number, .. } => Some(number),
            _ => None,
        });
        let on_disk = segments_of(disk, owner)?;
        let highest = named.chain(on_disk).max();
        Ok(Fillers {
            disk,
            owner,
            next_number: highest.map_or(0, |number| number.saturating_add(1)),
        })
    }

    /// Zeros for `start..end`, counted as one append.
    fn make(
        &mut self,
        (start, end): (u64, u64),
        base_records: u64,
        records: u64,
        time_ms: u64,
    ) -> io::Result<Extent> {
        let number = self.next_number;
        self.next_number = number
            .checked_add(1)
            .ok_or_else(|| io::Error::other("all segment numbers are used"))?;
        let directory = bucket_directory(bucket(self.owner));
        self.disk.create_dir_all(&directory)?;
        let data = segment::path(self.owner, number, Part::Data);
        let data = self.disk.open(&data, OpenMode::CreateNew)?;
        data.set_len(end - start)?;
        data.sync_all()?;
        let entry = IndexEntry {
            end,
            records,
            time_ms,
            crc: zeros_checksum(end - start),
        };
        let mut encoded = Vec::with_capacity(INDEX_ENTRY_BYTES);
        index::encode(&entry, &mut encoded);
        let index = segment::path(self.owner, number, Part::Index);
        let index = self.disk.open(&index, OpenMode::CreateNew)?;
        write_all_at(&*index, &encoded, 0)?;
        index.sync_all()?;
        self.disk.sync_dir(&directory)?;
        self.disk.sync_dir(SEGMENTS_DIRECTORY)?;
        Ok(Extent {
            start,
            len: end - start,
            file: FileRef::Segment {
                owner: self.owner,
                number,
            },
            file_position: 0,
            index_position: 0,
            index_count: 1,
            base_records,
        })
    }

    /// An extent with fillers in the place of what `bad` says about its index; the rest stays where it is.
    pub fn split(
        &mut self,
        extent: &Extent,
        bad: &[&Bad],
        time_before_ms: u64,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let (mut entry, mut start, mut records) = (0, extent.start, extent.base_records);
        for bad in bad.iter().filter(|bad| bad.fault == Fault::Index) {
            if bad.start > start {
                out.push(part(
                    extent,
                    (entry, bad.entries.0),
                    (start, bad.start),
                    records,
                ));
            }
            let time_ms = bad.time_after_ms.max(time_before_ms);
            let range = (bad.start, bad.end);
            out.push(self.make(range, bad.records_before, bad.records_after, time_ms)?);
            (entry, start, records) = (bad.entries.1, bad.end, bad.records_after);
        }
        if start < extent.end() {
            out.push(part(
                extent,
                (entry, extent.index_count),
                (start, extent.end()),
                records,
            ));
        }
        Ok(())
    }
}

/// Some entries of an extent, as an extent.
fn part(
    extent: &Extent,
    (from_entry, to_entry): (u32, u32),
    (start, end): (u64, u64),
    base_records: u64,
) -> Extent {
    Extent {
        start,
        len: end - start,
        file: extent.file,
        file_position: extent.file_position + (start - extent.start),
        index_position: extent.index_position + u64::from(from_entry) * INDEX_ENTRY_BYTES as u64,
        index_count: to_entry - from_entry,
        base_records,
    }
}

/// Numbers of the segment files that a stream has on disk.
pub fn segments_of(disk: &dyn Disk, owner: StreamId) -> io::Result<Vec<u32>> {
    let entries = match disk.list(&bucket_directory(bucket(owner))) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let own = entries.iter().filter_map(|entry| parse_name(&entry.name));
    Ok(own
        .filter(|(found, _, _)| *found == owner)
        .map(|(_, number, _)| number)
        .collect())
}

fn zeros_checksum(len: u64) -> u32 {
    let zeros = vec![0u8; PIECE_BYTES.min(usize::try_from(len).unwrap_or(PIECE_BYTES))];
    let (mut crc, mut left) = (0, len);
    while left > 0 {
        let piece = left.min(zeros.len() as u64) as usize;
        crc = crc32c::crc32c_append(crc, &zeros[..piece]);
        left -= piece as u64;
    }
    crc
}
