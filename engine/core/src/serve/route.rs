//! What a request asks for: path and method to operation.

use std::borrow::Cow;

use memchr::memchr;

use crate::error::ErrorCode;
use crate::limits::PATH_MAX_BYTES;
use crate::model::is_reserved;
use crate::refusal::{Allow, Refusal};
use crate::serve::http::{
    Head, Known, Method, decode_query_component, percent_decode, query_pairs,
};

pub const STREAM_ROOT: &[u8] = b"/v1/stream/";
const STAGE_ROOT: &[u8] = b"/v1/stage/";
/// Longest id of a stage.
const STAGE_ID_MAX_BYTES: usize = 128;

/// What workers are asked for: the pipeline paths, and what else takes longer than a reactor may.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PipelineCall {
    Tails,
    Read,
    /// PUT and DELETE of a stage, by its id.
    Stage(Box<str>),
    DropStage(Box<str>),
    Commit,
    /// POST or PUT of a stream with a large body, by its head.
    Write(Box<[u8]>),
}

pub enum Route<'b> {
    /// A stream, by its path below the root.
    Stream(Cow<'b, str>),
    Pipeline(PipelineCall),
    Preflight,
    Health,
    Ready,
    Metrics,
    /// Subscriptions under `__ds`: the control plane answers its own origin, and those named for it.
    Subscriptions,
    /// `/-/...`: the control plane answers its own origin.
    Control,
}

pub fn route<'b>(head: &Head<'b>) -> Result<Route<'b>, Refusal> {
    if let Some(raw) = head.path.strip_prefix(STREAM_ROOT) {
        if is_subscriptions(head.path) {
            return Ok(Route::Subscriptions);
        }
        if head.method == Method::Options {
            return Ok(Route::Preflight);
        }
        let path = stream_path(raw)?;
        return Ok(Route::Stream(path));
    }
    if is_pipeline(head.path) {
        return pipeline_call(head).map(Route::Pipeline);
    }
    let readable = matches!(head.method, Method::Get | Method::Head);
    match head.path {
        b"/-/health" if readable => Ok(Route::Health),
        b"/-/ready" if readable => Ok(Route::Ready),
        b"/-/metrics" if readable => Ok(Route::Metrics),
        b"/-/health" | b"/-/ready" | b"/-/metrics" => Err(ErrorCode::MethodNotAllowed.into()),
        path if path.starts_with(b"/-/") || path == b"/-" => Ok(Route::Control),
        _ if head.method == Method::Options => Ok(Route::Preflight),
        _ => Err(ErrorCode::NotFound.into()),
    }
}

/// Whether a path is below `__ds`, however it is spelt. Almost every stream is told apart by its first byte.
#[inline]
pub fn is_subscriptions(path: &[u8]) -> bool {
    matches!(path.get(STREAM_ROOT.len()), Some(b'_' | b'%')) && is_below_reserved(path)
}

#[cold]
fn is_below_reserved(path: &[u8]) -> bool {
    path.strip_prefix(STREAM_ROOT)
        .is_some_and(|raw| stream_path(raw).is_ok_and(|name| is_reserved(&name)))
}

/// Whether a path is one of the pipeline's: they are for programs and have no CORS headers.
pub fn is_pipeline(path: &[u8]) -> bool {
    matches!(path, b"/v1/tails" | b"/v1/read" | b"/v1/commit") || path.starts_with(STAGE_ROOT)
}

/// Those of them that only look: they see the writes before them.
pub fn is_pipeline_read(path: &[u8]) -> bool {
    matches!(path, b"/v1/tails" | b"/v1/read")
}

fn pipeline_call(head: &Head<'_>) -> Result<PipelineCall, Refusal> {
    let allow = match (head.path, head.method) {
        (b"/v1/tails", Method::Post) => return Ok(PipelineCall::Tails),
        (b"/v1/read", Method::Post) => return Ok(PipelineCall::Read),
        (b"/v1/commit", Method::Post) => return Ok(PipelineCall::Commit),
        (path, Method::Put) if path.starts_with(STAGE_ROOT) => {
            return Ok(PipelineCall::Stage(stage_id(path)?));
        }
        (path, Method::Delete) if path.starts_with(STAGE_ROOT) => {
            return Ok(PipelineCall::DropStage(stage_id(path)?));
        }
        (path, _) if path.starts_with(STAGE_ROOT) => Allow::PutAndDelete,
        _ => Allow::Post,
    };
    let mut refusal = Refusal::new(ErrorCode::MethodNotAllowed);
    refusal.headers.allow = allow;
    Err(refusal)
}

fn stage_id(path: &[u8]) -> Result<Box<str>, Refusal> {
    let id = path.get(STAGE_ROOT.len()..).unwrap_or(b"");
    let known = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
    match std::str::from_utf8(id) {
        Ok(text) if (1..=STAGE_ID_MAX_BYTES).contains(&id.len()) && id.iter().all(known) => {
            Ok(text.into())
        }
        _ => Err(Refusal::with(
            ErrorCode::BadRequest,
            "The id of a stage is 1 to 128 letters, digits, dots, underscores and hyphens.",
        )),
    }
}

