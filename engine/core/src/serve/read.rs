//! GET and HEAD: where a read begins, and catch-up reads with their caching rules.

use std::sync::Arc;

use crate::error::ErrorCode;
use crate::model::{Class, Media};
use crate::refusal::Refusal;
use crate::serve::conn::{Conn, Phase, Sending};
use crate::serve::http::{Head, Known};
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::respond::{self, Reply};
use crate::serve::route::{Live, ReadQuery, read_query};
use crate::serve::time::format_rfc3339;
use crate::shard::engine::{Engine, Undone};
use crate::shard::plan::{ReadFrom, ReadPlan, Reading, Window};
use crate::stream::handle::Stream;
use crate::stream::offsets::Gap;

/// Bodies up to this size are copied behind their head and leave in one call.
const INLINE_BODY_BYTES: u64 = 64 * 1024;

impl Reactor {
    pub fn get(&mut self, conn: &mut Conn, head: &Head<'_>, path: &str) -> Flow {
        match self.try_get(conn, head, path) {
            Ok(flow) => flow,
            Err(undone) => self.answer_undone(conn, head, undone),
        }
    }

    fn try_get(&mut self, conn: &mut Conn, head: &Head<'_>, path: &str) -> Result<Flow, Undone> {
        let engine = Arc::clone(&self.engine);
        let stream = engine.find_to_read(path)?.ok_or_else(Engine::missing)?;
        let mut reading = engine.reading(&stream);
        engine.check_life(&stream, &mut reading.state, self.wall_ms)?;
        engine.check_final(&reading.state)?;
        let query = read_query(head.query).map_err(Undone::refused)?;
        engine.renew(&stream, &mut reading.state);
        // What fails here fails again below, and is told there.
        if let Some(count) = query.tail
            && matches!(
                reading.unlocked(|| engine.last_is_at_hand(&stream, count)),
                Ok(false)
            )
        {
            return Err(Undone::Wait);
        }
        self.round_has_reads = true;
        let mut held = Some(reading);
        let flow = engine
            .past_damage(|| {
                let mut reading = held.take().unwrap_or_else(|| engine.reading(&stream));
                let plan = reading.plan(read_from(&query)?)?;
                let Some(live) = query.live else {
                    return self.catch_up(conn, head, reading, &plan);
                };
                drop(reading);
                let stream = Arc::clone(&stream);
                match live {
                    Live::LongPoll => self.long_poll(conn, head, stream, plan, query.cursor),
                    Live::Sse => self.begin_sse(conn, head, stream, plan, query.cursor),
                }
            })
            .map_err(Undone::refused)?;
        engine.metrics.reads.add(1);
        Ok(flow)
    }

    fn catch_up(
        &mut self,
        conn: &mut Conn,
        head: &Head<'_>,
        mut reading: Reading<'_>,
        plan: &ReadPlan,
    ) -> Result<Flow, Refusal> {
        let window_bytes = self.engine.config.read_window_bytes;
        let window = reading.window(plan.position, window_bytes)?;
        let etag = etag(reading.stream(), &window);
        if !plan.now && plan.gap.is_none() && none_match(head, &etag) {
            let reply = self.reply_for(conn, head);
            respond::begin(&mut conn.output, 304, &reply);
            respond::header(&mut conn.output, "ETag", etag.as_bytes());
            respond::next_offset(&mut conn.output, window.next);
            respond::end_empty(&mut conn.output, 304);
            return Ok(Flow::Done);
        }
        let cache = cache_rule(plan, &window);
        let reply = self.reply_for(conn, head);
        self.send_window(conn, &reply, reading, &window, plan.gap, |out| {
            if !plan.now {
                respond::header(out, "ETag", etag.as_bytes());
            }
            respond::header(out, "Cache-Control", cache.as_bytes());
        })
    }

