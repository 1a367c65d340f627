//! Whole appends in blocks: bytes and index entries together, for readers that look at every append.
//!
//! The index is read in large pieces and each entry once; the caller compares the checksums while it has the bytes in
//! its hands ([`check_append`]).

use std::io;

use super::check::check_append;
use super::{ColdStore, Trouble, locate};
use crate::log::index::{self, end_of};
use crate::model::{Extent, IndexEntry};

/// Index entries read at once.
const ENTRIES_MAX: u32 = 8192;

impl ColdStore {
    /// Reads the appends from the boundary `position` on into `bytes` and `entries`: as many as `wanted` bytes hold,
    /// one at least, none that ends behind `end`, and none of another extent. Returns the extent; `None` if
    /// `position` is beyond them.
    pub fn read_appends(
        &self,
        extents: &[Extent],
        position: u64,
        end: u64,
        wanted: u64,
        bytes: &mut Vec<u8>,
        entries: &mut Vec<IndexEntry>,
    ) -> io::Result<Option<Extent>> {
        entries.clear();
        let Some((extent, at)) = locate(extents, position)? else {
            return Ok(None);
        };
        let first = match at {
            0 => 0,
            _ => self.search(extent, &|entry| entry.end <= position)?.0,
        };
        // Appends are mostly alike: so many hold the bytes that are wanted, and a few more.
        let mean = (extent.len / u64::from(extent.index_count.max(1))).max(1);
        let guess = u32::try_from(wanted / mean + 8).unwrap_or(ENTRIES_MAX);
        let count = guess.min(ENTRIES_MAX).min(extent.index_count - first);
        let block = self.read_index(extent, first, count)?;
        let mut last = position;
        for entry in block {
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
            entries.push(entry);
        }
        if entries.is_empty() {
            return Ok(Some(*extent));
        }
        // What is there already is overwritten: no need to clear it first.
        bytes.resize((last - position) as usize, 0);
        self.read_piece(extent, at, bytes)
            .map_err(|error| Trouble::data(extent, position, last, &error))?;
        Ok(Some(*extent))
    }
}

/// Compares one append of a block with its checksum.
pub fn check_one(extent: &Extent, append: &[u8], entry: &IndexEntry) -> io::Result<()> {
    let from = entry.end - append.len() as u64;
    check_append(extent, from, append, from, entry)
}
