//! What can go wrong with the catalog, and what the store's errors are of that.

use std::fmt;
use std::io;

use redb::{DatabaseError, StorageError};

use super::CATALOG_FILE;
use crate::error::EngineError;

#[derive(Debug)]
pub enum CatalogError {
    /// The disk failed. After a failed write the catalog must be opened again.
    Io(io::Error),
    /// There is no space for a commit: nothing of it has happened, and it may be tried again.
    Full,
    /// The file is not what was written; the text says where that showed.
    Corrupt(String),
}

impl CatalogError {
    /// Whether only a thread that must not wait was refused (`io/wanted`).
    pub fn would_block(&self) -> bool {
        matches!(self, CatalogError::Io(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl fmt::Display for CatalogError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CatalogError::Io(error) => write!(out, "{CATALOG_FILE}: {error}"),
            CatalogError::Full => write!(out, "{CATALOG_FILE}: no space left for a commit"),
            CatalogError::Corrupt(detail) => write!(out, "catalog is damaged: {detail}"),
        }
    }
}

impl std::error::Error for CatalogError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CatalogError::Io(error) => Some(error),
            CatalogError::Full | CatalogError::Corrupt(_) => None,
        }
    }
}

/// Why a start was refused: what the disk did is not the same as what the file is.
impl From<CatalogError> for EngineError {
    fn from(error: CatalogError) -> EngineError {
        match error {
            CatalogError::Io(error) => EngineError::io(CATALOG_FILE, error),
            CatalogError::Full => EngineError::new("io_error", error.to_string()),
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

impl From<std::io::Error> for CatalogError {
    fn from(error: std::io::Error) -> CatalogError {
        CatalogError::Io(error)
    }
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
