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
//! - `I-CHECK-3` A checkpoint that fails puts every taken byte back and leaves the streams dirty.

use crate::report;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use crate::limits::CHECKPOINT_CHUNK_STREAMS;
use crate::log::catalog::{CatalogError, Change};
use crate::log::cold::{ColdStore, pack_release};
use crate::log::directory::Directory;
use crate::metrics::Metrics;
use crate::model::{Extent, FileRef};
use crate::stream::handle::Stream;
use crate::stream::hot::Hot;
use crate::stream::offsets::Losses;
use crate::stream::snapshot;
use crate::stream::state::Life;

pub const META_CHECKPOINT: &str = "checkpoint_sequence";
pub const META_HIGHEST_EPOCH: &str = "highest_epoch";
pub const META_LOSSES: &str = "losses";

/// What a checkpoint needs from the engine.
pub struct Checkpoint<'a> {
    pub directory: &'a Directory,
    pub cold: &'a ColdStore,
    pub metrics: &'a Metrics,
    pub losses: &'a Losses,
    pub highest_epoch: u64,
    /// Everything up to here was staged before the checkpoint began.
    pub staged: u64,
    /// Packs that are mostly dead: whoever still lives in one moves out.
    pub leave_packs: &'a HashSet<u32>,
    /// Waits until a sequence is synced; `false` = it will not be.
    pub wait_synced: &'a dyn Fn(u64) -> bool,
}

/// A stream as the checkpoint took it.
struct Taken {
    stream: Arc<Stream>,
    /// `None`: the stream is gone and leaves the catalog.
    snapshot: Option<Vec<u8>>,
    hot: Option<Arc<Hot>>,
    extents: Vec<Extent>,
    base_records: u64,
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

impl Checkpoint<'_> {
    /// Writes everything changed before `staged`. Afterwards the log is needed only behind it.
    pub fn run(&self) -> Result<(), CheckpointError> {
        let mut dirty = self.directory.take_dirty();
        // By id: a path's removal comes before its next incarnation. Once: taking a stream twice would drop
        // what the first time took.
        dirty.sort_by_key(|stream| stream.id);
        dirty.dedup_by_key(|stream| stream.id);
        let mut chunks = dirty.chunks(CHECKPOINT_CHUNK_STREAMS).peekable();
        if chunks.peek().is_none() {
            return self.commit(&[], &[], true);
        }
        let mut done = 0;
        while let Some(chunk) = chunks.next() {
            if let Err(error) = self.run_chunk(chunk, chunks.peek().is_none()) {
                // What was not reached is still dirty and must be found by the next checkpoint.
                self.directory.requeue(&dirty[done + chunk.len()..]);
                return Err(error);
            }
            done += chunk.len();
        }
        Ok(())
    }

    fn run_chunk(&self, streams: &[Arc<Stream>], last: bool) -> Result<(), CheckpointError> {
        let mut taken: Vec<Taken> = streams.iter().map(take).collect();
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
        let mut writer = self
            .cold
            .begin_checkpoint()
            .map_err(CheckpointError::Disk)?;
        let mut changes = Vec::with_capacity(taken.len());
        let mut pack_live = Vec::new();
        for entry in taken.iter_mut() {
            let (path, id) = (entry.stream.path.as_bytes().to_vec(), entry.stream.id);
            let Some(mut value) = entry.snapshot.take() else {
                pack_live.extend(pack_release(&entry.extents));
                changes.push(Change::Remove { path, id });
                continue;
            };
            if self.lives_in_dead_pack(&entry.extents) {
                writer
                    .rewrite(id, &mut entry.extents)
                    .map_err(CheckpointError::Disk)?;
            }
            if let Some(hot) = &entry.hot {
                writer
                    .add(
                        id,
                        &mut entry.extents,
                        hot.start,
                        entry.base_records,
                        &hot.contiguous(),
                        &hot.index,
                    )
                    .map_err(CheckpointError::Disk)?;
            }
            snapshot::encode_extents(&entry.extents, &mut value);
            snapshot::seal(&mut value);
            entry.snapshot = Some(Vec::new());
            changes.push(Change::Put { path, id, value });
        }
        let summary = writer.finish().map_err(CheckpointError::Disk)?;
        pack_live.extend(summary.pack_live);
        // A removal goes before a put of the same path: ids grow, and changes keep their order.
        self.commit(&changes, &pack_live, last)
    }

