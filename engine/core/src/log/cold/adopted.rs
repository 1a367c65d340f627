//! The staged packs that a checkpoint fills in: section header and index of what a commit has adopted.
//!
//! Part of the writer. The bytes are there and synced since they were staged; the room for header and index was written
//! with them, so that a full disk does not matter here.
//!
//! Invariants: written is only what no catalog names yet, and doing it again gives the same; a file is no stage any more
//! when it is synced, and synced before it is closed.

use std::io;
use std::sync::Arc;

use super::ColdStore;
use super::files::FileKey;
use crate::io::{DiskFile, OpenMode, write_all_at};
use crate::log::index::{INDEX_ENTRY_BYTES, encode};
use crate::log::pack::{self, Section, section_start};
use crate::log::stage;
use crate::model::{Adopted, Extent, FileRef, IndexEntry, StreamId};

/// Index bytes written at once.
const PIECE_ENTRIES: usize = 32 * 1024;

pub struct AdoptedFiles<'a> {
    store: &'a ColdStore,
    /// Files with unsynced bytes.
    dirty: Vec<(u32, Arc<dyn DiskFile>)>,
}

impl<'a> AdoptedFiles<'a> {
    pub fn new(store: &'a ColdStore) -> AdoptedFiles<'a> {
        AdoptedFiles {
            store,
            dirty: Vec::new(),
        }
    }

    /// Writes header and index of a section, now that its place in the stream is known.
    pub fn place(
        &mut self,
        stream: StreamId,
        section: &Adopted,
        extent: &Extent,
        index: &[IndexEntry],
    ) -> io::Result<()> {
        let key = key_of(section.pack);
        let file = self.open(section.pack)?;
        let mut bytes = Vec::with_capacity(PIECE_ENTRIES.min(index.len()) * INDEX_ENTRY_BYTES);
        Section {
            stream,
            start: extent.start,
            len: extent.len,
            base_records: extent.base_records,
            index_count: extent.index_count,
        }
        .encode(section.pack, &mut bytes);
        write_all_at(&*file, &bytes, section_start(extent)).map_err(|error| key.explain(error))?;
        let mut position = extent.index_position;
        for piece in index.chunks(PIECE_ENTRIES) {
            bytes.clear();
            piece.iter().for_each(|entry| encode(entry, &mut bytes));
            write_all_at(&*file, &bytes, position).map_err(|error| key.explain(error))?;
            position += bytes.len() as u64;
        }
        Ok(())
    }

    /// Makes a pack no stage any more, though nothing of it is placed here. One that is not there is none already.
    pub fn spend(&mut self, pack: u32) -> io::Result<()> {
        match self.open(pack) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    fn open(&mut self, pack: u32) -> io::Result<Arc<dyn DiskFile>> {
        if let Some((_, file)) = self.dirty.iter().find(|(number, _)| *number == pack) {
            return Ok(Arc::clone(file));
        }
        if self.dirty.len() + 1 > self.store.write_files_max {
            self.sync_all()?;
        }
        let opened = self
            .store
            .disk
            .open(&pack::path(pack), OpenMode::ReadWrite)
            .map_err(|error| key_of(pack).explain(error))?;
        self.dirty.push((pack, Arc::clone(&opened)));
        Ok(opened)
    }

    pub fn sync_all(&mut self) -> io::Result<()> {
        for (pack, file) in self.dirty.drain(..) {
            stage::spend(&*file, pack)
                .and_then(|()| file.sync())
                .map_err(|error| key_of(pack).explain(error))?;
        }
        Ok(())
    }
}

fn key_of(number: u32) -> FileKey {
    FileKey::data(FileRef::Pack { number })
}
