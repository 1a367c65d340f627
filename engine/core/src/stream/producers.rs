//! The producers that a stream remembers, bounded by kind: appenders and committers each have their own bound, and
//! neither gives way to the other.
//!
//! Part of a stream's state: what is forgotten follows from the frames alone, so that replay forgets the same.

use std::collections::HashMap;
use std::collections::hash_map::Iter;

use crate::codec::{ProducerTag, is_committer};
use crate::limits::{COMMITTERS_PER_STREAM_MAX, PRODUCERS_PER_STREAM_MAX};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerState {
    pub epoch: u64,
    pub last_seq: u64,
    /// For forgetting the one that was silent longest.
    pub last_time_ms: u64,
    /// Epoch of the stream at its last append: a newer one means that its newest appends may be lost.
    pub stream_epoch: u64,
    /// Numbers below `last_seq`, the end excluded, that it went past after a possible loss: the stream is not known
    /// to have what came with them, so their repetition is no duplicate.
    pub skipped: (u64, u64),
}

impl ProducerState {
    /// The state after an append that was accepted, from the one before it.
    pub fn after(
        before: Option<ProducerState>,
        tag: &ProducerTag<'_>,
        time_ms: u64,
        stream_epoch: u64,
    ) -> ProducerState {
        let known = before.filter(|known| known.epoch == tag.epoch && !known.lost_all());
        let skipped = match known {
            None => (0, tag.seq),
            Some(known) if tag.seq <= known.last_seq + 1 => known.skipped,
            // What lies between two holes counts as one of them: a refusal loses nothing.
            Some(known) if known.has_skipped() => (known.skipped.0, tag.seq),
            Some(known) => (known.last_seq + 1, tag.seq),
        };
        ProducerState {
            epoch: tag.epoch,
            last_seq: tag.seq,
            last_time_ms: time_ms,
            stream_epoch,
            skipped,
        }
    }

    /// Nothing that it sent is known to be there any more: only directories of before say so of a producer.
    pub fn lost_all(&self) -> bool {
        !self.has(self.last_seq)
    }

    pub fn has_skipped(&self) -> bool {
        self.skipped.0 < self.skipped.1
    }

    /// Whether the stream has what came with this number.
    pub fn has(&self, seq: u64) -> bool {
        seq <= self.last_seq && !(self.skipped.0..self.skipped.1).contains(&seq)
    }
}

/// What a state has of its producers.
#[derive(Debug, Default)]
pub enum Remembered {
    #[default]
    Nobody,
    These(Box<Producers>),
    /// The state was read for those who only read; the catalog has them.
    LeftOut,
}

impl Remembered {
    /// `None`: nobody is known. Invariant `I-PRODUCERS-1`: nothing is decided about producers that are left out, by nobody
    /// ever, so that this never passes them for unknown ones.
    pub fn all(&self) -> Option<&Producers> {
        match self {
            Remembered::Nobody => None,
            Remembered::These(all) => Some(all),
            Remembered::LeftOut => panic!("producers that were left out are asked for"),
        }
    }

    /// The same, to be changed; from here on they are some.
    pub(super) fn all_mut(&mut self) -> &mut Producers {
        if self.all().is_none() {
            *self = Remembered::These(Box::default());
        }
        match self {
            Remembered::These(all) => all,
            _ => unreachable!("they were put there just now"),
        }
    }

    pub fn are_left_out(&self) -> bool {
        matches!(self, Remembered::LeftOut)
    }

    /// Those that are in memory.
    pub fn here(&self) -> Option<&Producers> {
        match self {
            Remembered::These(all) => Some(all),
            Remembered::Nobody | Remembered::LeftOut => None,
        }
    }
}

#[derive(Debug, Default)]
pub struct Producers {
    known: HashMap<Box<[u8]>, ProducerState>,
    /// How many of them are committers.
    committers: usize,
    /// Bytes of all ids.
    id_bytes: usize,
    /// Entries that were looked at to make room.
    #[cfg(test)]
    looked_at: usize,
}

impl Producers {
    pub fn get(&self, id: &[u8]) -> Option<&ProducerState> {
        self.known.get(id)
    }

    pub fn len(&self) -> usize {
        self.known.len()
    }

    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// What they take in memory, about: the places of the map, used or not, and the ids with what the allocator adds.
    pub fn memory_len(&self) -> u64 {
        let places = self.known.capacity() * 8 / 7;
        let place = size_of::<(Box<[u8]>, ProducerState)>() + 1;
        (places * place + self.known.len() * 24 + self.id_bytes) as u64
    }