    fn lives_in_dead_pack(&self, extents: &[Extent]) -> bool {
        let leaves = |extent: &Extent| matches!(extent.file, FileRef::Pack { number } if self.leave_packs.contains(&number));
        !self.leave_packs.is_empty() && extents.iter().any(leaves)
    }

    fn commit(
        &self,
        changes: &[Change],
        pack_live: &[(u32, i64)],
        last: bool,
    ) -> Result<(), CheckpointError> {
        let sequence = self.staged.to_le_bytes();
        let epoch = self.highest_epoch.to_le_bytes();
        let losses = encode_losses(self.losses);
        let mut meta: Vec<(&str, &[u8])> =
            vec![(META_HIGHEST_EPOCH, &epoch), (META_LOSSES, &losses)];
        if last {
            meta.push((META_CHECKPOINT, &sequence));
        }
        self.directory
            .catalog()
            .commit(changes, &meta, pack_live)
            .map_err(CheckpointError::Catalog)
    }

    fn finish_stream(&self, entry: &Taken) {
        let mut state = entry.stream.lock();
        if let Some(hot) = &entry.hot {
            self.metrics.hot_bytes.sub(hot.len());
        }
        state.flushing = None;
        if let Some(newest) = entry.hot.as_ref().and_then(|hot| hot.index.last()) {
            state.cold_records = newest.records;
        }
        if entry.snapshot.is_some() {
            state.extents = Arc::new(entry.extents.clone());
            return;
        }
        drop(state);
        self.directory.forget(&entry.stream);
        if let Err(error) = self.cold.remove_stream(&entry.extents) {
            report!("could not remove files of a deleted stream, the next start will: {error}");
        }
    }

    /// Makes a taken stream whole again after a failure. Who appended meanwhile has marked it dirty already.
    fn put_back(&self, entry: &Taken) {
        let mut state = entry.stream.lock();
        if let Some(flushing) = state.flushing.take() {
            if state.life == Life::Gone {
                self.metrics.hot_bytes.sub(flushing.len());
            } else {
                state.hot = flushing.followed_by(&state.hot);
            }
        }
        self.directory.mark_dirty(&entry.stream, &mut state.dirty);
    }
}

fn take(stream: &Arc<Stream>) -> Taken {
    let mut state = stream.lock();
    state.dirty = false;
    let extents = state.extents.as_ref().clone();
    let applied_sequence = state.applied_sequence;
    if state.life == Life::Gone {
        return Taken {
            stream: Arc::clone(stream),
            snapshot: None,
            hot: None,
            extents,
            base_records: 0,
            applied_sequence,
        };
    }
    let mut value = Vec::with_capacity(192 + stream.path.len());
    snapshot::encode(&stream.path, &stream.content_type, &state, &mut value);
    let base_records = state.cold_records;
    state.hot.freeze();
    let tail = state.tail;
    let hot = (!state.hot.is_empty())
        .then(|| Arc::new(std::mem::replace(&mut state.hot, Hot::starting_at(tail))));
    state.flushing.clone_from(&hot);
    Taken {
        stream: Arc::clone(stream),
        snapshot: Some(value),
        hot,
        extents,
        base_records,
        applied_sequence,
    }
}

fn encode_losses(losses: &Losses) -> Vec<u8> {
    losses
        .unclean_starts
        .iter()
        .flat_map(|epoch| epoch.to_le_bytes())
        .collect()
}

pub fn decode_losses(bytes: Option<&[u8]>) -> Losses {
    let epochs = bytes.unwrap_or(&[]).chunks_exact(8);
    Losses {
        unclean_starts: epochs
            .filter_map(|chunk| chunk.try_into().ok())
            .map(u64::from_le_bytes)
            .collect(),
    }
}
