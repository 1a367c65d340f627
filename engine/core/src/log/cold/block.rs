//! Whole appends in blocks: bytes and index entries together, for readers that look at every append.
//!
//! The index is read in large pieces and, by who goes on where the last block ended, without a search; the caller
//! compares the checksums while it has the bytes in its hands ([`check_append`]).

use std::io;

use super::check::check_append;
use super::{ColdStore, Trouble, locate};
use crate::log::index::{self, end_of};
use crate::model::{Extent, IndexEntry};

/// Index entries read at once.
const ENTRIES_MAX: u32 = 8192;

/// Appends of one stream, side by side.
#[derive(Default)]
pub struct Appends {
    pub bytes: Vec<u8>,
    pub entries: Vec<IndexEntry>,
    /// The extent that they were read from, and how many entries of its index lie before the next append.
    reached: Option<(Extent, u32)>,
    /// Entries as they lie in the index.
    raw: Vec<u8>,
}

impl ColdStore {
    /// Reads the appends from the boundary `position` on: as many as `wanted` bytes hold, one at least, none that
    /// ends behind `end`, and none of another extent. Returns the extent; `None` if `position` is beyond them.
    pub fn read_appends(
        &self,
        extents: &[Extent],
        position: u64,
        end: u64,
        wanted: u64,
        appends: &mut Appends,
    ) -> io::Result<Option<Extent>> {
        appends.entries.clear();
        let reached = appends.reached.take();
        let Some((extent, at)) = locate(extents, position)? else {
            return Ok(None);
        };
        // Appends are mostly alike: so many hold the bytes that are wanted, and a few more.
        let mean = (extent.len / u64::from(extent.index_count.max(1))).max(1);
        let guess = u32::try_from(wanted / mean + 8).unwrap_or(ENTRIES_MAX);
        let reached = reached.filter(|(known, _)| known == extent);
        let first = self.entries_from(extent, position, guess, reached, appends)?;
        let (mut last, mut count) = (position, 0);
        for entry in &appends.entries {
            if entry.end <= last || entry.end > end_of(extent) {
                let error = index::damage(format!(
                    "index entry ends at {} behind {last} in {:?}",
                    entry.end, extent.file
                ));
                return Err(Trouble::index(extent, &error));
            }
            if entry.end > end || (entry.end - position > wanted && last > position) {
                break;
            }
            last = entry.end;
            count += 1;
        }
        appends.entries.truncate(count);
        if count == 0 {
            return Ok(Some(*extent));
        }
        appends.reached = Some((*extent, first + count as u32));
        // What is there already is overwritten: no need to clear it first.
        appends.bytes.resize((last - position) as usize, 0);
        self.read_piece(extent, at, &mut appends.bytes)
            .map_err(|error| Trouble::data(extent, position, last, &error))?;
        Ok(Some(*extent))
    }

    /// At most so many entries of an extent's index from the append at `position` on; returns the number of the first.
    fn entries_from(
        &self,
        extent: &Extent,
        position: u64,
        count: u32,
        reached: Option<(Extent, u32)>,
        appends: &mut Appends,
    ) -> io::Result<u32> {
        let read = |first: u32, appends: &mut Appends| {
            let count = count.min(ENTRIES_MAX).min(extent.index_count - first);
            let (raw, entries) = (&mut appends.raw, &mut appends.entries);
            self.read_index_into(extent, first, count, raw, entries)
        };
        if let Some((_, first)) = reached
            && (1..=extent.index_count).contains(&first)
        {
            // The entry before says whether it is the place.
            read(first - 1, appends)?;
            let before = appends.entries.first();
            if before.is_some_and(|before| before.end == position) {
                appends.entries.remove(0);
                return Ok(first);
            }
        }
        let first = if position == extent.start {
            0
        } else {
            self.search(extent, &|entry| entry.end <= position)?.0
        };
        read(first, appends).map(|()| first)
    }
}

/// Compares one append of a block with its checksum.
pub fn check_one(extent: &Extent, append: &[u8], entry: &IndexEntry) -> io::Result<()> {
    let from = entry.end - append.len() as u64;
    check_append(extent, from, append, from, entry)
}
