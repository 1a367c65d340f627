//! The event loop of one reactor thread.
//!
//! A round: take events, answer requests into output buffers, commit (itself, or by waking the commit thread),
//! open gates, wake live readers, send. Acknowledgements leave before fan-out begins. What is much at once is done in
//! turns: a few milliseconds of it in each round.

use crate::report;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::error::ErrorCode;
use crate::limits::{
    EVENTS_MAX, INLINE_COMMIT_MAX_BYTES, LOG_PATIENCE_MS, RECEIVE_BYTES, SEND_PIECE_BYTES,
};
use crate::model::StreamId;
use crate::serve::conn::{Conn, Phase};
use crate::serve::events::Piece;
use crate::serve::listener::Listener;
use crate::serve::pipeline::pool::Pipeline;
use crate::serve::proxy::Upstreams;
use crate::serve::respond::{self, Reply};
use crate::serve::sys::{self, Epoll};
use crate::serve::time::http_date;
use crate::serve::turns::Turns;
use crate::serve::watchers::Watchers;
use crate::serve::wheel::Wheel;
use crate::shard::engine::Engine;
use crate::shard::write::WriteScratch;
use crate::stream::handle::Stream;

/// Kinds of tokens, in their top byte.
const KIND_LISTENER: u64 = 0;
const KIND_MAILBOX: u64 = 1;
pub const KIND_CONN: u64 = 2;
pub const KIND_UPSTREAM: u64 = 3;
pub const KIND_SHIFT: u32 = 56;

/// A reactor syncs by itself only where syncs have been this short.
const INLINE_SYNC_MAX_US: u64 = 3_000;
/// How long a stop waits for acknowledgements and the rest; for those that the log holds back as long as anything does.
const STOP_PATIENCE_MS: u64 = 700;
/// Connections that get their acknowledgements in one round while weak appends are about.
const ACKS_BESIDE_WEAK: usize = 16;
/// Rounds of gathering before a reactor commits by itself.
const GATHER_ROUNDS: u32 = 4;

/// What became of a request.
pub enum Flow {
    /// Answered (or handed over); the next one may come.
    Done,
    /// Not yet: look again after the next commit.
    Wait,
}

/// What a reactor does for the log by itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inline {
    /// Write and sync.
    Commit,
    Write,
}

pub struct Reactor {
    pub number: usize,
    pub engine: Arc<Engine>,
    pub epoll: Epoll,
    pub listener: Arc<Listener>,
    pub listening: bool,
    pub accept_again_ms: u64,
    pub connections: Vec<Option<Box<Conn>>>,
    pub free: Vec<usize>,
    pub next_generation: u64,
    pub wheel: Wheel,
    /// For timers: never steps.
    pub now_ms: u64,
    pub now_us: u64,
    /// For streams and dates.
    pub wall_ms: u64,
    pub date: String,
    pub date_second: u64,
    pub stopping: bool,
    pub stop_deadline_ms: u64,
    pub receive: Vec<u8>,
    pub piece: Vec<u8>,
    pub wire: Vec<u8>,
    pub write_scratch: WriteScratch,
    /// Connections with closed gates, in order of commit number: those that wait for the sync, and those that
    /// wait for the write.
    pub parked: VecDeque<(u64, u64)>,
    pub parked_written: VecDeque<(u64, u64)>,
    /// Those who let others go first, and those who wait for the log.
    pub turns: Turns,
    pub watchers: HashMap<StreamId, Watchers>,
    /// Streams that have changed, as they come, and those whose readers have not all been served since.
    pub changed: Vec<Arc<Stream>>,
    pub woken: VecDeque<StreamId>,
    pub flush_list: Vec<u64>,
    /// Pieces of events that were rendered last, for the next readers at the same place.
    pub pieces: VecDeque<Arc<Piece>>,
    pub upstreams: Upstreams,
    pub pipeline: Arc<Pipeline>,
    pub round_has_reads: bool,
    /// Whose time has come, and who has not been looked at since.
    due: VecDeque<u64>,
}