/// A stream's name: percent-decoded UTF-8 without control characters or dot segments.
pub fn stream_path(raw: &[u8]) -> Result<Cow<'_, str>, Refusal> {
    let bad = |detail: &'static str| Refusal::with(ErrorCode::BadRequest, detail);
    let decoded =
        percent_decode(raw).map_err(|_| bad("The path has an invalid percent escape."))?;
    let path = match decoded {
        Cow::Borrowed(bytes) => {
            Cow::Borrowed(std::str::from_utf8(bytes).map_err(|_| bad("The path is not UTF-8."))?)
        }
        Cow::Owned(bytes) => {
            Cow::Owned(String::from_utf8(bytes).map_err(|_| bad("The path is not UTF-8."))?)
        }
    };
    if path.is_empty() {
        return Err(Refusal::with(
            ErrorCode::NotFound,
            "A stream needs a name below /v1/stream/.",
        ));
    }
    if path.len() > PATH_MAX_BYTES {
        return Err(Refusal::with(
            ErrorCode::UriTooLong,
            "A stream's path has at most 1024 bytes.",
        ));
    }
    if path.bytes().any(|byte| byte < 0x20 || byte == 0x7f) {
        return Err(bad("The path contains a control character."));
    }
    let dotted = memchr(b'.', path.as_bytes()).is_some();
    if dotted
        && path
            .split('/')
            .any(|segment| segment == "." || segment == "..")
    {
        return Err(bad("The path contains a dot segment."));
    }
    Ok(path)
}

/// The query of a read. Unknown parameters are ignored, repeated ones that matter are not.
#[derive(Default)]
pub struct ReadQuery {
    pub offset: Option<Vec<u8>>,
    pub live: Option<Live>,
    pub cursor: Option<u64>,
    pub tail: Option<u64>,
    pub since_ms: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Live {
    LongPoll,
    Sse,
}

pub fn read_query(query: Option<&[u8]>) -> Result<ReadQuery, Refusal> {
    let mut parsed = ReadQuery::default();
    for (key, raw) in query_pairs(query.unwrap_or(b"")) {
        let value = || {
            decode_query_component(raw).ok_or_else(|| {
                Refusal::with(
                    ErrorCode::BadRequest,
                    "The query has an invalid percent escape.",
                )
            })
        };
        match key {
            b"offset" => {
                if parsed.offset.is_some() {
                    return Err(Refusal::with(
                        ErrorCode::OffsetInvalid,
                        "offset is given more than once.",
                    ));
                }
                parsed.offset = Some(value()?);
            }
            b"live" => {
                parsed.live = match value()?.as_slice() {
                    b"long-poll" => Some(Live::LongPoll),
                    b"sse" => Some(Live::Sse),
                    _ => None,
                }
            }
            b"cursor" => parsed.cursor = crate::serve::http::parse_decimal_u64(&value()?),
            b"tail" => {
                let count = crate::serve::http::parse_decimal_u64(&value()?);
                parsed.tail = Some(count.ok_or_else(|| {
                    Refusal::with(ErrorCode::BadRequest, "tail must be a number of records.")
                })?);
            }
            b"since" => parsed.since_ms = Some(parse_since(&value()?)?),
            _ => {}
        }
    }
    let starts = [
        parsed.offset.is_some(),
        parsed.tail.is_some(),
        parsed.since_ms.is_some(),
    ];
    if starts.into_iter().filter(|given| *given).count() > 1 {
        return Err(Refusal::with(
            ErrorCode::BadRequest,
            "offset, tail and since exclude each other.",
        ));
    }
    Ok(parsed)
}

fn parse_since(value: &[u8]) -> Result<u64, Refusal> {
    let number = crate::serve::http::parse_decimal_u64(value);
    let text = std::str::from_utf8(value).ok();
    number
        .or_else(|| text.and_then(crate::serve::time::parse_rfc3339))
        .ok_or_else(|| {
            Refusal::with(
                ErrorCode::BadRequest,
                "since must be an RFC 3339 date or milliseconds since 1970.",
            )
        })
}

/// Whether the control plane may answer: only pages of its own origin or of one of the `guests`, and on loopback only
/// loopback names and the public one, so that a foreign page cannot reach it by a DNS name of its own.
pub fn check_control_origin(
    head: &Head<'_>,
    loopback: bool,
    public_url: Option<&str>,
    guests: &[String],
) -> Result<(), Refusal> {
    let host = head.get(Known::Host).unwrap_or(b"");
    let public = public_url.map(origin_of);
    if let Some(origin) = head.get(Known::Origin) {
        let own = !host.is_empty()
            && authority_of(origin).is_some_and(|name| name.eq_ignore_ascii_case(host));
        let public = public.is_some_and(|public| public.as_bytes().eq_ignore_ascii_case(origin));
        if !own && !public && !is_listed(origin, guests) {
            return Err(ErrorCode::OriginRefused.into());
        }
    }
    let public_name = public.and_then(|public| authority_of(public.as_bytes()));
    let is_public = public_name.is_some_and(|name| name.eq_ignore_ascii_case(host));
    if loopback && !is_public && !is_loopback_name(host) {
        return Err(ErrorCode::HostRefused.into());
    }
    Ok(())
}

/// Whether an `Origin` is one of those in a setting.
pub fn is_listed(origin: &[u8], listed: &[String]) -> bool {
    listed
        .iter()
        .any(|one| one.as_bytes().eq_ignore_ascii_case(origin))
}

/// Scheme and authority of a URL.
fn origin_of(url: &str) -> &str {
    let authority = url.find("://").map_or(0, |at| at + 3);
    let end = url[authority..]
        .find('/')
        .map_or(url.len(), |at| authority + at);
    &url[..end]
}

fn authority_of(origin: &[u8]) -> Option<&[u8]> {
    origin
        .strip_prefix(b"http://")
        .or_else(|| origin.strip_prefix(b"https://"))
}

fn is_loopback_name(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else {
        return false;
    };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}
