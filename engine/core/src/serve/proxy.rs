//! The way to the control plane: a request goes whole over a private unix socket, its answer comes back whole.
//!
//! Bounded in size, number and time; what has arrived counts as held for its client (`budget`). The reactor never waits: an upstream is one more socket in its epoll.
//!
//! Invariants
//! - `I-PROXY-1` A request has its slot, and its body counts, until the control plane has closed its side or its time is
//!   up, also when the client has left: the control plane is shown the end of its input, and closes when it comes to it. If
//!   leaving alone gave the slot back, clients that come and go could queue any number of requests there. What goes on
//!   behind a closed side has bounds of its own (`control/lanes.py`).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::error::ErrorCode;
use crate::limits::{
    CONNECTION_FREE_BYTES, PROXY_CONCURRENT_MAX, PROXY_LARGE_BYTES, PROXY_LARGE_MAX,
    PROXY_RESPONSE_MAX_BYTES, PROXY_TIMEOUT_MS,
};
use crate::refusal::Refusal;
use crate::serve::budget::{Arriving, Reserved};
use crate::serve::conn::{Conn, Phase};
use crate::serve::http::{ChunkDecoder, Head, Method};
use crate::serve::reactor::{Flow, KIND_UPSTREAM, Reactor};
use crate::serve::respond::{self, Reply};
use crate::serve::route::is_subscriptions;
use crate::serve::sys;
use crate::shard::engine::Undone;

const DROPPED: [&str; 13] = [
    "cross-origin-resource-policy",
    "connection",
    "keep-alive",
    "proxy-connection",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "content-length",
    "date",
    "server",
    "x-content-type-options",
];

/// Requests under way to the control plane.
pub struct Upstreams {
    socket_path: Option<String>,
    entries: Vec<Option<Upstream>>,
    next_generation: u64,
}

struct Upstream {
    socket: OwnedFd,
    token: u64,
    /// Who is to be answered; `None` if it has left.
    conn: Option<u64>,
    request: Vec<u8>,
    /// Its body is large: those leave most slots to others.
    large: bool,
    /// The control plane has the body, too, until it has answered.
    _reserved: Reserved,
    sent: usize,
    response: Vec<u8>,
    arriving: Arriving,
    cors: bool,
    head_only: bool,
    only_reads: bool,
    deadline_ms: u64,
}

/// How far an answer has come.
enum Exchanged {
    Some,
    Everything,
    /// There is no room for the rest.
    TooMuch,
}

impl Upstreams {
    pub fn new(socket_path: Option<String>) -> Upstreams {
        Upstreams {
            socket_path,
            entries: Vec::new(),
            next_generation: 1,
        }
    }

    fn count_large(&self) -> usize {
        let entries = self.entries.iter().flatten();
        entries.filter(|entry| entry.large).count()
    }

    fn take(&mut self, token: u64) -> Option<Upstream> {
        let slot = self.entries.get_mut((token & 0xffff_ffff) as usize)?;
        if slot.as_ref()?.token == token {
            slot.take()
        } else {
            None
        }
    }

    fn put(&mut self, upstream: Upstream) {
        let index = (upstream.token & 0xffff_ffff) as usize;
        self.entries[index] = Some(upstream);
    }
}

impl Reactor {
    /// Hands a request to the control plane.
    pub fn forward(&mut self, conn: &mut Conn, head: &Head<'_>, body: &[u8]) -> Flow {
        let cors = self.is_shared(head);
        if head.method == Method::Options && is_subscriptions(head.path) {
            let reply = self.reply_for(conn, head);
            if cors {
                respond::preflight(&mut conn.output, &reply);
            } else {
                respond::begin(&mut conn.output, 204, &reply);
                respond::end_empty(&mut conn.output, 204);
            }
            return Flow::Done;
        }
        if self.engine.ending.load(Ordering::Acquire) {
            return self.answer_undone(conn, head, Undone::refused(ErrorCode::ShuttingDown));
        }
        match self.begin_upstream(conn, head, body, cors) {
            Ok(()) => {
                self.engine.metrics.control_requests.add(1);
                conn.phase = Phase::Proxied;
                if conn.half_closed {
                    self.probe(conn);
                }
                Flow::Done
            }
            Err(error) => {
                let detail = format!("The control plane does not respond: {error}.");
                self.answer_undone(
                    conn,
                    head,
                    Undone::refused(Refusal::with(ErrorCode::ControlUnavailable, detail)),
                )
            }
        }
    }

