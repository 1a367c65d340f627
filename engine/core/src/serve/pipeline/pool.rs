//! The workers of the pipeline paths and of large writes: a bounded queue of jobs and a few threads for each lane, and a
//! list of finished ones per reactor.
//!
//! A worker may block: on the disk, on a lock. What must wait for the log (`Undone::Wait`) is put aside meanwhile (`aside`,
//! `waits`), for a bounded time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::ErrorCode;
use crate::limits::{PIPELINE_QUEUE_MAX, SMALL_STAGE_BYTES, STAGE_WORKERS, WRITE_WORKERS};
use crate::model::Gate;
use crate::refusal::Refusal;
use crate::serve::pipeline::aside::Aside;
use crate::serve::pipeline::patterns::Patterns;
use crate::serve::pipeline::waits::Waiting;
use crate::serve::pipeline::write::{self, Wrote};
use crate::serve::pipeline::{Answer, Job, Unsent, run, small};
use crate::serve::route::PipelineCall;
use crate::shard::engine::{Engine, Undone};

/// The log is looked at again at least this often.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(20);

pub struct Pipeline {
    pub engine: Arc<Engine>,
    queue: Mutex<Queue>,
    /// One per lane.
    ready: [Condvar; LANES],
    /// Rung when the workers shall end, for those who rest.
    stopping: Condvar,
    /// One list per pace.
    pub(super) waits: Mutex<[Vec<Waiting>; 2]>,
    pub(super) patterns: Patterns,
    pub(super) aside: Aside,
    /// One list per reactor, in the order of their mailboxes.
    finished: Vec<Mutex<Vec<Finished>>>,
}

/// Who works on a job. Questions and reads may take as long as they like; what writes must not wait for them, and neither
/// what takes no time at all: a question about a few streams, a read of few bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lane {
    Pipeline,
    Writes,
    SmallQuestions,
    SmallReads,
    Stages,
    SmallStages,
}

const LANES: usize = 6;

impl Lane {
    fn of(job: &Job) -> Lane {
        match job.call {
            PipelineCall::Write(_) => Lane::Writes,
            PipelineCall::Tails if small::is_small_question(&job.request.body) => {
                Lane::SmallQuestions
            }
            PipelineCall::Read if small::is_small_read(&job.request.body) => Lane::SmallReads,
            PipelineCall::Tails | PipelineCall::Read => Lane::Pipeline,
            _ if job.request.body.len() <= SMALL_STAGE_BYTES => Lane::SmallStages,
            _ => Lane::Stages,
        }
    }
}

#[derive(Default)]
struct Queue {
    /// One per lane.
    jobs: [VecDeque<Box<Job>>; LANES],
    stop: bool,
}

/// What became of a job, for the connection that it came from.
pub struct Finished {
    pub conn: u64,
    pub outcome: Outcome,
}

pub enum Outcome {
    Answered(Answer, Unsent),
    Refused(Refusal, Gate),
    /// What became of a write, and its head.
    Wrote(Box<[u8]>, Result<Wrote, Undone>),
}

impl Pipeline {
    pub fn new(engine: Arc<Engine>) -> Pipeline {
        let reactors = engine.shard.mailboxes.len();
        Pipeline {
            engine,
            queue: Mutex::default(),
            ready: [const { Condvar::new() }; LANES],
            stopping: Condvar::new(),
            waits: Mutex::default(),
            patterns: Patterns::default(),
            aside: Aside::default(),
            finished: (0..reactors).map(|_| Mutex::default()).collect(),
        }
    }

    /// For the pipeline as many as there are cores; two at least, so that one that waits for the disk does not stop all.
    pub fn lanes() -> impl Iterator<Item = Lane> {
        let cores = std::thread::available_parallelism().map_or(2, |count| count.get().max(2));
        let writes = std::iter::repeat_n(Lane::Writes, WRITE_WORKERS);
        std::iter::repeat_n(Lane::Pipeline, cores)
            .chain(writes)
            .chain(std::iter::repeat_n(Lane::Stages, STAGE_WORKERS))
            .chain([Lane::SmallQuestions, Lane::SmallReads, Lane::SmallStages])
    }

    /// Queues a job. If there are too many its connection is told so, the same way as any other answer.
    pub fn submit(&self, job: Box<Job>) {
        let job = {
            let lane = Lane::of(&job) as usize;
            let mut queue = self.queue.lock();
            if queue.stop || queue.jobs[lane].len() >= PIPELINE_QUEUE_MAX {
                job
            } else {
                queue.jobs[lane].push_back(job);
                self.engine.metrics.pipeline_queue.add(1);
                drop(queue);
                self.ready[lane].notify_one();
                return;
            }
        };
        let refusal = Refusal::with(
            ErrorCode::ServerBusy,
            "Too many large requests are in progress.",
        );
        self.refuse(*job, refusal);
    }

