//! The catalog: what exists, in one ordered store on disk.
//!
//! Written once per checkpoint for the streams it touched, read when a stream is not in memory, scanned for
//! listings and at start. The values are opaque here: the checkpoint encodes them, each with the sequence it
//! reflects. Sits beside `cold`: the catalog names extents, cold storage holds their bytes.
//!
//! Tables: `streams` path -> value, `ids` stream id -> path, `packs` number -> live bytes, `endings` removal -> where the
//! removed stream ended, `meta` name -> bytes.
//! The store is redb on the disk door, so that a simulated disk sees and breaks every write of it.
//!
//! Invariants:
//! - a commit is one durable transaction: all of it or nothing, whatever the disk does;
//! - a commit that finds no space is nothing (`Full`), and reads and later commits go on; any other failure of a
//!   write or sync ends all commits until the next start;
//! - `ids` and `streams` change together;
//! - a pack's live bytes never go below zero (that would be lost accounting, and unlinking live data the
//!   next step): such a commit is refused; a pack that reaches zero has no row;
//! - a damaged page is `Corrupt`, never a panic that leaves this module.

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
    WriteTransaction,
};

use crate::io::{Disk, DiskFile, OpenMode};
use crate::log::endings::Unwritten;
use crate::model::StreamId;

mod endings;
mod error;
mod export;
mod known;
mod store;
mod view;

#[cfg(test)]
#[path = "catalog_tests.rs"]
mod tests;

pub use self::error::CatalogError;
pub use self::known::Known;
use self::store::{Store, contained};
pub use self::view::CatalogView;

pub const CATALOG_FILE: &str = "catalog.redb";
const CATALOG_FILE_NEW: &str = "catalog.redb.new";

const STREAMS: TableDefinition<&[u8], &[u8]> = TableDefinition::new("streams");
const IDS: TableDefinition<u64, &[u8]> = TableDefinition::new("ids");
const PACKS: TableDefinition<u32, u64> = TableDefinition::new("packs");
const ENDINGS: TableDefinition<u64, &[u8]> = TableDefinition::new("endings");
const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
/// Number of the newest commit, by which one whose end was not seen is told from one that never was.
const META_COMMITS: &str = "commits";
/// One stream's change in a commit. Changes of the same path, and of the same id, apply in their order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    Put {
        path: Vec<u8>,
        id: StreamId,
        value: Vec<u8>,
    },
    Remove {
        path: Vec<u8>,
        id: StreamId,
    },
    /// Forgets an id whose path a newer stream has taken over.
    RemoveId {
        id: StreamId,
    },
}

impl Change {
    fn id(&self) -> StreamId {
        match self {
            Change::Put { id, .. } | Change::Remove { id, .. } | Change::RemoveId { id } => *id,
        }
    }

    fn path(&self) -> Option<&[u8]> {
        match self {
            Change::Put { path, .. } | Change::Remove { path, .. } => Some(path),
            Change::RemoveId { .. } => None,
        }
    }
}

pub struct Catalog {
    /// Another one after a commit that found no space.
    store: RwLock<Arc<Store>>,
    file: Arc<dyn DiskFile>,
    /// Held by a commit to its end, opening the store again included.
    writing: Mutex<()>,
    /// Which paths there may be. Without it every path may be there.
    pub known: Known,
    /// Counts commits.
    version: AtomicU64,
}

