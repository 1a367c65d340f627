//! The pipeline paths (`/v1/tails`, `/v1/read`, `/v1/stage/{id}` and `/v1/commit`), and writes with large bodies.
//!
//! What they do takes longer than a reactor may: a request whose body is whole leaves its connection as an owned
//! [`Job`], a worker of the pool runs it, and the answer comes back through the reactor's mailbox. Reading order:
//! `hand` (from a connection to the pool and back), `pool` (workers), `aside` (what waits for the log), then one file
//! per call.
//!
//! Invariants
//! - `I-PIPE-1` A connection has at most one job; its next request waits, so answers keep their order.
//! - `I-PIPE-2` Everything that waits is bounded: the queue by number, bodies by the bound for bodies under way,
//!   answers by their bytes, questions by number and bytes.
//! - `I-PIPE-3` A client that leaves cancels nothing that writes: its answer is dropped. A question or a read that nobody
//!   waits for any more does not begin, and a read ends where it is.

use std::sync::Arc;

use crate::error::ErrorCode;
use crate::limits::{
    PIPELINE_ANSWERS_MAX_BYTES, PIPELINE_SMALL_ANSWER_BYTES, PIPELINE_SMALL_ANSWERS_MAX_BYTES,
    TAILS_WAITING_MAX, TAILS_WAITING_MAX_BYTES,
};
use crate::metrics::Metrics;
use crate::model::Gate;
use crate::refusal::Refusal;
use crate::serve::budget::Reserved;
use crate::serve::pipeline::waits::Asker;
use crate::serve::route::PipelineCall;
use crate::shard::engine::{Engine, Undone};

mod arrow;
mod arrow_rows;
mod aside;
mod commit;
pub mod hand;
mod lists;
mod news;
mod pattern_cost;
mod patterns;
pub mod pool;
mod read;
mod rows;
mod small;
mod stage;
mod tails;
pub mod waits;
mod walk;
pub mod write;

/// A request on its way to a worker.
pub struct Job {
    pub call: PipelineCall,
    pub request: Request,
    /// Where the answer goes: the reactor's number and the connection's token.
    pub reactor: usize,
    pub conn: u64,
    pub asker: Arc<Asker>,
    pub waited: Option<aside::Waited>,
    /// When a write was run first.
    pub received_ms: Option<u64>,
    _reserved: Reserved,
}

impl Job {
    #[cfg(test)]
    fn of(call: PipelineCall, body: Body, metrics: &Arc<Metrics>) -> Job {
        Job {
            call,
            request: Request {
                query: None,
                body_crc32: None,
                body,
            },
            reactor: 0,
            conn: 0,
            asker: Asker::new(false),
            waited: None,
            received_ms: None,
            _reserved: Reserved::nothing(metrics),
        }
    }

    /// Whether nobody waits for it any more; what writes is done all the same (`I-PIPE-3`).
    fn is_abandoned(&self) -> bool {
        matches!(self.call, PipelineCall::Tails | PipelineCall::Read) && self.asker.is_gone()
    }
}

/// What a call may need of its request.
pub struct Request {
    pub query: Option<Box<[u8]>>,
    /// `Millstream-Body-Crc32` as it was sent.
    pub body_crc32: Option<Box<[u8]>>,
    pub body: Body,
}

/// A request's body in the buffer that it arrived in.
#[derive(Default)]
pub struct Body {
    bytes: Vec<u8>,
    from: usize,
}

impl Body {
    /// The last `len` bytes of a buffer.
    pub fn at_end_of(bytes: Vec<u8>, len: usize) -> Body {
        let from = bytes.len().saturating_sub(len);
        Body { bytes, from }
    }
}

impl std::ops::Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.from..]
    }
}

/// An answer that is success. The body is sent as it lies: piece by piece, never put together.
pub struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    pub headers: Vec<(&'static str, Vec<u8>)>,
    pub body: Vec<Vec<u8>>,
    /// What the reply waits for.
    pub gate: Gate,
}

impl Answer {
    pub fn json(status: u16, body: Vec<u8>) -> Answer {
        Answer {
            status,
            content_type: "application/json",
            headers: Vec::new(),
            body: vec![body],
            gate: Gate::OPEN,
        }
    }

    fn body_bytes(&self) -> u64 {
        self.body.iter().map(|piece| piece.len() as u64).sum()
    }

