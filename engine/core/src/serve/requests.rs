//! From bytes to requests to answers: framing, order, and what waits.

use crate::error::ErrorCode;
use crate::io::wanted;
use crate::limits::{
    CONNECTION_FREE_BYTES, COSTLY_BODY_BYTES, HEAD_MAX_BYTES, LARGE_WRITE_BYTES, LOG_PATIENCE_MS,
    PIPELINE_REQUEST_MAX_BYTES, PROXY_REQUEST_MAX_BYTES, STAGE_REQUEST_MAX_BYTES,
};
use crate::refusal::Refusal;
use crate::serve::conn::{ChunkedBody, Conn, Phase};
use crate::serve::http::{
    ChunkDecoder, Framing, Head, HttpError, Known, Method, Parsed, parse_head,
};
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::respond::{self, CONTINUE};
use crate::serve::route::{
    PipelineCall, Route, check_control_origin, is_pipeline, is_pipeline_read, is_subscriptions,
    route,
};
use crate::shard::damage::Condition;
use crate::shard::engine::Undone;

/// Bodies above this count against the global bound while they arrive.
const BODY_RESERVE_BYTES: usize = CONNECTION_FREE_BYTES;
/// Slower bodies run out of time.
const BODY_MIN_BYTES_PER_MS: u64 = 64;

impl Reactor {
    /// Handles what is there: straight from the receive buffer where nothing is kept, else from the input.
    pub fn take_input(&mut self, conn: &mut Conn, fresh: &[u8]) {
        if conn.input.is_empty() && matches!(conn.phase, Phase::Request | Phase::Chunked(_)) {
            let used = self.requests(conn, fresh).min(fresh.len());
            self.keep_input(conn, &fresh[used..]);
            self.submit_copied(conn, &fresh[..used]);
        } else if self.keep_input(conn, fresh) {
            self.work_on_input(conn);
        }
    }

    /// Keeps what has come. A large body counts with the memory that it takes, which grows with what has come of it, not with
    /// what was announced. `false`: there is no room for it.
    fn keep_input(&mut self, conn: &mut Conn, fresh: &[u8]) -> bool {
        let len = conn.input.len() + fresh.len();
        if conn.needed <= BODY_RESERVE_BYTES {
            conn.input.extend_from_slice(fresh);
            return true;
        }
        let capacity = conn.input.capacity();
        if len > capacity {
            let wanted = len.max((2 * capacity).min(conn.needed));
            conn.input.reserve_exact(wanted - conn.input.len());
        }
        conn.input.extend_from_slice(fresh);
        let grown = (conn.input.capacity() as u64).saturating_sub(conn.reserved);
        self.reserve(conn, grown)
    }

    /// Counts bytes of a body; who comes above the global bound by them is refused.
    fn reserve(&mut self, conn: &mut Conn, bytes: u64) -> bool {
        conn.reserved += bytes;
        self.engine.metrics.inflight_bytes.add(bytes);
        self.may_receive(conn, None, 0)
    }

    /// Whether the global bound leaves room for so many bytes of a body; who finds none is refused.
    fn may_receive(&mut self, conn: &mut Conn, head: Option<&Head<'_>>, bytes: u64) -> bool {
        let inflight = self.engine.metrics.inflight_bytes.get();
        if inflight + bytes <= self.engine.config.inflight_bytes_max {
            return true;
        }
        let refusal = Refusal::with(
            ErrorCode::ServerBusy,
            "Too many request bytes are being received at once.",
        );
        self.refuse_and_close(conn, head, refusal);
        false
    }

    pub fn work_on_input(&mut self, conn: &mut Conn) {
        if conn.needed > conn.input.len() {
            conn.deadline_ms = self.body_deadline(conn, conn.input.len());
            return;
        }
        let mut input = std::mem::take(&mut conn.input);
        let used = self.requests(conn, &input).min(input.len());
        if conn.job.is_some() || used == input.len() {
            conn.input = input.split_off(used);
            self.submit(conn, input);
        } else {
            input.drain(..used);
            conn.input = input;
        }
    }

    /// Looks again at a connection whose front request had to wait.
    pub fn resume(&mut self, conn: &mut Conn) {
        if !matches!(conn.phase, Phase::Waiting(_)) {
            return;
        }
        let Phase::Waiting(kept) = std::mem::replace(&mut conn.phase, Phase::Request) else {
            return;
        };
        let now_us = self.engine.doors.clock.monotonic_us();
        conn.open_gates(&self.engine.shard, &self.engine.metrics, now_us);
        if let Some(chunked) = kept {
            conn.phase = Phase::Chunked(chunked);
        }
        self.work_on_input(conn);
    }

    /// Goes on with a connection whose next request waited until output had left.
    pub fn unpause(&mut self, conn: &mut Conn) {
        conn.paused = false;
        self.work_on_input(conn);
    }