impl Catalog {
    /// Opens the catalog, or creates it if there is none (the caller knows whether there should be).
    pub fn open(disk: Arc<dyn Disk>) -> Result<Catalog, CatalogError> {
        contained(|| match disk.open(CATALOG_FILE, OpenMode::ReadWrite) {
            Ok(file) => {
                // The store would start a new one in an empty file, and every stream would be gone.
                if file.is_empty().map_err(CatalogError::Io)? {
                    return Err(CatalogError::Corrupt(format!("{CATALOG_FILE} is empty")));
                }
                let catalog = Catalog::on(file)?;
                // Each time: the process that created the file may have died before this.
                disk.sync_dir("").map_err(CatalogError::Io)?;
                Ok(catalog)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Catalog::create(&*disk),
            Err(error) => Err(CatalogError::Io(error)),
        })
    }

    /// Under another name first: a store that died half made would pass for a damaged one.
    fn create(disk: &dyn Disk) -> Result<Catalog, CatalogError> {
        let create = || -> io::Result<Arc<dyn DiskFile>> {
            let file = disk.open(CATALOG_FILE_NEW, OpenMode::CreateOrOpen)?;
            file.set_len(0)?;
            Ok(file)
        };
        let catalog = Catalog::on(create().map_err(CatalogError::Io)?)?;
        let named = disk
            .rename(CATALOG_FILE_NEW, CATALOG_FILE)
            .and_then(|()| disk.sync_dir(""));
        named.map_err(CatalogError::Io)?;
        Ok(catalog)
    }

    fn on(file: Arc<dyn DiskFile>) -> Result<Catalog, CatalogError> {
        Ok(Catalog {
            store: RwLock::new(Arc::new(Store::open(&file)?)),
            file,
            writing: Mutex::default(),
            known: Known::default(),
            version: AtomicU64::new(0),
        })
    }

    fn store(&self) -> Arc<Store> {
        Arc::clone(&self.store.read())
    }

    /// Reads from the store: once more if a commit has found no space meanwhile, after which it is opened again.
    fn read<T>(
        &self,
        mut work: impl FnMut(&Database) -> Result<T, CatalogError>,
    ) -> Result<T, CatalogError> {
        let store = self.store();
        let done = contained(|| work(store.database()?));
        if done.is_ok() || !store.is_out_of_space() {
            return done;
        }
        drop(self.writing.lock());
        contained(|| work(self.store().database()?))
    }

    /// Bytes of the file, holes included.
    pub fn file_bytes(&self) -> u64 {
        self.file.len().unwrap_or(0)
    }

    pub fn get(&self, path: &[u8]) -> Result<Option<Vec<u8>>, CatalogError> {
        self.read(|database| {
            let table = database.begin_read()?.open_table(STREAMS)?;
            Ok(table.get(path)?.map(|value| value.value().to_vec()))
        })
    }

    pub fn path_of(&self, id: StreamId) -> Result<Option<Vec<u8>>, CatalogError> {
        self.read(|database| {
            let table = database.begin_read()?.open_table(IDS)?;
            Ok(table.get(id.0)?.map(|path| path.value().to_vec()))
        })
    }

    /// Visits paths with `prefix` in order, strictly after `after` unless that is empty, at most `limit` of
    /// them, until `visit` returns false. The visitor sees one consistent state of the catalog.
    pub fn scan(
        &self,
        prefix: &[u8],
        after: &[u8],
        limit: usize,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), CatalogError> {
        let mut after = after.to_vec();
        let mut left = limit;
        // A panic of the visitor is the caller's and must not pass for damage of the file.
        let mut panicked = None;
        let mut visit = |path: &[u8], value: &[u8]| {
            catch_unwind(AssertUnwindSafe(|| visit(path, value))).unwrap_or_else(|panic| {
                panicked = Some(panic);
                false
            })
        };
        let scanned = self.read(|database| {
            let behind = after.clone();
            let from = if !behind.is_empty() && *behind >= *prefix {
                Bound::Excluded(&*behind)
            } else {
                Bound::Included(prefix)
            };
            let table = database.begin_read()?.open_table(STREAMS)?;
            for entry in table.range::<&[u8]>((from, Bound::Unbounded))?.take(left) {
                let (path, value) = entry?;
                if !path.value().starts_with(prefix) || !visit(path.value(), value.value()) {
                    break;
                }
                // Where a second attempt goes on.
                after.clear();
                after.extend_from_slice(path.value());
                left -= 1;
            }
            Ok(())
        });
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
        scanned
    }

    pub fn meta(&self, name: &str) -> Result<Option<Vec<u8>>, CatalogError> {
        self.read(|database| {
            let table = database.begin_read()?.open_table(META)?;
            Ok(table.get(name)?.map(|value| value.value().to_vec()))
        })
    }

    /// Live bytes of every pack that has any.
    pub fn packs(&self) -> Result<Vec<(u32, u64)>, CatalogError> {
        self.read(|database| {
            let table = database.begin_read()?.open_table(PACKS)?;
            let mut packs = Vec::new();
            for entry in table.iter()? {
                let (number, live_bytes) = entry?;
                packs.push((number.value(), live_bytes.value()));
            }
            Ok(packs)
        })
    }

    /// How many streams there are.
    pub fn len(&self) -> Result<u64, CatalogError> {
        self.read(|database| Ok(database.begin_read()?.open_table(STREAMS)?.len()?))
    }

    pub fn is_empty(&self) -> Result<bool, CatalogError> {
        Ok(self.len()? == 0)
    }

    /// Applies everything in one durable transaction: changes of streams, `meta` pairs, and changes of the
    /// packs' live bytes (several for one pack add up).
    pub fn commit(
        &self,
        changes: &[Change],
        meta: &[(&str, &[u8])],
        pack_live: &[(u32, i64)],
    ) -> Result<(), CatalogError> {
        self.commit_with(changes, meta, pack_live, &Unwritten::default())
    }

    /// As [`Catalog::commit`], with what is to be remembered about removed streams.
    pub fn commit_with(
        &self,
        changes: &[Change],
        meta: &[(&str, &[u8])],
        pack_live: &[(u32, i64)],
        endings: &Unwritten,
    ) -> Result<(), CatalogError> {
        // Before anybody can look for them here.
        changes
            .iter()
            .filter(|change| matches!(change, Change::Put { .. }))
            .filter_map(Change::path)
            .for_each(|path| self.known.add(path));
        let _writing = self.writing.lock();
        let store = self.store();
        store.expect_space();
        let mut number = 0;
        let done = contained(|| {
            let transaction = store.begin_write()?;
            put_streams(&transaction, changes)?;
            put_ids(&transaction, changes)?;
            put_packs(&transaction, pack_live)?;
            endings::put_endings(&transaction, endings)?;
            let mut table = transaction.open_table(META)?;
            for (name, value) in meta {
                table.insert(*name, *value)?;
            }
            let last = table
                .get(META_COMMITS)?
                .map_or(0, |value| as_number(value.value()));
            number = last + 1;
            table.insert(META_COMMITS, number.to_le_bytes().as_slice())?;
            drop(table);
            Ok(transaction.commit()?)
        });
        let done = match done {
            Err(_) if store.is_out_of_space() => self.open_again(&store, number),
            done => done,
        };
        self.version.fetch_add(1, Ordering::AcqRel);
        done
    }

    /// Grows with every commit: as long as it is the same, what was found here still holds.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// After a commit that found no space. The store refuses everything then; opened again, the file says whether the
    /// commit has happened.
    fn open_again(&self, spent: &Store, number: u64) -> Result<(), CatalogError> {
        spent.retire();
        let fresh = contained(|| Store::open(&self.file))?;
        let last = contained(|| {
            let table = fresh.database()?.begin_read()?.open_table(META)?;
            Ok(table
                .get(META_COMMITS)?
                .map_or(0, |value| as_number(value.value())))
        })?;
        *self.store.write() = Arc::new(fresh);
        if number > 0 && last == number {
            Ok(())
        } else {
            Err(CatalogError::Full)
        }
    }
}

fn as_number(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

/// In path order, so that neighbours share pages and the small cache suffices.
fn put_streams(transaction: &WriteTransaction, changes: &[Change]) -> Result<(), CatalogError> {
    let mut ordered: Vec<(&[u8], &Change)> = changes
        .iter()
        .filter_map(|change| Some((change.path()?, change)))
        .collect();
    ordered.sort_by_key(|(path, _)| *path);
    let mut table = transaction.open_table(STREAMS)?;
    for (path, change) in ordered {
        match change {
            Change::Put { value, .. } => drop(table.insert(path, value.as_slice())?),
            Change::Remove { .. } | Change::RemoveId { .. } => drop(table.remove(path)?),
        }
    }
    Ok(())
}

fn put_ids(transaction: &WriteTransaction, changes: &[Change]) -> Result<(), CatalogError> {
    let mut ordered: Vec<&Change> = changes.iter().collect();
    ordered.sort_by_key(|change| change.id());
    let mut table = transaction.open_table(IDS)?;
    for change in ordered {
        let id = change.id().0;
        let Change::Put { path, .. } = change else {
            table.remove(id)?;
            continue;
        };
        // Nearly every change is of a stream that exists: looking is cheaper than rewriting its page.
        let known = table
            .get(id)?
            .is_some_and(|known| known.value() == path.as_slice());
        if !known {
            table.insert(id, path.as_slice())?;
        }
    }
    Ok(())
}

fn put_packs(transaction: &WriteTransaction, changes: &[(u32, i64)]) -> Result<(), CatalogError> {
    let mut totals: BTreeMap<u32, i64> = BTreeMap::new();
    for (number, change) in changes {
        let total = totals.entry(*number).or_default();
        *total = total.saturating_add(*change);
    }
    let mut table = transaction.open_table(PACKS)?;
    for (number, change) in totals {
        let before = table
            .get(number)?
            .map_or(0, |live_bytes| live_bytes.value());
        match before.checked_add_signed(change) {
            Some(0) => drop(table.remove(number)?),
            Some(after) => drop(table.insert(number, after)?),
            None => {
                return Err(CatalogError::Corrupt(format!(
                    "pack {number} has {before} live bytes, a change by {change} is impossible"
                )));
            }
        }
    }
    Ok(())
}
