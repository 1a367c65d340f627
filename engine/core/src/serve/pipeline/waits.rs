//! Questions to `/v1/tails` that wait for a change, for names to be compared, or for what streams are to become final: two
//! lists with a thread each, no polling.
//!
//! A thread sleeps until a change is rung or a deadline comes, gathers what has changed once for all in its list, answers
//! those whom it concerns, and rests for a while in proportion to what that has cost, so that a busy server spends a
//! bounded share of a core on those who wait. Who is out of time is answered without a look: nothing is lost, the cursor
//! stays where it is.
//!
//! A question begins as a quick one. One whose names cannot be compared in a short turn, or whose pattern looks as if they
//! could not (`pattern_cost`), joins the slow ones, where who needs least comes first. They hold up nobody else: not the others that wait, not the pool, not a stop.
//!
//! An answer that tells of a stream which is not final yet is put aside as far as it has come, and goes on after the next
//! commit where it was. Beginning it anew would never end where streams come and go all the time.
//!
//! Invariant `I-WAIT-1`: a quick question is answered at its deadline, however long others take: a look ends after
//! `LOOK_MAX` and one turn, a rest ends at the next deadline, and neither waits for the log.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::error::ErrorCode;
use crate::limits::{
    LOG_PATIENCE, PATTERN_PATIENCE, PATTERN_SEARCH_MAX, PATTERN_TURN, PATTERN_TURN_GROWTH,
};
use crate::refusal::Refusal;
use crate::serve::pipeline::news::News;
use crate::serve::pipeline::patterns::Turn;
use crate::serve::pipeline::pool::Pipeline;
use crate::serve::pipeline::tails::{self, Evaluated, Question};
use crate::serve::pipeline::{Answer, Held, Job, check_waiting_room};
use crate::shard::engine::Undone;

/// Least rest between two looks, and the longest after one that all had their turn in.
const REST_MIN: Duration = Duration::from_millis(3);
const REST_MAX: Duration = Duration::from_millis(500);
/// How many times longer than a look that left some without their turn the rest after it is: a thread that always has
/// somebody to look at takes a quarter of a core.
const REST_FACTOR: u32 = 3;
/// No further turn begins in a look that has taken this long; the next look goes on there. Short, so that the rest is.
const LOOK_MAX: Duration = Duration::from_millis(25);

/// Which questions a thread looks at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    Quick,
    Slow,
}

impl Pace {
    /// How long to rest after a look. Slow ones may have as much as there is: some have waited for nothing else.
    fn rest(self, cost: Duration, finished: bool) -> Duration {
        match self {
            Pace::Quick if finished => (cost * 10).clamp(REST_MIN, REST_MAX),
            _ => (cost * REST_FACTOR).max(REST_MIN),
        }
    }
}

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

    pub fn is_gone(&self) -> bool {
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
    asked: Instant,
    turn: Duration,
    /// Whether it was looked at to the end: then there was no news up to its stamp.
    compared: bool,
    /// An answer that waits for the log.
    begun: Option<(Evaluated, Held)>,
}

impl Waiting {
    fn pace(&self) -> Pace {
        // What has begun needs no turn any more.
        if self.turn == PATTERN_TURN || self.begun.is_some() {
            Pace::Quick
        } else {
            Pace::Slow
        }
    }

    fn deadline(&self) -> Instant {
        let wait = Duration::from_millis(self.question.wait_ms);
        let patience = match self.begun {
            _ if self.compared => Duration::ZERO,
            Some(_) => LOG_PATIENCE,
            None => PATTERN_PATIENCE,
        };
        self.asked + wait.max(patience)
    }

    /// Whether it waits no longer.
    fn is_over(&self, now: Instant) -> bool {
        let hurries = self.compared && !self.asker.waits();
        hurries || self.asker.is_gone() || now >= self.deadline()
    }
}

impl Pipeline {
    /// Answers a question, now or when it has something to say.
    pub fn ask(&self, job: &Job) {
        let (reactor, conn, body) = (job.reactor, job.conn, &job.request.body);
        let question = match Question::parse(&self.engine, &self.patterns, body) {
            Ok(question) => question,
            Err(refusal) => return self.finish(reactor, conn, Err(Undone::refused(refusal))),
        };
        let news = News::gather(&self.engine, std::iter::once(&question));
        let mut waiting = Waiting {
            question,
            reactor,
            conn,
            asker: Arc::clone(&job.asker),
            asked: Instant::now(),
            turn: PATTERN_TURN,
            compared: false,
            begun: None,
        };
        let outcome = match self.compare(&mut waiting, &news) {
            ControlFlow::Continue(()) if !waiting.is_over(Instant::now()) => {
                match self.park(waiting) {
                    Ok(()) => return,
                    Err(refusal) => Err(Undone::refused(refusal)),
                }
            }
            ControlFlow::Continue(()) => self.without_news(&waiting),
            ControlFlow::Break(outcome) => outcome,
        };
        self.finish(reactor, conn, outcome);
    }

