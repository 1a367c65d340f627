//! Checkpoint: hot bytes move into segments and packs, changed streams into the catalog, and the log behind
//! them becomes free.
//!
//! Fuzzy: streams are taken one by one while appends go on. Each catalog entry says which sequence it reflects,
//! so replay applies exactly what it lacks.
//!
//! Invariants
//! - `I-CHECK-1` Nothing is written that is not synced in the log: cold bytes never run ahead of the promise.
//! - `I-CHECK-2` Files are synced before the catalog names them; the catalog is synced before the log is freed
//!   or a file is unlinked.
//! - `I-CHECK-3` A checkpoint that fails puts every taken byte back, leaves the streams dirty and removes its packs, unless it
//!   is unknown whether the catalog names them.
//! - `I-CHECK-4` A stream leaves the catalog in the transaction that puts its ending in, or after it.

use crate::report;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use crate::codec::adopt::{UsedUp, encode_used_up};
use crate::io::BootId;
use crate::io::sabotage::{self, Sabotage};
use crate::limits::{ADOPT_MIN_BYTES, CHECKPOINT_CHUNK_STREAMS};
use crate::log::catalog::{CatalogError, Change};
use crate::log::cold::{CheckpointWriter, ColdStore, is_damage, pack_release};
use crate::log::directory::Directory;
use crate::log::endings::Unwritten;
use crate::log::index::check_bytes;
use crate::metrics::Metrics;
use crate::model::{Adopted, Extent, FileRef, StreamId};
use crate::stream::handle::Stream;
use crate::stream::hot::{Hot, Run, RunBytes};
use crate::stream::offsets::Losses;
use crate::stream::snapshot;
use crate::stream::state::{Keep, Life, StreamState};

pub const META_CHECKPOINT: &str = "checkpoint_sequence";
pub const META_HIGHEST_EPOCH: &str = "highest_epoch";
pub const META_LOSSES: &str = "losses";
/// How many damaged ranges are known, so that readiness tells of them before the catalog was walked.
pub const META_DAMAGED: &str = "damaged_ranges";
/// Boot id of the kernel that the last run had; absent = unknown.
pub const META_BOOT: &str = "boot";

/// Stages whose bytes were copied into the log that is free now, as far as their files may still be there.
pub const META_USED_UP: &str = "used_up_stages";

/// What a checkpoint needs from the engine.
pub struct Checkpoint<'a> {
    pub directory: &'a Directory,
    pub cold: &'a ColdStore,
    pub metrics: &'a Metrics,
    pub losses: &'a Losses,
    pub highest_epoch: u64,
    pub boot_id: Option<BootId>,
    pub now_ms: u64,
    /// By the clock that nobody can set.
    pub steady_ms: u64,
    /// Everything up to here was staged before the checkpoint began.
    pub staged: u64,
    /// Stages that commits up to there have copied.
    pub used_up: &'a [UsedUp],
    /// Packs that are mostly dead: whoever still lives in one moves out.
    pub leave_packs: &'a HashSet<u32>,
    /// Waits until a sequence is synced; `false` = it will not be.
    pub wait_synced: &'a dyn Fn(u64) -> bool,
    /// Called again and again: what cannot wait until a long checkpoint ends.
    pub meanwhile: &'a dyn Fn(),
}

/// A stream as the checkpoint took it.
struct Taken {
    stream: Arc<Stream>,
    /// `None`: the stream is gone and leaves the catalog.
    snapshot: Option<Vec<u8>>,
    hot: Option<Arc<Hot>>,
    extents: Vec<Extent>,
    /// Bytes of an `ephemeral` stream that are to be kept after all, before those in `hot`.
    spilled: Arc<Vec<Extent>>,
    /// What a stream that is gone had taken over from stages.
    abandoned: Vec<Adopted>,
    /// Records before `hot`, and up to the end of what is written.
    base_records: u64,
    records: u64,
    /// Whether this makes volatile bytes lasting.
    keeps: bool,
    taken_ms: u64,
    applied_sequence: u64,
}

#[derive(Debug)]
pub enum CheckpointError {
    /// The log cannot be synced any more.
    LogFailed,
    Disk(io::Error),
    Catalog(CatalogError),
}

