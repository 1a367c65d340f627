//! Log files: prewritten, recycled, placed ahead of time.
//!
//! A file is named by its generation (`wal/<16 hex digits>.wal`) and gets name, header and zeros *before* it is
//! used, by the maintenance thread, so that rolling over costs the commit path nothing. Prewritten files halve
//! the latency of a sync: no extent changes state, so no journal write goes with it.
//!
//! Invariants
//! - `I-WAL-1` A batch never spans files; where it will lie is decided when it is sealed.
//! - `I-WAL-2` A file is recycled only when every frame in it is covered by a checkpoint. Its new generation
//!   makes all old frames invalid.
//! - `I-WAL-3` Frames are admitted only against room that is already prewritten.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::codec::{BATCH_HEADER_BYTES, FILE_HEADER_BYTES, file_header};
use crate::io::{Disk, DiskFile, OpenMode, write_all_at};
use crate::limits::WAL_RESERVE_BYTES;

pub const WAL_DIR: &str = "wal";
/// Left in the data directory when a write or sync of the log has failed: what was written but not synced may be
/// gone although the machine has not restarted.
pub const FAILED_MARK: &str = "log-failed";
/// A write is not interrupted on many kernels, and appends wait for the core meanwhile: small pieces.
const ZERO_PIECE_BYTES: usize = 256 << 10;

/// A prepared log file.
pub struct WalFile {
    pub generation: u64,
    pub file: Arc<dyn DiskFile>,
    pub capacity: u64,
}

pub fn file_name(generation: u64) -> String {
    format!("{WAL_DIR}/{generation:016x}.wal")
}

/// Generation that a file name stands for; `None` for foreign files.
pub fn generation_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".wal")?;
    (digits.len() == 16)
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten()
}

/// Makes a new file ready: zeros, header, everything synced, directory included.
pub fn prepare_new(disk: &dyn Disk, generation: u64, capacity: u64) -> io::Result<WalFile> {
    let name = file_name(generation);
    let file = disk.open(&name, OpenMode::CreateNew)?;
    let written = write_zeros(&*file, generation, capacity);
    if let Err(error) = written.and_then(|()| disk.sync_dir(WAL_DIR)) {
        // A file that could not be prewritten must not take the space others need.
        disk.remove(&name)?;
        return Err(error);
    }
    Ok(WalFile {
        generation,
        file,
        capacity,
    })
}

fn write_zeros(file: &dyn DiskFile, generation: u64, capacity: u64) -> io::Result<()> {
    let zeros = vec![0u8; ZERO_PIECE_BYTES];
    let mut position = 0;
    while position < capacity {
        let piece = (capacity - position).min(ZERO_PIECE_BYTES as u64) as usize;
        write_all_at(file, &zeros[..piece], position)?;
        position += piece as u64;
    }
    write_all_at(file, &file_header(generation), 0)?;
    file.sync_all()
}

/// Takes an old file into use again under a new generation.
pub fn prepare_recycled(disk: &dyn Disk, old: &WalFile, generation: u64) -> io::Result<WalFile> {
    let name = file_name(generation);
    disk.rename(&file_name(old.generation), &name)?;
    // The new name first: an old name with a new header would look like damage.
    disk.sync_dir(WAL_DIR)?;
    let file = disk.open(&name, OpenMode::ReadWrite)?;
    write_all_at(&*file, &file_header(generation), 0)?;
    file.sync_all()?;
    Ok(WalFile {
        generation,
        file,
        capacity: old.capacity,
    })
}

/// Where a sealed batch goes.
pub struct Placement {
    pub file: Arc<WalFile>,
    pub position: u64,
    /// The file just left behind; it must be synced before anything in the new one counts as synced.
    pub left: Option<Arc<WalFile>>,
}

/// The write position and the prepared files behind it. Lives under the open batch's lock.
pub struct WalCursor {
    current: Arc<WalFile>,
    position: u64,
    spares: VecDeque<Arc<WalFile>>,
}

impl WalCursor {
    /// Goes on behind what a start has already written into its file.
    pub fn resume(file: WalFile, position: u64) -> WalCursor {
        WalCursor {
            current: Arc::new(file),
            position,
            spares: VecDeque::new(),
        }
    }

    pub fn add_spare(&mut self, file: WalFile) {
        self.spares.push_back(Arc::new(file));
    }

    pub fn spare_count(&self) -> usize {
        self.spares.len()
    }

    /// Whether a batch of this many bytes can be placed, leaving the reserve free unless it is for control.
    pub fn has_room(&self, batch_bytes: u64, control: bool) -> bool {
        let reserve = if control { 0 } else { WAL_RESERVE_BYTES };
        let fits = |room: u64| batch_bytes + reserve <= room;
        let next_room = self
            .spares
            .front()
            .map_or(0, |file| file.capacity - FILE_HEADER_BYTES);
        fits(self.current.capacity - self.position) || fits(next_room)
    }

    /// Places a sealed batch. The caller has asked [`WalCursor::has_room`] for every frame of it.
    pub fn place(&mut self, batch_bytes: u64) -> Option<Placement> {
        debug_assert!(batch_bytes >= BATCH_HEADER_BYTES as u64);
        let mut left = None;
        if batch_bytes > self.current.capacity - self.position {
            let next = self.spares.pop_front()?;
            left = Some(std::mem::replace(&mut self.current, next));
            self.position = FILE_HEADER_BYTES;
            if batch_bytes > self.current.capacity - self.position {
                return None;
            }
        }
        let position = self.position;
        self.position += batch_bytes;
        Some(Placement {
            file: Arc::clone(&self.current),
            position,
            left,
        })
    }
}
