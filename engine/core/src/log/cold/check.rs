//! Checking bytes at rest against their index: while they are read, and by the scrub.
//!
//! A read that fails says where ([`Trouble`]); a [`Checker`] then looks again, on descriptors of its own, and names
//! what is really damaged ([`Fault`]). Used by the shard, which records faults on the stream that owns the bytes.
//!
//! Invariants:
//! - what is damaged is decided by a second look: one failed call proves nothing;
//! - an error that may pass (no descriptor, no memory, no permission) is never a fault;
//! - a fault covers whole appends where the index is in order, else the whole extent;
//! - a checker holds at most two descriptors and leaves no pages in the cache that were not there before.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::files::FileKey;
use super::{ColdStore, ITERATE_ENTRIES};
use crate::io::{DiskFile, OpenMode};
use crate::log::index::{self, INDEX_ENTRY_BYTES, end_of};
use crate::model::{Extent, IndexEntry};

/// One read of a checker.
const BLOCK_BYTES: u64 = 256 * 1024;
const BLOCK_ENTRIES: u32 = 1024;
/// How far a guessed index entry may be off.
const GUESS_ENTRIES: u32 = 8;

/// Where a read of cold storage failed: the payload of its `io::Error`.
#[derive(Debug)]
pub struct Trouble {
    text: String,
    pub extent: Extent,
    /// Whether it was the index that failed, and not the bytes from `from` to `to`.
    pub index: bool,
    pub from: u64,
    pub to: u64,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Trouble {}

impl Trouble {
    pub fn of(error: &io::Error) -> Option<&Trouble> {
        error.get_ref()?.downcast_ref()
    }

    /// An error about the bytes from `from` to `to`.
    pub(super) fn data(extent: &Extent, from: u64, to: u64, error: &io::Error) -> io::Error {
        Trouble::error(extent, false, from, to, error)
    }

    pub(super) fn index(extent: &Extent, error: &io::Error) -> io::Error {
        Trouble::error(extent, true, extent.start, end_of(extent), error)
    }

    fn error(extent: &Extent, index: bool, from: u64, to: u64, error: &io::Error) -> io::Error {
        let trouble = Trouble {
            text: error.to_string(),
            extent: *extent,
            index,
            from,
            to,
        };
        io::Error::new(kind_of(error), trouble)
    }
}

/// The kind of an error, with what a broken medium answers sorted under `InvalidData`.
pub(super) fn kind_of(error: &io::Error) -> io::ErrorKind {
    match error.raw_os_error() {
        Some(libc::EIO | libc::EBADMSG | libc::EUCLEAN | libc::ENODATA | libc::EREMOTEIO) => {
            io::ErrorKind::InvalidData
        }
        _ => error.kind(),
    }
}

/// Whether an error means that bytes are not what or where they should be. A missing file may also be one that
/// was moved away meanwhile, so that is another question.
pub fn is_damage(error: &io::Error) -> bool {
    matches!(
        kind_of(error),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
    )
}

/// A range of a stream that cannot be read back, and where the first bad byte of its file is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    pub start: u64,
    pub end: u64,
    pub file: String,
    pub byte: u64,
    pub what: String,
    /// Whether the file itself is not there, which may pass: a device was not mounted.
    pub missing: bool,
}

impl Fault {
    /// All of an extent.
    pub fn whole(extent: &Extent, key_is_index: bool, byte: u64, what: String) -> Fault {
        let key = if key_is_index {
            FileKey::index(extent.file)
        } else {
            FileKey::data(extent.file)
        };
        Fault {
            start: extent.start,
            end: end_of(extent),
            file: key.path(),
            byte,
            what,
            missing: false,
        }
    }

    /// All of an extent whose file is not there.
    pub fn missing(extent: &Extent, error: &io::Error) -> Fault {
        Fault {
            missing: true,
            ..Fault::whole(extent, false, extent.file_position, error.to_string())
        }
    }
}

/// What one step of a check has seen.
#[derive(Default)]
pub struct Progress {
    /// The first index entry that was not looked at.
    pub next: u32,
    /// Bytes read, those of the index included.
    pub bytes: u64,
    pub faults: Vec<Fault>,
}

