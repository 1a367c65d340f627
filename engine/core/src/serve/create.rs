//! PUT and DELETE: a stream's beginning and end.

use crate::error::ErrorCode;
use crate::limits::TTL_MAX_SECONDS;
use crate::model::{Class, Offset, is_reserved};
use crate::refusal::Refusal;
use crate::serve::conn::Conn;
use crate::serve::http::{Head, Known, is_true, parse_decimal_u64};
use crate::serve::reactor::{Flow, Reactor};
use crate::serve::read::render_identity;
use crate::serve::respond;
use crate::serve::route::{STREAM_ROOT, stream_path};
use crate::serve::time::parse_rfc3339;
use crate::shard::create::Created;
use crate::shard::engine::{Engine, Undone};
use crate::stream::lifecycle::{CreateRequest, ForkRequest};

impl Reactor {
    pub fn put(&mut self, conn: &mut Conn, head: &Head<'_>, path: &str, body: &[u8]) -> Flow {
        let waited_ms = self.now_us.saturating_sub(conn.received_us) / 1000;
        let received_ms = self.engine.steady_ms().saturating_sub(waited_ms);
        let created = create(&self.engine, head, path, body, self.wall_ms, received_ms);
        self.answer_put(conn, head, created)
    }

    pub fn answer_put(
        &mut self,
        conn: &mut Conn,
        head: &Head<'_>,
        created: Result<Created, Undone>,
    ) -> Flow {
        match created {
            Ok(created) => {
                let start = conn.output.len();
                self.render_created(conn, head, &created);
                self.hold(conn, start, created.gate);
                Flow::Done
            }
            Err(undone) => self.answer_undone(conn, head, undone),
        }
    }

    fn render_created(&self, conn: &mut Conn, head: &Head<'_>, created: &Created) {
        let status = if created.new { 201 } else { 200 };
        let reply = self.reply_for(conn, head);
        let location = self.location(head);
        let out = &mut conn.output;
        respond::begin(out, status, &reply);
        if created.new {
            respond::header(out, "Location", &location);
        }
        respond::header(
            out,
            "Content-Type",
            created.stream.content_type.text.as_bytes(),
        );
        respond::next_offset(out, created.offset);
        if created.closed {
            respond::header(out, "Stream-Closed", b"true");
        }
        render_identity(out, &created.stream, created.class);
        respond::end_empty(out, status);
    }

    /// Absolute URL of the stream as the client knows it.
    fn location(&self, head: &Head<'_>) -> Vec<u8> {
        let mut url = Vec::with_capacity(64 + head.path.len());
        if let Some(public) = &self.engine.config.public_url {
            url.extend_from_slice(public.trim_end_matches('/').as_bytes());
        } else {
            let https = head
                .get(Known::XForwardedProto)
                .is_some_and(|proto| proto.eq_ignore_ascii_case(b"https"));
            url.extend_from_slice(if https { b"https://" } else { b"http://" });
            let host = head
                .get(Known::XForwardedHost)
                .or_else(|| head.get(Known::Host))
                .unwrap_or(b"localhost");
            url.extend_from_slice(host);
        }
        url.extend_from_slice(head.path);
        url
    }

    pub fn delete(&mut self, conn: &mut Conn, head: &Head<'_>, path: &str) -> Flow {
        let deleted = self.engine.find(path).and_then(|found| {
            let stream = found.ok_or_else(Engine::missing)?;
            self.engine.delete(&stream, self.wall_ms)
        });
        match deleted {
            Ok(gate) => {
                let start = conn.output.len();
                let reply = self.reply_for(conn, head);
                respond::begin(&mut conn.output, 204, &reply);
                respond::end_empty(&mut conn.output, 204);
                self.hold(conn, start, gate);
                Flow::Done
            }
            Err(undone) => self.answer_undone(conn, head, undone),
        }
    }
}

/// Performs a create that came at `received_ms`, by the steady clock.
pub fn create(
    engine: &Engine,
    head: &Head<'_>,
    path: &str,
    body: &[u8],
    now_ms: u64,
    received_ms: u64,
) -> Result<Created, Undone> {
    let source_path = match head.get(Known::StreamForkedFrom) {
        Some(value) => Some(parse_source_path(value).map_err(Undone::refused)?),
        None => None,
    };
    let request = CreateRequest {
        received_ms,
        ..parse_create(head, source_path.as_deref()).map_err(Undone::refused)?
    };
    engine.create(path, &request, body, now_ms)
}