impl Reactor {
    pub fn new(
        number: usize,
        engine: Arc<Engine>,
        listener: Arc<Listener>,
        pipeline: Arc<Pipeline>,
        control_socket: Option<String>,
    ) -> std::io::Result<Reactor> {
        let epoll = Epoll::new()?;
        epoll.add(
            engine.shard.mailboxes[number].descriptor(),
            libc::EPOLLIN as u32,
            KIND_MAILBOX << KIND_SHIFT,
        )?;
        let now_us = engine.doors.clock.monotonic_us();
        let now_ms = now_us / 1000;
        let wall_ms = engine.now_ms();
        Ok(Reactor {
            number,
            epoll,
            listener,
            listening: false,
            accept_again_ms: 0,
            connections: Vec::new(),
            free: Vec::new(),
            next_generation: 1,
            wheel: Wheel::new(now_ms),
            now_ms,
            now_us,
            wall_ms,
            date: http_date(wall_ms),
            date_second: wall_ms / 1000,
            stopping: false,
            stop_deadline_ms: u64::MAX,
            receive: vec![0; RECEIVE_BYTES],
            piece: vec![0; SEND_PIECE_BYTES],
            wire: Vec::new(),
            write_scratch: WriteScratch::default(),
            parked: VecDeque::new(),
            parked_written: VecDeque::new(),
            turns: Turns::default(),
            watchers: HashMap::new(),
            changed: Vec::new(),
            woken: VecDeque::new(),
            flush_list: Vec::new(),
            pieces: VecDeque::new(),
            upstreams: Upstreams::new(control_socket),
            pipeline,
            round_has_reads: false,
            due: VecDeque::new(),
            engine,
        })
    }

    /// One listening socket for all reactors: the kernel wakes one of them per client.
    pub fn watch_listener(&self) -> std::io::Result<()> {
        let interest = (libc::EPOLLIN | libc::EPOLLEXCLUSIVE) as u32;
        self.epoll.add(
            self.listener.descriptor(),
            interest,
            KIND_LISTENER << KIND_SHIFT,
        )
    }

    /// Runs until the engine stops. An error here is one of epoll itself.
    pub fn run(&mut self) -> std::io::Result<()> {
        let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        loop {
            let count = self.epoll.wait(&mut events, self.timeout_ms())?;
            self.begin_round();
            self.resume_accepting();
            let going_on = self.turns.going_on();
            self.handle_events(&events[..count]);
            self.go_on(going_on);
            self.commit_and_settle(&mut events)?;
            self.wake_readers();
            self.run_timers();
            self.flush_all();
            if self.has_staged() {
                // Sending has let in more; nobody sleeps on it.
                self.engine.shard.kick();
            }
            if self.stopping && self.may_stop() {
                self.close_everything();
                return Ok(());
            }
        }
    }

    /// How long to sleep: not at all if sending has let in more work or the log has moved meanwhile.
    fn timeout_ms(&self) -> i32 {
        let shard = &self.engine.shard;
        self.say_what_is_parked();
        let reached = |parked: &VecDeque<(u64, u64)>, watermark: u64| {
            parked
                .front()
                .is_some_and(|(sequence, _)| *sequence <= watermark)
        };
        if reached(&self.parked, shard.synced())
            || reached(&self.parked_written, shard.written())
            || !self.flush_list.is_empty()
            || !self.woken.is_empty()
            || !self.due.is_empty()
            || self.turns.anybody_goes_on()
        {
            0
        } else if self.stopping {
            10
        } else {
            self.wheel.tick_ms() as i32
        }
    }

    /// What is looked at from here on has not come before this time.
    fn read_clock(&mut self) {
        self.now_us = self.engine.doors.clock.monotonic_us();
        self.now_ms = self.now_us / 1000;
        self.wall_ms = self.engine.now_ms();
        if self.wall_ms / 1000 != self.date_second {
            self.date_second = self.wall_ms / 1000;
            self.date = http_date(self.wall_ms);
        }
    }

