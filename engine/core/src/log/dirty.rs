//! Streams changed since they were last written to the catalog, and the path order of those that it does not know.
//!
//! Appends and creates add to a plain list. Listings need new streams in order; they sort what has come since the last
//! listing, so that whoever creates streams pays nothing for it, and a page costs what is on it.
//!
//! Invariant: a stream that the catalog does not know is in the list, or taken by the checkpoint that writes it.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::stream::handle::Stream;

/// Streams taken over from the list while its lock, which creates need, is held.
const TAKEN_AT_ONCE: usize = 4096;

#[derive(Default)]
pub struct Dirty {
    list: Mutex<Vec<Arc<Stream>>>,
    /// Locked before the list, and by listings and checkpoints alone.
    order: Mutex<Order>,
    /// How many of those that the running checkpoint has taken it has not written yet.
    unwritten: AtomicUsize,
}

#[derive(Default)]
struct Order {
    listed: Sorted,
    /// What the running checkpoint has taken.
    taken: Arc<Vec<Arc<Stream>>>,
    writing: Sorted,
}

/// New ones among the first streams of a list, in order.
#[derive(Default)]
struct Sorted {
    upto: usize,
    streams: BTreeSet<ByPath>,
}

struct ByPath(Arc<Stream>);

impl PartialEq for ByPath {
    fn eq(&self, other: &ByPath) -> bool {
        self.0.path == other.0.path
    }
}

impl Eq for ByPath {}

impl PartialOrd for ByPath {
    fn partial_cmp(&self, other: &ByPath) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByPath {
    fn cmp(&self, other: &ByPath) -> std::cmp::Ordering {
        self.0.path.cmp(&other.0.path)
    }
}

impl Borrow<str> for ByPath {
    fn borrow(&self) -> &str {
        &self.0.path
    }
}

impl Sorted {
    fn add(&mut self, streams: &[Arc<Stream>]) {
        self.upto += streams.len();
        let new = streams.iter().filter(|stream| !stream.is_catalogued());
        self.streams
            .extend(new.map(|stream| ByPath(Arc::clone(stream))));
    }

    fn behind<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> impl Iterator<Item = &'a Arc<Stream>> {
        let from = if after >= prefix && !after.is_empty() {
            Bound::Excluded(after)
        } else {
            Bound::Included(prefix)
        };
        self.streams
            .range::<str, _>((from, Bound::Unbounded))
            .map(|entry| &entry.0)
            .take_while(move |stream| stream.path.starts_with(prefix))
    }
}

impl Dirty {
    pub fn push(&self, stream: &Arc<Stream>) {
        self.list.lock().push(Arc::clone(stream));
    }

    /// Puts streams that are still marked dirty back into the list.
    pub fn requeue(&self, streams: &[Arc<Stream>]) {
        self.list.lock().extend_from_slice(streams);
    }

    /// Streams that are to be written, by the running checkpoint or by the next.
    pub fn count(&self) -> usize {
        self.list.lock().len() + self.unwritten.load(Ordering::Acquire)
    }

    /// So many of those that were taken are in the catalog.
    pub fn part_written(&self, count: usize) {
        self.unwritten.fetch_sub(count, Ordering::AcqRel);
    }

    /// Takes all for a checkpoint, each once and by id; [`Dirty::written`] follows.
    pub fn take(&self) -> Arc<Vec<Arc<Stream>>> {
        let mut order = self.order.lock();
        let mut taken = std::mem::take(&mut *self.list.lock());
        taken.sort_by_key(|stream| stream.id);
        taken.dedup_by_key(|stream| stream.id);
        order.writing = std::mem::take(&mut order.listed);
        order.writing.upto = 0;
        order.taken = Arc::new(taken);
        self.unwritten.store(order.taken.len(), Ordering::Release);
        Arc::clone(&order.taken)
    }

    /// What was taken is in the catalog, or back in the list.
    pub fn written(&self) {
        let mut order = self.order.lock();
        order.taken = Arc::default();
        self.unwritten.store(0, Ordering::Release);
        order.writing = Sorted::default();
    }

    /// Streams that the catalog may not know, in path order, strictly behind `after`: the first `count` or fewer. They
    /// may have been replaced since.
    pub fn new_streams(&self, prefix: &str, after: &str, count: usize) -> Vec<Arc<Stream>> {
        let mut order = self.order.lock();
        let Order {
            listed,
            taken,
            writing,
        } = &mut *order;
        writing.add(&taken[writing.upto..]);
        loop {
            let some: Vec<Arc<Stream>> = {
                let list = self.list.lock();
                list[listed.upto..]
                    .iter()
                    .take(TAKEN_AT_ONCE)
                    .cloned()
                    .collect()
            };
            if some.is_empty() {
                break;
            }
            listed.add(&some);
        }
        let (mut one, mut other) = (
            listed.behind(prefix, after).peekable(),
            writing.behind(prefix, after).peekable(),
        );
        let mut found = Vec::new();
        while found.len() < count {
            let next = match (one.peek(), other.peek()) {
                (Some(a), Some(b)) if a.path == b.path => {
                    other.next();
                    one.next()
                }
                (Some(a), Some(b)) if a.path > b.path => other.next(),
                (Some(_), _) => one.next(),
                (None, _) => other.next(),
            };
            let Some(stream) = next else { break };
            found.push(Arc::clone(stream));
        }
        found
    }
}
