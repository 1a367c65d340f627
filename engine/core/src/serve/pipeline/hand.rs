//! From a connection to the pool and back: the reactor's side of a pipeline request.
//!
//! The body changes hands without a copy where it has a buffer of its own; so does the answer.

use std::sync::Arc;

use crate::io::wanted;
use crate::limits::{HEAD_MAX_BYTES, TIGHT_OUTPUT_BYTES};
use crate::model::Gate;
use crate::refusal::Refusal;
use crate::serve::budget::Reserved;
use crate::serve::conn::{Conn, Handing, Phase};
use crate::serve::http::{Head, HttpError, Known, Parsed, parse_head};
use crate::serve::pipeline::pool::{Finished, Outcome};
use crate::serve::pipeline::waits::Asker;
use crate::serve::pipeline::write::Wrote;
use crate::serve::pipeline::{Answer, Body, Job, Request, Unsent};
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::respond::{self, CONTINUE, Reply};
use crate::serve::route::PipelineCall;
use crate::shard::engine::Undone;

/// Answers up to this size are copied behind their head and leave in one call.
const INLINE_BODY_BYTES: u64 = 64 * 1024;

impl Reactor {
    /// Makes a job of a request that is whole; its body follows with [`Reactor::submit`].
    pub fn begin_job(
        &mut self,
        conn: &mut Conn,
        head: &Head<'_>,
        call: PipelineCall,
        body: &[u8],
    ) -> Flow {
        let asker = Asker::new(conn.half_closed);
        let job = Job {
            call,
            request: Request {
                query: head.query.map(Box::from),
                body_crc32: head.get(Known::MillstreamBodyCrc32).map(Box::from),
                body: Body::default(),
            },
            reactor: self.number,
            conn: conn.token,
            asker: Arc::clone(&asker),
            waited: None,
            received_ms: None,
            _reserved: Reserved::of(conn, &self.engine.metrics),
        };
        conn.job = Some((Box::new(job), body.len()));
        conn.phase = Phase::Working(asker);
        Flow::Done
    }

    /// Gives the job at the front its body, which ends where `used` does, and hands it over.
    pub fn submit_copied(&mut self, conn: &mut Conn, used: &[u8]) {
        if let Some((_, body_len)) = &conn.job {
            let body = used[used.len().saturating_sub(*body_len)..].to_vec();
            self.submit(conn, body);
        }
    }

    /// The same for a buffer that is not needed any more.
    pub fn submit(&mut self, conn: &mut Conn, buffer: Vec<u8>) {
        if let Some((mut job, body_len)) = conn.job.take() {
            job.request.body = Body::at_end_of(buffer, body_len);
            self.pipeline.submit(job);
            if conn.half_closed {
                self.probe(conn);
            }
        }
    }

    /// One that has closed its connection looks like one that sends nothing more and listens, until something is sent to
    /// it: then its system says that nobody is there, and a job that has not begun need not be run.
    pub fn probe(&mut self, conn: &mut Conn) {
        // The others may be HTTP/1.0, which knows no interim answers.
        if conn.keep_alive {
            conn.output.extend_from_slice(CONTINUE);
        }
    }

    /// Answers the connections whose jobs are done.
    pub fn deliver_finished(&mut self) {
        for finished in self.pipeline.take_finished(self.number) {
            self.deliver_outcome(finished);
        }
    }

    fn deliver_outcome(&mut self, finished: Finished) {
        // Without its client the outcome is of use to nobody.
        let Some(mut conn) = self.take(finished.conn) else {
            return;
        };
        if !matches!(conn.phase, Phase::Working(_)) {
            return self.put_back(conn);
        }
        conn.phase = Phase::Request;
        let handing = match finished.outcome {
            Outcome::Answered(answer, unsent) => self.put_answer(&mut conn, answer, unsent),
            Outcome::Refused(refusal, gate) => {
                self.put_refusal(&mut conn, &refusal, gate);
                None
            }
            Outcome::Wrote(head, wrote) => {
                self.answer_wrote(&mut conn, &head, wrote);
                None
            }
        };
        match handing {
            Some(handing) => conn.phase = Phase::Handing(Box::new(handing)),
            None => self.after_answer(&mut conn),
        }
        self.put_back(conn);
    }

    /// Renders an answer; returns what of it is too large to be copied.
    fn put_answer(&mut self, conn: &mut Conn, answer: Answer, unsent: Unsent) -> Option<Handing> {
        let start = conn.output.len();
        let inline_max = if self.room_for_bodies() {
            INLINE_BODY_BYTES
        } else {
            TIGHT_OUTPUT_BYTES as u64
        };
        let reply = self.pipeline_reply(conn.keep_alive);
        let out = &mut conn.output;
        respond::begin(out, answer.status, &reply);
        for (name, value) in &answer.headers {
            respond::header(out, name, value);
        }
        respond::header(out, "Cache-Control", b"no-store");
        let length = answer.body_bytes();
        if answer.status == 204 {
            respond::end_empty(out, answer.status);
        } else {
            respond::header(out, "Content-Type", answer.content_type.as_bytes());
            respond::number_header(out, "Content-Length", length);
            out.extend_from_slice(b"\r\n");
        }
        let mut handing = None;
        if length > inline_max {
            handing = Some(Handing {
                pieces: answer.body.into(),
                sent: 0,
                _unsent: unsent,
            });
        } else {
            answer.body.iter().for_each(|piece| out.extend(piece));
        }
        self.hold(conn, start, answer.gate);
        handing
    }

    fn put_refusal(&mut self, conn: &mut Conn, refusal: &Refusal, gate: Gate) {
        self.engine.metrics.refusals.add(1);
        let start = conn.output.len();
        let reply = self.pipeline_reply(conn.keep_alive);
        respond::problem(&mut conn.output, refusal, &reply);
        self.hold(conn, start, gate);
    }

    fn pipeline_reply(&self, keep_alive: bool) -> Reply<'_> {
        Reply {
            date: &self.date,
            cors: false,
            keep_alive,
            head_only: false,
            control: true,
        }
    }

    /// Answers a write as if the reactor had performed it.
    fn answer_wrote(&mut self, conn: &mut Conn, head: &[u8], wrote: Result<Wrote, Undone>) {
        drop(wanted::take_noted());
        let Ok(Parsed::Complete(head)) = parse_head(head, &mut 0, HEAD_MAX_BYTES) else {
            return self.refuse_bytes(conn, HttpError::BadRequest("the head changed"));
        };
        match wrote {
            Ok(Wrote::Appended(appended)) => self.answer_post(conn, &head, false, Ok(appended)),
            Ok(Wrote::Created(created)) => self.answer_put(conn, &head, Ok(created)),
            Err(undone) => self.answer_undone(conn, &head, undone),
        };
    }
}