    /// What it takes until it has left.
    fn memory_len(&self) -> u64 {
        self.body.iter().map(|piece| piece.capacity() as u64).sum()
    }
}

/// Answers that clients have not taken are bounded together, with those that are being made: each is made whole before it
/// leaves. Takes room for one of `bytes`, about, until that is there and counts itself.
fn take_answer_room(metrics: &Arc<Metrics>, bytes: usize) -> Result<Unsent, Undone> {
    let bound = if bytes <= PIPELINE_SMALL_ANSWER_BYTES {
        PIPELINE_SMALL_ANSWERS_MAX_BYTES
    } else {
        PIPELINE_ANSWERS_MAX_BYTES
    };
    let room = Unsent::new(metrics, bytes as u64);
    if metrics.pipeline_answer_bytes.get() <= bound {
        return Ok(room);
    }
    Err(Undone::refused(Refusal::with(
        ErrorCode::ServerBusy,
        "Too many response bytes are waiting for clients to read them.",
    )))
}

/// Questions that wait are bounded together, by number and by memory; a pattern takes more when it is compiled.
fn check_waiting_room(metrics: &Metrics, more: u64) -> Result<(), Refusal> {
    if metrics.pipeline_waiting.get() + more <= TAILS_WAITING_MAX as u64
        && metrics.pipeline_waiting_bytes.get() <= TAILS_WAITING_MAX_BYTES
    {
        return Ok(());
    }
    Err(Refusal::with(
        ErrorCode::ServerBusy,
        "Too many requests are waiting for changes, or they are too large together; without wait_ms they are answered at once.",
    ))
}

/// Runs one call. Blocks as long as it takes; `Undone::Wait` runs it again after the next commit.
pub fn run(engine: &Arc<Engine>, job: &Job) -> Result<Answer, Undone> {
    let request = &job.request;
    match &job.call {
        // Asked elsewhere: it may wait, and is answered by the reactor.
        PipelineCall::Tails | PipelineCall::Write(_) => Err(Undone::refused(ErrorCode::Internal)),
        PipelineCall::Read => read::run(engine, &request.body, &job.asker),
        PipelineCall::Stage(id) => stage::put(engine, id, request),
        PipelineCall::DropStage(id) => stage::delete(engine, id),
        PipelineCall::Commit => commit::post(engine, request),
    }
}

/// A control body as JSON; what is wrong with it is told.
fn parse_json<'a, T: serde::Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body)
        .map_err(|error| Refusal::with(ErrorCode::BadRequest, format!("The body: {error}.")))
}

fn to_json<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, Refusal> {
    serde_json::to_vec(value)
        .map_err(|error| Refusal::with(ErrorCode::Internal, format!("The answer: {error}.")))
}

/// Memory of a question that is counted until it is dropped.
pub struct Held {
    metrics: Arc<Metrics>,
    bytes: u64,
}

impl Held {
    fn new(metrics: &Arc<Metrics>, bytes: usize) -> Held {
        let bytes = bytes as u64;
        metrics.pipeline_waiting_bytes.add(bytes);
        Held {
            metrics: Arc::clone(metrics),
            bytes,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.metrics.pipeline_waiting_bytes.sub(self.bytes);
    }
}

/// Answer bytes that are counted until they have left.
pub struct Unsent {
    metrics: Arc<Metrics>,
    bytes: u64,
}

impl Unsent {
    fn new(metrics: &Arc<Metrics>, bytes: u64) -> Unsent {
        metrics.pipeline_answer_bytes.add(bytes);
        Unsent {
            metrics: Arc::clone(metrics),
            bytes,
        }
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.metrics.pipeline_answer_bytes.sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::READ_MAX_BYTES;

    #[test]
    fn answers_that_are_being_made_have_their_room() {
        let metrics = Arc::new(Metrics::default());
        let mut made = Vec::new();
        while let Ok(room) = take_answer_room(&metrics, READ_MAX_BYTES as usize) {
            made.push(room);
        }
        assert_eq!(
            made.len() as u64,
            PIPELINE_ANSWERS_MAX_BYTES / READ_MAX_BYTES
        );
        assert_eq!(
            metrics.pipeline_answer_bytes.get(),
            PIPELINE_ANSWERS_MAX_BYTES
        );
        assert!(
            take_answer_room(&metrics, 1000).is_ok(),
            "small ones have more"
        );
        drop(made);
        assert_eq!(metrics.pipeline_answer_bytes.get(), 0);
    }
}
