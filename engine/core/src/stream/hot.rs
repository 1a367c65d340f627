//! Bytes of a stream that are not yet in a checkpoint, with their index.
//!
//! Appends go to one growing buffer. A large reader freezes that buffer: it becomes shared and immutable, so
//! that its bytes go to the socket without a copy and without the stream's lock, and the next append begins
//! another one. A commit of staged bytes adds a part that lies in a pack: only its index is in memory.
//!
//! Invariant: `parts`, then `active` cover `start..end` without hole or overlap; no index entry spans two of them.

use std::borrow::Cow;
use std::sync::Arc;

use crate::model::{Adopted, IndexEntry};

/// Smaller buffers are copied; freezing them would leave a trail of crumbs.
const FREEZE_MIN_BYTES: usize = 64 * 1024;
/// What an append takes in memory beside its bytes.
pub const ENTRY_MEMORY_BYTES: u64 = size_of::<IndexEntry>() as u64;
/// What the first byte takes beside itself: the smallest buffer, and an index with room for a few entries.
const FIRST_MEMORY_BYTES: u64 = 8 + 3 * ENTRY_MEMORY_BYTES;

#[derive(Debug, Default)]
pub struct Hot {
    pub start: u64,
    pub index: Vec<IndexEntry>,
    parts: Vec<Part>,
    active: Vec<u8>,
    /// Position where `active` begins.
    active_start: u64,
    /// Bytes of `parts` that are in memory.
    parts_memory: u64,
}

#[derive(Debug, Clone)]
struct Part {
    start: u64,
    bytes: PartBytes,
}

#[derive(Debug, Clone)]
enum PartBytes {
    Memory(Arc<Vec<u8>>),
    File(Adopted),
}

impl PartBytes {
    fn len(&self) -> u64 {
        match self {
            PartBytes::Memory(bytes) => bytes.len() as u64,
            PartBytes::File(section) => section.len,
        }
    }

    fn memory_len(&self) -> u64 {
        match self {
            PartBytes::Memory(bytes) => bytes.len() as u64,
            PartBytes::File(_) => 0,
        }
    }
}

/// A stretch of immutable bytes: `bytes[from..]`.
pub struct SharedBytes {
    pub bytes: Arc<Vec<u8>>,
    pub from: usize,
}

/// A part of a stream that lies in a staged pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePart {
    /// Where in the stream it begins.
    pub start: u64,
    pub section: Adopted,
}

impl FilePart {
    pub fn end(&self) -> u64 {
        self.start + self.section.len
    }
}

/// A stretch of bytes that a checkpoint writes in one go, with its own index entries.
pub struct Run<'a> {
    pub start: u64,
    pub index: &'a [IndexEntry],
    pub bytes: RunBytes<'a>,
}

pub enum RunBytes<'a> {
    Memory(Cow<'a, [u8]>),
    File(Adopted),
}

impl Hot {
    pub fn starting_at(start: u64) -> Hot {
        Hot {
            start,
            active_start: start,
            ..Hot::default()
        }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.active.extend_from_slice(bytes);
    }

    /// Adds bytes that lie in a pack. The caller adds their index.
    pub fn push_file(&mut self, section: Adopted) {
        self.seal();
        self.add_part(PartBytes::File(section));
    }

    fn add_part(&mut self, bytes: PartBytes) {
        let start = self.active_start;
        self.active_start += bytes.len();
        self.parts_memory += bytes.memory_len();
        self.parts.push(Part { start, bytes });
    }

    pub fn end(&self) -> u64 {
        self.active_start + self.active.len() as u64
    }

    pub fn len(&self) -> u64 {
        self.end() - self.start
    }

    /// What counts against the bound on memory: bytes that are here, and the index of all. Room that a buffer has
    /// grown ahead does not count: nobody has touched it.
    pub fn memory_len(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let index = self.index.len() as u64 * ENTRY_MEMORY_BYTES;
        self.parts_memory + self.active.len() as u64 + index + FIRST_MEMORY_BYTES
    }

    pub fn is_empty(&self) -> bool {
        self.end() == self.start
    }

    /// Makes the growing buffer shareable if it is worth it.
    pub fn freeze(&mut self) {
        if self.active.len() >= FREEZE_MIN_BYTES {
            self.seal();
        }
    }

    fn seal(&mut self) {
        if self.active.is_empty() {
            return;
        }
        let bytes = Arc::new(std::mem::take(&mut self.active));
        self.add_part(PartBytes::Memory(bytes));
    }

    fn part_at(&self, position: u64) -> Option<&Part> {
        if position < self.start || position >= self.active_start {
            return None;
        }
        let at = self.parts.partition_point(|part| part.start <= position);
        self.parts.get(at.checked_sub(1)?)
    }

