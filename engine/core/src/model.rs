//! The one vocabulary: identities, offsets, classes, index entries and extents.
//!
//! These types travel unchanged from the socket to the disk. Nothing here does I/O.
//!
//! Invariants
//! - `I-MODEL-1` A [`StreamId`] is the stream's incarnation: taken from a counter that never goes back, so
//!   a re-created path has another id.
//! - `I-MODEL-3` All epochs of a data directory lie in one range ([`next_epoch`] never leaves it), and a restored directory
//!   begins the next one ([`restored_epoch`]): neither clocks nor creates bring the two together.
//! - `I-MODEL-2` An [`Offset`] names the position after the bytes it was returned with. Its text form orders
//!   as bytes the way the pair orders as numbers.

use crate::limits::{EPOCH_CLOCK_MAX_MS, EPOCHS_PER_DIRECTORY, OFFSET_PART_MAX};

/// A stream's identity and incarnation at once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// What is said where there is none.
pub const EPOCHS_USED_UP: &str =
    "This data directory has used up its epochs; a backup and a restore begin new ones.";

/// The epoch after the highest one that a directory has used; `None` = its range is used up. The only way to take one,
/// at a create as at a start.
pub fn next_epoch(highest: u64, now_ms: u64) -> Option<u64> {
    let first = highest - highest % EPOCHS_PER_DIRECTORY;
    let next = (highest + 1).max(first + now_ms.min(EPOCH_CLOCK_MAX_MS));
    (next < first + EPOCHS_PER_DIRECTORY).then_some(next)
}

/// The first epoch of a directory restored from one that has used `highest` and may have gone on since. Among restores
/// of the same backup only the clock makes a difference.
pub fn restored_epoch(highest: u64, now_ms: u64) -> Option<u64> {
    let first = highest - highest % EPOCHS_PER_DIRECTORY + EPOCHS_PER_DIRECTORY;
    (first < OFFSET_PART_MAX).then(|| first + now_ms.min(EPOCH_CLOCK_MAX_MS))
}

/// A position in a stream as clients see it: `%016d_%016d`, epoch then byte position.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Default)]
pub struct Offset {
    pub epoch: u64,
    pub position: u64,
}

/// Length of an offset in text form.
pub const OFFSET_TEXT_BYTES: usize = 33;

impl Offset {
    /// The start of any stream: what `-1` and the all-zero offset mean.
    pub const START: Offset = Offset {
        epoch: 0,
        position: 0,
    };

    /// Parses the exact 16_16 form. `-1` and `now` are not offsets but requests; callers treat them first.
    pub fn parse(text: &[u8]) -> Option<Offset> {
        if text.len() != OFFSET_TEXT_BYTES || text[16] != b'_' {
            return None;
        }
        Some(Offset {
            epoch: digits16(&text[..16])?,
            position: digits16(&text[17..])?,
        })
    }

    pub fn write_to(self, out: &mut Vec<u8>) {
        debug_assert!(self.epoch <= OFFSET_PART_MAX && self.position <= OFFSET_PART_MAX);
        let mut text = [b'0'; OFFSET_TEXT_BYTES];
        text[16] = b'_';
        put_digits(&mut text[..16], self.epoch);
        put_digits(&mut text[17..], self.position);
        out.extend_from_slice(&text);
    }
}

impl std::fmt::Display for Offset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016}_{:016}", self.epoch, self.position)
    }
}

fn digits16(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0u64, |value, byte| match byte {
        b'0'..=b'9' => Some(value * 10 + u64::from(byte - b'0')),
        _ => None,
    })
}

/// Every acknowledgement has 32 of them: half at a time, eight in a word.
fn put_digits(slot: &mut [u8], value: u64) {
    const HALF: u64 = 100_000_000;
    slot[..8].copy_from_slice(&eight_digits(value / HALF));
    slot[8..].copy_from_slice(&eight_digits(value % HALF));
}

/// Cuts a number below 10^8 into lanes of four, two and one digits; each step divides all lanes by one multiplication,
/// which is exact for what fits into a lane.
fn eight_digits(value: u64) -> [u8; 8] {
    let fours = (value / 10_000) | ((value % 10_000) << 32);
    let hundreds = ((fours * 10_486) >> 20) & 0x0000_007f_0000_007f;
    let twos = hundreds | ((fours - hundreds * 100) << 16);
    let tens = ((twos * 103) >> 10) & 0x000f_000f_000f_000f;
    let ones = tens | ((twos - tens * 10) << 8);
    (ones | u64::from_ne_bytes([b'0'; 8])).to_le_bytes()
}

