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
//! - `ids` and `streams` change together;
//! - a pack's live bytes never go below zero (that would be lost accounting, and unlinking live data the
//!   next step): such a commit is refused; a pack that reaches zero has no row;
//! - a damaged page is `Corrupt`, never a panic that leaves this module.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Once};

use redb::{
    Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    StorageBackend, StorageError, TableDefinition, WriteTransaction,
};

use crate::error::EngineError;
use crate::io::{Disk, DiskFile, OpenMode, read_exact_at, write_all_at};
use crate::log::endings::Unwritten;
use crate::model::StreamId;

mod endings;
mod export;
mod view;

#[cfg(test)]
#[path = "catalog_tests.rs"]
mod tests;

pub use self::view::CatalogView;

pub const CATALOG_FILE: &str = "catalog.redb";
const CATALOG_FILE_NEW: &str = "catalog.redb.new";

/// Pages kept in memory, those of a running commit included.
const CACHE_BYTES: usize = 16 * 1024 * 1024;

const STREAMS: TableDefinition<&[u8], &[u8]> = TableDefinition::new("streams");
const IDS: TableDefinition<u64, &[u8]> = TableDefinition::new("ids");
const PACKS: TableDefinition<u32, u64> = TableDefinition::new("packs");
const ENDINGS: TableDefinition<u64, &[u8]> = TableDefinition::new("endings");
const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
/// How many tables there are.
const TABLES: usize = 5;

#[derive(Debug)]
pub enum CatalogError {
    /// The disk failed. After a failed write the catalog must be opened again.
    Io(io::Error),
    /// The file is not what was written; the text says where that showed.
    Corrupt(String),
}

impl fmt::Display for CatalogError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CatalogError::Io(error) => write!(out, "{CATALOG_FILE}: {error}"),
            CatalogError::Corrupt(detail) => write!(out, "catalog is damaged: {detail}"),
        }
    }
}

impl std::error::Error for CatalogError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CatalogError::Io(error) => Some(error),
            CatalogError::Corrupt(_) => None,
        }
    }
}

/// Why a start was refused: what the disk did is not the same as what the file is.
impl From<CatalogError> for EngineError {
    fn from(error: CatalogError) -> EngineError {
        match error {
            CatalogError::Io(error) => EngineError::io(CATALOG_FILE, error),
            CatalogError::Corrupt(_) => EngineError::new("catalog_damaged", error.to_string()),
        }
    }
}

impl From<redb::Error> for CatalogError {
    fn from(error: redb::Error) -> CatalogError {
        match error {
            redb::Error::Io(error) if is_damage(&error) => CatalogError::Corrupt(error.to_string()),
            redb::Error::Io(error) => CatalogError::Io(error),
            redb::Error::PreviousIo | redb::Error::DatabaseClosed => {
                CatalogError::Io(io::Error::other(error.to_string()))
            }
            redb::Error::ValueTooLarge(_) => CatalogError::Io(io::Error::new(
                io::ErrorKind::InvalidInput,
                error.to_string(),
            )),
            other => CatalogError::Corrupt(other.to_string()),
        }
    }
}

/// The store reads only inside its own file: content that sends it elsewhere is damage, not a disk error.
fn is_damage(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
    )
}

macro_rules! from_store_errors {
    ($($error:ty),+) => {$(
        impl From<$error> for CatalogError {
            fn from(error: $error) -> CatalogError {
                CatalogError::from(redb::Error::from(error))
            }
        }
    )+};
}
from_store_errors!(
    StorageError,
    DatabaseError,
    redb::TableError,
    redb::TransactionError,
    redb::CommitError
);

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
    /// `None` only while it is being dropped.
    database: Option<Database>,
}

