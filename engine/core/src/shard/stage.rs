//! Staging: rows of many streams are checked, brought into wire form and written to a file of their own, synced.
//!
//! Runs on a worker that may wait for the disk. Nothing here touches a stream: only a commit (`adopt`) appends.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::codec::adopt::{RELATIVE_ENTRY_BYTES, UsedUp};
use crate::error::ErrorCode;
use crate::limits::{STAGE_ENTRY_BYTES, STAGE_ROWS_MAX, STAGE_STREAMS_MAX, STAGING_MAX_BYTES};
use crate::log::stage::{self, StageHead, StageRecord, StageSection};
use crate::model::{IndexEntry, Media};
use crate::refusal::Refusal;
use crate::report;
use crate::shard::engine::{Engine, Undone};
use crate::shard::stages::Found;
use crate::stream::handle::Stream;
use crate::stream::hot::ENTRY_MEMORY_BYTES;
use crate::stream::json;

/// Disk space that staging leaves to the log and to checkpoints.
const DISK_MARGIN_BYTES: u64 = 64 << 20;

/// Rows of a stage, one by one, as the streams will have them.
pub struct StageBuilder<'e> {
    engine: &'e Engine,
    _held: Held<'e>,
    targets: Vec<Target>,
    by_name: HashMap<Box<str>, usize>,
    rows: u64,
    now_ms: u64,
}

struct Target {
    stream: Arc<Stream>,
    bytes: Vec<u8>,
    index: Vec<IndexEntry>,
    /// Where the append that is being filled begins.
    entry_start: usize,
    records: u64,
}

/// Memory that a stage or a commit under way has been given.
pub struct Held<'e> {
    engine: &'e Engine,
    bytes: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.engine.metrics.staging_bytes.sub(self.bytes);
    }
}

/// A stage as its client is told of it.
pub struct Staged {
    pub record: Arc<StageRecord>,
    /// `false`: the same bytes were there already.
    pub new: bool,
}

impl<'e> StageBuilder<'e> {
    /// A builder for so many rows, which have at most so many bytes. Nothing is taken in before there is room for all.
    pub fn new(engine: &'e Engine, rows: u64, bytes: u64) -> Result<StageBuilder<'e>, Undone> {
        if rows > STAGE_ROWS_MAX {
            let detail = format!(
                "A stage has at most {STAGE_ROWS_MAX} rows, this one has {rows}; stage them in parts."
            );
            return Err(refuse(ErrorCode::PayloadTooLarge, detail));
        }
        let entries = rows * (ENTRY_MEMORY_BYTES + RELATIVE_ENTRY_BYTES as u64);
        Ok(StageBuilder {
            _held: engine.hold_staging(bytes + entries)?,
            engine,
            targets: Vec::new(),
            by_name: HashMap::new(),
            rows: 0,
            now_ms: engine.now_ms(),
        })
    }

    /// The number under which rows of a stream are pushed.
    pub fn target(&mut self, name: &str) -> Result<usize, Undone> {
        if let Some(number) = self.by_name.get(name) {
            return Ok(*number);
        }
        if self.targets.len() >= STAGE_STREAMS_MAX {
            return Err(Undone::refused(Refusal::with(
                ErrorCode::BadRequest,
                format!("A stage has at most {STAGE_STREAMS_MAX} streams."),
            )));
        }
        let named = |undone| name_stream(undone, name);
        let stream = self.engine.find(name)?.filter(|found| !found.is_reserved());
        let stream = stream.ok_or_else(|| named(Engine::missing()))?;
        {
            let mut state = stream.lock();
            self.engine
                .check_life(&stream, &mut state, self.now_ms)
                .map_err(named)?;
            let gate = self.engine.control_gate(&state);
            if state.closed {
                let refusal = Refusal::new(ErrorCode::StreamClosed);
                return Err(named(Undone::Refused { refusal, gate }));
            }
            if !gate.is_open() {
                // A stage is on disk before its answer: the stream that it names must be there for good, or its
                // number could come to mean another one.
                return Err(Undone::Wait);
            }
        }
        let number = self.targets.len();
        self.targets.push(Target {
            stream,
            bytes: Vec::new(),
            index: Vec::new(),
            entry_start: 0,
            records: 0,
        });
        self.by_name.insert(name.into(), number);
        Ok(number)
    }

    /// Adds one record. Rows are counted from 0 over the whole stage.
    pub fn push(&mut self, target: usize, value: &[u8]) -> Result<(), Undone> {
        if self.engine.stopping.load(Ordering::Acquire) {
            return Err(Undone::refused(ErrorCode::ShuttingDown));
        }
        let row = self.rows;
        self.rows += 1;
        let append_max_bytes = self.engine.config.append_max_bytes;
        let Some(target) = self.targets.get_mut(target) else {
            return Err(Undone::refused(ErrorCode::Internal));
        };
        if value.len() > append_max_bytes {
            let detail = format!("Row {row} has more than {append_max_bytes} bytes.");
            return Err(refuse(ErrorCode::PayloadTooLarge, detail));
        }
        target.push(value).map_err(|(code, what)| {
            let detail = format!("Row {row} of stream {:?}: {what}.", target.stream.path);
            refuse(code, detail)
        })
    }

    /// Writes the stage; returns when it is on the device.
    pub fn finish(mut self, id: &str, checksum: u32, body_bytes: u64) -> Result<Staged, Undone> {
        self.targets.iter_mut().for_each(Target::end_entry);
        let head = StageHead {
            id: id.into(),
            time_ms: self.now_ms,
            body_bytes,
            checksum,
            rows: self.rows,
        };
        let filled = self.targets.iter().filter(|target| target.records > 0);
        let sections: Vec<StageSection<'_>> = filled
            .map(|target| StageSection {
                stream: target.stream.id,
                name: &target.stream.path,
                bytes: &target.bytes,
                index: &target.index,
            })
            .collect();
        self.engine.write_stage(head, &sections)
    }
}

impl Target {
    fn push(&mut self, value: &[u8]) -> Result<(), (ErrorCode, String)> {
        let json = self.stream.content_type.media == Media::Json;
        let filled = self.bytes.len() - self.entry_start;
        if json && filled > 0 && (filled + value.len()) as u64 >= STAGE_ENTRY_BYTES {
            self.end_entry();
        }
        if json {
            json::record_into(value, &mut self.bytes).map_err(|error| {
                let what = format!("{} at byte {}", error.reason, error.position);
                (ErrorCode::JsonInvalid, what)
            })?;
        } else if value.is_empty() {
            return Err((
                ErrorCode::BodyEmpty,
                "a record needs at least a byte".into(),
            ));
        } else {
            self.bytes.extend_from_slice(value);
        }
        self.records += 1;
        if !json {
            self.end_entry();
        }
        Ok(())
    }