/// Durability class: which watermark acknowledgements and readers wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    Ephemeral = 0,
    Memory = 1,
    Disk = 2,
    Fsync = 3,
    Quorum = 4,
    Object = 5,
}

impl Class {
    pub const ALL: [Class; 6] = [
        Class::Ephemeral,
        Class::Memory,
        Class::Disk,
        Class::Fsync,
        Class::Quorum,
        Class::Object,
    ];

    pub fn parse(text: &str) -> Option<Class> {
        Class::ALL.into_iter().find(|class| class.name() == text)
    }

    pub fn from_u8(value: u8) -> Option<Class> {
        Class::ALL.get(value as usize).copied()
    }

    pub fn name(self) -> &'static str {
        match self {
            Class::Ephemeral => "ephemeral",
            Class::Memory => "memory",
            Class::Disk => "disk",
            Class::Fsync => "fsync",
            Class::Quorum => "quorum",
            Class::Object => "object",
        }
    }

    /// Classes this build can keep the promise of.
    pub fn available(self) -> bool {
        self.needs().is_none()
    }

    /// What a class that is not available would need; `None` for those that are.
    pub fn needs(self) -> Option<&'static str> {
        match self {
            Class::Quorum => Some("quorum needs a cluster of at least three servers"),
            Class::Object => Some("object needs an object store (serve --store)"),
            _ => None,
        }
    }

    /// Whether acknowledgements and readers wait for the log to be synced.
    pub fn waits_for_sync(self) -> bool {
        self.stage() == Stage::Synced
    }

    /// Watermark that acknowledgements and readers wait for.
    pub fn stage(self) -> Stage {
        match self {
            Class::Ephemeral | Class::Memory => Stage::Applied,
            Class::Disk => Stage::Written,
            Class::Fsync | Class::Quorum | Class::Object => Stage::Synced,
        }
    }
}

/// How far a frame has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub enum Stage {
    /// In the stream's state.
    Applied,
    /// In the log file, as far as the page cache.
    Written,
    /// On the device.
    Synced,
}

/// What a reply waits for: a commit number and how far it must have come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    pub sequence: u64,
    pub stage: Stage,
}

impl Gate {
    /// Waits for nothing.
    pub const OPEN: Gate = Gate {
        sequence: 0,
        stage: Stage::Applied,
    };

    pub fn synced(sequence: u64) -> Gate {
        Gate {
            sequence,
            stage: Stage::Synced,
        }
    }

    pub fn is_open(self) -> bool {
        self.stage == Stage::Applied
    }

    /// Whether this gate opens no earlier than `other`.
    pub fn covers(self, other: Gate) -> bool {
        self.sequence >= other.sequence && self.stage >= other.stage
    }
}

/// One per append: where it ended, how many records the stream had then, when, and a checksum of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexEntry {
    pub end: u64,
    /// Records of the stream up to `end`.
    pub records: u64,
    /// Never decreases within a stream.
    pub time_ms: u64,
    /// CRC32C of the append's bytes.
    pub crc: u32,
}

/// Where a contiguous range of a stream's bytes lies on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    pub start: u64,
    pub len: u64,
    pub file: FileRef,
    pub file_position: u64,
    pub index_position: u64,
    pub index_count: u32,
    /// Records of the stream before `start`.
    pub base_records: u64,
}

impl Extent {
    pub fn end(&self) -> u64 {
        self.start + self.len
    }

    /// What its bytes and its index take when they are in memory.
    pub fn memory_len(&self) -> u64 {
        self.len + u64::from(self.index_count) * size_of::<IndexEntry>() as u64
    }
}

/// Bytes of one stream in a staged pack, with their index relative to where they begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Adopted {
    pub pack: u32,
    pub file_position: u64,
    pub len: u64,
    pub records: u64,
    pub index_count: u32,
    /// Where the relative index lies in the pack, and the CRC32C of all of it.
    pub index_at: u64,
    pub index_crc: u32,
}