    /// Immutable bytes from `position` on; `None` if they are still in the growing buffer, or in a file.
    pub fn shared(&self, position: u64) -> Option<SharedBytes> {
        let part = self.part_at(position)?;
        match &part.bytes {
            PartBytes::Memory(bytes) => Some(SharedBytes {
                bytes: Arc::clone(bytes),
                from: (position - part.start) as usize,
            }),
            PartBytes::File(_) => None,
        }
    }

    /// The part in a file that holds the byte at `position`.
    pub fn in_file(&self, position: u64) -> Option<FilePart> {
        let part = self.part_at(position)?;
        match part.bytes {
            PartBytes::File(section) => Some(FilePart {
                start: part.start,
                section,
            }),
            PartBytes::Memory(_) => None,
        }
    }

    /// The parts that lie in files, in order.
    pub fn file_parts(&self) -> impl Iterator<Item = FilePart> {
        self.file_parts_from(self.start)
    }

    /// The same from the one that holds `position` on.
    pub fn file_parts_from(&self, position: u64) -> impl Iterator<Item = FilePart> {
        let behind = self.parts.partition_point(|part| part.start <= position);
        let parts = &self.parts[behind.saturating_sub(1)..];
        parts.iter().filter_map(|part| match part.bytes {
            PartBytes::File(section) => Some(FilePart {
                start: part.start,
                section,
            }),
            PartBytes::Memory(_) => None,
        })
    }

    /// Index entries of the bytes from `start` to `end`, which are boundaries.
    pub fn entries_between(&self, start: u64, end: u64) -> &[IndexEntry] {
        let from = self.index.partition_point(|entry| entry.end <= start);
        let to = self.index.partition_point(|entry| entry.end <= end);
        self.index.get(from..to).unwrap_or(&[])
    }

    /// The bytes from `position` on that lie together; none if they are not here in memory.
    pub fn bytes(&self, position: u64) -> &[u8] {
        let (bytes, start) = match self.part_at(position) {
            Some(part) => match &part.bytes {
                PartBytes::Memory(bytes) => (bytes.as_slice(), part.start),
                PartBytes::File(_) => return &[],
            },
            None => (self.active.as_slice(), self.active_start),
        };
        let from = position.checked_sub(start);
        from.and_then(|from| bytes.get(from as usize..))
            .unwrap_or(&[])
    }

    /// Copies from `position` on; returns how many bytes, 0 if they are not here in memory.
    pub fn copy(&self, position: u64, buffer: &mut [u8]) -> usize {
        let source = self.bytes(position);
        let count = source.len().min(buffer.len());
        buffer[..count].copy_from_slice(&source[..count]);
        count
    }

    /// What a checkpoint writes: memory in runs as long as they go, each part in a file by itself.
    pub fn runs(&self) -> Vec<Run<'_>> {
        let mut runs = Vec::new();
        let mut memory: Vec<&[u8]> = Vec::new();
        let (mut start, mut position) = (self.start, self.start);
        for part in &self.parts {
            match &part.bytes {
                PartBytes::Memory(bytes) => memory.push(bytes),
                PartBytes::File(section) => {
                    self.end_run(&mut runs, &mut memory, start, position);
                    start = position + section.len;
                    runs.push(Run {
                        start: position,
                        index: self.entries_between(position, start),
                        bytes: RunBytes::File(*section),
                    });
                }
            }
            position += part.bytes.len();
        }
        if !self.active.is_empty() {
            memory.push(&self.active);
        }
        self.end_run(&mut runs, &mut memory, start, self.end());
        runs
    }

    fn end_run<'a>(
        &'a self,
        runs: &mut Vec<Run<'a>>,
        memory: &mut Vec<&'a [u8]>,
        start: u64,
        end: u64,
    ) {
        let bytes = match memory.as_slice() {
            [] => return,
            [only] => Cow::Borrowed(*only),
            pieces => Cow::Owned(pieces.concat()),
        };
        memory.clear();
        runs.push(Run {
            start,
            index: self.entries_between(start, end),
            bytes: RunBytes::Memory(bytes),
        });
    }

    /// All bytes in pieces as they lie, of a stream that has none in files.
    pub fn pieces(&self) -> Vec<&[u8]> {
        debug_assert!(self.file_parts().next().is_none());
        let parts = self.parts.iter().filter_map(|part| match &part.bytes {
            PartBytes::Memory(bytes) => Some(bytes.as_slice()),
            PartBytes::File(_) => None,
        });
        parts.chain([self.active.as_slice()]).collect()
    }

    /// These bytes with newer ones behind them.
    pub fn followed_by(&self, newer: &Hot) -> Hot {
        let mut whole = Hot::starting_at(self.start);
        whole.index = self.index.clone();
        whole.index.extend_from_slice(&newer.index);
        for part in &self.parts {
            whole.add_part(part.bytes.clone());
        }
        whole.push(&self.active);
        for part in &newer.parts {
            whole.seal();
            whole.add_part(part.bytes.clone());
        }
        whole.push(&newer.active);
        whole
    }
}

#[cfg(test)]
#[path = "hot_tests.rs"]
mod tests;