    fn begin_upstream(
        &mut self,
        conn: &mut Conn,
        head: &Head<'_>,
        body: &[u8],
        cors: bool,
    ) -> io::Result<()> {
        let path = self
            .upstreams
            .socket_path
            .clone()
            .ok_or_else(|| io::Error::other("it is not running"))?;
        let large = body.len() > PROXY_LARGE_BYTES;
        if large && self.upstreams.count_large() >= PROXY_LARGE_MAX {
            return Err(io::Error::other(
                "too many requests with large bodies are in progress",
            ));
        }
        let index = match self.upstreams.entries.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.upstreams.entries.len() >= PROXY_CONCURRENT_MAX => {
                return Err(io::Error::other("too many requests are in progress"));
            }
            None => {
                self.upstreams.entries.push(None);
                self.upstreams.entries.len() - 1
            }
        };
        let socket = sys::connect_unix(&path)?;
        let generation = self.upstreams.next_generation & 0xff_ffff;
        self.upstreams.next_generation += 1;
        let token = (KIND_UPSTREAM << 56) | generation << 32 | index as u64;
        let upstream = Upstream {
            socket,
            deadline_ms: self.now_ms + PROXY_TIMEOUT_MS,
            token,
            conn: Some(conn.token),
            request: render_request(head, body),
            large,
            _reserved: Reserved::of(conn, &self.engine.metrics),
            sent: 0,
            response: Vec::new(),
            arriving: Arriving::new(&self.engine.metrics),
            cors,
            head_only: head.method == Method::Head,
            only_reads: matches!(head.method, Method::Get | Method::Head),
        };
        self.epoll.add(
            upstream.socket.as_raw_fd(),
            (libc::EPOLLIN | libc::EPOLLOUT) as u32,
            token,
        )?;
        self.arm_upstream(token, self.now_ms + PROXY_TIMEOUT_MS);
        self.upstreams.put(upstream);
        Ok(())
    }

    pub fn upstream_event(&mut self, token: u64) {
        let Some(mut upstream) = self.upstreams.take(token) else {
            return;
        };
        match self.exchange(&mut upstream) {
            Ok(Exchanged::Some) => self.upstreams.put(upstream),
            Ok(Exchanged::Everything) => self.deliver(upstream),
            Ok(Exchanged::TooMuch) => {
                // It is here whole or not at all, and there is nothing to read it again from.
                let detail = "Too many responses are waiting for clients that do not read them.";
                let refusal = Refusal::with(ErrorCode::ServerBusy, detail);
                self.deliver_refusal(&upstream, refusal);
            }
            Err(error) => {
                let detail = format!("The control plane's response was cut short: {error}.");
                self.deliver_refusal(&upstream, self.cut_short(&upstream, detail));
            }
        }
    }

    /// Moves bytes both ways.
    fn exchange(&mut self, upstream: &mut Upstream) -> io::Result<Exchanged> {
        let fd = upstream.socket.as_raw_fd();
        while upstream.sent < upstream.request.len() {
            match sys::send(fd, &upstream.request[upstream.sent..], false) {
                Ok(count) => {
                    upstream.sent += count;
                    if upstream.sent == upstream.request.len() {
                        self.epoll
                            .modify(fd, libc::EPOLLIN as u32, upstream.token)?;
                    }
                }
                Err(error) if sys::would_block(&error) => break,
                // It answers without having read everything; the answer is what counts.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    upstream.sent = upstream.request.len();
                }
                Err(error) => return Err(error),
            }
        }
        loop {
            match sys::receive(fd, &mut self.piece) {
                Ok(0) => return Ok(Exchanged::Everything),
                Ok(_) if upstream.conn.is_none() => {}
                Ok(count) if upstream.response.len() + count > PROXY_RESPONSE_MAX_BYTES => {
                    return Err(io::Error::other("its response is too long"));
                }
                Ok(count) => {
                    upstream.response.extend_from_slice(&self.piece[..count]);
                    if upstream.response.len() > CONNECTION_FREE_BYTES {
                        if !self.room_for_more(upstream.arriving.counted()) {
                            return Ok(Exchanged::TooMuch);
                        }
                        upstream.arriving.grow(upstream.response.capacity());
                    }
                }
                Err(error) if sys::would_block(&error) => return Ok(Exchanged::Some),
                Err(error) => return Err(error),
            }
        }
    }

    fn deliver(&mut self, upstream: Upstream) {
        let Some(mut conn) = upstream.conn.and_then(|token| self.take(token)) else {
            return;
        };
        let reply = Reply {
            date: &self.date,
            cors: upstream.cors,
            keep_alive: conn.keep_alive,
            head_only: upstream.head_only,
            control: !upstream.cors,
        };
        let start = conn.output.len();
        if render_response(&mut conn.output, &upstream.response, &reply).is_none() {
            conn.output.truncate(start);
            let detail = "The control plane's response was incomplete.";
            let refusal = self.cut_short(&upstream, detail.into());
            respond::problem(&mut conn.output, &refusal, &reply);
        }
        self.proxied_is_done(conn);
    }

    /// What becomes of a request whose answer does not come. A stop promises that nothing of what it refuses was done.
    fn cut_short(&self, upstream: &Upstream, detail: String) -> Refusal {
        let code = match self.engine.ending.load(Ordering::Acquire) {
            false => ErrorCode::ControlUnavailable,
            true if upstream.only_reads => ErrorCode::ShuttingDown,
            true => ErrorCode::OutcomeUnknown,
        };
        Refusal::with(code, detail)
    }

    fn deliver_refusal(&mut self, upstream: &Upstream, refusal: Refusal) {
        let Some(mut conn) = upstream.conn.and_then(|token| self.take(token)) else {
            return;
        };
        let reply = Reply {
            date: &self.date,
            cors: upstream.cors,
            keep_alive: conn.keep_alive,
            head_only: upstream.head_only,
            control: !upstream.cors,
        };
        respond::problem(&mut conn.output, &refusal, &reply);
        self.proxied_is_done(conn);
    }

    fn proxied_is_done(&mut self, mut conn: Box<Conn>) {
        conn.phase = Phase::Request;
        self.after_answer(&mut conn);
        self.put_back(conn);
    }

    pub fn upstream_timeout(&mut self, token: u64) {
        let Some(upstream) = self.upstreams.take(token) else {
            return;
        };
        if self.now_ms < upstream.deadline_ms {
            // The wheel looks early at what lies farther ahead than one turn.
            self.arm_upstream(token, upstream.deadline_ms);
            self.upstreams.put(upstream);
            return;
        }
        self.deliver_refusal(&upstream, ErrorCode::ControlTimeout.into());
    }

    /// The client has left: what has not been sent of its request is not sent any more, and nobody waits for the answer.
    pub fn forget_upstream(&mut self, conn: u64) {
        let found = self
            .upstreams
            .entries
            .iter()
            .flatten()
            .find(|entry| entry.conn == Some(conn))
            .map(|entry| entry.token);
        let Some(mut upstream) = found.and_then(|token| self.upstreams.take(token)) else {
            return;
        };
        if upstream.sent == 0 {
            return; // The control plane has nothing of it.
        }
        upstream.conn = None;
        upstream.request = Vec::new();
        upstream.response = Vec::new();
        upstream.arriving = Arriving::new(&self.engine.metrics);
        let fd = upstream.socket.as_raw_fd();
        sys::shutdown_write(fd);
        if self
            .epoll
            .modify(fd, libc::EPOLLIN as u32, upstream.token)
            .is_ok()
        {
            self.upstreams.put(upstream);
        }
    }
}

