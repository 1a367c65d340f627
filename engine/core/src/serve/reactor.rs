//! The event loop of one reactor thread.
//!
//! A round: take events, answer requests into output buffers, commit (itself, or by waking the commit thread),
//! open gates, wake live readers, send. Acknowledgements leave before fan-out begins.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::error::{ErrorCode, Refusal};
use crate::limits::{
    EVENTS_MAX, HEAD_MAX_BYTES, OUTPUT_PAUSE_BYTES, PIPELINE_MAX, PROXY_REQUEST_MAX_BYTES, RECEIVE_BYTES, SEND_PIECE_BYTES,
};
use crate::model::StreamId;
use crate::serve::conn::{ChunkedBody, Conn, Phase};
use crate::serve::http::{ChunkDecoder, Framing, Head, HttpError, Known, Method, Parsed, parse_head};
use crate::serve::listener::Listener;
use crate::serve::live::SharedFrame;
use crate::serve::proxy::Upstreams;
use crate::serve::respond::{self, Reply};
use crate::serve::route::{Route, check_control_origin, route};
use crate::serve::sys::{self, Epoll};
use crate::serve::time::http_date;
use crate::serve::wheel::Wheel;
use crate::shard::engine::{Engine, Undone};
use crate::shard::write::WriteScratch;
use crate::stream::handle::Stream;

/// Kinds of tokens, in their top byte.
const KIND_LISTENER: u64 = 0;
const KIND_MAILBOX: u64 = 1;
const KIND_CONN: u64 = 2;
pub const KIND_UPSTREAM: u64 = 3;
const KIND_SHIFT: u32 = 56;

/// A reactor syncs by itself only while a sync is this short.
const INLINE_SYNC_MAX_US: u64 = 3_000;
/// Rounds of gathering before a reactor commits by itself.
const GATHER_ROUNDS: u32 = 4;
const BODY_RESERVE_BYTES: usize = 64 * 1024;
const LINGER_MS: u64 = 1_000;

/// What became of a request.
pub enum Flow {
    /// Answered (or handed over); the next one may come.
    Done,
    /// Not yet: look again after the next commit.
    Wait,
}

pub struct Reactor {
    pub number: usize,
    pub engine: Arc<Engine>,
    pub epoll: Epoll,
    listener: Arc<Listener>,
    listening: bool,
    pub connections: Vec<Option<Box<Conn>>>,
    free: Vec<usize>,
    next_generation: u64,
    wheel: Wheel,
    pub now_ms: u64,
    pub date: String,
    date_second: u64,
    pub stopping: bool,
    stop_deadline_ms: u64,
    receive: Vec<u8>,
    pub piece: Vec<u8>,
    pub wire: Vec<u8>,
    pub write_scratch: WriteScratch,
    /// Connections with closed gates, in order of commit number.
    parked: VecDeque<(u64, u64)>,
    /// Connections whose front request waits for a commit.
    waiting: Vec<u64>,
    watchers: HashMap<StreamId, Vec<u64>>,
    woken: Vec<Arc<Stream>>,
    pub flush_list: Vec<u64>,
    pub shared_frame: Option<SharedFrame>,
    pub upstreams: Upstreams,
    pub round_has_reads: bool,
    due: Vec<u64>,
}

impl Reactor {
    pub fn new(number: usize, engine: Arc<Engine>, listener: Arc<Listener>, control_socket: Option<String>) -> std::io::Result<Reactor> {
        let epoll = Epoll::new()?;
        let interest = (libc::EPOLLIN | libc::EPOLLEXCLUSIVE) as u32;
        epoll.add(listener.descriptor(), interest, KIND_LISTENER << KIND_SHIFT)?;
        epoll.add(engine.shard.mailboxes[number].descriptor(), libc::EPOLLIN as u32, KIND_MAILBOX << KIND_SHIFT)?;
        let now_ms = engine.now_ms();
        Ok(Reactor {
            number,
            epoll,
            listener,
            listening: true,
            connections: Vec::new(),
            free: Vec::new(),
            next_generation: 1,
            wheel: Wheel::new(now_ms),
            now_ms,
            date: http_date(now_ms),
            date_second: now_ms / 1000,
            stopping: false,
            stop_deadline_ms: u64::MAX,
            receive: vec![0; RECEIVE_BYTES],
            piece: vec![0; SEND_PIECE_BYTES],
            wire: Vec::new(),
            write_scratch: WriteScratch::default(),
            parked: VecDeque::new(),
            waiting: Vec::new(),
            watchers: HashMap::new(),
            woken: Vec::new(),
            flush_list: Vec::new(),
            shared_frame: None,
            upstreams: Upstreams::new(control_socket),
            round_has_reads: false,
            due: Vec::new(),
            engine,
        })
    }