impl std::fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CheckpointError::LogFailed => write!(f, "the log has failed"),
            CheckpointError::Disk(error) => write!(f, "disk: {error}"),
            CheckpointError::Catalog(error) => write!(f, "catalog: {error}"),
        }
    }
}

impl CheckpointError {
    /// Whether it is unknown if the transaction happened: trying again could count bytes twice.
    pub fn is_final(&self) -> bool {
        matches!(self, CheckpointError::Catalog(error) if !matches!(error, CatalogError::Full))
    }
}

impl Checkpoint<'_> {
    /// Writes everything changed before `staged`. Afterwards the log is needed only behind it.
    pub fn run(&self) -> Result<(), CheckpointError> {
        // By id: a path's removal comes before its next incarnation. Once: taking a stream twice would drop
        // what the first time took.
        let dirty = self.directory.take_dirty();
        let result = self.write(&dirty);
        self.directory.dirty_written();
        result
    }

    fn write(&self, dirty: &[Arc<Stream>]) -> Result<(), CheckpointError> {
        let mut chunks = dirty.chunks(CHECKPOINT_CHUNK_STREAMS).peekable();
        if chunks.peek().is_none() {
            return self.commit(&[], &[], 0, true);
        }
        let mut done = 0;
        while let Some(chunk) = chunks.next() {
            if let Err(error) = self.run_chunk(chunk, chunks.peek().is_none()) {
                // What was not reached is still dirty and must be found by the next checkpoint.
                self.directory.requeue(&dirty[done + chunk.len()..]);
                return Err(error);
            }
            done += chunk.len();
            self.directory.dirty_part_written(chunk.len());
        }
        Ok(())
    }

    fn run_chunk(&self, streams: &[Arc<Stream>], last: bool) -> Result<(), CheckpointError> {
        let mut taken: Vec<Taken> = streams
            .iter()
            .filter_map(|stream| self.take(stream))
            .collect();
        // Packs hold their streams in order.
        taken.sort_by_key(|entry| entry.stream.id);
        let result = self.write_taken(&mut taken, last);
        for entry in &taken {
            match &result {
                Ok(()) => self.finish_stream(entry),
                Err(_) => self.put_back(entry),
            }
        }
        result
    }

    fn write_taken(&self, taken: &mut [Taken], last: bool) -> Result<(), CheckpointError> {
        let newest = taken
            .iter()
            .map(|entry| entry.applied_sequence)
            .max()
            .unwrap_or(0);
        let must_be_synced = if last {
            newest.max(self.staged)
        } else {
            newest
        };
        if !(self.wait_synced)(must_be_synced) {
            return Err(CheckpointError::LogFailed);
        }
        let mut writer = self.cold.begin_checkpoint(self.meanwhile);
        let mut changes = Vec::with_capacity(taken.len());
        let mut pack_live = Vec::new();
        for entry in taken.iter_mut() {
            let (path, id) = (entry.stream.path.as_bytes().to_vec(), entry.stream.id);
            let Some(mut value) = entry.snapshot.take() else {
                entry
                    .abandoned
                    .iter()
                    .try_for_each(|section| writer.spend(section.pack))
                    .map_err(CheckpointError::Disk)?;
                pack_live.extend(pack_release(&entry.extents));
                changes.push(Change::Remove { path, id });
                continue;
            };
            if self.lives_in_dead_pack(&entry.extents) {
                writer
                    .rewrite(id, &mut entry.extents, self.leave_packs)
                    .map_err(CheckpointError::Disk)?;
            }
            for extent in entry.spilled.iter() {
                self.copy_spilled(&mut writer, id, extent, &mut entry.extents)
                    .map_err(CheckpointError::Disk)?;
            }
            if let Some(hot) = &entry.hot {
                self.write_hot(&mut writer, id, hot, entry.base_records, &mut entry.extents)
                    .map_err(CheckpointError::Disk)?;
            }
            snapshot::encode_extents(&entry.extents, &mut value);
            snapshot::seal(&mut value);
            entry.snapshot = Some(Vec::new());
            changes.push(Change::Put { path, id, value });
        }
        let mut summary = writer.finish().map_err(CheckpointError::Disk)?;
        for stream in &summary.damaged {
            self.directory.damaged.suspect_unknown(*stream);
        }
        pack_live.extend(summary.pack_live);
        // A removal goes before a put of the same path: ids grow, and changes keep their order.
        let committed = self.commit(&changes, &pack_live, must_be_synced, last);
        if let Err(CheckpointError::Catalog(CatalogError::Full)) = &committed {
            // Nobody will ever name them, and what they take is what is missing.
            self.cold.remove_void(&mut summary.packs);
        }
        committed
    }

    /// Writes what is in memory, and places what lies in staged packs: large sections as they are, small ones by a
    /// copy, so that the number of extents follows the number of bytes.
    fn write_hot(
        &self,
        writer: &mut CheckpointWriter<'_>,
        stream: StreamId,
        hot: &Hot,
        mut base_records: u64,
        extents: &mut Vec<Extent>,
    ) -> io::Result<()> {
        for run in hot.runs() {
            match &run.bytes {
                RunBytes::Memory(bytes) => {
                    writer.add(stream, extents, run.start, base_records, bytes, run.index)?;
                }
                RunBytes::File(section) => match self.load_small(section, &run, base_records)? {
                    Some(bytes) => {
                        writer.add(stream, extents, run.start, base_records, &bytes, run.index)?;
                        writer.spend(section.pack)?;
                    }
                    None => writer.adopt(
                        stream,
                        extents,
                        run.start,
                        base_records,
                        section,
                        run.index,
                    )?,
                },
            }
            base_records = run.index.last().map_or(base_records, |entry| entry.records);
        }
        Ok(())
    }

    /// The bytes of a section that is too small to stay. One that does not check stays, so that the damage does.
    fn load_small(
        &self,
        section: &Adopted,
        run: &Run<'_>,
        base_records: u64,
    ) -> io::Result<Option<Vec<u8>>> {
        if section.len >= ADOPT_MIN_BYTES {
            return Ok(None);
        }
        let mut bytes = vec![0; section.len as usize];
        match self.cold.read_staged(section, 0, &mut bytes) {
            Ok(()) => {}
            Err(error) if is_damage(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        let whole = check_bytes(run.start, base_records, &bytes, run.index).is_ok();
        Ok(whole.then_some(bytes))
    }

    fn copy_spilled(
        &self,
        writer: &mut CheckpointWriter<'_>,
        stream: StreamId,
        spilled: &Extent,
        extents: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let source = std::slice::from_ref(spilled);
        let mut bytes = vec![0; spilled.len as usize];
        self.cold.read(source, spilled.start, &mut bytes)?;
        let index = self.cold.entries(source, spilled.start, usize::MAX)?;
        writer.add(
            stream,
            extents,
            spilled.start,
            spilled.base_records,
            &bytes,
            &index,
        )
    }

    fn lives_in_dead_pack(&self, extents: &[Extent]) -> bool {
        let leaves = |extent: &Extent| matches!(extent.file, FileRef::Pack { number } if self.leave_packs.contains(&number));
        !self.leave_packs.is_empty() && extents.iter().any(leaves)
    }

    fn commit(
        &self,
        changes: &[Change],
        pack_live: &[(u32, i64)],
        synced: u64,
        last: bool,
    ) -> Result<(), CheckpointError> {
        let sequence = self.staged.to_le_bytes();
        let epoch = self.highest_epoch.to_le_bytes();
        let losses = self.losses.encode();
        let damaged = self.directory.damaged.ranges().to_le_bytes();
        let mut meta: Vec<(&str, &[u8])> =
            vec![(META_HIGHEST_EPOCH, &epoch), (META_LOSSES, &losses)];
        meta.push((META_BOOT, self.boot_id.as_ref().map_or(&[], |id| id)));
        meta.push((META_DAMAGED, &damaged));
        let mut used_up = Vec::new();
        encode_used_up(self.used_up, &mut used_up);
        if last {
            meta.push((META_CHECKPOINT, &sequence));
            meta.push((META_USED_UP, &used_up));
        }
        // Those of the streams that leave the catalog here are among them.
        let endings = if sabotage::is(Sabotage::ForgetEndings) {
            Unwritten::default()
        } else {
            self.directory.endings.unwritten(synced, self.now_ms)
        };
        self.directory
            .catalog()
            .commit_with(changes, &meta, pack_live, &endings)
            .map_err(CheckpointError::Catalog)?;
        self.directory.endings.written(&endings);
        Ok(())
    }

    fn finish_stream(&self, entry: &Taken) {
        let mut state = entry.stream.lock();
        if let Some(hot) = &entry.hot {
            self.cold.let_go(hot.file_parts().map(|part| part.section));
        }
        state.flushing = None;
        if entry.snapshot.is_some() {
            entry.stream.set_catalogued();
            state.extents = Arc::new(entry.extents.clone());
            if entry.hot.is_some() || entry.keeps {
                state.cold_records = entry.records;
            }
            let mut spilled = Arc::default();
            if entry.keeps {
                state.keep = Keep::No;
                state.kept_ms = entry.taken_ms;
                spilled = std::mem::take(&mut state.spilled);
            }
            state.count_memory(self.metrics);
            drop(state);
            self.release_spilled(&spilled);
            return;
        }
        state.count_memory(self.metrics);
        let abandoned = std::mem::take(&mut state.abandoned);
        drop(state);
        self.cold.let_go(abandoned.into_iter());
        self.directory.forget(&entry.stream);
        self.release_spilled(&entry.spilled);
        if let Err(error) = self.cold.remove_stream(&entry.extents) {
            report!(
                "could not remove the files of a deleted stream; the next start will remove them: {error}"
            );
        }
    }

    fn release_spilled(&self, extents: &[Extent]) {
        if let Err(error) = self.cold.release_spilled(extents) {
            report!("could not remove spilled bytes; the next start will remove them: {error}");
        }
    }

    /// Makes a taken stream whole again after a failure. Who appended meanwhile has marked it dirty already.
    fn put_back(&self, entry: &Taken) {
        let mut state = entry.stream.lock();
        if let Some(flushing) = state.flushing.take() {
            if state.life == Life::Gone {
                state.abandon(&flushing);
            } else {
                state.hot = flushing.followed_by(&state.hot);
            }
        }
        if entry.keeps {
            state.keep = Keep::Wanted;
        }
        self.directory.mark_dirty(&entry.stream, &mut state.dirty);
        state.count_memory(self.metrics);
    }

    /// `None`: its whole life is behind the number of this checkpoint. A restart replays it from its create, and needs
    /// what its frames name until then (`I-KEEP-2`), so that it leaves with the next checkpoint.
    fn take(&self, stream: &Arc<Stream>) -> Option<Taken> {
        // One that was only read has been found damaged. What its producers are must be written with that.
        if !stream.is_whole()
            && let Err(error) = self.directory.complete(stream)
        {
            report!("stream {:?} could not be read whole: {error}", stream.path);
            self.directory.requeue(std::slice::from_ref(stream));
            return None;
        }
        let mut state = stream.lock();
        let gone = state.life == Life::Gone;
        if gone && state.created_sequence > self.staged {
            self.directory.requeue(std::slice::from_ref(stream));
            return None;
        }
        state.dirty = false;
        Some(taken(stream, &mut state, self.steady_ms))
    }
}

fn taken(stream: &Arc<Stream>, state: &mut StreamState, steady_ms: u64) -> Taken {
    let gone = state.life == Life::Gone;
    let keeps = !gone && state.is_volatile() && state.keep != Keep::No;
    if keeps {
        state.keep = Keep::Taken;
    }
    let mut taken = Taken {
        stream: Arc::clone(stream),
        snapshot: None,
        hot: None,
        extents: state.extents.as_ref().clone(),
        spilled: Arc::default(),
        abandoned: state.abandoned.clone(),
        base_records: state.file_records(),
        records: state.records,
        keeps,
        taken_ms: steady_ms,
        applied_sequence: state.applied_sequence,
    };
    if gone || keeps {
        taken.spilled = Arc::clone(&state.spilled);
    }
    if gone {
        return taken;
    }
    let mut value = Vec::with_capacity(192 + stream.path.len());
    snapshot::encode(&stream.path, &stream.content_type, state, &mut value);
    taken.snapshot = Some(value);
    if state.is_volatile() && !keeps {
        return taken;
    }
    state.hot.freeze();
    let tail = state.tail;
    taken.hot = (!state.hot.is_empty())
        .then(|| Arc::new(std::mem::replace(&mut state.hot, Hot::starting_at(tail))));
    state.flushing.clone_from(&taken.hot);
    taken
}
