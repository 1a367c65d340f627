//! Where messages begin inside large appends: worked out once by a thread of its own, remembered for a while.
//!
//! `?tail=N` and forks with a sub-offset ask for a message inside an append of perhaps 16 MB. A reactor must not search that;
//! it asks whether the append's points are at hand, and if not lets the request wait until this thread has them and rings.
//! Between two points there is little to search. Where no such thread runs (tools, simulation) the caller searches itself.
//!
//! Invariant: an append's bytes never change within a process, so that points stay true; they come from bytes that were
//! compared with their checksum.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::limits::{MARKED_APPEND_MIN_BYTES, MARKED_APPENDS_MAX};
use crate::model::{Media, StreamId};
use crate::shard::ack::Mailbox;
use crate::shard::engine::Engine;
use crate::stream::handle::Stream;
use crate::stream::json;
use crate::stream::messages::{Point, points};

/// An append: where it begins and ends in the stream that owns it.
#[derive(Clone)]
pub(super) struct Append {
    pub owner: Arc<Stream>,
    pub start: u64,
    pub end: u64,
}

impl Append {
    fn key(&self) -> (StreamId, u64) {
        (self.owner.id, self.start)
    }

    fn is_large(&self) -> bool {
        self.end - self.start > MARKED_APPEND_MIN_BYTES
    }
}

#[derive(Default)]
pub struct Marks {
    state: Mutex<State>,
    work: Condvar,
}

type Points = Option<Arc<Vec<Point>>>;

#[derive(Default)]
struct State {
    /// Oldest first; `None` while it is worked out.
    known: VecDeque<((StreamId, u64), Points)>,
    wanted: VecDeque<Append>,
    running: bool,
    stop: bool,
}

impl State {
    fn find(&self, append: &Append) -> Option<&Points> {
        let mut newest_first = self.known.iter().rev();
        let found = newest_first.find(|(key, _)| *key == append.key());
        found.map(|(_, points)| points)
    }

    fn put(&mut self, append: &Append, points: Points) {
        self.known.retain(|(key, _)| *key != append.key());
        if self.known.len() >= MARKED_APPENDS_MAX {
            self.known.pop_front();
        }
        self.known.push_back((append.key(), points));
    }

    fn forget(&mut self, append: &Append) {
        self.known.retain(|(key, _)| *key != append.key());
    }
}

impl Marks {
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.work.notify_all();
    }

    fn next(&self) -> Option<Append> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                state.running = false;
                return None;
            }
            if let Some(append) = state.wanted.pop_front() {
                return Some(append);
            }
            self.work.wait(&mut state);
        }
    }
}

impl Engine {
    /// The thread's loop; ends after [`Marks::stop`].
    pub fn run_marks(&self) {
        self.marks.state.lock().running = true;
        while let Some(append) = self.marks.next() {
            let found = self.find_points(&append);
            {
                let mut state = self.marks.state.lock();
                match found {
                    Ok(points) => state.put(&append, Some(points)),
                    // Who asked finds out why.
                    Err(_) => state.put(&append, Some(Arc::default())),
                }
            }
            self.shard.mailboxes.iter().for_each(Mailbox::ring);
        }
    }

    /// Whether a message of the append is found without searching all of it. If not, it will be soon: the reactors are
    /// rung.
    pub(super) fn at_hand(&self, append: &Append) -> bool {
        if !append.is_large() {
            return true;
        }
        let mut state = self.marks.state.lock();
        match state.find(append) {
            Some(points) => return points.is_some(),
            None if !state.running || state.stop => return true,
            None => {}
        }
        if state.wanted.len() < MARKED_APPENDS_MAX {
            state.put(append, None);
            state.wanted.push_back(append.clone());
            self.marks.work.notify_one();
        }
        false
    }

    fn find_points(&self, append: &Append) -> io::Result<Arc<Vec<Point>>> {
        let bytes = self.read_range(&append.owner, append.start, append.end)?;
        let found = if append.owner.content_type.media == Media::Json {
            points(&bytes)
        } else {
            vec![Point::default()]
        };
        Ok(Arc::new(found))
    }

    /// The points of a large append. Its bytes have been checked when this returns.
    fn points_of(&self, append: &Append) -> io::Result<Arc<Vec<Point>>> {
        let known = self.marks.state.lock().find(append).cloned().flatten();
        if let Some(points) = known.filter(|points| !points.is_empty()) {
            return Ok(points);
        }
        self.metrics.searched_bytes.add(append.end - append.start);
        let found = self.find_points(append);
        let mut state = self.marks.state.lock();
        match &found {
            Ok(points) => state.put(append, Some(Arc::clone(points))),
            Err(_) => state.forget(append),
        }
        found
    }

    /// Where the message behind the first `skip` ones of an append begins, or the append's end; `None` if there are not
    /// as many.
    pub(super) fn message_start(&self, append: &Append, skip: u64) -> io::Result<Option<u64>> {
        let (mut from, mut to, mut skip) = (append.start, append.end, skip);
        if append.is_large() && skip > 0 {
            let points = self.points_of(append)?;
            let behind = points.partition_point(|point| u64::from(point.messages) <= skip);
            let Some(point) = behind.checked_sub(1).and_then(|at| points.get(at)) else {
                return Ok(None);
            };
            from += u64::from(point.end);
            skip -= u64::from(point.messages);
            if let Some(next) = points.get(behind) {
                to = append.start + u64::from(next.end);
            }
        }
        let Some(last) = skip.checked_sub(1) else {
            return Ok(Some(from));
        };
        self.metrics.searched_bytes.add(to - from);
        let bytes = self.read_range(&append.owner, from, to)?;
        let end = json::message_ends(&bytes).nth(usize::try_from(last).unwrap_or(usize::MAX));
        Ok(end.map(|end| from + end as u64))
    }

    /// The first bytes of an append. All of it has been compared with its checksum.
    pub(super) fn first_bytes(&self, append: &Append, end: u64) -> io::Result<Vec<u8>> {
        if append.is_large() {
            self.points_of(append)?;
            return self.read_range(&append.owner, append.start, end);
        }
        let mut bytes = self.read_range(&append.owner, append.start, append.end)?;
        bytes.truncate((end - append.start) as usize);
        Ok(bytes)
    }
}
