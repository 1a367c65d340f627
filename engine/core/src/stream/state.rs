//! What a stream is: configuration, producers, position, and the bytes that are still in memory.
//!
//! In two parts. What frames of the log decide ([`Logged`]) is changed by [`StreamState::apply`](super::change) alone, for
//! live requests as in recovery, so that a restart rebuilds exactly what the live server had; everybody reads it as if
//! it were the state's own. The rest is this process's: where bytes are, what readers see, what is under way.
//!
//! Invariants
//! - `I-STATE-1` `applied_sequence` is the sequence of the newest frame this state reflects; a frame at or
//!   below it is never applied again.
//! - `I-STATE-2` `extents`, then `spilled`, then `flushing`, then `hot` cover `start..tail` without hole or
//!   overlap. Only `extents` outlive the process; `spilled` belongs to `ephemeral` streams alone.
//! - `I-STATE-3` `visible` never goes back, and never passes what the class's watermark has reached.
//! - `I-STATE-4` `last_time_ms` and index times never decrease.

use std::ops::Deref;
use std::sync::Arc;

use crate::codec::ProducerTag;
use crate::limits::DAMAGED_RANGES_MAX;
use crate::model::{Adopted, Class, Extent, StreamId};
use crate::stream::damage;
use crate::stream::hot::Hot;
use crate::stream::line::{Line, Mark};
use crate::stream::memory::Counted;
use crate::stream::producers::{ProducerState, Producers, Remembered};
use crate::stream::unsettled::Unsettled;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Life {
    Live = 0,
    /// Deleted, but forks still read its bytes.
    SoftDeleted = 1,
    /// Deleted; kept in memory only until the catalog has forgotten it.
    Gone = 2,
}

/// Whether the bytes of an `ephemeral` stream are on their way to a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    No,
    /// The next checkpoint shall write them.
    Wanted,
    /// A checkpoint is writing them.
    Taken,
}

/// What readers may see. Ordered: of two that were said about a stream the higher one holds, whoever comes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Visible {
    pub tail: u64,
    pub records: u64,
    pub closed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Expiry {
    pub ttl_seconds: Option<u64>,
    pub expires_at_ms: Option<u64>,
    /// Taken over from the fork's source, not asked for: a repeated PUT without it is the same configuration.
    pub inherited: bool,
    /// Last access that the log knows of, by the steady clock of the process that it was in.
    pub logged_access_ms: u64,
    /// The last access in this process, by a clock that nobody can set; 0 = there was none.
    pub steady_access_ms: u64,
}

impl Expiry {
    /// A moment of the calendar is one of the wall clock. A sliding TTL is a duration: while the process runs
    /// it is measured by the steady clock, which agreed with the wall clock when the process began, and what is kept
    /// of it is a time of that clock. Renewals are logged only now and then, so who knows of none himself adds what
    /// may not have been logged.
    pub fn expired(&self, now_ms: u64, steady_ms: u64) -> bool {
        let accessed_ms = match self.steady_access_ms {
            0 => self
                .logged_access_ms
                .saturating_add(self.touch_interval_ms()),
            steady => steady,
        };
        let idle = self
            .ttl_seconds
            .is_some_and(|ttl| steady_ms >= accessed_ms.saturating_add(ttl.saturating_mul(1000)));
        idle || self.expires_at_ms.is_some_and(|at| now_ms >= at)
    }

    /// What a restart shall know.
    pub fn last_access_ms(&self) -> u64 {
        match self.steady_access_ms {
            0 => self.logged_access_ms,
            steady => steady,
        }
    }

    /// How often a renewal is worth a frame.
    pub fn touch_interval_ms(&self) -> u64 {
        self.ttl_seconds
            .map_or(u64::MAX, |ttl| ttl.saturating_mul(100).max(1000))
    }
}

/// Where a fork comes from. Positions below the stream's `start` are the source's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fork {
    pub source: StreamId,
    pub source_path: Box<str>,
    /// Position of the anchor, and what the request said about it.
    pub anchor: u64,
    pub anchor_requested: bool,
    pub sub_offset: u64,
    /// The way to the ancestors that own what is inherited.
    pub line: Line,
}

/// The producer tuple that closed the stream: its retry is a duplicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClosedBy {
    pub id: Box<[u8]>,
    pub epoch: u64,
    pub seq: u64,
}

