//! HTTP/1.1 request heads; below it the header table (`headers`), chunked bodies (`chunked`) and the
//! small decoders that the router needs (`decode`).
//!
//! Where it sits: `serve/listener` reads bytes, calls [`parse_head`] on them, and feeds bodies
//! through [`ChunkDecoder`]; `serve/route` reads the [`Head`]. Pure: no I/O, no clock, and no
//! allocation per head.
//!
//! Invariants:
//! - One reading of the framing or none: whatever two HTTP parsers could see differently (several
//!   lengths, bare line feeds, folded lines, unknown codings) is an error, and after an error the
//!   connection must close because the start of the next request is unknown.
//! - Bytes stay bytes: no value is decoded lossily, so two different values never compare equal.
//! - Pieces do not matter: a head is read the same however it was split. (A malformed one may be
//!   refused as late as its end.) One that arrives in pieces costs linear time: each byte is searched once for its end, and
//!   the full parse runs at most twice.

mod chunked;
mod decode;
mod headers;
mod target;

use std::mem::MaybeUninit;

use memchr::{memchr, memchr_iter, memchr2};

pub use chunked::{ChunkDecoder, ChunkProgress};
pub use decode::{
    QueryPairs, decode_query_component, is_true, media_type, parse_decimal_u64, percent_decode,
    query_pairs,
};
pub use headers::Known;
use target::{is_host, split_target};

/// More headers than this are refused with 431.
pub const HEADERS_MAX: usize = 64;
/// A longer request target is refused with 414.
pub const TARGET_MAX_BYTES: usize = 8 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Delete,
    Options,
    Patch,
    Other,
}

impl Method {
    /// Methods are case-sensitive: `get` is an unknown method.
    fn of(name: &str) -> Self {
        match name {
            "GET" => Self::Get,
            "HEAD" => Self::Head,
            "POST" => Self::Post,
            "PUT" => Self::Put,
            "DELETE" => Self::Delete,
            "OPTIONS" => Self::Options,
            "PATCH" => Self::Patch,
            _ => Self::Other,
        }
    }
}

/// How the end of the body is found. `Length(0)` means that the client said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    None,
    Length(u64),
    Chunked,
}

/// Why a request was refused. The connection closes after every one of these: where the next request
/// would start is unknown or not worth finding out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpError {
    BadRequest(&'static str),
    BodyTooLarge,
    UriTooLong,
    ExpectationFailed,
    HeadTooLarge,
    NotImplemented(&'static str),
    VersionNotSupported,
}

impl HttpError {
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest(_) => 400,
            Self::BodyTooLarge => 413,
            Self::UriTooLong => 414,
            Self::ExpectationFailed => 417,
            Self::HeadTooLarge => 431,
            Self::NotImplemented(_) => 501,
            Self::VersionNotSupported => 505,
        }
    }

    pub fn reason(self) -> &'static str {
        match self {
            Self::BadRequest(reason) | Self::NotImplemented(reason) => reason,
            Self::BodyTooLarge => "the body is larger than the limit",
            Self::UriTooLong => "the request target is larger than the limit",
            Self::ExpectationFailed => "the only supported expectation is 100-continue",
            Self::HeadTooLarge => "the request head is larger than the limit",
            Self::VersionNotSupported => "only HTTP/1.1 and HTTP/1.0 are spoken here",
        }
    }
}

/// Where a value lies in the buffer. `start` 0 means absent: a value always follows a request line.
#[derive(Clone, Copy, Default)]
struct Span {
    start: u32,
    length: u32,
}

impl Span {
    /// `part` must be a slice of `buffer`; heads are capped at 4 GiB, so `u32` holds both numbers.
    #[inline]
    fn of(buffer: &[u8], part: &[u8]) -> Self {
        let start = part.as_ptr() as usize - buffer.as_ptr() as usize;
        Self {
            start: start as u32,
            length: part.len() as u32,
        }
    }

    fn end(self) -> usize {
        self.start as usize + self.length as usize
    }
}

