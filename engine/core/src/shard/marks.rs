//! Where messages begin inside large appends: worked out once by a thread (`loads`), remembered for a while.
//!
//! `?tail=N` and forks with a sub-offset ask for a message inside an append of perhaps 16 MB. A reactor must not search that;
//! it asks whether the append's points are at hand, and if not lets the request wait for them as for bytes on the disk.
//! Between two points there is little to search.
//!
//! Invariant: an append's bytes never change within a process, so that points stay true; they come from bytes that were
//! compared with their checksum.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::io::wanted::{self, Key};
use crate::limits::{MARKED_APPEND_MIN_BYTES, MARKED_APPENDS_MAX};
use crate::model::{Media, StreamId};
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

type Points = Arc<Vec<Point>>;

/// Points of the appends that were asked for last, oldest first.
#[derive(Default)]
pub struct Marks {
    known: Mutex<VecDeque<((StreamId, u64), Points)>>,
}

impl Marks {
    fn find(&self, append: &Append) -> Option<Points> {
        let known = self.known.lock();
        let mut newest_first = known.iter().rev();
        let found = newest_first.find(|(key, _)| *key == append.key());
        found.map(|(_, points)| Arc::clone(points))
    }

    fn put(&self, append: &Append, points: &Points) {
        let mut known = self.known.lock();
        known.retain(|(key, _)| *key != append.key());
        if known.len() >= MARKED_APPENDS_MAX {
            known.pop_front();
        }
        known.push_back((append.key(), Arc::clone(points)));
    }
}

impl Engine {
    /// Whether a message of the append is found without searching all of it. If not, it will be soon (`wanted`). Who may
    /// wait searches by itself.
    pub(super) fn at_hand(&self, append: &Append) -> bool {
        if !append.is_large() || wanted::may_wait() || self.marks.find(append).is_some() {
            return true;
        }
        let key = Key::Points {
            stream: append.owner.id.0,
            start: append.start,
            end: append.end,
        };
        // What failed fails again for who asked, and is told there.
        wanted::want(key, || None).is_some()
    }

    /// Works out the points of a large append.
    pub(super) fn mark(&self, append: &Append) -> io::Result<()> {
        let points = self.find_points(append)?;
        self.marks.put(append, &points);
        Ok(())
    }

    fn find_points(&self, append: &Append) -> io::Result<Points> {
        let bytes = self.read_range(&append.owner, append.start, append.end)?;
        let found = if append.owner.content_type.media == Media::Json {
            points(&bytes)
        } else {
            vec![Point::default()]
        };
        Ok(Arc::new(found))
    }

    /// The points of a large append. Its bytes have been checked when this returns.
    fn points_of(&self, append: &Append) -> io::Result<Points> {
        if let Some(points) = self.marks.find(append) {
            return Ok(points);
        }
        self.metrics.searched_bytes.add(append.end - append.start);
        let points = self.find_points(append)?;
        self.marks.put(append, &points);
        Ok(points)
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
