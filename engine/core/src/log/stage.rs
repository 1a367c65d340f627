//! Staged packs: records that a later commit shall append, in the shape of the pack they will be.
//!
//! A staged pack has one section per stream, with room for the index that the stream's next checkpoint writes once it
//! is known where the bytes stand, and behind them one section of stream 0, the record: whose stage it is, and the
//! relative index of every section ([`crate::codec::adopt`]). Bytes and indexes are never changed, so that a commit, a
//! replay and a repeated checkpoint all find the same; the checkpoint behind a commit only takes the mark away that makes
//! it a stage.
//!
//! ```text
//! record:  "MSSTAGE1" | head length u32 | crc u32 of the head
//! head:    time u64 | body bytes u64 | rows u64 | checksum u32 | id short | streams u32
//!          x (stream u64, name short, file position u64, length u64, records u64, entries u32, index at u64, index crc u32)
//! behind:  the relative indexes, 20 bytes for each entry
//! ```
//!
//! Invariants
//! - `I-STAGE-1` [`write`] returns only when the file and its name are synced: what is staged survives a power cut.
//! - `I-STAGE-2` A file without a whole record is no stage. It was never told to anybody and is garbage.

use std::io;

use super::index::{INDEX_ENTRY_BYTES, damage};
use super::pack::{self, FILE_HEADER_BYTES, PACKS_DIRECTORY, SECTION_HEADER_BYTES, Section};
use crate::codec::adopt::{RELATIVE_ENTRY_BYTES, UsedUp, decode_entries, encode_entry};
use crate::codec::{Reader, put_short};
use crate::io::sabotage::{self, Sabotage};
use crate::io::{Disk, DiskFile, OpenMode, read_exact_at, write_all_at};
use crate::model::{Adopted, IndexEntry, StreamId};

#[cfg(test)]
#[path = "stage_tests.rs"]
mod tests;

const MAGIC: &[u8; 8] = b"MSSTAGE1";
const RECORD_HEADER_BYTES: usize = 16;
/// Whose section the record is: no stream has this id.
const NOBODY: StreamId = StreamId(0);
/// A head is bounded by the streams of one stage and their names; more is no stage.
const HEAD_MAX_BYTES: u64 = 64 << 20;
const ZERO_PIECE_BYTES: usize = 1 << 20;

/// What a client has staged, as far as it matters to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageHead {
    pub id: Box<str>,
    pub time_ms: u64,
    /// Of the request: the same bytes again are the same stage.
    pub body_bytes: u64,
    pub checksum: u32,
    pub rows: u64,
}

/// One stream's share of a stage, in wire form.
pub struct StageSection<'a> {
    pub stream: StreamId,
    pub name: &'a str,
    pub bytes: &'a [u8],
    /// Relative to the section; times are not looked at.
    pub index: &'a [IndexEntry],
}

/// A stage on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageRecord {
    pub pack: u32,
    pub head: StageHead,
    pub file_bytes: u64,
    pub streams: Vec<StageStream>,
}

