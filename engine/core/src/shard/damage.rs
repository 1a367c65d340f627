//! Damage as the engine meets it: reads that fail are looked into, what is found is recorded on the stream that
//! owns the bytes, and readers pass it with a gap.
//!
//! Sits between `read`, which meets it, and `log::cold`, which knows what is wrong. A fork has no list of its own
//! for inherited bytes: it sees its source's.
//!
//! Invariants
//! - `I-CORRUPT-1` Only what fails a second look is recorded, and what is recorded stays so until the stream goes;
//!   for a file that is not there, until the process ends.
//! - `I-CORRUPT-2` No response spans a damaged range; the read that starts in one carries the gap.

use std::io;
use std::sync::Arc;

use crate::error::ErrorCode;
use crate::io::wanted::{self, Key};
use crate::limits::FORK_PIECES_MAX;
use crate::log::cold::{Fault, Trouble, is_damage};
use crate::model::Extent;
use crate::refusal::Refusal;
use crate::report;
use crate::shard::engine::Engine;
use crate::stream::damage;
use crate::stream::handle::Stream;
use crate::stream::state::Life;

/// How the engine is, in one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    Ok,
    /// It serves; some ranges of streams cannot be read back.
    Degraded,
    /// The log does not do its work.
    Trouble(&'static str),
}

impl Condition {
    pub fn name(self) -> &'static str {
        match self {
            Condition::Ok => "ok",
            Condition::Degraded => "degraded",
            Condition::Trouble(what) => what,
        }
    }
}

/// Each attempt but the last finds damage that the next one knows of; more than a few have no end in sight.
const READ_ATTEMPTS: usize = 8;

impl Engine {
    pub fn condition(&self) -> Condition {
        match self.shard.trouble() {
            Some(what) => Condition::Trouble(what),
            None if self.directory.damaged.ranges() > 0 => Condition::Degraded,
            None => Condition::Ok,
        }
    }

    /// Where the damage that the byte at `position` is in ends, as seen from this stream.
    pub fn damage_end(&self, stream: &Arc<Stream>, position: u64) -> io::Result<Option<u64>> {
        if stream.lock().is_sound_from(position) {
            return Ok(None);
        }
        let mut end = None;
        for _ in 0..FORK_PIECES_MAX {
            let at = end.unwrap_or(position);
            let (owner, limit) = self.owner_of(stream, at)?;
            let Some(range) = damage::at(owner.lock().damaged(), at) else {
                return Ok(end);
            };
            end = Some(range.1.min(limit));
            // Only at a fork point may another range follow at once: its own bytes have their own list.
            if range.1 < limit {
                return Ok(end);
            }
        }
        // More may follow: the next read begins in it and gets another gap.
        Ok(end)
    }

    /// Where the first damaged range behind `position` begins, if that is before `end`; else `end`.
    pub fn damage_start(&self, stream: &Arc<Stream>, position: u64, end: u64) -> io::Result<u64> {
        if stream.lock().is_sound_from(position) {
            return Ok(end);
        }
        let mut at = position;
        while at < end {
            let (owner, limit) = self.owner_of(stream, at)?;
            let next = damage::next_start(owner.lock().damaged(), at);
            if let Some(start) = next.filter(|start| *start < limit.min(end)) {
                return Ok(start);
            }
            at = limit;
        }
        Ok(end)
    }

    /// Whether a damaged range begins or ends here.
    pub fn is_damage_edge(&self, stream: &Arc<Stream>, position: u64) -> io::Result<bool> {
        let (owner, _) = self.owner_of(stream, position)?;
        if damage::is_edge(owner.lock().damaged(), position) {
            return Ok(true);
        }
        let (before, _) = self.owner_of(stream, position.saturating_sub(1))?;
        Ok(damage::is_edge(before.lock().damaged(), position))
    }

    /// Grows when damage is recorded: a read that failed while it grew is worth another try.
    pub fn damage_version(&self) -> u64 {
        self.directory.damaged.version()
    }

    /// Repeats a read that failed on damage nobody knew: now that it is recorded, the read goes around it.
    pub fn past_damage<T>(
        &self,
        mut read: impl FnMut() -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut version = self.damage_version();
        for _ in 1..READ_ATTEMPTS {
            let result = read();
            let now = self.damage_version();
            if result.is_ok() || now == version {
                return result;
            }
            version = now;
        }
        read()
    }

    /// Looks into a failed read of bytes that `owner` has, and records what is wrong with them.
    pub fn examine(&self, owner: &Arc<Stream>, error: &io::Error) {
        let Some(trouble) = Trouble::of(error) else {
            return;
        };
        if !is_damage(error) && error.kind() != io::ErrorKind::NotFound {
            return;
        }
        // The rest of the stream is looked at soon, too.
        self.directory.damaged.suspect(owner.id);
        if !looks_here(owner, trouble.from, trouble.to, trouble.index) {
            // The read that is repeated then goes around what was found: this is where the failure is told.
            if wanted::is_noted() && !is_gone(owner) {
                self.tell_of(error);
            }
            return;
        }
        if let Err(error) = self.look_into(owner, trouble.from, trouble.to, trouble.index) {
            report!("a failed read could not be investigated: {error}");
        }
    }

    /// Looks at what a stream has in files between two positions, or at the index there, and records what is wrong.
    /// Returns whether something is.
    pub fn look_into(
        &self,
        owner: &Arc<Stream>,
        from: u64,
        to: u64,
        index: bool,
    ) -> io::Result<bool> {
        let extents = owner.lock().readable_extents();
        let mut faults = Vec::new();
        for extent in extents.iter() {
            let (from, to) = (from.max(extent.start), to.min(extent.end()));
            if from >= to {
                continue;
            }
            faults.extend(if index {
                self.look_at_index(owner, extent)?
            } else {
                self.look_between(owner, extent, from, to)?
            });
        }
        self.record(owner, &faults);
        Ok(!faults.is_empty())
    }