impl ClosedBy {
    pub fn is(&self, tag: &ProducerTag<'_>) -> bool {
        &*self.id == tag.id && self.epoch == tag.epoch && self.seq == tag.seq
    }
}

/// What the log decides. Never changed outside of this folder: there is no way to it from a state but for reading.
#[derive(Debug)]
pub struct Logged {
    pub id: StreamId,
    pub class: Class,
    /// Highest epoch when the stream got its class: losses up to there do not concern it.
    pub class_since: u64,
    pub life: Life,
    pub closed: bool,
    pub closed_by: Option<Box<ClosedBy>>,
    pub created_ms: u64,
    /// Epoch of the first byte: the stream's own id, or its source's first epoch for a fork.
    pub first_epoch: u64,
    /// Epochs begun later, with the position where each begins.
    pub later_epochs: Vec<(u64, u64)>,
    pub expiry: Option<Box<Expiry>>,
    pub fork: Option<Box<Fork>>,
    /// Forks that still need this stream's bytes.
    pub fork_count: u32,
    /// Behind [`StreamState::producers`].
    pub(super) producers: Remembered,
    pub stream_seq: Option<Box<[u8]>>,
    /// First position whose bytes are the stream's own.
    pub start: u64,
    pub start_records: u64,
    pub tail: u64,
    pub records: u64,
    pub last_time_ms: u64,
    pub applied_sequence: u64,
    /// Newest frame that replies may reveal: all but renewals of a TTL.
    pub reveal_sequence: u64,
    /// Newest frame that changed what the stream is (create, close, delete), for replies that reveal it.
    pub control_sequence: u64,
    /// The frame that it began with; 0 = before this process.
    pub created_sequence: u64,
    /// The frame that ended its life for readers; 0 = before this process, or none has.
    pub removed_sequence: u64,
    /// The newest frame that gave it another class, and the class that it had before; 0 = as above.
    pub class_sequence: u64,
    pub class_before: Class,
}

#[derive(Debug)]
pub struct StreamState {
    pub(super) logged: Logged,
    pub extents: Arc<Vec<Extent>>,
    /// Bytes of an `ephemeral` stream that memory had no room for, in files that every start discards.
    pub spilled: Arc<Vec<Extent>>,
    /// Records up to the end of the spilled extents, if there are any.
    pub spilled_records: u64,
    /// An `ephemeral` stream's bytes shall outlive the process after all: a fork or a stronger class needs them.
    pub keep: Keep,
    /// When bytes were last taken to be kept: everything before is in the extents.
    pub kept_ms: u64,
    /// A change of class waits for a checkpoint; appends wait with it.
    pub changing: bool,
    /// Ranges that cannot be read back, sorted and disjoint: readers get a gap.
    pub damaged: Option<Box<Vec<(u64, u64)>>>,
    /// The same with ranges whose files are not there now, if there are such. Not written anywhere: files may come
    /// back, and if they do not, that is found again.
    pub unreadable: Option<Box<Vec<(u64, u64)>>>,
    /// Records up to the end of the extents.
    pub cold_records: u64,
    pub flushing: Option<Arc<Hot>>,
    pub hot: Hot,
    /// What a purged stream had taken over from stages: kept until the catalog has forgotten the stream.
    pub abandoned: Vec<Adopted>,
    pub visible: Visible,
    /// The newest append that is shown only when it is synced, whatever the class.
    pub held_sequence: u64,
    /// Stamp of the newest change that readers may see; 0 = none since it was loaded.
    pub changed: u64,
    /// What appends in memory alone have changed beside the bytes.
    pub(super) unsettled: Option<Box<Unsettled>>,
    /// What the gauges of memory know of this stream.
    pub counted: Counted,
    /// In the list of streams the next checkpoint writes.
    pub dirty: bool,
    /// Where the open batch keeps this stream's publication: batch number and slot.
    pub batch_slot: (u64, u32),
}

impl Deref for StreamState {
    type Target = Logged;

    fn deref(&self) -> &Logged {
        &self.logged
    }
}

