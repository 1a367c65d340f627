//! The decision about a commit of staged records: pure, over all streams that it concerns.
//!
//! Called by `shard/adopt` with every stream's lock held. A producer's epoch stands in every stream that it has
//! committed to, so that one of them is enough to tell a repetition, also when the stages are gone.
//!
//! Invariant: unlike an append's, this decision knows no new epoch of a weak stream: the producer's state came with a
//! synced frame and lives as long as the stream, in every class.

use crate::codec::COMMITTER_MARK;
use crate::error::ErrorCode;
use crate::limits::SAFE_INTEGER_MAX;
use crate::refusal::Refusal;
use crate::stream::state::StreamState;

const PRODUCER_MAX_BYTES: usize = 200;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommitDecision {
    Accept,
    /// Some stream has this producer at this epoch: the commit was applied before.
    Duplicate,
    /// Some stream has it at a higher one.
    Fenced {
        epoch: u64,
    },
}

/// The id under which a producer of commits is remembered.
pub fn committer_id(producer: &str) -> Result<Vec<u8>, Refusal> {
    let bad = |detail| Err(Refusal::with(ErrorCode::ProducerInvalid, detail));
    if producer.is_empty() || producer.len() > PRODUCER_MAX_BYTES {
        return bad("`producer` must have 1 to 200 bytes.");
    }
    let mut id = Vec::with_capacity(1 + producer.len());
    id.push(COMMITTER_MARK);
    id.extend_from_slice(producer.as_bytes());
    Ok(id)
}

pub fn check_epoch(epoch: u64) -> Result<(), Refusal> {
    if epoch <= SAFE_INTEGER_MAX {
        return Ok(());
    }
    Err(Refusal::with(
        ErrorCode::ProducerInvalid,
        "`epoch` ends at 2^53 - 1.",
    ))
}

pub fn decide<'a>(
    streams: impl Iterator<Item = &'a StreamState>,
    id: &[u8],
    epoch: u64,
) -> CommitDecision {
    let mut decision = CommitDecision::Accept;
    for known in streams.filter_map(|state| state.producer(id)) {
        if known.epoch == epoch {
            return CommitDecision::Duplicate;
        }
        if known.epoch > epoch {
            decision = CommitDecision::Fenced { epoch: known.epoch };
        }
    }
    decision
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::ProducerTag;
    use crate::limits::COMMITTERS_PER_STREAM_MAX;
    use crate::model::{Class, StreamId};
    use crate::stream::change::{Change, What};

    fn committed(state: &mut StreamState, id: &[u8], epoch: u64, time_ms: u64) {
        let sequence = state.applied_sequence + 1;
        let what = What::Adopt {
            producer: ProducerTag { id, epoch, seq: 0 },
            sections: &[],
        };
        state.apply(&Change::plain(sequence, time_ms, what));
    }

    #[test]
    fn one_stream_is_enough_to_tell_a_repetition() {
        let id = committer_id("spark:1").expect("an id");
        let mut states: Vec<StreamState> = [Class::Fsync, Class::Memory, Class::Ephemeral]
            .into_iter()
            .enumerate()
            .map(|(number, class)| StreamState::new(StreamId(1 + number as u64), class, 0))
            .collect();
        assert_eq!(decide(states.iter(), &id, 3), CommitDecision::Accept);
        committed(&mut states[1], &id, 3, 1);
        assert_eq!(decide(states.iter(), &id, 3), CommitDecision::Duplicate);
        assert_eq!(
            decide(states.iter(), &id, 2),
            CommitDecision::Fenced { epoch: 3 }
        );
        assert_eq!(decide(states.iter(), &id, 4), CommitDecision::Accept);
        committed(&mut states[2], &id, 4, 2);
        assert_eq!(decide(states.iter(), &id, 3), CommitDecision::Duplicate);
        assert_eq!(decide(states.iter(), b"\0other", 3), CommitDecision::Accept);
    }

    #[test]
    fn committers_are_bounded_and_do_not_give_way_to_appenders() {
        let mut state = StreamState::new(StreamId(1), Class::Fsync, 0);
        let name = |number: usize| committer_id(&format!("spark:{number}")).expect("an id");
        for number in 0..COMMITTERS_PER_STREAM_MAX + 1 {
            committed(&mut state, &name(number), 0, number as u64);
        }
        let count = state.producers().map_or(0, |known| known.len());
        assert!(count <= COMMITTERS_PER_STREAM_MAX && count > COMMITTERS_PER_STREAM_MAX / 2);
        assert!(state.producer(&name(COMMITTERS_PER_STREAM_MAX)).is_some());
        assert!(state.producer(&name(0)).is_none());
    }

    #[test]
    fn names_and_epochs_have_bounds() {
        assert!(committer_id("").is_err() && committer_id(&"x".repeat(201)).is_err());
        assert!(
            check_epoch(SAFE_INTEGER_MAX).is_ok() && check_epoch(SAFE_INTEGER_MAX + 1).is_err()
        );
    }
}