impl ColdStore {
    /// Checks every append that lies whole in `bytes`, which were read from `position` on.
    pub(super) fn verify(&self, extent: &Extent, position: u64, bytes: &[u8]) -> io::Result<()> {
        let end = position.saturating_add(bytes.len() as u64);
        let share = |bytes: u64| {
            let entries =
                u128::from(bytes) * u128::from(extent.index_count) / u128::from(extent.len.max(1));
            u32::try_from(entries).unwrap_or(u32::MAX)
        };
        let step = share(bytes.len() as u64).saturating_add(2 * GUESS_ENTRIES);
        let step = step.min(ITERATE_ENTRIES);
        // Appends are mostly alike, so the entry is mostly where their mean size says: no search then.
        let mut at = share(position - extent.start).saturating_sub(GUESS_ENTRIES);
        let mut block = self.read_index(extent, at, step.min(extent.index_count - at))?;
        let begins = at == 0 || block.first().is_some_and(|entry| entry.end <= position);
        let reaches = block.last().is_some_and(|entry| entry.end > position);
        if !begins || !reaches {
            at = self.search(extent, &|entry| entry.end <= position)?.0;
            at = at.saturating_sub(1);
            block = self.read_index(extent, at, step.min(extent.index_count - at))?;
        }
        // The entry before the first append says where that begins.
        let mut start = (at == 0).then_some(extent.start);
        while !block.is_empty() {
            for entry in &block {
                let Some(from) = start.replace(entry.end) else {
                    continue;
                };
                if entry.end <= from || entry.end > end_of(extent) {
                    let error = index::damage(format!("index entry {at} is out of order"));
                    return Err(Trouble::index(extent, &error));
                }
                if entry.end > end {
                    return Ok(());
                }
                if from >= position {
                    check_append(extent, position, bytes, from, entry)?;
                }
            }
            if start == Some(end) {
                return Ok(());
            }
            at += block.len() as u32;
            block = self.read_index(extent, at, step.min(extent.index_count - at))?;
        }
        let error = index::damage("the index ends before the bytes do".into());
        Err(Trouble::index(extent, &error))
    }

    pub fn checker(&self) -> Checker<'_> {
        Checker {
            store: self,
            data: None,
            index: None,
            block: Vec::new(),
            block_at: 0,
        }
    }
}

/// `bytes` begin at `position` and hold the append `from..entry.end` whole.
pub(super) fn check_append(
    extent: &Extent,
    position: u64,
    bytes: &[u8],
    from: u64,
    entry: &IndexEntry,
) -> io::Result<()> {
    let append = &bytes[(from - position) as usize..(entry.end - position) as usize];
    if crc32c::crc32c(append) == entry.crc {
        return Ok(());
    }
    let key = FileKey::data(extent.file);
    let text = format!("bytes {from}..{} fail their checksum", entry.end);
    let error = key.explain(index::damage(text));
    Err(Trouble::data(
        extent,
        position,
        position + bytes.len() as u64,
        &error,
    ))
}

/// Reads extents and compares them with their index.
pub struct Checker<'a> {
    store: &'a ColdStore,
    data: Option<(FileKey, Arc<dyn DiskFile>)>,
    index: Option<(FileKey, Arc<dyn DiskFile>)>,
    /// Bytes of the data file from `block_at` on.
    block: Vec<u8>,
    block_at: u64,
}

/// What the entries of an index must go beyond.
struct Edge {
    end: u64,
    records: u64,
    time_ms: u64,
}

