//! What a commit writes about staged bytes: where they lie, and how their index is told.
//!
//! The payload of an `Adopt` frame is a list of sections of staged packs; the index of each lies in the pack itself,
//! relative to the section, because nobody knows where in its stream a staged section will stand.
//!
//! ```text
//! section    pack u32 | file position u64 | length u64 | records u64 | entries u32 | index at u64 | index crc u32     44 bytes
//! relative   end u64 | records u64 | crc u32                                                                          20 bytes
//! ```
//! Example: two records of 100 and 50 bytes of one section are the entries (100, 1, crc) and (150, 2, crc).
//!
//! A section of length 0 takes nothing over: it is the mark of a stage that is used up, because its bytes were copied;
//! then file position is the stage's time and index crc that of its id.
//!
//! Invariant: decoding never reads outside its slice; entries go forward, and the last one ends where the section does.

use super::Reader;
use crate::model::{Adopted, IndexEntry};

pub const ADOPTED_BYTES: usize = 44;
pub const RELATIVE_ENTRY_BYTES: usize = 20;

pub fn encode(sections: &[Adopted], out: &mut Vec<u8>) {
    for section in sections {
        out.extend_from_slice(&section.pack.to_le_bytes());
        out.extend_from_slice(&section.file_position.to_le_bytes());
        out.extend_from_slice(&section.len.to_le_bytes());
        out.extend_from_slice(&section.records.to_le_bytes());
        out.extend_from_slice(&section.index_count.to_le_bytes());
        out.extend_from_slice(&section.index_at.to_le_bytes());
        out.extend_from_slice(&section.index_crc.to_le_bytes());
    }
}

/// The sections of a frame; `None` if the payload is no such list.
pub fn decode(payload: &[u8]) -> Option<Vec<Adopted>> {
    let mut reader = Reader::new(payload);
    let mut sections = Vec::with_capacity(payload.len() / ADOPTED_BYTES);
    while !reader.is_empty() {
        sections.push(Adopted {
            pack: reader.u32()?,
            file_position: reader.u64()?,
            len: reader.u64()?,
            records: reader.u64()?,
            index_count: reader.u32()?,
            index_at: reader.u64()?,
            index_crc: reader.u32()?,
        });
    }
    Some(sections)
}

/// A stage whose bytes were copied: its file must not wait for another commit. Numbers of packs are used again, so it
/// is told by its time and id, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UsedUp {
    pub pack: u32,
    pub time_ms: u64,
    pub id_crc: u32,
}

impl UsedUp {
    pub fn new(pack: u32, time_ms: u64, id: &str) -> UsedUp {
        UsedUp {
            pack,
            time_ms,
            id_crc: crc32c::crc32c(id.as_bytes()),
        }
    }

    fn as_section(&self) -> Adopted {
        Adopted {
            pack: self.pack,
            file_position: self.time_ms,
            len: 0,
            records: 0,
            index_count: 0,
            index_at: 0,
            index_crc: self.id_crc,
        }
    }
}

pub fn encode_used_up(stages: &[UsedUp], out: &mut Vec<u8>) {
    let sections: Vec<Adopted> = stages.iter().map(UsedUp::as_section).collect();
    encode(&sections, out);
}

/// The used-up stages of a frame, beside the sections that it takes over.
pub fn decode_used_up(payload: &[u8]) -> Vec<UsedUp> {
    let sections = decode(payload).unwrap_or_default();
    let marks = sections.iter().filter(|section| section.len == 0);
    let used_up = |section: &Adopted| UsedUp {
        pack: section.pack,
        time_ms: section.file_position,
        id_crc: section.index_crc,
    };
    marks.map(used_up).collect()
}

/// How many bytes the sections have together.
pub fn total_len(sections: &[Adopted]) -> u64 {
    sections
        .iter()
        .fold(0, |total, section| total.saturating_add(section.len))
}

pub fn encode_entry(entry: &IndexEntry, out: &mut Vec<u8>) {
    out.extend_from_slice(&entry.end.to_le_bytes());
    out.extend_from_slice(&entry.records.to_le_bytes());
    out.extend_from_slice(&entry.crc.to_le_bytes());
}

/// The relative entries of a section; `None` if they are not those that it speaks of.
pub fn decode_entries(section: &Adopted, bytes: &[u8]) -> Option<Vec<IndexEntry>> {
    if bytes.len() != section.index_count as usize * RELATIVE_ENTRY_BYTES
        || crc32c::crc32c(bytes) != section.index_crc
    {
        return None;
    }
    let mut reader = Reader::new(bytes);
    let mut entries = Vec::with_capacity(section.index_count as usize);
    let (mut end, mut records) = (0, 0);
    for _ in 0..section.index_count {
        let entry = IndexEntry {
            end: reader.u64()?,
            records: reader.u64()?,
            time_ms: 0,
            crc: reader.u32()?,
        };
        if entry.end <= end || entry.records < records {
            return None;
        }
        (end, records) = (entry.end, entry.records);
        entries.push(entry);
    }
    (end == section.len && records == section.records).then_some(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_and_entries_round_trip_and_refuse_other_shapes() {
        let mut bytes = Vec::new();
        for (end, records) in [(100, 1), (150, 2)] {
            let entry = IndexEntry {
                end,
                records,
                time_ms: 0,
                crc: end as u32,
            };
            encode_entry(&entry, &mut bytes);
        }
        let section = Adopted {
            pack: 7,
            file_position: 56,
            len: 150,
            records: 2,
            index_count: 2,
            index_at: 400,
            index_crc: crc32c::crc32c(&bytes),
        };
        let mut payload = Vec::new();
        encode(&[section, section], &mut payload);
        assert_eq!(payload.len(), 2 * ADOPTED_BYTES);
        assert_eq!(decode(&payload), Some(vec![section, section]));
        assert_eq!(decode(&payload[..50]), None);
        let entries = decode_entries(&section, &bytes).expect("entries");
        assert_eq!(entries.last().map(|entry| entry.end), Some(150));
        let shorter = Adopted {
            len: 149,
            ..section
        };
        assert!(decode_entries(&shorter, &bytes).is_none());
        bytes[3] ^= 1;
        assert!(decode_entries(&section, &bytes).is_none());
        assert!(decode_used_up(&payload).is_empty());
        let used_up = UsedUp::new(9, 1234, "task");
        encode_used_up(&[used_up], &mut payload);
        assert_eq!(decode_used_up(&payload), [used_up]);
    }
}
