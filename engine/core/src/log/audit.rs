//! The bytes of one stream against their index: every append's checksum, the index's order, the files' lengths.
//!
//! Works on extents as the catalog names them, through the disk door. Used by verification, which reports what is
//! found, by repair, which marks it, and by backup, which looks at its own copy.
//!
//! Invariants:
//! - at most [`PIECE_BYTES`] of a stream and one block of its index are in memory;
//! - what is bad is told by range, on boundaries of appends that are certain.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::io::{Disk, DiskFile, OpenMode, read_exact_at, read_up_to_at};
use crate::log::index::{self, INDEX_ENTRY_BYTES};
use crate::log::pack;
use crate::log::segment::{self, Part};
use crate::model::{Extent, FileRef, IndexEntry, StreamId};

const PIECE_BYTES: usize = 1 << 20;
const BLOCK_ENTRIES: u32 = 4096;
const FILES_OPEN_MAX: usize = 32;

/// What keeps a range from being read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The bytes are not what was written, or not there. Their index is in order.
    Bytes,
    /// Where appends end is not certain.
    Index,
    /// Nothing of the stream is lost, but its section cannot be found from the pack's own side.
    Section,
}

/// A range of a stream that is not whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bad {
    pub fault: Fault,
    /// Which of the stream's extents.
    pub extent: usize,
    pub start: u64,
    pub end: u64,
    /// For `Index`: entries of the extent that are given up, and records and time where certainty begins again.
    pub entries: (u32, u32),
    pub records_before: u64,
    pub records_after: u64,
    pub time_after_ms: u64,
    pub file: String,
    pub byte: u64,
    pub what: String,
    /// A file is not there at all.
    pub missing: bool,
}

/// Files open for reading, few and reused: a pack holds thousands of streams.
pub struct Files<'d> {
    disk: &'d dyn Disk,
    open: HashMap<String, Arc<dyn DiskFile>>,
    order: VecDeque<String>,
    /// Packs whose own header has been looked at, and what is wrong with it.
    pack_headers: HashMap<u32, Option<String>>,
}

impl<'d> Files<'d> {
    pub fn new(disk: &'d dyn Disk) -> Files<'d> {
        Files {
            disk,
            open: HashMap::new(),
            order: VecDeque::new(),
            pack_headers: HashMap::new(),
        }
    }

    fn get(&mut self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        if let Some(file) = self.open.get(path) {
            return Ok(Arc::clone(file));
        }
        let file = self.disk.open(path, OpenMode::Read)?;
        if self.order.len() >= FILES_OPEN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.open.remove(&oldest);
        }
        self.open.insert(path.to_owned(), Arc::clone(&file));
        self.order.push_back(path.to_owned());
        Ok(file)
    }

    /// Lets go of everything: files may have been replaced.
    pub fn forget(&mut self) {
        self.open.clear();
        self.order.clear();
    }
}

pub fn data_path(file: FileRef) -> String {
    match file {
        FileRef::Segment { owner, number } => segment::path(owner, number, Part::Data),
        FileRef::Pack { number } => pack::path(number),
        FileRef::Spill { number } => spill_path(number),
    }
}

/// No catalog entry that decodes names one; this only gives it a name in a message.
fn spill_path(number: u32) -> String {
    format!("spill/{number:08x}")
}

pub fn index_path(file: FileRef) -> String {
    match file {
        FileRef::Segment { owner, number } => segment::path(owner, number, Part::Index),
        FileRef::Pack { number } => pack::path(number),
        FileRef::Spill { number } => spill_path(number),
    }
}

/// Is told how many bytes were looked at; an error ends the walk.
pub type Tell<'p> = &'p mut dyn FnMut(u64) -> io::Result<()>;

/// What was looked at.
#[derive(Clone, Copy, Default)]
pub struct Examined {
    pub bytes: u64,
    pub appends: u64,
}