impl StageRecord {
    /// What says that this stage was copied.
    pub fn used_up(&self) -> UsedUp {
        UsedUp::new(self.pack, self.head.time_ms, &self.head.id)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageStream {
    pub stream: StreamId,
    pub name: Box<str>,
    pub section: Adopted,
}

/// What the file of a stage will take.
pub fn file_bytes(head: &StageHead, sections: &[StageSection<'_>]) -> u64 {
    let streams = sections.iter().map(|section| {
        let count = section.index.len() as u64;
        pack::section_bytes(section.bytes.len() as u64, section.index.len() as u32)
            .saturating_add(count * RELATIVE_ENTRY_BYTES as u64)
            .saturating_add(64 + section.name.len() as u64)
    });
    let record = (RECORD_HEADER_BYTES + SECTION_HEADER_BYTES + 64 + head.id.len()) as u64;
    streams.fold(FILE_HEADER_BYTES as u64 + record, u64::saturating_add)
}

/// Writes a stage to a new pack. On failure nothing is left of it, unless that fails too: then it is garbage.
pub fn write(
    disk: &dyn Disk,
    number: u32,
    head: StageHead,
    sections: &[StageSection<'_>],
    go_on: &dyn Fn() -> io::Result<()>,
) -> io::Result<StageRecord> {
    let path = pack::path(number);
    let file = disk.open(&path, OpenMode::CreateNew)?;
    let written = write_file(&*file, number, head, sections, go_on).and_then(|record| {
        go_on()?;
        if !sabotage::is(Sabotage::StageUnsynced) {
            file.sync_all()?;
            disk.sync_dir(PACKS_DIRECTORY)?;
        }
        Ok(record)
    });
    written.inspect_err(|error| {
        if let Err(left) = disk.remove(&path) {
            crate::report!("{path} could not be removed after a failure ({error}): {left}");
        }
    })
}

fn write_file(
    file: &dyn DiskFile,
    number: u32,
    head: StageHead,
    sections: &[StageSection<'_>],
    go_on: &dyn Fn() -> io::Result<()>,
) -> io::Result<StageRecord> {
    let mut buffer = pack::file_header(number);
    let mut position = 0;
    let mut streams = Vec::with_capacity(sections.len());
    for staged in sections {
        go_on()?;
        let section = whole_section(staged)?;
        section.encode(number, &mut buffer);
        write_all_at(file, &buffer, position)?;
        position += buffer.len() as u64;
        write_all_at(file, staged.bytes, position)?;
        streams.push(StageStream {
            stream: staged.stream,
            name: staged.name.into(),
            section: Adopted {
                pack: number,
                file_position: position,
                len: section.len,
                records: staged.index.last().map_or(0, |entry| entry.records),
                index_count: section.index_count,
                index_at: 0,
                index_crc: 0,
            },
        });
        position += section.len;
        let rest = pack::padded(section.len) - section.len
            + u64::from(section.index_count) * INDEX_ENTRY_BYTES as u64;
        write_zeros(file, rest, position, go_on)?;
        position += rest;
        buffer.clear();
    }
    let record_at = position + (buffer.len() + SECTION_HEADER_BYTES) as u64;
    let (record, indexes) = encode_record(&head, record_at, &mut streams, sections);
    let section = Section {
        stream: NOBODY,
        start: 0,
        len: (record.len() + indexes.len()) as u64,
        base_records: 0,
        index_count: 0,
    };
    section.encode(number, &mut buffer);
    buffer.extend_from_slice(&record);
    write_all_at(file, &buffer, position)?;
    position += buffer.len() as u64;
    go_on()?;
    write_all_at(file, &indexes, position)?;
    position += indexes.len() as u64;
    let padding = pack::padded(section.len) - section.len;
    write_all_at(file, &vec![0; padding as usize], position)?;
    Ok(StageRecord {
        pack: number,
        head,
        file_bytes: position + padding,
        streams,
    })
}

fn whole_section(staged: &StageSection<'_>) -> io::Result<Section> {
    let len = staged.bytes.len() as u64;
    let index_count = u32::try_from(staged.index.len()).ok();
    let ends = staged.index.last().map_or(0, |entry| entry.end);
    match index_count {
        Some(index_count) if ends == len && len > 0 => Ok(Section {
            stream: staged.stream,
            start: 0,
            len,
            base_records: 0,
            index_count,
        }),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a staged section of {len} bytes has an index that ends at {ends}"),
        )),
    }
}

fn write_zeros(
    file: &dyn DiskFile,
    len: u64,
    position: u64,
    go_on: &dyn Fn() -> io::Result<()>,
) -> io::Result<()> {
    let zeros = vec![0; ZERO_PIECE_BYTES.min(len as usize)];
    let mut done = 0;
    while done < len {
        go_on()?;
        let piece = (len - done).min(zeros.len() as u64) as usize;
        write_all_at(file, &zeros[..piece], position + done)?;
        done += piece as u64;
    }
    Ok(())
}

/// The record at `record_at`, and the indexes behind it; notes in `streams` where those lie.
fn encode_record(
    head: &StageHead,
    record_at: u64,
    streams: &mut [StageStream],
    sections: &[StageSection<'_>],
) -> (Vec<u8>, Vec<u8>) {
    let entries: usize = sections.iter().map(|section| section.index.len()).sum();
    let mut indexes = Vec::with_capacity(entries * RELATIVE_ENTRY_BYTES);
    let names: usize = streams.iter().map(|stream| stream.name.len()).sum();
    let head_len = 8 * 3 + 4 + 2 + head.id.len() + 4 + streams.len() * (8 + 2 + 44 - 4) + names;
    let indexes_at = record_at + (RECORD_HEADER_BYTES + head_len) as u64;
    for (stream, section) in streams.iter_mut().zip(sections) {
        let from = indexes.len();
        section
            .index
            .iter()
            .for_each(|entry| encode_entry(entry, &mut indexes));
        stream.section.index_at = indexes_at + from as u64;
        stream.section.index_crc = crc32c::crc32c(&indexes[from..]);
    }
    let mut bytes = Vec::with_capacity(head_len);
    for value in [head.time_ms, head.body_bytes, head.rows] {
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes.extend_from_slice(&head.checksum.to_le_bytes());
    put_short(&mut bytes, head.id.as_bytes());
    bytes.extend_from_slice(&(streams.len() as u32).to_le_bytes());
    for stream in streams.iter() {
        let section = &stream.section;
        bytes.extend_from_slice(&stream.stream.0.to_le_bytes());
        put_short(&mut bytes, stream.name.as_bytes());
        bytes.extend_from_slice(&section.file_position.to_le_bytes());
        bytes.extend_from_slice(&section.len.to_le_bytes());
        bytes.extend_from_slice(&section.records.to_le_bytes());
        bytes.extend_from_slice(&section.index_count.to_le_bytes());
        bytes.extend_from_slice(&section.index_at.to_le_bytes());
        bytes.extend_from_slice(&section.index_crc.to_le_bytes());
    }
    debug_assert_eq!(bytes.len(), head_len);
    let mut record = Vec::with_capacity(RECORD_HEADER_BYTES + bytes.len());
    record.extend_from_slice(MAGIC);
    record.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    record.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    record.extend_from_slice(&bytes);
    (record, indexes)
}

/// The stage that a pack holds; `None` if it holds none: a checkpoint's pack, or half a stage.
pub fn read(disk: &dyn Disk, number: u32) -> io::Result<Option<StageRecord>> {
    let file = disk.open(&pack::path(number), OpenMode::Read)?;
    let mut position = FILE_HEADER_BYTES as u64;
    let mut record_at = None;
    let walked = pack::walk(&*file, number, &mut |section| {
        if section.stream == NOBODY {
            record_at = Some((position + SECTION_HEADER_BYTES as u64, section.len));
        }
        position += pack::section_bytes(section.len, section.index_count);
    });
    match walked {
        Ok(()) => {}
        Err(error) if is_garbled(&error) => return Ok(None),
        Err(error) => return Err(error),
    }
    let Some((at, len)) = record_at else {
        return Ok(None);
    };
    match read_record(&*file, number, at, len) {
        Ok(record) => Ok(record.map(|(head, streams)| StageRecord {
            pack: number,
            head,
            file_bytes: position,
            streams,
        })),
        Err(error) if is_garbled(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a pack no stage any more: a checkpoint is about to name its sections, or to leave them behind, and its name may
/// outlive that. What a replay needs stays. The caller syncs. `false`: it is none as long as it is as it is.
pub fn spend(file: &dyn DiskFile, number: u32) -> io::Result<bool> {
    let mut position = FILE_HEADER_BYTES as u64;
    let mut record_at = None;
    let walked = pack::walk(file, number, &mut |section| {
        if section.stream == NOBODY {
            record_at = Some(position + SECTION_HEADER_BYTES as u64);
        }
        position += pack::section_bytes(section.len, section.index_count);
    });
    match (walked, record_at) {
        (Ok(()), Some(at)) => write_all_at(file, &[0; MAGIC.len()], at).map(|()| true),
        (Ok(()), None) => Ok(true),
        // A checkpoint that died has left half a header: no stage either, until another fills it in and comes here.
        (Err(error), _) if is_garbled(&error) => Ok(false),
        (Err(error), _) => Err(error),
    }
}

/// Appends of a section that do not match their checksum, as ranges relative to the section. An error: the index itself
/// cannot be read, or the file.
pub fn examine(file: &dyn DiskFile, section: &Adopted) -> io::Result<Vec<(u64, u64)>> {
    let len = section.index_count as usize * RELATIVE_ENTRY_BYTES;
    if section.index_at.saturating_add(len as u64) > file.len()? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut bytes = vec![0; len];
    read_exact_at(file, &mut bytes, section.index_at)?;
    let index = decode_entries(section, &bytes)
        .ok_or_else(|| damage("the index of a stage is damaged".to_owned()))?;
    let mut bad: Vec<(u64, u64)> = Vec::new();
    let mut start = 0;
    for entry in index {
        bytes.resize((entry.end - start) as usize, 0);
        let read = read_exact_at(
            file,
            &mut bytes,
            section.file_position.saturating_add(start),
        );
        match read {
            Ok(()) if crc32c::crc32c(&bytes) == entry.crc => {}
            Ok(()) => bad.push((start, entry.end)),
            Err(error) if is_garbled(&error) => bad.push((start, entry.end)),
            Err(error) => return Err(error),
        }
        start = entry.end;
    }
    Ok(bad)
}

fn is_garbled(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
    )
}

fn read_record(
    file: &dyn DiskFile,
    number: u32,
    at: u64,
    len: u64,
) -> io::Result<Option<(StageHead, Vec<StageStream>)>> {
    let mut start = [0; RECORD_HEADER_BYTES];
    read_exact_at(file, &mut start, at)?;
    let mut reader = Reader::new(&start[8..]);
    let (Some(head_len), Some(crc)) = (reader.u32(), reader.u32()) else {
        return Ok(None);
    };
    let head_len = u64::from(head_len);
    if &start[..8] != MAGIC || head_len > len || head_len > HEAD_MAX_BYTES {
        return Ok(None);
    }
    let mut bytes = vec![0; head_len as usize];
    read_exact_at(file, &mut bytes, at + RECORD_HEADER_BYTES as u64)?;
    if crc32c::crc32c(&bytes) != crc {
        return Ok(None);
    }
    Ok(decode_head(number, &bytes))
}

fn decode_head(number: u32, bytes: &[u8]) -> Option<(StageHead, Vec<StageStream>)> {
    let mut reader = Reader::new(bytes);
    let (time_ms, body_bytes, rows) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let checksum = reader.u32()?;
    let head = StageHead {
        id: std::str::from_utf8(reader.short()?).ok()?.into(),
        time_ms,
        body_bytes,
        checksum,
        rows,
    };
    let mut streams = Vec::new();
    for _ in 0..reader.u32()? {
        streams.push(StageStream {
            stream: StreamId(reader.u64()?),
            name: std::str::from_utf8(reader.short()?).ok()?.into(),
            section: Adopted {
                pack: number,
                file_position: reader.u64()?,
                len: reader.u64()?,
                records: reader.u64()?,
                index_count: reader.u32()?,
                index_at: reader.u64()?,
                index_crc: reader.u32()?,
            },
        });
    }
    reader.is_empty().then_some((head, streams))
}
