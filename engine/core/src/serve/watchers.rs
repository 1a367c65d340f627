//! Who waits for news of a stream on this reactor, and how they are served after a commit: some in each round, because
//! one stream may have readers by the thousand and others must not wait for all of them.
//!
//! `live` registers readers, `reactor` has one turn of them served per round.
//!
//! Invariants
//! - `I-LIVE-3` Whoever is registered when a stream is woken is served after that, once for all wakes since its last
//!   turn; who comes or goes meanwhile changes that for nobody else.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::serve::conn::Phase;
use crate::serve::reactor::Reactor;
use crate::stream::handle::Stream;

/// The readers of one stream, served in a circle.
#[derive(Default)]
pub struct Watchers {
    tokens: BTreeSet<u64>,
    /// To be served: tokens from `next` up to `end`, then those below `again`.
    next: u64,
    end: u64,
    again: u64,
}

impl Watchers {
    /// Everybody is to be served, from where the circle stands. Returns whether nobody was before.
    fn wake(&mut self) -> bool {
        let idle = self.end == 0;
        (self.end, self.again) = (u64::MAX, self.next);
        idle
    }

    /// The next one to be served; `None` when all have been.
    fn take_next(&mut self) -> Option<u64> {
        while self.end > 0 {
            if let Some(token) = self.tokens.range(self.next..self.end).next() {
                self.next = token + 1;
                return Some(*token);
            }
            (self.next, self.end, self.again) = (0, self.again, 0);
        }
        None
    }
}

impl Reactor {
    pub fn register(&mut self, stream: &Arc<Stream>, token: u64) {
        let watchers = self.watchers.entry(stream.id).or_default();
        watchers.tokens.insert(token);
    }

    pub fn unregister(&mut self, stream: &Arc<Stream>, token: u64) {
        let Some(watchers) = self.watchers.get_mut(&stream.id) else {
            return;
        };
        watchers.tokens.remove(&token);
        if watchers.tokens.is_empty() {
            self.watchers.remove(&stream.id);
            let _state = stream.lock();
            stream.unwatch(self.number);
        }
    }

    /// Serves readers of what has changed for one turn; the others follow in the next rounds.
    pub fn wake_readers(&mut self) {
        self.engine.shard.mailboxes[self.number].take_woken(&mut self.changed);
        for stream in self.changed.drain(..) {
            let watchers = self.watchers.get_mut(&stream.id);
            if watchers.is_some_and(Watchers::wake) {
                self.woken.push_back(stream.id);
            }
        }
        if self.woken.is_empty() {
            return;
        }
        self.begin_turn(self.engine.doors.clock.monotonic_us());
        let mut served = 0;
        while let Some(id) = self.woken.pop_front() {
            while let Some(token) = self.watchers.get_mut(&id).and_then(Watchers::take_next) {
                self.wake_reader(token);
                served += 1;
                if self.turn_is_over(served) {
                    // Those of other streams come first then.
                    self.woken.push_back(id);
                    return;
                }
            }
        }
    }

    fn wake_reader(&mut self, token: u64) {
        if let Some(mut conn) = self.take(token) {
            // An event stream is asked for its next event by the sending.
            if matches!(conn.phase, Phase::LongPoll(_)) {
                self.finish_poll(&mut conn, false);
            }
            self.flush(&mut conn);
            self.put_back_flushed(conn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watchers(tokens: &[u64]) -> Watchers {
        Watchers {
            tokens: tokens.iter().copied().collect(),
            ..Watchers::default()
        }
    }

    fn served(watchers: &mut Watchers) -> Vec<u64> {
        std::iter::from_fn(|| watchers.take_next()).collect()
    }

    #[test]
    fn each_wake_serves_everybody_once() {
        let mut readers = watchers(&[1, 2, 3]);
        assert!(served(&mut readers).is_empty());
        for _ in 0..2 {
            assert!(readers.wake());
            assert_eq!(served(&mut readers), [1, 2, 3]);
        }
    }

    #[test]
    fn a_wake_under_way_goes_once_around_from_where_it_is() {
        let mut readers = watchers(&[1, 2, 3, 4]);
        readers.wake();
        assert_eq!(
            (readers.take_next(), readers.take_next()),
            (Some(1), Some(2))
        );
        assert!(!readers.wake());
        assert_eq!(
            (readers.take_next(), readers.take_next()),
            (Some(3), Some(4))
        );
        assert_eq!(readers.take_next(), Some(1));
        assert!(!readers.wake());
        assert_eq!(served(&mut readers), [2, 3, 4, 1]);
        assert!(readers.wake());
        assert_eq!(served(&mut readers), [1, 2, 3, 4]);
    }

    #[test]
    fn who_comes_or_goes_takes_nobody_elses_turn() {
        let mut readers = watchers(&[10, 20, 30, 40]);
        readers.wake();
        assert_eq!(readers.take_next(), Some(10));
        readers.tokens.remove(&20);
        readers.tokens.insert(5);
        readers.tokens.insert(50);
        assert_eq!(served(&mut readers), [30, 40, 50]);
        readers.wake();
        readers.tokens.clear();
        assert!(served(&mut readers).is_empty());
        assert!(readers.wake());
    }
}
