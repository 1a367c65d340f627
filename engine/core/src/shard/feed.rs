//! The change feed of the control plane: which watched streams changed, coalesced and bounded.
//!
//! Python hands in names and globs as they come and go. The commit path never compares: it notes a changed stream,
//! unless the answer kept on the stream says that nobody watches it. Who takes the changes compares, and keeps the
//! answer. Invariants: the commit path takes no lock under which something is built or compared; an answer is kept for
//! a version of what is watched that is not newer than what was compared. When the set overflows, the reader is
//! told to list everything again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ahash::{AHashMap, AHashSet};
use parking_lot::{Condvar, Mutex};

use crate::limits::DIRTY_PATHS_MAX;
use crate::shard::globs::Globs;
use crate::stream::handle::Stream;

#[derive(Default)]
pub struct Feed {
    /// Grows with every change of what is watched: answers kept for an older version do not count.
    version: AtomicU64,
    active: AtomicBool,
    watched: Mutex<Watched>,
    changed: Mutex<Changed>,
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

    /// Waits for changes of watched streams; returns them and whether some were dropped.
    pub fn take(&self, timeout: Duration) -> (Vec<Dirty>, bool) {
        let deadline = Instant::now() + timeout;
        loop {
            let (streams, overflow, is_last) = self.await_changes(deadline);
            let mut dirty = Vec::new();
            for (path, stream) in streams {
                // The version first: if more is watched meanwhile, the answer counts for the time before.
                let version = self.version.load(Ordering::Acquire);
                let globs = self.globs_of(&path);
                if let Some(stream) = stream.upgrade() {
                    stream.cache_match(version, globs.is_some());
                }
                dirty.extend(globs.map(|globs| (path, globs)));
            }
            if is_last || overflow || !dirty.is_empty() {
                return (dirty, overflow);
            }
        }
    }

    /// The globs that match a name; `None` = it is not watched.
    pub fn globs_of(&self, path: &str) -> Option<Vec<Arc<str>>> {
        let mut watched = self.watched.lock();
        let globs = watched.globs.find(path);
        (!globs.is_empty() || watched.names.contains(path)).then_some(globs)
    }

    fn await_changes(&self, deadline: Instant) -> (AHashMap<Box<str>, Weak<Stream>>, bool, bool) {
        let mut changed = self.changed.lock();
        let mut is_last = false;
        while changed.streams.is_empty() && !changed.overflow && !changed.stopped && !is_last {
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
