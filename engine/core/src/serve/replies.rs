//! Replies of a reactor: held back until the log has reached them, refusals, and the end of a connection.

use crate::error::ErrorCode;
use crate::io::wanted;
use crate::model::{Gate, Stage};
use crate::refusal::Refusal;
use crate::serve::conn::{Conn, Measured, Phase};
use crate::serve::http::{Head, HttpError, Known, Method};
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::respond::{self, Reply};
use crate::serve::route::{is_listed, is_pipeline, is_subscriptions};
use crate::serve::timing::{self, TimingSlot};
use crate::shard::engine::Undone;
use crate::shard::times::CommitTimes;

impl Reactor {
    pub fn reply_for(&self, conn: &Conn, head: &Head<'_>) -> Reply<'_> {
        let shared = self.is_shared(head);
        Reply {
            date: &self.date,
            // Cached answers must serve pages too, so reads always carry the headers.
            cors: shared && (head.method == Method::Get || head.get(Known::Origin).is_some()),
            keep_alive: conn.keep_alive,
            head_only: head.method == Method::Head,
            control: !shared,
        }
    }

    /// Whether pages of other origins may read the answer: that of streams, and of subscriptions if the origin is
    /// named for them.
    pub fn is_shared(&self, head: &Head<'_>) -> bool {
        if !head.path.starts_with(b"/v1/") || is_pipeline(head.path) {
            return false;
        }
        let guests = &self.engine.config.subscription_origins;
        !is_subscriptions(head.path)
            || head
                .get(Known::Origin)
                .is_some_and(|origin| is_listed(origin, guests))
    }

    /// Holds a rendered reply back until the log has reached `gate`.
    pub fn hold(&mut self, conn: &mut Conn, start: usize, gate: Gate) {
        self.hold_append(conn, start, gate, None);
    }

    /// The same for an append, whose time is measured.
    pub fn hold_append(
        &mut self,
        conn: &mut Conn,
        start: usize,
        gate: Gate,
        append: Option<Measured>,
    ) {
        let shard = &self.engine.shard;
        let reached = shard.reached(gate);
        let gate = if reached { Gate::OPEN } else { gate };
        if conn.timing
            && let Some(at) = timing::insert(&mut conn.output, start)
        {
            conn.timings.push_back(TimingSlot {
                at,
                gate,
                received_us: conn.received_us,
            });
        }
        if reached {
            let now_us = self.engine.doors.clock.monotonic_us();
            if let Some(append) = append {
                self.engine
                    .metrics
                    .append_seconds
                    .observe(append.class, now_us.saturating_sub(append.received_us));
            }
            if let Some(slot) = conn.timings.pop_back_if(|slot| slot.gate.is_open()) {
                timing::fill(&mut conn.output, &slot, &CommitTimes::default(), now_us);
            }
            return;
        }
        conn.close_gate(start, gate, append);
        let parked = match gate.stage {
            Stage::Synced => &mut self.parked,
            Stage::Written | Stage::Applied => &mut self.parked_written,
        };
        match parked.back_mut() {
            Some((sequence, token)) if *token == conn.token => {
                *sequence = (*sequence).max(gate.sequence)
            }
            _ => {
                // The queue is in order of commit numbers; a reply about older state waits with the newest.
                let newest = parked
                    .back()
                    .map_or(gate.sequence, |(sequence, _)| gate.sequence.max(*sequence));
                parked.push_back((newest, conn.token));
            }
        }
    }

    pub fn answer_undone(&mut self, conn: &mut Conn, head: &Head<'_>, undone: Undone) -> Flow {
        if wanted::is_noted() {
            // Refused only because it must not wait for the disk here.
            return Flow::Wait;
        }
        match undone {
            Undone::Wait => Flow::Wait,
            Undone::Refused { refusal, gate } => {
                self.engine.metrics.refusals.add(1);
                let start = conn.output.len();
                let reply = Reply {
                    cors: self.is_shared(head),
                    ..self.reply_for(conn, head)
                };
                respond::problem(&mut conn.output, &refusal, &reply);
                self.hold(conn, start, gate);
                if matches!(head.method, Method::Get | Method::Head) {
                    conn.only_reads(start);
                }
                Flow::Done
            }
        }
    }

    /// Bytes that are no request: say so and close, because where the next one begins is unknown.
    pub fn refuse_bytes(&mut self, conn: &mut Conn, error: HttpError) {
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
        let reply = Reply {
            date: &self.date,
            cors: head.is_none_or(|head| self.is_shared(head)),
            keep_alive: false,
            head_only,
            control: false,
        };
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
        conn.paused = false;
        conn.loading = false;
        conn.input = Vec::new();
        conn.needed = 0;
        conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
    }
}
