//! Disk space: what the next checkpoint will need, and who has to wait for more of it.
//!
//! Looked at by maintenance before it prepares a log file, before each part of a checkpoint, and some fifty times a second
//! in between. Appends see one flag in the open batch.
//!
//! Invariants
//! - `I-SPACE-1` Appends and creates are refused (507) before the space falls below what a checkpoint of everything in
//!   the log needs: the log can be emptied, and deletes go on. Others may still take that space; then the checkpoint
//!   is taken back and tried again (`I-CHECK-3`).
//! - `I-SPACE-2` A refusal ends by itself when the space is there.

use crate::report;
use std::io;

use crate::shard::batch::OpenBatch;
use crate::shard::engine::Engine;

/// Left to others, and for what changes between two looks.
const DISK_MARGIN_BYTES: u64 = 4 << 20;
/// What any checkpoint may need beside what follows.
const CHECKPOINT_SPACE_BYTES: u64 = 2 << 20;
/// A changed stream's rows in the catalog, but for its producers; half of it is what half-full pages cost.
const ENTRY_BYTES: u64 = 1024;
/// Pages that a changed stream has copied, as long as the catalog has that many: one in each of two tables.
const COPIED_BYTES: u64 = 8192;

impl Engine {
    /// Bytes that a checkpoint would take on disk now.
    fn checkpoint_need(&self) -> u64 {
        let dirty = self.directory.dirty_count() as u64;
        let copied = if dirty == 0 {
            0
        } else {
            (dirty * COPIED_BYTES).min(self.directory.catalog().file_bytes())
        };
        let hot = self.metrics.hot_bytes.get();
        // Files end in the middle of a block, the more the smaller they are.
        hot + hot / 4
            + dirty * ENTRY_BYTES
            + copied
            + 2 * self.metrics.dirty_producer_bytes.get()
            + CHECKPOINT_SPACE_BYTES
    }

    /// A checkpoint is not begun where it would not end.
    pub(super) fn check_checkpoint_space(&self) -> io::Result<()> {
        self.check_space(self.checkpoint_need(), "a checkpoint needs")
    }

    /// Looks before writing: filling a nearly full disk over and over would starve everybody else on it.
    pub(super) fn check_log_space(&self) -> io::Result<()> {
        let need = self.config.wal_file_bytes_effective() + self.checkpoint_need();
        self.check_space(need + DISK_MARGIN_BYTES, "it needs")
    }

    fn check_space(&self, need: u64, what: &str) -> io::Result<()> {
        let free = self.doors.disk.free_bytes()?;
        if free >= need {
            return Ok(());
        }
        let detail = format!("{free} bytes are free, {what} {need}");
        Err(io::Error::new(io::ErrorKind::StorageFull, detail))
    }

    /// Refuses appends while a checkpoint would hardly find its space. Returns whether one should be made before it
    /// comes to that: what is written needs no more space.
    pub(super) fn watch_space(&self) -> bool {
        let need = self.checkpoint_need();
        let Ok(free) = self.doors.disk.free_bytes() else {
            return false;
        };
        let full = free < need + DISK_MARGIN_BYTES;
        let mut before = full;
        self.note_space(|open| before = std::mem::replace(&mut open.checkpoint_full, full));
        if full != before {
            if full {
                report!(
                    "appends are refused until there is more space: {free} bytes are free, a checkpoint needs {need}"
                );
            }
            self.shard.ring_all();
        }
        free < 2 * need + DISK_MARGIN_BYTES && need > 2 * CHECKPOINT_SPACE_BYTES
    }

    /// Changes what the open batch knows of the space, and says it.
    pub(super) fn note_space(&self, change: impl FnOnce(&mut OpenBatch)) {
        if let Ok(mut open) = self.shard.open() {
            change(&mut open);
            let full = open.storage_full || open.checkpoint_full;
            self.metrics.wal_full.set(u64::from(full));
        }
    }

    /// There is no next log file.
    pub(super) fn report_no_spare(&self, error: &io::Error) {
        let mut known = true;
        self.note_space(|open| known = std::mem::replace(&mut open.storage_full, true));
        if !known {
            report!(
                "no room for the next log file; appends will be refused when this one is full: {error}"
            );
        }
        // Old log files may be all that is in the way.
        if !self.shard.retained.lock().is_empty() && !self.cold.pins.log.held() {
            self.maintenance.request_checkpoint();
        }
        self.shard.ring_all();
    }
}