fn parse_create<'b>(
    head: &Head<'b>,
    source_path: Option<&'b str>,
) -> Result<CreateRequest<'b>, Refusal> {
    let bad = |detail: &'static str| Refusal::with(ErrorCode::BadRequest, detail);
    let (ttl, expires_at) = (head.get(Known::StreamTtl), head.get(Known::StreamExpiresAt));
    if ttl.is_some() && expires_at.is_some() {
        return Err(bad("Stream-TTL and Stream-Expires-At exclude each other."));
    }
    let ttl_seconds = ttl
        .map(|value| {
            parse_ttl(value)
                .ok_or_else(|| bad("Stream-TTL must be whole seconds up to a hundred years."))
        })
        .transpose()?;
    let expires_at_ms = expires_at
        .map(|value| {
            std::str::from_utf8(value)
                .ok()
                .and_then(parse_rfc3339)
                .ok_or_else(|| bad("Stream-Expires-At must be an RFC 3339 date."))
        })
        .transpose()?;
    let content_type = match head.get(Known::ContentType) {
        Some(value) => {
            Some(std::str::from_utf8(value).map_err(|_| bad("Content-Type is not text."))?)
                .filter(|text| !text.trim().is_empty())
        }
        None => None,
    };
    Ok(CreateRequest {
        content_type,
        ttl_seconds,
        expires_at_ms,
        closed: head.get(Known::StreamClosed).is_some_and(is_true),
        class: head
            .get(Known::StreamDurability)
            .map(parse_class)
            .transpose()?,
        fork: parse_fork(head, source_path)?,
        received_ms: 0,
    })
}

/// No sign, no leading zero, no fraction; bounded so that date arithmetic stays exact.
fn parse_ttl(value: &[u8]) -> Option<u64> {
    if value.len() > 1 && value[0] == b'0' {
        return None;
    }
    parse_decimal_u64(value).filter(|seconds| *seconds <= TTL_MAX_SECONDS)
}

fn parse_class(value: &[u8]) -> Result<Class, Refusal> {
    let class = std::str::from_utf8(value)
        .ok()
        .and_then(Class::parse)
        .ok_or(ErrorCode::DurabilityUnknown)?;
    match class.needs() {
        None => Ok(class),
        Some(needs) => Err(Refusal::with(
            ErrorCode::DurabilityUnavailable,
            format!("The class {needs}."),
        )),
    }
}

fn parse_fork<'b>(
    head: &Head<'b>,
    source_path: Option<&'b str>,
) -> Result<Option<ForkRequest<'b>>, Refusal> {
    let bad = |detail: &'static str| Refusal::with(ErrorCode::ForkOffsetInvalid, detail);
    let (offset, sub_offset) = (
        head.get(Known::StreamForkOffset),
        head.get(Known::StreamForkSubOffset),
    );
    let offset = offset
        .map(|value| {
            Offset::parse(value).ok_or_else(|| bad("Stream-Fork-Offset is not an offset."))
        })
        .transpose()?;
    let Some(source_path) = source_path else {
        if offset.is_some() || sub_offset.is_some() {
            return Err(bad(
                "Stream-Fork-Offset and Stream-Fork-Sub-Offset need Stream-Forked-From.",
            ));
        }
        return Ok(None);
    };
    let strict =
        |value: &[u8]| parse_decimal_u64(value).filter(|_| value.len() == 1 || value[0] != b'0');
    let sub_offset = match sub_offset {
        Some(value) => {
            strict(value).ok_or_else(|| bad("Stream-Fork-Sub-Offset must be a whole number."))?
        }
        None => 0,
    };
    Ok(Some(ForkRequest {
        source_path,
        offset,
        sub_offset,
    }))
}

/// The source as a path below the stream root; the root itself may be written or left out.
fn parse_source_path(value: &[u8]) -> Result<String, Refusal> {
    let raw = value.strip_prefix(STREAM_ROOT).unwrap_or(value);
    let path = stream_path(raw).map_err(|_| {
        Refusal::with(
            ErrorCode::BadRequest,
            "Stream-Forked-From is not a stream's path.",
        )
    })?;
    if is_reserved(&path) {
        return Err(ErrorCode::ForkSourceMissing.into());
    }
    Ok(path.into_owned())
}
