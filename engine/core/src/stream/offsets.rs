//! Offsets: what a client's offset means on this stream now, and which offset a position is reported as.
//!
//! A stream's bytes are divided into epochs; the byte position goes on across them. An epoch ends where a tail
//! may have been lost, so an offset of an older epoch either still names the same bytes or leads to a gap.
//!
//! A fork's own bytes lie in an epoch of its own, its id: the path may have been a fork of the same source before.
//! What it inherits keeps the epochs of the streams that it comes from. Where two of them meet is a *seam*: nothing is
//! missing there, both offsets are the same place, and reads go on across it. What a source may have lost before is no
//! gap of its fork, which never had it; and as an epoch that began with a loss is that of many streams, an earlier
//! one at the fork's path perhaps among them, the fork's own epoch begins there already and names what follows.
//!
//! Invariants
//! - `I-OFFSET-1` No offset ever names two different byte strings at one path.
//! - `I-OFFSET-2` No response spans a possible loss; the read that starts at one carries the gap.
//! - `I-OFFSET-3` Of a stream's epochs, those up to its id are streams' ids, and begin at seams; later ones began with
//!   a loss. (Forks of older directories may have inherited some of the latter.)

use crate::codec::Reader;
use crate::error::ErrorCode;
use crate::io::sabotage::{self, Sabotage};
use crate::limits::{EPOCHS_PER_DIRECTORY, FORK_EPOCHS_MAX, LOSSES_MAX};
use crate::model::{Class, Offset};
use crate::refusal::Refusal;
use crate::stream::state::StreamState;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum GapReason {
    Crash = 0,
    Recreated = 1,
    Restore = 2,
    Corruption = 3,
    Retention = 4,
}

impl GapReason {
    const ALL: [GapReason; 5] = [
        GapReason::Crash,
        GapReason::Recreated,
        GapReason::Restore,
        GapReason::Corruption,
        GapReason::Retention,
    ];

    pub fn from_u8(value: u8) -> Option<GapReason> {
        GapReason::ALL.get(value as usize).copied()
    }

    pub fn name(self) -> &'static str {
        match self {
            GapReason::Crash => "crash",
            GapReason::Recreated => "recreated",
            GapReason::Restore => "restore",
            GapReason::Corruption => "corruption",
            GapReason::Retention => "retention",
        }
    }
}

/// A range that a reader cannot get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gap {
    pub from: Offset,
    pub to: Offset,
    pub reason: GapReason,
    /// Whether bytes are known to be missing, or only may be.
    pub certain: bool,
}

/// Where a read begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadStart {
    pub position: u64,
    pub gap: Option<Gap>,
}

impl ReadStart {
    pub fn at(position: u64) -> ReadStart {
        ReadStart {
            position,
            gap: None,
        }
    }
}

/// A moment at which streams may have lost their tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Epoch that begins with it.
    pub epoch: u64,
    /// Strongest class that it concerns.
    pub reach: Class,
    pub reason: GapReason,
}

const LOSS_BYTES: usize = 10;

impl Loss {
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.push(self.reach as u8);
        out.push(self.reason as u8);
    }

    pub fn decode(reader: &mut Reader<'_>) -> Option<Loss> {
        Some(Loss {
            epoch: reader.u64()?,
            reach: Class::from_u8(reader.u8()?)?,
            reason: GapReason::from_u8(reader.u8()?)?,
        })
    }
}

/// Possible losses: one global list, oldest first, no write per stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    events: Vec<Loss>,
    /// Newest epoch per class, so that an append does not search.
    newest: [u64; Class::ALL.len()],
}

impl Losses {
    /// Adds an event unless it is known already; replay sees some twice.
    pub fn add(&mut self, loss: Loss) {
        if loss.epoch == 0 || self.find(loss.epoch).is_some() {
            return;
        }
        for newest in &mut self.newest[..=loss.reach as usize] {
            *newest = (*newest).max(loss.epoch);
        }
        self.events.push(loss);
        // Those that a class was last hit by stay: they are few.
        let stays = |loss: &Loss| self.newest[loss.reach as usize] == loss.epoch;
        if self.events.len() > LOSSES_MAX
            && let Some(oldest) = self.events.iter().position(|loss| !stays(loss))
        {
            self.events.remove(oldest);
        }
    }

