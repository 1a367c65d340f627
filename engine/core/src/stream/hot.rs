//! Bytes of a stream that are not yet in a checkpoint, with their index.
//!
//! Appends go to one growing buffer. A large reader freezes that buffer: it becomes shared and immutable, so
//! that its bytes go to the socket without a copy and without the stream's lock, and the next append begins
//! another one.

use std::borrow::Cow;
use std::sync::Arc;

use crate::model::IndexEntry;

/// Smaller buffers are copied; freezing them would leave a trail of crumbs.
const FREEZE_MIN_BYTES: usize = 64 * 1024;

#[derive(Debug, Default)]
pub struct Hot {
    pub start: u64,
    pub index: Vec<IndexEntry>,
    frozen: Vec<Frozen>,
    active: Vec<u8>,
    /// Position where `active` begins.
    active_start: u64,
}

#[derive(Debug, Clone)]
struct Frozen {
    start: u64,
    bytes: Arc<Vec<u8>>,
}

/// A stretch of immutable bytes: `bytes[from..]`.
pub struct SharedBytes {
    pub bytes: Arc<Vec<u8>>,
    pub from: usize,
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

    pub fn end(&self) -> u64 {
        self.active_start + self.active.len() as u64
    }

    pub fn len(&self) -> u64 {
        self.end() - self.start
    }

    pub fn is_empty(&self) -> bool {
        self.end() == self.start
    }

    /// Makes the growing buffer shareable if it is worth it.
    pub fn freeze(&mut self) {
        if self.active.len() >= FREEZE_MIN_BYTES {
            let bytes = Arc::new(std::mem::take(&mut self.active));
            let start = self.active_start;
            self.active_start += bytes.len() as u64;
            self.frozen.push(Frozen { start, bytes });
        }
    }

    /// Immutable bytes from `position` on; `None` if they are still in the growing buffer.
    pub fn shared(&self, position: u64) -> Option<SharedBytes> {
        if position < self.start || position >= self.active_start {
            return None;
        }
        let at = self
            .frozen
            .partition_point(|part| part.start <= position)
            .checked_sub(1)?;
        let part = self.frozen.get(at)?;
        Some(SharedBytes {
            bytes: Arc::clone(&part.bytes),
            from: (position - part.start) as usize,
        })
    }

    /// Copies from `position` on; returns how many bytes, 0 if they are not here.
    pub fn copy(&self, position: u64, buffer: &mut [u8]) -> usize {
        let shared = self.shared(position);
        let source = match &shared {
            Some(part) => &part.bytes[part.from..],
            None if position >= self.active_start => self
                .active
                .get((position - self.active_start) as usize..)
                .unwrap_or(&[]),
            None => &[],
        };
        let count = source.len().min(buffer.len());
        buffer[..count].copy_from_slice(&source[..count]);
        count
    }

    /// All bytes in one piece.
    pub fn contiguous(&self) -> Cow<'_, [u8]> {
        match (self.frozen.as_slice(), self.active.is_empty()) {
            ([], _) => Cow::Borrowed(&self.active),
            ([only], true) => Cow::Borrowed(&only.bytes),
            (parts, _) => {
                let mut all = Vec::with_capacity(self.len() as usize);
                parts
                    .iter()
                    .for_each(|part| all.extend_from_slice(&part.bytes));
                all.extend_from_slice(&self.active);
                Cow::Owned(all)
            }
        }
    }

    /// These bytes with newer ones behind them.
    pub fn followed_by(&self, newer: &Hot) -> Hot {
        let mut whole = Hot::starting_at(self.start);
        whole.index = self.index.clone();
        whole.index.extend_from_slice(&newer.index);
        whole.push(&self.contiguous());
        whole.push(&newer.contiguous());
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frozen_and_growing_bytes_read_as_one() {
        let mut hot = Hot::starting_at(100);
        let first = vec![1u8; FREEZE_MIN_BYTES + 5];
        hot.push(&first);
        assert!(hot.shared(100).is_none());
        hot.freeze();
        hot.push(b"tail");
        hot.freeze();
        let cut = 100 + first.len() as u64;
        assert_eq!(
            hot.shared(cut - 1).map(|part| part.bytes.len() - part.from),
            Some(1)
        );
        assert!(hot.shared(cut).is_none() && hot.shared(99).is_none());
        let mut buffer = [0u8; 8];
        assert_eq!(hot.copy(cut - 1, &mut buffer), 1);
        assert_eq!(hot.copy(cut + 1, &mut buffer), 3);
        assert_eq!(&buffer[..3], b"ail");
        assert_eq!(hot.contiguous().len() as u64, hot.len());
        assert_eq!(
            hot.followed_by(&Hot::starting_at(hot.end())).contiguous(),
            hot.contiguous()
        );
    }
}