impl Drop for Catalog {
    fn drop(&mut self) {
        let database = self.database.take();
        // Closing writes the allocator state, and reads pages to do so. What fails here costs a repair
        // at the next start and nothing else: every commit was durable when it returned.
        let _closed = contained(|| {
            drop(database);
            Ok(())
        });
    }
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
        let mut builder = Builder::new();
        builder.set_cache_size(CACHE_BYTES);
        let database = builder.create_with_backend(Backend { file })?;
        let catalog = Catalog {
            database: Some(database),
        };
        catalog.create_tables()?;
        Ok(catalog)
    }

    fn database(&self) -> Result<&Database, CatalogError> {
        let closed = || CatalogError::Io(io::Error::other("the catalog is closed"));
        self.database.as_ref().ok_or_else(closed)
    }

    /// Readers may then rely on the tables. Costs a sync only where one is missing.
    fn create_tables(&self) -> Result<(), CatalogError> {
        let present = self.database()?.begin_read()?.list_tables()?.count();
        if present == TABLES {
            return Ok(());
        }
        let transaction = self.begin_write()?;
        transaction.open_table(STREAMS)?;
        transaction.open_table(IDS)?;
        transaction.open_table(PACKS)?;
        transaction.open_table(ENDINGS)?;
        transaction.open_table(META)?;
        Ok(transaction.commit()?)
    }

    /// The store's allocator state goes into each commit, so that opening after a crash does not
    /// walk the whole file.
    fn begin_write(&self) -> Result<WriteTransaction, CatalogError> {
        let mut transaction = self.database()?.begin_write()?;
        transaction.set_quick_repair(true);
        Ok(transaction)
    }

    pub fn get(&self, path: &[u8]) -> Result<Option<Vec<u8>>, CatalogError> {
        contained(|| {
            let table = self.database()?.begin_read()?.open_table(STREAMS)?;
            Ok(table.get(path)?.map(|value| value.value().to_vec()))
        })
    }

    pub fn path_of(&self, id: StreamId) -> Result<Option<Vec<u8>>, CatalogError> {
        contained(|| {
            let table = self.database()?.begin_read()?.open_table(IDS)?;
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
        let from = if !after.is_empty() && after >= prefix {
            Bound::Excluded(after)
        } else {
            Bound::Included(prefix)
        };
        // A panic of the visitor is the caller's and must not pass for damage of the file.
        let mut panicked = None;
        let mut visit = |path: &[u8], value: &[u8]| {
            catch_unwind(AssertUnwindSafe(|| visit(path, value))).unwrap_or_else(|panic| {
                panicked = Some(panic);
                false
            })
        };
        let scanned = contained(|| {
            let table = self.database()?.begin_read()?.open_table(STREAMS)?;
            for entry in table.range::<&[u8]>((from, Bound::Unbounded))?.take(limit) {
                let (path, value) = entry?;
                if !path.value().starts_with(prefix) || !visit(path.value(), value.value()) {
                    break;
                }
            }
            Ok(())
        });
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
        scanned
    }

    pub fn meta(&self, name: &str) -> Result<Option<Vec<u8>>, CatalogError> {
        contained(|| {
            let table = self.database()?.begin_read()?.open_table(META)?;
            Ok(table.get(name)?.map(|value| value.value().to_vec()))
        })
    }

    /// Live bytes of every pack that has any.
    pub fn packs(&self) -> Result<Vec<(u32, u64)>, CatalogError> {
        contained(|| {
            let table = self.database()?.begin_read()?.open_table(PACKS)?;
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
        contained(|| Ok(self.database()?.begin_read()?.open_table(STREAMS)?.len()?))
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
        contained(|| {
            let transaction = self.begin_write()?;
            put_streams(&transaction, changes)?;
            put_ids(&transaction, changes)?;
            put_packs(&transaction, pack_live)?;
            endings::put_endings(&transaction, endings)?;
            let mut table = transaction.open_table(META)?;
            for (name, value) in meta {
                table.insert(*name, *value)?;
            }
            drop(table);
            Ok(transaction.commit()?)
        })
    }
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

thread_local! {
    /// Whether this thread's panics become an error: the operator reads that, not a stack trace beside it.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}
static INSTALL_QUIET_HOOK: Once = Once::new();

/// The store checks pages when it repairs, not on every read; a damaged page can trip an assertion or an
/// index inside it. That is this file's damage and must stay one.
fn contained<T>(work: impl FnOnce() -> Result<T, CatalogError>) -> Result<T, CatalogError> {
    INSTALL_QUIET_HOOK.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !CONTAINED.get() {
                loud(panic);
            }
        }));
    });
    let outer = CONTAINED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(outer);
    done.unwrap_or_else(|panic| {
        let detail = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("unreadable page");
        Err(CatalogError::Corrupt(detail.to_owned()))
    })
}

/// The store's file, through the disk door.
struct Backend {
    file: Arc<dyn DiskFile>,
}

impl fmt::Debug for Backend {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(CATALOG_FILE)
    }
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        read_exact_at(&*self.file, out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        write_all_at(&*self.file, data, offset)
    }
}
