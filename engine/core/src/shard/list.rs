//! Listing and describing streams: a range scan of the catalog, overridden by what memory knows, and of the streams that
//! are too new for the catalog. A page costs what is on it, and a bounded number of looks at what is not.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::limits::{LIST_LOOKS_SPARE, LIST_MAX};
use crate::model::{Class, Gate, Offset, RESERVED, StreamId, is_reserved};
use crate::refusal::Refusal;
use crate::shard::engine::{Engine, Undone};
use crate::stream::handle::Stream;
use crate::stream::state::Life;

/// A stream as listings show it.
#[derive(Clone, Debug)]
pub struct StreamInfo {
    pub path: String,
    pub content_type: String,
    pub tail: Offset,
    pub closed: bool,
    pub class: Class,
    pub incarnation: StreamId,
    pub records: u64,
    pub bytes: u64,
    pub created_ms: u64,
    pub ttl_seconds: Option<u64>,
    pub expires_at_ms: Option<u64>,
    pub forked_from: Option<String>,
}

/// A page as things are now, and what must be final before it is told.
#[derive(Default)]
pub struct Page {
    streams: BTreeMap<Box<str>, StreamInfo>,
    /// Streams that are not on it because their time is over.
    expired: Vec<Box<str>>,
    /// The newest frame that anything seen here rests on: also what is not on it.
    sequence: u64,
    /// What comes behind this name was not looked at.
    until: Option<Box<str>>,
}

/// Streams in path order, and behind which name to go on; a page may be short, or empty, and still be followed by others.
#[derive(Debug, Default)]
pub struct Listed {
    pub streams: Vec<StreamInfo>,
    pub next: Option<String>,
}

impl Engine {
    /// Streams in path order, strictly behind `after`. Reserved ones only if the prefix asks for them. Returns when all of
    /// it is final: who is on the page, who is not, and what is said of them. Behind a log that has failed nothing becomes
    /// final any more: then it is all as it was last.
    pub fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Listed, Refusal> {
        let page = self.until_final(&|| self.list_now(prefix, after, limit))?;
        Ok(page.into_listed(limit))
    }

    /// One stream as a listing shows it; the same promises.
    pub fn list_one(&self, path: &str) -> Result<Option<StreamInfo>, Refusal> {
        let mut page = self.until_final(&|| {
            let mut page = Page::default();
            self.metrics.list_looks.add(1);
            if let Some(stream) = self.directory.get_to_read(path)? {
                self.describe(&stream, &mut page);
            }
            Ok(page)
        })?;
        Ok(page.streams.remove(path))
    }

    fn until_final(&self, look: &dyn Fn() -> Result<Page, Undone>) -> Result<Page, Refusal> {
        let seen = self.until_done(|| {
            let page = look()?;
            let mut sequence = page.sequence;
            for path in &page.expired {
                sequence = sequence.max(self.end_expired(path)?.1);
            }
            Ok((page, Gate::synced(sequence)))
        });
        if seen.is_ok() || !self.shard.failed() {
            return seen;
        }
        // It failed meanwhile, and what was waited for will not become final.
        self.until_done(|| Ok((look()?, Gate::OPEN)))
    }

    /// The same without waiting for anything.
    pub fn list_now(&self, prefix: &str, after: &str, limit: usize) -> Result<Page, Undone> {
        // One more than is shown tells whether something follows.
        let most = limit.min(LIST_MAX) + 1;
        let reserved = prefix.starts_with(RESERVED);
        let hidden = |path: &str| !reserved && is_reserved(path);
        // New streams first: one that a checkpoint writes meanwhile is in the catalog then.
        let mut page = self.list_new(prefix, after, most, &hidden);
        let (mut stored, mut looks) = (0, 0);
        let wanted = |path: &str| {
            self.metrics.list_looks.add(1);
            !hidden(path)
        };
        self.directory.walk(prefix, after, &wanted, &mut |stream| {
            looks += 1;
            stored += usize::from(self.describe(stream, &mut page));
            let go_on = stored < most && looks < most + LIST_LOOKS_SPARE;
            if !go_on {
                page.end_at(&stream.path);
            }
            go_on
        })?;
        Ok(page)
    }

    /// The first streams that the catalog may not know.
    fn list_new(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        hidden: &dyn Fn(&str) -> bool,
    ) -> Page {
        let mut page = Page::default();
        let mut from: Box<str> = after.into();
        let mut looks = 0;
        loop {
            let some = self.directory.new_paths(prefix, &from, most);
            let Some(last) = some.last() else { break };
            from.clone_from(&last.path);
            looks += some.len();
            self.metrics.list_looks.add(some.len() as u64);
            for path in some.iter().map(|stream| &stream.path) {
                let current = (!hidden(path)).then(|| self.directory.in_memory_at(path));
                if let Some(stream) = current.flatten() {
                    self.describe(&stream, &mut page);
                }
            }
            let enough = page.streams.len() >= most || looks >= most + LIST_LOOKS_SPARE;
            // A name that is not shown is not told as the last one, either; there are few.
            if enough && !hidden(&from) {
                page.end_at(&from);
                break;
            }
        }
        page
    }

    /// Puts a stream that is there onto a page; returns whether it is.
    fn describe(&self, stream: &Arc<Stream>, page: &mut Page) -> bool {
        let stream = self.as_told_last(Arc::clone(stream));
        let state = stream.lock();
        let (failed, synced) = (self.shard.failed(), self.shard.synced());
        let there = if failed {
            state.was_live(synced)
        } else {
            page.sequence = page.sequence.max(state.control_sequence);
            if self.has_expired(&state, self.now_ms()) {
                page.expired.push(stream.path.clone());
                return false;
            }
            state.life == Life::Live
        };
        if !there {
            return false;
        }
        let info = StreamInfo {
            path: stream.path.to_string(),
            content_type: stream.content_type.text.to_string(),
            tail: self.visible_tail(&state),
            closed: state.visible.closed,
            class: if failed {
                state.class_at(synced)
            } else {
                state.class
            },
            incarnation: stream.id,
            records: state.visible.records,
            bytes: state.visible.tail,
            created_ms: state.created_ms,
            ttl_seconds: state.expiry.as_ref().and_then(|expiry| expiry.ttl_seconds),
            expires_at_ms: state
                .expiry
                .as_ref()
                .and_then(|expiry| expiry.expires_at_ms),
            forked_from: state.fork.as_ref().map(|fork| fork.source_path.to_string()),
        };
        page.streams.insert(stream.path.clone(), info);
        true
    }
}

impl Page {
    /// No walk came farther than this name: what others found behind it is for the next page.
    fn end_at(&mut self, path: &str) {
        if self.until.as_deref().is_none_or(|until| path < until) {
            self.until = Some(path.into());
        }
    }

    pub fn into_listed(self, limit: usize) -> Listed {
        let limit = limit.min(LIST_MAX);
        let mut next = self.until.map(String::from);
        let mut streams: Vec<StreamInfo> = self.streams.into_values().collect();
        if let Some(until) = &next {
            streams.retain(|info| info.path <= *until);
        }
        if streams.len() > limit {
            streams.truncate(limit);
            next = streams.last().map(|info| info.path.clone());
        }
        Listed { streams, next }
    }
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
