//! Live readers: long-poll and SSE.
//!
//! A commit wakes a stream's readers once per reactor. Subscribers that stand at the same position share what is
//! rendered (`events`); one that is behind reads for itself and never makes anything buffer.
//!
//! Invariants
//! - `I-LIVE-2` A reader registers under the stream's lock and looks again: no publication is missed.

use crate::report;
use std::sync::Arc;

use crate::error::ErrorCode;
use crate::io::wanted;
use crate::limits::{SSE_PIECE_BYTES, SSE_PIECES_KEPT, SSE_WINDOW_BYTES, TIGHT_SSE_PIECE_BYTES};
use crate::model::Media;
use crate::refusal::Refusal;
use crate::serve::budget::Kept;
use crate::serve::conn::{Conn, Phase};
use crate::serve::events::{Event, Piece};
use crate::serve::http::Head;
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::read::render_identity;
use crate::serve::respond::{self, Reply};
use crate::shard::plan::ReadPlan;
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
    pub started: bool,
    /// The bytes sent last end where an epoch begins that has none yet.
    at_boundary: bool,
    /// Epoch of the offset that the reader holds: what it has entered is not told again.
    epoch: u64,
    ends_ms: u64,
    /// The event that is being sent.
    pub under_way: Option<UnderWay>,
}

/// An event on its way to one subscriber. Of its bytes it holds those that there is room for.
pub struct UnderWay {
    event: Event,
    /// The piece that is being sent, and how much of that has left.
    from: u64,
    to: u64,
    /// How many stored bytes were in the piece before: what ends early once does so again.
    before: u64,
    pub sent: usize,
    pub kept: Option<Kept>,
    at_boundary: bool,
}

impl Sse {
    /// The piece under way has left. Returns whether that was the end of everything.
    pub fn piece_is_sent(&mut self) -> bool {
        let Some(under_way) = &mut self.under_way else {
            return false;
        };
        let window = under_way.event.window;
        if under_way.to < window.end {
            under_way.before = under_way.to - under_way.from;
            under_way.from = under_way.to;
            under_way.sent = 0;
            return false;
        }
        self.started = true;
        self.gap = None;
        self.position = window.end;
        self.epoch = window.next.epoch;
        // What was sent last ends where an epoch begins that has no bytes yet.
        self.at_boundary = under_way.at_boundary;
        self.under_way = None;
        window.closed
    }
}

