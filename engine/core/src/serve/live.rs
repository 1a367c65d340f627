//! Live readers: long-poll and SSE.
//!
//! A commit wakes a stream's readers once per reactor. Subscribers that stand at the same position share one
//! rendered frame; one that is behind reads for itself and never makes anything buffer.
//!
//! Invariants
//! - `I-LIVE-1` Every data event is followed by its control event in the same frame.
//! - `I-LIVE-2` A reader registers under the stream's lock and looks again: no publication is missed.

use crate::report;
use std::sync::Arc;

use crate::error::ErrorCode;
use crate::limits::SSE_WINDOW_BYTES;
use crate::model::{Media, StreamId};
use crate::refusal::Refusal;
use crate::serve::conn::{Conn, Phase};
use crate::serve::http::Head;
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::read::{ReadPlan, Window};
use crate::serve::respond::{self, Reply};
use crate::stream::handle::Stream;
use crate::stream::offsets::{self, Gap, ReadStart};
use crate::stream::state::{Life, StreamState};

const CURSOR_EPOCH_MS: u64 = 1_728_432_000_000;
const CURSOR_INTERVAL_MS: u64 = 20_000;

pub struct LongPoll {
    pub stream: Arc<Stream>,
    position: u64,
    gap: Option<Gap>,
    cursor: Option<u64>,
    cors: bool,
    expires_ms: u64,
}

pub struct Sse {
    pub stream: Arc<Stream>,
    position: u64,
    gap: Option<Gap>,
    /// A cursor the client brought from the future: it stays ahead until time has caught up.
    cursor: Option<u64>,
    /// HTTP/1.0 has no chunks: the body ends with the connection.
    chunked: bool,
    started: bool,
    /// The bytes sent last end where an epoch begins that has none yet.
    at_boundary: bool,
    /// Epoch of the offset that the reader holds: what it has entered is not told again.
    epoch: u64,
    ends_ms: u64,
    /// A shared frame that did not fit into the socket whole.
    pub frame: Option<(Arc<Vec<u8>>, usize)>,
}

/// A frame that many subscribers can send.
pub struct SharedFrame {
    stream: StreamId,
    from: u64,
    to: u64,
    ended: bool,
    up_to_date: bool,
    epoch: u64,
    bytes: Arc<Vec<u8>>,
}

impl Reactor {
    /// The cursor a response carries: the current interval, or beyond what the client already has.
    fn cursor_for(&self, client: Option<u64>) -> u64 {
        let current = self.wall_ms.saturating_sub(CURSOR_EPOCH_MS) / CURSOR_INTERVAL_MS;
        match client {
            Some(client) if client >= current => {
                let jitter_seconds = 1 + self.engine.doors.random.next_u64() % 3600;
                client.saturating_add((jitter_seconds * 1000).div_ceil(CURSOR_INTERVAL_MS).max(1))
            }
            _ => current,
        }
    }

    pub fn long_poll(
        &mut self,
        conn: &mut Conn,
        head: &Head<'_>,
        stream: Arc<Stream>,
        plan: ReadPlan,
        cursor: Option<u64>,
    ) -> Result<Flow, Refusal> {
        let poll = LongPoll {
            stream,
            position: plan.position,
            gap: plan.gap,
            cursor,
            cors: true,
            expires_ms: self.now_ms + self.engine.config.long_poll_timeout_ms,
        };
        let nothing_yet = {
            let state = poll.stream.lock();
            let waits = state.visible.tail <= poll.position
                && !state.visible.closed
                && poll.gap.is_none()
                && !conn.half_closed;
            if waits {
                poll.stream.watch(self.number);
            }
            waits
        };
        if nothing_yet && head.method == crate::serve::http::Method::Get {
            self.register(&poll.stream, conn.token);
            self.engine.metrics.long_polls.add(1);
            conn.deadline_ms = poll.expires_ms;
            conn.phase = Phase::LongPoll(Box::new(poll));
            return Ok(Flow::Done);
        }
        self.answer_poll(conn, &poll)
    }

