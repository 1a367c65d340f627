//! The change feed of the control plane: which watched streams changed, coalesced and bounded.
//!
//! Python hands in names and globs as they come and go. The commit path never compares: it notes a changed stream,
//! unless the answer kept on the stream says that nobody watches it. Who takes the changes compares, and keeps the
//! answer. Invariants: the commit path takes no lock under which something is built or compared; an answer is kept for
//! a version of what is watched that is not newer than what was compared. When the set overflows, the reader is
//! told to list everything again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ahash::{AHashMap, AHashSet};
use parking_lot::{Condvar, Mutex};

use crate::limits::{DIRTY_PATHS_MAX, FEED_TURN};
use crate::shard::globs::Globs;
use crate::stream::handle::Stream;

#[derive(Default)]
pub struct Feed {
    /// Grows with every change of what is watched: answers kept for an older version do not count.
    version: AtomicU64,
    active: AtomicBool,
    watched: Mutex<Watched>,
    changed: Mutex<Changed>,
    uncompared: Mutex<Uncompared>,
    delivered: Condvar,
}

#[derive(Default)]
struct Watched {
    names: AHashSet<Box<str>>,
    globs: Globs,
}

#[derive(Default)]
struct Changed {
    /// A stream that is gone, or not in memory any more, is still to be told of.
    streams: AHashMap<Box<str>, Weak<Stream>>,
    overflow: bool,
    stopped: bool,
}

/// Streams that were taken and are to be compared, the shortest names first: they cost least, and so do not wait for
/// those that cost much.
type Uncompared = BTreeMap<(usize, Box<str>), Weak<Stream>>;

/// A stream that somebody watches, and the globs that match it.
pub type Dirty = (Box<str>, Vec<Arc<str>>);

impl Feed {
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// Watches these, too. False: one of the globs has too many parts and is not watched.
    pub fn watch(&self, names: &[String], globs: &[String]) -> bool {
        let mut watched = self.watched.lock();
        watched
            .names
            .extend(names.iter().map(|name| Box::from(name.as_str())));
        let mut fit = true;
        for glob in globs {
            fit &= watched.globs.add(glob);
        }
        self.changed_to(&watched);
        fit
    }

    pub fn unwatch(&self, names: &[String], globs: &[String]) {
        let mut watched = self.watched.lock();
        for name in names {
            watched.names.remove(name.as_str());
        }
        for glob in globs {
            watched.globs.remove(glob);
        }
        self.changed_to(&watched);
    }

    fn changed_to(&self, watched: &Watched) {
        self.version.fetch_add(1, Ordering::AcqRel);
        let active = !watched.names.is_empty() || !watched.globs.is_empty();
        self.active.store(active, Ordering::Release);
    }

    /// Notes a changed stream if somebody may watch it; whether there is something new to take.
    pub fn note(&self, stream: &Arc<Stream>) -> bool {
        if stream.cached_match(self.version.load(Ordering::Acquire)) == Some(false) {
            return false;
        }
        let mut changed = self.changed.lock();
        if changed.streams.contains_key(&stream.path) {
            return false;
        }
        if changed.streams.len() >= DIRTY_PATHS_MAX {
            changed.overflow = true;
        } else {
            changed
                .streams
                .insert(stream.path.clone(), Arc::downgrade(stream));
        }
        true
    }

    pub fn deliver(&self) {
        self.delivered.notify_all();
    }

    /// Waits for changes of watched streams; returns them and whether some were dropped. What is not compared when the
    /// turn is over is for the next one.
    pub fn take(&self, timeout: Duration) -> (Vec<Dirty>, bool) {
        let deadline = Instant::now() + timeout;
        loop {
            let (streams, mut overflow, is_last) = self.await_changes(deadline);
            overflow |= !self.put_behind(streams);
            let dirty = self.compare_for(FEED_TURN);
            if is_last || overflow || !dirty.is_empty() {
                return (dirty, overflow);
            }
        }
    }

    /// Adds to what is to be compared. False: there was too much already.
    fn put_behind(&self, streams: AHashMap<Box<str>, Weak<Stream>>) -> bool {
        let mut uncompared = self.uncompared.lock();
        if uncompared.len() + streams.len() > 2 * DIRTY_PATHS_MAX {
            return false;
        }
        uncompared.extend(
            streams
                .into_iter()
                .map(|(path, stream)| ((path.len(), path), stream)),
        );
        true
    }

