//! Start-up: read the log, rebuild what it promises, and begin a new file.
//!
//! A bad frame at or below what is proven to have been synced is corruption: the server refuses to start and
//! names file and byte. Anything beyond is a torn tail, cut at the first bad frame even if valid ones follow,
//! because pages land out of order.
//!
//! Invariants
//! - `I-RECOVER-1` Before anything recovered is visible, all frames above the proven sync are in the new file,
//!   synced: a page that survived in the cache may still die with the power.
//! - `I-RECOVER-2` Recovery changes no old file, so that it can run again and give the same.

use crate::report;
use std::sync::Arc;

use crate::codec::{
    BATCH_HEADER_BYTES, BatchHeader, FILE_HEADER_BYTES, FLAG_MORE, FRAME_HEADER_BYTES, Frame,
    FrameKind, parse_file_header, seal_batch,
};
use crate::config::Config;
use crate::error::EngineError;
use crate::io::sabotage::{self, Sabotage};
use crate::io::{BootId, Disk, DiskFile, Doors, OpenMode, read_up_to_at, write_all_at};
use crate::limits::{BATCH_MAX_BYTES, OPEN_FILES_MAX, WAL_FIRST_FILE_BYTES};
use crate::log::catalog::{CATALOG_FILE, Catalog};
use crate::log::checkpoint::{META_BOOT, META_CHECKPOINT, META_HIGHEST_EPOCH, META_LOSSES};
use crate::log::cold::ColdStore;
use crate::log::directory::Directory;
use crate::log::replay::{NO_BOOT_ID, Replay};
use crate::log::wal::{FAILED_MARK, WAL_DIR, WalFile, generation_of, prepare_new};
use crate::metrics::Metrics;
use crate::model::{Class, StreamId};
use crate::stream::offsets::{GapReason, Loss, Losses};

pub(crate) const FORMAT_FILE: &str = "format";
/// Where a restore collects its files before they get their places.
pub(crate) const RESTORE_DIRECTORY: &str = "restore.partial";
pub(crate) const FORMAT_FILE_NEW: &str = "format.new";
pub(crate) const FORMAT: &[u8] = b"millstream 1\n";
const READ_PIECE_BYTES: usize = 4 << 20;
const PROGRESS_EVERY_FRAMES: u64 = 250_000;

/// What a start needs to go on.
pub struct Recovered {
    pub directory: Directory,
    pub cold: ColdStore,
    pub current: WalFile,
    /// Bytes of the new file already used.
    pub position: u64,
    pub next_sequence: u64,
    /// Older files with the last sequence in each.
    pub retained: Vec<(WalFile, u64)>,
    pub losses: Losses,
    pub highest_epoch: u64,
    pub highest_generation: u64,
    pub unneeded: Vec<StreamId>,
    pub frames: u64,
    pub clean: bool,
}