    /// Answers requests in order as long as they are whole and it is this connection's turn. Returns how many bytes were
    /// used up.
    fn requests(&mut self, conn: &mut Conn, data: &[u8]) -> usize {
        let mut at = 0;
        let mut answered = 0;
        loop {
            let takes_requests = matches!(conn.phase, Phase::Request | Phase::Chunked(_));
            if takes_requests && self.is_full(conn) {
                conn.paused = true;
                return at;
            }
            match &mut conn.phase {
                Phase::Request => {}
                // A few bytes of it may be many chunks.
                Phase::Chunked(_) if self.turn_is_over(0) => {
                    self.pause_for_others(conn);
                    return at;
                }
                Phase::Chunked(_) => {
                    let Some(used) = self.chunked_request(conn, &data[at..]) else {
                        return data.len();
                    };
                    at += used;
                    if !matches!(conn.phase, Phase::Request) {
                        return at;
                    }
                    continue;
                }
                _ => return at,
            }
            if at >= data.len() {
                self.wait_for_more(conn, self.engine.config.idle_timeout_ms);
                return at;
            }
            let asked =
                answered > 0 || self.is_costly(conn) || data.len() - at >= COSTLY_BODY_BYTES;
            if asked && self.turn_is_over(answered) {
                self.pause_for_others(conn);
                return at;
            }
            match self.one_request(conn, &data[at..]) {
                Some(used) => at += used,
                None => return at,
            }
            answered += 1;
        }
    }

    /// The client has so long for its next bytes; while it takes no answers, which keeps it from sending, that counts alone.
    fn wait_for_more(&self, conn: &mut Conn, patience_ms: u64) {
        if !conn.blocked {
            conn.deadline_ms = self.now_ms + patience_ms;
        }
    }

    /// What it had been waiting for all along counts from when it has taken its answers.
    pub fn answers_are_taken(&self, conn: &mut Conn) {
        let patience_ms = match conn.phase {
            Phase::Request if conn.unsent() > 0 => return,
            Phase::Request if conn.input.is_empty() => self.engine.config.idle_timeout_ms,
            Phase::Request => self.engine.config.header_timeout_ms,
            _ => return,
        };
        conn.deadline_ms = self.now_ms + patience_ms;
    }

    fn pause_for_others(&mut self, conn: &mut Conn) {
        conn.paused = true;
        self.go_on_later(conn);
    }

    /// Parses and answers the request at the front; `None` if it is not whole or has to wait.
    fn one_request(&mut self, conn: &mut Conn, data: &[u8]) -> Option<usize> {
        let first_look = conn.scanned == 0;
        let head = match parse_head(data, &mut conn.scanned, HEAD_MAX_BYTES) {
            Ok(Parsed::Complete(head)) => head,
            Ok(Parsed::Partial) => {
                conn.needed = 0;
                // Counted from the head's first byte, so that a drip of bytes does not stretch it.
                if first_look {
                    self.wait_for_more(conn, self.engine.config.header_timeout_ms);
                }
                return None;
            }
            Err(error) => {
                self.refuse_bytes(conn, error);
                return Some(data.len());
            }
        };
        let limit = self.body_limit(&head);
        match head.framing {
            Framing::None => self
                .whole_request(conn, &head, &[])
                .then_some(head.head_len),
            Framing::Length(length) if length > limit => {
                self.refuse_and_close(conn, Some(&head), ErrorCode::PayloadTooLarge.into());
                Some(data.len())
            }
            Framing::Length(length) => {
                let total = head.head_len + length as usize;
                if data.len() < total {
                    return self.await_body(conn, &head, total);
                }
                self.whole_request(conn, &head, &data[head.head_len..total])
                    .then_some(total)
            }
            Framing::Chunked => {
                self.offer_continue(conn, &head);
                let body = ChunkedBody {
                    head: data[..head.head_len].to_vec(),
                    body: Vec::new(),
                    decoder: ChunkDecoder::new(limit),
                    complete: false,
                };
                conn.phase = Phase::Chunked(Box::new(body));
                conn.deadline_ms = self.body_deadline(conn, 0);
                Some(head.head_len)
            }
        }
    }

    fn body_limit(&self, head: &Head<'_>) -> u64 {
        let control = head.path.starts_with(b"/-/") || is_subscriptions(head.path);
        if control {
            PROXY_REQUEST_MAX_BYTES as u64
        } else if head.path.starts_with(b"/v1/stage/") {
            STAGE_REQUEST_MAX_BYTES as u64
        } else if is_pipeline(head.path) {
            PIPELINE_REQUEST_MAX_BYTES as u64
        } else {
            self.engine.config.append_max_bytes as u64
        }
    }

