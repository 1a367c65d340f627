//! `POST /v1/read`: ranges of streams as one window of Arrow.
//!
//! The request is checked here and the answer put together; `walk` goes through the ranges.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::limits::{
    READ_LOOKED_THROUGH_MAX, READ_MAX_BYTES, READ_MAX_BYTES_DEFAULT, READ_RANGES_MAX,
    SMALL_READ_BYTES,
};
use crate::model::{Gate, Offset, StreamId, is_reserved};
use crate::refusal::Refusal;
use crate::serve::pipeline::arrow::{Column, Encoder};
use crate::serve::pipeline::lists::Bounded;
use crate::serve::pipeline::small::is_small_read;
use crate::serve::pipeline::tails::ToldGap;
use crate::serve::pipeline::waits::Asker;
use crate::serve::pipeline::walk::{Next, Walk};
use crate::serve::pipeline::{Answer, take_answer_room};
use crate::shard::engine::{Engine, Undone};
use crate::shard::tails::Place;
use crate::stream::key::KeyPath;

/// Longest `key_path`.
const KEY_PATH_MAX_BYTES: usize = 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked<'a> {
    #[serde(borrow)]
    ranges: Bounded<AskedRange<'a>, READ_RANGES_MAX>,
    #[serde(borrow)]
    columns: Option<Bounded<Cow<'a, str>, { Column::ALL.len() }>>,
    #[serde(borrow)]
    key_path: Option<Cow<'a, str>>,
    max_bytes: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedRange<'a> {
    #[serde(borrow)]
    stream: Cow<'a, str>,
    #[serde(borrow)]
    incarnation: Option<Cow<'a, str>>,
    #[serde(borrow)]
    from: AskedPlace<'a>,
    #[serde(borrow)]
    to: AskedPlace<'a>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedPlace<'a> {
    #[serde(borrow)]
    offset: Cow<'a, str>,
    number: u64,
}

/// A range that is well formed.
pub struct Range {
    pub stream: String,
    pub incarnation: Option<StreamId>,
    pub from: Place,
    pub to: Place,
}

/// What a read is about.
pub struct Read {
    pub ranges: Vec<Range>,
    columns: Vec<Column>,
    pub key_path: Option<KeyPath>,
    pub max_bytes: usize,
    /// Bytes of appends that one window looks through for its records, about.
    pub looked_through_max: u64,
}

impl Read {
    fn parse(body: &[u8]) -> Result<Read, Refusal> {
        let asked: Asked<'_> = super::parse_json(body)?;
        if asked.ranges.0.len() > READ_RANGES_MAX {
            return Err(bad(format!("A read has at most {READ_RANGES_MAX} ranges.")));
        }
        let ranges: Result<Vec<Range>, Refusal> = asked
            .ranges
            .0
            .into_iter()
            .enumerate()
            .map(|(number, range)| parse_range(number, range))
            .collect();
        let columns = parse_columns(asked.columns.as_ref().map(|names| names.0.as_slice()))?;
        let key_path = asked.key_path.as_deref().map(parse_key_path).transpose()?;
        if columns.contains(&Column::Key) && key_path.is_none() {
            return Err(bad("The column key needs a key_path."));
        }
        let max_bytes = asked.max_bytes.unwrap_or(READ_MAX_BYTES_DEFAULT);
        if !(1..=READ_MAX_BYTES).contains(&max_bytes) {
            return Err(bad(format!("max_bytes is 1 to {READ_MAX_BYTES}.")));
        }
        Ok(Read {
            ranges: ranges?,
            columns,
            key_path,
            max_bytes: max_bytes as usize,
            looked_through_max: if is_small_read(body) {
                SMALL_READ_BYTES
            } else {
                READ_LOOKED_THROUGH_MAX
            },
        })
    }
}

fn bad(detail: impl Into<Cow<'static, str>>) -> Refusal {
    Refusal::with(ErrorCode::BadRequest, detail)
}

