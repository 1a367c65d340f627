//! The walk over all log files at a start: which frames count, and whether something is missing.
//!
//! A bad frame at or below what is proven to have been synced is corruption: the walk ends with an error that
//! names file and byte. Anything beyond is a torn tail, cut at the first bad frame even if valid ones follow,
//! because pages land out of order, also those of a file written while the one before was not yet synced.
//!
//! Invariant: changes no file, so that it can run again and give the same.

use crate::report;
use std::sync::Arc;

use crate::codec::{
    BATCH_HEADER_BYTES, BatchHeader, FILE_HEADER_BYTES, FLAG_MORE, Frame, parse_file_header,
};
use crate::error::EngineError;
use crate::io::sabotage::{self, Sabotage};
use crate::io::{Disk, DiskFile, OpenMode, read_up_to_at};
use crate::log::replay::{OpenedStreams, Replay};
use crate::log::wal::{WAL_DIR, WalFile, generation_of};

const READ_PIECE_BYTES: usize = 4 << 20;
const PROGRESS_EVERY_FRAMES: u64 = 250_000;

pub(super) fn log_files(disk: &dyn Disk) -> Result<Vec<u64>, EngineError> {
    let entries = match disk.list(WAL_DIR) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(EngineError::io("log directory", error)),
    };
    let mut generations = Vec::new();
    for entry in entries {
        match generation_of(&entry.name) {
            Some(generation) => generations.push(generation),
            None => report!("ignoring unknown file {}/{}", WAL_DIR, entry.name),
        }
    }
    generations.sort_unstable();
    Ok(generations)
}

pub(super) struct LogFile {
    pub(super) wal: WalFile,
    pub(super) name: String,
    pub(super) first_sequence: Option<u64>,
    pub(super) last_sequence: u64,
    /// Something was written where the first batch lies, and it does not check.
    pub(super) garbled: bool,
}

/// The walk over all log files.
pub(super) struct Scan {
    pub(super) files: Vec<LogFile>,
    pub(super) checkpoint: u64,
    /// Sequence the next frame must have.
    pub(super) next_sequence: u64,
    /// Highest sequence proven to have been synced.
    pub(super) synced: u64,
    /// Frames above the proven sync, as encoded, with their sequence.
    pub(super) unproven: Vec<(u64, Vec<u8>)>,
    pub(super) retained_bytes: u64,
    pub(super) highest_generation: u64,
}

impl Scan {
    pub(super) fn open(
        disk: &dyn Disk,
        generations: &[u64],
        checkpoint: u64,
    ) -> Result<Scan, EngineError> {
        let mut files = Vec::new();
        for generation in generations {
            let name = crate::log::wal::file_name(*generation);
            let io_error = |error| EngineError::io(&name, error);
            let file = disk.open(&name, OpenMode::ReadWrite).map_err(io_error)?;
            let capacity = file.len().map_err(io_error)?;
            let mut head = vec![0u8; FILE_HEADER_BYTES as usize + BATCH_HEADER_BYTES];
            let count = read_up_to_at(&*file, &mut head, 0).map_err(io_error)?;
            let first = BatchHeader::decode(
                head[..count]
                    .get(FILE_HEADER_BYTES as usize..)
                    .unwrap_or(&[]),
                *generation,
            );
            if parse_file_header(&head[..count]) != Some(*generation) && first.is_some() {
                return Err(corrupt(&name, 0, "the file header is damaged"));
            }
            files.push(LogFile {
                wal: WalFile {
                    generation: *generation,
                    file,
                    capacity,
                },
                name,
                first_sequence: first.map(|header| header.first_sequence),
                last_sequence: 0,
                garbled: first.is_none() && is_garbled(&head[..count]),
            });
        }
        let first = files.iter().find_map(|file| file.first_sequence);
        let next_sequence = first.unwrap_or(checkpoint + 1);
        if next_sequence > checkpoint + 1 {
            let name = files
                .iter()
                .find(|file| file.first_sequence.is_some())
                .map_or("", |file| &file.name);
            return Err(corrupt(
                name,
                0,
                &format!(
                    "the log begins at {next_sequence} but the last checkpoint is {checkpoint}: a log file is missing"
                ),
            ));
        }
        Ok(Scan {
            files,
            checkpoint,
            next_sequence,
            synced: checkpoint,
            unproven: Vec::new(),
            retained_bytes: 0,
            highest_generation: generations.last().copied().unwrap_or(0),
        })
    }

