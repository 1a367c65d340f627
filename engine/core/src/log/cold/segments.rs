//! The segment files that a checkpoint has open for writing.
//!
//! Part of the writer: which bytes go where is decided there, this keeps the number of open files bounded
//! and knows what has to be synced, directories included.
//!
//! Invariants: a file is synced before it is closed; a new file's directory, and a new directory's parent,
//! are synced before `sync_all` returns; an existing file shorter than its extent is never written to.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use super::ColdStore;
use super::files::FileKey;
use crate::io::{DiskFile, OpenMode, write_all_at};
use crate::log::index::INDEX_ENTRY_BYTES;
use crate::log::segment::{SEGMENTS_DIRECTORY, bucket, bucket_directory};
use crate::model::{Extent, FileRef, StreamId};

pub struct SegmentFiles<'a> {
    store: &'a ColdStore,
    /// Files with unsynced bytes: few, and in the order they were opened, so that a run can be replayed.
    dirty: Vec<(FileKey, Arc<dyn DiskFile>)>,
    /// Directories that got a new segment.
    buckets: BTreeSet<u8>,
}

impl<'a> SegmentFiles<'a> {
    pub fn new(store: &'a ColdStore) -> SegmentFiles<'a> {
        SegmentFiles {
            store,
            dirty: Vec::new(),
            buckets: BTreeSet::new(),
        }
    }

    /// Opens both files of an existing segment. False if they are missing or
    /// shorter than the extent: writing behind it would turn the missing bytes into zeros.
    pub fn open_to_grow(&mut self, extent: &Extent) -> io::Result<bool> {
        let index_len = u64::from(extent.index_count) * INDEX_ENTRY_BYTES as u64;
        let wanted = [
            (
                FileKey::data(extent.file),
                extent.file_position.saturating_add(extent.len),
            ),
            (
                FileKey::index(extent.file),
                extent.index_position.saturating_add(index_len),
            ),
        ];
        if wanted.iter().any(|(key, _)| self.opened(*key).is_none()) {
            self.make_room()?;
        }
        for (key, len_min) in wanted {
            if self.opened(key).is_some() {
                continue;
            }
            let opened = match self.store.disk.open(&key.path(), OpenMode::ReadWrite) {
                Ok(file) => Some(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(key.explain(error)),
            };
            match opened {
                Some(file) if file.len()? >= len_min => {
                    self.dirty.push((key, file));
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Opens both files of a new segment, and its directory first if this process has not used it yet.
    pub fn create(&mut self, stream: StreamId, number: u32) -> io::Result<FileRef> {
        let bucket = bucket(stream);
        if self.buckets.insert(bucket) && !self.store.durable_buckets.lock()[bucket as usize] {
            self.store.disk.create_dir_all(&bucket_directory(bucket))?;
        }
        self.make_room()?;
        let file = FileRef::Segment {
            owner: stream,
            number,
        };
        for key in [FileKey::data(file), FileKey::index(file)] {
            // It exists if an earlier checkpoint died: what it left is overwritten from the start.
            let opened = self.store.disk.open(&key.path(), OpenMode::CreateOrOpen);
            let opened = opened.map_err(|error| key.explain(error))?;
            if self.opened(key).is_none() {
                self.dirty.push((key, opened));
            }
        }
        Ok(file)
    }

    /// Writes to a file that `open_to_grow` or `create` has just opened.
    pub fn write(&self, key: FileKey, bytes: &[u8], position: u64) -> io::Result<()> {
        let file = self
            .opened(key)
            .ok_or_else(|| io::Error::other("segment is not open"))?;
        write_all_at(file, bytes, position).map_err(|error| key.explain(error))
    }

    fn opened(&self, key: FileKey) -> Option<&dyn DiskFile> {
        let found = self.dirty.iter().find(|(dirty, _)| *dirty == key);
        found.map(|(_, file)| &**file)
    }

    /// Makes sure that two more files may be opened.
    fn make_room(&mut self) -> io::Result<()> {
        if self.dirty.len() + 2 > self.store.write_files_max {
            self.sync_dirty()?;
        }
        Ok(())
    }

    fn sync_dirty(&mut self) -> io::Result<()> {
        for (key, file) in self.dirty.drain(..) {
            file.sync().map_err(|error| key.explain(error))?;
        }
        Ok(())
    }

    /// Syncs the files, and then the names of new ones.
    pub fn sync_all(&mut self) -> io::Result<()> {
        self.sync_dirty()?;
        let disk = &self.store.disk;
        for bucket in &self.buckets {
            disk.sync_dir(&bucket_directory(*bucket))?;
        }
        let mut durable = self.store.durable_buckets.lock();
        if self.buckets.iter().any(|bucket| !durable[*bucket as usize]) {
            disk.sync_dir(SEGMENTS_DIRECTORY)?;
            self.buckets
                .iter()
                .for_each(|bucket| durable[*bucket as usize] = true);
        }
        Ok(())
    }
}