/// One parsed request head, borrowing the connection's buffer.
pub struct Head<'b> {
    pub method: Method,
    /// The method as sent, for the proxy (it may be an unknown one).
    pub method_name: &'b [u8],
    /// Raw path, percent-encoding untouched; `*` for `OPTIONS *`.
    pub path: &'b [u8],
    /// What follows the first `?`, raw.
    pub query: Option<&'b [u8]>,
    /// 0 for HTTP/1.0, whose clients cannot read chunked answers; 1 for HTTP/1.1.
    pub minor_version: u8,
    pub framing: Framing,
    pub keep_alive: bool,
    /// The client waits for `100 Continue` before it sends a body (never set without a body).
    pub expect_continue: bool,
    /// Bytes up to the first byte of the body, a tolerated leading empty line included.
    pub head_len: usize,
    buffer: &'b [u8],
    headers_start: usize,
    slots: [Span; Known::ALL.len()],
}

impl<'b> Head<'b> {
    /// The head as it was sent.
    pub fn bytes(&self) -> &'b [u8] {
        &self.buffer[..self.head_len]
    }

    /// The value of the first line with this name, without surrounding blanks. For an absolute-form
    /// target `Host` is the target's authority, which replaces the header.
    #[inline]
    pub fn get(&self, known: Known) -> Option<&'b [u8]> {
        let span = self.slots[known as usize];
        if span.start == 0 {
            return None;
        }
        self.buffer.get(span.start as usize..span.end())
    }

    /// The values of all lines with this name, for the headers that are lists (`If-None-Match`).
    pub fn values(&self, known: Known) -> impl Iterator<Item = &'b [u8]> + use<'b> {
        self.raw_headers()
            .filter(move |(name, _)| Known::of(name) == Some(known))
            .map(|(_, value)| value)
    }

    /// All headers as sent, in order: for the proxy, not for the hot path.
    pub fn raw_headers(&self) -> RawHeaders<'b> {
        RawHeaders {
            rest: &self.buffer[self.headers_start..self.head_len - 2],
        }
    }
}

/// Iterator over (name, value) of a head that [`parse_head`] has accepted.
pub struct RawHeaders<'b> {
    rest: &'b [u8],
}

impl<'b> Iterator for RawHeaders<'b> {
    type Item = (&'b [u8], &'b [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let line_feed = memchr(b'\n', self.rest)?;
        let (line, rest) = self.rest.split_at(line_feed + 1);
        self.rest = rest;
        let colon = memchr(b':', line)?;
        Some((&line[..colon], line[colon + 1..].trim_ascii()))
    }
}

#[expect(
    clippy::large_enum_variant,
    reason = "a head lives on the stack for one request; a box would be an allocation per request"
)]
pub enum Parsed<'b> {
    Complete(Head<'b>),
    Partial,
}

/// Parses the request head at the start of `buffer`.
///
/// `scanned` belongs to the connection: 0 before the first byte of a request, then whatever the last
/// `Partial` left in it, while `buffer` keeps its start and only grows. `Complete` resets it to 0.
#[inline]
pub fn parse_head<'b>(
    buffer: &'b [u8],
    scanned: &mut usize,
    head_max_bytes: usize,
) -> Result<Parsed<'b>, HttpError> {
    let limit = head_max_bytes.min(u32::MAX as usize);
    let window = &buffer[..buffer.len().min(limit)];
    let lead = leading_empty_line(window)?;
    // The first look parses at once, since most heads arrive whole. Later looks only search for the
    // end in the new bytes, so that a head sent byte by byte is not parsed once per byte.
    let candidate = match *scanned {
        0 => window,
        from => match find_head_end(window, lead, from)? {
            Some(end) => &window[..end],
            None => return unfinished(window, scanned, limit),
        },
    };
    let mut storage = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut []);
    match request.parse_with_uninit_headers(&candidate[lead..], &mut storage) {
        Ok(httparse::Status::Complete(length)) => {
            let head = inspect(&window[..lead + length], &request)?;
            *scanned = 0;
            Ok(Parsed::Complete(head))
        }
        Ok(httparse::Status::Partial) => match find_head_end(window, lead, lead)? {
            Some(_) => Err(HttpError::BadRequest("malformed request head")),
            None => unfinished(window, scanned, limit),
        },
        Err(error) => Err(refusal(error, &candidate[lead..])),
    }
}

