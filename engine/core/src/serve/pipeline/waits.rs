//! Questions to `/v1/tails` that wait for a change: one list, one thread, no polling.
//!
//! The thread sleeps until a change is rung or a deadline comes, gathers what has changed once for all who wait,
//! answers those whom it concerns or who are out of time, and rests for a while in proportion to what that has cost,
//! so that a busy server spends a bounded share of a core on those who wait.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::ErrorCode;
use crate::limits::{TAILS_WAITING_MAX, TAILS_WAITING_MAX_BYTES};
use crate::refusal::Refusal;
use crate::serve::pipeline::news::News;
use crate::serve::pipeline::pool::Pipeline;
use crate::serve::pipeline::tails::{self, Question};
use crate::shard::engine::Undone;

/// Least rest between two evaluations, and how many times what one has cost.
const REST_MIN: Duration = Duration::from_millis(3);
const REST_FACTOR: u32 = 10;
const REST_MAX: Duration = Duration::from_millis(500);

pub struct Waiting {
    question: Question,
    reactor: usize,
    conn: u64,
    deadline: Instant,
}

impl Pipeline {
    /// Answers a question, now or when it has something to say.
    pub fn ask(&self, reactor: usize, conn: u64, body: &[u8]) {
        let asked = Question::parse(&self.engine, &self.patterns, body).map_err(Undone::refused);
        let outcome = asked.and_then(|question| {
            let news = News::gather(&self.engine, std::iter::once(&question));
            let evaluated = tails::evaluate(&self.engine, &question, &news)?;
            Ok((question, evaluated))
        });
        match outcome {
            Ok((question, evaluated)) if !evaluated.is_news() && question.may_wait() => {
                let deadline = Instant::now() + Duration::from_millis(question.wait_ms);
                self.park(Waiting {
                    question,
                    reactor,
                    conn,
                    deadline,
                });
            }
            Ok((_, evaluated)) => {
                self.finish(reactor, conn, tails::render(&self.engine, &evaluated));
            }
            Err(undone) => self.finish(reactor, conn, Err(undone)),
        }
    }

    fn park(&self, waiting: Waiting) {
        let mut waits = self.waits.lock();
        let held = self.engine.metrics.pipeline_waiting_bytes.get();
        if waits.len() >= TAILS_WAITING_MAX || held > TAILS_WAITING_MAX_BYTES {
            drop(waits);
            let refusal = Refusal::with(
                ErrorCode::ServerBusy,
                "Too many requests are waiting for changes, or they are too large together; without wait_ms they are answered at once.",
            );
            return self.finish(waiting.reactor, waiting.conn, Err(Undone::refused(refusal)));
        }
        self.engine.shard.changes.set_awaited(true);
        waits.push(waiting);
        drop(waits);
        self.engine.metrics.pipeline_waiting.add(1);
        // What has changed between the evaluation and here is found by another look.
        self.engine.shard.changes.ring_now();
    }

    /// The client has left. Returns whether it was waiting.
    pub fn forget(&self, reactor: usize, conn: u64) -> bool {
        let mut waits = self.waits.lock();
        let before = waits.len();
        waits.retain(|waiting| (waiting.reactor, waiting.conn) != (reactor, conn));
        let gone = before - waits.len();
        self.engine.metrics.pipeline_waiting.sub(gone as u64);
        gone > 0
    }

    /// The client sends nothing more: what it waits for is answered with what there is.
    pub fn hasten(&self, reactor: usize, conn: u64) {
        let mut waits = self.waits.lock();
        let asked = |waiting: &&mut Waiting| (waiting.reactor, waiting.conn) == (reactor, conn);
        if let Some(waiting) = waits.iter_mut().find(asked) {
            waiting.deadline = Instant::now();
            self.engine.shard.changes.ring_now();
        }
    }

    /// The thread's loop; ends after [`Pipeline::stop`].
    pub fn watch(&self) {
        let changes = &self.engine.shard.changes;
        while !self.stopped() {
            let deadline = {
                let waits = self.waits.lock();
                if waits.is_empty() {
                    changes.set_awaited(false);
                }
                waits.iter().map(|waiting| waiting.deadline).min()
            };
            changes.wait(deadline);
            let began = Instant::now();
            self.look();
            self.rest((began.elapsed() * REST_FACTOR).clamp(REST_MIN, REST_MAX));
        }
    }

    /// Answers whoever has news or is out of time.
    fn look(&self) {
        let looked_at = std::mem::take(&mut *self.waits.lock());
        if looked_at.is_empty() {
            return;
        }
        let news = News::gather(
            &self.engine,
            looked_at.iter().map(|waiting| &waiting.question),
        );
        let mut kept = Vec::new();
        for mut waiting in looked_at {
            let over =
                Instant::now() >= waiting.deadline || self.engine.stopping.load(Ordering::Acquire);
            let outcome = match tails::evaluate(&self.engine, &waiting.question, &news) {
                Ok(evaluated) if !evaluated.is_news() && !over => {
                    // Nothing up to here is news to it, so that the next look need not go back farther.
                    waiting.question.since = Some(news.stamp);
                    kept.push(waiting);
                    continue;
                }
                Ok(evaluated) => tails::render(&self.engine, &evaluated),
                Err(undone) => Err(undone),
            };
            self.engine.metrics.pipeline_waiting.sub(1);
            let Waiting {
                question,
                reactor,
                conn,
                ..
            } = waiting;
            // The question goes before its answer is told of.
            drop(question);
            self.finish(reactor, conn, outcome);
        }
        self.waits.lock().append(&mut kept);
    }
}
