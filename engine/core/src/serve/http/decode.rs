//! Small strict decoders for paths, query strings and header values.
//!
//! Where it sits: below `serve/http`, used by `serve/route`.
//!
//! Invariants: a malformed escape or number is refused, never guessed at; decoding happens exactly
//! once and only on demand.

use std::borrow::Cow;

use memchr::{memchr, memchr2};

use super::HttpError;

/// Decodes `%XX` in a path; `+` stays. The result may hold any byte, NUL and `/` included: what a
/// stream name may contain is the router's decision.
pub fn percent_decode(path: &[u8]) -> Result<Cow<'_, [u8]>, HttpError> {
    if memchr(b'%', path).is_none() {
        return Ok(Cow::Borrowed(path));
    }
    decode_escapes(path, false)
        .map(Cow::Owned)
        .ok_or(HttpError::BadRequest(
            "malformed percent-encoding in the path",
        ))
}

/// Decodes `%XX` and `+` in a raw key or value of [`query_pairs`]. `None` for a malformed escape.
pub fn decode_query_component(component: &[u8]) -> Option<Vec<u8>> {
    if memchr2(b'%', b'+', component).is_none() {
        return Some(component.to_vec());
    }
    decode_escapes(component, true)
}

fn decode_escapes(input: &[u8], plus_is_space: bool) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(input.len());
    let mut rest = input;
    while let [byte, after @ ..] = rest {
        rest = after;
        match byte {
            b'%' => {
                let [high, low, after @ ..] = rest else {
                    return None;
                };
                let high = char::from(*high).to_digit(16)?;
                let low = char::from(*low).to_digit(16)?;
                decoded.push((high << 4 | low) as u8);
                rest = after;
            }
            b'+' if plus_is_space => decoded.push(b' '),
            byte => decoded.push(*byte),
        }
    }
    Some(decoded)
}

/// Raw (key, value) pairs of a query string; a key without `=` has an empty value, empty pieces are
/// skipped.
pub fn query_pairs(query: &[u8]) -> QueryPairs<'_> {
    QueryPairs { rest: query }
}

pub struct QueryPairs<'q> {
    rest: &'q [u8],
}

impl<'q> Iterator for QueryPairs<'q> {
    type Item = (&'q [u8], &'q [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        while !self.rest.is_empty() {
            let (piece, rest) = cut(self.rest, b'&');
            self.rest = rest;
            if !piece.is_empty() {
                return Some(cut(piece, b'='));
            }
        }
        None
    }
}

/// What stands before and after the first `mark`; the mark itself is dropped.
fn cut(input: &[u8], mark: u8) -> (&[u8], &[u8]) {
    match memchr(mark, input) {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (input, &[]),
    }
}

/// A Content-Type without parameters and blanks; the caller compares it case-insensitively.
pub fn media_type(value: &[u8]) -> &[u8] {
    cut(value, b';').0.trim_ascii()
}

/// `Stream-Closed` counts only as exactly `true` in any case; everything else is as if absent.
pub fn is_true(value: &[u8]) -> bool {
    value.eq_ignore_ascii_case(b"true")
}

/// Digits only: no sign, no blanks, no overflow. Leading zeros are the caller's business.
#[inline]
pub fn parse_decimal_u64(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    let mut value = 0u64;
    for byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    Some(value)
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