    /// Answers a poll with what there is now: data, the end, or nothing.
    fn answer_poll(&mut self, conn: &mut Conn, poll: &LongPoll) -> Result<Flow, Refusal> {
        let start = ReadStart {
            position: poll.position,
            gap: poll.gap,
        };
        let ReadStart { position, gap } = self
            .engine
            .skip_damage(&poll.stream, start, None)
            .map_err(|error| self.engine.read_failed(error))?;
        let window = self.window(&poll.stream, position, self.engine.config.read_window_bytes)?;
        let cursor = self.cursor_for(poll.cursor);
        let reply = Reply {
            date: &self.date,
            cors: poll.cors,
            keep_alive: conn.keep_alive,
            head_only: false,
            control: false,
        };
        if window.end > window.start || gap.is_some() {
            let cache: &[u8] = if gap.is_some() {
                b"no-store"
            } else {
                b"no-cache"
            };
            return self.send_window_as(conn, &reply, &poll.stream, &window, gap, |out| {
                respond::number_header(out, "Stream-Cursor", cursor);
                respond::header(out, "Cache-Control", cache);
            });
        }
        let out = &mut conn.output;
        respond::begin(out, 204, &reply);
        respond::next_offset(out, window.next);
        respond::header(out, "Stream-Up-To-Date", b"true");
        respond::number_header(out, "Stream-Cursor", cursor);
        if window.closed {
            respond::header(out, "Stream-Closed", b"true");
        }
        self.render_identity(out, &poll.stream);
        respond::header(out, "Cache-Control", b"no-store");
        respond::end_empty(out, 204);
        Ok(Flow::Done)
    }

    /// A waiting poll ends: woken, timed out, or its stream is gone.
    pub fn finish_poll(&mut self, conn: &mut Conn, timed_out: bool) {
        let Phase::LongPoll(poll) = std::mem::replace(&mut conn.phase, Phase::Request) else {
            return;
        };
        let gone = {
            let state = poll.stream.lock();
            let idle = state.visible.tail <= poll.position
                && !state.visible.closed
                && state.life == Life::Live;
            let pending = self.delete_is_pending(&state);
            if pending || (idle && !timed_out && !self.stopping) {
                drop(state);
                // A delete on its way to the log decides the answer; its commit wakes this reader.
                conn.deadline_ms = if pending {
                    self.now_ms + 1000
                } else {
                    poll.expires_ms
                };
                conn.phase = Phase::LongPoll(poll);
                return;
            }
            state.life
        };
        self.unregister(&poll.stream, conn.token);
        self.engine.metrics.long_polls.sub(1);
        let refusal = match gone {
            Life::Live if self.stopping && !timed_out => Some(ErrorCode::ShuttingDown),
            Life::Live => None,
            Life::SoftDeleted => Some(ErrorCode::StreamGone),
            Life::Gone => Some(ErrorCode::StreamNotFound),
        };
        let result = match refusal {
            Some(code) => Err(code.into()),
            None => {
                let engine = Arc::clone(&self.engine);
                engine.past_damage(|| self.answer_poll(conn, &poll).map(|_| ()))
            }
        };
        if let Err(refusal) = result {
            let reply = Reply {
                date: &self.date,
                cors: true,
                keep_alive: conn.keep_alive,
                head_only: false,
                control: false,
            };
            respond::problem(&mut conn.output, &refusal, &reply);
        }
        self.after_answer(conn);
    }

    pub fn begin_sse(
        &mut self,
        conn: &mut Conn,
        head: &Head<'_>,
        stream: Arc<Stream>,
        plan: ReadPlan,
        cursor: Option<u64>,
    ) -> Result<Flow, Refusal> {
        let chunked = head.minor_version > 0;
        if !chunked {
            conn.keep_alive = false;
        }
        let reply = self.reply_for(conn, head);
        let out = &mut conn.output;
        respond::begin(out, 200, &reply);
        respond::header(out, "Content-Type", b"text/event-stream");
        respond::header(out, "Cache-Control", b"no-cache, no-store");
        respond::header(out, "X-Accel-Buffering", b"no");
        if stream.content_type.media == Media::Binary {
            respond::header(out, "Stream-SSE-Data-Encoding", b"base64");
        }
        self.render_identity(out, &stream);
        if chunked {
            respond::header(out, "Transfer-Encoding", b"chunked");
        }
        out.extend_from_slice(b"\r\n");
        if reply.head_only {
            return Ok(Flow::Done);
        }
        let current = self.cursor_for(None);
        let ahead = cursor
            .filter(|client| *client >= current)
            .map(|client| self.cursor_for(Some(client)));
        stream.watch(self.number);
        self.register(&stream, conn.token);
        self.engine.metrics.sse_subscribers.add(1);
        conn.deadline_ms = self.now_ms + self.engine.config.sse_keepalive_ms;
        conn.phase = Phase::Sse(Box::new(Sse {
            stream,
            position: plan.position,
            gap: plan.gap,
            cursor: ahead,
            chunked,
            started: false,
            at_boundary: false,
            epoch: 0,
            ends_ms: self.now_ms + self.engine.config.sse_lifetime_ms,
            frame: None,
        }));
        self.pump_sse(conn);
        Ok(Flow::Done)
    }

