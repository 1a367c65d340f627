//! Listing and describing streams: a range scan of the catalog, overridden by what memory knows, and of the streams that
//! are too new for the catalog. A page costs what is on it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::limits::LIST_MAX;
use crate::model::{Class, Offset, RESERVED, StreamId, is_reserved};
use crate::shard::engine::{Engine, Undone};
use crate::stream::handle::Stream;
use crate::stream::snapshot;
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

impl Engine {
    /// Streams in path order, strictly behind `after`. Reserved ones only if the prefix asks for them.
    pub fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Vec<StreamInfo>, Undone> {
        let limit = limit.min(LIST_MAX);
        let reserved = prefix.starts_with(RESERVED);
        let hidden = |path: &str| !reserved && is_reserved(path);
        // New streams first: one that a checkpoint writes meanwhile is in the catalog then.
        let mut page = self.list_new(prefix, after, limit, &hidden);
        let mut stored = 0;
        self.directory.catalog().scan(
            prefix.as_bytes(),
            after.as_bytes(),
            usize::MAX,
            &mut |path, value| {
                self.metrics.list_looks.add(1);
                let Ok(path) = std::str::from_utf8(path) else {
                    return true;
                };
                if hidden(path) {
                    return true;
                }
                let decode = || {
                    let bytes = snapshot::unseal(value)?;
                    snapshot::decode(bytes, |text| self.directory.intern(text)).map(Arc::new)
                };
                let stream = self.directory.in_memory_at(path).or_else(decode);
                if let Some(info) = stream.and_then(|stream| self.describe(&stream)) {
                    page.insert(path.into(), info);
                    stored += 1;
                }
                stored < limit
            },
        )?;
        Ok(page.into_values().take(limit).collect())
    }

    /// The first streams that the catalog may not know.
    fn list_new(
        &self,
        prefix: &str,
        after: &str,
        limit: usize,
        hidden: &dyn Fn(&str) -> bool,
    ) -> BTreeMap<Box<str>, StreamInfo> {
        let mut page = BTreeMap::new();
        let mut from: Box<str> = after.into();
        while page.len() < limit {
            let some = self.directory.new_paths(prefix, &from, limit);
            let Some(last) = some.last() else { break };
            from.clone_from(&last.path);
            self.metrics.list_looks.add(some.len() as u64);
            for path in some.iter().map(|stream| &stream.path) {
                let current = (!hidden(path)).then(|| self.directory.in_memory_at(path));
                if let Some(info) = current.flatten().and_then(|stream| self.describe(&stream)) {
                    page.insert(path.clone(), info);
                }
            }
        }
        page
    }

    /// What there is to say about a live stream whose creation is final; `None` for others.
    pub fn describe(&self, stream: &Arc<Stream>) -> Option<StreamInfo> {
        let state = stream.lock();
        let created = state.created_sequence <= self.shard.synced();
        if state.life != Life::Live || self.has_expired(&state, self.now_ms()) || !created {
            return None;
        }
        Some(StreamInfo {
            path: stream.path.to_string(),
            content_type: stream.content_type.text.to_string(),
            tail: self.visible_tail(&state),
            closed: state.visible.closed,
            class: state.class,
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
        })
    }
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
