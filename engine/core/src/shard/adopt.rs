//! Commit: what was staged is appended to all its streams, or to none, as one group of frames.
//!
//! A small commit puts its bytes into the log like appends; a larger one only says where they lie (`Adopt` frames), and
//! the streams take over the files. Runs on a worker; reading order: `commit_stages`, `Plan`, `Locked`.
//!
//! Invariants
//! - `I-ADOPT-1` Streams are locked in the order of their ids, then the open batch; everything is decided before the
//!   first frame is staged, and staging cannot fail half-way.
//! - `I-ADOPT-2` All frames of a commit are one group, so that a crash keeps all or none; the answer waits for its sync in
//!   every class.
//! - `I-ADOPT-3` A stage is taken for the time of the commit and given back unless its frames are staged.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use crate::codec::adopt::{ADOPTED_BYTES, UsedUp};
use crate::codec::{AppendExtra, FRAME_HEADER_BYTES, ProducerTag};
use crate::error::ErrorCode;
use crate::limits::{
    COMMIT_COPY_MAX_BYTES, COMMIT_FRAMES_MAX_BYTES, COMMIT_STAGES_MAX, STAGE_STREAMS_MAX,
};
use crate::log::stage::StageRecord;
use crate::model::{Adopted, Gate, IndexEntry, Media, Offset, Stage, StreamId};
use crate::refusal::Refusal;
use crate::report;
use crate::shard::engine::{Engine, Undone};
use crate::shard::stage::{Held, name_stream};
use crate::shard::stages::{Found, Stages};
use crate::stream::commit::{CommitDecision, check_epoch, committer_id, decide};
use crate::stream::handle::Stream;
use crate::stream::hot::ENTRY_MEMORY_BYTES;
use crate::stream::state::{StreamState, Visible};

use self::frames::StreamFrames;

mod frames;

/// So many adopted sections make a checkpoint worth while: each costs a little in every lookup.
const SECTIONS_BEFORE_CHECKPOINT: u64 = 1024;

pub struct CommitRequest<'a> {
    pub producer: &'a str,
    pub epoch: u64,
    /// Streams that tell a repetition even when the stages are gone.
    pub streams: Vec<&'a str>,
    pub stages: Vec<CommitStage<'a>>,
}

pub struct CommitStage<'a> {
    pub id: &'a str,
    pub checksum: u32,
}

pub struct Committed {
    pub duplicate: bool,
    pub streams: Vec<CommittedStream>,
    pub gate: Gate,
}

pub struct CommittedStream {
    pub name: Box<str>,
    pub incarnation: StreamId,
    pub rows: u64,
    pub from: Offset,
    pub to: Offset,
}

/// Stages in the hand of one commit; given back when it ends without them.
struct Hand<'e> {
    stages: &'e Stages,
    records: Vec<Arc<StageRecord>>,
    /// Streams of each of those that a commit has taken before.
    earlier: Vec<Arc<[StreamId]>>,
    /// Why the commit cannot be applied, if it turns out not to be a repetition.
    wrong: Option<Refusal>,
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        self.stages.give_back(&self.records);
    }
}

/// What one stream gets.
struct Share {
    name: Box<str>,
    sections: Vec<(Adopted, Vec<IndexEntry>)>,
    /// All bytes, where they go into the log or into memory.
    bytes: Option<Vec<u8>>,
    rows: u64,
    len: u64,
}

/// A stream with its lock held.
struct Locked<'s> {
    stream: &'s Arc<Stream>,
    state: MutexGuard<'s, StreamState>,
    share: Option<&'s Share>,
}

/// Everything that can be known before the streams are locked.
struct Plan<'e> {
    _held: Held<'e>,
    shares: BTreeMap<StreamId, Share>,
    copies: bool,
    /// Stages of which nothing is adopted.
    used_up: Vec<UsedUp>,
    /// What the index of all records will take in memory.
    index_memory: u64,
}

