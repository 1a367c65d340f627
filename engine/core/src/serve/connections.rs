//! The connections of a reactor: accepted, kept, watched, closed.

use crate::error::ErrorCode;
use crate::limits::{OUTPUT_PAUSE_BYTES, PIPELINE_MAX, TIGHT_RECEIVE_BYTES};
use crate::refusal::Refusal;
use crate::serve::conn::{Conn, Phase};
use crate::serve::reactor::{KIND_CONN, KIND_SHIFT, Reactor};
use crate::serve::respond::{self, Reply};
use crate::serve::sys;

/// How long a reactor without descriptors leaves new clients in the backlog.
const ACCEPT_PAUSE_MS: u64 = 100;

/// How long a socket is left alone that takes nothing although the kernel says that it would.
const REST_MS: u64 = 100;

impl Reactor {
    pub fn accept_all(&mut self) {
        for _ in 0..256 {
            match sys::accept(self.listener.descriptor()) {
                Ok(socket) => self.admit(socket),
                Err(error) if sys::would_block(&error) => return,
                Err(_) => {
                    // Out of descriptors or memory. The backlog keeps the clients; looking again at once would
                    // only burn the processor.
                    self.engine.metrics.connections_refused.add(1);
                    self.pause_accepting();
                    return;
                }
            }
        }
    }

    fn pause_accepting(&mut self) {
        if self.listening && self.epoll.remove(self.listener.descriptor()).is_ok() {
            self.listening = false;
            self.accept_again_ms = self.now_ms + ACCEPT_PAUSE_MS;
        }
    }

    pub fn resume_accepting(&mut self) {
        if !self.listening && !self.stopping && self.now_ms >= self.accept_again_ms {
            self.listening = self.watch_listener().is_ok();
        }
    }