    pub fn events(&self) -> &[Loss] {
        &self.events
    }

    fn find(&self, epoch: u64) -> Option<&Loss> {
        self.events.iter().rev().find(|loss| loss.epoch == epoch)
    }

    /// Why there is a gap between two epochs. A restore is told even if losses of weak classes followed it.
    fn reason(&self, from: u64, to: u64) -> GapReason {
        let restores = |loss: &Loss| loss.reason == GapReason::Restore;
        let mut between = self.events.iter().filter(|loss| loss.epoch > from);
        if between.any(|loss| loss.epoch <= to && restores(loss)) {
            return GapReason::Restore;
        }
        self.find(to).map_or(GapReason::Crash, |loss| loss.reason)
    }

    /// The restore that an epoch was lost with, if it may have been: it was of the server that was backed up. Also one that
    /// the backup knows, of another stream: the path may have been made again as a fork of that.
    fn restored_behind(&self, epoch: u64) -> Option<u64> {
        let range = |epoch| epoch / EPOCHS_PER_DIRECTORY;
        let restore = |loss: &&Loss| loss.epoch > epoch && loss.reason == GapReason::Restore;
        let restored = self.events.iter().find(restore)?.epoch;
        (range(epoch) + 1 == range(restored)).then_some(restored)
    }

    /// Epoch that the next byte of the stream belongs to. What happened before it had its class does not count,
    /// nor what came after its end: a close waits for the sync of everything before it.
    pub fn tail_epoch(&self, state: &StreamState) -> u64 {
        let newest = self.newest[state.class as usize];
        let ended = state.closed && !state.is_volatile();
        if newest > state.class_since && !ended {
            state.last_epoch().max(newest)
        } else {
            state.last_epoch()
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.events.len() * LOSS_BYTES);
        self.events.iter().for_each(|loss| loss.encode(&mut out));
        out
    }

    /// `None`: the bytes are not a list of losses.
    pub fn decode(bytes: &[u8]) -> Option<Losses> {
        let mut losses = Losses::default();
        for chunk in bytes.chunks(LOSS_BYTES) {
            losses.add(Loss::decode(&mut Reader::new(chunk))?);
        }
        Some(losses)
    }
}

/// The tail that readers may see, as an offset.
pub fn visible_tail(state: &StreamState, losses: &Losses) -> Offset {
    offset_after(state, losses, state.visible.tail)
}

/// The applied tail, as an offset.
pub fn applied_tail(state: &StreamState, losses: &Losses) -> Offset {
    offset_after(state, losses, state.tail)
}

/// The offset reported for a read or append that ended at `position`: at the tail it is the tail's epoch,
/// before it the epoch of the bytes just read. The tail that readers see keeps its name while what comes behind it is not
/// theirs yet.
pub fn offset_after(state: &StreamState, losses: &Losses, position: u64) -> Offset {
    let epoch = if position >= state.tail {
        tail_name(state, losses)
    } else if position == state.visible.tail
        && let Some(begun) = epoch_beginning_at(state, position)
    {
        begun
    } else {
        epoch_of_byte_before(state, position)
    };
    Offset { epoch, position }
}

/// The epoch that begins at a position with a possible loss.
fn epoch_beginning_at(state: &StreamState, position: u64) -> Option<u64> {
    let mut known = state.later_epochs.iter().rev();
    let found = known.find(|(epoch, start)| *start == position && !is_seam(state, *epoch));
    found.map(|(epoch, _)| *epoch)
}