    /// Runs until the engine stops. An error here is one of epoll itself.
    pub fn run(&mut self) -> std::io::Result<()> {
        let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        loop {
            let count = self.epoll.wait(&mut events, self.timeout_ms())?;
            self.read_clock();
            self.handle_events(&events[..count]);
            self.gather_and_commit(&mut events)?;
            self.settle();
            self.run_timers();
            self.flush_all();
            if self.stopping && self.may_stop() {
                self.close_everything();
                return Ok(());
            }
        }
    }

    fn timeout_ms(&self) -> i32 {
        if self.stopping { 10 } else { self.wheel.tick_ms() as i32 }
    }

    fn read_clock(&mut self) {
        self.now_ms = self.engine.now_ms();
        if self.now_ms / 1000 != self.date_second {
            self.date_second = self.now_ms / 1000;
            self.date = http_date(self.now_ms);
        }
        if !self.stopping && self.engine.stopping.load(std::sync::atomic::Ordering::Acquire) {
            self.begin_stop();
        }
    }

    fn handle_events(&mut self, events: &[libc::epoll_event]) {
        for event in events {
            let (token, ready) = (event.u64, event.events);
            match token >> KIND_SHIFT {
                KIND_LISTENER => self.accept_all(),
                KIND_MAILBOX => self.engine.shard.mailboxes[self.number].clear(),
                KIND_UPSTREAM => self.upstream_event(token),
                _ => self.connection_event(token, ready),
            }
        }
    }

    /// Commits what was staged: by itself when that is cheapest for everybody, else by the commit thread.
    fn gather_and_commit(&mut self, events: &mut [libc::epoll_event]) -> std::io::Result<()> {
        for _ in 0..GATHER_ROUNDS {
            if !self.has_staged() {
                return Ok(());
            }
            if !self.may_commit_inline() {
                self.engine.shard.kick();
                return Ok(());
            }
            let count = self.epoll.wait(events, 0)?;
            if count == 0 {
                break;
            }
            self.handle_events(&events[..count]);
        }
        if self.may_commit_inline() {
            if self.engine.shard.try_commit(self.number).is_none() {
                self.engine.shard.kick();
            }
        } else if self.has_staged() {
            self.engine.shard.kick();
        }
        Ok(())
    }

    fn has_staged(&self) -> bool {
        self.engine.shard.open().is_ok_and(|open| !open.is_empty() || open.needs_sync)
    }

    fn may_commit_inline(&self) -> bool {
        let quick = self.engine.shard.last_sync_us() < INLINE_SYNC_MAX_US;
        quick && !self.round_has_reads && self.engine.shard.open().is_ok_and(|open| !open.is_empty() && open.all_wait_for_sync)
    }

    /// Lets out what the log has reached and looks again at what waited for it.
    fn settle(&mut self) {
        self.round_has_reads = false;
        let mailbox = &self.engine.shard.mailboxes[self.number];
        mailbox.set_waiting(!self.parked.is_empty() || !self.waiting.is_empty());
        let synced = self.engine.shard.synced();
        if self.engine.shard.failed() {
            self.fail_parked();
        }
        while self.parked.front().is_some_and(|(sequence, _)| *sequence <= synced) {
            let Some((_, token)) = self.parked.pop_front() else { break };
            if let Some(mut conn) = self.take(token) {
                conn.open_gates(synced);
                self.put_back(conn);
            }
        }
        for token in std::mem::take(&mut self.waiting) {
            if let Some(mut conn) = self.take(token) {
                self.resume(&mut conn);
                self.put_back(conn);
            }
        }
        self.flush_all();
        self.wake_readers();
    }

