//! Reading the log past its damage: which stretches of frames are whole in each file.
//!
//! Recovery stops at the first bad frame. This goes on behind it, in the same batch and in later ones, because
//! what is damaged has to be told apart from what is not. What the stretches mean is decided in `judge`.
//!
//! Invariants:
//! - a [`Run`] has every sequence from `first` to `next`, each checksummed, and no bad byte between them;
//! - between two runs of one file there is something that does not check: a frame, a header, or both;
//! - reading never goes outside the file, and at most one batch is in memory.

use std::io;
use std::sync::Arc;

use crate::codec::{
    BATCH_HEADER_BYTES, BatchHeader, FILE_HEADER_BYTES, FLAG_MORE, FRAME_HEADER_BYTES, Frame,
    parse_file_header,
};
use crate::io::{Disk, DiskFile, OpenMode};
use crate::log::scan::FileReader;
use crate::log::wal::{WAL_DIR, file_name, generation_of};
use crate::model::StreamId;
use crate::verify::meter::Meter;

/// A log with more holes than this is not a log with holes.
const RUNS_MAX: usize = 10_000;
const SUSPECTS_MAX: usize = 1000;
const SEARCH_BYTES: usize = 1 << 20;
const BATCH_MARK: &[u8] = b"MSB1";

/// A stretch of whole frames without a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub first: u64,
    /// Sequence behind the last frame.
    pub next: u64,
    /// Sequence behind the last whole group: what a cut behind this run leaves.
    pub complete: u64,
    pub start_byte: u64,
    pub end_byte: u64,
    /// Highest sequence that a header before or inside this run proves to have been synced, counted from the
    /// end of the run before.
    pub synced: u64,
}

/// One file of the log and what is whole in it.
pub struct ScannedFile {
    pub name: String,
    pub generation: u64,
    pub file: Arc<dyn DiskFile>,
    pub header_whole: bool,
    /// The first batch lies where it must: in its place and with its header.
    pub begins_whole: bool,
    pub runs: Vec<Run>,
    /// What headers behind the last run prove.
    pub trailing_synced: u64,
    /// There were more runs than are kept.
    pub hopeless: bool,
    /// Bad frames whose header may be whole: sequence, and the stream it names. Only a hint.
    pub suspects: Vec<(u64, StreamId)>,
}

impl ScannedFile {
    pub fn first_sequence(&self) -> Option<u64> {
        self.runs.first().map(|run| run.first)
    }
}

/// Generations of the log's files, and those in its directory that are none.
pub fn list_log(disk: &dyn Disk) -> io::Result<(Vec<u64>, Vec<String>)> {
    let entries = match disk.list(WAL_DIR) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    let mut files = Vec::new();
    let mut foreign = Vec::new();
    for entry in entries {
        match generation_of(&entry.name) {
            Some(generation) if !entry.is_dir => files.push(generation),
            _ => foreign.push(format!("{WAL_DIR}/{}", entry.name)),
        }
    }
    files.sort_unstable();
    Ok((files, foreign))
}

/// Scans one file to its end.
pub fn scan_file(
    disk: &dyn Disk,
    generation: u64,
    meter: &mut Meter<'_>,
) -> io::Result<ScannedFile> {
    let name = file_name(generation);
    let file = disk.open(&name, OpenMode::Read)?;
    let len = file.len()?;
    let (header_whole, runs) = {
        let mut scan = Scan {
            reader: FileReader::new(&*file),
            generation,
            len,
            runs: Runs::default(),
        };
        let head = scan.reader.at(0, FILE_HEADER_BYTES as usize)?;
        let header_whole = parse_file_header(head) == Some(generation);
        scan.run(meter)?;
        (header_whole, scan.runs)
    };
    let first_place = FILE_HEADER_BYTES + BATCH_HEADER_BYTES as u64;
    Ok(ScannedFile {
        begins_whole: runs.found.first().map(|run| run.start_byte) == Some(first_place)
            && runs.first_header_whole,
        name,
        generation,
        file,
        header_whole,
        runs: runs.found,
        trailing_synced: runs.synced,
        hopeless: runs.overflowed,
        suspects: runs.suspects,
    })
}