    fn park(&self, waiting: Waiting) -> Result<(), Refusal> {
        let metrics = &self.engine.metrics;
        let mut waits = self.waits.lock();
        check_waiting_room(metrics, 1)?;
        self.engine.shard.changes.set_awaited(true);
        metrics.pipeline_waiting.add(1);
        waits[waiting.pace() as usize].push(waiting);
        drop(waits);
        // What has changed between the evaluation and here is found by another look.
        self.engine.shard.changes.ring_now();
        Ok(())
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

    /// A thread's loop; ends after [`Pipeline::stop`].
    pub fn watch(&self, pace: Pace) {
        let (mut heard, mut rests_until) = (0, Instant::now());
        while !self.stopped() {
            let deadline = self.answer_late(pace);
            if Instant::now() < rests_until {
                self.rest(deadline.map_or(rests_until, |at| at.min(rests_until)));
            } else if self.engine.shard.changes.wait(&mut heard, deadline) {
                let began = Instant::now();
                let finished = self.look(pace);
                rests_until = Instant::now() + pace.rest(began.elapsed(), finished);
            }
        }
    }

    /// Answers who waits no longer; returns when the next one will not.
    fn answer_late(&self, pace: Pace) -> Option<Instant> {
        let now = Instant::now();
        let stopping = self.engine.stopping.load(Ordering::Acquire);
        let mut waits = self.waits.lock();
        if self.engine.metrics.pipeline_waiting.get() == 0 {
            self.engine.shard.changes.set_awaited(false);
        }
        let list = &mut waits[pace as usize];
        let late: Vec<Waiting> = list
            .extract_if(.., |waiting| stopping || waiting.is_over(now))
            .collect();
        let next = list.iter().map(Waiting::deadline).min();
        drop(waits);
        for waiting in late {
            let outcome = self.without_news(&waiting);
            self.answer(waiting, outcome);
        }
        next
    }

    fn without_news(&self, waiting: &Waiting) -> Result<Answer, Undone> {
        match waiting.question.since.filter(|_| waiting.compared) {
            Some(since) => tails::no_news(&self.engine, since),
            None if self.engine.stopping.load(Ordering::Acquire) => {
                Err(Undone::refused(ErrorCode::ShuttingDown))
            }
            None => Err(Undone::refused(Refusal::with(
                ErrorCode::ServerBusy,
                if waiting.begun.is_some() {
                    "What streams are is not final yet: the log made no progress while the request waited."
                } else {
                    "Too many patterns that take long are being compared with names."
                },
            ))),
        }
    }

    fn answer(&self, waiting: Waiting, outcome: Result<Answer, Undone>) {
        self.engine.metrics.pipeline_waiting.sub(1);
        let (reactor, conn) = (waiting.reactor, waiting.conn);
        // The question goes before its answer is told of.
        drop(waiting);
        self.finish(reactor, conn, outcome);
    }

    /// Answers those who have news, for a while: who has had no turn has one in a later look. Returns whether all
    /// have had theirs.
    fn look(&self, pace: Pace) -> bool {
        let mut list = std::mem::take(&mut self.waits.lock()[pace as usize]);
        if list.is_empty() {
            return true;
        }
        // Names that are given are not compared: who has them comes before those that may turn out to be slow.
        list.sort_by_key(|waiting| (waiting.turn, waiting.question.has_pattern()));
        let anew = list.iter().filter(|waiting| waiting.begun.is_none());
        let news = News::gather(&self.engine, anew.map(|waiting| &waiting.question));
        let until = Instant::now() + LOOK_MAX;
        let mut unseen = list.into_iter();
        let (mut seen, mut again) = (Vec::new(), false);
        while Instant::now() < until
            && let Some(mut waiting) = unseen.next()
        {
            let (turn, had_begun) = (waiting.turn, waiting.begun.is_some());
            match self.compare(&mut waiting, &news) {
                ControlFlow::Continue(()) => {
                    // What was rung for while an answer waited may be news to it.
                    let ended = had_begun && waiting.begun.is_none();
                    again |= ended || waiting.turn > turn || waiting.pace() != pace;
                    seen.push(waiting);
                }
                ControlFlow::Break(outcome) => self.answer(waiting, outcome),
            }
        }
        let finished = unseen.len() == 0;
        let mut waits = self.waits.lock();
        let came = std::mem::take(&mut waits[pace as usize]);
        for waiting in unseen.chain(came).chain(seen) {
            waits[waiting.pace() as usize].push(waiting);
        }
        drop(waits);
        if again || !finished {
            self.engine.shard.changes.ring_now();
        }
        finished
    }

    /// Gives a question its turn: it has an answer, or goes on waiting.
    fn compare(&self, waiting: &mut Waiting, news: &News) -> ControlFlow<Result<Answer, Undone>> {
        let turn = Turn::new(&self.engine.stopping, waiting.turn);
        let question = &mut waiting.question;
        let begun = match waiting.begun.take() {
            Some((begun, _)) => Ok(begun),
            None => tails::evaluate(&self.engine, question, news, &turn),
        };
        let evaluated = begun.and_then(|mut begun| match begun.look(&self.engine, question) {
            Err(Undone::Wait) => {
                let held = Held::new(&self.engine.metrics, begun.memory_len());
                check_waiting_room(&self.engine.metrics, 0).map_err(Undone::refused)?;
                waiting.begun = Some((begun, held));
                Err(Undone::Wait)
            }
            looked => looked.map(|()| begun),
        });
        match evaluated {
            Ok(evaluated) if evaluated.is_news() => {
                ControlFlow::Break(tails::render(&self.engine, &evaluated))
            }
            Ok(evaluated) => {
                // Nothing up to here is news to it, so that the next look need not go back farther.
                question.since = Some(evaluated.stamp);
                waiting.compared = true;
                ControlFlow::Continue(())
            }
            Err(Undone::Wait) => ControlFlow::Continue(()),
            Err(_) if turn.is_over() && waiting.turn < PATTERN_SEARCH_MAX => {
                waiting.turn = (waiting.turn * PATTERN_TURN_GROWTH).min(PATTERN_SEARCH_MAX);
                ControlFlow::Continue(())
            }
            Err(undone) => ControlFlow::Break(Err(undone)),
        }
    }
}