fn parse_range(number: usize, asked: AskedRange<'_>) -> Result<Range, Refusal> {
    if is_reserved(&asked.stream) {
        return Err(bad(format!("{:?} is a reserved name.", asked.stream)));
    }
    let incarnation = asked.incarnation.map(|text| {
        let id = text.parse().map(StreamId);
        id.map_err(|_| {
            bad(format!(
                "ranges[{number}]: the incarnation is not a number."
            ))
        })
    });
    Ok(Range {
        stream: asked.stream.into_owned(),
        incarnation: incarnation.transpose()?,
        from: parse_place(number, "from", &asked.from)?,
        to: parse_place(number, "to", &asked.to)?,
    })
}

fn parse_place(number: usize, name: &str, asked: &AskedPlace<'_>) -> Result<Place, Refusal> {
    let offset = match &*asked.offset {
        "-1" => Some(Offset::START),
        text => Offset::parse(text.as_bytes()),
    };
    let offset = offset.ok_or_else(|| {
        Refusal::with(
            ErrorCode::OffsetInvalid,
            format!("ranges[{number}]: {name} has no offset that a server returned."),
        )
    })?;
    Ok(Place {
        offset,
        number: asked.number,
    })
}

fn parse_columns(names: Option<&[Cow<'_, str>]>) -> Result<Vec<Column>, Refusal> {
    let Some(names) = names else {
        return Ok(Column::DEFAULT.to_vec());
    };
    let mut columns = Vec::with_capacity(names.len());
    for name in names {
        let column = Column::parse(name).ok_or_else(|| {
            let known: Vec<&str> = Column::ALL.into_iter().map(Column::name).collect();
            bad(format!(
                "There is no column {name:?}; there are {}.",
                known.join(", ")
            ))
        })?;
        if columns.contains(&column) {
            return Err(bad(format!("Column {name} is requested twice.")));
        }
        columns.push(column);
    }
    if columns.is_empty() {
        return Err(bad("A read needs a column."));
    }
    Ok(columns)
}

fn parse_key_path(text: &str) -> Result<KeyPath, Refusal> {
    let path = KeyPath::parse(text).filter(|_| text.len() <= KEY_PATH_MAX_BYTES);
    path.ok_or_else(|| bad("key_path is names joined by dots, at most 1024 bytes."))
}

#[derive(Serialize)]
struct RangeGap {
    range: usize,
    #[serde(flatten)]
    gap: ToldGap,
}

pub fn run(engine: &Arc<Engine>, body: &[u8], asker: &Asker) -> Result<Answer, Undone> {
    let read = Read::parse(body).map_err(Undone::refused)?;
    let _room = take_answer_room(&engine.metrics, read.max_bytes)?;
    let mut walk = Walk::new(engine, &read, asker, Encoder::new(&read.columns));
    walk.run()?;
    let mut headers = Vec::new();
    if let Some(next) = &walk.next {
        headers.push(("Millstream-Next", render_next(next)));
    }
    if !walk.gaps.is_empty() {
        let gaps: Vec<RangeGap> = walk
            .gaps
            .iter()
            .map(|(range, gap)| RangeGap {
                range: *range,
                gap: (*gap).into(),
            })
            .collect();
        let gaps = super::to_json(&gaps).map_err(Undone::refused)?;
        headers.push(("Millstream-Gaps", gaps));
    }
    let rows = walk.rows();
    let body = walk.finish();
    engine.metrics.pipeline_read_rows.add(rows);
    let bytes = body.iter().map(|piece| piece.len() as u64).sum();
    engine.metrics.pipeline_read_bytes.add(bytes);
    Ok(Answer {
        status: 200,
        content_type: "application/vnd.apache.arrow.stream",
        headers,
        body,
        gate: Gate::OPEN,
    })
}

fn render_next(next: &Next) -> Vec<u8> {
    let Place { offset, number } = next.place;
    format!("range={}; offset={offset}; number={number}", next.range).into_bytes()
}

#[cfg(test)]
#[path = "read_speed_tests.rs"]
mod speed_tests;