/// Checks all extents of a stream. `records` is what the stream counts up to its end.
pub fn examine(
    files: &mut Files<'_>,
    stream: StreamId,
    extents: &[Extent],
    records: u64,
    tell: Tell<'_>,
) -> io::Result<(Vec<Bad>, Examined)> {
    let mut bad = Vec::new();
    let mut examined = Examined::default();
    for (number, extent) in extents.iter().enumerate() {
        let records_after = extents
            .get(number + 1)
            .map_or(records, |next| next.base_records);
        let mut check = ExtentCheck {
            files,
            tell: &mut *tell,
            stream,
            extent,
            number,
            records_after,
            doubtful: None,
            window: Window::default(),
            bad: &mut bad,
            examined: &mut examined,
        };
        check.run()?;
    }
    Ok((bad, examined))
}

struct ExtentCheck<'a, 'd, 'p> {
    files: &'a mut Files<'d>,
    tell: &'a mut (dyn FnMut(u64) -> io::Result<()> + 'p),
    stream: StreamId,
    extent: &'a Extent,
    number: usize,
    records_after: u64,
    /// Behind which entry certainty ended, until it begins again.
    doubtful: Option<At>,
    window: Window,
    bad: &'a mut Vec<Bad>,
    examined: &'a mut Examined,
}

/// Where the walk over an index stands: behind which entry, and what that one said.
#[derive(Clone, Copy)]
struct At {
    entry: u32,
    end: u64,
    records: u64,
    time_ms: u64,
}

