//! Create and fork decisions: is a repeated PUT the same configuration, and what does a new stream start as.

use crate::model::{Class, ContentType, Offset, StreamId};
use crate::stream::hot::Hot;
use crate::stream::line::Line;
use crate::stream::offsets::{self, Losses};
use crate::stream::state::{Expiry, Fork, StreamState, Visible};

/// A create as the client asked for it; absent headers are `None`.
#[derive(Clone, Copy, Default)]
pub struct CreateRequest<'a> {
    pub content_type: Option<&'a str>,
    pub ttl_seconds: Option<u64>,
    pub expires_at_ms: Option<u64>,
    pub closed: bool,
    pub class: Option<Class>,
    pub fork: Option<ForkRequest<'a>>,
    /// When the request came, if this is not the first try; 0 = now.
    pub received_ms: u64,
}

#[derive(Clone, Copy)]
pub struct ForkRequest<'a> {
    /// Path of the source below the stream root.
    pub source_path: &'a str,
    pub offset: Option<Offset>,
    pub sub_offset: u64,
}

/// Whether a repeated PUT asks for what is already there. Only what the request says is compared with what a
/// fork took over from its source.
pub fn same_configuration(
    state: &StreamState,
    content_type: &ContentType,
    request: &CreateRequest<'_>,
) -> bool {
    same_content_type(state, content_type, request)
        && same_expiry(state.expiry.as_deref(), request)
        && state.closed == request.closed
        && request.class.is_none_or(|class| class == state.class)
        && same_fork(state, request)
}

fn same_content_type(
    state: &StreamState,
    content_type: &ContentType,
    request: &CreateRequest<'_>,
) -> bool {
    match request.content_type {
        Some(text) => content_type.matches(text.as_bytes()),
        None => state.fork.is_some() || content_type.matches(ContentType::DEFAULT.as_bytes()),
    }
}

fn same_expiry(stored: Option<&Expiry>, request: &CreateRequest<'_>) -> bool {
    let asked = (request.ttl_seconds, request.expires_at_ms);
    match stored {
        None => asked == (None, None),
        Some(expiry) if asked == (None, None) => expiry.inherited,
        Some(expiry) => asked == (expiry.ttl_seconds, expiry.expires_at_ms),
    }
}

fn same_fork(state: &StreamState, request: &CreateRequest<'_>) -> bool {
    match (&state.fork, &request.fork) {
        (None, None) => true,
        (Some(stored), Some(asked)) => {
            *stored.source_path == *asked.source_path
                && stored.sub_offset == asked.sub_offset
                // No offset that there was when the fork was made has an epoch above its own.
                && asked.offset.is_none_or(|offset| {
                    offset.position == stored.anchor && offset.epoch < state.id.0
                })
        }
        _ => false,
    }
}

/// Where a fork leaves its source.
pub struct Leaves<'a> {
    pub source: &'a StreamState,
    pub anchor: u64,
    /// Records up to there.
    pub records: u64,
    pub line: Line,
}

/// What a new stream begins as, before its first content.
pub fn initial_state(
    id: StreamId,
    class: Class,
    request: &CreateRequest<'_>,
    leaves: Option<&Leaves<'_>>,
    losses: &Losses,
    (now_ms, steady_ms): (u64, u64),
) -> StreamState {
    let mut state = StreamState::new(id, class, now_ms);
    let source_expiry = leaves.and_then(|leaves| leaves.source.expiry.as_deref());
    state.logged.closed = request.closed;
    state.logged.expiry = initial_expiry(request, source_expiry, steady_ms);
    if let Some((leaves, asked)) = leaves.zip(request.fork.as_ref()) {
        begin_as_fork(&mut state, leaves, asked, losses);
    }
    state
}

fn begin_as_fork(
    state: &mut StreamState,
    leaves: &Leaves<'_>,
    asked: &ForkRequest<'_>,
    losses: &Losses,
) {
    let (anchor, records) = (leaves.anchor, leaves.records);
    offsets::inherit_epochs(state, leaves.source, losses, anchor, asked.offset);
    state.cold_records = records;
    state.hot = Hot::starting_at(anchor);
    state.visible = Visible {
        tail: anchor,
        records,
        closed: false,
    };
    let logged = &mut state.logged;
    logged.last_time_ms = leaves.line.time_ms;
    (logged.start, logged.start_records) = (anchor, records);
    (logged.tail, logged.records) = (anchor, records);
    logged.fork = Some(Box::new(Fork {
        source: leaves.source.id,
        source_path: asked.source_path.into(),
        anchor,
        anchor_requested: asked.offset.is_some(),
        sub_offset: asked.sub_offset,
        line: leaves.line,
    }));
}

/// Expiry of a new stream: its own wish, else its source's window or date.
fn initial_expiry(
    request: &CreateRequest<'_>,
    source: Option<&Expiry>,
    steady_ms: u64,
) -> Option<Box<Expiry>> {
    let own = request.ttl_seconds.is_some() || request.expires_at_ms.is_some();
    let (ttl_seconds, expires_at_ms, inherited) = match (own, source) {
        (true, _) => (request.ttl_seconds, request.expires_at_ms, false),
        (false, Some(source)) => (source.ttl_seconds, source.expires_at_ms, true),
        (false, None) => return None,
    };
    Some(Box::new(Expiry {
        ttl_seconds,
        expires_at_ms,
        inherited,
        logged_access_ms: steady_ms,
        steady_access_ms: steady_ms,
    }))
}
