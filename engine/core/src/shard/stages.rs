//! Which stages there are: those that wait for a commit, within a budget and for a time, and the ids of those that a
//! commit has taken.
//!
//! Memory only: every start finds the waiting ones again from their files (`log::stage`).
//!
//! Invariants
//! - `I-STAGES-1` A stage is taken by one commit at a time, and neither removed nor expired meanwhile.
//! - `I-STAGES-2` The file of a stage whose bytes were copied into the log goes only when that is synced.
//! - `I-STAGES-3` Waiting bytes, those being written included, stay within `stage_bytes_max`.
//! - `I-STAGES-4` What is remembered of a committed stage is bounded, however many streams it had.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::codec::adopt::UsedUp;
use crate::limits::{COMMITTED_STAGES_MAX, COMMITTED_STREAMS_MAX};
use crate::log::stage::StageRecord;
use crate::model::StreamId;

#[derive(Default)]
pub struct Stages {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    known: HashMap<Box<str>, Known>,
    /// Bytes of files that wait or are being written.
    bytes: u64,
    waiting: u64,
    /// Committed ids with the time until which they are remembered, in the order of their commits.
    committed: VecDeque<(u64, Box<str>)>,
    /// Those whose files go when the log is synced up to a sequence.
    copied: Vec<(u64, UsedUp)>,
    /// Those whose files are gone, but perhaps not yet for good.
    removed: Vec<UsedUp>,
}

enum Known {
    /// Somebody is writing its file, or a commit has it in hand.
    Busy,
    Waiting(Arc<StageRecord>),
    /// Some of the streams that it went to.
    Committed(Arc<[StreamId]>),
}

/// What an id stands for.
pub enum Found {
    None,
    /// In somebody's hand: look again.
    Busy,
    Waiting(Arc<StageRecord>),
    Committed(Arc<[StreamId]>),
}

impl Stages {
    pub fn find(&self, id: &str) -> Found {
        found(self.state.lock().known.get(id))
    }

    /// Reserves an id and room for its file. `Err`: there is one already, or `None` if the budget is used up.
    pub fn begin(&self, id: &str, file_bytes: u64, bytes_max: u64) -> Result<(), Option<Found>> {
        let mut state = self.state.lock();
        match found(state.known.get(id)) {
            Found::None => {}
            other => return Err(Some(other)),
        }
        if state.bytes.saturating_add(file_bytes) > bytes_max {
            return Err(None);
        }
        state.bytes += file_bytes;
        state.known.insert(id.into(), Known::Busy);
        Ok(())
    }

    /// The file is there, or could not be written.
    pub fn finish(&self, id: &str, reserved: u64, written: Option<Arc<StageRecord>>) {
        let mut state = self.state.lock();
        state.bytes = state.bytes.saturating_sub(reserved);
        match written {
            Some(record) => state.add(record),
            None => {
                state.known.remove(id);
            }
        }
    }

    /// A stage that an earlier run has left. Of two with one id the newer one counts; the other is returned.
    pub fn restore(&self, record: StageRecord) -> Option<u32> {
        let mut state = self.state.lock();
        let older = match state.known.get(&record.head.id) {
            Some(Known::Waiting(other)) if other.pack > record.pack => return Some(record.pack),
            Some(Known::Waiting(other)) => Some(Arc::clone(other)),
            _ => None,
        };
        if let Some(older) = &older {
            state.remove(older);
        }
        state.add(Arc::new(record));
        older.map(|older| older.pack)
    }