impl Engine {
    /// Appends what was staged. The answer waits for the gate.
    pub fn commit_stages(&self, request: &CommitRequest<'_>) -> Result<Committed, Undone> {
        let id = committer_id(request.producer).map_err(Undone::refused)?;
        check_epoch(request.epoch).map_err(Undone::refused)?;
        check_bounds(request).map_err(Undone::refused)?;
        let tag = ProducerTag {
            id: &id,
            epoch: request.epoch,
            seq: 0,
        };
        let mut hand = self.take_in_hand(request)?;
        let streams = self.concerned(request, &hand)?;
        // A repetition needs no file and takes no lock for longer than a look.
        if let Some(told) = self.told_before(&streams, &tag)? {
            return Ok(told);
        }
        if let Some(refusal) = hand.wrong.take() {
            return Err(Undone::refused(refusal));
        }
        let plan = self.plan(&hand.records, &streams)?;
        let committed = self.commit_locked(&streams, &plan, &tag)?;
        let records = std::mem::take(&mut hand.records);
        self.note_commit(&records, &plan, &committed);
        Ok(committed)
    }

    fn take_in_hand(&self, request: &CommitRequest<'_>) -> Result<Hand<'_>, Undone> {
        let ids = request.stages.iter().map(|stage| stage.id);
        let found = self.stages.take(ids).ok_or(Undone::Wait)?;
        let mut hand = Hand {
            stages: &self.stages,
            records: Vec::new(),
            earlier: Vec::new(),
            wrong: None,
        };
        for (asked, found) in request.stages.iter().zip(found) {
            let wrong = match found {
                Found::Waiting(record) => {
                    let same = record.head.checksum == asked.checksum;
                    hand.records.push(record);
                    (!same).then_some(ErrorCode::StageMismatch)
                }
                Found::Committed(streams) => {
                    hand.earlier.push(streams);
                    Some(ErrorCode::StageGone)
                }
                Found::None | Found::Busy => Some(ErrorCode::StageGone),
            };
            if let (Some(code), None) = (wrong, &hand.wrong) {
                let what = format!("Stage {:?}: {}.", asked.id, code.title());
                hand.wrong = Some(Refusal::with(code, what));
            }
        }
        Ok(hand)
    }

    /// Every stream that says something about this commit, once each, in the order of their ids: of stages that were
    /// taken before as many as one commit may have, some of each.
    fn concerned(
        &self,
        request: &CommitRequest<'_>,
        hand: &Hand<'_>,
    ) -> Result<Vec<Arc<Stream>>, Undone> {
        let mut streams: BTreeMap<StreamId, Arc<Stream>> = BTreeMap::new();
        let staged = hand.records.iter().flat_map(|record| &record.streams);
        let ids = staged.map(|staged| staged.stream);
        let each = STAGE_STREAMS_MAX / hand.earlier.len().max(1);
        let earlier = hand.earlier.iter().flat_map(|ids| ids.iter().take(each));
        for id in ids.chain(earlier.copied()) {
            if !streams.contains_key(&id)
                && let Some(stream) = self.directory.get_by_id(id)?
            {
                streams.insert(id, stream);
            }
        }
        for name in &request.streams {
            if let Some(stream) = self.find(name)? {
                streams.insert(stream.id, stream);
            }
        }
        Ok(streams.into_values().collect())
    }

    /// The answer to a repetition, or the refusal of a producer that has been replaced.
    fn told_before(
        &self,
        streams: &[Arc<Stream>],
        tag: &ProducerTag<'_>,
    ) -> Result<Option<Committed>, Undone> {
        let mut fenced = None;
        for stream in streams {
            let state = stream.lock();
            match decide(std::iter::once(&*state), tag.id, tag.epoch) {
                CommitDecision::Accept => {}
                CommitDecision::Duplicate => return Ok(Some(self.repeated(&state))),
                CommitDecision::Fenced { epoch } => {
                    fenced = Some((epoch, self.synced_gate(&state)))
                }
            }
        }
        match fenced {
            None => Ok(None),
            Some((epoch, gate)) => Err(fence(epoch, gate)),
        }
    }

    fn repeated(&self, state: &StreamState) -> Committed {
        self.metrics.commit_duplicates.add(1);
        Committed {
            duplicate: true,
            streams: Vec::new(),
            gate: self.synced_gate(state),
        }
    }

    /// A commit is synced in every class before anything is told about it. What a weak stream got behind it may never
    /// be asked to be synced, so nobody waits for that.
    fn synced_gate(&self, state: &StreamState) -> Gate {
        let gate = Gate::synced(if state.class.waits_for_sync() {
            state.reveal_sequence
        } else {
            state.control_sequence
        });
        if self.shard.reached(gate) {
            Gate::OPEN
        } else {
            gate
        }
    }

    /// Reads what the frames will need.
    fn plan(
        &self,
        records: &[Arc<StageRecord>],
        streams: &[Arc<Stream>],
    ) -> Result<Plan<'_>, Undone> {
        let mut shares: BTreeMap<StreamId, Share> = BTreeMap::new();
        let mut total = 0u64;
        for staged in records.iter().flat_map(|record| &record.streams) {
            total = total.saturating_add(staged.section.len);
            let share = shares.entry(staged.stream).or_insert_with(|| Share {
                name: staged.name.clone(),
                sections: Vec::new(),
                bytes: None,
                rows: 0,
                len: 0,
            });
            share.rows += staged.section.records;
            share.len += staged.section.len;
            share.sections.push((staged.section, Vec::new()));
        }
        for id in shares.keys() {
            if streams
                .binary_search_by_key(id, |stream| stream.id)
                .is_err()
            {
                return Err(self.not_there(&shares[id].name, *id));
            }
        }
        let copies = total <= COMMIT_COPY_MAX_BYTES && self.fits_the_log(&shares, streams);
        let sections: usize = shares.values().map(|share| share.sections.len()).sum();
        if !copies && sections * ADOPTED_BYTES > COMMIT_FRAMES_MAX_BYTES {
            return Err(too_many_sections());
        }
        let is_volatile = |id: &StreamId| {
            let found = streams.binary_search_by_key(id, |stream| stream.id);
            found.is_ok_and(|at| streams[at].lock().is_volatile())
        };
        let volatile: BTreeSet<StreamId> = shares.keys().copied().filter(is_volatile).collect();
        let loaded = shares
            .iter()
            .filter(|(id, _)| copies || volatile.contains(id));
        let loaded: u64 = loaded.map(|(_, share)| share.len).sum();
        let sections = shares.values().flat_map(|share| &share.sections);
        let entries = sections.map(|(section, _)| u64::from(section.index_count));
        let index_memory = entries.sum::<u64>() * ENTRY_MEMORY_BYTES;
        self.check_index_room(index_memory)?;
        let held = self.hold_staging(loaded + index_memory)?;
        for (id, share) in &mut shares {
            self.load(share, copies || volatile.contains(id))
                .map_err(|error| self.stage_unreadable(&share.name, &error))?;
        }
        let adopts = |record: &&Arc<StageRecord>| {
            let mut streams = record.streams.iter();
            streams.any(|staged| shares[&staged.stream].bytes.is_none())
        };
        let used_up = records.iter().filter(|record| !adopts(record));
        let used_up = used_up.map(|record| record.used_up()).collect();
        Ok(Plan {
            _held: held,
            shares,
            copies,
            used_up,
            index_memory,
        })
    }

