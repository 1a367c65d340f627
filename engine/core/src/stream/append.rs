//! The append decision: pure, in the protocol's order of precedence.
//!
//! Called under the stream's lock by `shard/write`. It changes nothing: an accepted append becomes a frame
//! first and is applied from it.

use crate::codec::ProducerTag;
use crate::error::ErrorCode;
use crate::limits::{PRODUCER_ID_MAX_BYTES, SAFE_INTEGER_MAX, STREAM_SEQ_MAX_BYTES};
use crate::model::{ContentType, Offset};
use crate::refusal::Refusal;
use crate::stream::state::StreamState;

/// An append or close as the client asked for it.
#[derive(Clone, Copy, Default)]
pub struct AppendRequest<'a> {
    /// `Content-Type` header; not looked at when there is no body.
    pub content_type: Option<&'a [u8]>,
    pub body_empty: bool,
    pub close: bool,
    pub producer: Option<ProducerTag<'a>>,
    pub stream_seq: Option<&'a [u8]>,
    /// `If-Match`: append only if the tail is still here.
    pub if_match: Option<Offset>,
}

pub enum AppendDecision {
    /// Take it.
    Accept,
    /// A producer's retry of what is already in the log.
    Duplicate {
        epoch: u64,
        last_seq: u64,
    },
    /// Close-only on a closed stream: the wish is already fulfilled.
    AlreadyClosed,
    Refuse(Refusal),
}

/// Checks what can be checked without the stream. Existence comes after syntax.
pub fn check_syntax(request: &AppendRequest<'_>) -> Result<(), Refusal> {
    if let Some(tag) = &request.producer {
        if tag.id.is_empty() || tag.id.len() > PRODUCER_ID_MAX_BYTES {
            return Err(Refusal::with(
                ErrorCode::ProducerInvalid,
                "Producer-Id must have 1 to 256 bytes.",
            ));
        }
        if tag.epoch > SAFE_INTEGER_MAX || tag.seq > SAFE_INTEGER_MAX {
            return Err(Refusal::with(
                ErrorCode::ProducerInvalid,
                "Producer-Epoch and Producer-Seq end at 2^53 - 1.",
            ));
        }
    }
    if request
        .stream_seq
        .is_some_and(|seq| seq.len() > STREAM_SEQ_MAX_BYTES)
    {
        return Err(Refusal::with(
            ErrorCode::BadRequest,
            "Stream-Seq is longer than 256 bytes.",
        ));
    }
    if request.if_match.is_some() && request.producer.is_some() {
        return Err(Refusal::with(
            ErrorCode::BadRequest,
            "If-Match and producer headers exclude each other.",
        ));
    }
    Ok(())
}

/// `tail` is the stream's applied tail as an offset. `records` is the result of splitting the body (JSON streams), judged last.
pub fn decide(
    state: &StreamState,
    content_type: &ContentType,
    request: &AppendRequest<'_>,
    records: Result<u32, Refusal>,
    tail: Offset,
) -> AppendDecision {
    let close_only = request.body_empty && request.close;
    if request.body_empty && !request.close {
        return refuse(ErrorCode::BodyEmpty);
    }
    if !request.body_empty && request.content_type.is_none() {
        return refuse(ErrorCode::ContentTypeMissing);
    }
    if state.closed {
        return decide_on_closed(state, request, close_only, tail);
    }
    if !request.body_empty
        && !request
            .content_type
            .is_some_and(|header| content_type.matches(header))
    {
        return refuse_with(
            ErrorCode::ContentTypeMismatch,
            format!("The stream has {}.", content_type.text),
        );
    }
    if let Some(tag) = &request.producer {
        match decide_producer(state, tag, tail.epoch) {
            AppendDecision::Accept => {}
            other => return other,
        }
    }
    if request
        .if_match
        .is_some_and(|expected| expected.position != tail.position || expected.epoch != tail.epoch)
    {
        let mut refusal = Refusal::new(ErrorCode::PreconditionFailed);
        refusal.headers.next_offset = Some(tail);
        return AppendDecision::Refuse(refusal);
    }
    if let (Some(seq), Some(last)) = (request.stream_seq, state.stream_seq.as_deref())
        && seq <= last
    {
        return refuse(ErrorCode::SequenceConflict);
    }
    if close_only {
        return AppendDecision::Accept;
    }
    match records {
        Ok(0) => refuse(ErrorCode::JsonEmpty),
        Ok(_) => AppendDecision::Accept,
        Err(refusal) => AppendDecision::Refuse(refusal),
    }
}

fn decide_on_closed(
    state: &StreamState,
    request: &AppendRequest<'_>,
    close_only: bool,
    tail: Offset,
) -> AppendDecision {
    if let Some(tag) = &request.producer {
        if state.closed_by.as_ref().is_some_and(|by| by.is(tag)) {
            return AppendDecision::Duplicate {
                epoch: tag.epoch,
                last_seq: tag.seq,
            };
        }
    } else if close_only {
        return AppendDecision::AlreadyClosed;
    }
    let mut refusal = Refusal::new(ErrorCode::StreamClosed);
    refusal.headers.closed = true;
    refusal.headers.next_offset = Some(tail);
    AppendDecision::Refuse(refusal)
}

fn decide_producer(state: &StreamState, tag: &ProducerTag<'_>, tail_epoch: u64) -> AppendDecision {
    let Some(known) = state.producer(tag.id) else {
        if tag.seq == 0 || tail_epoch > state.id.0 {
            return AppendDecision::Accept;
        }
        return refuse_gap(0, tag.seq);
    };
    if tag.epoch < known.epoch {
        let mut refusal = Refusal::new(ErrorCode::ProducerFenced);
        refusal.headers.producer_epoch = Some(known.epoch);
        return AppendDecision::Refuse(refusal);
    }
    // After a possible loss of the stream's tail, a producer's first append says where it is. What is known of it is
    // there, whatever was lost since, so that its repetition stays one.
    let lost = known.stream_epoch < tail_epoch;
    if lost && (known.lost_all() || tag.epoch > known.epoch || tag.seq > known.last_seq) {
        return AppendDecision::Accept;
    }
    if tag.epoch > known.epoch {
        return if tag.seq == 0 {
            AppendDecision::Accept
        } else {
            refuse(ErrorCode::ProducerEpochInvalid)
        };
    }
    if known.has(tag.seq) {
        return AppendDecision::Duplicate {
            epoch: known.epoch,
            last_seq: known.last_seq,
        };
    }
    // Also of a number below that was skipped after a possible loss: nobody has what came with it.
    if tag.seq == known.last_seq + 1 {
        AppendDecision::Accept
    } else {
        refuse_gap(known.last_seq + 1, tag.seq)
    }
}

fn refuse_gap(expected: u64, received: u64) -> AppendDecision {
    let mut refusal = Refusal::with(
        ErrorCode::ProducerGap,
        format!("Expected Producer-Seq {expected}, received {received}."),
    );
    refusal.headers.producer_expected_and_received_seq = Some((expected, received));
    AppendDecision::Refuse(refusal)
}

fn refuse(code: ErrorCode) -> AppendDecision {
    AppendDecision::Refuse(Refusal::new(code))
}

fn refuse_with(code: ErrorCode, detail: String) -> AppendDecision {
    AppendDecision::Refuse(Refusal::with(code, detail))
}