    /// The body is still arriving. One that could not be taken whole now is not waited for.
    fn await_body(&mut self, conn: &mut Conn, head: &Head<'_>, total: usize) -> Option<usize> {
        let large = total > BODY_RESERVE_BYTES && conn.reserved == 0;
        if large && !self.may_receive(conn, Some(head), total as u64) {
            return None;
        }
        self.offer_continue(conn, head);
        conn.needed = total;
        conn.deadline_ms = self.body_deadline(conn, 0);
        None
    }

    fn offer_continue(&mut self, conn: &mut Conn, head: &Head<'_>) {
        if head.expect_continue && !conn.continued {
            conn.continued = true;
            conn.output.extend_from_slice(CONTINUE);
        }
    }

    /// Feeds a chunked body. `None`: everything was used and more is needed.
    fn chunked_request(&mut self, conn: &mut Conn, data: &[u8]) -> Option<usize> {
        let Phase::Chunked(mut chunked) = std::mem::replace(&mut conn.phase, Phase::Request) else {
            return Some(0);
        };
        let mut used = 0;
        if !chunked.complete {
            let before = chunked.body.capacity() as u64;
            match chunked.decoder.decode(data, &mut chunked.body) {
                Ok(progress) => {
                    used = progress.consumed;
                    chunked.complete = progress.done;
                }
                Err(error) => {
                    self.refuse_bytes(conn, error);
                    return Some(data.len());
                }
            }
            let grown = (chunked.body.capacity() as u64).saturating_sub(before);
            if !self.reserve(conn, grown) {
                return Some(data.len());
            }
        }
        if !chunked.complete {
            conn.deadline_ms = self.body_deadline(conn, chunked.body.len());
            conn.phase = Phase::Chunked(chunked);
            return None;
        }
        let mut scanned = 0;
        match parse_head(&chunked.head, &mut scanned, HEAD_MAX_BYTES) {
            Ok(Parsed::Complete(head)) => {
                if self.whole_request(conn, &head, &chunked.body) {
                    self.submit(conn, chunked.body);
                } else if matches!(conn.phase, Phase::Waiting(_)) {
                    conn.phase = Phase::Waiting(Some(chunked));
                } else if conn.paused {
                    conn.phase = Phase::Chunked(chunked);
                }
            }
            _ => self.refuse_bytes(conn, HttpError::BadRequest("the head changed")),
        }
        Some(used)
    }

    /// A request is there in full. `false`: it has to wait and stays at the front.
    fn whole_request(&mut self, conn: &mut Conn, head: &Head<'_>, body: &[u8]) -> bool {
        // A fork reads its source.
        let writes = matches!(head.method, Method::Post | Method::Put | Method::Delete)
            && !is_pipeline_read(head.path)
            && head.get(Known::StreamForkedFrom).is_none();
        if !writes && conn.gate_count() > 0 {
            // A read behind a write sees it, so it runs after the write's acknowledgement.
            self.wait_for_commit(conn, 0);
            return false;
        }
        if !writes && self.is_full_for_reads(conn) {
            conn.paused = true;
            return false;
        }
        // HTTP/1.0 clients expect to be told about keep-alive; closing says the same to all of them.
        conn.keep_alive = head.keep_alive && head.minor_version > 0 && !self.stopping;
        if conn.waiting_since_ms == 0 {
            conn.received_us = self.now_us;
        }
        conn.timing = head.get(Known::MillstreamTiming) == Some(b"1");
        if self.comes_behind(conn, body.len()) {
            self.wait_for_commit(conn, body.len());
            return false;
        }
        drop(wanted::take_noted());
        let noted = match self.dispatch(conn, head, body) {
            Flow::Done => None,
            Flow::Wait => Some(wanted::take_noted()),
        };
        match noted {
            None => {}
            Some(Some(wanted)) => {
                let busy = if self.waited_too_long(conn) {
                    "The disk made no progress while the request waited."
                } else if self.fetch_for(conn, wanted, false) {
                    conn.phase = Phase::Waiting(None);
                    return false;
                } else {
                    "Too many requests wait for the disk."
                };
                let refusal = Refusal::with(ErrorCode::ServerBusy, busy);
                self.answer_undone(conn, head, Undone::refused(refusal));
            }
            Some(None) if self.waits_in_vain(conn, body.len()) || self.engine.shard.failed() => {
                let refusal = Refusal::with(
                    ErrorCode::ServerBusy,
                    "The log made no progress while the request waited.",
                );
                self.answer_undone(conn, head, Undone::refused(refusal));
            }
            Some(None) => {
                self.wait_for_commit(conn, body.len());
                return false;
            }
        }
        self.engine.metrics.requests.add(1);
        self.release_body(conn);
        conn.needed = 0;
        conn.waiting_since_ms = 0;
        conn.body_since_ms = 0;
        conn.continued = false;
        if !conn.keep_alive && matches!(conn.phase, Phase::Request) {
            self.begin_close(conn);
        }
        true
    }