    fn admit(&mut self, socket: std::os::fd::OwnedFd) {
        use std::os::fd::AsRawFd;
        let metrics = &self.engine.metrics;
        if metrics.connections.get() as usize >= self.engine.config.connections_max || self.stopping
        {
            metrics.connections_refused.add(1);
            let code = if self.stopping {
                ErrorCode::ShuttingDown
            } else {
                ErrorCode::TooManyConnections
            };
            let mut out = Vec::new();
            let reply = Reply {
                date: &self.date,
                cors: true,
                keep_alive: false,
                head_only: false,
                control: false,
            };
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
        let token =
            (KIND_CONN << KIND_SHIFT) | (self.next_generation & 0xff_ffff) << 32 | index as u64;
        self.next_generation += 1;
        let mut conn = Box::new(Conn::new(socket, token));
        conn.interest = (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
        conn.deadline_ms = self.now_ms + self.engine.config.header_timeout_ms;
        if self
            .epoll
            .add(conn.descriptor(), conn.interest, token)
            .is_err()
        {
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
        if slot.as_ref()?.token == token {
            slot.take()
        } else {
            None
        }
    }

    /// Puts it back, flushed later in the round; a dead one is closed instead.
    pub fn put_back(&mut self, mut conn: Box<Conn>) {
        if conn.dead {
            return self.close(conn);
        }
        if !conn.in_flush_list
            && (conn.has_sendable() || !matches!(conn.phase, Phase::Request | Phase::Waiting(_)))
        {
            conn.in_flush_list = true;
            self.flush_list.push(conn.token);
        }
        self.count_held(&mut conn);
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
            Phase::Working(asker) => self.pipeline.forget(&asker),
            _ => {}
        }
        self.release_body(&mut conn);
        self.count_nothing(&mut conn);
        self.engine.metrics.connections.sub(1);
        self.free.push((conn.token & 0xffff_ffff) as usize);
        // Dropping the socket takes it out of epoll.
    }

    pub fn release_body(&self, conn: &mut Conn) {
        if conn.reserved > 0 {
            self.engine.metrics.inflight_bytes.sub(conn.reserved);
            conn.reserved = 0;
        }
    }

    fn update_interest(&mut self, conn: &mut Conn) {
        // That the peer is done is asked for once only: being level-triggered it would come for ever.
        let mut interest = if conn.half_closed {
            0
        } else {
            libc::EPOLLRDHUP as u32
        };
        if wants_input(conn) {
            interest |= libc::EPOLLIN as u32;
        }
        if conn.blocked && conn.rests_until_ms == 0 {
            interest |= libc::EPOLLOUT as u32;
        }
        if conn.goes_on {
            // It will want the same again soon (`I-TURN-1`).
            interest |= conn.interest & (libc::EPOLLIN | libc::EPOLLOUT) as u32;
        }
        if interest != conn.interest {
            conn.interest = interest;
            if self
                .epoll
                .modify(conn.descriptor(), interest, conn.token)
                .is_err()
            {
                conn.dead = true;
            }
        }
    }

    pub fn connection_event(&mut self, token: u64, ready: u32) {
        let Some(mut conn) = self.take(token) else {
            return;
        };
        if ready & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0 {
            conn.dead = true;
        }
        if ready & libc::EPOLLOUT as u32 != 0 {
            let before = conn.left;
            conn.blocked = false;
            if !conn.goes_on {
                self.flush(&mut conn);
                if !conn.blocked {
                    self.answers_are_taken(&mut conn);
                } else if conn.left == before {
                    // Short of memory, the kernel says so for ever.
                    conn.rests_until_ms = self.now_ms + REST_MS;
                }
            }
        }
        if !conn.dead && ready & libc::EPOLLRDHUP as u32 != 0 && !conn.half_closed {
            self.peer_is_done(&mut conn);
        }
        if !conn.dead && ready & libc::EPOLLIN as u32 != 0 && wants_input(&conn) {
            self.receive(&mut conn);
        }
        self.put_back(conn);
    }

    /// The peer sends nothing more. What it has sent is answered, behind what is under way; nobody waits for news.
    fn peer_is_done(&mut self, conn: &mut Conn) {
        conn.half_closed = true;
        match conn.phase {
            Phase::LongPoll(_) => self.finish_poll(conn, true),
            Phase::Working(ref asker) => {
                self.pipeline.hasten(asker);
                self.probe(conn);
            }
            Phase::Proxied => self.probe(conn),
            // An event stream ends behind its event: that is for the sending to see.
            _ => {}
        }
    }

    fn receive(&mut self, conn: &mut Conn) {
        let mut buffer = std::mem::take(&mut self.receive);
        let mut left = buffer.len();
        loop {
            // What the next answer has no room behind waits in the socket, and not here.
            let portion = if self.room_for_bodies() {
                left
            } else {
                let of_body = conn.needed.saturating_sub(conn.input.len());
                left.min(of_body.max(TIGHT_RECEIVE_BYTES))
            };
            match sys::receive(conn.descriptor(), &mut buffer[..portion]) {
                Ok(0) => self.end_of_input(conn),
                Ok(count) => {
                    if !matches!(conn.phase, Phase::Closing) {
                        self.take_input(conn, &buffer[..count]);
                    }
                    left -= count;
                    let more = count == portion && left > 0 && !conn.dead && wants_input(conn);
                    if more && !self.turn_is_over(0) {
                        continue;
                    }
                }
                Err(error) if sys::would_block(&error) => {}
                Err(_) => conn.dead = true,
            }
            break;
        }
        self.receive = buffer;
    }

    /// Everything that the peer sent has been read, and every whole request answered: `wants_input` sees to that.
    fn end_of_input(&mut self, conn: &mut Conn) {
        conn.half_closed = true;
        conn.input_ended = true;
        let torn = match conn.phase {
            Phase::Chunked(_) => true,
            _ => !conn.input.is_empty(),
        };
        if torn {
            let detail = "The connection was closed in the middle of a request.";
            self.refuse_and_close(conn, None, Refusal::with(ErrorCode::BadRequest, detail));
        } else if conn.output_is_done() {
            conn.dead = true;
        } else if matches!(conn.phase, Phase::Request) {
            self.begin_close(conn);
        }
    }
}

/// Whether the connection is read from. What a client pipelines while it is not stays in the socket.
fn wants_input(conn: &Conn) -> bool {
    let takes_more = match conn.phase {
        Phase::Request | Phase::Chunked(_) => {
            !conn.paused && conn.unsent() < OUTPUT_PAUSE_BYTES && conn.gate_count() < PIPELINE_MAX
        }
        Phase::Closing => true,
        Phase::Waiting(_)
        | Phase::Sending(_)
        | Phase::LongPoll(_)
        | Phase::Sse(_)
        | Phase::Proxied
        | Phase::Working(_)
        | Phase::Handing(_) => false,
    };
    takes_more && !conn.input_ended
}
