//! The staged packs that a checkpoint fills in: section header and index of what a commit has adopted.
//!
//! Part of the writer. The bytes are there and synced since they were staged; the room for header and index was written
//! with them, so that a full disk does not matter here.
//!
//! Invariants: written is only what no catalog names yet, and doing it again gives the same; a pack is opened for its mark
//! once, when everything is placed; a file is synced before it is closed; a bounded number is open.

use std::collections::BTreeSet;
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
    /// Called before each file that is written or synced.
    meanwhile: &'a dyn Fn(),
    /// Packs that must be no stages any more at the end.
    unspent: BTreeSet<u32>,
    dirty: Vec<Dirty>,
}

/// A file with unsynced bytes.
struct Dirty {
    pack: u32,
    file: Arc<dyn DiskFile>,
    /// Its mark was taken away.
    spent: bool,
}

impl<'a> AdoptedFiles<'a> {
    pub fn new(store: &'a ColdStore, meanwhile: &'a dyn Fn()) -> AdoptedFiles<'a> {
        AdoptedFiles {
            store,
            meanwhile,
            unspent: BTreeSet::new(),
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
        self.spend(section.pack);
        let file = Arc::clone(&self.open(section.pack)?.file);
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

    /// A pack of which something is placed, copied or given up: it is made no stage any more in the end.
    pub fn spend(&mut self, pack: u32) {
        if !self.store.is_spent(pack) {
            self.unspent.insert(pack);
        }
    }

    fn open(&mut self, pack: u32) -> io::Result<&mut Dirty> {
        let found = self.dirty.iter().position(|dirty| dirty.pack == pack);
        let at = match found {
            Some(at) => at,
            None => {
                if self.dirty.len() + 1 > self.store.write_files_max {
                    self.sync_dirty()?;
                }
                let opened = self.store.disk.open(&pack::path(pack), OpenMode::ReadWrite);
                self.dirty.push(Dirty {
                    pack,
                    file: opened.map_err(|error| key_of(pack).explain(error))?,
                    spent: false,
                });
                self.dirty.len() - 1
            }
        };
        Ok(&mut self.dirty[at])
    }

    fn sync_dirty(&mut self) -> io::Result<()> {
        for Dirty { pack, file, spent } in self.dirty.drain(..) {
            (self.meanwhile)();
            file.sync().map_err(|error| key_of(pack).explain(error))?;
            if spent {
                self.store.note_spent(pack);
            }
        }
        Ok(())
    }

    /// Takes the marks away, and syncs. A pack that is not there is no stage already.
    pub fn sync_all(&mut self) -> io::Result<()> {
        for pack in std::mem::take(&mut self.unspent) {
            (self.meanwhile)();
            match self.open(pack) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                opened => {
                    let dirty = opened?;
                    dirty.spent = stage::spend(&*dirty.file, pack)
                        .map_err(|error| key_of(pack).explain(error))?;
                }
            }
        }
        self.sync_dirty()
    }
}

fn key_of(number: u32) -> FileKey {
    FileKey::data(FileRef::Pack { number })
}