    pub(super) fn run(
        &mut self,
        replay: &mut Replay<OpenedStreams<'_>>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), EngineError> {
        for number in 0..self.files.len() {
            let Some(first) = self.files[number].first_sequence else {
                continue;
            };
            self.skip_freed(first);
            if first > self.next_sequence {
                // Behind a hole. An earlier start that cut there goes on in a later file; otherwise this is the
                // cut, unless something proves that the hole had been synced.
                self.files[number].last_sequence = self.next_sequence - 1;
                if self.goes_on_behind(number) {
                    continue;
                }
                let name = &self.files[number].name;
                let what = format!(
                    "it begins at {first}, but {} is missing",
                    self.next_sequence
                );
                let missing = corrupt(name, FILE_HEADER_BYTES, &what);
                self.check_cut(number, FILE_HEADER_BYTES, missing)?;
                break;
            }
            let stopped_at = self.run_file(number, replay, progress)?;
            self.files[number].last_sequence = self.next_sequence - 1;
            if !self.goes_on_behind(number) {
                let name = &self.files[number].name;
                let what = format!("frame {} is damaged, but it was synced", self.next_sequence);
                let damaged = corrupt(name, stopped_at, &what);
                self.check_cut(number, stopped_at, damaged)?;
                break;
            }
        }
        self.check_garbled_start()?;
        let last = self.next_sequence - 1;
        // Files behind a cut hold nothing that counts: the next checkpoint frees them.
        self.files
            .iter_mut()
            .filter(|file| file.first_sequence.is_some_and(|first| first > last))
            .for_each(|file| file.last_sequence = last);
        if last < self.checkpoint {
            return Err(corrupt(
                WAL_DIR,
                0,
                &format!(
                    "the log ends at {last} before the checkpoint {}",
                    self.checkpoint
                ),
            ));
        }
        Ok(())
    }

    /// Where no file has a first batch, one that had it may still prove what is missing.
    fn check_garbled_start(&self) -> Result<(), EngineError> {
        if self.files.iter().any(|file| file.first_sequence.is_some()) {
            return Ok(());
        }
        let Some(number) = self.files.iter().position(|file| file.garbled) else {
            return Ok(());
        };
        let what = format!("frame {} is damaged, but it was synced", self.next_sequence);
        let damaged = corrupt(&self.files[number].name, FILE_HEADER_BYTES, &what);
        self.check_cut(number, FILE_HEADER_BYTES, damaged)
    }

    /// Whether a file behind this one continues the log where it stands.
    fn goes_on_behind(&self, number: usize) -> bool {
        let reach = self.next_sequence.max(self.checkpoint + 1);
        self.files[number + 1..]
            .iter()
            .filter_map(|file| file.first_sequence)
            .any(|first| first <= reach)
    }

    /// Nothing up to the checkpoint is needed: of files freed before a power cut some may be back and others not.
    fn skip_freed(&mut self, next: u64) {
        if next <= self.checkpoint + 1 {
            self.next_sequence = self.next_sequence.max(next);
        }
    }

    /// Replays one file as far as it is whole; what an older file had already is skipped. A start that was cut off
    /// may have left only a part of its copies, so the older file counts. Returns the byte where it stopped.
    fn run_file(
        &mut self,
        number: usize,
        replay: &mut Replay<OpenedStreams<'_>>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<u64, EngineError> {
        let (file, generation, name) = {
            let file = &self.files[number];
            (
                Arc::clone(&file.wal.file),
                file.wal.generation,
                file.name.clone(),
            )
        };
        let mut reader = FileReader::new(&*file);
        let io_error = |error| EngineError::io(&name, error);
        let mut position = FILE_HEADER_BYTES;
        // Within a file sequences go on without a hole, so the first one a batch may have is known.
        let mut expected = self.files[number]
            .first_sequence
            .unwrap_or(self.next_sequence);
        loop {
            let Some(header) = BatchHeader::decode(
                reader.at(position, BATCH_HEADER_BYTES).map_err(io_error)?,
                generation,
            ) else {
                return Ok(position);
            };
            if header.first_sequence != expected {
                return Ok(position);
            }
            self.prove(header.synced_up_to);
            let start = position + BATCH_HEADER_BYTES as u64;
            let bytes = reader
                .at(start, header.frame_bytes as usize)
                .map_err(io_error)?;
            let batch = whole_groups(bytes, generation, &header);
            for (frame, raw) in &batch.frames {
                if frame.sequence >= self.next_sequence {
                    if frame.sequence > self.checkpoint {
                        replay.apply(frame)?;
                        if replay.frames.is_multiple_of(PROGRESS_EVERY_FRAMES) {
                            progress(&format!("recovering: {} frames", replay.frames));
                        }
                    }
                    if frame.sequence > self.synced {
                        self.unproven.push((frame.sequence, raw.to_vec()));
                    }
                    self.next_sequence = frame.sequence + 1;
                }
            }
            expected += batch.frames.len() as u64;
            self.retained_bytes += header.frame_bytes as u64;
            if !batch.whole {
                return Ok(start + batch.valid_bytes);
            }
            position = start + u64::from(header.frame_bytes);
        }
    }

    fn prove(&mut self, synced_up_to: u64) {
        if synced_up_to > self.synced {
            self.synced = synced_up_to;
            self.unproven
                .retain(|(sequence, _)| *sequence > synced_up_to);
        }
    }