/// A file of a stream's bytes: its own segment, a pack shared by many small streams, or bytes of `ephemeral`
/// streams that memory had no room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum FileRef {
    Segment {
        owner: StreamId,
        number: u32,
    },
    Pack {
        number: u32,
    },
    /// Never synced, never named by the catalog, discarded by every start.
    Spill {
        number: u32,
    },
}

/// How a stream's bytes are read and rendered; derived once from its content type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Media {
    /// Records are JSON messages, stored as `message,`.
    Json,
    /// SSE carries the bytes as text lines.
    Text,
    /// SSE carries the bytes as base64.
    Binary,
}

/// A content type as it was sent, with what the engine derives from it.
#[derive(Debug, PartialEq, Eq)]
pub struct ContentType {
    /// Returned to readers unmodified.
    pub text: Box<str>,
    /// Lower-cased media type without parameters: what comparisons use.
    pub media_type: Box<str>,
    pub media: Media,
}

impl ContentType {
    pub const DEFAULT: &'static str = "application/octet-stream";

    pub fn new(text: &str) -> ContentType {
        let media_type = text
            .split(';')
            .next()
            .unwrap_or("")
            .trim()
            .to_ascii_lowercase();
        let media = if media_type == "application/json" {
            Media::Json
        } else if media_type.starts_with("text/") {
            Media::Text
        } else {
            Media::Binary
        };
        ContentType {
            text: text.into(),
            media_type: media_type.into_boxed_str(),
            media,
        }
    }

    /// Compares a request's header value by media type only.
    pub fn matches(&self, header: &[u8]) -> bool {
        let end = header
            .iter()
            .position(|byte| *byte == b';')
            .unwrap_or(header.len());
        header[..end]
            .trim_ascii()
            .eq_ignore_ascii_case(self.media_type.as_bytes())
    }
}

/// The first segment of the paths that belong to the control plane; HTTP clients cannot reach streams there.
pub const RESERVED: &str = "__ds";

pub fn is_reserved(path: &str) -> bool {
    path.strip_prefix(RESERVED)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_never_leaves_its_epochs_and_a_restored_one_begins_the_next() {
        let clocks = [0, 1_763_000_000_123, EPOCH_CLOCK_MAX_MS, u64::MAX];
        let mut highest = 0;
        // The longest chain of restores there is room for, each server with every kind of clock.
        for range in 1..1000 {
            let mut given_out = highest;
            for now_ms in clocks.into_iter().rev().chain(clocks) {
                let next = next_epoch(given_out, now_ms).unwrap();
                assert!(next > given_out);
                given_out = next;
            }
            let end = highest / EPOCHS_PER_DIRECTORY * EPOCHS_PER_DIRECTORY + EPOCHS_PER_DIRECTORY;
            assert_eq!(next_epoch(end - 1, 0), None, "used up");
            // The backup may be old, the clock behind: it is above all that the server can still give out.
            for now_ms in clocks {
                let restored = restored_epoch(highest, now_ms).unwrap();
                assert!(restored >= end && end > given_out);
                assert_eq!(restored / EPOCHS_PER_DIRECTORY, range);
            }
            highest = restored_epoch(highest, clocks[1]).unwrap();
        }
        assert!(highest <= OFFSET_PART_MAX);
        assert_eq!(restored_epoch(highest, 0), None, "no range is left");
    }

    #[test]
    fn every_lane_of_digits_is_exact() {
        for four in 0..10_000 {
            let value = four * 10_000 + 9_999 - four;
            assert_eq!(&eight_digits(value), format!("{value:08}").as_bytes());
        }
    }

    #[test]
    fn offsets_round_trip_and_refuse_other_shapes() {
        let offset = Offset {
            epoch: 1_763_000_000_123,
            position: 42,
        };
        let mut text = Vec::new();
        offset.write_to(&mut text);
        assert_eq!(text, offset.to_string().as_bytes());
        assert_eq!(Offset::parse(&text), Some(offset));
        for bad in [
            "",
            "-1",
            "now",
            "1_2",
            "0000000000000000_000000000000000x",
            "0000000000000000-0000000000000000",
        ] {
            assert_eq!(Offset::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn content_types_compare_by_media_type() {
        let json = ContentType::new("Application/JSON; charset=utf-8");
        assert_eq!(json.media, Media::Json);
        assert!(json.matches(b"application/json"));
        assert!(json.matches(b" APPLICATION/json ;x=y"));
        assert!(!json.matches(b"application/jsonl"));
    }
}