/// The epoch that the tail is reported in. A fork without a byte of its own is where its source was, and says so.
fn tail_name(state: &StreamState, losses: &Losses) -> u64 {
    let epoch = losses.tail_epoch(state);
    match state.later_epochs.as_slice() {
        [before @ .., (own, start)]
            if *own == epoch && epoch == state.id.0 && *start == state.tail =>
        {
            before.last().map_or(state.first_epoch, |(epoch, _)| *epoch)
        }
        _ => epoch,
    }
}

/// Gives a new fork its epochs: those of its source up to the fork point, as far as they are streams' ids, then its
/// own. `asked` is the offset that the request named, which stays the fork's first tail also where a seam lies there.
pub fn inherit_epochs(
    fork: &mut StreamState,
    source: &StreamState,
    losses: &Losses,
    anchor: u64,
    asked: Option<Offset>,
) {
    let named = asked.map_or(0, |offset| offset.epoch);
    let inherited = source
        .later_epochs
        .iter()
        .filter(|(epoch, start)| *start < anchor || (*start == anchor && *epoch <= named));
    let is_seam = |epoch: u64| is_seam(source, epoch) && losses.find(epoch).is_none();
    let lost = inherited.clone().find(|(epoch, _)| !is_seam(*epoch));
    fork.logged.first_epoch = source.first_epoch;
    fork.logged.later_epochs = inherited
        .copied()
        .take_while(|(epoch, _)| is_seam(*epoch))
        .collect();
    if sabotage::is(Sabotage::ShareEpochs) {
        return;
    }
    let id = fork.id.0;
    let own_start = lost.map_or(anchor, |(_, start)| *start);
    fork.logged.later_epochs.push((id, own_start));
    // In a long chain, the oldest names are given up: an ancestor's epoch then names all that the ancestor had.
    let surplus = fork.later_epochs.len().saturating_sub(FORK_EPOCHS_MAX);
    if let Some((epoch, _)) = fork.logged.later_epochs.drain(..surplus).next_back() {
        fork.logged.first_epoch = epoch;
    }
}

/// Whether an epoch of this stream begins where a fork left its source, and not where something may be lost.
fn is_seam(state: &StreamState, epoch: u64) -> bool {
    epoch <= state.id.0
}

/// Epoch of the newest record; of the beginning if there is none.
pub fn newest_epoch(state: &StreamState) -> u64 {
    epoch_of_byte_before(state, state.tail)
}

fn epoch_of_byte_before(state: &StreamState, position: u64) -> u64 {
    let later = state
        .later_epochs
        .iter()
        .rev()
        .find(|(_, start)| *start < position);
    later.map_or(state.first_epoch, |(epoch, _)| *epoch)
}

/// The gap that a reader passes at `position` if an epoch begins there with a possible loss.
pub fn gap_at(state: &StreamState, losses: &Losses, position: u64) -> Option<Gap> {
    let begun = (position == state.tail).then(|| losses.tail_epoch(state));
    let begun = begun.filter(|epoch| *epoch > state.last_epoch());
    let epoch = begun.or_else(|| epoch_beginning_at(state, position))?;
    let from = Offset {
        epoch: epoch_of_byte_before(state, position),
        position,
    };
    let to = Offset { epoch, position };
    Some(Gap {
        from,
        to,
        reason: losses.reason(from.epoch, to.epoch),
        certain: false,
    })
}

/// Where a reader stands behind the bytes up to `end`. An epoch that has begun there without a byte yet is not
/// entered with them: it is the next read that passes the gap.
pub fn offset_behind_bytes(state: &StreamState, losses: &Losses, end: u64) -> (Offset, bool) {
    let passed = end > 0 && end >= state.visible.tail;
    match gap_at(state, losses, end).filter(|_| passed) {
        Some(gap) => (gap.from, true),
        None => (offset_after(state, losses, end), false),
    }
}