    fn wake_readers(&mut self) {
        let mut woken = std::mem::take(&mut self.woken);
        self.engine.shard.mailboxes[self.number].take_woken(&mut woken);
        for stream in woken.drain(..) {
            let tokens = self.watchers.get(&stream.id).cloned().unwrap_or_default();
            for token in tokens {
                if let Some(mut conn) = self.take(token) {
                    match conn.phase {
                        Phase::LongPoll(_) => self.finish_poll(&mut conn, false),
                        Phase::Sse(_) => self.pump_sse(&mut conn),
                        _ => {}
                    }
                    self.flush(&mut conn);
                    self.put_back_flushed(conn);
                }
            }
        }
        self.woken = woken;
    }

    fn fail_parked(&mut self) {
        for (_, token) in std::mem::take(&mut self.parked) {
            if let Some(mut conn) = self.take(token) {
                if conn.drop_gated() {
                    conn.keep_alive = false;
                    let reply = Reply { date: &self.date, cors: true, keep_alive: false, head_only: false, control: false };
                    respond::problem(&mut conn.output, &ErrorCode::OutcomeUnknown.into(), &reply);
                    self.begin_close(&mut conn);
                }
                self.put_back(conn);
            }
        }
    }

    // ---- connections -----------------------------------------------------------------------------------