    /// Takes all waiting ones of these ids for a commit. `None`: one is in somebody's hand, nothing is taken.
    pub fn take<'a>(&self, ids: impl Iterator<Item = &'a str> + Clone) -> Option<Vec<Found>> {
        let mut state = self.state.lock();
        let all: Vec<Found> = ids.map(|id| found(state.known.get(id))).collect();
        if all.iter().any(|found| matches!(found, Found::Busy)) {
            return None;
        }
        for one in &all {
            if let Found::Waiting(record) = one {
                state.known.insert(record.head.id.clone(), Known::Busy);
            }
        }
        Some(all)
    }

    /// Gives taken ones back.
    pub fn give_back(&self, records: &[Arc<StageRecord>]) {
        let mut state = self.state.lock();
        for record in records {
            let waiting = Known::Waiting(Arc::clone(record));
            state.known.insert(record.head.id.clone(), waiting);
        }
    }

    /// A commit is staged in the log up to `sequence`. `copied`: the log has the bytes, so that the files can go.
    pub fn committed(
        &self,
        records: &[Arc<StageRecord>],
        sequence: u64,
        copied: bool,
        until_ms: u64,
    ) {
        let mut state = self.state.lock();
        for record in records {
            state.remove(record);
            // From everywhere: those that are side by side may be deleted together.
            let each = record.streams.len().div_ceil(COMMITTED_STREAMS_MAX);
            let streams = record.streams.iter().step_by(each.max(1));
            let streams = streams.map(|stream| stream.stream).collect();
            let id = record.head.id.clone();
            state.known.insert(id.clone(), Known::Committed(streams));
            state.committed.push_back((until_ms, id));
            if copied || record.streams.is_empty() {
                state.copied.push((sequence, record.used_up()));
            }
        }
        while state.committed.len() > COMMITTED_STAGES_MAX {
            state.forget_oldest();
        }
    }

    /// Removes a waiting one; what it was.
    pub fn remove(&self, id: &str) -> Found {
        let mut state = self.state.lock();
        let found = found(state.known.get(id));
        if let Found::Waiting(record) = &found {
            state.remove(record);
        }
        found
    }

    /// Waiting ones that are older than their time, removed from the list.
    pub fn take_expired(&self, now_ms: u64, ttl_ms: u64) -> Vec<Arc<StageRecord>> {
        let mut state = self.state.lock();
        while state
            .committed
            .front()
            .is_some_and(|(until_ms, _)| *until_ms <= now_ms)
        {
            state.forget_oldest();
        }
        let old = |known: &Known| match known {
            Known::Waiting(record) if record.head.time_ms.saturating_add(ttl_ms) <= now_ms => {
                Some(Arc::clone(record))
            }
            _ => None,
        };
        let expired: Vec<Arc<StageRecord>> = state.known.values().filter_map(old).collect();
        expired.iter().for_each(|record| state.remove(record));
        expired
    }

    /// Those whose bytes the log has, up to a sequence.
    pub fn copied_up_to(&self, sequence: u64) -> Vec<UsedUp> {
        let state = self.state.lock();
        let copied = state.copied.iter().filter(|copied| copied.0 <= sequence);
        copied.map(|(_, used_up)| *used_up).collect()
    }

    /// The file of a copied one was removed.
    pub fn copied_is_removed(&self, used_up: UsedUp) {
        let mut state = self.state.lock();
        state.copied.retain(|copied| copied.1 != used_up);
        state.removed.push(used_up);
    }

    /// Those whose files were removed since it was last made sure that they stay away.
    pub fn removed(&self) -> Vec<UsedUp> {
        self.state.lock().removed.clone()
    }

    /// The files of these are gone for good.
    pub fn forget_removed(&self, gone: &[UsedUp]) {
        let mut state = self.state.lock();
        state.removed.retain(|removed| !gone.contains(removed));
    }

    /// How many wait, and how many bytes their files have.
    pub fn waiting(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.waiting, state.bytes)
    }
}

impl State {
    fn add(&mut self, record: Arc<StageRecord>) {
        self.bytes += record.file_bytes;
        self.waiting += 1;
        self.known
            .insert(record.head.id.clone(), Known::Waiting(record));
    }

    fn remove(&mut self, record: &StageRecord) {
        self.bytes = self.bytes.saturating_sub(record.file_bytes);
        self.waiting = self.waiting.saturating_sub(1);
        self.known.remove(&record.head.id);
    }

    fn forget_oldest(&mut self) {
        if let Some((_, id)) = self.committed.pop_front()
            && matches!(self.known.get(&id), Some(Known::Committed(_)))
        {
            self.known.remove(&id);
        }
    }
}

fn found(known: Option<&Known>) -> Found {
    match known {
        None => Found::None,
        Some(Known::Busy) => Found::Busy,
        Some(Known::Waiting(record)) => Found::Waiting(Arc::clone(record)),
        Some(Known::Committed(streams)) => Found::Committed(Arc::clone(streams)),
    }
}