pub fn recover(
    config: &Config,
    doors: &Doors,
    metrics: &Arc<Metrics>,
    progress: &mut dyn FnMut(&str),
) -> Result<Recovered, EngineError> {
    let disk = &*doors.disk;
    let fresh = check_format(disk)?;
    let names = log_files(disk)?;
    check_presence(disk, fresh, names.is_empty())?;
    let catalog = Arc::new(Catalog::open(Arc::clone(&doors.disk)).map_err(EngineError::from)?);
    let meta_number = |name: &str| -> Result<u64, EngineError> {
        let value = catalog.meta(name).map_err(EngineError::from)?;
        Ok(value
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u64::from_le_bytes))
    };
    let checkpoint = meta_number(META_CHECKPOINT)?;
    let highest_epoch = meta_number(META_HIGHEST_EPOCH)?;
    let meta_bytes = |name: &str| -> Result<Vec<u8>, EngineError> {
        let value = catalog.meta(name).map_err(EngineError::from)?;
        Ok(value.unwrap_or_default())
    };
    let losses = Losses::decode(&meta_bytes(META_LOSSES)?)
        .ok_or_else(|| EngineError::new("catalog_damaged", "the list of losses does not decode"))?;
    let last_boot = BootId::try_from(meta_bytes(META_BOOT)?).ok();
    let cold = ColdStore::new(Arc::clone(&doors.disk), OPEN_FILES_MAX)
        .map_err(|error| EngineError::io("cold store", error))?;
    let directory = Directory::new(catalog, Arc::clone(metrics));

    let mut scan = Scan::open(disk, &names, checkpoint)?;
    let mut replay = Replay::new(&directory, metrics, losses, highest_epoch, last_boot);
    scan.run(&mut replay, progress)?;
    replay.finish()?;
    directory.give_expiry_slack();
    let failed = has_failed_mark(disk)?;
    let last = LastRun {
        losses: replay.losses.clone(),
        highest_epoch: replay.highest_epoch,
        ended: if config.restored {
            Ended::Elsewhere
        } else if replay.clean || (fresh && names.is_empty()) {
            Ended::Cleanly
        } else if !failed && doors.boot_id.is_some() && replay.boot_id == doors.boot_id {
            Ended::Killed
        } else {
            Ended::WithTheMachine
        },
    };
    let clean = last.ended == Ended::Cleanly;
    let (unneeded, frames) = (std::mem::take(&mut replay.unneeded), replay.frames);
    let started = begin_new_file(doors, &scan, config, last)?;
    if fresh {
        finish_directory(disk)?;
    }
    if failed {
        // What the failure may have cost is in the start frame now.
        disk.remove(FAILED_MARK)
            .and_then(|()| disk.sync_dir(""))
            .map_err(|error| EngineError::io(FAILED_MARK, error))?;
    }
    if frames > 0 {
        progress(&format!(
            "recovered {frames} frames from {} log files",
            names.len()
        ));
    }
    metrics.wal_retained_bytes.set(scan.retained_bytes);
    Ok(Recovered {
        directory,
        cold,
        current: started.file,
        position: started.position,
        next_sequence: started.next_sequence,
        retained: scan
            .files
            .into_iter()
            .map(|file| (file.wal, file.last_sequence))
            .collect(),
        losses: started.losses,
        highest_epoch: started.highest_epoch,
        highest_generation: started.generation,
        unneeded,
        frames,
        clean,
    })
}

/// Refuses directories of another format; begins a new one. Returns whether it is new.
///
/// A new directory has its mark under another name until its first start is through: as long as only that one is
/// there nothing was ever promised, and whatever a first start that died has left is swept away.
fn check_format(disk: &dyn Disk) -> Result<bool, EngineError> {
    let io_error = |error| EngineError::io("format file", error);
    let present = disk.list("").map_err(io_error)?;
    let has = |name: &str| present.iter().find(|entry| entry.name == name);
    if let Some(entry) = has(FORMAT_FILE) {
        let file = disk.open(FORMAT_FILE, OpenMode::Read).map_err(io_error)?;
        let mut bytes = vec![0; entry.len.min(64) as usize];
        let count = read_up_to_at(&*file, &mut bytes, 0).map_err(io_error)?;
        if &bytes[..count] == FORMAT {
            return Ok(false);
        }
        let found = String::from_utf8_lossy(&bytes[..count]).trim().to_owned();
        return Err(EngineError::new(
            "format_unknown",
            format!("the data directory has format {found:?}; this version reads \"millstream 1\""),
        ));
    }
    let foreign = [WAL_DIR, CATALOG_FILE, RESTORE_DIRECTORY]
        .into_iter()
        .find_map(has);
    if let (Some(foreign), None) = (foreign, has(FORMAT_FILE_NEW)) {
        return Err(EngineError::new(
            "format_missing",
            format!(
                "the data directory has {:?} but no format file",
                foreign.name
            ),
        ));
    }
    begin_directory(disk, has(CATALOG_FILE).is_some()).map_err(io_error)?;
    Ok(true)
}

