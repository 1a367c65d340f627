//! Offsets: what a client's offset means on this stream now, and which offset a position is reported as.
//!
//! A stream's bytes are divided into epochs; the byte position goes on across them. An epoch ends where a tail
//! may have been lost, so an offset of an older epoch either still names the same bytes or leads to a gap.
//!
//! Invariants
//! - `I-OFFSET-1` No offset ever names two different byte strings.
//! - `I-OFFSET-2` No response spans an epoch boundary; the read that starts at one carries the gap.

use crate::codec::Reader;
use crate::error::ErrorCode;
use crate::limits::LOSSES_MAX;
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
        if self.events.len() >= LOSSES_MAX {
            self.events.remove(0);
        }
        self.events.push(loss);
    }

    pub fn events(&self) -> &[Loss] {
        &self.events
    }

    fn find(&self, epoch: u64) -> Option<&Loss> {
        self.events.iter().rev().find(|loss| loss.epoch == epoch)
    }

    /// Why an epoch began.
    fn reason(&self, epoch: u64) -> GapReason {
        self.find(epoch)
            .map_or(GapReason::Crash, |loss| loss.reason)
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
/// before it the epoch of the bytes just read.
pub fn offset_after(state: &StreamState, losses: &Losses, position: u64) -> Offset {
    if position >= state.tail {
        return Offset {
            epoch: losses.tail_epoch(state),
            position,
        };
    }
    Offset {
        epoch: epoch_of_byte_before(state, position),
        position,
    }
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

/// The gap that a reader passes at `position` if an epoch begins there.
pub fn gap_at(state: &StreamState, losses: &Losses, position: u64) -> Option<Gap> {
    let epoch = if position == state.tail {
        losses.tail_epoch(state)
    } else {
        let found = state
            .later_epochs
            .iter()
            .rev()
            .find(|(_, start)| *start == position);
        found?.0
    };
    let from = Offset {
        epoch: epoch_of_byte_before(state, position),
        position,
    };
    let to = Offset { epoch, position };
    (from.epoch != to.epoch).then_some(Gap {
        from,
        to,
        reason: losses.reason(to.epoch),
        certain: false,
    })
}

/// Where a reader stands behind the bytes up to `end`. An epoch that has begun there without a byte yet is not
/// entered with them: it is the next read that passes the gap.
pub fn offset_behind_bytes(state: &StreamState, losses: &Losses, end: u64) -> (Offset, bool) {
    let epoch = epoch_of_byte_before(state, end);
    let after = offset_after(state, losses, end);
    let boundary = end > 0 && after.epoch != epoch;
    let offset = if boundary {
        Offset {
            epoch,
            position: end,
        }
    } else {
        after
    };
    (offset, boundary)
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

/// First position behind `position` where another epoch begins: a response ends there.
pub fn epoch_end_after(state: &StreamState, position: u64) -> u64 {
    state
        .later_epochs
        .iter()
        .map(|(_, start)| *start)
        .find(|start| *start > position)
        .unwrap_or(u64::MAX)
}

/// What a client's offset means on this stream.
pub fn resolve(state: &StreamState, losses: &Losses, offset: Offset) -> Result<ReadStart, Refusal> {
    if offset == Offset::START {
        return Ok(ReadStart {
            position: 0,
            gap: None,
        });
    }
    let tail_epoch = losses.tail_epoch(state);
    if offset.epoch > tail_epoch {
        return Err(Refusal::with(
            ErrorCode::OffsetInvalid,
            "The offset's epoch is newer than the stream's.",
        ));
    }
    let Some((start, end, next)) = epoch_range(state, tail_epoch, offset.epoch) else {
        return resolve_lost(state, losses, tail_epoch, offset)
            .map_or_else(|| resolve_foreign(state, tail_epoch, offset), Ok);
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
        None => Ok(ReadStart {
            position: offset.position,
            gap: None,
        }),
        Some(_) if offset.position < end => Ok(ReadStart {
            position: offset.position,
            gap: None,
        }),
        Some(next_epoch) => {
            let to = Offset {
                epoch: next_epoch,
                position: end,
            };
            let certain = offset.position > end;
            Ok(ReadStart {
                position: end,
                gap: Some(Gap {
                    from: offset,
                    to,
                    reason: losses.reason(next_epoch),
                    certain,
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
    if offset.epoch <= state.first_epoch || losses.find(offset.epoch).is_none() {
        return None;
    }
    let next = state
        .later_epochs
        .iter()
        .find(|(epoch, _)| *epoch > offset.epoch);
    let (epoch, position) = next.copied().unwrap_or((tail_epoch, state.tail));
    let to = Offset { epoch, position };
    let gap = Gap {
        from: offset,
        to,
        reason: losses.reason(epoch),
        certain: offset.position > position,
    };
    (offset.position >= position).then_some(ReadStart {
        position,
        gap: Some(gap),
    })
}

/// An epoch that this stream never had: of an older incarnation of the path, or made up.
fn resolve_foreign(
    state: &StreamState,
    tail_epoch: u64,
    offset: Offset,
) -> Result<ReadStart, Refusal> {
    if offset.epoch < state.id.0 && offset.epoch != 0 {
        let epoch = if state.later_epochs.is_empty() && state.tail == 0 {
            tail_epoch
        } else {
            state.first_epoch
        };
        let to = Offset { epoch, position: 0 };
        let gap = Gap {
            from: offset,
            to,
            reason: GapReason::Recreated,
            certain: true,
        };
        return Ok(ReadStart {
            position: 0,
            gap: Some(gap),
        });
    }
    Err(Refusal::with(
        ErrorCode::OffsetInvalid,
        "The offset was not issued by this stream.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::StreamId;

    fn memory_stream() -> StreamState {
        let mut state = StreamState::new(StreamId(100), Class::Memory, 0);
        state.push_bytes(b"0123456789", 1);
        state.publish_applied();
        state
    }

    #[test]
    fn a_crash_turns_a_lost_position_into_a_gap_and_never_reuses_it() {
        let state = memory_stream();
        let mut losses = Losses::default();
        losses.add(Loss {
            epoch: 200,
            reach: Class::Memory,
            reason: GapReason::Crash,
        });
        assert_eq!(
            visible_tail(&state, &losses),
            Offset {
                epoch: 200,
                position: 10
            }
        );
        let lost = resolve(
            &state,
            &losses,
            Offset {
                epoch: 100,
                position: 14,
            },
        )
        .expect("a gap, no error");
        assert_eq!(lost.position, 10);
        assert!(
            lost.gap
                .is_some_and(|gap| gap.certain && gap.reason == GapReason::Crash)
        );
        let kept = resolve(
            &state,
            &losses,
            Offset {
                epoch: 100,
                position: 4,
            },
        )
        .expect("still there");
        assert_eq!(
            kept,
            ReadStart {
                position: 4,
                gap: None
            }
        );
        assert_eq!(
            offset_behind_bytes(&state, &losses, 10),
            (
                Offset {
                    epoch: 100,
                    position: 10
                },
                true
            )
        );
        assert!(gap_at(&state, &losses, 10).is_some_and(|gap| gap.to.epoch == 200));
        let edge = resolve(
            &state,
            &losses,
            Offset {
                epoch: 100,
                position: 10,
            },
        )
        .expect("perhaps a gap");
        assert!(edge.gap.is_some_and(|gap| !gap.certain));
    }

    #[test]
    fn damage_is_passed_with_a_gap_to_an_offset_that_has_none() {
        let mut state = memory_stream();
        let mut losses = Losses::default();
        losses.add(Loss {
            epoch: 200,
            reach: Class::Memory,
            reason: GapReason::Crash,
        });
        state.later_epochs.push((200, 10));
        state.push_bytes(b"abcdef", 1);
        state.publish_applied();
        let at = |epoch, position| Offset { epoch, position };
        let start = |position| ReadStart {
            position,
            gap: None,
        };
        let skip = |position, asked, end| {
            let passed = behind_damage(&state, &losses, start(position), asked, end);
            let gap = passed.gap.expect("a gap");
            assert!(gap.certain && gap.reason == GapReason::Corruption);
            assert_eq!(passed.position, end);
            let resumed = resolve(&state, &losses, gap.to).expect("it was given");
            assert_eq!(resumed, start(end), "the end of a gap is no gap");
            (gap.from, gap.to)
        };
        // Inside an epoch, up to the next one, into it, and to the tail.
        assert_eq!(skip(0, None, 4), (at(100, 0), at(100, 4)));
        assert_eq!(
            skip(4, Some(at(100, 6)), 10),
            (at(100, 6), at(200, 10)),
            "what was asked for is where the gap begins"
        );
        assert_eq!(skip(4, None, 13), (at(100, 4), at(200, 13)));
        assert_eq!(skip(12, None, 16), (at(200, 12), at(200, 16)));
    }

    #[test]
    fn other_incarnations_and_made_up_offsets() {
        let state = memory_stream();
        let losses = Losses::default();
        let old = resolve(
            &state,
            &losses,
            Offset {
                epoch: 50,
                position: 3,
            },
        )
        .expect("recreated");
        assert!(
            old.position == 0
                && old
                    .gap
                    .is_some_and(|gap| gap.reason == GapReason::Recreated)
        );
        for bad in [
            Offset {
                epoch: 101,
                position: 0,
            },
            Offset {
                epoch: 100,
                position: 11,
            },
            Offset {
                epoch: 0,
                position: 3,
            },
        ] {
            assert!(resolve(&state, &losses, bad).is_err(), "{bad}");
        }
    }
}
