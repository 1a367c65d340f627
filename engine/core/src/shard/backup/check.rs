//! Checking copied bytes against their index, append by append, before a backup may call itself whole.
//!
//! Reads the copy, not the source: what is checked is what a restore will find. Memory is one block of index
//! entries and one window of bytes, however large an append is.

use std::io;

use crate::io::{DiskFile, read_exact_at};
use crate::log::index::read_entries;
use crate::model::{Extent, IndexEntry};

const BLOCK_ENTRIES: u32 = 4096;
const WINDOW_BYTES: u64 = 1 << 20;

/// A range of a stream whose bytes are not what was appended.
#[derive(Debug, PartialEq, Eq)]
pub struct Bad {
    pub start: u64,
    pub end: u64,
    pub what: String,
}

/// Calls `bad` for every append of the extent that does not match its index entry. What cannot be judged any more,
/// because the index is damaged or a file is short, is one bad range up to the extent's end.
pub fn check_extent(
    data: &dyn DiskFile,
    index: &dyn DiskFile,
    extent: &Extent,
    bad: &mut dyn FnMut(Bad),
) -> io::Result<()> {
    let mut walk = Walk {
        extent,
        window: Window {
            file: data,
            bytes: Vec::new(),
            position: 0,
        },
        at: extent.start,
        records: extent.base_records,
        time_ms: 0,
    };
    let judged = walk.all(index, bad);
    let (start, end) = (walk.at, extent.end());
    match judged {
        Ok(()) if start < end => bad(Bad {
            start,
            end,
            what: "the index ends before the bytes do".to_owned(),
        }),
        Ok(()) => {}
        Err(error) if is_damage(&error) => bad(Bad {
            start,
            end,
            what: error.to_string(),
        }),
        Err(error) => return Err(error),
    }
    Ok(())
}

fn is_damage(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData
    )
}

struct Walk<'a> {
    extent: &'a Extent,
    window: Window<'a>,
    /// Everything before this position has been judged.
    at: u64,
    records: u64,
    time_ms: u64,
}

impl Walk<'_> {
    fn all(&mut self, index: &dyn DiskFile, bad: &mut dyn FnMut(Bad)) -> io::Result<()> {
        let mut number = 0;
        while number < self.extent.index_count {
            let count = BLOCK_ENTRIES.min(self.extent.index_count - number);
            for entry in read_entries(index, self.extent.index_position, number, count)? {
                self.one(&entry, bad)?;
            }
            number += count;
        }
        Ok(())
    }

    fn one(&mut self, entry: &IndexEntry, bad: &mut dyn FnMut(Bad)) -> io::Result<()> {
        let forward = entry.end > self.at && entry.end <= self.extent.end();
        if !forward || entry.records < self.records || entry.time_ms < self.time_ms {
            let what = format!("an index entry that ends at {} goes back", entry.end);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let from = self.extent.file_position + (self.at - self.extent.start);
        let file_end = self.extent.file_position + self.extent.len;
        if self.window.crc(from, entry.end - self.at, file_end)? != entry.crc {
            bad(Bad {
                start: self.at,
                end: entry.end,
                what: "the bytes fail their checksum".to_owned(),
            });
        }
        (self.at, self.records, self.time_ms) = (entry.end, entry.records, entry.time_ms);
        Ok(())
    }
}

/// Bytes read ahead, in ascending order.
struct Window<'a> {
    file: &'a dyn DiskFile,
    bytes: Vec<u8>,
    position: u64,
}

impl Window<'_> {
    /// Checksum of `len` bytes at `from`; nothing from `file_end` on is read.
    fn crc(&mut self, mut from: u64, mut len: u64, file_end: u64) -> io::Result<u32> {
        let mut crc = 0;
        while len > 0 {
            let read_end = self.position + self.bytes.len() as u64;
            if from < self.position || from >= read_end {
                let wanted = WINDOW_BYTES.min(file_end.saturating_sub(from)).max(1);
                self.bytes.resize(wanted as usize, 0);
                self.position = from;
                if let Err(error) = read_exact_at(self.file, &mut self.bytes, from) {
                    self.bytes.clear();
                    return Err(error);
                }
                continue;
            }
            let at = (from - self.position) as usize;
            let count = len.min(read_end - from);
            crc = crc32c::crc32c_append(crc, &self.bytes[at..at + count as usize]);
            from += count;
            len -= count;
        }
        Ok(crc)
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
