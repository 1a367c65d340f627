//! Packs: files that hold a little of many streams, one section each, written in one sequential pass.
//!
//! A million small streams are then a few files per checkpoint and not a million opens. A pack is written
//! once by one checkpoint and never changed; it is unlinked when no extent points into it any more. A pack may also
//! begin as a stage (`stage`): then a checkpoint fills in the section headers and indexes that it names.
//!
//! ```text
//! file:    | "MSTRPACK" 8 | version u32 | number u32 | section | section | ...
//! section: | stream u64 | start u64 | length u64 | base records u64 | entries u32 | crc u32 |   40 bytes
//!          | bytes, zeros up to a multiple of 8 | entries x 32 bytes of index |
//! ```
//! All little endian. A section's crc covers the 36 bytes before it and is seeded with the pack's number.
//! Example: 100 bytes in one append take 40 + 104 + 32 = 176 bytes; the first section starts at 16.
//!
//! Invariants: sections start at multiples of 8; a pack named by the catalog was synced whole, so that
//! a section that does not check there is damage; a pack that neither the catalog nor a stage that waits or was
//! committed names is garbage.

use std::io;
use std::sync::Arc;

use super::index::{INDEX_ENTRY_BYTES, damage, encode, u32_at, u64_at};
use crate::io::{Disk, DiskFile, OpenMode, read_exact_at, read_up_to_at, write_all_at};
use crate::model::{Extent, FileRef, IndexEntry, StreamId};

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;

pub const PACKS_DIRECTORY: &str = "packs";
/// Above this a checkpoint goes on in another pack, which bounds the work of rewriting one.
pub const PACK_MAX_BYTES: u64 = 64 * 1024 * 1024;
/// A stream with more pack extents than this has them merged at its next checkpoint.
pub const PACK_EXTENTS_MAX: usize = 8;

const MAGIC: [u8; 8] = *b"MSTRPACK";
const VERSION: u32 = 1;
pub const FILE_HEADER_BYTES: usize = 16;
pub(super) const SECTION_HEADER_BYTES: usize = 40;
/// Size of one write; the buffer may exceed it by one more.
const WRITE_BYTES: usize = 1024 * 1024;
/// Size of one read while a pack's sections are walked.
const WALK_BYTES: usize = 256 * 1024;

pub fn path(number: u32) -> String {
    format!("{PACKS_DIRECTORY}/{number:08x}.pack")
}

/// The pack's number from its name without the directory; `None` for a foreign file.
pub fn parse_name(name: &str) -> Option<u32> {
    let stem = name.strip_suffix(".pack")?;
    if stem.len() != 8 {
        return None;
    }
    u32::from_str_radix(stem, 16).ok()
}

/// First bytes of every pack.
pub(super) fn file_header(number: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FILE_HEADER_BYTES);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes
}

/// What a section of `len` bytes and `index_count` entries takes in the file. Packs are accounted in this
/// unit, so that the live share of a pack of tiny appends is not mistaken for waste.
pub fn section_bytes(len: u64, index_count: u32) -> u64 {
    let index_bytes = u64::from(index_count) * INDEX_ENTRY_BYTES as u64;
    (SECTION_HEADER_BYTES as u64)
        .saturating_add(padded(len))
        .saturating_add(index_bytes)
}

pub(super) fn padded(len: u64) -> u64 {
    len.checked_next_multiple_of(8).unwrap_or(u64::MAX)
}

/// The header of one section, as the walk over a pack reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Section {
    pub stream: StreamId,
    pub start: u64,
    pub len: u64,
    pub base_records: u64,
    pub index_count: u32,
}

impl Section {
    pub(super) fn encode(&self, pack: u32, out: &mut Vec<u8>) {
        let from = out.len();
        out.extend_from_slice(&self.stream.0.to_le_bytes());
        out.extend_from_slice(&self.start.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&self.base_records.to_le_bytes());
        out.extend_from_slice(&self.index_count.to_le_bytes());
        let crc = crc32c::crc32c_append(pack, &out[from..]);
        out.extend_from_slice(&crc.to_le_bytes());
    }

    fn decode(pack: u32, bytes: &[u8]) -> Option<Section> {
        if u32_at(bytes, 36)? != crc32c::crc32c_append(pack, bytes.get(..36)?) {
            return None;
        }
        Some(Section {
            stream: StreamId(u64_at(bytes, 0)?),
            start: u64_at(bytes, 8)?,
            len: u64_at(bytes, 16)?,
            base_records: u64_at(bytes, 24)?,
            index_count: u32_at(bytes, 32)?,
        })
    }
}

/// Writes one new pack through a buffer. Nothing is durable before [`PackWriter::finish`].
pub struct PackWriter {
    number: u32,
    file_ref: FileRef,
    file: Arc<dyn DiskFile>,
    buffer: Vec<u8>,
    flushed: u64,
}

impl PackWriter {
    pub fn create(disk: &dyn Disk, number: u32) -> io::Result<PackWriter> {
        PackWriter::create_as(disk, number, FileRef::Pack { number }, &path(number))
    }