    /// Ends the append that is being filled: readers' windows end there.
    fn end_entry(&mut self) {
        if self.bytes.len() > self.entry_start {
            self.index.push(IndexEntry {
                end: self.bytes.len() as u64,
                records: self.records,
                time_ms: 0,
                crc: crc32c::crc32c(&self.bytes[self.entry_start..]),
            });
            self.entry_start = self.bytes.len();
        }
    }
}

impl Engine {
    /// Takes memory for a stage or a commit; while others have too much, it waits.
    pub(super) fn hold_staging(&self, bytes: u64) -> Result<Held<'_>, Undone> {
        let before = self.metrics.staging_bytes.raise(bytes);
        let held = Held {
            engine: self,
            bytes,
        };
        if before > 0 && before.saturating_add(bytes) > STAGING_MAX_BYTES {
            return Err(Undone::Wait);
        }
        Ok(held)
    }

    /// What an id that is used already stands for, as an answer to the same request: `None` if it is free.
    pub fn staged_before(
        &self,
        id: &str,
        checksum: u32,
        body_bytes: u64,
    ) -> Result<Option<Staged>, Undone> {
        match self.stages.find(id) {
            Found::None => Ok(None),
            other => answer_used(other, checksum, body_bytes).map(Some),
        }
    }

    fn write_stage(
        &self,
        head: StageHead,
        sections: &[StageSection<'_>],
    ) -> Result<Staged, Undone> {
        let (id, checksum, body_bytes) = (head.id.clone(), head.checksum, head.body_bytes);
        let reserved = stage::file_bytes(&head, sections);
        match self
            .stages
            .begin(&id, reserved, self.config.stage_bytes_max)
        {
            Ok(()) => {}
            Err(Some(found)) => return answer_used(found, checksum, body_bytes),
            Err(None) => {
                let (_, waiting) = self.stages.waiting();
                let detail = format!(
                    "{waiting} bytes are staged, {reserved} more are above {} (stage_bytes_max).",
                    self.config.stage_bytes_max
                );
                return Err(refuse(ErrorCode::StageFull, detail));
            }
        }
        let written = self.check_stage_space(reserved).and_then(|()| {
            self.cold
                .write_stage(head, sections, &|| self.check_running())
        });
        let record = written.as_ref().ok().cloned().map(Arc::new);
        self.stages.finish(&id, reserved, record.clone());
        self.count_stages();
        match (written, record) {
            (Ok(_), Some(record)) => Ok(Staged { record, new: true }),
            (Err(error), _) if error.kind() == io::ErrorKind::StorageFull => {
                Err(Undone::refused(ErrorCode::StorageFull))
            }
            (Err(_), _) if self.stopping.load(Ordering::Acquire) => {
                Err(Undone::refused(ErrorCode::ShuttingDown))
            }
            (Err(error), _) => {
                report!("a stage could not be written: {error}");
                Err(refuse(
                    ErrorCode::Internal,
                    "The stage could not be written.".into(),
                ))
            }
            (Ok(_), None) => Err(Undone::refused(ErrorCode::Internal)),
        }
    }

    fn check_stage_space(&self, need: u64) -> io::Result<()> {
        if self.doors.disk.free_bytes()? < need.saturating_add(DISK_MARGIN_BYTES) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    /// Gives a stage up.
    pub fn drop_stage(&self, id: &str) -> Result<(), Undone> {
        match self.stages.remove(id) {
            Found::Busy => Err(Undone::Wait),
            Found::None => Err(Undone::refused(ErrorCode::StageGone)),
            Found::Committed(_) => Err(Undone::refused(ErrorCode::StageCommitted)),
            Found::Waiting(record) => {
                self.remove_stage_file(record.pack);
                self.count_stages();
                Ok(())
            }
        }
    }

    /// Removes the files of stages that nobody committed in time, and of those that were copied into the log.
    pub fn sweep_stages(&self, now_ms: u64) {
        let ttl_ms = self.config.stage_ttl_s.saturating_mul(1000);
        let expired = self.stages.take_expired(now_ms, ttl_ms);
        self.metrics.stages_expired.add(expired.len() as u64);
        for record in &expired {
            self.remove_stage_file(record.pack);
        }
        for copied in self.stages.copied_up_to(self.shard.synced()) {
            if self.remove_stage_file(copied.pack) {
                self.stages.copied_is_removed(copied);
            }
        }
        if !expired.is_empty() {
            self.count_stages();
        }
    }

    /// Stages that were copied up to a sequence and might come back: a checkpoint frees the log that says so.
    pub fn used_up_stages(&self, sequence: u64) -> io::Result<Vec<UsedUp>> {
        let removed = self.stages.removed();
        if !removed.is_empty() {
            self.cold.sync_packs()?;
            self.stages.forget_removed(&removed);
        }
        Ok(self.stages.copied_up_to(sequence))
    }

    fn remove_stage_file(&self, pack: u32) -> bool {
        let removed = self.cold.drop_stage(pack);
        if let Err(error) = &removed {
            report!(
                "a stage's file could not be removed; the next checkpoint will remove it: {error}"
            );
        }
        removed.is_ok()
    }

    /// Takes note of what an earlier run has left.
    pub fn recall_stages(&self, records: Vec<StageRecord>) {
        for record in records {
            if let Some(older) = self.stages.restore(record) {
                self.remove_stage_file(older);
            }
        }
        self.count_stages();
    }

    pub fn count_stages(&self) {
        let (count, bytes) = self.stages.waiting();
        self.metrics.stages_waiting.set(count);
        self.metrics.stages_waiting_bytes.set(bytes);
    }
}

/// A used id answers the same request with the same stage, and refuses any other.
fn answer_used(found: Found, checksum: u32, body_bytes: u64) -> Result<Staged, Undone> {
    match found {
        Found::Waiting(record)
            if record.head.checksum == checksum && record.head.body_bytes == body_bytes =>
        {
            Ok(Staged { record, new: false })
        }
        Found::Busy => Err(Undone::Wait),
        Found::Committed(_) => Err(Undone::refused(ErrorCode::StageCommitted)),
        Found::Waiting(_) | Found::None => Err(Undone::refused(ErrorCode::StageExists)),
    }
}

fn refuse(code: ErrorCode, detail: String) -> Undone {
    Undone::refused(Refusal::with(code, detail))
}

/// Says which of many streams a refusal is about.
pub fn name_stream(undone: Undone, name: &str) -> Undone {
    undone.saying(|sentence| format!("Stream {name:?}: {}.", sentence.trim_end_matches('.')))
}