    /// A delete that is staged but not synced: nobody may be told yet.
    fn delete_is_pending(&self, state: &StreamState) -> bool {
        state.life != Life::Live && state.control_sequence > self.engine.shard.synced()
    }

    /// Gives the subscriber its next frame if it has room for one and there is something to say.
    pub fn pump_sse(&mut self, conn: &mut Conn) {
        let engine = Arc::clone(&self.engine);
        if let Err(refusal) = engine.past_damage(|| self.next_frame(conn)) {
            // The response has begun: only a broken connection can say that it is not whole.
            report!("SSE reader dropped: {}", refusal.sentence());
            conn.dead = true;
        }
    }

    fn next_frame(&mut self, conn: &mut Conn) -> Result<(), Refusal> {
        let unsent = conn.unsent() > 0;
        let half_closed = conn.half_closed;
        let Phase::Sse(sse) = &mut conn.phase else {
            return Ok(());
        };
        if sse.frame.is_some() || (unsent && sse.started) {
            return Ok(());
        }
        if sse.started && half_closed {
            self.end_sse(conn);
            return Ok(());
        }
        let (visible, life) = {
            let state = sse.stream.lock();
            if self.delete_is_pending(&state) {
                return Ok(());
            }
            let behind = sse.position < state.visible.tail || sse.at_boundary;
            if sse.started && sse.gap.is_none() && behind {
                sse.gap = offsets::gap_at(&state, &self.engine.losses, sse.position)
                    .filter(|gap| gap.to.epoch > sse.epoch);
            }
            (state.visible, state.life)
        };
        if life != Life::Live {
            self.end_sse(conn);
            return Ok(());
        }
        self.skip_damage_for(sse, visible.tail)?;
        if sse.started && sse.position >= visible.tail && !visible.closed && sse.gap.is_none() {
            return Ok(());
        }
        let current = self.wall_ms.saturating_sub(CURSOR_EPOCH_MS) / CURSOR_INTERVAL_MS;
        sse.cursor = sse.cursor.filter(|ahead| *ahead > current);
        let private = !sse.started || sse.gap.is_some() || sse.cursor.is_some() || !sse.chunked;
        let (stream, position, gap) = (Arc::clone(&sse.stream), sse.position, sse.gap);
        let cursor = sse.cursor.unwrap_or(current);
        let chunked = sse.chunked;
        let cached = self.shared_frame.as_ref().filter(|frame| {
            let current =
                !frame.up_to_date || (frame.to == visible.tail && frame.ended == visible.closed);
            !private && frame.stream == stream.id && frame.from == position && current
        });
        let (bytes, to, ended, up_to_date, epoch) = match cached {
            Some(frame) => (
                Arc::clone(&frame.bytes),
                frame.to,
                frame.ended,
                frame.up_to_date,
                frame.epoch,
            ),
            None => {
                let (bytes, window) = self.render_frame(&stream, position, gap, cursor, chunked)?;
                let bytes = Arc::new(bytes);
                if !private {
                    self.shared_frame = Some(SharedFrame {
                        stream: stream.id,
                        from: position,
                        to: window.end,
                        ended: window.closed,
                        up_to_date: window.up_to_date,
                        epoch: window.next.epoch,
                        bytes: Arc::clone(&bytes),
                    });
                }
                (
                    bytes,
                    window.end,
                    window.closed,
                    window.up_to_date,
                    window.next.epoch,
                )
            }
        };
        let Phase::Sse(sse) = &mut conn.phase else {
            return Ok(());
        };
        sse.started = true;
        sse.gap = None;
        sse.position = to;
        sse.epoch = epoch;
        // All bytes were sent, and yet there is something to be told: an epoch that begins here.
        sse.at_boundary = to == visible.tail && !up_to_date;
        if private || ended {
            conn.output.extend_from_slice(&bytes);
        } else {
            sse.frame = Some((bytes, 0));
        }
        if ended {
            self.end_sse(conn);
        }
        Ok(())
    }

