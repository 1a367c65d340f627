//! The per-append index: 32 bytes for each append, written once, searched by `pread`.
//!
//! It lies beside a segment or inside a pack and is what makes record boundaries, record numbers,
//! times and checksums available after the WAL is gone. Used by `cold` (searching), `cold::writer`
//! (writing, and checking bytes before they are moved) and by verification.
//!
//! ```text
//! byte   0          8            16         24       28      32   little endian
//!        | end u64  | records u64 | time u64 | crc u32 | check u32 |
//! ```
//! Example: the append `{"a":1},` as the first record of a stream at 1,700,000,000,000 ms is
//! end 8, records 1, time 1700000000000, CRC32C of those 8 bytes, and the
//! CRC32C of the 28 bytes before: a damaged entry would lie about records, times and boundaries.
//!
//! Invariants: within a stream `end` grows strictly, `records` and `time_ms` never fall. Searches rely
//! on that; what is read from disk is checked against its extent before it is believed.

use std::io;

use crate::codec::checksum;
use crate::io::{DiskFile, read_exact_at};
use crate::model::{Extent, IndexEntry};

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;

pub const INDEX_ENTRY_BYTES: usize = 32;
const CHECKED_BYTES: usize = INDEX_ENTRY_BYTES - 4;

/// Entries fetched by the last step of a search: one page.
const BLOCK_ENTRIES: u32 = 128;

pub fn encode(entry: &IndexEntry, out: &mut Vec<u8>) {
    let from = out.len();
    out.extend_from_slice(&entry.end.to_le_bytes());
    out.extend_from_slice(&entry.records.to_le_bytes());
    out.extend_from_slice(&entry.time_ms.to_le_bytes());
    out.extend_from_slice(&entry.crc.to_le_bytes());
    let check = crc32c::crc32c(&out[from..]);
    out.extend_from_slice(&check.to_le_bytes());
}

/// Decodes the first 32 bytes of `bytes`; `None` if there are fewer or they are not an entry.
pub fn decode(bytes: &[u8]) -> Option<IndexEntry> {
    decode_with(bytes, crc32c::crc32c(bytes.get(..CHECKED_BYTES)?))
}

/// The same, given the checksum of the bytes that the entry's `check` is about.
fn decode_with(bytes: &[u8], check: u32) -> Option<IndexEntry> {
    if check != u32_at(bytes, CHECKED_BYTES)? {
        return None;
    }
    Some(IndexEntry {
        end: u64_at(bytes, 0)?,
        records: u64_at(bytes, 8)?,
        time_ms: u64_at(bytes, 16)?,
        crc: u32_at(bytes, 24)?,
    })
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// The position just after an extent.
pub(super) fn end_of(extent: &Extent) -> u64 {
    extent.start.saturating_add(extent.len)
}

pub(super) fn damage(detail: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, detail)
}

/// Reads entries `first .. first + count` of the index at `index_position`. The caller bounds `count`.
pub fn read_entries(
    file: &dyn DiskFile,
    index_position: u64,
    first: u32,
    count: u32,
) -> io::Result<Vec<IndexEntry>> {
    let mut entries = Vec::new();
    read_entries_into(
        file,
        index_position,
        first,
        count,
        &mut Vec::new(),
        &mut entries,
    )?;
    Ok(entries)
}

/// The same into `entries`, by way of `bytes`, for who does it again and again.
pub fn read_entries_into(
    file: &dyn DiskFile,
    index_position: u64,
    first: u32,
    count: u32,
    bytes: &mut Vec<u8>,
    entries: &mut Vec<IndexEntry>,
) -> io::Result<()> {
    // What is there already is overwritten: no need to clear it first.
    bytes.resize(count as usize * INDEX_ENTRY_BYTES, 0);
    read_exact_at(file, bytes, entry_position(index_position, first)?)?;
    entries.clear();
    decode_into(bytes, entries).map_err(|number| {
        damage(format!(
            "index entry {} is damaged",
            u64::from(first) + number as u64
        ))
    })
}

/// Decodes entries that lie side by side; `Err` is the number of the first damaged one.
pub fn decode_all(bytes: &[u8]) -> Result<Vec<IndexEntry>, usize> {
    let mut entries = Vec::new();
    decode_into(bytes, &mut entries).map(|()| entries)
}