impl Checker<'_> {
    /// Checks appends from index entry `first` on, until `until` is reached or `bytes_max` were read. `Err` is a
    /// failure that proves nothing, or a file that is not there.
    pub fn check(
        &mut self,
        extent: &Extent,
        first: u32,
        until: u64,
        bytes_max: u64,
    ) -> io::Result<Progress> {
        let mut progress = Progress {
            next: first,
            ..Progress::default()
        };
        match self.check_entries(extent, until, bytes_max, &mut progress) {
            Err(error) if is_damage(&error) => {
                progress.faults = vec![index_fault(extent, progress.next, error.to_string())];
                progress.next = extent.index_count;
            }
            other => other?,
        }
        Ok(progress)
    }

    fn check_entries(
        &mut self,
        extent: &Extent,
        until: u64,
        bytes_max: u64,
        progress: &mut Progress,
    ) -> io::Result<()> {
        if extent.index_count == 0 && extent.len > 0 {
            return Err(index::damage("the index is empty".into()));
        }
        let mut edge = self.edge_before(extent, progress.next)?;
        while progress.next < extent.index_count {
            let count = BLOCK_ENTRIES.min(extent.index_count - progress.next);
            let entries = self.entries(extent, progress.next, count)?;
            for entry in entries {
                if edge.end >= until || progress.bytes >= bytes_max {
                    return Ok(());
                }
                check_end(extent, progress.next, edge.end, &entry)?;
                if let Some(what) = self.append_fault(extent, &edge, &entry)? {
                    progress.faults.push(Fault {
                        start: edge.end,
                        end: entry.end,
                        file: FileKey::data(extent.file).path(),
                        byte: extent.file_position + (edge.end - extent.start),
                        what,
                        missing: false,
                    });
                }
                progress.bytes += entry.end - edge.end + INDEX_ENTRY_BYTES as u64;
                progress.next += 1;
                edge = Edge {
                    end: entry.end,
                    records: entry.records,
                    time_ms: entry.time_ms,
                };
            }
        }
        Ok(())
    }

    /// Everything damaged between two positions of an extent. One damaged append is reason to look at the whole
    /// index: a search in one that is out of order finds the wrong appends.
    pub fn between(&mut self, extent: &Extent, from: u64, to: u64) -> io::Result<Vec<Fault>> {
        let file = self.index_file(extent)?;
        let from = from.max(extent.start);
        let first = match index::search(&*file, extent, &|entry| entry.end <= from) {
            Ok((first, _)) => first.min(extent.index_count.saturating_sub(1)),
            Err(error) if is_damage(&error) => 0,
            Err(error) => return Err(error),
        };
        let progress = self.check(extent, first, to, u64::MAX)?;
        if progress.faults.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.index_order(extent)?.unwrap_or(progress.faults))
    }

    /// Whether the whole index is in order; if not, all of the extent is lost to readers.
    pub fn index_order(&mut self, extent: &Extent) -> io::Result<Option<Vec<Fault>>> {
        let (mut next, mut end) = (0, extent.start);
        let mut look = || -> io::Result<()> {
            while next < extent.index_count {
                let count = BLOCK_ENTRIES.min(extent.index_count - next);
                for entry in self.entries(extent, next, count)? {
                    check_end(extent, next, end, &entry)?;
                    (next, end) = (next + 1, entry.end);
                }
            }
            Ok(())
        };
        match look() {
            Ok(()) => Ok(None),
            Err(error) if is_damage(&error) => {
                Ok(Some(vec![index_fault(extent, next, error.to_string())]))
            }
            Err(error) => Err(error),
        }
    }

    /// What is wrong with the append from `edge` to `entry`.
    fn append_fault(
        &mut self,
        extent: &Extent,
        edge: &Edge,
        entry: &IndexEntry,
    ) -> io::Result<Option<String>> {
        if entry.records < edge.records || entry.time_ms < edge.time_ms {
            return Ok(Some("records or time of its index entry go back".into()));
        }
        match self.crc(extent, edge.end, entry.end) {
            Ok(crc) if crc == entry.crc => Ok(None),
            Ok(_) => Ok(Some("fails its checksum".into())),
            Err(error) if is_damage(&error) => Ok(Some(error.to_string())),
            Err(error) => Err(error),
        }
    }

    fn crc(&mut self, extent: &Extent, from: u64, to: u64) -> io::Result<u32> {
        let place = |position: u64| extent.file_position.saturating_add(position - extent.start);
        let (mut at, end) = (place(from), place(to));
        let mut crc = 0;
        while at < end {
            let block = self.block(extent, at, place(end_of(extent)))?;
            let count = block.len().min((end - at) as usize);
            crc = crc32c::crc32c_append(crc, &block[..count]);
            at += count as u64;
        }
        Ok(crc)
    }

    /// Bytes of the extent's file from `at` on, at least one.
    fn block(&mut self, extent: &Extent, at: u64, end: u64) -> io::Result<&[u8]> {
        let key = FileKey::data(extent.file);
        let known = self.data.as_ref().filter(|(open, _)| *open == key);
        let block_end = self.block_at + self.block.len() as u64;
        if known.is_none() || at < self.block_at || at >= block_end {
            self.block.clear();
            let file = open(self.store, &mut self.data, key)?;
            self.block.resize(BLOCK_BYTES.min(end - at) as usize, 0);
            let read = read_some(&*file, &mut self.block, at);
            self.block.truncate(read.as_ref().map_or(0, |count| *count));
            self.block_at = at;
            if read? == 0 {
                let what = format!("the file ends at or before byte {at}");
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
        }
        Ok(&self.block[(at - self.block_at) as usize..])
    }

    fn edge_before(&mut self, extent: &Extent, first: u32) -> io::Result<Edge> {
        let Some(before) = first.checked_sub(1) else {
            return Ok(Edge {
                end: extent.start,
                records: extent.base_records,
                time_ms: 0,
            });
        };
        let entries = self.entries(extent, before, 1)?;
        let entry = entries.first().ok_or(io::ErrorKind::UnexpectedEof)?;
        index::check_inside(extent, entry)?;
        Ok(Edge {
            end: entry.end,
            records: entry.records,
            time_ms: entry.time_ms,
        })
    }

    fn entries(&mut self, extent: &Extent, first: u32, count: u32) -> io::Result<Vec<IndexEntry>> {
        let file = self.index_file(extent)?;
        index::read_entries(&*file, extent.index_position, first, count)
    }

    fn index_file(&mut self, extent: &Extent) -> io::Result<Arc<dyn DiskFile>> {
        open(self.store, &mut self.index, FileKey::index(extent.file))
    }
}