    /// Moves a subscriber that stands before damaged bytes behind them; its next frame carries the gap.
    fn skip_damage_for(&self, sse: &mut Sse, tail: u64) -> Result<(), Refusal> {
        if sse.position >= tail {
            return Ok(());
        }
        let start = ReadStart {
            position: sse.position,
            gap: sse.gap,
        };
        let start = self
            .engine
            .skip_damage(&sse.stream, start, None)
            .map_err(|error| self.engine.read_failed(error))?;
        (sse.position, sse.gap) = (start.position, start.gap);
        Ok(())
    }

    /// One data event with everything up to the window's end (if there is anything), then its control event.
    fn render_frame(
        &self,
        stream: &Arc<Stream>,
        position: u64,
        gap: Option<Gap>,
        cursor: u64,
        chunked: bool,
    ) -> Result<(Vec<u8>, Window), Refusal> {
        let window = self.window(stream, position, SSE_WINDOW_BYTES)?;
        let mut event = Vec::with_capacity(256 + (window.end - window.start) as usize * 3 / 2);
        if window.end > window.start {
            let bytes = self
                .engine
                .read_range(stream, window.start, window.end)
                .map_err(|error| self.engine.read_failed(error))?;
            self.engine.metrics.read_bytes.add(bytes.len() as u64);
            render_data(&mut event, stream.content_type.media, &bytes);
        }
        render_control(&mut event, &window, gap, cursor);
        if !chunked {
            return Ok((event, window));
        }
        let mut frame = Vec::with_capacity(event.len() + 16);
        frame.extend_from_slice(format!("{:x}\r\n", event.len()).as_bytes());
        frame.extend_from_slice(&event);
        frame.extend_from_slice(b"\r\n");
        Ok((frame, window))
    }

    /// Ends the event stream; the connection itself may go on.
    fn end_sse(&mut self, conn: &mut Conn) {
        let Phase::Sse(sse) = std::mem::replace(&mut conn.phase, Phase::Request) else {
            return;
        };
        self.unregister(&sse.stream, conn.token);
        self.engine.metrics.sse_subscribers.sub(1);
        if let Some((bytes, sent)) = sse.frame {
            conn.output.extend_from_slice(&bytes[sent..]);
        }
        if sse.chunked {
            conn.output.extend_from_slice(b"0\r\n\r\n");
        }
        self.after_answer(conn);
    }

    /// The clock has come to this subscriber: say something, or let it reconnect after its time.
    pub fn tick_sse(&mut self, conn: &mut Conn) {
        let Phase::Sse(sse) = &conn.phase else { return };
        let stuck = sse.frame.is_some() || conn.unsent() > 0;
        if stuck {
            // Nothing has left for a whole interval: the reader does not read.
            conn.dead = true;
            self.engine.metrics.timeouts.add(1);
        } else if self.now_ms >= sse.ends_ms || self.stopping {
            self.end_sse(conn);
        } else {
            let chunked = sse.chunked;
            conn.deadline_ms = self.now_ms + self.engine.config.sse_keepalive_ms;
            conn.output.extend_from_slice(if chunked {
                b"e\r\n: keep-alive\n\n\r\n"
            } else {
                b": keep-alive\n\n"
            });
        }
    }

    /// When a subscriber's next turn of the clock is due.
    pub fn sse_deadline(&self, sse: &Sse, blocked: bool) -> u64 {
        let quiet = self.now_ms
            + if blocked {
                self.engine.config.send_timeout_ms
            } else {
                self.engine.config.sse_keepalive_ms
            };
        quiet.min(sse.ends_ms.max(self.now_ms + 1))
    }
}