    /// Gives up a job that was not run, or has changed nothing so far.
    pub(super) fn refuse(&self, job: Job, refusal: Refusal) {
        // The body goes before the answer is told of.
        let (call, reactor, conn) = {
            let job = job;
            (job.call, job.reactor, job.conn)
        };
        let undone = Undone::refused(refusal);
        match call {
            PipelineCall::Write(head) => {
                self.hand_back(reactor, conn, Outcome::Wrote(head, Err(undone)));
            }
            _ => self.finish(reactor, conn, Err(undone)),
        }
    }

    /// A worker's loop; ends after [`Pipeline::stop`].
    pub fn work(&self, lane: Lane) {
        while let Some(mut job) = self.next(lane as usize) {
            let (engine, reactor, conn) = (&self.engine, job.reactor, job.conn);
            let synced = engine.shard.synced();
            if job.is_abandoned() {
                continue;
            }
            // The body goes before the answer is told of.
            match &job.call {
                PipelineCall::Tails => self.ask(&job),
                PipelineCall::Write(head) => {
                    let received_ms = *job.received_ms.get_or_insert_with(|| engine.steady_ms());
                    match write::run(engine, head, &job.request.body, received_ms) {
                        Err(Undone::Wait) => self.put_aside(job, synced),
                        wrote => {
                            let head = head.clone();
                            drop(job);
                            self.hand_back(reactor, conn, Outcome::Wrote(head, wrote));
                        }
                    }
                }
                _ => match run(engine, &job) {
                    Err(Undone::Wait) => self.put_aside(job, synced),
                    outcome => {
                        drop(job);
                        self.finish(reactor, conn, outcome);
                    }
                },
            }
        }
    }