/// An append must end behind the one before it, inside its extent, and the last one where that ends.
fn check_end(extent: &Extent, number: u32, before: u64, entry: &IndexEntry) -> io::Result<()> {
    let last = number + 1 == extent.index_count;
    let fits = if last {
        entry.end == end_of(extent)
    } else {
        entry.end < end_of(extent)
    };
    if fits && entry.end > before {
        return Ok(());
    }
    Err(index::damage(format!(
        "index entry {number} ends at {} after {before}, the extent at {}",
        entry.end,
        end_of(extent)
    )))
}

fn index_fault(extent: &Extent, number: u32, what: String) -> Fault {
    let byte = extent.index_position + u64::from(number) * INDEX_ENTRY_BYTES as u64;
    Fault::whole(extent, true, byte, what)
}

/// Not from the set of files that readers share: a walk over everything would turn it over.
fn open(
    store: &ColdStore,
    slot: &mut Option<(FileKey, Arc<dyn DiskFile>)>,
    key: FileKey,
) -> io::Result<Arc<dyn DiskFile>> {
    if let Some((open, file)) = slot
        && *open == key
    {
        return Ok(Arc::clone(file));
    }
    // The old one goes first, so that two descriptors are the most.
    *slot = None;
    let file = store
        .disk
        .open(&key.path(), OpenMode::Read)
        .map_err(|error| key.explain(error))?;
    *slot = Some((key, Arc::clone(&file)));
    Ok(file)
}

fn read_some(file: &dyn DiskFile, buffer: &mut [u8], position: u64) -> io::Result<usize> {
    loop {
        match file.read_once_at(buffer, position) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_broken_medium_answers_is_damage_and_what_may_pass_is_not() {
        let of = io::Error::from_raw_os_error;
        let key = FileKey::data(crate::model::FileRef::Pack { number: 0 });
        for code in [libc::EIO, libc::EBADMSG, libc::EUCLEAN] {
            assert!(is_damage(&of(code)), "{code}");
            assert!(is_damage(&key.explain(of(code))), "the path hides nothing");
        }
        let passing = [
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOMEM,
            libc::EINTR,
            libc::EAGAIN,
            libc::EACCES,
            libc::ENOENT,
        ];
        for code in passing {
            assert!(!is_damage(&of(code)), "{code}");
            assert!(!is_damage(&key.explain(of(code))));
        }
        assert!(is_damage(&io::ErrorKind::UnexpectedEof.into()));
    }
}