fn is_dropped(name: &[u8]) -> bool {
    DROPPED
        .iter()
        .any(|dropped| name.eq_ignore_ascii_case(dropped.as_bytes()))
}

fn render_request(head: &Head<'_>, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(512 + body.len());
    out.extend_from_slice(head.method_name);
    out.push(b' ');
    out.extend_from_slice(head.path);
    if let Some(query) = head.query {
        out.push(b'?');
        out.extend_from_slice(query);
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
    for (name, value) in head.raw_headers().filter(|(name, _)| !is_dropped(name)) {
        out.extend_from_slice(name);
        out.extend_from_slice(b": ");
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }
    respond::header(&mut out, "Connection", b"close");
    respond::number_header(&mut out, "Content-Length", body.len() as u64);
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    out
}

/// The control plane's answer under our own common headers; `None` if it is not a whole response.
fn render_response(out: &mut Vec<u8>, response: &[u8], reply: &Reply<'_>) -> Option<()> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(head_len) = parsed.parse(response).ok()? else {
        return None;
    };
    let status = parsed.code?;
    let mut length = None;
    let mut chunked = false;
    respond::begin(out, status, reply);
    for header in parsed.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            length = std::str::from_utf8(header.value)
                .ok()?
                .parse::<usize>()
                .ok();
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = header.value.eq_ignore_ascii_case(b"chunked");
        } else if !is_dropped(header.name.as_bytes()) {
            respond::header(out, header.name, header.value);
        }
    }
    let raw = &response[head_len..];
    let mut decoded = Vec::new();
    let body = if chunked {
        let progress = ChunkDecoder::new(PROXY_RESPONSE_MAX_BYTES as u64)
            .decode(raw, &mut decoded)
            .ok()?;
        progress.done.then_some(decoded.as_slice())?
    } else {
        // An answer to HEAD names the length of what it does not send.
        if !reply.head_only && length.is_some_and(|length| length != raw.len()) {
            return None;
        }
        raw
    };
    if status != 204 && status != 304 {
        let named = if reply.head_only {
            length.unwrap_or(0)
        } else {
            body.len()
        };
        respond::number_header(out, "Content-Length", named as u64);
    }
    out.extend_from_slice(b"\r\n");
    if !reply.head_only && status != 204 && status != 304 {
        out.extend_from_slice(body);
    }
    Some(())
}