/// Writes the mark of a directory that is being made, then removes what an earlier attempt may have left.
fn begin_directory(disk: &dyn Disk, has_catalog: bool) -> std::io::Result<()> {
    let file = disk.open(FORMAT_FILE_NEW, OpenMode::CreateOrOpen)?;
    file.set_len(0)?;
    write_all_at(&*file, FORMAT, 0)?;
    file.sync_all()?;
    // Before anything else has a name: what follows is recognised by this one.
    disk.sync_dir("")?;
    disk.create_dir_all(WAL_DIR)?;
    for entry in disk.list(WAL_DIR)? {
        disk.remove(&format!("{WAL_DIR}/{}", entry.name))?;
    }
    if has_catalog {
        disk.remove(CATALOG_FILE)?;
    }
    disk.sync_dir(WAL_DIR)?;
    disk.sync_dir("")
}

/// The first start is through: from here on log and catalog must both be there.
fn finish_directory(disk: &dyn Disk) -> Result<(), EngineError> {
    disk.rename(FORMAT_FILE_NEW, FORMAT_FILE)
        .and_then(|()| disk.sync_dir(""))
        .map_err(|error| EngineError::io("format file", error))
}

fn log_files(disk: &dyn Disk) -> Result<Vec<u64>, EngineError> {
    let entries = match disk.list(WAL_DIR) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(EngineError::io("log directory", error)),
    };
    let mut generations = Vec::new();
    for entry in entries {
        match generation_of(&entry.name) {
            Some(generation) => generations.push(generation),
            None => report!("ignoring foreign file {}/{}", WAL_DIR, entry.name),
        }
    }
    generations.sort_unstable();
    Ok(generations)
}

/// A directory that was in use has both a log and a catalog; one without the other lost a part.
fn check_presence(disk: &dyn Disk, fresh: bool, no_log: bool) -> Result<(), EngineError> {
    let entries = disk
        .list("")
        .map_err(|error| EngineError::io("data directory", error))?;
    let catalog = entries.iter().any(|entry| entry.name == CATALOG_FILE);
    if !fresh && catalog && no_log {
        return Err(EngineError::new(
            "log_missing",
            "the catalog is there but the log directory is empty or missing; is a device not mounted?",
        ));
    }
    if !catalog && !no_log {
        return Err(EngineError::new(
            "catalog_missing",
            "the log is there but the catalog is missing; restore catalog.redb or move the directory aside",
        ));
    }
    Ok(())
}

struct LogFile {
    wal: WalFile,
    name: String,
    first_sequence: Option<u64>,
    last_sequence: u64,
    /// Something was written where the first batch lies, and it does not check.
    garbled: bool,
}

/// The walk over all log files.
struct Scan {
    files: Vec<LogFile>,
    checkpoint: u64,
    /// Sequence the next frame must have.
    next_sequence: u64,
    /// Highest sequence proven to have been synced.
    synced: u64,
    /// Frames above the proven sync, as encoded, with their sequence.
    unproven: Vec<(u64, Vec<u8>)>,
    retained_bytes: u64,
    highest_generation: u64,
}