impl StreamState {
    pub fn new(id: StreamId, class: Class, created_ms: u64) -> StreamState {
        let logged = Logged {
            id,
            class,
            class_since: id.0,
            life: Life::Live,
            closed: false,
            closed_by: None,
            created_ms,
            first_epoch: id.0,
            later_epochs: Vec::new(),
            expiry: None,
            fork: None,
            fork_count: 0,
            producers: Remembered::Nobody,
            stream_seq: None,
            start: 0,
            start_records: 0,
            tail: 0,
            records: 0,
            last_time_ms: created_ms,
            applied_sequence: 0,
            reveal_sequence: 0,
            control_sequence: 0,
            created_sequence: 0,
            removed_sequence: 0,
            class_sequence: 0,
            class_before: class,
        };
        StreamState {
            logged,
            extents: Arc::new(Vec::new()),
            spilled: Arc::new(Vec::new()),
            spilled_records: 0,
            changing: false,
            keep: Keep::No,
            kept_ms: 0,
            damaged: None,
            unreadable: None,
            cold_records: 0,
            flushing: None,
            hot: Hot::default(),
            abandoned: Vec::new(),
            visible: Visible::default(),
            held_sequence: 0,
            changed: 0,
            unsettled: None,
            counted: Counted::default(),
            dirty: false,
            batch_slot: (0, 0),
        }
    }

    /// Where the stream's own bytes begin, as its forks know it.
    pub fn mark(&self) -> Mark {
        let line = self.fork.as_ref().map(|fork| &fork.line);
        Mark {
            id: self.id,
            depth: line.map_or(0, |line| line.depth),
            start: self.start,
            start_records: self.start_records,
            time_ms: line.map_or(0, |line| line.time_ms),
        }
    }

    /// The ancestor that the stream knows beside its parent; where a line begins, itself.
    pub fn jump(&self) -> Mark {
        let line = self.fork.as_ref().map(|fork| &fork.line);
        line.filter(|line| line.depth > 0)
            .map_or_else(|| self.mark(), |line| line.jump)
    }

    /// First position that is not in a checkpoint.
    pub fn cold_end(&self) -> u64 {
        self.extents.last().map_or(self.start, Extent::end)
    }

    /// First position that is in no file at all.
    pub fn file_end(&self) -> u64 {
        self.spilled.last().map_or(self.cold_end(), Extent::end)
    }

    /// Records up to `file_end`.
    pub fn file_records(&self) -> u64 {
        if self.spilled.is_empty() {
            self.cold_records
        } else {
            self.spilled_records
        }
    }

    /// Every extent that can be read now. One that is damaged as a whole is left out: its files may be gone.
    pub fn readable_extents(&self) -> Arc<Vec<Extent>> {
        let damaged = self.damaged();
        if self.spilled.is_empty() && damaged.is_empty() {
            return Arc::clone(&self.extents);
        }
        let all = self.extents.iter().chain(self.spilled.iter());
        let readable = all.filter(|extent| !damage::covers(damaged, extent));
        Arc::new(readable.copied().collect())
    }

    /// Records up to a position where bytes change their place: no index is needed for that.
    pub fn records_at_seam(&self, position: u64) -> Option<u64> {
        if position == self.start {
            return Some(self.start_records);
        }
        let extents = self.extents.iter().chain(self.spilled.iter());
        let seam = extents
            .filter(|extent| extent.start == position)
            .map(|extent| extent.base_records)
            .next();
        seam.or((position == self.file_end()).then(|| self.file_records()))
    }

    /// The ranges that readers go around.
    pub fn damaged(&self) -> &[damage::Range] {
        let ranges = self.unreadable.as_deref().or(self.damaged.as_deref());
        ranges.map_or(&[], Vec::as_slice)
    }

    /// Adds a damaged range; one that is not `lasting` ends with the process. Returns whether it is news.
    pub fn add_damage(&mut self, (start, end): damage::Range, lasting: bool) -> bool {
        let mut news = false;
        if !lasting && self.unreadable.is_none() {
            self.unreadable = Some(Box::new(self.damaged().to_vec()));
        }
        if lasting {
            let ranges = self.damaged.get_or_insert_default();
            news |= damage::insert(ranges, start, end);
            damage::bound(ranges, DAMAGED_RANGES_MAX);
        }
        if let Some(ranges) = &mut self.unreadable {
            news |= damage::insert(ranges, start, end);
            damage::bound(ranges, DAMAGED_RANGES_MAX);
        }
        news
    }

    /// Whether appends live in memory alone and end with the process.
    pub fn is_volatile(&self) -> bool {
        self.class == Class::Ephemeral
    }

    /// Whether there are bytes that only this process has.
    pub fn has_volatile_bytes(&self) -> bool {
        self.is_volatile() && self.cold_end() < self.tail
    }