    pub fn iter(&self) -> Iter<'_, Box<[u8]>, ProducerState> {
        self.known.iter()
    }

    /// What a stored state says of a known producer beside the rest.
    pub fn set_skipped(&mut self, id: &[u8], skipped: (u64, u64)) {
        if let Some(known) = self.known.get_mut(id) {
            known.skipped = skipped;
        }
    }

    pub fn forget_appenders(&mut self, forgets: impl Fn(&ProducerState) -> bool) {
        self.retain(|id, known| is_committer(id) || !forgets(known));
    }

    fn retain(&mut self, keeps: impl Fn(&[u8], &ProducerState) -> bool) {
        let id_bytes = &mut self.id_bytes;
        self.known.retain(|id, state| {
            let kept = keeps(id, state);
            *id_bytes -= if kept { 0 } else { id.len() };
            kept
        });
    }

    /// Remembers what a producer did last; a new one may need room.
    pub fn remember(&mut self, id: &[u8], state: ProducerState) {
        if let Some(known) = self.known.get_mut(id) {
            *known = state;
            return;
        }
        let committer = is_committer(id);
        let (count, bound) = if committer {
            (self.committers, COMMITTERS_PER_STREAM_MAX)
        } else {
            let appenders = self.known.len() - self.committers;
            (appenders, PRODUCERS_PER_STREAM_MAX)
        };
        if count >= bound {
            self.forget_quietest(committer);
        }
        self.committers += usize::from(committer);
        self.id_bytes += id.len();
        self.known.insert(id.into(), state);
    }

    /// Drops the quietest quarter of a kind at once, so that a flood of ids costs amortised constant time. Of those that
    /// were last heard of at the same time the smaller ids go first.
    fn forget_quietest(&mut self, committers: bool) {
        #[cfg(test)]
        {
            self.looked_at += self.known.len();
        }
        let of_kind = |id: &[u8]| is_committer(id) == committers;
        let mut ages: Vec<(u64, &[u8])> = self
            .known
            .iter()
            .filter(|(id, _)| of_kind(id))
            .map(|(id, state)| (state.last_time_ms, &**id))
            .collect();
        if ages.is_empty() {
            return;
        }
        let quarter = ages.len() / 4;
        let (_, cut, _) = ages.select_nth_unstable(quarter);
        let (time_ms, last) = (cut.0, Box::<[u8]>::from(cut.1));
        let before = self.known.len();
        self.retain(|id, state| !of_kind(id) || (state.last_time_ms, id) > (time_ms, &*last));
        if committers {
            self.committers -= before - self.known.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(time_ms: u64) -> ProducerState {
        ProducerState {
            epoch: 0,
            last_seq: 0,
            last_time_ms: time_ms,
            stream_epoch: 0,
            skipped: (0, 0),
        }
    }

    fn flooded(count: u64, time_ms: impl Fn(u64) -> u64) -> Producers {
        let mut producers = Producers::default();
        for number in 0..count {
            // Ids of committers begin with a zero byte.
            producers.remember(format!("p{number}").as_bytes(), at(time_ms(number)));
        }
        producers
    }

    #[test]
    fn forgetting_keeps_the_recent_ones() {
        let bound = PRODUCERS_PER_STREAM_MAX as u64;
        let producers = flooded(bound + 1, |number| number);
        assert!(producers.len() > PRODUCERS_PER_STREAM_MAX / 2);
        assert!(producers.len() <= PRODUCERS_PER_STREAM_MAX);
        assert!(producers.get(format!("p{bound}").as_bytes()).is_some());
        assert!(producers.get(b"p0").is_none());
        let ids = producers.iter().map(|(id, _)| id.len()).sum::<usize>();
        assert_eq!(producers.id_bytes, ids);
    }

    #[test]
    fn a_flood_of_producers_looks_at_few_others() {
        let count = 100_000;
        let producers = flooded(count, |number| number);
        assert!(
            producers.looked_at <= 5 * count as usize,
            "{} entries for {count} producers",
            producers.looked_at
        );
    }

    #[test]
    fn who_is_forgotten_does_not_depend_on_the_hash() {
        let ids = |producers: &Producers| {
            let mut ids: Vec<Box<[u8]>> = producers.iter().map(|(id, _)| id.clone()).collect();
            ids.sort_unstable();
            ids
        };
        let count = PRODUCERS_PER_STREAM_MAX as u64 + 10;
        let (one, other) = (flooded(count, |_| 7), flooded(count, |_| 7));
        assert!(ids(&one) == ids(&other));
    }

    #[test]
    fn each_kind_is_counted_by_itself() {
        let mut producers = flooded(PRODUCERS_PER_STREAM_MAX as u64, |number| number);
        for number in 0..COMMITTERS_PER_STREAM_MAX {
            producers.remember(format!("\0c{number}").as_bytes(), at(0));
        }
        let both = PRODUCERS_PER_STREAM_MAX + COMMITTERS_PER_STREAM_MAX;
        assert_eq!((producers.len(), producers.looked_at), (both, 0));
        producers.remember(b"\0one more", at(1));
        let kept = producers.iter().filter(|(id, _)| !is_committer(id)).count();
        assert_eq!(kept, PRODUCERS_PER_STREAM_MAX);
        assert!(producers.committers < COMMITTERS_PER_STREAM_MAX);
    }
}