    fn next(&self, lane: usize) -> Option<Box<Job>> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(job) = queue.jobs[lane].pop_front() {
                self.engine.metrics.pipeline_queue.sub(1);
                return Some(job);
            }
            self.ready[lane].wait(&mut queue);
        }
    }

    /// Queues what has waited for the log, behind all others: it may have to wait again.
    pub(super) fn queue_again(&self, jobs: impl Iterator<Item = Box<Job>>) {
        let mut queue = self.queue.lock();
        if queue.stop {
            return;
        }
        for job in jobs {
            let lane = Lane::of(&job) as usize;
            queue.jobs[lane].push_back(job);
            self.engine.metrics.pipeline_queue.add(1);
            self.ready[lane].notify_one();
        }
    }

    /// Gives an outcome to the reactor that asked.
    pub fn finish(&self, reactor: usize, conn: u64, outcome: Result<Answer, Undone>) {
        let outcome = match outcome {
            Ok(answer) => {
                let bytes = answer.memory_len();
                let unsent = Unsent::new(&self.engine.metrics, bytes);
                Outcome::Answered(answer, unsent)
            }
            Err(Undone::Refused { refusal, gate }) => Outcome::Refused(refusal, gate),
            Err(Undone::Wait) => Outcome::Refused(ErrorCode::ServerBusy.into(), Gate::OPEN),
        };
        self.hand_back(reactor, conn, outcome);
    }

    fn hand_back(&self, reactor: usize, conn: u64, outcome: Outcome) {
        self.finished[reactor]
            .lock()
            .push(Finished { conn, outcome });
        self.engine.shard.mailboxes[reactor].ring();
    }

    pub fn take_finished(&self, reactor: usize) -> Vec<Finished> {
        std::mem::take(&mut self.finished[reactor].lock())
    }

    /// Ends the workers; what is still queued is dropped: its connections are gone.
    pub fn stop(&self) {
        let dropped = {
            let mut queue = self.queue.lock();
            queue.stop = true;
            std::mem::take(&mut queue.jobs)
        };
        let dropped: usize = dropped.iter().map(VecDeque::len).sum();
        self.engine.metrics.pipeline_queue.sub(dropped as u64);
        for lane in &self.ready {
            lane.notify_all();
        }
        self.stopping.notify_all();
        self.stop_aside();
        self.engine.shard.changes.ring_now();
    }

    pub(super) fn stopped(&self) -> bool {
        self.queue.lock().stop
    }

    /// Does nothing for a while, or until the end.
    pub(super) fn rest(&self, ends: Instant) {
        let mut queue = self.queue.lock();
        while !queue.stop && !self.stopping.wait_until(&mut queue, ends).timed_out() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::SMALL_QUESTION_BYTES;
    use crate::metrics::Metrics;
    use crate::serve::pipeline::Body;

    fn lane(call: PipelineCall, body: &str) -> Lane {
        let metrics = Arc::new(Metrics::default());
        let body = Body::at_end_of(body.as_bytes().to_vec(), body.len());
        Lane::of(&Job::of(call, body, &metrics))
    }

    fn read(ranges: &[(u64, u64)]) -> String {
        let place =
            |position: u64| format!(r#"{{"offset":"{:016}_{position:016}","number":0}}"#, 7);
        let ranges = ranges.iter().map(|(from, to)| {
            let (from, to) = (place(*from), place(*to));
            format!(r#"{{"stream":"a","incarnation":"7","from":{from},"to":{to}}}"#)
        });
        let ranges: Vec<String> = ranges.collect();
        format!(
            r#"{{"ranges":[{}],"columns":["offset"]}}"#,
            ranges.join(",")
        )
    }

    #[test]
    fn what_writes_and_what_is_small_waits_for_no_large_read() {
        let large = lane(PipelineCall::Read, &read(&[(0, 1 << 30)]));
        let question = lane(PipelineCall::Tails, r#"{"pattern":"a.*"}"#);
        let rows = "x".repeat(1 << 20);
        let stage = || PipelineCall::Stage("id".into());
        let others = [
            lane(PipelineCall::Commit, "{}"),
            lane(stage(), "a few rows"),
            lane(PipelineCall::DropStage("id".into()), ""),
            lane(stage(), &rows),
            lane(PipelineCall::Read, &read(&[(1 << 30, (1 << 30) + 100)])),
            lane(PipelineCall::Tails, r#"{"streams":["a"]}"#),
        ];
        assert_eq!([large, question], [Lane::Pipeline; 2]);
        assert!(!others.contains(&Lane::Pipeline), "{others:?}");
        assert_ne!(others[0], others[3], "a few rows behind many");
        for lane in others {
            assert!(Pipeline::lanes().any(|other| other == lane), "{lane:?}");
        }
    }

    #[test]
    fn a_read_is_small_by_the_bytes_of_all_its_ranges() {
        let small =
            |ranges: &[(u64, u64)]| lane(PipelineCall::Read, &read(ranges)) == Lane::SmallReads;
        assert!(small(&[]) && small(&[(5, 5), (0, 100_000)]));
        assert!(!small(&[(0, 200_000), (0, 200_000)]));
        // Records inside an append, of which nobody knows here how large it is.
        let inside = read(&[(5, 5)]).replacen(r#""number":0"#, r#""number":3"#, 1);
        assert_eq!(lane(PipelineCall::Read, &inside), Lane::Pipeline);
        // It will be refused, or tell of a gap.
        assert!(!small(&[(100, 0)]));
        let offset = |text: &str| read(&[(0, 1)]).replace(&format!("{:016}_{:016}", 7, 0), text);
        for text in ["-1", "0", "", "x_y", "now"] {
            assert_eq!(lane(PipelineCall::Read, &offset(text)), Lane::Pipeline);
        }
        assert_eq!(lane(PipelineCall::Read, "[]"), Lane::Pipeline);
    }

    #[test]
    fn a_question_with_a_pattern_is_not_small_however_it_is_written() {
        for small in [
            r#"{"streams":["a"]}"#,
            r#" {"streams":["pattern","\u0070"],"wait_ms":1}"#,
            r#"{"streams":["sm\u00f8r"]}"#,
        ] {
            assert_eq!(
                lane(PipelineCall::Tails, small),
                Lane::SmallQuestions,
                "{small}"
            );
        }
        for other in [
            r#"{"pattern":"a.*"}"#,
            r#"{"p\u0061ttern":"a.*"}"#,
            r#"{"wait_ms":0,"\u0070attern" : "a.*"}"#,
            r#"[null,"a.*",null,null,0]"#,
            r#" [null,"pattern",null,null,0]"#,
        ] {
            assert_ne!(
                lane(PipelineCall::Tails, other),
                Lane::SmallQuestions,
                "{other}"
            );
        }
        let long = format!(r#"{{"streams":["{}"]}}"#, "a".repeat(SMALL_QUESTION_BYTES));
        assert_ne!(lane(PipelineCall::Tails, &long), Lane::SmallQuestions);
    }
}
