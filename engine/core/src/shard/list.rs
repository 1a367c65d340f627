//! Listing and describing streams: a range scan of the catalog, overridden by what memory knows.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::limits::LIST_MAX;
use crate::model::{Class, Offset, StreamId};
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
        let reserved = prefix.starts_with("__ds");
        let memory = self.directory.in_memory(prefix, after);
        let mut merged: BTreeMap<Box<str>, StreamInfo> = BTreeMap::new();
        let mut stored = 0;
        self.directory.catalog().scan(
            prefix.as_bytes(),
            after.as_bytes(),
            usize::MAX,
            &mut |path, value| {
                let Ok(path) = std::str::from_utf8(path) else {
                    return true;
                };
                if memory.contains_key(path) || (!reserved && path.starts_with("__ds/")) {
                    return true;
                }
                let decoded = snapshot::unseal(value)
                    .and_then(|bytes| snapshot::decode(bytes, |text| self.directory.intern(text)));
                if let Some(info) = decoded.and_then(|stream| self.describe(&Arc::new(stream))) {
                    merged.insert(path.into(), info);
                    stored += 1;
                }
                stored < limit
            },
        )?;
        for (path, stream) in memory {
            if !reserved && path.starts_with("__ds/") {
                continue;
            }
            if let Some(info) = self.describe(&stream) {
                merged.insert(path, info);
            }
        }
        Ok(merged.into_values().take(limit).collect())
    }

    /// What there is to say about a live stream whose creation is final; `None` for others.
    pub fn describe(&self, stream: &Arc<Stream>) -> Option<StreamInfo> {
        let state = stream.lock();
        let created =
            state.control_sequence <= self.shard.synced() || state.visible.tail > state.start;
        if state.life != Life::Live || state.expired(self.now_ms()) || !created {
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