fn render_data(out: &mut Vec<u8>, media: Media, bytes: &[u8]) {
    out.extend_from_slice(b"event: data\n");
    match media {
        Media::Json => {
            let messages = bytes.strip_suffix(b",").unwrap_or(bytes);
            out.extend_from_slice(b"data:[");
            put_continued_lines(out, messages);
            out.extend_from_slice(b"]\n");
        }
        Media::Text => {
            out.extend_from_slice(b"data:");
            put_line_start(out, bytes);
            put_continued_lines(out, bytes);
            out.push(b'\n');
        }
        Media::Binary => {
            out.extend_from_slice(b"data:");
            put_base64(out, bytes);
            out.push(b'\n');
        }
    }
    out.push(b'\n');
}

/// Clients drop one blank behind the colon, so a line that begins with one gets another.
fn put_line_start(out: &mut Vec<u8>, line: &[u8]) {
    if line.first() == Some(&b' ') {
        out.push(b' ');
    }
}

/// Text with every line break (CRLF, CR or LF) turned into the start of another `data:` line.
fn put_continued_lines(out: &mut Vec<u8>, mut text: &[u8]) {
    while let Some(at) = memchr::memchr2(b'\n', b'\r', text) {
        out.extend_from_slice(&text[..at]);
        let crlf = text[at] == b'\r' && text.get(at + 1) == Some(&b'\n');
        text = &text[at + if crlf { 2 } else { 1 }..];
        out.extend_from_slice(b"\ndata:");
        put_line_start(out, text);
    }
    out.extend_from_slice(text);
}

fn render_control(out: &mut Vec<u8>, window: &Window, gap: Option<Gap>, cursor: u64) {
    out.extend_from_slice(b"event: control\ndata:{\"streamNextOffset\":\"");
    window.next.write_to(out);
    out.push(b'"');
    if !window.closed {
        out.extend_from_slice(b",\"streamCursor\":\"");
        respond::put_number(out, cursor);
        out.push(b'"');
    }
    if let Some(gap) = gap {
        let fields = format!(
            ",\"streamGapFrom\":\"{}\",\"streamGapTo\":\"{}\",\"streamGapReason\":\"{}\",\"streamGapCertain\":{}",
            gap.from,
            gap.to,
            gap.reason.name(),
            gap.certain
        );
        out.extend_from_slice(fields.as_bytes());
    }
    if window.up_to_date {
        out.extend_from_slice(b",\"upToDate\":true");
    }
    if window.closed {
        out.extend_from_slice(b",\"streamClosed\":true");
    }
    out.extend_from_slice(b"}\n\n");
}

fn put_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    out.reserve(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = u32::from(chunk[0]) << 16
            | u32::from(*chunk.get(1).unwrap_or(&0)) << 8
            | u32::from(*chunk.get(2).unwrap_or(&0));
        let symbol = |shift: u32| ALPHABET[(word >> shift & 63) as usize];
        out.push(symbol(18));
        out.push(symbol(12));
        out.push(if chunk.len() > 1 { symbol(6) } else { b'=' });
        out.push(if chunk.len() > 2 { symbol(0) } else { b'=' });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(media: Media, bytes: &[u8]) -> String {
        let mut out = Vec::new();
        render_data(&mut out, media, bytes);
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn text_stays_inside_its_event() {
        assert_eq!(
            rendered(Media::Text, b"a\r\nb\rc\n\nevent: x"),
            "event: data\ndata:a\ndata:b\ndata:c\ndata:\ndata:event: x\n\n"
        );
        assert_eq!(
            rendered(Media::Text, b" a\n b"),
            "event: data\ndata:  a\ndata:  b\n\n"
        );
    }

    #[test]
    fn json_and_base64() {
        assert_eq!(
            rendered(Media::Json, b"{\"a\":1},2,"),
            "event: data\ndata:[{\"a\":1},2]\n\n"
        );
        for (bytes, text) in [
            (&b"a"[..], "YQ=="),
            (b"ab", "YWI="),
            (b"abc", "YWJj"),
            (b"\xff\xfe\xfd\xfc", "//79/A=="),
        ] {
            assert_eq!(
                rendered(Media::Binary, bytes),
                format!("event: data\ndata:{text}\n\n")
            );
        }
    }
}
