//! The log of a backup: every frame between the catalog's checkpoint and the commit number, in one file of
//! generation 1.
//!
//! The frames lie in files of this run only, because a checkpoint of this run is behind the catalog that was
//! copied; older files may hold frames that a recovery has given up. Everything up to the commit number is synced,
//! so that it can be read beside the commit thread.
//!
//! Frames of commits name staged packs, which the copy needs beside those of the catalog.
//!
//! Invariants: no frame is missing and none is behind the commit number, or the backup fails; groups stay whole,
//! because a commit number is the end of a batch.

use std::collections::BTreeSet;
use std::io;

use crate::codec::{
    BATCH_HEADER_BYTES, BatchHeader, FILE_HEADER_BYTES, FLAG_MORE, Frame, FrameKind, adopt,
    file_header, parse_file_header, seal_batch,
};
use crate::io::{Disk, DiskFile, OpenMode, read_exact_at, read_up_to_at};
use crate::log::wal::{WAL_DIR, file_name, generation_of};

use super::manifest::{FileRecord, SequentialWriter};

/// The only log file of a backup.
const GENERATION: u64 = 1;
/// A batch of the copy is written at this size; a group may make it longer.
const BATCH_BYTES: usize = 1 << 20;

/// The log of a backup, and the staged packs that its frames have taken over.
pub struct CopiedLog {
    pub record: FileRecord,
    pub adopted: BTreeSet<u32>,
}

/// Copies frames `checkpoint + 1 ..= commit`. `wrote` is told how many bytes each step wrote.
pub fn copy_log<E: From<io::Error>>(
    from: &dyn Disk,
    to: &dyn Disk,
    first_generation: u64,
    checkpoint: u64,
    commit: u64,
    wrote: &mut dyn FnMut(u64) -> Result<(), E>,
) -> Result<CopiedLog, E> {
    to.create_dir_all(WAL_DIR)?;
    let mut out = LogWriter {
        out: SequentialWriter::create(to, &file_name(GENERATION))?,
        batch: vec![0; BATCH_HEADER_BYTES],
        frames: 0,
        first: 0,
        number: 0,
        adopted: BTreeSet::new(),
    };
    out.out.write(&file_header(GENERATION))?;
    let mut next = checkpoint + 1;
    for generation in generations(from, first_generation)? {
        if next > commit {
            break;
        }
        copy_file(from, generation, commit, &mut next, &mut out, wrote)?;
    }
    if next <= commit {
        let what = format!("the log ends before frame {next} of {commit}");
        return Err(E::from(io::Error::new(io::ErrorKind::InvalidData, what)));
    }
    out.flush()?;
    Ok(CopiedLog {
        record: out.out.finish()?,
        adopted: out.adopted,
    })
}

/// Log files of this run in the order of their use.
fn generations(disk: &dyn Disk, first: u64) -> io::Result<Vec<u64>> {
    let entries = disk.list(WAL_DIR)?;
    let mut found: Vec<u64> = entries
        .iter()
        .filter_map(|entry| generation_of(&entry.name))
        .filter(|generation| *generation >= first)
        .collect();
    found.sort_unstable();
    Ok(found)
}

fn copy_file<E: From<io::Error>>(
    from: &dyn Disk,
    generation: u64,
    commit: u64,
    next: &mut u64,
    out: &mut LogWriter,
    wrote: &mut dyn FnMut(u64) -> Result<(), E>,
) -> Result<(), E> {
    let file = match from.open(&file_name(generation), OpenMode::Read) {
        Ok(file) => file,
        // Renamed for its next use, which is behind the commit number.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let mut head = [0u8; FILE_HEADER_BYTES as usize];
    let count = read_up_to_at(&*file, &mut head, 0)?;
    if parse_file_header(&head[..count]) != Some(generation) {
        return Ok(());
    }
    let mut position = FILE_HEADER_BYTES;
    let mut bytes = Vec::new();
    while *next <= commit {
        let Some(header) = batch_header(&*file, generation, position)? else {
            return Ok(());
        };
        let behind = header.first_sequence + u64::from(header.frames);
        if header.first_sequence > *next {
            let what = format!(
                "{} at byte {position} begins at {} where {next} is expected",
                file_name(generation),
                header.first_sequence
            );
            return Err(E::from(io::Error::new(io::ErrorKind::InvalidData, what)));
        }
        let start = position + BATCH_HEADER_BYTES as u64;
        if behind > *next {
            bytes.resize(header.frame_bytes as usize, 0);
            read_exact_at(&*file, &mut bytes, start)?;
            if !copy_frames(&bytes, generation, commit, next, out)? {
                return Err(damaged(generation, start, *next).into());
            }
            wrote(bytes.len() as u64)?;
        }
        position = start + u64::from(header.frame_bytes);
    }
    Ok(())
}

fn batch_header(
    file: &dyn DiskFile,
    generation: u64,
    position: u64,
) -> io::Result<Option<BatchHeader>> {
    let mut head = [0u8; BATCH_HEADER_BYTES];
    let count = read_up_to_at(file, &mut head, position)?;
    Ok(BatchHeader::decode(&head[..count], generation))
}

/// `false`: a frame does not validate.
fn copy_frames(
    bytes: &[u8],
    generation: u64,
    commit: u64,
    next: &mut u64,
    out: &mut LogWriter,
) -> io::Result<bool> {
    let mut at = 0;
    while at < bytes.len() {
        let Some((frame, length)) = Frame::decode(&bytes[at..], generation) else {
            return Ok(false);
        };
        if frame.sequence == *next && *next <= commit {
            out.push(&frame, &bytes[at..at + length])?;
            *next += 1;
        }
        at += length;
    }
    Ok(true)
}

fn damaged(generation: u64, byte: u64, frame: u64) -> io::Error {
    let what = format!(
        "{} is damaged behind byte {byte}: frame {frame} does not validate",
        file_name(generation)
    );
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Packs frames into batches again, under the checksums of their new file.
struct LogWriter {
    out: SequentialWriter,
    batch: Vec<u8>,
    frames: u32,
    first: u64,
    number: u64,
    adopted: BTreeSet<u32>,
}

impl LogWriter {
    fn push(&mut self, frame: &Frame<'_>, raw: &[u8]) -> io::Result<()> {
        if frame.kind == FrameKind::Adopt {
            let sections = adopt::decode(frame.payload).unwrap_or_default();
            let needed = sections.iter().filter(|section| section.len > 0);
            self.adopted.extend(needed.map(|section| section.pack));
        }
        if self.frames == 0 {
            self.first = frame.sequence;
        }
        self.batch.extend_from_slice(raw);
        self.frames += 1;
        // A group stays in one batch: recovery takes it whole or not at all.
        if self.batch.len() >= BATCH_BYTES && frame.flags & FLAG_MORE == 0 {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.frames == 0 {
            return Ok(());
        }
        let header = BatchHeader {
            generation: GENERATION,
            number: self.number,
            term: 0,
            synced_up_to: self.first - 1,
            first_sequence: self.first,
            frame_bytes: (self.batch.len() - BATCH_HEADER_BYTES) as u32,
            frames: self.frames,
        };
        seal_batch(&mut self.batch, &header);
        self.out.write(&self.batch)?;
        self.batch.truncate(BATCH_HEADER_BYTES);
        self.frames = 0;
        self.number += 1;
        Ok(())
    }
}