    /// Waiting has an end when nothing has moved for long.
    pub fn waited_too_long(&self, conn: &mut Conn) -> bool {
        if conn.waiting_since_ms == 0 {
            conn.waiting_since_ms = self.now_ms;
        }
        self.now_ms - conn.waiting_since_ms > LOG_PATIENCE_MS
    }

    /// When a body must be there: a fixed time, and more for every byte that has come. Counted from its start,
    /// so that a drip of bytes does not stretch it.
    fn body_deadline(&self, conn: &mut Conn, received: usize) -> u64 {
        if conn.body_since_ms == 0 {
            conn.body_since_ms = self.now_ms;
        }
        conn.body_since_ms
            + self.engine.config.body_timeout_ms
            + received as u64 / BODY_MIN_BYTES_PER_MS
    }

    fn dispatch(&mut self, conn: &mut Conn, head: &Head<'_>, body: &[u8]) -> Flow {
        if self.stopping {
            return self.answer_undone(conn, head, Undone::refused(ErrorCode::ShuttingDown));
        }
        let target = match route(head) {
            Ok(target) => target,
            Err(refusal) => return self.answer_undone(conn, head, Undone::refused(refusal)),
        };
        match target {
            Route::Stream(_) if takes_long(head, body) => {
                self.begin_job(conn, head, PipelineCall::Write(head.bytes().into()), body)
            }
            Route::Stream(path) => match head.method {
                Method::Post => self.post(conn, head, &path, body),
                Method::Get => self.get(conn, head, &path),
                Method::Put => self.put(conn, head, &path, body),
                Method::Head => self.head(conn, head, &path),
                Method::Delete => self.delete(conn, head, &path),
                _ => self.answer_undone(conn, head, Undone::refused(ErrorCode::MethodNotAllowed)),
            },
            Route::Pipeline(call) => {
                self.engine.metrics.pipeline_requests.add(1);
                self.begin_job(conn, head, call, body)
            }
            Route::Preflight => {
                let reply = self.reply_for(conn, head);
                respond::preflight(&mut conn.output, &reply);
                Flow::Done
            }
            Route::Health => self.health(conn, head, 200, "ok"),
            Route::Ready => match self.engine.condition() {
                Condition::Trouble(what) => self.health(conn, head, 503, what),
                condition => self.health(conn, head, 200, condition.name()),
            },
            Route::Metrics => self.metrics(conn, head),
            Route::Subscriptions | Route::Control => {
                let config = &self.engine.config;
                let guests: &[String] = match target {
                    Route::Subscriptions => &config.subscription_origins,
                    _ => &[],
                };
                let loopback = self.listener.address.ip().is_loopback();
                match check_control_origin(head, loopback, config.public_url.as_deref(), guests) {
                    Ok(()) => self.forward(conn, head, body),
                    Err(refusal) => self.answer_undone(conn, head, Undone::refused(refusal)),
                }
            }
        }
    }

    /// Alive is whoever answers; ready is whose log does its work, too.
    fn health(&mut self, conn: &mut Conn, head: &Head<'_>, status: u16, text: &str) -> Flow {
        let reply = self.reply_for(conn, head);
        respond::begin(&mut conn.output, status, &reply);
        if status == 503 {
            respond::header(&mut conn.output, "Retry-After", b"1");
        }
        respond::header(&mut conn.output, "Cache-Control", b"no-store");
        respond::end_body(
            &mut conn.output,
            "application/json",
            format!("{{\"status\":\"{text}\"}}").as_bytes(),
            &reply,
        );
        Flow::Done
    }

    fn metrics(&mut self, conn: &mut Conn, head: &Head<'_>) -> Flow {
        let mut body = Vec::with_capacity(8192);
        self.engine.metrics.render(&mut body);
        let reply = self.reply_for(conn, head);
        respond::begin(&mut conn.output, 200, &reply);
        respond::header(&mut conn.output, "Cache-Control", b"no-store");
        respond::end_body(
            &mut conn.output,
            "text/plain; version=0.0.4; charset=utf-8",
            &body,
            &reply,
        );
        Flow::Done
    }
}

/// Whether a write is a worker's. What a fork with a sub-offset takes along is known only when it is looked for.
fn takes_long(head: &Head<'_>, body: &[u8]) -> bool {
    let takes_along = || head.get(Known::StreamForkSubOffset).is_some();
    match head.method {
        Method::Post => body.len() >= LARGE_WRITE_BYTES,
        Method::Put => body.len() >= LARGE_WRITE_BYTES || takes_along(),
        _ => false,
    }
}
