//! What a start writes: a new log file with everything that is not proven to be synced, and the start frame that
//! says what the end of the last run may have cost.
//!
//! Invariant: nothing of the log is visible before [`begin_new_file`] has returned, with everything synced.

use crate::codec::{
    BATCH_HEADER_BYTES, BatchHeader, FILE_HEADER_BYTES, FLAG_MORE, FRAME_HEADER_BYTES, Frame,
    FrameKind, seal_batch,
};
use crate::config::Config;
use crate::error::EngineError;
use crate::io::sabotage::{self, Sabotage};
use crate::io::{Disk, Doors, write_all_at};
use crate::limits::{BATCH_MAX_BYTES, WAL_FIRST_FILE_BYTES};
use crate::log::replay::NO_BOOT_ID;
use crate::log::scan::Scan;
use crate::log::wal::{FAILED_MARK, WalFile, prepare_new};
use crate::model::{Class, EPOCHS_USED_UP, StreamId, next_epoch, restored_epoch};
use crate::stream::offsets::{GapReason, Loss, Losses};

pub(super) struct Started {
    pub(super) file: WalFile,
    pub(super) position: u64,
    pub(super) next_sequence: u64,
    pub(super) losses: Losses,
    pub(super) highest_epoch: u64,
    pub(super) generation: u64,
}

/// How the last run of this directory ended, and so what may be missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
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

pub(super) struct LastRun {
    pub(super) losses: Losses,
    pub(super) highest_epoch: u64,
    pub(super) ended: Ended,
}

impl LastRun {
    fn next_epoch(&self, now_ms: u64) -> Result<u64, EngineError> {
        let taken = if self.ended == Ended::Elsewhere {
            restored_epoch(self.highest_epoch, now_ms)
        } else {
            next_epoch(self.highest_epoch, now_ms)
        };
        taken.ok_or_else(|| EngineError::new("epochs_used_up", EPOCHS_USED_UP))
    }
}

pub(super) fn has_failed_mark(disk: &dyn Disk) -> Result<bool, EngineError> {
    let entries = disk
        .list("")
        .map_err(|error| EngineError::io("data directory", error))?;
    Ok(entries.iter().any(|entry| entry.name == FAILED_MARK))
}

/// Begins the new file: copies what is not proven to be synced, then the start frame, all synced.
pub(super) fn begin_new_file(
    doors: &Doors,
    scan: &Scan,
    config: &Config,
    last: LastRun,
) -> Result<Started, EngineError> {
    let io_error = |error| EngineError::io("new log file", error);
    let now_ms = doors.clock.wall_ms();
    let epoch = last.next_epoch(now_ms)?;
    let mut losses = last.losses;
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