/// Length of the one empty line that may precede a request (old clients send it after a body).
fn leading_empty_line(window: &[u8]) -> Result<usize, HttpError> {
    let lead = if window.starts_with(b"\r\n") { 2 } else { 0 };
    match window.get(lead) {
        Some(b'\r') if lead == 0 && window.len() == 1 => Ok(0),
        Some(b'\r' | b'\n') => Err(HttpError::BadRequest("empty lines before the request line")),
        _ => Ok(lead),
    }
}

/// Looks for the end of the head in the bytes after `from`; looks back, never forward, so nothing
/// has to be searched twice. A line feed without its carriage return is refused on sight.
fn find_head_end(window: &[u8], lead: usize, from: usize) -> Result<Option<usize>, HttpError> {
    let from = from.max(lead).min(window.len());
    for found in memchr_iter(b'\n', &window[from..]) {
        let at = from + found;
        let line = &window[lead..at];
        if !line.ends_with(b"\r") {
            return Err(HttpError::BadRequest("line feed without carriage return"));
        }
        if line.ends_with(b"\n\r") {
            return Ok(Some(at + 1));
        }
    }
    Ok(None)
}

fn unfinished<'b>(
    window: &[u8],
    scanned: &mut usize,
    limit: usize,
) -> Result<Parsed<'b>, HttpError> {
    *scanned = window.len();
    if window.len() < limit {
        return Ok(Parsed::Partial);
    }
    let body_of_line = window.strip_prefix(b"\r\n").unwrap_or(window);
    match memchr(b'\n', body_of_line) {
        None => Err(HttpError::UriTooLong),
        Some(_) => Err(HttpError::HeadTooLarge),
    }
}

#[cold]
fn refusal(error: httparse::Error, head: &[u8]) -> HttpError {
    use httparse::Error;
    match error {
        Error::TooManyHeaders => HttpError::HeadTooLarge,
        Error::HeaderName => HttpError::BadRequest("malformed header name or folded line"),
        Error::HeaderValue => HttpError::BadRequest("control character in a header value"),
        Error::NewLine => HttpError::BadRequest("carriage return without line feed"),
        Error::Version => {
            let end = memchr2(b'\r', b'\n', head).unwrap_or(head.len());
            match head[..end].split(|byte| *byte == b' ').nth(2) {
                Some([b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', ..]) => {
                    HttpError::VersionNotSupported
                }
                _ => HttpError::BadRequest("malformed request line"),
            }
        }
        Error::Token | Error::Status => HttpError::BadRequest("malformed request line"),
    }
}

/// Everything the syntax does not settle: line ends, repeated headers, target, framing.
/// `head` is the exact head, from the buffer's first byte to the empty line's end.
#[inline]
fn inspect<'b>(head: &'b [u8], request: &httparse::Request<'_, 'b>) -> Result<Head<'b>, HttpError> {
    let (Some(method_name), Some(target), Some(minor_version)) =
        (request.method, request.path, request.version)
    else {
        return Err(HttpError::BadRequest("malformed request line"));
    };
    let target = target.as_bytes();
    // Version and line end have a fixed length: ` HTTP/1.1\r\n`.
    let headers_start = Span::of(head, target).end() + 11;
    let crlf_everywhere = head.ends_with(b"\r\n") && ends_line(head, headers_start - 2);
    if !crlf_everywhere {
        return Err(HttpError::BadRequest("line feed without carriage return"));
    }
    let mut slots = [Span::default(); Known::ALL.len()];
    let mut connection = ConnectionOptions::default();
    for header in request.headers.iter() {
        let span = Span::of(head, header.value);
        if !ends_line(head, span.end()) {
            return Err(HttpError::BadRequest("line feed without carriage return"));
        }
        let Some(known) = Known::of(header.name.as_bytes()) else {
            continue;
        };
        if known == Known::Connection {
            connection.read(header.value);
        }
        let slot = &mut slots[known as usize];
        if slot.start == 0 {
            *slot = span;
        } else if let Some(reason) = Known::REPEATED[known as usize] {
            return Err(HttpError::BadRequest(reason));
        }
    }
    let method = Method::of(method_name);
    let (path, query, authority) = split_target(target, method)?;
    let mut parsed = Head {
        method,
        method_name: method_name.as_bytes(),
        path,
        query,
        minor_version,
        framing: Framing::None,
        keep_alive: !connection.close && (minor_version == 1 || connection.keep_alive),
        expect_continue: false,
        head_len: head.len(),
        buffer: head,
        headers_start,
        slots,
    };
    check_host(&mut parsed, authority)?;
    parsed.framing = framing(&parsed)?;
    parsed.expect_continue = expectation(&parsed)?;
    Ok(parsed)
}