    /// A file of the same shape under another name.
    pub fn create_as(
        disk: &dyn Disk,
        number: u32,
        file_ref: FileRef,
        path: &str,
    ) -> io::Result<PackWriter> {
        let file = disk.open(path, OpenMode::CreateNew)?;
        let mut buffer = file_header(number);
        buffer.reserve(WRITE_BYTES + WRITE_BYTES / 8);
        Ok(PackWriter {
            number,
            file_ref,
            file,
            buffer,
            flushed: 0,
        })
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// Where the next section will start.
    pub fn position(&self) -> u64 {
        self.flushed + self.buffer.len() as u64
    }

    /// Adds one section and returns the extent that finds it.
    pub fn append(
        &mut self,
        stream: StreamId,
        start: u64,
        base_records: u64,
        bytes: &[&[u8]],
        index: &[&[IndexEntry]],
    ) -> io::Result<Extent> {
        let len = bytes.iter().map(|piece| piece.len() as u64).sum::<u64>();
        let index_count = u32::try_from(index.iter().map(|piece| piece.len()).sum::<usize>())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "too many index entries"))?;
        Section {
            stream,
            start,
            len,
            base_records,
            index_count,
        }
        .encode(self.number, &mut self.buffer);
        let file_position = self.position();
        for chunk in bytes.iter().flat_map(|piece| piece.chunks(WRITE_BYTES)) {
            self.buffer.extend_from_slice(chunk);
            self.flush_full()?;
        }
        self.buffer
            .resize(self.buffer.len() + (padded(len) - len) as usize, 0);
        let index_position = self.position();
        for entry in index.iter().copied().flatten() {
            encode(entry, &mut self.buffer);
            self.flush_full()?;
        }
        self.flush_full()?;
        Ok(Extent {
            start,
            len,
            file: self.file_ref,
            file_position,
            index_position,
            index_count,
            base_records,
        })
    }

    /// The buffer stays small, however large a section is.
    fn flush_full(&mut self) -> io::Result<()> {
        if self.buffer.len() >= WRITE_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Hands the buffer to the file, so that sections can be read back.
    pub fn flush(&mut self) -> io::Result<()> {
        write_all_at(&*self.file, &self.buffer, self.flushed)?;
        self.flushed += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        self.file.sync()
    }
}

/// Where the header of an extent's section begins.
pub fn section_start(extent: &Extent) -> u64 {
    extent
        .file_position
        .saturating_sub(SECTION_HEADER_BYTES as u64)
}

/// Checks the header of the file itself.
pub fn check_header(file: &dyn DiskFile, number: u32) -> io::Result<()> {
    let mut header = [0u8; FILE_HEADER_BYTES];
    read_exact_at(file, &mut header, 0)?;
    if header[..8] == MAGIC
        && u32_at(&header, 8) == Some(VERSION)
        && u32_at(&header, 12) == Some(number)
    {
        return Ok(());
    }
    Err(damage(format!("{} has no valid pack header", path(number))))
}

/// Checks that the section of an extent says what the catalog says.
pub fn check_section(
    file: &dyn DiskFile,
    number: u32,
    stream: StreamId,
    extent: &Extent,
) -> io::Result<()> {
    let mut header = [0u8; SECTION_HEADER_BYTES];
    read_exact_at(file, &mut header, section_start(extent))?;
    let expected = Section {
        stream,
        start: extent.start,
        len: extent.len,
        base_records: extent.base_records,
        index_count: extent.index_count,
    };
    match Section::decode(number, &header) {
        Some(section) if section == expected => Ok(()),
        Some(section) => Err(damage(format!(
            "the section is of stream {} from {}, the catalog says stream {} from {}",
            section.stream.0, section.start, stream.0, extent.start
        ))),
        None => Err(damage("the section header fails its checksum".to_owned())),
    }
}

/// Visits the header of every section of a pack, in file order.
pub fn walk(file: &dyn DiskFile, number: u32, visit: &mut dyn FnMut(Section)) -> io::Result<()> {
    let mut window = Window {
        file,
        bytes: Vec::new(),
        position: 0,
    };
    check_header(file, number).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            damage(format!("{} has no valid pack header", path(number)))
        }
        _ => error,
    })?;
    let file_len = file.len()?;
    let mut position = FILE_HEADER_BYTES as u64;
    while position < file_len {
        let section = Section::decode(number, window.get(position, SECTION_HEADER_BYTES)?)
            .filter(|section| {
                section_bytes(section.len, section.index_count) <= file_len - position
            })
            .ok_or_else(|| damage(format!("{} is damaged at byte {position}", path(number))))?;
        position += section_bytes(section.len, section.index_count);
        visit(section);
    }
    Ok(())
}

/// A read-ahead buffer over a file for small pieces in ascending order.
struct Window<'a> {
    file: &'a dyn DiskFile,
    bytes: Vec<u8>,
    position: u64,
}

impl Window<'_> {
    /// Bytes at `position`: fewer than `len` only where the file ends.
    fn get(&mut self, position: u64, len: usize) -> io::Result<&[u8]> {
        let end = position + len as u64;
        if position < self.position || end > self.position + self.bytes.len() as u64 {
            self.bytes.resize(WALK_BYTES, 0);
            let read = read_up_to_at(self.file, &mut self.bytes, position)?;
            self.bytes.truncate(read);
            self.position = position;
        }
        let from = (position - self.position) as usize;
        Ok(&self.bytes[from..self.bytes.len().min(from + len)])
    }
}
