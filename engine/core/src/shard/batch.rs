//! The open batch: frames staged for the next group commit.
//!
//! Offset and sequence are taken together, under the stream's lock and then the batch's, so that no later
//! offset can be in an earlier batch. The frame is encoded straight into the batch.

use std::sync::Arc;

use crate::codec::{BATCH_HEADER_BYTES, BatchHeader, FLAG_MORE, FLAG_TOUCHES, Frame};
use crate::limits::{BATCH_MAX_BYTES, WAL_RESERVE_BYTES};
use crate::log::wal::{Placement, WalCursor};
use crate::model::Stage;
use crate::stream::handle::Stream;
use crate::stream::state::{StreamState, Visible};

/// Why a frame was not staged; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotStaged {
    /// The batch is at its bound or the next log file is not ready yet: wait for the next commit.
    Wait,
    /// No disk space for the log.
    Full,
    /// The log has failed; the server must be restarted.
    Failed,
}

/// A stream that this batch changes, what becomes visible with it, and at which watermark.
pub struct Touched {
    pub stream: Arc<Stream>,
    pub visible: Visible,
    pub stage: Stage,
}

pub struct OpenBatch {
    pub bytes: Vec<u8>,
    pub frames: u32,
    pub first_sequence: u64,
    pub next_sequence: u64,
    pub number: u64,
    /// Newest sequence that somebody wants synced now; goes on from batch to batch.
    pub sync_target: u64,
    /// How many frames wait for less than the sync: the batch is written without waiting for a running one.
    pub weak_frames: u32,
    /// Somebody waits for this batch to be written: `disk`.
    pub has_disk: bool,
    pub touched: Vec<Touched>,
    pub cursor: WalCursor,
    /// Set when preparing log files fails for lack of space.
    pub storage_full: bool,
    /// Set while a checkpoint of what is in the log would hardly find the space it needs.
    pub checkpoint_full: bool,
}

/// A batch taken for writing.
pub struct SealedBatch {
    pub bytes: Vec<u8>,
    pub frames: u32,
    pub first_sequence: u64,
    pub last_sequence: u64,
    pub number: u64,
    pub has_disk: bool,
    pub touched: Vec<Touched>,
    pub placement: Option<Placement>,
}

impl OpenBatch {
    pub fn new(cursor: WalCursor, next_sequence: u64) -> OpenBatch {
        OpenBatch {
            bytes: vec![0; BATCH_HEADER_BYTES],
            frames: 0,
            first_sequence: next_sequence,
            next_sequence,
            number: 1,
            sync_target: 0,
            weak_frames: 0,
            has_disk: false,
            touched: Vec::new(),
            cursor,
            storage_full: false,
            checkpoint_full: false,
        }
    }

    /// Whether frames of this many bytes may be added now. Control frames may use the reserve.
    pub fn admit(&self, bytes: usize, control: bool) -> Result<(), NotStaged> {
        if self.checkpoint_full && !control {
            return Err(NotStaged::Full);
        }
        let total = self.bytes.len() + bytes;
        if self.frames > 0 && total > BATCH_MAX_BYTES && !control {
            return Err(NotStaged::Wait);
        }
        if self.cursor.has_room(total as u64, control) {
            return Ok(());
        }
        Err(if self.storage_full {
            NotStaged::Full
        } else {
            NotStaged::Wait
        })
    }

    /// Stages one frame; `more` = the next one belongs to the same group. Returns its sequence.
    pub fn push(&mut self, mut frame: Frame<'_>, more: bool) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        frame.sequence = sequence;
        frame.flags |= FLAG_TOUCHES | if more { FLAG_MORE } else { 0 };
        frame.encode(&mut self.bytes);
        self.frames += 1;
        sequence
    }

    /// Notes who waits for the frame just staged, and how far it must come.
    pub fn wants(&mut self, sequence: u64, stage: Stage) {
        match stage {
            Stage::Synced => self.sync_target = self.sync_target.max(sequence),
            Stage::Written => {
                self.weak_frames += 1;
                self.has_disk = true;
            }
            Stage::Applied => self.weak_frames += 1,
        }
    }

    /// Notes what becomes visible when this batch has reached `stage`; one note per stream, batch and stage.
    pub fn touch(
        &mut self,
        stream: &Arc<Stream>,
        state: &mut StreamState,
        visible: Visible,
        stage: Stage,
    ) {
        let (number, slot) = state.batch_slot;
        if number == self.number {
            let touched = &mut self.touched[slot as usize];
            if touched.stage == stage {
                touched.visible = touched.visible.max(visible);
                return;
            }
        }
        state.batch_slot = (self.number, self.touched.len() as u32);
        self.touched.push(Touched {
            stream: Arc::clone(stream),
            visible,
            stage,
        });
    }

    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Takes the batch for writing and opens the next one in `spare`.
    pub fn seal(&mut self, mut spare: Vec<u8>) -> SealedBatch {
        spare.clear();
        spare.resize(BATCH_HEADER_BYTES, 0);
        let bytes = std::mem::replace(&mut self.bytes, spare);
        let placement = if self.frames > 0 {
            self.cursor.place(bytes.len() as u64)
        } else {
            None
        };
        let sealed = SealedBatch {
            bytes,
            frames: self.frames,
            first_sequence: self.first_sequence,
            last_sequence: self.next_sequence - 1,
            number: self.number,
            has_disk: self.has_disk,
            touched: std::mem::take(&mut self.touched),
            placement,
        };
        self.frames = 0;
        self.first_sequence = self.next_sequence;
        self.number += 1;
        self.weak_frames = 0;
        self.has_disk = false;
        sealed
    }
}

impl SealedBatch {
    pub fn header(&self, generation: u64, synced_up_to: u64) -> BatchHeader {
        BatchHeader {
            generation,
            number: self.number,
            term: 0,
            synced_up_to,
            first_sequence: self.first_sequence,
            frame_bytes: (self.bytes.len() - BATCH_HEADER_BYTES) as u32,
            frames: self.frames,
        }
    }
}

// Control frames must always fit into what `admit` keeps back from appends.
const _: () = assert!(WAL_RESERVE_BYTES as usize > 16 * 4096);
