//! Names and sizes of segments: the files that hold the bytes of one stream.
//!
//! `segments/<2 hex>/<stream id, 16 hex>-<number, 8 hex>.seg` holds bytes exactly as they go over the
//! wire, without a header, so that a read is a range of the file; `.idx` beside it holds the index.
//! The directory is the low byte of the stream id: 256 of them, evenly filled.
//!
//! Invariant: a segment's length means nothing. Only an extent in the catalog says which bytes count;
//! a checkpoint that died left bytes beyond it, and the next one overwrites them.

use crate::model::StreamId;

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;

/// A stream with this much to write gets its own file; less goes into a pack.
pub const SEGMENT_MIN_BYTES: u64 = 32 * 1024;
/// A segment is continued in the next number before it grows above this.
pub const SEGMENT_MAX_BYTES: u64 = 64 * 1024 * 1024;

pub const SEGMENTS_DIRECTORY: &str = "segments";

/// The two files of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Part {
    Data,
    Index,
}

/// Which of the 256 directories a stream's segments are in.
pub fn bucket(owner: StreamId) -> u8 {
    (owner.0 & 0xff) as u8
}

pub fn bucket_directory(bucket: u8) -> String {
    format!("{SEGMENTS_DIRECTORY}/{bucket:02x}")
}

pub fn path(owner: StreamId, number: u32, part: Part) -> String {
    let extension = match part {
        Part::Data => "seg",
        Part::Index => "idx",
    };
    format!(
        "{}/{:016x}-{number:08x}.{extension}",
        bucket_directory(bucket(owner)),
        owner.0
    )
}

/// The inverse of [`path`] for the name without its directory; `None` for a foreign file.
pub fn parse_name(name: &str) -> Option<(StreamId, u32, Part)> {
    let (stem, extension) = name.split_once('.')?;
    let part = match extension {
        "seg" => Part::Data,
        "idx" => Part::Index,
        _ => return None,
    };
    let (owner, number) = stem.split_once('-')?;
    if owner.len() != 16 || number.len() != 8 {
        return None;
    }
    Some((
        StreamId(u64::from_str_radix(owner, 16).ok()?),
        u32::from_str_radix(number, 16).ok()?,
        part,
    ))
}