    fn begin_round(&mut self) {
        self.read_clock();
        self.begin_turn(self.now_us);
        if !self.stopping
            && self
                .engine
                .stopping
                .load(std::sync::atomic::Ordering::Acquire)
        {
            self.begin_stop();
        }
    }

    fn handle_events(&mut self, events: &[libc::epoll_event]) {
        for event in events {
            let (token, ready) = (event.u64, event.events);
            match token >> KIND_SHIFT {
                KIND_CONN => self.connection_event(token, ready),
                KIND_LISTENER => self.accept_all(),
                KIND_MAILBOX => {
                    self.engine.shard.mailboxes[self.number].clear();
                    self.deliver_finished();
                    self.deliver_loaded();
                }
                _ => self.upstream_event(token),
            }
            self.note_cost(token);
        }
    }

    /// A commit may let waiting requests go on, which stage more: a few times over, then the next round.
    fn commit_and_settle(&mut self, events: &mut [libc::epoll_event]) -> std::io::Result<()> {
        for _ in 0..GATHER_ROUNDS {
            let done = self.gather_and_commit(events)?;
            if done {
                self.read_clock();
            }
            self.settle();
            if !done || !self.has_staged() {
                break;
            }
        }
        Ok(())
    }

    /// Commits what was staged: by itself when that is cheapest for everybody, else by the commit thread. Returns
    /// whether it did something itself.
    fn gather_and_commit(&mut self, events: &mut [libc::epoll_event]) -> std::io::Result<bool> {
        for _ in 0..GATHER_ROUNDS {
            if !self.has_staged() {
                return Ok(false);
            }
            match self.inline_work() {
                Some(Inline::Commit) => {}
                // Nobody gains by gathering more.
                Some(Inline::Write) => break,
                None => {
                    self.engine.shard.kick();
                    return Ok(false);
                }
            }
            let count = self.epoll.wait(events, 0)?;
            if count == 0 {
                break;
            }
            self.read_clock();
            self.handle_events(&events[..count]);
        }
        let shard = &self.engine.shard;
        let done = match self.inline_work() {
            Some(Inline::Commit) => shard.try_commit(self.number).is_some(),
            Some(Inline::Write) => {
                let wrote = shard.try_write(self.number).is_some();
                if wrote && !self.parked.is_empty() {
                    shard.kick();
                }
                wrote
            }
            None => false,
        };
        if !done && self.has_staged() {
            shard.kick();
        }
        Ok(done)
    }

    fn has_staged(&self) -> bool {
        self.engine.shard.open().is_ok_and(|open| !open.is_empty())
    }

    /// A request that waits for room looks again after every step of the log.
    fn say_what_is_parked(&self) {
        let waiting = self.turns.anybody_waits();
        self.engine.shard.mailboxes[self.number].set_waiting(
            waiting || !self.parked_written.is_empty(),
            waiting || !self.parked.is_empty(),
        );
    }

    /// What the reactor does itself. It syncs only where nobody with a weaker class could have to wait for
    /// that, writes where somebody waits for the write, and leaves what is large to the commit thread.
    fn inline_work(&self) -> Option<Inline> {
        let shard = &self.engine.shard;
        let (has_disk, weak) = match shard.open() {
            Ok(open) if !open.is_empty() && open.bytes.len() <= INLINE_COMMIT_MAX_BYTES => {
                (open.has_disk, open.weak_frames > 0)
            }
            _ => return None,
        };
        if has_disk {
            return Some(Inline::Write);
        }
        let quick = shard.usual_sync_us() < INLINE_SYNC_MAX_US;
        (quick && !weak && !self.round_has_reads && !shard.weak_is_recent())
            .then_some(Inline::Commit)
    }