/// A read that would start in bytes that cannot be read back starts behind them, with a gap from what was asked
/// for. It takes in the gap of an epoch that begins on the way: bytes are missing for certain.
pub fn behind_damage(
    state: &StreamState,
    losses: &Losses,
    start: ReadStart,
    asked: Option<Offset>,
    end: u64,
) -> ReadStart {
    let asked = start.gap.map(|gap| gap.from).or(asked);
    let from = asked.unwrap_or_else(|| offset_after(state, losses, start.position));
    ReadStart {
        position: end,
        gap: Some(Gap {
            from,
            to: offset_before(state, losses, end),
            reason: GapReason::Corruption,
            certain: true,
        }),
    }
}

/// The offset from which the byte at `position` is read without passing a gap.
pub fn offset_before(state: &StreamState, losses: &Losses, position: u64) -> Offset {
    if position >= state.tail {
        return offset_after(state, losses, position);
    }
    Offset {
        epoch: epoch_of_byte_before(state, position + 1),
        position,
    }
}

/// First position behind `position` where another epoch begins: what lies before it has one name.
pub fn epoch_end_after(state: &StreamState, position: u64) -> u64 {
    end_after(state, position, |_| true)
}

/// First position behind `position` where something may be lost: a response ends there.
pub fn loss_after(state: &StreamState, position: u64) -> u64 {
    end_after(state, position, |epoch| !is_seam(state, epoch))
}

fn end_after(state: &StreamState, position: u64, counts: impl Fn(u64) -> bool) -> u64 {
    let mut later = state.later_epochs.iter();
    let found = later.find(|(epoch, start)| *start > position && counts(*epoch));
    found.map_or(u64::MAX, |(_, start)| *start)
}

/// What a client's offset means on this stream.
pub fn resolve(state: &StreamState, losses: &Losses, offset: Offset) -> Result<ReadStart, Refusal> {
    if offset == Offset::START {
        return Ok(ReadStart::at(0));
    }
    let tail_epoch = losses.tail_epoch(state);
    let Some((start, end, next)) = epoch_range(state, tail_epoch, offset.epoch) else {
        return resolve_lost(state, losses, tail_epoch, offset)
            .or_else(|| resolve_restored(state, losses, offset))
            .map_or_else(|| resolve_foreign(state, losses, tail_epoch, offset), Ok);
    };
    if offset.position < start {
        return Err(Refusal::with(
            ErrorCode::OffsetInvalid,
            "The offset's position is before the start of its epoch.",
        ));
    }
    match next {
        // Still the tail's epoch: nothing was lost behind it.
        None if offset.position > end => Err(beyond_tail(state, losses, offset)),
        None => Ok(ReadStart::at(offset.position)),
        Some(_) if offset.position < end => Ok(ReadStart::at(offset.position)),
        Some(epoch) if is_seam(state, epoch) && offset.position == end => {
            let same = Offset {
                epoch,
                position: end,
            };
            let mut start = resolve(state, losses, same)?;
            if let Some(gap) = &mut start.gap {
                gap.from = offset;
            }
            Ok(start)
        }
        // Behind the fork point of this stream: of another fork at this path, or of the source.
        Some(epoch) if is_seam(state, epoch) => {
            Ok(recreated(offset, offset_before(state, losses, end)))
        }
        Some(_) => {
            // Of several that began here one after the other only the last has bytes: the gap leads to those.
            let to = offset_before(state, losses, end);
            Ok(ReadStart {
                position: end,
                gap: Some(Gap {
                    from: offset,
                    to,
                    reason: losses.reason(offset.epoch, to.epoch),
                    certain: offset.position > end,
                }),
            })
        }
    }
}

fn beyond_tail(state: &StreamState, losses: &Losses, offset: Offset) -> Refusal {
    let tail = visible_tail(state, losses);
    let mut refusal = Refusal::with(
        ErrorCode::OffsetBeyondTail,
        format!("Offset {offset} is beyond the tail {tail}."),
    );
    refusal.headers.next_offset = Some(tail);
    refusal
}

