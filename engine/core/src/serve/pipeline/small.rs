//! Which questions and reads take next to no time, so that they need not wait behind those that do.
//!
//! Told from the body alone, before a worker has it: what cannot be told is not small.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::limits::{SMALL_QUESTION_BYTES, SMALL_READ_BYTES};
use crate::model::Offset;

/// The keys are read as the worker will read them. An array would be taken for the fields in their order.
fn small_object<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Option<T> {
    let is_small = body.len() <= SMALL_QUESTION_BYTES && body.trim_ascii_start().starts_with(b"{");
    is_small
        .then(|| serde_json::from_slice(body).ok())
        .flatten()
}

/// Whether a question is about a few streams that it names: a pattern may match thousands, and take long to compile.
pub fn is_small_question(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Asked {
        pattern: Option<IgnoredAny>,
    }
    small_object(body).is_some_and(|asked: Asked| asked.pattern.is_none())
}

/// Whether there is little between the places of a read: `max_bytes` bounds what it answers, not what it looks through.
/// How much lies in an append whose middle is meant cannot be told: `Read` has a bound for that.
pub fn is_small_read(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Asked<'a> {
        #[serde(borrow)]
        ranges: Vec<Range<'a>>,
    }
    #[derive(Deserialize)]
    struct Range<'a> {
        #[serde(borrow)]
        from: Place<'a>,
        #[serde(borrow)]
        to: Place<'a>,
    }
    #[derive(Deserialize)]
    struct Place<'a> {
        #[serde(borrow)]
        offset: Cow<'a, str>,
        number: u64,
    }
    let position = |place: &Place<'_>| Some(Offset::parse(place.offset.as_bytes())?.position);
    let between = |range: &Range<'_>| {
        let bytes = position(&range.to)?.checked_sub(position(&range.from)?)?;
        let inside_one = bytes == 0 && range.from.number != range.to.number;
        (!inside_one).then_some(bytes)
    };
    small_object(body).is_some_and(|asked: Asked<'_>| {
        let mut ranges = asked.ranges.iter();
        let bytes = ranges.try_fold(0u64, |sum, range| sum.checked_add(between(range)?));
        bytes.is_some_and(|bytes| bytes <= SMALL_READ_BYTES)
    })
}