fn decode_into(bytes: &[u8], entries: &mut Vec<IndexEntry>) -> Result<(), usize> {
    let (raw, _) = bytes.as_chunks::<INDEX_ENTRY_BYTES>();
    entries.reserve(raw.len());
    let (threes, rest) = raw.as_chunks::<3>();
    for three in threes {
        let [first, second, third] = three;
        let checked = [first, second, third].map(|entry| &entry[..CHECKED_BYTES]);
        for (entry, check) in three.iter().zip(checksum::three(checked)) {
            entries.push(decode_with(entry, check).ok_or(entries.len())?);
        }
    }
    for entry in rest {
        entries.push(decode(entry).ok_or(entries.len())?);
    }
    Ok(())
}

fn entry_position(index_position: u64, entry: u32) -> io::Result<u64> {
    index_position
        .checked_add(u64::from(entry) * INDEX_ENTRY_BYTES as u64)
        .ok_or_else(|| damage(format!("index position {index_position} is out of range")))
}

/// Finds the first entry of an extent's index for which `before` is false (`before` is true for a
/// prefix of the index, false for the rest). Returns its number, and the entry unless it is past the end.
/// Halves by single entries until one block is left, so that a search in a big index touches few pages.
pub fn search(
    file: &dyn DiskFile,
    extent: &Extent,
    before: &dyn Fn(&IndexEntry) -> bool,
) -> io::Result<(u32, Option<IndexEntry>)> {
    let (mut low, mut high) = (0u32, extent.index_count);
    while high - low > BLOCK_ENTRIES {
        let middle = low + (high - low) / 2;
        let mut bytes = [0u8; INDEX_ENTRY_BYTES];
        read_exact_at(
            file,
            &mut bytes,
            entry_position(extent.index_position, middle)?,
        )?;
        let entry = decode(&bytes).ok_or_else(|| {
            damage(format!(
                "index entry {middle} of {:?} is damaged",
                extent.file
            ))
        })?;
        if before(&entry) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    // The entry at `high` is the answer when the whole block is before it, so it is fetched as well.
    let fetched_to = high.saturating_add(1).min(extent.index_count);
    let block = read_entries(file, extent.index_position, low, fetched_to - low)?;
    let offset = block.partition_point(before);
    let found = block.get(offset).copied();
    if let Some(entry) = &found {
        check_inside(extent, entry)?;
    }
    Ok((low + offset as u32, found))
}

/// An entry that does not end inside its extent comes from a damaged index.
pub(super) fn check_inside(extent: &Extent, entry: &IndexEntry) -> io::Result<()> {
    if entry.end > extent.start && entry.end <= end_of(extent) {
        return Ok(());
    }
    Err(damage(format!(
        "index entry ends at {}, outside its extent {}..{} in {:?}",
        entry.end,
        extent.start,
        end_of(extent),
        extent.file
    )))
}

/// What is wrong with index entries for `len` bytes from `start`, if anything is: each must go forward,
/// and the last must end where the bytes end.
pub fn check_order(
    start: u64,
    base_records: u64,
    len: u64,
    index: &[IndexEntry],
) -> Result<(), String> {
    let (mut end, mut records, mut time_ms) = (start, base_records, 0);
    for (number, entry) in index.iter().enumerate() {
        if entry.end <= end || entry.records < records || entry.time_ms < time_ms {
            return Err(format!(
                "index entry {number} goes back: end {} after {end}, records {} after {records}, \
                 time {} after {time_ms}",
                entry.end, entry.records, entry.time_ms
            ));
        }
        (end, records, time_ms) = (entry.end, entry.records, entry.time_ms);
    }
    if end.checked_sub(start) == Some(len) {
        return Ok(());
    }
    Err(format!(
        "index ends at {end}, the {len} bytes from {start} do not"
    ))
}

/// Checks order and checksums of bytes that were read back. `Err` names the first bad append.
pub fn check_bytes(
    start: u64,
    base_records: u64,
    bytes: &[u8],
    index: &[IndexEntry],
) -> Result<(), String> {
    check_order(start, base_records, bytes.len() as u64, index)?;
    let mut from = 0usize;
    for entry in index {
        // In range: `check_order` has proven that every end lies in start ..= start + bytes.len().
        let to = (entry.end - start) as usize;
        if crc32c::crc32c(&bytes[from..to]) != entry.crc {
            return Err(format!(
                "bytes {}..{} fail their checksum",
                start + from as u64,
                entry.end
            ));
        }
        from = to;
    }
    Ok(())
}
