//! The shared handle of a stream: what never changes beside the lock around what does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::metrics::Metrics;
use crate::model::{ContentType, StreamId, is_reserved};
use crate::stream::state::StreamState;

pub struct Stream {
    pub id: StreamId,
    pub path: Box<str>,
    pub content_type: Arc<ContentType>,
    /// Whether the stream ever expires by itself; never changes.
    pub expires: bool,
    state: Mutex<StreamState>,
    /// One bit per reactor that has a reader waiting on this stream. Set under the state lock.
    watchers: AtomicU64,
    /// Whether the change feed watches it: the version of what is watched times two, plus the answer.
    feed_match: AtomicU64,
    /// Whether its producers are known here; once they are, they stay (`I-PRODUCERS-1`).
    whole: AtomicBool,
    /// Whether the catalog has an entry of it.
    catalogued: AtomicBool,
}

impl Stream {
    pub fn new(
        id: StreamId,
        path: &str,
        content_type: Arc<ContentType>,
        state: StreamState,
    ) -> Stream {
        let expires = state.expiry.is_some();
        let whole = !state.producers.are_left_out();
        Stream {
            id,
            path: path.into(),
            content_type,
            expires,
            state: Mutex::new(state),
            watchers: AtomicU64::new(0),
            feed_match: AtomicU64::new(0),
            whole: AtomicBool::new(whole),
            catalogued: AtomicBool::new(false),
        }
    }

    pub fn is_whole(&self) -> bool {
        self.whole.load(Ordering::Acquire)
    }

    /// Takes over its producers from the same stream read whole.
    pub fn complete(&self, from: &Stream, metrics: &Metrics) {
        let mut state = self.lock();
        state.complete(&mut from.lock());
        state.count_memory(metrics);
        self.whole.store(true, Ordering::Release);
    }

    pub fn is_catalogued(&self) -> bool {
        self.catalogued.load(Ordering::Acquire)
    }

    pub fn set_catalogued(&self) {
        self.catalogued.store(true, Ordering::Release);
    }

    pub fn lock(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock()
    }

    /// For those who hold a lock that comes after this one and can do without.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, StreamState>> {
        self.state.try_lock()
    }

    pub fn watch(&self, reactor: usize) {
        self.watchers.fetch_or(1 << reactor, Ordering::AcqRel);
    }

    pub fn unwatch(&self, reactor: usize) {
        self.watchers.fetch_and(!(1 << reactor), Ordering::AcqRel);
    }

    pub fn watchers(&self) -> u64 {
        self.watchers.load(Ordering::Acquire)
    }

    pub fn cached_match(&self, version: u64) -> Option<bool> {
        let cached = self.feed_match.load(Ordering::Relaxed);
        (cached >> 1 == version).then_some(cached & 1 == 1)
    }

    pub fn cache_match(&self, version: u64, matches: bool) {
        self.feed_match
            .store(version << 1 | u64::from(matches), Ordering::Relaxed);
    }

    /// Streams below `__ds/` belong to the control plane; HTTP clients cannot reach them.
    pub fn is_reserved(&self) -> bool {
        is_reserved(&self.path)
    }
}