    /// Whether the frames of copied records stay small too: a byte stream has one frame for each.
    fn fits_the_log(&self, shares: &BTreeMap<StreamId, Share>, streams: &[Arc<Stream>]) -> bool {
        let frames = shares.iter().map(|(id, share)| {
            let found = streams.binary_search_by_key(id, |stream| stream.id);
            match found.map(|at| streams[at].content_type.media) {
                Ok(Media::Json) => 1,
                _ => share.rows,
            }
        });
        frames.sum::<u64>() * (FRAME_HEADER_BYTES as u64) <= COMMIT_COPY_MAX_BYTES
    }

    fn load(&self, share: &mut Share, with_bytes: bool) -> io::Result<()> {
        for (section, index) in &mut share.sections {
            self.check_running()?;
            *index = self.cold.relative_index(section)?;
        }
        if !with_bytes {
            return Ok(());
        }
        let mut bytes = vec![0; share.len as usize];
        let mut at = 0;
        for (section, index) in &share.sections {
            self.check_running()?;
            let piece = &mut bytes[at..at + section.len as usize];
            self.cold.read_staged(section, 0, piece)?;
            crate::log::index::check_bytes(0, 0, piece, index)
                .map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))?;
            at += section.len as usize;
        }
        share.bytes = Some(bytes);
        Ok(())
    }

    fn stage_unreadable(&self, name: &str, error: &io::Error) -> Undone {
        if self.stopping.load(Ordering::Acquire) {
            return Undone::refused(ErrorCode::ShuttingDown);
        }
        self.metrics.read_errors.add(1);
        report!("a stage could not be read: {error}");
        Undone::refused(Refusal::with(
            ErrorCode::Internal,
            format!("What was staged for stream {name:?} could not be read; nothing was appended."),
        ))
    }

    /// Why the stream that rows were staged for is not among those that there are.
    fn not_there(&self, name: &str, id: StreamId) -> Undone {
        let code = match self.find(name) {
            Ok(Some(other)) if other.id != id => ErrorCode::StreamRecreated,
            Ok(_) => ErrorCode::StreamNotFound,
            Err(undone) => return undone,
        };
        name_stream(Undone::refused(code), name)
    }

    fn commit_locked(
        &self,
        streams: &[Arc<Stream>],
        plan: &Plan<'_>,
        tag: &ProducerTag<'_>,
    ) -> Result<Committed, Undone> {
        let now_ms = self.now_ms();
        let mut locked: Vec<Locked<'_>> = streams
            .iter()
            .map(|stream| Locked {
                stream,
                state: stream.lock(),
                share: plan.shares.get(&stream.id),
            })
            .collect();
        match decide(locked.iter().map(|entry| &*entry.state), tag.id, tag.epoch) {
            CommitDecision::Accept => {}
            // Somebody was faster; the next try is told so.
            CommitDecision::Duplicate | CommitDecision::Fenced { .. } => return Err(Undone::Wait),
        }
        locked.retain(|entry| entry.share.is_some());
        self.check_index_room(plan.index_memory)?;
        for entry in &mut locked {
            self.check_target(entry, plan, tag, now_ms)?;
        }
        if locked.is_empty() {
            // Nothing was staged at all: there is nothing to remember it in, and nothing to repeat.
            return Ok(Committed {
                duplicate: false,
                streams: Vec::new(),
                gate: Gate::OPEN,
            });
        }
        self.stage_commit(&mut locked, plan, tag, now_ms)
    }

    fn check_target(
        &self,
        entry: &mut Locked<'_>,
        plan: &Plan<'_>,
        tag: &ProducerTag<'_>,
        now_ms: u64,
    ) -> Result<(), Undone> {
        let Some(share) = entry.share else {
            return Ok(());
        };
        let state = &mut *entry.state;
        if let Err(undone) = self.check_life(entry.stream, state, now_ms) {
            return Err(match undone {
                Undone::Refused { gate, .. } => {
                    let code = match self.directory.get(&share.name) {
                        Ok(Some(other)) if other.id != entry.stream.id => {
                            ErrorCode::StreamRecreated
                        }
                        _ => ErrorCode::StreamNotFound,
                    };
                    let refusal = code.into();
                    name_stream(Undone::Refused { refusal, gate }, &share.name)
                }
                Undone::Wait => Undone::Wait,
            });
        }
        if state.closed {
            let refusal = ErrorCode::StreamClosed.into();
            let gate = self.reveal_gate(state);
            return Err(name_stream(Undone::Refused { refusal, gate }, &share.name));
        }
        if state.changing || (plan.copies || state.is_volatile()) != share.bytes.is_some() {
            return Err(Undone::Wait);
        }
        self.check_producer_room(state, tag)?;
        self.check_commit_room(state)
    }

    fn stage_commit(
        &self,
        locked: &mut [Locked<'_>],
        plan: &Plan<'_>,
        tag: &ProducerTag<'_>,
        now_ms: u64,
    ) -> Result<Committed, Undone> {
        let mut extra = Vec::new();
        AppendExtra {
            producer: Some(*tag),
            stream_seq: None,
        }
        .encode(&mut extra);
        let mut frames: Vec<StreamFrames> = locked
            .iter()
            .map(|entry| self.frames_of(entry, plan.copies, now_ms))
            .collect();
        if let Some(first) = frames.first_mut() {
            first.use_up(&plan.used_up);
        }
        let size = |frames: &StreamFrames| frames.size(extra.len());
        let total: usize = frames.iter().map(size).sum();
        if total > COMMIT_FRAMES_MAX_BYTES {
            return Err(too_many_sections());
        }
        for entry in locked.iter_mut() {
            self.directory
                .mark_dirty(entry.stream, &mut entry.state.dirty);
        }
        let sequences = {
            let mut open = self.shard.open()?;
            open.admit(total, false)?;
            let mut sequences = Vec::with_capacity(locked.len());
            let last = frames.len() - 1;
            for (number, (entry, frames)) in locked.iter_mut().zip(&frames).enumerate() {
                let visible = Visible {
                    tail: entry.state.tail + frames.len,
                    records: entry.state.records + frames.rows,
                    closed: entry.state.closed,
                };
                open.touch(entry.stream, &mut entry.state, visible, Stage::Synced);
                sequences.push(frames.push(&mut open, entry, &extra, number < last));
            }
            let newest = open.next_sequence - 1;
            open.wants(newest, Stage::Synced);
            sequences
        };
        self.shard.kick();
        let last = sequences.last().copied().zip(frames.last());
        let newest = last.map_or(0, |(first, frames)| first + frames.count() - 1);
        let mut committed = Committed {
            duplicate: false,
            streams: Vec::with_capacity(locked.len()),
            gate: Gate::synced(newest),
        };
        for ((entry, frames), sequence) in locked.iter_mut().zip(&frames).zip(sequences) {
            let from = self.applied_tail(&entry.state);
            self.apply_share(entry, frames, sequence, tag);
            committed.streams.push(CommittedStream {
                name: entry.stream.path.clone(),
                incarnation: entry.stream.id,
                rows: frames.rows,
                from,
                to: self.applied_tail(&entry.state),
            });
        }
        Ok(committed)
    }
}