    /// Head and body of a window; `extra` adds what the kind of read calls for.
    pub fn send_window(
        &self,
        conn: &mut Conn,
        reply: &Reply<'_>,
        mut reading: Reading<'_>,
        window: &Window,
        gap: Option<Gap>,
        extra: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Flow, Refusal> {
        let stream = Arc::clone(reading.stream());
        let json = stream.content_type.media == Media::Json;
        let stored = window.end - window.start;
        let length = if json {
            stored.saturating_sub(1) + 2
        } else {
            stored
        };
        if stored > INLINE_BODY_BYTES && !reply.head_only {
            reading.check_files(window)?;
        }
        let start = conn.output.len();
        let out = &mut conn.output;
        respond::begin(out, 200, reply);
        respond::header(out, "Content-Type", stream.content_type.text.as_bytes());
        respond::next_offset(out, window.next);
        if window.up_to_date {
            respond::header(out, "Stream-Up-To-Date", b"true");
        }
        if window.closed {
            respond::header(out, "Stream-Closed", b"true");
        }
        if let Some(gap) = gap {
            let value = format!(
                "from={}; to={}; reason={}; certain={}",
                gap.from,
                gap.to,
                gap.reason.name(),
                u8::from(gap.certain)
            );
            respond::header(out, "Stream-Gap", value.as_bytes());
        }
        render_identity(out, &stream, window.class);
        extra(out);
        respond::number_header(out, "Content-Length", length);
        out.extend_from_slice(b"\r\n");
        if reply.head_only {
            return Ok(Flow::Done);
        }
        if json {
            out.push(b'[');
        }
        // The comma behind the last message is stored, but not sent.
        let comma = u64::from(json && stored > 0);
        let suffix = json.then_some(b']');
        let sending = || Sending {
            stream,
            position: window.start,
            end: window.end - comma,
            suffix,
            at_hand: (0, 0),
        };
        if stored <= INLINE_BODY_BYTES {
            let copied = reading.copy(window, &mut conn.output);
            drop(reading);
            if copied.is_err() {
                conn.output.truncate(start);
            }
            copied?;
            self.engine.metrics.read_bytes.add(stored);
            conn.output.truncate(conn.output.len() - comma as usize);
            conn.output.extend(suffix);
            if !self.room_for_bodies() {
                self.send_or_forget(conn, sending());
            }
            return Ok(Flow::Done);
        }
        self.engine.metrics.read_bytes.add(stored);
        conn.phase = Phase::Sending(Box::new(sending()));
        Ok(Flow::Done)
    }

    pub fn head(&mut self, conn: &mut Conn, head: &Head<'_>, path: &str) -> Flow {
        match self.try_head(conn, head, path) {
            Ok(()) => Flow::Done,
            Err(undone) => self.answer_undone(conn, head, undone),
        }
    }

    fn try_head(&mut self, conn: &mut Conn, head: &Head<'_>, path: &str) -> Result<(), Undone> {
        let stream = self
            .engine
            .find_to_read(path)?
            .ok_or_else(Engine::missing)?;
        let mut state = stream.lock();
        self.engine.check_life(&stream, &mut state, self.wall_ms)?;
        self.engine.check_final(&state)?;
        let tail = self.engine.visible_tail(&state);
        let closed = state.visible.closed;
        let expiry = state
            .expiry
            .as_deref()
            .map(|expiry| (expiry.ttl_seconds, expiry.expires_at_ms));
        let window = Window {
            start: 0,
            end: state.visible.tail,
            next: tail,
            up_to_date: true,
            closed,
            class: state.class_at(self.engine.shard.synced()),
            lasting: false,
        };
        drop(state);
        let reply = self.reply_for(conn, head);
        let out = &mut conn.output;
        respond::begin(out, 200, &reply);
        respond::header(out, "Content-Type", stream.content_type.text.as_bytes());
        respond::next_offset(out, tail);
        if closed {
            respond::header(out, "Stream-Closed", b"true");
        }
        if let Some((ttl, expires_at)) = expiry {
            if let Some(seconds) = ttl {
                respond::number_header(out, "Stream-TTL", seconds);
            }
            if let Some(at) = expires_at {
                respond::header(out, "Stream-Expires-At", format_rfc3339(at).as_bytes());
            }
        }
        render_identity(out, &stream, window.class);
        respond::header(out, "ETag", etag(&stream, &window).as_bytes());
        respond::header(out, "Cache-Control", b"no-store");
        out.extend_from_slice(b"\r\n");
        Ok(())
    }
}

pub fn render_identity(out: &mut Vec<u8>, stream: &Stream, class: Class) {
    respond::number_header(out, "Stream-Incarnation", stream.id.0);
    respond::header(out, "Stream-Durability", class.name().as_bytes());
}

/// Only a full window below the tail, asked for by a given offset, is the same for ever.
fn cache_rule(plan: &ReadPlan, window: &Window) -> &'static str {
    if plan.now || plan.gap.is_some() {
        "no-store"
    } else if plan.minted && !window.up_to_date && window.lasting {
        "public, max-age=31536000, immutable"
    } else {
        "no-cache"
    }
}

/// What the query names; `tail` comes before `since`, and both before an offset.
fn read_from(query: &ReadQuery) -> Result<ReadFrom, Refusal> {
    if let Some(count) = query.tail {
        return Ok(ReadFrom::Last(count));
    }
    if let Some(time_ms) = query.since_ms {
        return Ok(ReadFrom::Since(time_ms));
    }
    match &query.offset {
        Some(text) => ReadFrom::parse(text),
        None if query.live.is_some() => Err(Refusal::with(
            ErrorCode::OffsetInvalid,
            "A live read needs an offset.",
        )),
        None => Ok(ReadFrom::Start),
    }
}

/// Incarnation, start, end with its epoch, and whether the end is the tail, for now or for good: a cache keeps the headers
/// with the bytes. The epoch tells bytes that were lost from those that took their place.
fn etag(stream: &Stream, window: &Window) -> String {
    let mark = match (window.closed, window.up_to_date) {
        (true, _) => ":c",
        (false, true) => ":t",
        (false, false) => "",
    };
    let (id, start, epoch, end) = (stream.id.0, window.start, window.next.epoch, window.end);
    format!("\"{id}:{start}:{epoch}:{end}{mark}\"")
}

/// `If-None-Match`: a list, weak or not, or `*`.
fn none_match(head: &Head<'_>, etag: &str) -> bool {
    let matches = |tag: &[u8]| {
        let tag = tag.trim_ascii();
        tag == b"*" || tag.strip_prefix(b"W/").unwrap_or(tag) == etag.as_bytes()
    };
    head.values(Known::IfNoneMatch)
        .any(|line| line.split(|byte| *byte == b',').any(matches))
}