/// Calls `visit` for every frame of a run with a sequence in `from..to`, and with its byte in the file.
pub fn frames_of<E: From<io::Error>>(
    file: &ScannedFile,
    run: &Run,
    from: u64,
    to: u64,
    visit: &mut dyn FnMut(&Frame<'_>, u64) -> Result<(), E>,
) -> Result<(), E> {
    let mut reader = FileReader::new(&*file.file);
    let mut position = run.start_byte;
    let mut sequence = run.first;
    while position < run.end_byte && sequence < to {
        let head = reader.at(position, BATCH_HEADER_BYTES)?;
        if BatchHeader::decode(head, file.generation).is_some() {
            position += BATCH_HEADER_BYTES as u64;
            continue;
        }
        let length = frame_length(head).unwrap_or(0);
        let bytes = reader.at(position, length)?;
        let Some((frame, length)) =
            Frame::decode(bytes, file.generation).filter(|(frame, _)| frame.sequence == sequence)
        else {
            // It was whole a moment ago: the file is being used again.
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} changed while it was read", file.name),
            )
            .into());
        };
        if sequence >= from {
            visit(&frame, position)?;
        }
        position += length as u64;
        sequence += 1;
    }
    Ok(())
}

fn frame_length(bytes: &[u8]) -> Option<usize> {
    let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    (length >= FRAME_HEADER_BYTES).then_some(length)
}

fn frame_sequence(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?))
}

#[derive(Default)]
struct Runs {
    found: Vec<Run>,
    /// The run that grows; closed by anything bad.
    open: bool,
    synced: u64,
    first_header_whole: bool,
    overflowed: bool,
    suspects: Vec<(u64, StreamId)>,
}

impl Runs {
    fn suspect(&mut self, bytes: &[u8], sequence: u64) {
        if self.suspects.len() < SUSPECTS_MAX
            && frame_sequence(bytes) == Some(sequence)
            && let Some(stream) = bytes.get(24..32).and_then(|bytes| bytes.try_into().ok())
        {
            let stream = StreamId(u64::from_le_bytes(stream));
            self.suspects.push((sequence, stream));
        }
    }

    fn frame(&mut self, frame: &Frame<'_>, position: u64, length: usize) {
        let end_byte = position + length as u64;
        let whole = frame.flags & FLAG_MORE == 0;
        if self.open
            && let Some(run) = self.found.last_mut()
            && run.next == frame.sequence
        {
            run.next += 1;
            run.end_byte = end_byte;
            run.synced = run.synced.max(std::mem::take(&mut self.synced));
            if whole {
                run.complete = run.next;
            }
            return;
        }
        if self.found.len() >= RUNS_MAX {
            self.overflowed = true;
            return;
        }
        self.open = true;
        self.found.push(Run {
            first: frame.sequence,
            next: frame.sequence + 1,
            complete: frame.sequence + u64::from(whole),
            start_byte: position,
            end_byte,
            synced: std::mem::take(&mut self.synced),
        });
    }
}

struct Scan<'f> {
    reader: FileReader<'f>,
    generation: u64,
    len: u64,
    runs: Runs,
}