    /// Lets out what the log has reached and looks again at what waited for it.
    fn settle(&mut self) {
        self.round_has_reads = false;
        self.say_what_is_parked();
        if self.engine.shard.failed() {
            self.fail_parked();
        }
        let (written, synced) = (self.engine.shard.written(), self.engine.shard.synced());
        let now_us = self.engine.doors.clock.monotonic_us();
        self.begin_turn(now_us);
        // A slow sync lets out hundreds at once. Weak appends that come meanwhile are not kept waiting for all of
        // them: the rest follows in the next rounds.
        let mut left = if self.engine.shard.weak_is_recent() {
            ACKS_BESIDE_WEAK
        } else {
            usize::MAX
        };
        while left > 0
            && let Some(token) = pop_reached(&mut self.parked_written, written)
                .or_else(|| pop_reached(&mut self.parked, synced))
        {
            left -= 1;
            if let Some(mut conn) = self.take(token) {
                conn.open_gates(&self.engine.shard, &self.engine.metrics, now_us);
                self.put_back(conn);
            }
        }
        self.look_again();
        self.flush_all();
    }

    fn fail_parked(&mut self) {
        let written = std::mem::take(&mut self.parked_written);
        for (_, token) in std::mem::take(&mut self.parked).into_iter().chain(written) {
            if let Some(mut conn) = self.take(token) {
                conn.open_gates(&self.engine.shard, &self.engine.metrics, self.now_us);
                if let Some(refusal) = conn.drop_gated() {
                    conn.keep_alive = false;
                    let reply = Reply {
                        date: &self.date,
                        cors: true,
                        keep_alive: false,
                        head_only: false,
                        control: false,
                    };
                    respond::problem(&mut conn.output, &refusal, &reply);
                    self.begin_close(&mut conn);
                }
                self.put_back(conn);
            }
        }
    }

    pub fn arm(&mut self, conn: &mut Conn) {
        let at_ms = match conn.rests_until_ms {
            0 => conn.deadline_ms,
            rests => conn.deadline_ms.min(rests),
        };
        if at_ms < conn.armed_ms {
            conn.armed_ms = self.wheel.arm(conn.token, at_ms);
        }
    }

    /// Looks at those whose time has come, for one turn: readers that came or were served together are due together.
    fn run_timers(&mut self) {
        self.wheel.take_due(self.now_ms, &mut self.due);
        if self.due.is_empty() {
            return;
        }
        self.begin_turn(self.engine.doors.clock.monotonic_us());
        let mut seen = 0;
        while let Some(token) = self.due.pop_front() {
            self.run_timer(token);
            seen += 1;
            if self.turn_is_over(seen) {
                return;
            }
        }
    }

    fn run_timer(&mut self, token: u64) {
        if token >> KIND_SHIFT == KIND_UPSTREAM {
            self.upstream_timeout(token);
        } else if let Some(mut conn) = self.take(token) {
            // Another entry will come for it later; this one is from an earlier deadline.
            let current = self.now_ms >= conn.armed_ms;
            if current {
                conn.armed_ms = u64::MAX;
                if self.now_ms >= conn.rests_until_ms {
                    conn.rests_until_ms = 0;
                }
            }
            if current && self.now_ms >= conn.deadline_ms {
                self.deadline(&mut conn);
                self.flush(&mut conn);
            }
            self.put_back_flushed(conn);
        }
    }

    pub fn arm_upstream(&mut self, token: u64, at_ms: u64) {
        self.wheel.arm(token, at_ms);
    }