impl ExtentCheck<'_, '_, '_> {
    fn run(&mut self) -> io::Result<()> {
        let extent = self.extent;
        self.examined.bytes += extent.len;
        self.examined.appends += u64::from(extent.index_count);
        if let FileRef::Pack { number } = extent.file {
            self.check_section(number);
        }
        let mut at = At {
            entry: 0,
            end: extent.start,
            records: extent.base_records,
            time_ms: 0,
        };
        let index_file = match self.files.get(&index_path(extent.file)) {
            Ok(file) => file,
            Err(error) => {
                self.lost_index(at, &error);
                return (self.tell)(extent.len);
            }
        };
        let data = self.files.get(&data_path(extent.file));
        // A file that was cut short still tells about what is left of it.
        let present = index_file
            .len()?
            .saturating_sub(extent.index_position)
            .checked_div(INDEX_ENTRY_BYTES as u64)
            .map_or(0, |count| u32::try_from(count).unwrap_or(u32::MAX))
            .min(extent.index_count);
        while at.entry < extent.index_count {
            let count = BLOCK_ENTRIES.min(present.saturating_sub(at.entry).max(1));
            let mut block = vec![0u8; count as usize * INDEX_ENTRY_BYTES];
            match read_exact_at(&*index_file, &mut block, self.entry_byte(at.entry)) {
                Ok(()) => at = self.block(at, &block, &data)?,
                Err(error) => {
                    self.lost_index(at, &error);
                    return (self.tell)(extent.end() - at.end);
                }
            }
        }
        self.check_ending(at);
        Ok(())
    }

    /// Checks the entries that lie side by side in `block`.
    fn block(
        &mut self,
        mut at: At,
        block: &[u8],
        data: &io::Result<Arc<dyn DiskFile>>,
    ) -> io::Result<At> {
        for encoded in block.chunks_exact(INDEX_ENTRY_BYTES) {
            let last_of_extent = at.entry + 1 == self.extent.index_count;
            let entry = index::decode(encoded).filter(|entry| self.goes_forward(&at, entry));
            let Some(entry) = entry else {
                self.doubtful.get_or_insert(at);
                at.entry += 1;
                if last_of_extent && let Some(from) = self.doubtful.take() {
                    let end = self.extent.end();
                    self.bad_index(from, at.entry, end, self.records_after, from.time_ms);
                    at.end = end;
                }
                continue;
            };
            let before = at;
            at = At {
                entry: at.entry + 1,
                end: entry.end,
                records: entry.records,
                time_ms: entry.time_ms,
            };
            match self.doubtful.take() {
                // Where this one begins is not known, so it cannot be checked.
                Some(from) => self.bad_index(from, at.entry, at.end, at.records, at.time_ms),
                None => self.check_append(&before, &entry, data)?,
            }
        }
        Ok(at)
    }

    fn goes_forward(&self, at: &At, entry: &IndexEntry) -> bool {
        entry.end > at.end
            && entry.end <= self.extent.end()
            && entry.records >= at.records
            && entry.time_ms >= at.time_ms
    }

    fn check_append(
        &mut self,
        before: &At,
        entry: &IndexEntry,
        data: &io::Result<Arc<dyn DiskFile>>,
    ) -> io::Result<()> {
        let position = self.extent.file_position + (before.end - self.extent.start);
        let sum = match data {
            Ok(file) => {
                let limit = self.extent.file_position + self.extent.len;
                self.window
                    .checksum(&**file, position, entry.end - before.end, limit)
            }
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        };
        (self.tell)(entry.end - before.end)?;
        let what = match &sum {
            Ok(crc) if *crc == entry.crc => return Ok(()),
            Ok(_) => format!("bytes {}..{} fail their checksum", before.end, entry.end),
            Err(error) => format!(
                "bytes {}..{} cannot be read: {error}",
                before.end, entry.end
            ),
        };
        let missing = matches!(&sum, Err(error) if error.kind() == io::ErrorKind::NotFound);
        self.push_bytes(before.end, entry.end, position, what, missing);
        Ok(())
    }

    /// Neighbouring bad appends are one finding.
    fn push_bytes(&mut self, start: u64, end: u64, byte: u64, what: String, missing: bool) {
        if let Some(last) = self.bad.last_mut()
            && last.fault == Fault::Bytes
            && last.extent == self.number
            && last.end == start
        {
            last.end = end;
            let last_start = last.start;
            last.what = if last.missing || missing {
                format!("bytes {last_start}..{end} cannot be read: the file is missing")
            } else {
                format!("bytes {last_start}..{end} fail their checksums or cannot be read")
            };
            return;
        }
        self.bad.push(Bad {
            fault: Fault::Bytes,
            extent: self.number,
            start,
            end,
            entries: (0, 0),
            records_before: 0,
            records_after: 0,
            time_after_ms: 0,
            file: data_path(self.extent.file),
            byte,
            what,
            missing,
        });
    }

    fn bad_index(&mut self, from: At, to_entry: u32, end: u64, records_after: u64, time_ms: u64) {
        let byte = self.entry_byte(from.entry);
        let what = format!(
            "index entry {} is damaged: bytes {}..{end} cannot be split into appends",
            from.entry, from.end
        );
        self.push_index(
            (from, to_entry, end),
            (records_after, time_ms),
            byte,
            what,
            false,
        );
    }

    /// The index cannot be read from this entry on.
    fn lost_index(&mut self, at: At, error: &io::Error) {
        let at = self.doubtful.take().unwrap_or(at);
        let what = format!(
            "the index of bytes {}..{} cannot be read: {error}",
            at.end,
            self.extent.end()
        );
        let missing = error.kind() == io::ErrorKind::NotFound;
        let certain = (self.records_after, at.time_ms);
        let range = (at, self.extent.index_count, self.extent.end());
        self.push_index(range, certain, self.entry_byte(at.entry), what, missing);
    }

    fn push_index(
        &mut self,
        (from, to_entry, end): (At, u32, u64),
        (records_after, time_after_ms): (u64, u64),
        byte: u64,
        what: String,
        missing: bool,
    ) {
        self.bad.push(Bad {
            fault: Fault::Index,
            extent: self.number,
            start: from.end,
            end,
            entries: (from.entry, to_entry),
            records_before: from.records,
            records_after,
            time_after_ms,
            file: index_path(self.extent.file),
            byte,
            what,
            missing,
        });
    }

    fn entry_byte(&self, entry: u32) -> u64 {
        self.extent.index_position + u64::from(entry) * INDEX_ENTRY_BYTES as u64
    }

    /// The last entry must end and count where the extent does.
    fn check_ending(&mut self, at: At) {
        let extent = self.extent;
        let known = self.bad.last().is_some_and(|bad| {
            bad.fault == Fault::Index && bad.extent == self.number && bad.end == extent.end()
        });
        if known || (at.end == extent.end() && at.records == self.records_after) {
            return;
        }
        let (from, what) = if at.end == extent.end() {
            let what = format!(
                "the index counts {} records up to {}, the catalog {}",
                at.records, at.end, self.records_after
            );
            // Which entry lies is not known.
            let start = At {
                entry: 0,
                end: extent.start,
                records: extent.base_records,
                time_ms: at.time_ms,
            };
            (start, what)
        } else {
            (
                at,
                format!(
                    "the index ends at {}, the bytes at {}",
                    at.end,
                    extent.end()
                ),
            )
        };
        let byte = self.entry_byte(extent.index_count.saturating_sub(1));
        let range = (from, extent.index_count, extent.end());
        self.push_index(range, (self.records_after, from.time_ms), byte, what, false);
    }

    fn check_section(&mut self, pack_number: u32) {
        let Ok(file) = self.files.get(&pack::path(pack_number)) else {
            return; // Told with the bytes.
        };
        let header = self
            .files
            .pack_headers
            .entry(pack_number)
            .or_insert_with(|| {
                pack::check_header(&*file, pack_number)
                    .err()
                    .map(|error| error.to_string())
            });
        let wrong = match header {
            Some(wrong) => Some((0, wrong.clone())),
            None => pack::check_section(&*file, pack_number, self.stream, self.extent)
                .err()
                .map(|error| (pack::section_start(self.extent), error.to_string())),
        };
        let Some((byte, what)) = wrong else { return };
        self.bad.push(Bad {
            fault: Fault::Section,
            extent: self.number,
            start: self.extent.start,
            end: self.extent.end(),
            entries: (0, 0),
            records_before: 0,
            records_after: 0,
            time_after_ms: 0,
            file: pack::path(pack_number),
            byte,
            what,
            missing: false,
        });
    }
}

