//! The store under the catalog: redb on the disk door.
//!
//! Sits between `catalog`, which knows the tables, and the file. redb refuses everything after the first write that
//! fails, reads included; `catalog` then puts another store in place of this one, if space was all that was missing.
//!
//! Invariants:
//! - a store that was retired does not touch the file any more, whoever still holds it: its successor writes there;
//! - nothing that happens inside redb leaves this module as a panic.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use redb::{Builder, Database, ReadableDatabase, StorageBackend, WriteTransaction};

use super::{CATALOG_FILE, CatalogError, ENDINGS, IDS, META, PACKS, STREAMS};
use crate::io::{DiskFile, read_exact_at, wanted, write_all_at};

/// Pages kept in memory, those of a running commit included.
const CACHE_BYTES: usize = 16 * 1024 * 1024;
/// How many tables there are.
const TABLES: usize = 5;

pub(super) struct Store {
    /// `None` only while it is being dropped.
    database: Option<Database>,
    health: Arc<Health>,
}

/// What the store's calls to the disk have come to.
#[derive(Default)]
struct Health {
    /// A write found no space.
    full: AtomicBool,
    /// Something else failed: what is in the file may not be what was written.
    broken: AtomicBool,
    retired: AtomicBool,
}

impl Drop for Store {
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

impl Store {
    pub(super) fn open(file: &Arc<dyn DiskFile>) -> Result<Store, CatalogError> {
        let health = Arc::new(Health::default());
        let mut builder = Builder::new();
        builder.set_cache_size(CACHE_BYTES);
        let database = builder.create_with_backend(Backend {
            file: Arc::clone(file),
            health: Arc::clone(&health),
        })?;
        let store = Store {
            database: Some(database),
            health,
        };
        store.create_tables()?;
        Ok(store)
    }

    pub(super) fn database(&self) -> Result<&Database, CatalogError> {
        self.database.as_ref().ok_or_else(closed)
    }

    pub(super) fn database_mut(&mut self) -> Result<&mut Database, CatalogError> {
        self.database.as_mut().ok_or_else(closed)
    }

    /// A commit begins: redb does without some writes, and what they found before is of no account.
    pub(super) fn expect_space(&self) {
        self.health.full.store(false, Ordering::Release);
    }

    /// Whether space is missing for the present commit, and nothing else has ever failed.
    pub(super) fn is_out_of_space(&self) -> bool {
        self.health.full.load(Ordering::Acquire) && !self.health.broken.load(Ordering::Acquire)
    }

    pub(super) fn retire(&self) {
        self.health.retired.store(true, Ordering::Release);
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
    pub(super) fn begin_write(&self) -> Result<WriteTransaction, CatalogError> {
        let mut transaction = self.database()?.begin_write()?;
        transaction.set_quick_repair(true);
        Ok(transaction)
    }
}

fn closed() -> CatalogError {
    CatalogError::Io(io::Error::other("the catalog is closed"))
}

thread_local! {
    /// Whether this thread's panics become an error: the operator reads that, not a stack trace beside it.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}
static INSTALL_QUIET_HOOK: Once = Once::new();

/// The store checks pages when it repairs, not on every read; a damaged page can trip an assertion or an
/// index inside it. That is this file's damage and must stay one.
pub(super) fn contained<T>(
    work: impl FnOnce() -> Result<T, CatalogError>,
) -> Result<T, CatalogError> {
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
    // What the store says of it is about its own code.
    done.unwrap_or_else(|_| {
        let detail = format!("a page of {CATALOG_FILE} is not what was written");
        Err(CatalogError::Corrupt(detail))
    })
}

/// The store's file, through the disk door.
struct Backend {
    file: Arc<dyn DiskFile>,
    health: Arc<Health>,
}

impl Backend {
    fn call<T>(&self, work: impl FnOnce(&dyn DiskFile) -> io::Result<T>) -> io::Result<T> {
        if self.health.retired.load(Ordering::Acquire) {
            return Err(io::Error::other("the catalog was opened again"));
        }
        work(&*self.file)
    }

    fn note<T>(&self, result: io::Result<T>, writes: bool) -> io::Result<T> {
        if let Err(error) = &result {
            let full = matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            );
            // A sync that found no space may have dropped what it could not write.
            let what = if writes && full {
                &self.health.full
            } else {
                &self.health.broken
            };
            what.store(true, Ordering::Release);
        }
        result
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(CATALOG_FILE)
    }
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.note(self.call(|file| file.len()), false)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        // redb takes an error for a broken file. Those who must not wait do not come here.
        let read = || self.call(|file| read_exact_at(file, out, offset));
        self.note(wanted::waiting(read), false)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.note(self.call(|file| file.set_len(len)), true)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.note(self.call(|file| file.sync()), false)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.note(self.call(|file| write_all_at(file, data, offset)), true)
    }
}