impl Engine {
    fn note_commit(&self, records: &[Arc<StageRecord>], plan: &Plan<'_>, committed: &Committed) {
        let until_ms = self.now_ms() + self.config.stage_ttl_s.saturating_mul(1000);
        let used_up = |record: &Arc<StageRecord>| plan.used_up.contains(&record.used_up());
        let (copied, adopted): (Vec<_>, Vec<_>) = records.iter().cloned().partition(used_up);
        let sequence = committed.gate.sequence;
        self.stages.committed(&adopted, sequence, false, until_ms);
        self.stages.committed(&copied, sequence, true, until_ms);
        self.count_stages();
        self.metrics.commits.add(1);
        for share in plan.shares.values() {
            self.metrics.committed_rows.add(share.rows);
            self.metrics.committed_bytes.add(share.len);
        }
        // What was adopted takes little of the log, by which checkpoints are due otherwise, and perhaps much memory.
        let much = self.metrics.hot_bytes.get() > self.config.checkpoint_bytes;
        if much || self.cold.adopted_sections() >= SECTIONS_BEFORE_CHECKPOINT {
            self.maintenance.request_checkpoint();
        }
    }
}

fn too_many_sections() -> Undone {
    Undone::refused(Refusal::with(
        ErrorCode::PayloadTooLarge,
        "The commit has too many streams and stages; commit fewer at once.",
    ))
}

fn fence(epoch: u64, gate: Gate) -> Undone {
    let detail = format!("A stream has a commit of this producer at epoch {epoch}.");
    let mut refusal = Refusal::with(ErrorCode::ProducerFenced, detail);
    refusal.headers.producer_epoch = Some(epoch);
    Undone::Refused { refusal, gate }
}

fn check_bounds(request: &CommitRequest<'_>) -> Result<(), Refusal> {
    let bad = |detail: String| Err(Refusal::with(ErrorCode::BadRequest, detail));
    if request.stages.len() > COMMIT_STAGES_MAX {
        return bad(format!("A commit has at most {COMMIT_STAGES_MAX} stages."));
    }
    if request.streams.len() > STAGE_STREAMS_MAX {
        return bad(format!("A commit has at most {STAGE_STREAMS_MAX} streams."));
    }
    if request.stages.is_empty() && request.streams.is_empty() {
        return bad("A commit needs a stage.".to_owned());
    }
    let mut ids: Vec<&str> = request.stages.iter().map(|stage| stage.id).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => bad(format!("Stage {:?} is listed twice.", pair[0])),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
