//! Threads that wait for the disk in place of reactors.
//!
//! A reactor that does not have something at hand (`io::wanted`) hands it in here with the connection that wants it; one
//! of a few threads fetches it, by the very look that failed for want of waiting: a stream into memory, a file into the
//! set of open ones, bytes into the page cache, the points of a large append, a second look at bytes that seem damaged. Then
//! the reactor is rung and looks again. Nothing is handed back but what a second look cannot see: errors, and absence.
//!
//! Invariants
//! - `I-LOAD-1` What is being fetched has one entry, however many connections wait for it; new requests are refused when
//!   [`LOADS_MAX`] wait. Bodies and events under way always find room: one for each connection.
//! - `I-LOAD-2` A stream that was fetched stays in memory until those who waited for it have looked.
//! - `I-LOAD-3` A connection is told even if the fetching failed; one that is gone meanwhile costs nothing.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::io::wanted::{Key, Told, Wanted};
use crate::limits::LOADS_MAX;
use crate::log::catalog::CatalogError;
use crate::model::StreamId;
use crate::shard::engine::Engine;
use crate::shard::marks::Append;
use crate::stream::handle::Stream;

#[derive(Default)]
pub struct Loads {
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Wanted>,
    /// Who waits for what, by reactor and connection.
    waiting: HashMap<Key, Vec<(usize, u64)>>,
    /// What was fetched, for each reactor.
    loaded: HashMap<usize, Vec<Loaded>>,
    threads: usize,
    stop: bool,
}

/// What became of something that a connection waits for.
pub struct Loaded {
    pub conn: u64,
    pub key: Key,
    pub told: Told,
    _kept: Option<Arc<Stream>>,
}

impl Loads {
    /// What has been fetched for a reactor.
    pub fn take_loaded(&self, reactor: usize) -> Vec<Loaded> {
        let mut state = self.state.lock();
        state.loaded.remove(&reactor).unwrap_or_default()
    }

    fn next(&self) -> Option<Wanted> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            if let Some(wanted) = state.queue.pop_front() {
                return Some(wanted);
            }
            self.work.wait(&mut state);
        }
    }

    /// Ends the threads. `false`: one of them still waits for the disk.
    pub fn stop(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        state.stop = true;
        state.queue.clear();
        self.work.notify_all();
        while state.threads > 0 && !self.ended.wait_until(&mut state, deadline).timed_out() {}
        state.threads == 0
    }
}

impl Engine {
    /// Takes over what a connection wants, or what is to be looked at anyway. `false`: too much is wanted already.
    pub fn submit_load(
        &self,
        wanted: Wanted,
        waiter: Option<(usize, u64)>,
        under_way: bool,
    ) -> bool {
        let mut state = self.loads.state.lock();
        if let Some(waiters) = state.waiting.get_mut(&wanted.key) {
            waiters.extend(waiter);
            return true;
        }
        if state.stop || !under_way && state.waiting.len() >= LOADS_MAX {
            return false;
        }
        let waiters = waiter.into_iter().collect();
        state.waiting.insert(wanted.key.clone(), waiters);
        self.metrics.loads_waiting.set(state.waiting.len() as u64);
        state.queue.push_back(wanted);
        drop(state);
        self.loads.work.notify_one();
        true
    }

    /// To be called for each thread before it runs, so that [`Loads::stop`] knows of it.
    pub fn count_load_thread(&self) {
        self.loads.state.lock().threads += 1;
    }

    /// A thread's loop; ends after [`Loads::stop`].
    pub fn run_loads(&self) {
        while let Some(wanted) = self.loads.next() {
            let key = wanted.key.clone();
            let (told, kept) = self.fetch(wanted);
            if matches!(key, Key::Path(_) | Key::Stream(_)) {
                self.make_producer_room();
            }
            self.metrics.loads.add(1);
            self.hand_out(&key, &told, kept.as_ref());
        }
        self.loads.state.lock().threads -= 1;
        self.loads.ended.notify_all();
    }

    fn hand_out(&self, key: &Key, told: &Told, kept: Option<&Arc<Stream>>) {
        let waiters = {
            let mut state = self.loads.state.lock();
            let waiters = state.waiting.remove(key).unwrap_or_default();
            self.metrics.loads_waiting.set(state.waiting.len() as u64);
            for (reactor, conn) in &waiters {
                state.loaded.entry(*reactor).or_default().push(Loaded {
                    conn: *conn,
                    key: key.clone(),
                    told: told.clone(),
                    _kept: kept.cloned(),
                });
            }
            waiters
        };
        for (reactor, _) in waiters {
            self.shard.mailboxes[reactor].ring();
        }
    }

    fn fetch(&self, wanted: Wanted) -> (Told, Option<Arc<Stream>>) {
        let version = self.directory.catalog().version();
        let failed = |error: &io::Error| Told::Failed(error.into());
        let found = match (wanted.fetch, &wanted.key) {
            (Some(fetch), _) => {
                let told = fetch().map_or_else(|error| failed(&error), |()| Told::AtHand);
                return (told, None);
            }
            (None, Key::Path(path)) => self.directory.get(path),
            (None, Key::PathToRead(path)) => self.directory.get_to_read(path),
            (None, Key::Stream(id)) => self.directory.get_by_id(StreamId(*id)),
            (None, Key::Points { stream, .. } | Key::Look { stream, .. }) => {
                self.directory.get_by_id(StreamId(*stream))
            }
            // These come with what fetches them, or need nothing.
            (None, Key::Bytes { .. } | Key::File(_)) => return (Told::AtHand, None),
        };
        let stream = match found {
            Ok(Some(stream)) => stream,
            Ok(None) => return (Told::Absent(version), None),
            Err(CatalogError::Io(error)) => return (failed(&error), None),
            Err(error) => return (failed(&io::Error::other(error.to_string())), None),
        };
        let looked = match wanted.key {
            Key::Points { start, end, .. } => self.mark(&Append {
                owner: Arc::clone(&stream),
                start,
                end,
            }),
            Key::Look {
                from, to, index, ..
            } => self.look_into(&stream, from, to, index).map(|_| ()),
            _ => Ok(()),
        };
        match looked {
            Ok(()) => (Told::AtHand, Some(stream)),
            Err(error) => (failed(&error), Some(stream)),
        }
    }
}

#[cfg(test)]
#[path = "loads_tests.rs"]
mod tests;