/// Start, end and successor of an epoch of this stream; `None` if it is not one of its epochs.
fn epoch_range(
    state: &StreamState,
    tail_epoch: u64,
    epoch: u64,
) -> Option<(u64, u64, Option<u64>)> {
    let mut starts: Vec<(u64, u64)> = Vec::with_capacity(state.later_epochs.len() + 2);
    starts.push((state.first_epoch, 0));
    starts.extend_from_slice(&state.later_epochs);
    if tail_epoch > state.last_epoch() {
        starts.push((tail_epoch, state.tail));
    }
    let at = starts.iter().position(|(number, _)| *number == epoch)?;
    match starts.get(at + 1) {
        Some((next, start)) => Some((starts[at].1, *start, Some(*next))),
        None => Some((starts[at].1, state.visible.tail, None)),
    }
}

/// An epoch that began at a possible loss and of which this stream kept no byte: whatever was written in it is
/// lost, and reading goes on where the next one begins.
fn resolve_lost(
    state: &StreamState,
    losses: &Losses,
    tail_epoch: u64,
    offset: Offset,
) -> Option<ReadStart> {
    // What happened before this stream came to be happened to another one at its path.
    if !(state.id.0 + 1..=tail_epoch).contains(&offset.epoch) || losses.find(offset.epoch).is_none()
    {
        return None;
    }
    let to = behind_epoch(state, losses, offset.epoch);
    let gap = Gap {
        from: offset,
        to,
        reason: losses.reason(offset.epoch, to.epoch),
        certain: offset.position > to.position,
    };
    (offset.position >= to.position).then_some(ReadStart {
        position: to.position,
        gap: Some(gap),
    })
}

/// An epoch of the time that a restore lost: whatever position it was, reading goes on behind what was backed up.
fn resolve_restored(state: &StreamState, losses: &Losses, offset: Offset) -> Option<ReadStart> {
    // An older epoch is of another life of the path.
    let behind = losses.restored_behind(offset.epoch);
    let restored = behind.filter(|_| offset.epoch > state.id.0)?;
    let mut to = behind_epoch(state, losses, restored - 1);
    if offset.position < to.position {
        // Behind a backup a stream only grows: this was another life of the path, and none of its bytes is here.
        to = offset_before(state, losses, 0);
    }
    Some(ReadStart {
        position: to.position,
        gap: Some(Gap {
            from: offset,
            to,
            reason: GapReason::Restore,
            certain: offset.position > to.position,
        }),
    })
}

/// Whether this stream itself may have given out offsets of an epoch.
pub fn has_epoch(state: &StreamState, losses: &Losses, epoch: u64) -> bool {
    epoch_range(state, losses.tail_epoch(state), epoch).is_some()
}

/// Where reading goes on behind an epoch that this stream does not have.
fn behind_epoch(state: &StreamState, losses: &Losses, epoch: u64) -> Offset {
    let mut later = state.later_epochs.iter();
    let next = later.find(|(later, _)| *later > epoch);
    offset_before(state, losses, next.map_or(state.tail, |(_, start)| *start))
}

/// An epoch that this stream never had: of an older incarnation of the path, or made up.
fn resolve_foreign(
    state: &StreamState,
    losses: &Losses,
    tail_epoch: u64,
    offset: Offset,
) -> Result<ReadStart, Refusal> {
    if offset.epoch < state.id.0 && offset.epoch != 0 {
        return Ok(recreated(offset, offset_before(state, losses, 0)));
    }
    let why = if offset.epoch > tail_epoch {
        "The offset's epoch is newer than the stream's."
    } else {
        "The offset was not issued by this stream."
    };
    Err(Refusal::with(ErrorCode::OffsetInvalid, why))
}

/// An offset of another life of the path: what it has in common with this one ends at `to`.
fn recreated(offset: Offset, to: Offset) -> ReadStart {
    ReadStart {
        position: to.position,
        gap: Some(Gap {
            from: offset,
            to,
            reason: GapReason::Recreated,
            certain: true,
        }),
    }
}

#[cfg(test)]
#[path = "offsets_tests.rs"]
mod tests;
