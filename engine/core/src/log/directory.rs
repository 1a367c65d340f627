//! Streams in memory, over the catalog on disk.
//!
//! A stream is loaded when it is asked for and leaves memory when it is clean, idle and others need the room.
//! Dirty streams (changed since the last checkpoint) always stay, deleted ones included: what memory says
//! about a path overrides the catalog.
//!
//! Invariants
//! - `I-DIR-1` At most one handle per incarnation exists at a time: it is inserted under its slot's lock, and
//!   evicted only while nobody else holds it.
//! - `I-DIR-2` A purged stream stays in the map as `Gone` until the catalog has forgotten it.

use crate::report;
use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ahash::RandomState;
use parking_lot::Mutex;

use crate::io::wanted::{self, Key, Told};
use crate::limits::PRODUCER_BYTES_PER_CACHED_STREAM;
use crate::log::catalog::{Catalog, CatalogError};
use crate::log::damaged::Damaged;
use crate::log::dirty::Dirty;
use crate::log::endings::Endings;
use crate::log::interned::Interned;
use crate::metrics::Metrics;
use crate::model::{ContentType, StreamId};
use crate::stream::handle::Stream;
use crate::stream::snapshot;
use crate::stream::state::Life;

/// Many: whoever goes through all streams holds one of the locks at a time, and reactors wait for it.
const SLOTS: usize = 1024;

pub struct Directory {
    catalog: Arc<Catalog>,
    metrics: Arc<Metrics>,
    by_path: Vec<Mutex<Paths>>,
    by_id: Vec<Mutex<HashMap<StreamId, Arc<Stream>>>>,
    /// Each look hashes a path twice, for its slot and in it: with random keys, and quickly.
    hasher: RandomState,
    /// Streams changed since they were last written to the catalog.
    dirty: Dirty,
    content_types: Interned,
    pub damaged: Damaged,
    /// Where streams ended that are here no more.
    pub endings: Endings,
    /// Newest stamp of a change among the streams that have left memory.
    evicted_stamp: AtomicU64,
}

type Paths = HashSet<ByPath, RandomState>;
type Decode = fn(&[u8], &dyn Fn(&str) -> Arc<ContentType>) -> Option<Stream>;

struct ByPath(Arc<Stream>);

impl Hash for ByPath {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (*self.0.path).hash(hasher);
    }
}

impl PartialEq for ByPath {
    fn eq(&self, other: &ByPath) -> bool {
        self.0.path == other.0.path
    }
}

impl Eq for ByPath {}

impl Borrow<str> for ByPath {
    fn borrow(&self) -> &str {
        &self.0.path
    }
}

