//! Questions to `/v1/tails` that wait for a change: one list, one thread, no polling.
//!
//! The thread sleeps until a change is rung or a deadline comes, gathers what has changed once for all who wait,
//! answers those whom it concerns or who are out of time, and rests for a while in proportion to what that has cost,
//! so that a busy server spends a bounded share of a core on those who wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::error::ErrorCode;
use crate::limits::{TAILS_WAITING_MAX, TAILS_WAITING_MAX_BYTES};
use crate::refusal::Refusal;
use crate::serve::pipeline::Job;
use crate::serve::pipeline::news::News;
use crate::serve::pipeline::pool::Pipeline;
use crate::serve::pipeline::tails::{self, Question};
use crate::shard::engine::Undone;

/// Least rest between two evaluations, and how many times what one has cost.
const REST_MIN: Duration = Duration::from_millis(3);
const REST_FACTOR: u32 = 10;
const REST_MAX: Duration = Duration::from_millis(500);

/// Whether a client still waits for the answer to its job. Its reactor says so, wherever the job is at that moment;
/// whoever would wait on the client's behalf looks.
#[derive(Default)]
pub struct Asker(AtomicU8);

const IN_A_HURRY: u8 = 1;
const GONE: u8 = 2;

impl Asker {
    /// A client that sends nothing more waits for no news.
    pub fn new(half_closed: bool) -> Arc<Asker> {
        Arc::new(Asker(AtomicU8::new(if half_closed {
            IN_A_HURRY
        } else {
            0
        })))
    }

    fn is_gone(&self) -> bool {
        self.0.load(Ordering::Acquire) == GONE
    }

    fn waits(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

pub struct Waiting {
    question: Question,
    reactor: usize,
    conn: u64,
    asker: Arc<Asker>,
    deadline: Instant,
}

impl Pipeline {
    /// Answers a question, now or when it has something to say.
    pub fn ask(&self, job: &Job) {
        let (reactor, conn, body) = (job.reactor, job.conn, &job.request.body);
        let asked = Question::parse(&self.engine, &self.patterns, body).map_err(Undone::refused);
        let outcome = asked.and_then(|question| {
            let news = News::gather(&self.engine, std::iter::once(&question));
            let evaluated = tails::evaluate(&self.engine, &question, &news)?;
            Ok((question, evaluated))
        });
        match outcome {
            Ok((question, evaluated))
                if !evaluated.is_news() && question.may_wait() && job.asker.waits() =>
            {
                let deadline = Instant::now() + Duration::from_millis(question.wait_ms);
                self.park(Waiting {
                    question,
                    reactor,
                    conn,
                    asker: Arc::clone(&job.asker),
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

    /// The client has left: nobody needs the answer.
    pub fn forget(&self, asker: &Asker) {
        self.tell(asker, GONE);
    }

    /// The client sends nothing more: what it waits for is answered with what there is.
    pub fn hasten(&self, asker: &Asker) {
        self.tell(asker, IN_A_HURRY);
    }

    fn tell(&self, asker: &Asker, news: u8) {
        asker.0.fetch_max(news, Ordering::AcqRel);
        // A question that is being looked at, or about to be put aside, is looked at again.
        self.engine.shard.changes.ring_now();
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
            if waiting.asker.is_gone() {
                self.engine.metrics.pipeline_waiting.sub(1);
                continue;
            }
            let over = Instant::now() >= waiting.deadline
                || !waiting.asker.waits()
                || self.engine.stopping.load(Ordering::Acquire);
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
