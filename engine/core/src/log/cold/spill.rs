//! Spill files: bytes of `ephemeral` streams that memory has no room for.
//!
//! They have the shape of packs but are never synced, the catalog never names them, and every start removes
//! what the last run left: their streams promise nothing beyond the life of the process.
//!
//! Invariant: a file is unlinked when its last live byte is released, so that deleted streams give their space
//! back while the server runs.

use std::collections::HashMap;
use std::io;

use super::ColdStore;
use super::files::FileKey;
use crate::io::Disk;
use crate::log::pack::PackWriter;
use crate::model::{Extent, FileRef, IndexEntry, StreamId};

const SPILL_DIRECTORY: &str = "spill";

pub fn path(number: u32) -> String {
    format!("{SPILL_DIRECTORY}/{number:08x}.spill")
}

/// Live bytes per file, and the next number.
#[derive(Default)]
pub struct Spilled {
    live: HashMap<u32, u64>,
    next: u32,
}

/// What one stream gives away.
pub struct SpillPiece<'b> {
    pub stream: StreamId,
    pub start: u64,
    pub base_records: u64,
    /// Both in pieces that follow each other.
    pub bytes: Vec<&'b [u8]>,
    pub index: [&'b [IndexEntry]; 2],
}

/// Removes what the last run left. A directory that was never needed is not made.
pub fn discard_all(disk: &dyn Disk) -> io::Result<()> {
    let entries = match disk.list(SPILL_DIRECTORY) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries
        .iter()
        .filter(|entry| entry.name.ends_with(".spill"))
    {
        disk.remove(&format!("{SPILL_DIRECTORY}/{}", entry.name))?;
    }
    Ok(())
}

impl ColdStore {
    /// Writes the pieces to one new file; one extent each, in their order.
    pub fn spill(&self, pieces: &[SpillPiece<'_>]) -> io::Result<Vec<Extent>> {
        let number = {
            let mut spilled = self.spilled.lock();
            spilled.next += 1;
            spilled.next
        };
        self.disk.create_dir_all(SPILL_DIRECTORY)?;
        let written = self.write_spill(number, pieces);
        if written.is_err() {
            // Half a file is of use to nobody; what cannot be removed now goes with the next start.
            self.remove_file(FileKey::data(FileRef::Spill { number }))?;
        }
        let extents = written?;
        let live = extents.iter().map(|extent| extent.len).sum();
        self.spilled.lock().live.insert(number, live);
        Ok(extents)
    }

    fn write_spill(&self, number: u32, pieces: &[SpillPiece<'_>]) -> io::Result<Vec<Extent>> {
        let file = FileRef::Spill { number };
        let mut writer = PackWriter::create_as(&*self.disk, number, file, &path(number))?;
        let mut extents = Vec::with_capacity(pieces.len());
        for piece in pieces {
            extents.push(writer.append(
                piece.stream,
                piece.start,
                piece.base_records,
                &piece.bytes,
                &piece.index,
            )?);
        }
        writer.flush()?;
        Ok(extents)
    }

    /// Gives spilled extents back; files without live bytes are unlinked.
    pub fn release_spilled(&self, extents: &[Extent]) -> io::Result<()> {
        for extent in extents {
            let FileRef::Spill { number } = extent.file else {
                continue;
            };
            let empty = {
                let mut spilled = self.spilled.lock();
                let live = spilled.live.entry(number).or_default();
                *live = live.saturating_sub(extent.len);
                let empty = *live == 0;
                if empty {
                    spilled.live.remove(&number);
                }
                empty
            };
            if empty {
                self.remove_file(FileKey::data(extent.file))?;
            }
        }
        Ok(())
    }
}
