//! JSON mode at ingest: validates a body and flattens a top-level array into wire form.
//!
//! Where it sits: `serve/append` calls [`flatten_into`] on the body of a JSON stream; readers and
//! the index use [`message_ends`] to find record boundaries in stored bytes. Pure: no I/O.
//!
//! Wire form: each message's original text followed by a comma, so that a read is `[`, a range
//! without its last comma, `]`. Example: `[ 1 ,{"a": [2]}]` becomes `1,{"a": [2]},`.
//!
//! Invariants:
//! - A message's text is never changed: no number, key order, escape or inner blank is touched.
//! - No recursion and no heap beside `out`: nesting is a fixed stack of bits.
//! - `out` grows by at most `body.len() + 1` bytes, whatever the number of messages: an array has
//!   a comma or bracket of its own for the comma that each of its messages gets.
//! - On error `out` keeps its length and content.

/// Deepest nesting of arrays and objects, the top-level array included.
pub const DEPTH_MAX: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonError {
    /// Byte of the body where it stopped being acceptable.
    pub position: usize,
    pub reason: &'static str,
}

pub(super) type Scan = Result<usize, JsonError>;

fn refuse<T>(position: usize, reason: &'static str) -> Result<T, JsonError> {
    Err(JsonError { position, reason })
}

/// Validates `body` as one JSON text (RFC 8259, UTF-8) and appends its messages to `out` in wire
/// form: the elements of a top-level array, or the one value that the body is. Returns the number
/// of messages, 0 for `[]`.
pub fn flatten_into(body: &[u8], out: &mut Vec<u8>) -> Result<u32, JsonError> {
    if body.starts_with(b"\xef\xbb\xbf") {
        return refuse(0, "byte order mark");
    }
    if let Err(error) = std::str::from_utf8(body) {
        return refuse(error.valid_up_to(), "not UTF-8");
    }
    let start = skip_blanks(body, 0);
    if start == body.len() {
        return refuse(start, "empty");
    }
    let kept = out.len();
    let flattened = if body[start] == b'[' {
        flatten_array(body, start + 1, out)
    } else {
        flatten_single(body, start, out)
    };
    if flattened.is_err() {
        out.truncate(kept);
    }
    flattened
}

/// Validates `text` as one JSON text and appends it to `out` as one message, an array too: what a staged row is.
pub fn record_into(text: &[u8], out: &mut Vec<u8>) -> Result<(), JsonError> {
    if text.starts_with(b"\xef\xbb\xbf") {
        return refuse(0, "byte order mark");
    }
    if let Err(error) = std::str::from_utf8(text) {
        return refuse(error.valid_up_to(), "not UTF-8");
    }
    let start = skip_blanks(text, 0);
    if start == text.len() {
        return refuse(start, "empty");
    }
    flatten_single(text, start, out).map(|_| ())
}

fn flatten_single(body: &[u8], start: usize, out: &mut Vec<u8>) -> Result<u32, JsonError> {
    let end = skip_value(body, start, &mut Nesting::default())?;
    expect_end(body, end)?;
    out.reserve(end - start + 1);
    out.extend_from_slice(&body[start..end]);
    out.push(b',');
    Ok(1)
}

/// `at` is just after the opening bracket.
fn flatten_array(body: &[u8], at: usize, out: &mut Vec<u8>) -> Result<u32, JsonError> {
    let mut at = skip_blanks(body, at);
    if body.get(at) == Some(&b']') {
        expect_end(body, at + 1)?;
        return Ok(0);
    }
    out.reserve(body.len() - at);
    let mut nesting = Nesting::default();
    nesting.open(Container::Array);
    let mut messages = 0u32;
    // Messages with nothing but their comma between them are already in wire form: they are copied
    // as one run, which is the whole array if its writer used no blanks.
    let mut run = at;
    loop {
        let end = match body.get(at) {
            Some(b'{' | b'[') => skip_value(body, at, &mut nesting)?,
            _ => skip_scalar(body, at)?,
        };
        messages = match messages.checked_add(1) {
            Some(messages) => messages,
            None => return refuse(at, "too many messages"),
        };
        let separator = skip_blanks(body, end);
        match body.get(separator) {
            Some(b',') => {
                at = skip_blanks(body, separator + 1);
                if at != end + 1 {
                    out.extend_from_slice(&body[run..end]);
                    out.push(b',');
                    run = at;
                }
            }
            Some(b']') => {
                out.extend_from_slice(&body[run..end]);
                out.push(b',');
                expect_end(body, separator + 1)?;
                return Ok(messages);
            }
            Some(_) => return refuse(separator, "expected a comma or the end of the array"),
            None => return refuse(separator, "unexpected end"),
        }
    }
}