    /// Where the stream will end after a restart, as far as this process decides: what a snapshot says.
    pub fn lasting_tail(&self) -> (u64, u64) {
        if self.is_volatile() && self.keep != Keep::Taken {
            (self.cold_end(), self.cold_records)
        } else {
            (self.tail, self.records)
        }
    }

    /// Whether extents cover everything: true of every state that a checkpoint wrote.
    pub fn is_covered(&self) -> bool {
        self.cold_end() == self.tail
    }

    pub fn expired(&self, now_ms: u64, steady_ms: u64) -> bool {
        self.life == Life::Live
            && self
                .expiry
                .as_ref()
                .is_some_and(|expiry| expiry.expired(now_ms, steady_ms))
    }

    /// Whether it was there for readers when frames up to this one were final.
    pub fn was_live(&self, synced: u64) -> bool {
        let not_removed = self.life == Life::Live || self.removed_sequence > synced;
        self.created_sequence <= synced && not_removed
    }

    /// The class that it had then.
    pub fn class_at(&self, synced: u64) -> Class {
        if self.class_sequence > synced {
            self.class_before
        } else {
            self.class
        }
    }

    /// A sliding TTL begins again, by the clock that nobody can set; for most streams nobody need look at it. Returns when
    /// it was, if that is due for a frame.
    pub fn renew(&mut self, steady_ms: impl FnOnce() -> u64) -> Option<u64> {
        let expiry = self.logged.expiry.as_mut();
        let expiry = expiry.filter(|expiry| expiry.ttl_seconds.is_some())?;
        let now_ms = steady_ms();
        expiry.steady_access_ms = now_ms;
        let unlogged_ms = now_ms.abs_diff(expiry.logged_access_ms);
        (unlogged_ms >= expiry.touch_interval_ms()).then_some(now_ms)
    }

    /// Behind a commit even a weak stream shows nothing before that is synced.
    pub fn hold_until_synced(&mut self, sequence: u64) {
        self.logged.control_sequence = sequence;
    }

    /// The stream's create could not be staged: it never was.
    pub fn withdraw(&mut self) {
        self.logged.life = Life::Gone;
    }

    /// For repair, which counts the forks that are there.
    pub fn recount_forks(&mut self, count: u32) {
        self.logged.fork_count = count;
    }

    /// Notes the staged packs of bytes that nobody will read any more.
    pub fn abandon(&mut self, hot: &Hot) {
        self.abandoned
            .extend(hot.file_parts().map(|part| part.section));
    }

    pub fn last_epoch(&self) -> u64 {
        self.later_epochs
            .last()
            .map_or(self.first_epoch, |(epoch, _)| *epoch)
    }

    pub fn producer(&self, id: &[u8]) -> Option<ProducerState> {
        self.producers()?.get(id).copied()
    }

    /// Not of a state that was read without them ([`Remembered::all`]).
    pub fn producers(&self) -> Option<&Producers> {
        self.producers.all()
    }

    /// Takes over the producers that were left out, from the same state read whole.
    pub fn complete(&mut self, whole: &mut StreamState) {
        if self.producers.are_left_out() {
            self.logged.producers = std::mem::take(&mut whole.logged.producers);
        }
    }

    /// Makes everything applied visible: the class's watermark has reached it.
    pub fn publish_applied(&mut self) {
        self.visible = Visible {
            tail: self.tail,
            records: self.records,
            closed: self.closed,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_that_may_pass_is_seen_and_not_kept() {
        let mut state = StreamState::new(StreamId(1), Class::Fsync, 0);
        assert!(state.add_damage((10, 20), true));
        assert!(state.add_damage((15, 40), false));
        assert!(!state.add_damage((15, 40), false));
        assert_eq!(state.damaged(), [(10, 40)]);
        assert!(state.add_damage((30, 35), true), "known now for good");
        assert_eq!(state.damaged(), [(10, 40)]);
        assert_eq!(state.damaged.as_deref(), Some(&vec![(10, 20), (30, 35)]));
    }

    #[test]
    fn ttl_arithmetic_does_not_overflow() {
        let expiry = Expiry {
            ttl_seconds: Some(u64::MAX),
            logged_access_ms: u64::MAX - 1,
            ..Expiry::default()
        };
        assert!(!expiry.expired(u64::MAX - 1, u64::MAX - 1));
    }
}