    fn deadline(&mut self, conn: &mut Conn) {
        if conn.goes_on {
            // Others are served, and then it.
            conn.deadline_ms = self.now_ms + 1000;
            return;
        }
        if conn.blocked && self.still_takes(conn) {
            conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
            return;
        }
        if conn.loading && !conn.blocked {
            // The disk is slow, not the client. A request that has not begun to be answered need not wait for ever.
            conn.deadline_ms = self.now_ms + 1000;
            if matches!(conn.phase, Phase::Waiting(_)) && self.waited_too_long(conn) {
                conn.loading = false;
                self.resume(conn);
            }
            return;
        }
        match &conn.phase {
            Phase::LongPoll(_) => self.finish_poll(conn, true),
            Phase::Sse(_) => self.tick_sse(conn),
            Phase::Waiting(_) | Phase::Request if conn.blocked => self.give_up(conn),
            Phase::Chunked(_) if conn.paused && conn.blocked => self.give_up(conn),
            // The log, the control plane or a worker is slow, not the client.
            Phase::Waiting(_) | Phase::Proxied | Phase::Working(_) => {
                conn.deadline_ms = self.now_ms + 1000
            }
            Phase::Closing if conn.gate_count() > 0 => conn.deadline_ms = self.now_ms + 1000,
            Phase::Closing if conn.blocked => self.give_up(conn),
            Phase::Closing => conn.dead = true,
            Phase::Sending(_) | Phase::Handing(_) if conn.gate_count() > 0 => {
                conn.deadline_ms = self.now_ms + 1000
            }
            Phase::Sending(_) | Phase::Handing(_) => self.give_up(conn),
            Phase::Request | Phase::Chunked(_) if conn.gate_count() > 0 => {
                conn.deadline_ms = self.now_ms + 1000
            }
            Phase::Request if conn.unsent() > 0 => self.give_up(conn),
            Phase::Request if conn.input.is_empty() => conn.dead = true,
            Phase::Request | Phase::Chunked(_) => {
                self.engine.metrics.timeouts.add(1);
                self.refuse_and_close(conn, None, ErrorCode::RequestTimeout.into());
            }
        }
    }

    pub fn give_up(&mut self, conn: &mut Conn) {
        self.engine.metrics.timeouts.add(1);
        conn.dead = true;
    }

    fn begin_stop(&mut self) {
        self.stopping = true;
        self.stop_deadline_ms = self.now_ms + STOP_PATIENCE_MS;
        if std::mem::take(&mut self.listening)
            && let Err(error) = self.epoll.remove(self.listener.descriptor())
        {
            report!("the listening socket could not be taken out of polling: {error}");
        }
        let tokens: Vec<u64> = self
            .connections
            .iter()
            .flatten()
            .map(|conn| conn.token)
            .collect();
        for token in tokens {
            let Some(mut conn) = self.take(token) else {
                continue;
            };
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

    /// Whether nobody is owed an answer any more, or the time for it is up. A slow disk is waited for, slow clients are not.
    fn may_stop(&self) -> bool {
        let too_late = self.now_ms >= self.stop_deadline_ms + LOG_PATIENCE_MS;
        let waits_for_log = |conn: &Conn| conn.gate_count() > 0 && !too_late;
        let owed = |conn: &Conn| {
            let under_way = match &conn.phase {
                Phase::Waiting(_)
                | Phase::Sending(_)
                | Phase::Proxied
                | Phase::Working(_)
                | Phase::Handing(_) => true,
                Phase::Sse(sse) => sse.under_way.is_some(),
                _ => false,
            };
            under_way || conn.gate_count() > 0 || conn.unsent() > 0
        };
        let late = self.now_ms >= self.stop_deadline_ms;
        let mut connections = self.connections.iter().flatten();
        !connections.any(|conn| waits_for_log(conn) || (!late && owed(conn)))
    }

    fn close_everything(&mut self) {
        let tokens: Vec<u64> = self
            .connections
            .iter()
            .flatten()
            .map(|conn| conn.token)
            .collect();
        for token in tokens {
            if let Some(conn) = self.take(token) {
                sys::shutdown_write(conn.descriptor());
                self.close(conn);
            }
        }
    }
}

fn pop_reached(parked: &mut VecDeque<(u64, u64)>, watermark: u64) -> Option<u64> {
    parked
        .pop_front_if(|(sequence, _)| *sequence <= watermark)
        .map(|(_, token)| token)
}