    /// Compares for one turn: the longest name, so that it has its turn, too, and the shortest ones.
    fn compare_for(&self, turn: Duration) -> Vec<Dirty> {
        let ends = Instant::now() + turn;
        let mut dirty = Vec::new();
        let mut next = self.uncompared.lock().pop_last();
        while let Some(((_, path), stream)) = next {
            // The version first: if more is watched meanwhile, the answer counts for the time before.
            let version = self.version.load(Ordering::Acquire);
            let globs = self.globs_of(&path);
            if let Some(stream) = stream.upgrade() {
                stream.cache_match(version, globs.is_some());
            }
            dirty.extend(globs.map(|globs| (path, globs)));
            if Instant::now() >= ends || self.changed.lock().stopped {
                break;
            }
            next = self.uncompared.lock().pop_first();
        }
        dirty
    }

    /// The globs that match a name; `None` = it is not watched.
    pub fn globs_of(&self, path: &str) -> Option<Vec<Arc<str>>> {
        let mut watched = self.watched.lock();
        let globs = watched.globs.find(path);
        (!globs.is_empty() || watched.names.contains(path)).then_some(globs)
    }

    fn await_changes(&self, deadline: Instant) -> (AHashMap<Box<str>, Weak<Stream>>, bool, bool) {
        let behind = !self.uncompared.lock().is_empty();
        let mut changed = self.changed.lock();
        let mut is_last = false;
        while !behind
            && changed.streams.is_empty()
            && !changed.overflow
            && !changed.stopped
            && !is_last
        {
            is_last = self
                .delivered
                .wait_until(&mut changed, deadline)
                .timed_out();
        }
        let streams = std::mem::take(&mut changed.streams);
        let overflow = std::mem::take(&mut changed.overflow);
        let is_last = is_last || changed.stopped || Instant::now() >= deadline;
        (streams, overflow, is_last)
    }

    /// Does something as if a comparison took that long.
    #[cfg(test)]
    pub fn while_comparing(&self, work: impl FnOnce()) {
        let _watched = self.watched.lock();
        work();
    }

    pub fn stop(&self) {
        self.changed.lock().stopped = true;
        self.deliver();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Class, ContentType, StreamId};
    use crate::stream::state::StreamState;

    fn stream(number: u64, path: &str) -> Arc<Stream> {
        let content_type = Arc::new(ContentType::new("text/plain"));
        let state = StreamState::new(StreamId(number), Class::Fsync, 0);
        Arc::new(Stream::new(StreamId(number), path, content_type, state))
    }

    #[test]
    fn a_name_that_is_compared_quickly_does_not_wait_for_others() {
        let feed = Feed::default();
        // Each name is compared with each glob, for some milliseconds.
        let part = |bit| if bit { "**/a/" } else { "**/*/" };
        let glob = |number: u32| -> String {
            let parts = (0..31).map(|place| part(number >> place & 1 == 1));
            parts.chain(["b"]).collect()
        };
        let globs: Vec<String> = (0..3000).map(glob).collect();
        assert!(feed.watch(&["quick".to_owned()], &globs));
        let mut streams = vec![stream(0, "quick")];
        for number in 1..80 {
            let name = format!("b/{}{number}/a", "a/c/".repeat(250));
            streams.push(stream(number, &name));
        }
        for stream in &streams {
            assert!(feed.note(stream));
        }
        let (dirty, overflow) = feed.take(Duration::ZERO);
        assert!(!overflow);
        assert_eq!(dirty.len(), 1, "the quick one");
        let told = |stream: &&Arc<Stream>| {
            let version = feed.version.load(Ordering::Acquire);
            stream.cached_match(version).is_some()
        };
        assert!(
            streams.iter().filter(told).count() < streams.len(),
            "in one turn"
        );
        while !streams.iter().all(|stream| told(&stream)) {
            assert!(feed.take(Duration::ZERO).0.is_empty());
        }
        feed.note(&stream(100, "quick"));
        assert_eq!(feed.take(Duration::ZERO).0.len(), 1);
    }

    #[test]
    fn a_take_ends_with_the_server() {
        let feed = Feed::default();
        feed.watch(&["a".to_owned(), "b".to_owned()], &[]);
        let streams = [stream(1, "a"), stream(2, "b")];
        for stream in &streams {
            feed.note(stream);
        }
        feed.stop();
        assert_eq!(feed.take(Duration::from_secs(60)).0.len(), 1);
    }
}