    fn accept_all(&mut self) {
        for _ in 0..256 {
            match sys::accept(self.listener.descriptor()) {
                Ok(socket) => self.admit(socket),
                Err(error) if sys::would_block(&error) => return,
                Err(error) => {
                    // Out of descriptors or memory: the backlog keeps the clients, the next round tries again.
                    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS)) {
                        self.engine.metrics.connections_refused.add(1);
                    }
                    return;
                }
            }
        }
    }

    fn admit(&mut self, socket: std::os::fd::OwnedFd) {
        use std::os::fd::AsRawFd;
        let metrics = &self.engine.metrics;
        if metrics.connections.get() as usize >= self.engine.config.connections_max || self.stopping {
            metrics.connections_refused.add(1);
            let code = if self.stopping { ErrorCode::ShuttingDown } else { ErrorCode::TooManyConnections };
            let mut out = Vec::new();
            let reply = Reply { date: &self.date, cors: true, keep_alive: false, head_only: false, control: false };
            respond::problem(&mut out, &code.into(), &reply);
            // A fresh socket takes this much; if not, closing says the same.
            if sys::send(socket.as_raw_fd(), &out, false).is_ok() {
                sys::shutdown_write(socket.as_raw_fd());
            }
            return;
        }
        metrics.connections.add(1);
        let index = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let token = (KIND_CONN << KIND_SHIFT) | (self.next_generation & 0xff_ffff) << 32 | index as u64;
        self.next_generation += 1;
        let mut conn = Box::new(Conn::new(socket, token));
        conn.interest = (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
        conn.deadline_ms = self.now_ms + self.engine.config.header_timeout_ms;
        if self.epoll.add(conn.descriptor(), conn.interest, token).is_err() {
            self.free.push(index);
            self.engine.metrics.connections.sub(1);
            return;
        }
        self.arm(&mut conn);
        self.connections[index] = Some(conn);
    }

    /// Takes a connection out of its place to work on it; `None` if it is gone.
    pub fn take(&mut self, token: u64) -> Option<Box<Conn>> {
        let slot = self.connections.get_mut((token & 0xffff_ffff) as usize)?;
        if slot.as_ref()?.token == token { slot.take() } else { None }
    }

    /// Puts it back, flushed later in the round; a dead one is closed instead.
    pub fn put_back(&mut self, mut conn: Box<Conn>) {
        if conn.dead {
            return self.close(conn);
        }
        if !conn.in_flush_list && (conn.has_sendable() || !matches!(conn.phase, Phase::Request | Phase::Waiting(_))) {
            conn.in_flush_list = true;
            self.flush_list.push(conn.token);
        }
        self.update_interest(&mut conn);
        self.arm(&mut conn);
        let index = (conn.token & 0xffff_ffff) as usize;
        self.connections[index] = Some(conn);
    }

    pub fn close(&mut self, mut conn: Box<Conn>) {
        match std::mem::replace(&mut conn.phase, Phase::Closing) {
            Phase::LongPoll(poll) => {
                self.unregister(&poll.stream, conn.token);
                self.engine.metrics.long_polls.sub(1);
            }
            Phase::Sse(sse) => {
                self.unregister(&sse.stream, conn.token);
                self.engine.metrics.sse_subscribers.sub(1);
            }
            Phase::Proxied => self.forget_upstream(conn.token),
            _ => {}
        }
        self.release_body(&mut conn);
        self.engine.metrics.connections.sub(1);
        self.free.push((conn.token & 0xffff_ffff) as usize);
        // Dropping the socket takes it out of epoll.
    }

    fn release_body(&self, conn: &mut Conn) {
        if conn.reserved > 0 {
            self.engine.metrics.inflight_bytes.sub(conn.reserved);
            conn.reserved = 0;
        }
    }

    fn update_interest(&mut self, conn: &mut Conn) {
        let reading = match conn.phase {
            Phase::Request | Phase::Chunked(_) => conn.unsent() < OUTPUT_PAUSE_BYTES && conn.gate_count() < PIPELINE_MAX,
            // Only to see it leave; what it pipelines meanwhile stays in the socket.
            Phase::LongPoll(_) | Phase::Sse(_) => conn.input.len() < HEAD_MAX_BYTES,
            Phase::Closing => true,
            Phase::Waiting(_) | Phase::Sending(_) | Phase::Proxied => false,
        };
        let mut interest = if conn.half_closed { 0 } else { libc::EPOLLRDHUP as u32 };
        if reading {
            interest |= libc::EPOLLIN as u32;
        }
        if conn.blocked {
            interest |= libc::EPOLLOUT as u32;
        }
        if interest != conn.interest {
            conn.interest = interest;
            if self.epoll.modify(conn.descriptor(), interest, conn.token).is_err() {
                conn.dead = true;
            }
        }
    }

    fn connection_event(&mut self, token: u64, ready: u32) {
        let Some(mut conn) = self.take(token) else { return };
        if ready & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0 {
            conn.dead = true;
        }
        if ready & libc::EPOLLOUT as u32 != 0 {
            conn.blocked = false;
            self.flush(&mut conn);
        }
        if !conn.dead && ready & libc::EPOLLIN as u32 != 0 {
            self.receive(&mut conn);
        } else if ready & libc::EPOLLRDHUP as u32 != 0 && conn.interest & libc::EPOLLIN as u32 == 0 {
            self.peer_is_done(&mut conn);
        }
        self.put_back(conn);
    }

    /// The peer sends nothing more. Waiting readers leave; a reply under way is still finished.
    fn peer_is_done(&mut self, conn: &mut Conn) {
        if matches!(conn.phase, Phase::LongPoll(_) | Phase::Sse(_) | Phase::Closing) {
            conn.dead = true;
        } else {
            // Asked for once only: being level-triggered it would come for ever.
            conn.half_closed = true;
            conn.keep_alive = false;
        }
    }

    fn receive(&mut self, conn: &mut Conn) {
        let mut buffer = std::mem::take(&mut self.receive);
        match sys::receive(conn.descriptor(), &mut buffer) {
            Ok(0) => self.end_of_input(conn),
            Ok(count) => {
                if !matches!(conn.phase, Phase::Closing) {
                    self.take_input(conn, &buffer[..count]);
                }
            }
            Err(error) if sys::would_block(&error) => {}
            Err(_) => conn.dead = true,
        }
        self.receive = buffer;
    }

    fn end_of_input(&mut self, conn: &mut Conn) {
        let unfinished = conn.gate_count() > 0 || conn.unsent() > 0;
        if unfinished && matches!(conn.phase, Phase::Request) {
            // A half-closed client still gets its answers.
            self.begin_close(conn);
        } else {
            conn.dead = true;
        }
    }

    // ---- requests --------------------------------------------------------------------------------------

    /// Handles what is there: straight from the receive buffer where nothing is kept, else from the input.
    fn take_input(&mut self, conn: &mut Conn, fresh: &[u8]) {
        if conn.input.is_empty() && matches!(conn.phase, Phase::Request | Phase::Chunked(_)) {
            let used = self.requests(conn, fresh);
            conn.input.extend_from_slice(&fresh[used.min(fresh.len())..]);
        } else {
            conn.input.extend_from_slice(fresh);
            self.work_on_input(conn);
        }
        if conn.needed > conn.input.len() {
            conn.input.reserve_exact(conn.needed - conn.input.len());
        }
    }

    pub fn work_on_input(&mut self, conn: &mut Conn) {
        if conn.needed > conn.input.len() {
            conn.deadline_ms = self.now_ms + self.engine.config.body_timeout_ms;
            return;
        }
        let input = std::mem::take(&mut conn.input);
        let used = self.requests(conn, &input);
        conn.input = input;
        if used >= conn.input.len() {
            conn.input = Vec::new();
        } else {
            conn.input.drain(..used);
        }
    }

    /// Looks again at a connection whose front request had to wait.
    fn resume(&mut self, conn: &mut Conn) {
        let Phase::Waiting(kept) = std::mem::replace(&mut conn.phase, Phase::Request) else { return };
        conn.open_gates(self.engine.shard.synced());
        if let Some(chunked) = kept {
            conn.phase = Phase::Chunked(chunked);
        }
        self.work_on_input(conn);
    }

    /// Answers requests in order as long as they are whole. Returns how many bytes were used up.
    fn requests(&mut self, conn: &mut Conn, data: &[u8]) -> usize {
        let mut at = 0;
        loop {
            if conn.unsent() > OUTPUT_PAUSE_BYTES || conn.gate_count() >= PIPELINE_MAX {
                self.wait_for_commit(conn, None);
                return at;
            }
            match &mut conn.phase {
                Phase::Request => {}
                Phase::Chunked(_) => {
                    let Some(used) = self.chunked_request(conn, &data[at..]) else { return data.len() };
                    at += used;
                    if !matches!(conn.phase, Phase::Request) {
                        return at;
                    }
                    continue;
                }
                _ => return at,
            }
            if at >= data.len() {
                conn.deadline_ms = self.now_ms + self.engine.config.idle_timeout_ms;
                return at;
            }
            match self.one_request(conn, &data[at..]) {
                Some(used) => at += used,
                None => return at,
            }
        }
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
                    conn.deadline_ms = self.now_ms + self.engine.config.header_timeout_ms;
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
            Framing::None => self.whole_request(conn, &head, &[]).then_some(head.head_len),
            Framing::Length(length) if length > limit => {
                self.refuse_and_close(conn, Some(&head), ErrorCode::PayloadTooLarge.into());
                Some(data.len())
            }
            Framing::Length(length) => {
                let total = head.head_len + length as usize;
                if data.len() < total {
                    return self.await_body(conn, &head, total);
                }
                self.whole_request(conn, &head, &data[head.head_len..total]).then_some(total)
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
                conn.deadline_ms = self.now_ms + self.engine.config.body_timeout_ms;
                Some(head.head_len)
            }
        }
    }

    fn body_limit(&self, head: &Head<'_>) -> u64 {
        let control = head.path.starts_with(b"/-/") || head.path.starts_with(b"/v1/stream/__ds");
        if control { PROXY_REQUEST_MAX_BYTES as u64 } else { self.engine.config.append_max_bytes as u64 }
    }

    /// The body is still arriving: make room for it, within the global bound.
    fn await_body(&mut self, conn: &mut Conn, head: &Head<'_>, total: usize) -> Option<usize> {
        if total > BODY_RESERVE_BYTES && conn.reserved == 0 {
            let metrics = &self.engine.metrics;
            if metrics.inflight_bytes.get() + total as u64 > self.engine.config.inflight_bytes_max {
                let refusal = Refusal::with(ErrorCode::ServerBusy, "Too many request bytes are under way.");
                self.refuse_and_close(conn, Some(head), refusal);
                return None;
            }
            conn.reserved = total as u64;
            metrics.inflight_bytes.add(conn.reserved);
        }
        self.offer_continue(conn, head);
        conn.needed = total;
        conn.deadline_ms = self.now_ms + self.engine.config.body_timeout_ms;
        None
    }

    fn offer_continue(&mut self, conn: &mut Conn, head: &Head<'_>) {
        if head.expect_continue && !conn.continued {
            conn.continued = true;
            conn.output.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
    }

    /// Feeds a chunked body. `None`: everything was used and more is needed.
    fn chunked_request(&mut self, conn: &mut Conn, data: &[u8]) -> Option<usize> {
        let Phase::Chunked(mut chunked) = std::mem::replace(&mut conn.phase, Phase::Request) else { return Some(0) };
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
            conn.reserved += grown;
            self.engine.metrics.inflight_bytes.add(grown);
            if self.engine.metrics.inflight_bytes.get() > self.engine.config.inflight_bytes_max {
                let refusal = Refusal::with(ErrorCode::ServerBusy, "Too many request bytes are under way.");
                self.refuse_and_close(conn, None, refusal);
                return Some(data.len());
            }
        }
        if !chunked.complete {
            conn.deadline_ms = self.now_ms + self.engine.config.body_timeout_ms;
            conn.phase = Phase::Chunked(chunked);
            return None;
        }
        let mut scanned = 0;
        match parse_head(&chunked.head, &mut scanned, HEAD_MAX_BYTES) {
            Ok(Parsed::Complete(head)) => {
                if !self.whole_request(conn, &head, &chunked.body) && matches!(conn.phase, Phase::Waiting(_)) {
                    conn.phase = Phase::Waiting(Some(chunked));
                }
            }
            _ => self.refuse_bytes(conn, HttpError::BadRequest("the head changed")),
        }
        Some(used)
    }

    /// A request is there in full. `false`: it has to wait and stays at the front.
    fn whole_request(&mut self, conn: &mut Conn, head: &Head<'_>, body: &[u8]) -> bool {
        let writes = matches!(head.method, Method::Post | Method::Put | Method::Delete);
        if !writes && conn.gate_count() > 0 {
            // A read behind a write sees it, so it runs after the write's acknowledgement.
            self.wait_for_commit(conn, None);
            return false;
        }
        conn.keep_alive = head.keep_alive && !self.stopping;
        match self.dispatch(conn, head, body) {
            Flow::Wait => {
                self.wait_for_commit(conn, None);
                return false;
            }
            Flow::Done => {}
        }
        self.engine.metrics.requests.add(1);
        self.release_body(conn);
        conn.needed = 0;
        conn.continued = false;
        if !conn.keep_alive && matches!(conn.phase, Phase::Request) {
            self.begin_close(conn);
        }
        true
    }

    fn wait_for_commit(&mut self, conn: &mut Conn, kept: Option<Box<ChunkedBody>>) {
        conn.phase = Phase::Waiting(kept);
        self.waiting.push(conn.token);
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
            Route::Stream(path) => match head.method {
                Method::Post => self.post(conn, head, &path, body),
                Method::Get => self.get(conn, head, &path),
                Method::Put => self.put(conn, head, &path, body),
                Method::Head => self.head(conn, head, &path),
                Method::Delete => self.delete(conn, head, &path),
                _ => self.answer_undone(conn, head, Undone::refused(ErrorCode::MethodNotAllowed)),
            },
            Route::Preflight => {
                let reply = self.reply_for(conn, head);
                respond::preflight(&mut conn.output, &reply);
                Flow::Done
            }
            Route::Health | Route::Ready => self.health(conn, head),
            Route::Metrics => self.metrics(conn, head),
            Route::Subscriptions => self.forward(conn, head, body),
            Route::Control => {
                let loopback = self.listener.address.ip().is_loopback();
                match check_control_origin(head, loopback) {
                    Ok(()) => self.forward(conn, head, body),
                    Err(refusal) => self.answer_undone(conn, head, Undone::refused(refusal)),
                }
            }
        }
    }

    fn health(&mut self, conn: &mut Conn, head: &Head<'_>) -> Flow {
        let trouble = self.engine.shard.trouble();
        let (status, text) = match trouble {
            None => (200, "ok"),
            Some(what) => (503, what),
        };
        let reply = self.reply_for(conn, head);
        respond::begin(&mut conn.output, status, &reply);
        if status == 503 {
            respond::header(&mut conn.output, "Retry-After", b"1");
        }
        respond::header(&mut conn.output, "Cache-Control", b"no-store");
        respond::end_body(&mut conn.output, "application/json", format!("{{\"status\":\"{text}\"}}").as_bytes(), &reply);
        Flow::Done
    }

    fn metrics(&mut self, conn: &mut Conn, head: &Head<'_>) -> Flow {
        let mut body = Vec::with_capacity(8192);
        self.engine.metrics.render(&mut body);
        let reply = self.reply_for(conn, head);
        respond::begin(&mut conn.output, 200, &reply);
        respond::header(&mut conn.output, "Cache-Control", b"no-store");
        respond::end_body(&mut conn.output, "text/plain; version=0.0.4; charset=utf-8", &body, &reply);
        Flow::Done
    }

    // ---- replies ---------------------------------------------------------------------------------------

    pub fn reply_for(&self, conn: &Conn, head: &Head<'_>) -> Reply<'_> {
        Reply {
            date: &self.date,
            // Cached answers must serve pages too, so reads always carry the headers.
            cors: head.path.starts_with(b"/v1/") && (head.method == Method::Get || head.get(Known::Origin).is_some()),
            keep_alive: conn.keep_alive,
            head_only: head.method == Method::Head,
            control: !head.path.starts_with(b"/v1/"),
        }
    }

    /// Holds a rendered reply back until the log has reached `gate`.
    pub fn hold(&mut self, conn: &mut Conn, start: usize, gate: u64) {
        if gate == 0 || gate <= self.engine.shard.synced() {
            return;
        }
        conn.close_gate(start, gate);
        match self.parked.back_mut() {
            Some((sequence, token)) if *token == conn.token => *sequence = (*sequence).max(gate),
            _ => {
                // The queue is in order of commit numbers; a reply about older state waits with the newest.
                let newest = self.parked.back().map_or(gate, |(sequence, _)| gate.max(*sequence));
                self.parked.push_back((newest, conn.token));
            }
        }
    }

    pub fn answer_undone(&mut self, conn: &mut Conn, head: &Head<'_>, undone: Undone) -> Flow {
        match undone {
            Undone::Wait => Flow::Wait,
            Undone::Refused { refusal, gate } => {
                self.engine.metrics.refusals.add(1);
                let start = conn.output.len();
                let reply = Reply { cors: head.path.starts_with(b"/v1/"), ..self.reply_for(conn, head) };
                respond::problem(&mut conn.output, &refusal, &reply);
                self.hold(conn, start, gate);
                Flow::Done
            }
        }
    }

    /// Bytes that are no request: say so and close, because where the next one begins is unknown.
    fn refuse_bytes(&mut self, conn: &mut Conn, error: HttpError) {
        let code = match error {
            HttpError::HeadTooLarge => ErrorCode::HeadTooLarge,
            HttpError::UriTooLong => ErrorCode::UriTooLong,
            HttpError::BodyTooLarge => ErrorCode::PayloadTooLarge,
            HttpError::VersionNotSupported => ErrorCode::VersionNotSupported,
            HttpError::NotImplemented(_) => ErrorCode::NotImplemented,
            HttpError::ExpectationFailed => ErrorCode::ExpectationFailed,
            HttpError::BadRequest(_) => ErrorCode::BadRequest,
        };
        self.refuse_and_close(conn, None, Refusal::with(code, error.reason()));
    }

    pub fn refuse_and_close(&mut self, conn: &mut Conn, head: Option<&Head<'_>>, refusal: Refusal) {
        self.engine.metrics.refusals.add(1);
        conn.keep_alive = false;
        let head_only = head.is_some_and(|head| head.method == Method::Head);
        let reply = Reply { date: &self.date, cors: true, keep_alive: false, head_only, control: false };
        respond::problem(&mut conn.output, &refusal, &reply);
        self.begin_close(conn);
    }

    /// An answer that took its time is complete: on to the next request, or to the end.
    pub fn after_answer(&mut self, conn: &mut Conn) {
        if !matches!(conn.phase, Phase::Request) {
            return;
        }
        conn.deadline_ms = self.now_ms + self.engine.config.idle_timeout_ms;
        if !conn.keep_alive {
            self.begin_close(conn);
        } else if !conn.input.is_empty() {
            self.work_on_input(conn);
        }
    }

    /// Sends what is left, then lets the peer finish reading before the socket goes.
    pub fn begin_close(&mut self, conn: &mut Conn) {
        self.release_body(conn);
        conn.phase = Phase::Closing;
        conn.input = Vec::new();
        conn.needed = 0;
        conn.deadline_ms = self.now_ms + LINGER_MS.max(self.engine.config.send_timeout_ms.min(5_000));
    }

    // ---- readers ---------------------------------------------------------------------------------------

    pub fn register(&mut self, stream: &Arc<Stream>, token: u64) {
        self.watchers.entry(stream.id).or_default().push(token);
    }

    pub fn unregister(&mut self, stream: &Arc<Stream>, token: u64) {
        let Some(tokens) = self.watchers.get_mut(&stream.id) else { return };
        if let Some(at) = tokens.iter().position(|known| *known == token) {
            tokens.swap_remove(at);
        }
        if tokens.is_empty() {
            self.watchers.remove(&stream.id);
            let _state = stream.lock();
            stream.unwatch(self.number);
        }
    }

    // ---- time and end ----------------------------------------------------------------------------------

    fn arm(&mut self, conn: &mut Conn) {
        if conn.deadline_ms < conn.armed_ms {
            conn.armed_ms = self.wheel.arm(conn.token, conn.deadline_ms);
        }
    }

    fn run_timers(&mut self) {
        let mut due = std::mem::take(&mut self.due);
        self.wheel.take_due(self.now_ms, &mut due);
        for token in due.drain(..) {
            if token >> KIND_SHIFT == KIND_UPSTREAM {
                self.upstream_timeout(token);
            } else if let Some(mut conn) = self.take(token) {
                conn.armed_ms = u64::MAX;
                if self.now_ms >= conn.deadline_ms {
                    self.deadline(&mut conn);
                }
                self.put_back(conn);
            }
        }
        self.due = due;
    }

    pub fn arm_upstream(&mut self, token: u64, at_ms: u64) {
        self.wheel.arm(token, at_ms);
    }

    fn deadline(&mut self, conn: &mut Conn) {
        match &conn.phase {
            Phase::LongPoll(_) => self.finish_poll(conn, true),
            Phase::Sse(_) => self.tick_sse(conn),
            Phase::Waiting(_) | Phase::Request if conn.blocked => self.give_up(conn),
            // The log or the control plane is slow, not the client.
            Phase::Waiting(_) | Phase::Proxied => conn.deadline_ms = self.now_ms + 1000,
            Phase::Closing => conn.dead = true,
            Phase::Sending(_) => self.give_up(conn),
            Phase::Request | Phase::Chunked(_) if conn.gate_count() > 0 => conn.deadline_ms = self.now_ms + 1000,
            Phase::Request if conn.unsent() > 0 => self.give_up(conn),
            Phase::Request if conn.input.is_empty() => conn.dead = true,
            Phase::Request | Phase::Chunked(_) => {
                self.engine.metrics.timeouts.add(1);
                self.refuse_and_close(conn, None, ErrorCode::RequestTimeout.into());
            }
        }
    }

    fn give_up(&mut self, conn: &mut Conn) {
        self.engine.metrics.timeouts.add(1);
        conn.dead = true;
    }

    fn begin_stop(&mut self) {
        self.stopping = true;
        self.stop_deadline_ms = self.now_ms + 700;
        if self.listening {
            self.listening = false;
            // Failing means that it is out already.
            if self.epoll.remove(self.listener.descriptor()).is_err() {
                self.engine.metrics.connections_refused.add(0);
            }
        }
        let tokens: Vec<u64> = self.connections.iter().flatten().map(|conn| conn.token).collect();
        for token in tokens {
            let Some(mut conn) = self.take(token) else { continue };
            match &conn.phase {
                Phase::LongPoll(_) => self.finish_poll(&mut conn, false),
                Phase::Sse(_) => {
                    conn.keep_alive = false;
                    self.tick_sse(&mut conn);
                }
                _ => {}
            }
            conn.keep_alive = false;
            self.put_back(conn);
        }
    }

    /// Whether nobody is owed an answer any more, or the time for it is up.
    fn may_stop(&self) -> bool {
        let owed = |conn: &Conn| conn.gate_count() > 0 || conn.unsent() > 0 || matches!(conn.phase, Phase::Waiting(_) | Phase::Sending(_) | Phase::Proxied);
        self.now_ms >= self.stop_deadline_ms || !self.connections.iter().flatten().any(|conn| owed(conn))
    }

    fn close_everything(&mut self) {
        let tokens: Vec<u64> = self.connections.iter().flatten().map(|conn| conn.token).collect();
        for token in tokens {
            if let Some(conn) = self.take(token) {
                sys::shutdown_write(conn.descriptor());
                self.close(conn);
            }
        }
    }
}
