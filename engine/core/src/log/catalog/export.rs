//! A copy of the catalog as it is at one moment, for a backup.
//!
//! One read transaction sees one state, whatever is committed meanwhile; the copy is a fresh store without the
//! holes of the old one. While it runs, the old store cannot use freed pages again and grows by what is
//! committed, so this does nothing but copy.

use std::io;

use redb::{Key, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, Value};

use super::{Catalog, CatalogError, ENDINGS, IDS, META, PACKS, STREAMS, contained};

/// Rows written in one transaction of the copy.
const COPY_ROWS: usize = 20_000;

/// Is shown every stream's path and value as it is copied; an error ends the copy.
pub type Seen<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> io::Result<()>;

impl Catalog {
    /// Copies all tables, as they are now, into an empty catalog. `now` is asked while nothing can be committed: what it
    /// says is of the moment that the copy shows.
    pub fn copy_into<T>(
        &self,
        target: &Catalog,
        now: impl FnOnce() -> T,
        seen: Seen<'_>,
    ) -> Result<T, CatalogError> {
        let mut asked = None;
        contained(|| {
            let from = {
                let _writing = self.writing.lock();
                let from = self.store().database()?.begin_read()?;
                asked = Some(now());
                from
            };
            copy_table(&from, target, STREAMS, |path, value| seen(path, value))?;
            copy_table(&from, target, IDS, |_, _| Ok(()))?;
            copy_table(&from, target, PACKS, |_, _| Ok(()))?;
            copy_table(&from, target, ENDINGS, |_, _| Ok(()))?;
            copy_table(&from, target, META, |_, _| Ok(()))
        })?;
        asked.ok_or_else(|| CatalogError::Io(io::Error::other("nothing was copied")))
    }
}

fn copy_table<K: Key + 'static, V: Value + 'static>(
    from: &ReadTransaction,
    target: &Catalog,
    definition: TableDefinition<'_, K, V>,
    mut seen: impl FnMut(K::SelfType<'_>, V::SelfType<'_>) -> io::Result<()>,
) -> Result<(), CatalogError> {
    let source = from.open_table(definition)?;
    let mut rows = source.iter()?;
    let mut more = true;
    while more {
        let transaction = target.store().begin_write()?;
        let mut table = transaction.open_table(definition)?;
        for _ in 0..COPY_ROWS {
            let Some(row) = rows.next() else {
                more = false;
                break;
            };
            let (key, value) = row?;
            seen(key.value(), value.value()).map_err(CatalogError::Io)?;
            table.insert(key.value(), value.value())?;
        }
        drop(table);
        transaction.commit()?;
    }
    Ok(())
}