/// True if only blanks stand between `end` and a full CRLF (blanks after a value are trimmed).
#[inline]
fn ends_line(head: &[u8], end: usize) -> bool {
    let mut rest = &head[end..];
    while let [b' ' | b'\t', after @ ..] = rest {
        rest = after;
    }
    rest.starts_with(b"\r\n")
}

#[derive(Default)]
struct ConnectionOptions {
    close: bool,
    keep_alive: bool,
}

impl ConnectionOptions {
    fn read(&mut self, value: &[u8]) {
        for token in value.split(|byte| *byte == b',') {
            let token = token.trim_ascii();
            self.close |= token.eq_ignore_ascii_case(b"close");
            self.keep_alive |= token.eq_ignore_ascii_case(b"keep-alive");
        }
    }
}

/// `Host` is needed in HTTP/1.1, and it goes into `Location`, so it must look like a host. A comma
/// is legal in theory but in practice two merged headers.
#[inline]
fn check_host(head: &mut Head<'_>, authority: Option<&[u8]>) -> Result<(), HttpError> {
    let sent = head.get(Known::Host);
    if sent.is_none() && head.minor_version == 1 {
        return Err(HttpError::BadRequest("missing header host"));
    }
    if !is_host(sent.unwrap_or_default()) {
        return Err(HttpError::BadRequest("malformed header host"));
    }
    if let Some(authority) = authority {
        if !is_host(authority) {
            return Err(HttpError::BadRequest("malformed host in the target"));
        }
        head.slots[Known::Host as usize] = Span::of(head.buffer, authority);
    }
    Ok(())
}

#[inline]
fn framing(head: &Head<'_>) -> Result<Framing, HttpError> {
    match (
        head.get(Known::ContentLength),
        head.get(Known::TransferEncoding),
    ) {
        (None, None) => Ok(Framing::None),
        (Some(length), None) => parse_decimal_u64(length)
            .map(Framing::Length)
            .ok_or(HttpError::BadRequest("malformed header content-length")),
        (Some(_), Some(_)) => Err(HttpError::BadRequest(
            "both content-length and transfer-encoding",
        )),
        (None, Some(_)) if head.minor_version == 0 => Err(HttpError::BadRequest(
            "transfer-encoding in an HTTP/1.0 request",
        )),
        (None, Some(coding)) if is_chunked(coding) => Ok(Framing::Chunked),
        (None, Some(codings)) => Err(refused_coding(codings)),
    }
}

/// One coding, or a list properly ended by one `chunked`, is merely unsupported. Anything else does
/// not tell where the body ends.
#[cold]
fn refused_coding(codings: &[u8]) -> HttpError {
    let mut list = codings.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    let last = list.next().unwrap_or_default();
    let is_list = codings.contains(&b',');
    let others_are_sound = list.all(|coding| !coding.is_empty() && !is_chunked(coding));
    if !last.is_empty() && (!is_list || is_chunked(last) && others_are_sound) {
        HttpError::NotImplemented("the only supported transfer coding is chunked")
    } else {
        HttpError::BadRequest("malformed header transfer-encoding")
    }
}

fn is_chunked(coding: &[u8]) -> bool {
    coding.eq_ignore_ascii_case(b"chunked")
}

/// An HTTP/1.0 client cannot read `100 Continue`, so its expectation does not count.
#[inline]
fn expectation(head: &Head<'_>) -> Result<bool, HttpError> {
    match head.get(Known::Expect) {
        None => Ok(false),
        Some(value) if value.eq_ignore_ascii_case(b"100-continue") => {
            let has_body = !matches!(head.framing, Framing::None | Framing::Length(0));
            Ok(has_body && head.minor_version == 1)
        }
        Some(_) => Err(HttpError::ExpectationFailed),
    }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "http_property_tests.rs"]
mod property_tests;
