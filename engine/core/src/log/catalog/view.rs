//! One consistent state of the catalog, for whoever walks all of it: verification and repair.
//!
//! Sits beside `catalog`, whose tables it reads. A view keeps the pages of its state alive, so it is held for a
//! walk and not for a life.
//!
//! Invariants:
//! - everything read through one view belongs to the same commit;
//! - walks go in pages, so that a caller's own look-ups in between do not nest inside the store.

use std::ops::Bound;
use std::sync::Arc;

use redb::{ReadTransaction, ReadableDatabase, ReadableTableMetadata};

use super::endings::{self, EndingRow};
use super::{
    CATALOG_FILE, CATALOG_FILE_NEW, Catalog, CatalogError, IDS, META, PACKS, STREAMS, contained,
};
use crate::io::{Disk, OpenMode};
use crate::model::StreamId;

/// A path and its value.
pub type Row = (Vec<u8>, Vec<u8>);

pub struct CatalogView {
    transaction: ReadTransaction,
}

impl Catalog {
    pub fn view(&self) -> Result<CatalogView, CatalogError> {
        self.read(|database| {
            Ok(CatalogView {
                transaction: database.begin_read()?,
            })
        })
    }

    /// Checks every page against its checksum. `false`: the store found and mended something of its own.
    pub fn check_pages(&mut self) -> Result<bool, CatalogError> {
        let store = Arc::get_mut(self.store.get_mut());
        let busy = || CatalogError::Io(std::io::Error::other("the catalog is in use"));
        contained(|| Ok(store.ok_or_else(busy)?.database_mut()?.check_integrity()?))
    }

    /// An empty catalog beside the one in use. It counts only once [`Catalog::take_over`] has named it.
    pub fn begin_successor(disk: &dyn Disk) -> Result<Catalog, CatalogError> {
        contained(|| {
            let file = disk
                .open(CATALOG_FILE_NEW, OpenMode::CreateOrOpen)
                .map_err(CatalogError::Io)?;
            file.set_len(0).map_err(CatalogError::Io)?;
            Catalog::on(file)
        })
    }

    /// Puts the successor in the place of the catalog; the caller has closed it.
    pub fn take_over(disk: &Arc<dyn Disk>) -> Result<(), CatalogError> {
        disk.rename(CATALOG_FILE_NEW, CATALOG_FILE)
            .and_then(|()| disk.sync_dir(""))
            .map_err(CatalogError::Io)
    }
}

impl CatalogView {
    pub fn get(&self, path: &[u8]) -> Result<Option<Vec<u8>>, CatalogError> {
        contained(|| {
            let table = self.transaction.open_table(STREAMS)?;
            Ok(table.get(path)?.map(|value| value.value().to_vec()))
        })
    }

    pub fn path_of(&self, id: StreamId) -> Result<Option<Vec<u8>>, CatalogError> {
        contained(|| {
            let table = self.transaction.open_table(IDS)?;
            Ok(table.get(id.0)?.map(|path| path.value().to_vec()))
        })
    }

    pub fn len(&self) -> Result<u64, CatalogError> {
        contained(|| Ok(self.transaction.open_table(STREAMS)?.len()?))
    }

    pub fn is_empty(&self) -> Result<bool, CatalogError> {
        Ok(self.len()? == 0)
    }

    /// Paths and values strictly behind `after` (from the first one if that is `None`), at most `limit`.
    pub fn streams(&self, after: Option<&[u8]>, limit: usize) -> Result<Vec<Row>, CatalogError> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let page = contained(|| {
            let table = self.transaction.open_table(STREAMS)?;
            let range = table.range::<&[u8]>((from, Bound::Unbounded))?;
            let mut page = Vec::new();
            for entry in range.take(limit) {
                let (path, value) = entry?;
                page.push((path.value().to_vec(), value.value().to_vec()));
            }
            Ok(page)
        })?;
        check_ascending(after, page.iter().map(|(path, _)| path.as_slice()))?;
        Ok(page)
    }

    /// Stream ids and their paths behind `after`, at most `limit`.
    pub fn ids(
        &self,
        after: Option<StreamId>,
        limit: usize,
    ) -> Result<Vec<(StreamId, Vec<u8>)>, CatalogError> {
        let from = after.map_or(Bound::Unbounded, |id| Bound::Excluded(id.0));
        let page = contained(|| {
            let table = self.transaction.open_table(IDS)?;
            let range = table.range::<u64>((from, Bound::Unbounded))?;
            let mut page = Vec::new();
            for entry in range.take(limit) {
                let (id, path) = entry?;
                page.push((StreamId(id.value()), path.value().to_vec()));
            }
            Ok(page)
        })?;
        check_ascending(after, page.iter().map(|(id, _)| *id))?;
        Ok(page)
    }

    pub fn packs(&self) -> Result<Vec<(u32, u64)>, CatalogError> {
        contained(|| {
            let table = self.transaction.open_table(PACKS)?;
            let mut packs = Vec::new();
            for entry in table.range::<u32>(..)? {
                let (number, live_bytes) = entry?;
                packs.push((number.value(), live_bytes.value()));
            }
            Ok(packs)
        })
    }

    pub fn endings(&self) -> Result<Vec<EndingRow>, CatalogError> {
        contained(|| endings::read_all(&self.transaction))
    }

    /// Every name and value of `meta`.
    pub fn all_meta(&self) -> Result<Vec<(String, Vec<u8>)>, CatalogError> {
        contained(|| {
            let table = self.transaction.open_table(META)?;
            let mut all = Vec::new();
            for entry in table.range::<&str>(..)? {
                let (name, value) = entry?;
                all.push((name.value().to_owned(), value.value().to_vec()));
            }
            Ok(all)
        })
    }

    pub fn meta_number(&self, name: &str) -> Result<u64, CatalogError> {
        contained(|| {
            let table = self.transaction.open_table(META)?;
            let value = table.get(name)?.map(|value| value.value().to_vec());
            Ok(value
                .and_then(|bytes| bytes.try_into().ok())
                .map_or(0, u64::from_le_bytes))
        })
    }
}

/// A damaged key may stand out of order: whoever goes on behind it would go round in circles.
fn check_ascending<K: PartialOrd>(
    after: Option<K>,
    keys: impl Iterator<Item = K>,
) -> Result<(), CatalogError> {
    let mut last = after;
    for key in keys {
        if last.is_some_and(|last| key <= last) {
            let what = "the keys of a table are out of order";
            return Err(CatalogError::Corrupt(what.to_owned()));
        }
        last = Some(key);
    }
    Ok(())
}