impl Scan<'_> {
    fn run(&mut self, meter: &mut Meter<'_>) -> io::Result<()> {
        let mut position = FILE_HEADER_BYTES;
        let mut expected: Option<u64> = None;
        while position + (BATCH_HEADER_BYTES as u64) <= self.len && !self.runs.overflowed {
            let head = self.reader.at(position, BATCH_HEADER_BYTES)?;
            let header = BatchHeader::decode(head, self.generation)
                .filter(|header| expected.is_none_or(|next| header.first_sequence >= next));
            let before = position;
            match header {
                Some(header) => {
                    self.runs.first_header_whole |= position == FILE_HEADER_BYTES;
                    // A batch that begins too late: what lies between is missing.
                    self.runs.open &= expected.is_none_or(|next| next == header.first_sequence);
                    self.batch(position, &header)?;
                    expected = Some(header.first_sequence + u64::from(header.frames));
                    position += BATCH_HEADER_BYTES as u64 + u64::from(header.frame_bytes);
                }
                None => {
                    self.runs.open = false;
                    let found = self.next_header(position + 1, expected)?;
                    let limit = found.unwrap_or(self.len);
                    let (end, next) = self.headless(position, limit, expected)?;
                    // Only the header was bad if its frames reach to the next one.
                    self.runs.open &= end == limit;
                    (position, expected) = (limit, next);
                }
            }
            meter.add(position.min(self.len) - before)?;
        }
        Ok(())
    }

    /// Frames of a batch whose header checks, those behind a bad one included.
    fn batch(&mut self, position: u64, header: &BatchHeader) -> io::Result<()> {
        self.runs.synced = self.runs.synced.max(header.synced_up_to);
        let start = position + BATCH_HEADER_BYTES as u64;
        let room = usize::try_from(self.len - start).unwrap_or(usize::MAX);
        let bytes = self
            .reader
            .at(start, room.min(header.frame_bytes as usize))?;
        let end = header.first_sequence + u64::from(header.frames);
        let mut sequence = header.first_sequence;
        let mut at = 0;
        while sequence < end && at < bytes.len() {
            let decoded = Frame::decode(&bytes[at..], self.generation);
            if let Some((frame, length)) = decoded.filter(|(frame, _)| frame.sequence == sequence) {
                self.runs.frame(&frame, start + at as u64, length);
                at += length;
                sequence += 1;
                continue;
            }
            self.runs.open = false;
            self.runs.suspect(&bytes[at..], sequence);
            match next_frame(bytes, at, sequence + 1, end, self.generation) {
                Some((found, found_sequence)) => (at, sequence) = (found, found_sequence),
                None => return Ok(()),
            }
        }
        if sequence < end || at < header.frame_bytes as usize {
            self.runs.open = false;
        }
        Ok(())
    }

    /// Frames right behind a header that does not check. Returns where they end and what comes next.
    fn headless(
        &mut self,
        position: u64,
        limit: u64,
        expected: Option<u64>,
    ) -> io::Result<(u64, Option<u64>)> {
        let mut position = position + BATCH_HEADER_BYTES as u64;
        let mut expected = expected;
        while position < limit {
            let length = frame_length(self.reader.at(position, FRAME_HEADER_BYTES)?).unwrap_or(0);
            if length as u64 > limit - position {
                break;
            }
            let bytes = self.reader.at(position, length)?;
            let Some((frame, length)) = Frame::decode(bytes, self.generation)
                .filter(|(frame, _)| expected.is_none_or(|next| frame.sequence == next))
            else {
                break;
            };
            self.runs.frame(&frame, position, length);
            expected = Some(frame.sequence + 1);
            position += length as u64;
        }
        Ok((position, expected))
    }

    /// The next place from `position` on where a batch of this file begins.
    fn next_header(&mut self, position: u64, expected: Option<u64>) -> io::Result<Option<u64>> {
        let mut position = position;
        while position + (BATCH_HEADER_BYTES as u64) <= self.len {
            let window = self.reader.at(position, SEARCH_BYTES)?;
            let Some(found) = memchr::memmem::find(window, BATCH_MARK) else {
                if window.len() < SEARCH_BYTES {
                    return Ok(None);
                }
                position += (window.len() - (BATCH_MARK.len() - 1)) as u64;
                continue;
            };
            position += found as u64;
            let head = self.reader.at(position, BATCH_HEADER_BYTES)?;
            let found = BatchHeader::decode(head, self.generation)
                .is_some_and(|header| expected.is_none_or(|next| header.first_sequence >= next));
            if found {
                return Ok(Some(position));
            }
            position += BATCH_MARK.len() as u64;
        }
        Ok(None)
    }
}

/// The next whole frame of a batch behind a bad one, with a sequence in `from..to`.
fn next_frame(
    bytes: &[u8],
    bad: usize,
    from: u64,
    to: u64,
    generation: u64,
) -> Option<(usize, u64)> {
    let check = |at: usize| {
        let rest = bytes.get(at..)?;
        let sequence = frame_sequence(rest).filter(|found| (from..to).contains(found))?;
        let length = frame_length(rest).filter(|length| *length <= rest.len())?;
        Frame::decode(&rest[..length], generation).map(|_| (at, sequence))
    };
    // Where the bad one says it ends, and else anywhere: a sequence in range is rare enough to be looked for.
    let said = frame_length(&bytes[bad..]).and_then(|length| check(bad.checked_add(length)?));
    said.or_else(|| (bad + 1..bytes.len().saturating_sub(FRAME_HEADER_BYTES - 1)).find_map(check))
}