impl Scan {
    fn open(disk: &dyn Disk, generations: &[u64], checkpoint: u64) -> Result<Scan, EngineError> {
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

    fn run(
        &mut self,
        replay: &mut Replay<'_>,
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
        replay: &mut Replay<'_>,
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

struct Started {
    file: WalFile,
    position: u64,
    next_sequence: u64,
    losses: Losses,
    highest_epoch: u64,
    generation: u64,
}

/// How the last run of this directory ended, and so what may be missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ended {
    Cleanly,
    /// The process died; what it had written is still in the page cache.
    Killed,
    /// The machine died too, or a write had failed: what was not synced may be gone.
    WithTheMachine,
    /// This is a copy: the original may have gone on.
    Elsewhere,
}

impl Ended {
    fn loss(self, epoch: u64) -> Loss {
        let (reach, reason) = match self {
            Ended::Cleanly => (Class::Ephemeral, GapReason::Crash),
            Ended::Killed => (Class::Memory, GapReason::Crash),
            Ended::WithTheMachine => (Class::Disk, GapReason::Crash),
            Ended::Elsewhere => (Class::Object, GapReason::Restore),
        };
        Loss {
            epoch,
            reach,
            reason,
        }
    }
}

struct LastRun {
    losses: Losses,
    highest_epoch: u64,
    ended: Ended,
}

fn has_failed_mark(disk: &dyn Disk) -> Result<bool, EngineError> {
    let entries = disk
        .list("")
        .map_err(|error| EngineError::io("data directory", error))?;
    Ok(entries.iter().any(|entry| entry.name == FAILED_MARK))
}

/// Begins the new file: copies what is not proven to be synced, then the start frame, all synced.
fn begin_new_file(
    doors: &Doors,
    scan: &Scan,
    config: &Config,
    last: LastRun,
) -> Result<Started, EngineError> {
    let io_error = |error| EngineError::io("new log file", error);
    let now_ms = doors.clock.wall_ms();
    let mut losses = last.losses;
    let epoch = (last.highest_epoch + 1).max(now_ms);
    let mut loss = last.ended.loss(epoch);
    if sabotage::is(Sabotage::SilentLoss) {
        loss.epoch = 0;
    }
    losses.add(loss);
    let copied: u64 = scan.unproven.iter().map(|(_, raw)| raw.len() as u64).sum();
    let generation = scan.highest_generation + 1;
    let batches = copied / BATCH_MAX_BYTES as u64 + 2;
    let need = FILE_HEADER_BYTES
        + copied
        + (batches + 1) * (BATCH_HEADER_BYTES + FRAME_HEADER_BYTES + 64) as u64;
    let capacity = (need + WAL_FIRST_FILE_BYTES / 2)
        .max(WAL_FIRST_FILE_BYTES.min(config.wal_file_bytes_effective()));
    let file = prepare_new(&*doors.disk, generation, capacity).map_err(io_error)?;
    let mut writer = NewFile {
        file,
        position: FILE_HEADER_BYTES,
        synced: scan.synced,
        number: 0,
    };
    let mut batch = Vec::new();
    let mut first = 0;
    let mut frames = 0;
    for (sequence, raw) in &scan.unproven {
        if sabotage::is(Sabotage::TrustPageCache) {
            break;
        }
        if frames == 0 {
            batch.clear();
            batch.resize(BATCH_HEADER_BYTES, 0);
            first = *sequence;
        }
        batch.extend_from_slice(raw);
        frames += 1;
        // A group stays in one batch: recovery takes it whole or not at all.
        if batch.len() > BATCH_MAX_BYTES && raw[9] & FLAG_MORE == 0 {
            writer.write(&mut batch, first, frames).map_err(io_error)?;
            frames = 0;
        }
    }
    if frames > 0 {
        writer.write(&mut batch, first, frames).map_err(io_error)?;
    }
    let sequence = scan.next_sequence;
    batch.clear();
    batch.resize(BATCH_HEADER_BYTES, 0);
    let mut payload = Vec::new();
    loss.encode(&mut payload);
    payload.extend_from_slice(&doors.boot_id.unwrap_or(NO_BOOT_ID));
    let start = Frame {
        sequence,
        payload: &payload,
        ..Frame::control(FrameKind::Start, StreamId(0), now_ms)
    };
    start.encode(&mut batch);
    writer.write(&mut batch, sequence, 1).map_err(io_error)?;
    writer.file.file.sync().map_err(io_error)?;
    Ok(Started {
        position: writer.position,
        file: writer.file,
        next_sequence: sequence + 1,
        losses,
        highest_epoch: epoch,
        generation,
    })
}

struct NewFile {
    file: WalFile,
    position: u64,
    synced: u64,
    number: u64,
}

impl NewFile {
    fn write(&mut self, batch: &mut [u8], first_sequence: u64, frames: u32) -> std::io::Result<()> {
        let header = BatchHeader {
            generation: self.file.generation,
            number: self.number,
            term: 0,
            synced_up_to: self.synced,
            first_sequence,
            frame_bytes: (batch.len() - BATCH_HEADER_BYTES) as u32,
            frames,
        };
        seal_batch(batch, &header);
        write_all_at(&*self.file.file, batch, self.position)?;
        self.position += batch.len() as u64;
        self.number += 1;
        Ok(())
    }
}

fn corrupt(file: &str, byte: u64, what: &str) -> EngineError {
    EngineError::new("log_damaged", format!("{file} at byte {byte}: {what}"))
}
