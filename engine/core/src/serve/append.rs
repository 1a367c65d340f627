//! POST: headers to an append, its decision to a reply. Begin and end of the append walk.

use crate::codec::ProducerTag;
use crate::error::ErrorCode;
use crate::limits::COSTLY_BODY_BYTES;
use crate::model::{Media, Offset};
use crate::refusal::Refusal;
use crate::serve::conn::{Conn, Measured};
use crate::serve::http::{Head, Known, is_true, parse_decimal_u64};
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::respond;
use crate::shard::create::json_refusal;
use crate::shard::engine::{Engine, Undone};
use crate::shard::write::{Appended, WriteScratch};
use crate::stream::append::{AppendRequest, check_syntax};
use crate::stream::json;

impl Reactor {
    pub fn post(&mut self, conn: &mut Conn, head: &Head<'_>, path: &str, body: &[u8]) -> Flow {
        let appended = self.try_post(head, path, body);
        self.answer_post(conn, head, body.is_empty(), appended)
    }

    pub fn answer_post(
        &mut self,
        conn: &mut Conn,
        head: &Head<'_>,
        close_only: bool,
        appended: Result<Appended, Undone>,
    ) -> Flow {
        match appended {
            Ok(appended) => {
                let start = conn.output.len();
                self.render_appended(conn, head, &appended, close_only);
                let measured = (!appended.duplicate).then_some(Measured {
                    class: appended.class,
                    received_us: conn.received_us,
                });
                self.hold_append(conn, start, appended.gate, measured);
                Flow::Done
            }
            Err(undone) => self.answer_undone(conn, head, undone),
        }
    }

    fn try_post(&mut self, head: &Head<'_>, path: &str, body: &[u8]) -> Result<Appended, Undone> {
        let scratch = &mut self.write_scratch;
        self.wire.clear();
        append(
            &self.engine,
            head,
            path,
            body,
            self.wall_ms,
            &mut self.wire,
            scratch,
        )
    }

    fn render_appended(
        &self,
        conn: &mut Conn,
        head: &Head<'_>,
        appended: &Appended,
        close_only: bool,
    ) {
        let with_producer = appended.producer.is_some();
        let status = if with_producer && !appended.duplicate && !close_only {
            200
        } else {
            204
        };
        let reply = self.reply_for(conn, head);
        let out = &mut conn.output;
        respond::begin(out, status, &reply);
        respond::next_offset(out, appended.offset);
        if appended.closed {
            respond::header(out, "Stream-Closed", b"true");
        }
        if let Some((epoch, seq)) = appended.producer {
            respond::number_header(out, "Producer-Epoch", epoch);
            respond::number_header(out, "Producer-Seq", seq);
        }
        respond::end_empty(out, status);
    }
}

/// Performs an append. `wire` is empty, and needed for the messages of an array.
pub fn append(
    engine: &Engine,
    head: &Head<'_>,
    path: &str,
    body: &[u8],
    now_ms: u64,
    wire: &mut Vec<u8>,
    scratch: &mut WriteScratch,
) -> Result<Appended, Undone> {
    let request = parse_append(head, body).map_err(Undone::refused)?;
    check_syntax(&request).map_err(Undone::refused)?;
    let stream = engine.find(path)?.ok_or_else(Engine::missing)?;
    if stream.content_type.media != Media::Json || body.is_empty() {
        let records = u32::from(!body.is_empty());
        return engine.append(&stream, &request, body, Ok(records), now_ms, scratch);
    }
    if body.len() >= COSTLY_BODY_BYTES
        && let Some(known) = engine.known_of_append(&stream, &request, body.len(), now_ms)?
    {
        return Ok(known);
    }
    let records = json::flatten_into(body, wire).map_err(|error| json_refusal(&error));
    engine.append(&stream, &request, wire, records, now_ms, scratch)
}

fn parse_append<'b>(head: &Head<'b>, body: &[u8]) -> Result<AppendRequest<'b>, Refusal> {
    Ok(AppendRequest {
        content_type: head
            .get(Known::ContentType)
            .filter(|value| !value.is_empty()),
        body_empty: body.is_empty(),
        close: head.get(Known::StreamClosed).is_some_and(is_true),
        producer: parse_producer(head)?,
        stream_seq: head.get(Known::StreamSeq),
        if_match: head.get(Known::IfMatch).map(parse_if_match).transpose()?,
    })
}

fn parse_producer<'b>(head: &Head<'b>) -> Result<Option<ProducerTag<'b>>, Refusal> {
    let parts = (
        head.get(Known::ProducerId),
        head.get(Known::ProducerEpoch),
        head.get(Known::ProducerSeq),
    );
    let invalid = |detail: &'static str| Refusal::with(ErrorCode::ProducerInvalid, detail);
    match parts {
        (None, None, None) => Ok(None),
        (Some(id), Some(epoch), Some(seq)) => {
            let epoch = parse_decimal_u64(epoch)
                .ok_or_else(|| invalid("Producer-Epoch is not a decimal integer."))?;
            let seq = parse_decimal_u64(seq)
                .ok_or_else(|| invalid("Producer-Seq is not a decimal integer."))?;
            Ok(Some(ProducerTag { id, epoch, seq }))
        }
        _ => Err(invalid(
            "Producer-Id, Producer-Epoch and Producer-Seq belong together.",
        )),
    }
}

fn parse_if_match(value: &[u8]) -> Result<Offset, Refusal> {
    let inner = value
        .strip_prefix(b"\"")
        .and_then(|rest| rest.strip_suffix(b"\""));
    inner.and_then(Offset::parse).ok_or_else(|| {
        Refusal::with(
            ErrorCode::BadRequest,
            "If-Match must be one quoted offset of this stream.",
        )
    })
}
