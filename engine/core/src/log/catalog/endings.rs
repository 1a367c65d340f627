//! The table of endings: where removed streams ended, by the sequence of their removal.
//!
//! Sits beside `catalog`; `log::endings` says what the values mean. New rows go to the end of the table and forgotten
//! ones leave at its front, so that a checkpoint touches few pages whatever the number of rows.

use redb::{ReadTransaction, ReadableDatabase, ReadableTable, WriteTransaction};

use super::{Catalog, CatalogError, ENDINGS};
use crate::log::endings::Unwritten;

/// A removal's sequence and its ending as it is stored.
pub type EndingRow = (u64, Vec<u8>);

impl Catalog {
    pub fn endings(&self) -> Result<Vec<EndingRow>, CatalogError> {
        self.read(|database| read_all(&database.begin_read()?))
    }
}

pub(super) fn read_all(transaction: &ReadTransaction) -> Result<Vec<EndingRow>, CatalogError> {
    let table = transaction.open_table(ENDINGS)?;
    let mut rows = Vec::new();
    for row in table.iter()? {
        let (sequence, value) = row?;
        rows.push((sequence.value(), value.value().to_vec()));
    }
    Ok(rows)
}

pub(super) fn put_endings(
    transaction: &WriteTransaction,
    changes: &Unwritten,
) -> Result<(), CatalogError> {
    let mut table = transaction.open_table(ENDINGS)?;
    while table
        .first()?
        .is_some_and(|(sequence, _)| sequence.value() < changes.forget_below)
    {
        table.pop_first()?;
    }
    for (sequence, value) in &changes.put {
        table.insert(sequence, value.as_slice())?;
    }
    Ok(())
}