    /// Looks at the appends around a position: whether the index that finds no boundary there is to be believed.
    pub fn doubt(&self, stream: &Arc<Stream>, position: u64) -> io::Result<()> {
        let (owner, _) = self.owner_of(stream, position)?;
        if !looks_here(&owner, position, position + 1, false) {
            return if wanted::is_noted() {
                Err(wanted::would_block())
            } else {
                Ok(())
            };
        }
        if self.look_into(&owner, position, position + 1, false)? {
            self.directory.damaged.suspect(owner.id);
        }
        Ok(())
    }

    /// The same after a body broke off: whoever comes again finds the damage recorded. A stream that was deleted
    /// meanwhile has lost its bytes rightly: that is no error.
    pub fn body_failed(&self, stream: &Arc<Stream>, position: u64, why: &str) {
        if is_gone(stream) {
            return;
        }
        self.metrics.read_errors.add(1);
        report!("a response body broke off at byte {position} of its stream: {why}");
        let looked = self.doubt(stream, position);
        match (looked, self.owner_of(stream, position)) {
            (Ok(()), Ok((owner, _))) => self.directory.damaged.suspect(owner.id),
            (Err(error), Ok((owner, _))) if error.kind() == io::ErrorKind::WouldBlock => {
                self.directory.damaged.suspect(owner.id);
            }
            (Err(error), _) | (_, Err(error)) => {
                report!("a failed read could not be investigated: {error}");
            }
        }
    }

    pub fn look_between(
        &self,
        owner: &Stream,
        extent: &Extent,
        from: u64,
        to: u64,
    ) -> io::Result<Vec<Fault>> {
        let looked = self.cold.checker().between(extent, from, to);
        missing_is_a_fault(owner, extent, looked)
    }

    fn look_at_index(&self, owner: &Stream, extent: &Extent) -> io::Result<Vec<Fault>> {
        let looked = self.cold.checker().index_order(extent);
        missing_is_a_fault(owner, extent, looked.map(Option::unwrap_or_default))
    }

    /// Records faults on the stream that owns the bytes; tells of those that are new.
    pub fn record(&self, owner: &Arc<Stream>, faults: &[Fault]) {
        if faults.is_empty() {
            return;
        }
        let mut state = owner.lock();
        if state.life == Life::Gone {
            return;
        }
        let fresh: Vec<Fault> = melted(faults)
            .into_iter()
            .filter(|fault| state.add_damage((fault.start, fault.end), !fault.missing))
            .collect();
        if fresh.is_empty() {
            return;
        }
        let lasting = fresh.iter().any(|fault| !fault.missing);
        if lasting {
            self.directory.mark_dirty(owner, &mut state.dirty);
        }
        let count = state.damaged().len();
        self.directory.damaged.note(owner.id, count);
        drop(state);
        self.directory.damaged.found(lasting);
        for fault in fresh {
            report!(
                "stream {:?} is damaged: bytes {}..{} cannot be read, {} byte {}: {}",
                owner.path,
                fault.start,
                fault.end,
                fault.file,
                fault.byte,
                fault.what
            );
        }
    }

    fn tell_of(&self, error: &io::Error) {
        self.metrics.read_errors.add(1);
        report!("read failed: {error}");
    }

    /// A read error in the words of a reply; the log has the details.
    pub fn read_failed(&self, stream: &Stream, error: io::Error) -> Refusal {
        if wanted::is_noted() {
            // Not an error: it is looked at again when the bytes are at hand.
            return Refusal::new(ErrorCode::ServerBusy);
        }
        if is_gone(stream) {
            // Whether the delete will last is not known here; who asks again waits for it.
            return Refusal::with(
                ErrorCode::ServerBusy,
                "The stream was deleted while it was being read.",
            );
        }
        self.tell_of(&error);
        Refusal::with(ErrorCode::Internal, "The stream's bytes could not be read.")
    }
}

fn is_gone(stream: &Stream) -> bool {
    stream.lock().life == Life::Gone
}

/// Whether this thread looks at bytes that seem damaged. One that must not wait for the disk has others look (`wanted`),
/// and reads again when they have.
fn looks_here(owner: &Stream, from: u64, to: u64, index: bool) -> bool {
    let key = || Key::Look {
        stream: owner.id.0,
        from,
        to,
        index,
    };
    if wanted::may_wait() {
        return true;
    }
    wanted::want(key(), || None);
    false
}

/// Faults with neighbours put together: a file that ends too early is one line for the operator, not one per append.
fn melted(faults: &[Fault]) -> Vec<Fault> {
    let mut melted: Vec<Fault> = Vec::with_capacity(faults.len());
    for fault in faults {
        match melted.last_mut() {
            Some(last) if last.end == fault.start && last.missing == fault.missing => {
                last.end = fault.end;
            }
            _ => melted.push(fault.clone()),
        }
    }
    melted
}

/// A file that is not there is damage only if the stream still says that its bytes are in it.
fn missing_is_a_fault(
    owner: &Stream,
    extent: &Extent,
    looked: io::Result<Vec<Fault>>,
) -> io::Result<Vec<Fault>> {
    match looked {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let named = owner.lock().readable_extents().contains(extent);
            Ok(if named {
                vec![Fault::missing(extent, &error)]
            } else {
                Vec::new()
            })
        }
        other => other,
    }
}

#[cfg(test)]
#[path = "damage_tests.rs"]
mod tests;