fn expect_end(body: &[u8], at: usize) -> Result<(), JsonError> {
    let end = skip_blanks(body, at);
    if end < body.len() {
        refuse(end, "text after the value")
    } else {
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Container {
    Array,
    Object,
}

/// The open arrays and objects: one bit each, set for an object.
pub(super) struct Nesting {
    depth: usize,
    bits: [u64; DEPTH_MAX / 64],
}

impl Default for Nesting {
    fn default() -> Self {
        Self {
            depth: 0,
            bits: [0; DEPTH_MAX / 64],
        }
    }
}

impl Nesting {
    /// False if there is no room left.
    #[inline]
    fn open(&mut self, container: Container) -> bool {
        if self.depth == DEPTH_MAX {
            return false;
        }
        let (word, bit) = (self.depth / 64, 1u64 << (self.depth % 64));
        match container {
            Container::Array => self.bits[word] &= !bit,
            Container::Object => self.bits[word] |= bit,
        }
        self.depth += 1;
        true
    }

    /// Closes the innermost container and returns the one around it. Only called below `open`.
    #[inline]
    fn close(&mut self) -> Container {
        self.depth -= 1;
        self.innermost()
    }

    #[inline]
    fn innermost(&self) -> Container {
        let index = self.depth.wrapping_sub(1) % DEPTH_MAX;
        if self.bits[index / 64] >> (index % 64) & 1 == 1 {
            Container::Object
        } else {
            Container::Array
        }
    }
}

/// Validates the value at `at` (no blanks before it) and returns its end. `nesting` holds what is
/// open around the value and is the same afterwards.
pub(super) fn skip_value(body: &[u8], mut at: usize, nesting: &mut Nesting) -> Scan {
    let base = nesting.depth;
    let mut inside = nesting.innermost();
    loop {
        let opened = match body.get(at) {
            Some(b'{') => Some(Container::Object),
            Some(b'[') => Some(Container::Array),
            _ => {
                at = skip_scalar(body, at)?;
                None
            }
        };
        if let Some(container) = opened {
            if !nesting.open(container) {
                return refuse(at, "nested too deeply");
            }
            inside = container;
            at = skip_blanks(body, at + 1);
            match (container, body.get(at)) {
                (Container::Object, Some(b'}')) | (Container::Array, Some(b']')) => {
                    at += 1;
                    inside = nesting.close();
                }
                (Container::Object, _) => {
                    at = skip_key(body, at)?;
                    continue;
                }
                (Container::Array, _) => continue,
            }
        }
        // A value has ended: close what ends with it, up to the comma before the next one.
        loop {
            if nesting.depth == base {
                return Ok(at);
            }
            at = skip_blanks(body, at);
            match (inside, body.get(at)) {
                (Container::Array, Some(b',')) => {
                    at = skip_blanks(body, at + 1);
                    break;
                }
                (Container::Object, Some(b',')) => {
                    at = skip_key(body, skip_blanks(body, at + 1))?;
                    break;
                }
                (Container::Array, Some(b']')) | (Container::Object, Some(b'}')) => {
                    at += 1;
                    inside = nesting.close();
                }
                (Container::Array, Some(_)) => {
                    return refuse(at, "expected a comma or the end of the array");
                }
                (Container::Object, Some(_)) => {
                    return refuse(at, "expected a comma or the end of the object");
                }
                (_, None) => return refuse(at, "unexpected end"),
            }
        }
    }
}

#[inline]
fn skip_scalar(body: &[u8], at: usize) -> Scan {
    match body.get(at) {
        Some(b'"') => skip_string(body, at + 1),
        Some(b'-' | b'0'..=b'9') => skip_number(body, at),
        Some(b't') => skip_literal(body, at, b"true"),
        Some(b'f') => skip_literal(body, at, b"false"),
        Some(b'n') => skip_literal(body, at, b"null"),
        Some(_) => refuse(at, "expected a value"),
        None => refuse(at, "unexpected end"),
    }
}

/// A key with its colon; returns the first byte of the value.
#[inline]
pub(super) fn skip_key(body: &[u8], at: usize) -> Scan {
    match body.get(at) {
        Some(b'"') => {}
        Some(_) => return refuse(at, "expected a key"),
        None => return refuse(at, "unexpected end"),
    }
    let colon = skip_blanks(body, skip_string(body, at + 1)?);
    match body.get(colon) {
        Some(b':') => Ok(skip_blanks(body, colon + 1)),
        Some(_) => refuse(colon, "expected a colon"),
        None => refuse(colon, "unexpected end"),
    }
}

#[inline]
pub(super) fn skip_blanks(body: &[u8], mut at: usize) -> usize {
    while let Some(b' ' | b'\n' | b'\r' | b'\t') = body.get(at) {
        at += 1;
    }
    at
}

fn skip_literal(body: &[u8], at: usize, literal: &[u8]) -> Scan {
    if body[at..].starts_with(literal) {
        Ok(at + literal.len())
    } else {
        refuse(at, "expected true, false or null")
    }
}

#[inline]
fn skip_digits(body: &[u8], mut at: usize) -> usize {
    while let Some(b'0'..=b'9') = body.get(at) {
        at += 1;
    }
    at
}

#[inline]
fn skip_number(body: &[u8], start: usize) -> Scan {
    let whole = if body[start] == b'-' {
        start + 1
    } else {
        start
    };
    let mut at = match body.get(whole) {
        Some(b'0') => whole + 1,
        _ => needed_digits(body, whole)?,
    };
    if let Some(b'0'..=b'9') = body.get(at) {
        return refuse(whole, "leading zero in a number");
    }
    if body.get(at) == Some(&b'.') {
        at = needed_digits(body, at + 1)?;
    }
    if let Some(b'e' | b'E') = body.get(at) {
        at += 1;
        if let Some(b'+' | b'-') = body.get(at) {
            at += 1;
        }
        at = needed_digits(body, at)?;
    }
    Ok(at)
}

#[inline]
fn needed_digits(body: &[u8], at: usize) -> Scan {
    let end = skip_digits(body, at);
    if end == at {
        refuse(at, "digit missing in a number")
    } else {
        Ok(end)
    }
}

/// `at` is just after the opening quote; returns the byte after the closing one. Surrogates written
/// as escapes need not pair up: the text is kept, not interpreted.
#[inline]
pub(super) fn skip_string(body: &[u8], mut at: usize) -> Scan {
    loop {
        at = skip_plain(body, at);
        match body.get(at) {
            Some(b'"') => return Ok(at + 1),
            Some(b'\\') => at = skip_escape(body, at)?,
            Some(_) => return refuse(at, "control character in a string"),
            None => return refuse(at, "unexpected end"),
        }
    }
}

#[inline(never)]
fn skip_escape(body: &[u8], at: usize) -> Scan {
    match body.get(at + 1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 2),
        Some(b'u') => match body.get(at + 2..at + 6) {
            Some(digits) if digits.iter().all(u8::is_ascii_hexdigit) => Ok(at + 6),
            _ => refuse(at, "malformed escape"),
        },
        _ => refuse(at, "malformed escape"),
    }
}

const ONES: u64 = 0x0101_0101_0101_0101;
const HIGHS: u64 = 0x8080_8080_8080_8080;

/// The high bit of each byte of `word` that is a quote, a backslash or a control character. Exact
/// for the lowest marked byte, which is the only one used: a borrow can only mark bytes above it.
#[inline]
fn mark_special(word: u64) -> u64 {
    let quote = word ^ (ONES * b'"' as u64);
    let backslash = word ^ (ONES * b'\\' as u64);
    let control = word.wrapping_sub(ONES * 0x20) & !word;
    let equal = quote.wrapping_sub(ONES) & !quote | backslash.wrapping_sub(ONES) & !backslash;
    (equal | control) & HIGHS
}

/// First byte from `at` on that cannot simply stand in a string, or the end. Eight bytes at a time.
#[inline]
fn skip_plain(body: &[u8], mut at: usize) -> usize {
    while let Some(word) = body.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
        let special = mark_special(u64::from_le_bytes(*word));
        if special != 0 {
            return at + special.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    while let Some(byte) = body.get(at) {
        if matches!(byte, b'"' | b'\\' | 0..=0x1f) {
            break;
        }
        at += 1;
    }
    at
}

/// Ends (exclusive, just after the comma) of the messages in wire bytes that [`flatten_into`] wrote.
/// What follows the last comma outside of any message, if anything does, has no end and is not
/// reported. Bytes of another origin give meaningless ends, but inside the slice and increasing.
pub fn message_ends(wire: &[u8]) -> MessageEnds<'_> {
    MessageEnds { wire, at: 0 }
}

pub struct MessageEnds<'w> {
    wire: &'w [u8],
    at: usize,
}

impl Iterator for MessageEnds<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let mut depth = 0usize;
        let mut at = self.at;
        while let Some(byte) = self.wire.get(at) {
            at += 1;
            match byte {
                b'"' => at = after_string(self.wire, at),
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth = depth.saturating_sub(1),
                b',' if depth == 0 => {
                    self.at = at;
                    return Some(at);
                }
                _ => {}
            }
        }
        self.at = self.wire.len();
        None
    }
}

/// The byte after the closing quote, or the end; `at` is just after the opening one.
#[inline]
fn after_string(wire: &[u8], mut at: usize) -> usize {
    loop {
        at = skip_plain(wire, at);
        match wire.get(at) {
            Some(b'"') => return at + 1,
            Some(b'\\') => at += 2,
            Some(_) => at += 1,
            None => return wire.len(),
        }
    }
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