    /// The log ends here. Nothing behind may prove that more of it had been synced: neither in the rest of this
    /// file nor in those that were written while this one was not yet synced. Files without a first batch are
    /// spares, unless something valid lies behind the cut.
    fn check_cut(
        &self,
        number: usize,
        stopped_at: u64,
        damage: EngineError,
    ) -> Result<(), EngineError> {
        let mut from = stopped_at;
        let mut goes_on = false;
        for file in &self.files[number..] {
            if from != stopped_at && file.first_sequence.is_none() && !goes_on && !file.garbled {
                continue;
            }
            let behind = self.look_behind(file, from)?;
            if let Some(synced_up_to) = behind.proof {
                let detail = format!("{}: frames up to {synced_up_to} were", damage.detail);
                return Err(EngineError::new(damage.code, detail));
            }
            goes_on |= behind.batches > 0;
            from = FILE_HEADER_BYTES;
        }
        Ok(())
    }

    /// Looks for batch headers behind `position`, up to one that says that a missing frame had been synced.
    fn look_behind(&self, file: &LogFile, mut position: u64) -> Result<Behind, EngineError> {
        let io_error = |error| EngineError::io(&file.name, error);
        let mut reader = FileReader::new(&*file.wal.file);
        let mut behind = Behind::default();
        while position + (BATCH_HEADER_BYTES as u64) <= file.wal.capacity {
            let window = reader.at(position, READ_PIECE_BYTES).map_err(io_error)?;
            let Some(found) = memchr::memmem::find(window, b"MSB1") else {
                if window.len() < READ_PIECE_BYTES {
                    break;
                }
                position += (window.len() - 3) as u64;
                continue;
            };
            position += found as u64;
            let header = reader.at(position, BATCH_HEADER_BYTES).map_err(io_error)?;
            if let Some(header) = BatchHeader::decode(header, file.wal.generation) {
                behind.batches += 1;
                if header.synced_up_to >= self.next_sequence {
                    behind.proof = Some(header.synced_up_to);
                    break;
                }
            }
            position += 4;
        }
        Ok(behind)
    }
}

/// Whether the place of a first batch holds neither zeros nor what an earlier use of the file left there.
fn is_garbled(head: &[u8]) -> bool {
    let Some(place) = head.get(FILE_HEADER_BYTES as usize..) else {
        return false;
    };
    let earlier = place
        .get(8..16)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u64::from_le_bytes)
        .is_some_and(|generation| BatchHeader::decode(place, generation).is_some());
    !earlier && place.iter().any(|byte| *byte != 0)
}

/// What lies behind the place where the log was cut.
#[derive(Default)]
struct Behind {
    batches: u64,
    /// Everything up to this sequence had been synced when a batch was written.
    proof: Option<u64>,
}

struct BatchFrames<'b> {
    frames: Vec<(Frame<'b>, &'b [u8])>,
    valid_bytes: u64,
    whole: bool,
}

/// Frames of a batch up to the first bad one, without a group that is not whole.
fn whole_groups<'b>(bytes: &'b [u8], generation: u64, header: &BatchHeader) -> BatchFrames<'b> {
    let mut frames: Vec<(Frame<'b>, &'b [u8])> = Vec::with_capacity(header.frames as usize);
    let mut at = 0;
    while frames.len() < header.frames as usize {
        let expected = header.first_sequence + frames.len() as u64;
        match Frame::decode(&bytes[at..], generation) {
            Some((frame, length)) if frame.sequence == expected => {
                frames.push((frame, &bytes[at..at + length]));
                at += length;
            }
            _ => break,
        }
    }
    let whole = frames.len() == header.frames as usize && at == header.frame_bytes as usize;
    while frames.last().is_some_and(|(frame, _)| {
        frame.flags & FLAG_MORE != 0 && !sabotage::is(Sabotage::SplitGroups)
    }) {
        frames.pop();
    }
    BatchFrames {
        frames,
        valid_bytes: at as u64,
        whole,
    }
}

/// Reads a file forward in large pieces.
pub(crate) struct FileReader<'f> {
    file: &'f dyn DiskFile,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were read.
    filled: usize,
    start: u64,
}

impl<'f> FileReader<'f> {
    pub(crate) fn new(file: &'f dyn DiskFile) -> FileReader<'f> {
        FileReader {
            file,
            buffer: Vec::new(),
            filled: 0,
            start: 0,
        }
    }

    /// Up to `length` bytes at `position`; fewer only at the end of the file.
    pub(crate) fn at(&mut self, position: u64, length: usize) -> std::io::Result<&[u8]> {
        let inside =
            position >= self.start && position + length as u64 <= self.start + self.filled as u64;
        if !inside {
            let wanted = length.max(READ_PIECE_BYTES);
            if self.buffer.len() < wanted {
                // Zeroed by the allocator, and once.
                self.buffer = vec![0; wanted];
            }
            self.filled = read_up_to_at(self.file, &mut self.buffer, position)?;
            self.start = position;
        }
        let from = (position - self.start) as usize;
        let to = (from + length).min(self.filled);
        Ok(&self.buffer[from..to])
    }
}

fn corrupt(file: &str, byte: u64, what: &str) -> EngineError {
    EngineError::new("log_damaged", format!("{file} at byte {byte}: {what}"))
}