impl Directory {
    pub fn new(catalog: Arc<Catalog>, metrics: Arc<Metrics>) -> Directory {
        Directory {
            damaged: Damaged::new(Arc::clone(&metrics)),
            endings: Endings::default(),
            catalog,
            metrics,
            by_path: (0..SLOTS).map(|_| Mutex::default()).collect(),
            by_id: (0..SLOTS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            dirty: Dirty::default(),
            content_types: Interned::default(),
            evicted_stamp: AtomicU64::new(0),
        }
    }

    /// Takes over what the catalog remembers about removed streams. One whose row is damaged counts as not remembered,
    /// which readers treat as loss.
    pub fn recall_endings(&self) -> Result<(), CatalogError> {
        match self.endings.recall(self.catalog.endings()?) {
            0 => {}
            count => report!(
                "the last offsets of {count} deleted streams could not be decoded and were dropped"
            ),
        }
        Ok(())
    }

    fn path_slot(&self, path: &str) -> &Mutex<Paths> {
        &self.by_path[self.hasher.hash_one(path) as usize % SLOTS]
    }

    fn id_slot(&self, id: StreamId) -> &Mutex<HashMap<StreamId, Arc<Stream>>> {
        &self.by_id[id.0 as usize % SLOTS]
    }

    /// The stream at a path, deleted ones included; `None` if there never was one that the server knows of.
    /// `WouldBlock` if the thread must not wait for the catalog.
    pub fn get(&self, path: &str) -> Result<Option<Arc<Stream>>, CatalogError> {
        let key = || Key::Path(path.into());
        self.find(path, key, Stream::is_whole, snapshot::decode)
    }

    /// The same for who only reads. It may be without its producers, and is never to be changed.
    pub fn get_to_read(&self, path: &str) -> Result<Option<Arc<Stream>>, CatalogError> {
        let key = || Key::PathToRead(path.into());
        self.find(path, key, |_| true, snapshot::decode_to_read)
    }

    /// What is in memory has to be `fit`.
    fn find(
        &self,
        path: &str,
        key: impl Fn() -> Key,
        fit: impl Fn(&Stream) -> bool,
        decode: Decode,
    ) -> Result<Option<Arc<Stream>>, CatalogError> {
        let at_hand = || self.in_memory_at(path).filter(|stream| fit(stream));
        loop {
            let in_memory = self.in_memory_at(path);
            if let Some(stream) = in_memory.as_ref().filter(|stream| fit(stream)) {
                return Ok(Some(Arc::clone(stream)));
            }
            // In this order: what leaves memory is in the catalog before, and known there.
            if !self.catalog.known.may_have(path.as_bytes()) {
                return Ok(None);
            }
            let version = self.catalog.version();
            if !wanted::may_wait() {
                return self.want(key(), at_hand);
            }
            if let Some(stream) = in_memory {
                self.complete(&stream)?;
                continue;
            }
            // Without the slot's lock: a slow disk must not hold up those who want its neighbours.
            let Some(value) = self.catalog.get(path.as_bytes())? else {
                return Ok(None);
            };
            let stream = self.decode(&value, path, decode)?;
            if let Some(stream) = self.take_in(stream, version).filter(|found| fit(found)) {
                return Ok(Some(stream));
            }
        }
    }

    /// Gives a stream its producers if they were left out. Nobody can have changed them since: who changes a stream has got
    /// it whole, so that what the catalog says of them holds.
    pub fn complete(&self, stream: &Stream) -> Result<(), CatalogError> {
        let value = self.catalog.get(stream.path.as_bytes())?;
        let whole = value.map(|value| self.decode(&value, &stream.path, snapshot::decode));
        match whole.transpose()? {
            Some(whole) if whole.id == stream.id => stream.complete(&whole, &self.metrics),
            // Another thread was faster, and it is gone since.
            _ if stream.is_whole() => {}
            _ => {
                let what = format!("the entry of stream {:?} has gone", stream.path);
                return Err(CatalogError::Corrupt(what));
            }
        }
        Ok(())
    }

    /// What a thread that must not wait knows about a stream that is not in memory.
    fn want(
        &self,
        key: Key,
        in_memory: impl Fn() -> Option<Arc<Stream>>,
    ) -> Result<Option<Arc<Stream>>, CatalogError> {
        match wanted::want(key.clone(), || None) {
            Some(Told::Failed(failure)) => return Err(CatalogError::Io(failure.into())),
            // The order matters: if it was made and written since, it is in memory, or the version another.
            Some(Told::Absent(version)) => match in_memory() {
                None if self.catalog.version() == version => return Ok(None),
                None => {}
                found => return Ok(found),
            },
            Some(Told::AtHand) | None => {}
        }
        wanted::note(key, None);
        Err(CatalogError::Io(wanted::would_block()))
    }

    /// Puts what was read from the catalog in place, unless it may have changed since `version`; then `None`.
    fn take_in(&self, stream: Stream, version: u64) -> Option<Arc<Stream>> {
        let mut slot = self.path_slot(&stream.path).lock();
        if let Some(found) = slot.get(&*stream.path) {
            return Some(Arc::clone(&found.0));
        }
        if self.catalog.version() != version {
            return None;
        }
        let stream = Arc::new(stream);
        let damaged = {
            let mut state = stream.lock();
            state.count_memory(&self.metrics);
            state.damaged().len()
        };
        if damaged > 0 {
            self.damaged.note(stream.id, damaged);
        }
        slot.insert(ByPath(Arc::clone(&stream)));
        self.id_slot(stream.id)
            .lock()
            .insert(stream.id, Arc::clone(&stream));
        self.metrics.streams_cached.add(1);
        Some(stream)
    }

    /// The stream at a path if it is in memory: then it says more than the catalog.
    pub fn in_memory_at(&self, path: &str) -> Option<Arc<Stream>> {
        let slot = self.path_slot(path).lock();
        slot.get(path).map(|found| Arc::clone(&found.0))
    }

    /// Visits the streams that the catalog knows and `wanted` names, in path order, strictly behind `after`, until `visit`
    /// returns false. Each is as it is at that moment: as in memory, else as in the catalog, to be read alone.
    ///
    /// A scan sees the catalog as it was when it began. What a checkpoint has written meanwhile may have left memory, and
    /// what it has removed is in neither: then a new scan goes on from there.
    pub fn walk(
        &self,
        prefix: &str,
        after: &str,
        wanted: &dyn Fn(&str) -> bool,
        visit: &mut dyn FnMut(&Arc<Stream>) -> bool,
    ) -> Result<(), CatalogError> {
        let mut seen = after.as_bytes().to_vec();
        loop {
            // Before the scan begins: a commit that it does not see makes it another.
            let version = self.catalog.version();
            let from = seen.clone();
            let mut outdated = false;
            let mut look = |path: &[u8], value: &[u8]| {
                if let Some(path) = std::str::from_utf8(path).ok().filter(|path| wanted(path)) {
                    let mut found = self.in_memory_at(path);
                    // In this order: it leaves memory behind the commit that wrote or removed it.
                    if found.is_none() {
                        outdated = self.catalog.version() != version;
                        if outdated {
                            return false;
                        }
                        let decoded = snapshot::unseal(value).and_then(|bytes| {
                            snapshot::decode_to_read(bytes, &|text| self.intern(text))
                        });
                        found = decoded.map(Arc::new);
                    }
                    if found.is_some_and(|stream| !visit(&stream)) {
                        return false;
                    }
                }
                seen.clear();
                seen.extend_from_slice(path);
                true
            };
            self.catalog
                .scan(prefix.as_bytes(), &from, usize::MAX, &mut look)?;
            if !outdated {
                return Ok(());
            }
        }
    }

    /// The stream of an incarnation, wherever its path points now.
    pub fn get_by_id(&self, id: StreamId) -> Result<Option<Arc<Stream>>, CatalogError> {
        let in_memory = || {
            let found = self.id_slot(id).lock().get(&id).map(Arc::clone);
            found.filter(|stream| stream.is_whole())
        };
        if let Some(stream) = in_memory() {
            return Ok(Some(stream));
        }
        if !wanted::may_wait() {
            return self.want(Key::Stream(id.0), in_memory);
        }
        let Some(path) = self.catalog.path_of(id)? else {
            return Ok(None);
        };
        let Ok(path) = std::str::from_utf8(&path) else {
            return Err(CatalogError::Corrupt(format!(
                "path of stream {} is not UTF-8",
                id.0
            )));
        };
        Ok(self.get(path)?.filter(|stream| stream.id == id))
    }

    fn decode(&self, value: &[u8], path: &str, decode: Decode) -> Result<Stream, CatalogError> {
        let decoded =
            snapshot::unseal(value).and_then(|bytes| decode(bytes, &|text| self.intern(text)));
        if let Some(stream) = &decoded {
            stream.set_catalogued();
        }
        decoded
            .filter(|stream| &*stream.path == path && stream.lock().is_covered())
            .ok_or_else(|| {
                CatalogError::Corrupt(format!("entry of stream {path:?} does not decode"))
            })
    }

    /// Puts a new incarnation in place, over a deleted one if there is one.
    pub fn insert(&self, stream: &Arc<Stream>) {
        let mut slot = self.path_slot(&stream.path).lock();
        slot.replace(ByPath(Arc::clone(stream)));
        self.id_slot(stream.id)
            .lock()
            .insert(stream.id, Arc::clone(stream));
        self.metrics.streams_cached.add(1);
    }

    /// Inserts unless somebody was faster: `expected` is what was at the path when the catalog had this version. Who came
    /// and was written since may have left memory.
    pub fn insert_if_current(
        &self,
        stream: &Arc<Stream>,
        expected: Option<&Arc<Stream>>,
        version: u64,
    ) -> bool {
        let mut slot = self.path_slot(&stream.path).lock();
        let current = slot.get(&*stream.path).map(|found| found.0.id);
        if current != expected.map(|stream| stream.id)
            || (current.is_none() && self.catalog.version() != version)
        {
            return false;
        }
        slot.replace(ByPath(Arc::clone(stream)));
        self.id_slot(stream.id)
            .lock()
            .insert(stream.id, Arc::clone(stream));
        self.metrics.streams_cached.add(1);
        true
    }

    /// Takes back a stream that was inserted but never staged. The caller still holds its lock, so that nobody
    /// has seen it as gone and put another in its place; if so, that one stays.
    pub fn withdraw(&self, stream: &Arc<Stream>, replaced: Option<&Arc<Stream>>) {
        let mut slot = self.path_slot(&stream.path).lock();
        if slot
            .get(&*stream.path)
            .is_some_and(|found| found.0.id == stream.id)
        {
            slot.remove(&*stream.path);
            if let Some(replaced) = replaced {
                slot.insert(ByPath(Arc::clone(replaced)));
            }
        }
        if self.id_slot(stream.id).lock().remove(&stream.id).is_some() {
            self.metrics.streams_cached.sub(1);
        }
    }

    /// Streams whose end never became final and whose path another has that did not either: what a path showed last.
    pub fn hidden_lives(&self, synced: u64) -> HashMap<Box<str>, Arc<Stream>> {
        let mut hidden = HashMap::new();
        for slot in &self.by_id {
            let lives: Vec<_> = slot.lock().values().map(Arc::clone).collect();
            for life in lives
                .into_iter()
                .filter(|life| life.lock().was_live(synced))
            {
                let current = self.in_memory_at(&life.path);
                if current.is_some_and(|current| {
                    current.id != life.id && !current.lock().was_live(synced)
                }) {
                    hidden.insert(life.path.clone(), life);
                }
            }
        }
        hidden
    }

    /// Forgets a purged stream, once the catalog has.
    pub fn forget(&self, stream: &Stream) {
        let mut slot = self.path_slot(&stream.path).lock();
        self.damaged.forget(stream.id);
        if slot
            .get(&*stream.path)
            .is_some_and(|found| found.0.id == stream.id)
        {
            slot.remove(&*stream.path);
        }
        if self.id_slot(stream.id).lock().remove(&stream.id).is_some() {
            self.metrics.streams_cached.sub(1);
        }
    }

    /// Notes that the next checkpoint must write this stream. Called under the stream's lock, before staging,
    /// so that a checkpoint which sees the frame also sees the stream.
    pub fn mark_dirty(&self, stream: &Arc<Stream>, dirty: &mut bool) {
        if !std::mem::replace(dirty, true) {
            self.dirty.push(stream);
        }
    }

    /// Puts streams that are still marked dirty back into the list.
    pub fn requeue(&self, streams: &[Arc<Stream>]) {
        self.dirty.requeue(streams);
    }

    /// What a checkpoint shall write; [`Directory::dirty_written`] follows.
    pub fn take_dirty(&self) -> Arc<Vec<Arc<Stream>>> {
        self.dirty.take()
    }

    pub fn dirty_part_written(&self, count: usize) {
        self.dirty.part_written(count);
    }

    pub fn dirty_written(&self) {
        self.dirty.written();
    }

    pub fn dirty_count(&self) -> usize {
        self.dirty.count()
    }

    /// Paths behind `after` that the catalog may not know, in order: the first `count` or fewer.
    pub fn new_paths(&self, prefix: &str, after: &str, count: usize) -> Vec<Arc<Stream>> {
        self.dirty.new_streams(prefix, after, count)
    }

    /// Newest stamp of a change that memory does not know of any more.
    pub fn evicted_stamp(&self) -> u64 {
        self.evicted_stamp.load(Ordering::Acquire)
    }

    /// Streams in memory below a prefix, in no order.
    pub fn cached_below(&self, prefix: &str) -> Vec<Arc<Stream>> {
        let mut found = Vec::new();
        for slot in &self.by_path {
            let slot = slot.lock();
            let below = slot.iter().filter(|entry| entry.0.path.starts_with(prefix));
            found.extend(below.map(|entry| Arc::clone(&entry.0)));
        }
        found
    }

    /// Streams in memory whose bytes end with the process.
    pub fn volatile(&self) -> Vec<Arc<Stream>> {
        let mut found = Vec::new();
        for slot in &self.by_path {
            let streams: Vec<Arc<Stream>> = slot
                .lock()
                .iter()
                .map(|entry| Arc::clone(&entry.0))
                .collect();
            found.extend(
                streams
                    .into_iter()
                    .filter(|stream| stream.lock().has_volatile_bytes()),
            );
        }
        found
    }

    /// Streams in memory that have expired. Those that expire always are in memory.
    pub fn expiring(&self, now_ms: u64, steady_ms: u64) -> Vec<Arc<Stream>> {
        let mut found = Vec::new();
        for slot in &self.by_path {
            let slot = slot.lock();
            found.extend(
                slot.iter()
                    .filter(|entry| {
                        entry.0.expires
                            && entry
                                .0
                                .try_lock()
                                .is_some_and(|state| state.expired(now_ms, steady_ms))
                    })
                    .map(|entry| Arc::clone(&entry.0)),
            );
        }
        found
    }

    /// Drops clean, unused streams until at most `keep` are in memory; what their producers take counts as streams.
    pub fn evict(&self, keep: usize) {
        let bytes_of = |streams: u64| streams.saturating_mul(PRODUCER_BYTES_PER_CACHED_STREAM);
        let cached = bytes_of(self.metrics.streams_cached.get());
        let taken = cached.saturating_add(self.metrics.producer_bytes.get());
        let mut excess = taken.saturating_sub(bytes_of(keep as u64));
        for slot in &self.by_path {
            if excess == 0 {
                return;
            }
            let mut slot = slot.lock();
            slot.retain(|entry| {
                // Two holders are the two maps. Checked again under the id slot's lock.
                if excess == 0 || Arc::strong_count(&entry.0) > 2 {
                    return true;
                }
                let mut ids = self.id_slot(entry.0.id).lock();
                let Some(mut state) = entry.0.try_lock() else {
                    return true;
                };
                let idle =
                    Arc::strong_count(&entry.0) == 2 && !state.dirty && state.life != Life::Gone;
                // Streams that expire stay: the sweeper must see them, and renewals live in memory.
                let evictable = idle
                    && state.flushing.is_none()
                    && !state.has_volatile_bytes()
                    && state.expiry.is_none()
                    && entry.0.watchers() == 0;
                if evictable {
                    let producers = state.uncount_memory(&self.metrics);
                    self.evicted_stamp
                        .fetch_max(state.changed, Ordering::AcqRel);
                    ids.remove(&entry.0.id);
                    self.metrics.streams_cached.sub(1);
                    excess = excess.saturating_sub(bytes_of(1) + producers);
                }
                !evictable
            });
        }
    }

    pub fn intern(&self, text: &str) -> Arc<ContentType> {
        self.content_types.get(text)
    }

    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }
}