/// What was last read of a data file: small appends come out of one read.
#[derive(Default)]
struct Window {
    bytes: Vec<u8>,
    start: u64,
}

impl Window {
    /// Checksum of `len` bytes at `position`; reads ahead up to `limit`.
    fn checksum(
        &mut self,
        file: &dyn DiskFile,
        position: u64,
        len: u64,
        limit: u64,
    ) -> io::Result<u32> {
        let (mut crc, mut done) = (0, 0);
        while done < len {
            let at = position.saturating_add(done);
            let have = at
                .checked_sub(self.start)
                .and_then(|offset| self.bytes.get(usize::try_from(offset).ok()?..))
                .filter(|bytes| !bytes.is_empty());
            let Some(have) = have else {
                // An error ahead must not be told of what lies before it.
                if self.fill(file, at, limit - at).is_err() {
                    self.fill(file, at, len - done)?;
                }
                continue;
            };
            let count = have
                .len()
                .min(usize::try_from(len - done).unwrap_or(usize::MAX));
            crc = crc32c::crc32c_append(crc, &have[..count]);
            done += count as u64;
        }
        Ok(crc)
    }

    fn fill(&mut self, file: &dyn DiskFile, at: u64, wanted: u64) -> io::Result<()> {
        let wanted = PIECE_BYTES.min(usize::try_from(wanted).unwrap_or(PIECE_BYTES));
        self.start = at;
        self.bytes.resize(wanted, 0);
        let read = read_up_to_at(file, &mut self.bytes, at);
        self.bytes.truncate(*read.as_ref().unwrap_or(&0));
        match read? {
            0 => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the file ends at byte {at}"),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "audit_tests.rs"]
mod tests;