/// What a reader of a stream that is not live is told.
fn gone(state: &StreamState) -> Option<ErrorCode> {
    match state.life {
        Life::Live => None,
        Life::SoftDeleted if state.fork_count > 0 => Some(ErrorCode::StreamGone),
        Life::SoftDeleted | Life::Gone => Some(ErrorCode::StreamNotFound),
    }
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
            // Deleted since it was found: its commit has woken those who wait, and wakes nobody again.
            if let Some(code) = gone(&state).filter(|_| !self.delete_is_pending(&state)) {
                return Err(code.into());
            }
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
        let engine = Arc::clone(&self.engine);
        let mut reading = engine.reading(&poll.stream);
        let ReadStart { position, gap } = reading.start(start)?;
        let window = reading.window(position, engine.config.read_window_bytes)?;
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
            return self.send_window(conn, &reply, reading, &window, gap, |out| {
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
        render_identity(out, &poll.stream, window.class);
        respond::header(out, "Cache-Control", b"no-store");
        respond::end_empty(out, 204);
        Ok(Flow::Done)
    }

    /// A waiting poll ends: woken, timed out, or its stream is gone.
    pub fn finish_poll(&mut self, conn: &mut Conn, timed_out: bool) {
        let Phase::LongPoll(poll) = std::mem::replace(&mut conn.phase, Phase::Request) else {
            return;
        };
        let refusal = {
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
            gone(&state)
        };
        drop(wanted::take_noted());
        let stopped = self.stopping && !timed_out;
        let refusal = refusal.or(stopped.then_some(ErrorCode::ShuttingDown));
        let result = match refusal {
            Some(code) => Err(code.into()),
            None => {
                let engine = Arc::clone(&self.engine);
                engine.past_damage(|| self.answer_poll(conn, &poll).map(|_| ()))
            }
        };
        if result.is_err() && self.waits_for_disk(conn) {
            conn.phase = Phase::LongPoll(poll);
            return;
        }
        self.unregister(&poll.stream, conn.token);
        self.engine.metrics.long_polls.sub(1);
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
        let class = stream.lock().class_at(self.engine.shard.synced());
        render_identity(out, &stream, class);
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
            under_way: None,
        }));
        Ok(Flow::Done)
    }

    /// A delete that is staged but not synced: nobody may be told yet.
    fn delete_is_pending(&self, state: &StreamState) -> bool {
        state.life != Life::Live && state.control_sequence > self.engine.shard.synced()
    }

    /// What the subscriber is sent next, if there is something to say. Without its piece being sent, or kept, the same
    /// one comes again.
    pub fn next_piece(&mut self, conn: &mut Conn) -> Option<Arc<Piece>> {
        let engine = Arc::clone(&self.engine);
        drop(wanted::take_noted());
        match engine.past_damage(|| self.look_for_piece(conn)) {
            Ok(piece) => piece,
            Err(_) if self.waits_for_disk(conn) => None,
            Err(refusal) => {
                // The response has begun: only a broken connection can say that it is not whole.
                report!("SSE reader dropped: {}", refusal.sentence());
                conn.dead = true;
                None
            }
        }
    }

    fn look_for_piece(&mut self, conn: &mut Conn) -> Result<Option<Arc<Piece>>, Refusal> {
        if matches!(&conn.phase, Phase::Sse(sse) if sse.under_way.is_none()) {
            self.begin_event(conn)?;
        }
        let Phase::Sse(sse) = &mut conn.phase else {
            return Ok(None);
        };
        let Some(under_way) = &mut sse.under_way else {
            return Ok(None);
        };
        if let Some(kept) = under_way.kept.take() {
            return Ok(Some(Arc::clone(&kept.piece)));
        }
        let event = under_way.event;
        // One that was sent in part is made again as it was.
        let again = under_way.sent > 0;
        let known = self.pieces.iter().rev().find(|piece| {
            piece.stream == sse.stream.id
                && piece.from == under_way.from
                && piece.event == event
                && (!again || piece.to == under_way.to)
        });
        if let Some(piece) = known {
            under_way.to = piece.to;
            return Ok(Some(Arc::clone(piece)));
        }
        let to = if again {
            under_way.to
        } else {
            let most = if self.room_for_bodies() {
                SSE_PIECE_BYTES
            } else {
                TIGHT_SSE_PIECE_BYTES
            };
            let most = most.min(2 * under_way.before);
            event.window.end.min(under_way.from.saturating_add(most))
        };
        let rendered = Piece::render(&self.engine, &sse.stream, &event, under_way.from, to);
        let piece = match rendered {
            Ok(piece) => Arc::new(piece),
            Err(error) => {
                if under_way.from == event.window.start && !again {
                    // Nothing was sent of it: once the damage is known, another event goes around it.
                    sse.under_way = None;
                }
                return Err(self.engine.read_failed(&sse.stream, error));
            }
        };
        under_way.to = piece.to;
        if self.pieces.len() >= SSE_PIECES_KEPT {
            self.pieces.pop_front();
        }
        self.pieces.push_back(Arc::clone(&piece));
        Ok(Some(piece))
    }

    /// Decides on the subscriber's next event, if there is something to say.
    fn begin_event(&mut self, conn: &mut Conn) -> Result<(), Refusal> {
        let half_closed = conn.half_closed;
        let Phase::Sse(sse) = &mut conn.phase else {
            return Ok(());
        };
        let ends = half_closed || self.stopping || self.now_ms >= sse.ends_ms;
        if sse.started && ends {
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
        let plain = sse.gap.is_none() && sse.cursor.is_none();
        // What was said last to another reader at this place holds as long as the tail is where it was.
        let said = self.pieces.iter().rev().find(|piece| {
            let event = &piece.event;
            let window = &event.window;
            plain
                && piece.stream == sse.stream.id
                && window.start == sse.position
                && event.gap.is_none()
                && event.cursor == current
                && event.chunked == sse.chunked
                && (!window.up_to_date
                    || (window.end == visible.tail && window.closed == visible.closed))
        });
        let event = match said {
            Some(piece) => piece.event,
            None => Event {
                window: self
                    .engine
                    .reading(&sse.stream)
                    .window(sse.position, SSE_WINDOW_BYTES)?,
                gap: sse.gap,
                cursor: sse.cursor.unwrap_or(current),
                chunked: sse.chunked,
            },
        };
        let window = &event.window;
        if said.is_none() && window.end - window.start > SSE_PIECE_BYTES {
            self.engine
                .check_files(&sse.stream, window.start, window.end)
                .map_err(|error| self.engine.read_failed(&sse.stream, error))?;
        }
        sse.under_way = Some(UnderWay {
            event,
            from: window.start,
            to: window.start,
            before: SSE_PIECE_BYTES,
            sent: 0,
            kept: None,
            // All bytes are sent, and yet there is something to be told: an epoch that begins here.
            at_boundary: window.end == visible.tail && !window.up_to_date,
        });
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
        let start = self.engine.reading(&sse.stream).start(start)?;
        (sse.position, sse.gap) = (start.position, start.gap);
        Ok(())
    }

    /// Ends the event stream; the connection itself may go on.
    pub fn end_sse(&mut self, conn: &mut Conn) {
        let Phase::Sse(sse) = std::mem::replace(&mut conn.phase, Phase::Request) else {
            return;
        };
        self.unregister(&sse.stream, conn.token);
        self.engine.metrics.sse_subscribers.sub(1);
        conn.loading = false;
        if sse.chunked {
            conn.output.extend_from_slice(b"0\r\n\r\n");
        }
        self.after_answer(conn);
    }

    /// The clock has come to this subscriber: say something, or let it reconnect after its time.
    pub fn tick_sse(&mut self, conn: &mut Conn) {
        let Phase::Sse(sse) = &conn.phase else { return };
        let under_way = sse.under_way.is_some() || conn.unsent() > 0;
        if under_way && self.stopping {
            // The event is sent to its end first.
        } else if under_way {
            // Nothing was taken for a whole interval: the reader does not read.
            self.give_up(conn);
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
    pub fn sse_deadline(&self, sse: &Sse) -> u64 {
        let quiet = self.now_ms + self.engine.config.sse_keepalive_ms;
        quiet.min(sse.ends_ms.max(self.now_ms + 1))
    }
}

#[cfg(test)]
#[path = "live_tests.rs"]
mod tests;
