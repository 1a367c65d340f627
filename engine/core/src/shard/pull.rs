//! Whole appends of a stream in blocks, wherever their bytes are: for Arrow output.
//!
//! A block comes from one place: shared memory as it lies, a copy of the growing buffer, a staged pack, or a file. What came from a
//! file is to be compared with its checksums by who reads it ([`Block::check`]); what fails is looked into like any
//! other failed read.

use std::io;
use std::sync::Arc;

use crate::codec::checksum;
use crate::log::cold::{Appends, check_one};
use crate::model::{Extent, IndexEntry};
use crate::shard::engine::Engine;
use crate::shard::staged::WholeAppends;
use crate::stream::handle::Stream;
use crate::stream::hot::{FilePart, Hot, SharedBytes};
use crate::stream::locate::Source;

/// Bytes of a block: small enough for the processor's cache, large enough for the calls to be few.
const BLOCK_BYTES: u64 = 256 * 1024;
/// A buffer that one large append has made larger than this is given back.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// Appends of one stream, from a boundary on.
#[derive(Default)]
pub struct Block {
    found: Appends,
    shared: Option<SharedBytes>,
    origin: Option<(Arc<Stream>, Extent)>,
}

impl Block {
    /// The bytes from the boundary on; those of the entries, and perhaps more.
    pub fn bytes(&self) -> &[u8] {
        match &self.shared {
            Some(shared) => &shared.bytes[shared.from..],
            None => &self.found.bytes,
        }
    }

    /// Their entries of the index, one for each append.
    pub fn entries(&self) -> &[IndexEntry] {
        &self.found.entries
    }

    /// Compares an append of the block with its checksum, if it came from a file.
    #[inline]
    pub fn check(&self, append: &[u8], entry: &IndexEntry) -> io::Result<()> {
        match &self.origin {
            Some((_, extent)) => check_one(extent, append, entry),
            None => Ok(()),
        }
    }

    /// How many of these appends are sound, and what is wrong with the next one. `bytes` begin as the first of them
    /// does, at `from`.
    pub fn check_run(
        &self,
        bytes: &[u8],
        from: u64,
        entries: &[IndexEntry],
    ) -> (usize, io::Result<()>) {
        let Some((_, extent)) = &self.origin else {
            return (entries.len(), Ok(()));
        };
        let mut start = 0;
        let mut sound = 0;
        let (threes, _) = entries.as_chunks::<3>();
        for three in threes {
            let ends = three.map(|entry| (entry.end - from) as usize);
            let pieces = [
                &bytes[start..ends[0]],
                &bytes[ends[0]..ends[1]],
                &bytes[ends[1]..ends[2]],
            ];
            if checksum::three(pieces) != three.map(|entry| entry.crc) {
                break;
            }
            start = ends[2];
            sound += 3;
        }
        // The last ones, and those of whom one has failed.
        for entry in &entries[sound..] {
            let end = (entry.end - from) as usize;
            if let Err(error) = check_one(extent, &bytes[start..end], entry) {
                return (sound, Err(error));
            }
            start = end;
            sound += 1;
        }
        (sound, Ok(()))
    }

    fn clear(&mut self) {
        self.found.entries.clear();
        self.shared = None;
        self.origin = None;
        if self.found.bytes.capacity() > KEPT_BYTES_MAX {
            self.found.bytes = Vec::new();
        }
    }
}

impl Engine {
    /// Fills `block` with the appends from the boundary `position` on, one at least, none that ends behind `end`. The
    /// caller keeps `end` within what is visible and sound.
    pub fn pull(
        &self,
        stream: &Arc<Stream>,
        position: u64,
        end: u64,
        block: &mut Block,
    ) -> io::Result<()> {
        let (owner, limit) = self.owner_of(stream, position)?;
        let end = end.min(limit);
        self.sound(&owner, || self.pull_from(&owner, position, end, block))?;
        if block.found.entries.is_empty() {
            return Err(io::Error::other("no append ends behind a visible position"));
        }
        Ok(())
    }

    fn pull_from(
        &self,
        owner: &Arc<Stream>,
        position: u64,
        end: u64,
        block: &mut Block,
    ) -> io::Result<()> {
        block.clear();
        let mut state = owner.lock();
        state.share(position);
        let extents = match state.locate(position) {
            Source::Memory(hot) => return pull_hot(hot, position, end, block),
            Source::Staged(hot, part) => {
                let appends = WholeAppends::block(hot, &part, position, end, BLOCK_BYTES);
                drop(state);
                return self.pull_staged(owner, &part, &appends, position, block);
            }
            Source::Files(extents) => extents,
            Source::Nowhere => return Ok(()),
        };
        drop(state);
        let found =
            self.cold
                .read_appends(&extents, position, end, BLOCK_BYTES, &mut block.found)?;
        block.origin = found.map(|extent| (Arc::clone(owner), extent));
        Ok(())
    }

    /// Appends that a commit has adopted: their index is in memory, their bytes are checked here.
    fn pull_staged(
        &self,
        owner: &Arc<Stream>,
        part: &FilePart,
        appends: &WholeAppends,
        position: u64,
        block: &mut Block,
    ) -> io::Result<()> {
        block.found.entries.extend_from_slice(appends.entries());
        let last = block
            .found
            .entries
            .last()
            .map_or(position, |entry| entry.end);
        block.found.bytes.resize((last - position) as usize, 0);
        let filled = self.fill_staged(owner, part, appends, position, &mut block.found.bytes)?;
        whole(filled == block.found.bytes.len())
    }

    /// Looks into an append that failed [`Block::check`].
    pub fn examine_block(&self, block: &Block, error: &io::Error) {
        if let Some((owner, _)) = &block.origin {
            self.examine(owner, error);
        }
    }
}

/// Appends that lie in memory: those of one shared buffer, or of the growing one.
fn pull_hot(hot: &Hot, position: u64, end: u64, block: &mut Block) -> io::Result<()> {
    let first = hot.index.partition_point(|entry| entry.end <= position);
    block.shared = hot.shared(position);
    let end = match &block.shared {
        Some(shared) => end.min(position + (shared.bytes.len() - shared.from) as u64),
        None => end.min(hot.end()),
    };
    let enough = position.saturating_add(BLOCK_BYTES);
    let mut last = position;
    for entry in &hot.index[first.min(hot.index.len())..] {
        if entry.end > end || (entry.end > enough && last > position) {
            break;
        }
        last = entry.end;
        block.found.entries.push(*entry);
    }
    if block.shared.is_none() {
        block.found.bytes.resize((last - position) as usize, 0);
        let copied = hot.copy(position, &mut block.found.bytes);
        return whole(copied == block.found.bytes.len());
    }
    Ok(())
}

/// Zeros never pass for bytes that are not where they should be.
fn whole(is_whole: bool) -> io::Result<()> {
    if is_whole {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "stream bytes are missing",
    ))
}
