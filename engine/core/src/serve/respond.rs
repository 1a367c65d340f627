//! Rendering answers into a connection's output. One place for status lines, common headers and problems.

use crate::error::ErrorCode;
use crate::model::Offset;
use crate::refusal::Refusal;

/// What every answer on a connection needs to know.
#[derive(Clone, Copy)]
pub struct Reply<'a> {
    pub date: &'a str,
    /// The request came from a page: CORS headers go with the answer.
    pub cors: bool,
    pub keep_alive: bool,
    /// Answer to HEAD: headers as for GET, no body.
    pub head_only: bool,
    /// The control plane's: not for other origins.
    pub control: bool,
}

/// The interim answer.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
pub const EXPOSED: &str = "Stream-Next-Offset, Stream-Cursor, Stream-Up-To-Date, Stream-Closed, Stream-TTL, \
Stream-Expires-At, Stream-SSE-Data-Encoding, Stream-Incarnation, Stream-Durability, Stream-Gap, ETag, Location, \
Producer-Epoch, Producer-Seq, Producer-Expected-Seq, Producer-Received-Seq, Content-Type, Content-Encoding, Vary, \
Retry-After, Server-Timing";
const ALLOWED: &str = "Content-Type, Authorization, If-Match, If-None-Match, Stream-Seq, Stream-TTL, Stream-Expires-At, \
Stream-Closed, Stream-Durability, Producer-Id, Producer-Epoch, Producer-Seq, Stream-Forked-From, Stream-Fork-Offset, \
Stream-Fork-Sub-Offset, Millstream-Timing, Cache-Control, Last-Event-ID, Accept";

pub fn reason(status: u16) -> &'static str {
    match status {
        100 => "Continue",
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        304 => "Not Modified",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        410 => "Gone",
        412 => "Precondition Failed",
        413 => "Content Too Large",
        414 => "URI Too Long",
        417 => "Expectation Failed",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        507 => "Insufficient Storage",
        _ => "Status",
    }
}

/// Status line and common headers.
pub fn begin(out: &mut Vec<u8>, status: u16, reply: &Reply<'_>) {
    out.extend_from_slice(b"HTTP/1.1 ");
    put_number(out, u64::from(status));
    out.push(b' ');
    out.extend_from_slice(reason(status).as_bytes());
    out.extend_from_slice(b"\r\nDate: ");
    out.extend_from_slice(reply.date.as_bytes());
    out.extend_from_slice(b"\r\nX-Content-Type-Options: nosniff\r\n");
    let policy: &[u8] = if reply.control {
        b"same-origin"
    } else {
        b"cross-origin"
    };
    header(out, "Cross-Origin-Resource-Policy", policy);
    if reply.cors {
        out.extend_from_slice(b"Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: ");
        out.extend_from_slice(EXPOSED.as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    if !reply.keep_alive {
        out.extend_from_slice(b"Connection: close\r\n");
    }
}

pub fn header(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

pub fn number_header(out: &mut Vec<u8>, name: &str, value: u64) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    put_number(out, value);
    out.extend_from_slice(b"\r\n");
}

pub fn next_offset(out: &mut Vec<u8>, offset: Offset) {
    out.extend_from_slice(b"Stream-Next-Offset: ");
    offset.write_to(out);
    out.extend_from_slice(b"\r\n");
}

/// Ends the head of an answer without a body.
pub fn end_empty(out: &mut Vec<u8>, status: u16) {
    if status != 204 && status != 304 {
        out.extend_from_slice(b"Content-Length: 0\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

/// Ends the head and adds a whole body.
pub fn end_body(out: &mut Vec<u8>, content_type: &str, body: &[u8], reply: &Reply<'_>) {
    header(out, "Content-Type", content_type.as_bytes());
    number_header(out, "Content-Length", body.len() as u64);
    out.extend_from_slice(b"\r\n");
    if !reply.head_only {
        out.extend_from_slice(body);
    }
}

/// A refusal as a problem document with its protocol headers.
pub fn problem(out: &mut Vec<u8>, refusal: &Refusal, reply: &Reply<'_>) {
    let status = refusal.code.status();
    begin(out, status, reply);
    if let Some(offset) = refusal.headers.next_offset {
        next_offset(out, offset);
    }
    if refusal.headers.closed {
        header(out, "Stream-Closed", b"true");
    }
    if let Some(epoch) = refusal.headers.producer_epoch {
        number_header(out, "Producer-Epoch", epoch);
    }
    if let Some((expected, received)) = refusal.headers.producer_expected_and_received_seq {
        number_header(out, "Producer-Expected-Seq", expected);
        number_header(out, "Producer-Received-Seq", received);
    }
    if status == 503 || status == 429 {
        header(out, "Retry-After", b"1");
    }
    header(out, "Cache-Control", b"no-store");
    if refusal.code == ErrorCode::MethodNotAllowed {
        header(out, "Allow", refusal.headers.allow.methods().as_bytes());
    }
    let mut body = Vec::with_capacity(256);
    problem_body(&mut body, refusal);
    end_body(out, "application/problem+json", &body, reply);
}

fn problem_body(body: &mut Vec<u8>, refusal: &Refusal) {
    body.extend_from_slice(b"{\"type\":\"about:blank\",\"status\":");
    put_number(body, u64::from(refusal.code.status()));
    let fields = [
        ("code", refusal.code.code()),
        ("title", refusal.code.title()),
        ("detail", refusal.sentence()),
        ("hint", refusal.code.hint()),
    ];
    for (name, value) in fields.into_iter().filter(|(_, value)| !value.is_empty()) {
        body.extend_from_slice(b",\"");
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(b"\":");
        put_json_string(body, value);
    }
    body.push(b'}');
}

pub fn put_json_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0..=0x1f => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

/// The answer to a preflight: what pages of other origins may do with streams.
pub fn preflight(out: &mut Vec<u8>, reply: &Reply<'_>) {
    begin(
        out,
        204,
        &Reply {
            cors: true,
            ..*reply
        },
    );
    header(
        out,
        "Access-Control-Allow-Methods",
        b"GET, HEAD, POST, PUT, DELETE, OPTIONS",
    );
    header(out, "Access-Control-Allow-Headers", ALLOWED.as_bytes());
    header(out, "Access-Control-Max-Age", b"86400");
    end_empty(out, 204);
}

pub fn put_number(out: &mut Vec<u8>, value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut rest = value;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}
