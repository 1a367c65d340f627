//! `PUT` and `DELETE /v1/stage/{id}`: rows come in, checked, and wait for a commit.

use std::sync::Arc;

use serde::Serialize;

use crate::error::ErrorCode;
use crate::refusal::Refusal;
use crate::serve::http::{decode_query_component, query_pairs};
use crate::serve::pipeline::arrow_rows::{Malformed, Reader, Rows};
use crate::serve::pipeline::{Answer, Request};
use crate::shard::engine::{Engine, Undone};
use crate::shard::stage::{StageBuilder, Staged};

#[derive(Serialize)]
struct Described<'a> {
    id: &'a str,
    rows: u64,
    bytes: u64,
    checksum: String,
    expires_ms: u64,
    streams: Vec<DescribedStream<'a>>,
}

#[derive(Serialize)]
struct DescribedStream<'a> {
    name: &'a str,
    incarnation: String,
    rows: u64,
    bytes: u64,
}

pub fn put(engine: &Arc<Engine>, id: &str, request: &Request) -> Result<Answer, Undone> {
    let checksum = crc32fast::hash(&request.body);
    check_sum(request.body_crc32.as_deref(), checksum)?;
    let body_bytes = request.body.len() as u64;
    if let Some(staged) = engine.staged_before(id, checksum, body_bytes)? {
        return answer(engine, &staged);
    }
    let stream = stream_of(request.query.as_deref())?;
    let mut reader = Reader::begin(&request.body, stream.is_none()).map_err(refuse)?;
    let rows = reader.count_rows().map_err(refuse)?;
    let mut builder = StageBuilder::new(engine, rows, body_bytes)?;
    let named = match &stream {
        Some(name) => Some(builder.target(name)?),
        None => None,
    };
    while let Some(rows) = reader.next_rows().map_err(refuse)? {
        push_rows(&mut builder, &rows, named)?;
    }
    let staged = builder.finish(id, checksum, body_bytes)?;
    answer(engine, &staged)
}

pub fn delete(engine: &Arc<Engine>, id: &str) -> Result<Answer, Undone> {
    engine.drop_stage(id)?;
    Ok(Answer::json(204, Vec::new()))
}

fn push_rows(
    builder: &mut StageBuilder<'_>,
    rows: &Rows<'_>,
    named: Option<usize>,
) -> Result<(), Undone> {
    // Rows of one stream often follow each other.
    let mut last: Option<(&[u8], usize)> = None;
    for row in 0..rows.count {
        let target = match (named, rows.stream(row).map_err(refuse)?) {
            (Some(target), _) => target,
            (None, Some(name)) => match last {
                Some((known, target)) if known == name => target,
                _ => {
                    let target = builder.target(text_of(name)?)?;
                    last = Some((name, target));
                    target
                }
            },
            (None, None) => return Err(Undone::refused(ErrorCode::Internal)),
        };
        builder.push(target, rows.value(row).map_err(refuse)?)?;
    }
    Ok(())
}

fn text_of(name: &[u8]) -> Result<&str, Undone> {
    std::str::from_utf8(name)
        .map_err(|_| refuse(Malformed("the name of a stream is not UTF-8".to_owned())))
}

fn refuse(Malformed(what): Malformed) -> Undone {
    let mut detail = what;
    if let Some(first) = detail.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    detail.push('.');
    Undone::refused(Refusal::with(ErrorCode::ArrowInvalid, detail))
}

fn check_sum(sent: Option<&[u8]>, found: u32) -> Result<(), Undone> {
    let Some(sent) = sent else { return Ok(()) };
    let text = std::str::from_utf8(sent)
        .ok()
        .filter(|text| text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let detail = match text.and_then(|text| u32::from_str_radix(text, 16).ok()) {
        Some(sent) if sent == found => return Ok(()),
        Some(sent) => format!("Millstream-Body-Crc32 is {sent:08x}, the body has {found:08x}."),
        None => "Millstream-Body-Crc32 is not 8 hexadecimal digits.".to_owned(),
    };
    Err(Undone::refused(Refusal::with(
        ErrorCode::ChecksumMismatch,
        detail,
    )))
}

/// `?stream=NAME`, the only thing that may be asked.
fn stream_of(query: Option<&[u8]>) -> Result<Option<String>, Undone> {
    let bad = |detail: &'static str| Undone::refused(Refusal::with(ErrorCode::BadRequest, detail));
    let mut stream = None;
    for (key, value) in query_pairs(query.unwrap_or(b"")) {
        if key != b"stream" || stream.is_some() {
            return Err(bad("The query of a stage is ?stream=NAME."));
        }
        let name = decode_query_component(value).and_then(|bytes| String::from_utf8(bytes).ok());
        let name = name.filter(|name| !name.is_empty());
        stream = Some(name.ok_or_else(|| bad("?stream= is not the name of a stream."))?);
    }
    Ok(stream)
}

fn answer(engine: &Engine, staged: &Staged) -> Result<Answer, Undone> {
    let record = &staged.record;
    let streams: Vec<DescribedStream<'_>> = record
        .streams
        .iter()
        .map(|staged| DescribedStream {
            name: &staged.name,
            incarnation: staged.stream.0.to_string(),
            rows: staged.section.records,
            bytes: staged.section.len,
        })
        .collect();
    let ttl_ms = engine.config.stage_ttl_s.saturating_mul(1000);
    let described = Described {
        id: &record.head.id,
        rows: record.head.rows,
        bytes: streams.iter().map(|stream| stream.bytes).sum(),
        checksum: format!("{:08x}", record.head.checksum),
        expires_ms: record.head.time_ms.saturating_add(ttl_ms),
        streams,
    };
    let body = serde_json::to_vec(&described);
    let body = body.map_err(|_| Undone::refused(ErrorCode::Internal))?;
    let status = if staged.new { 201 } else { 200 };
    Ok(Answer::json(status, body))
}
