//! Files: the log of what was promised, the cold bytes for reading, the catalog of what exists.

pub mod audit;
pub mod catalog;
pub mod checkpoint;
pub mod cold;
pub mod damaged;
pub mod directory;
mod dirty;
pub mod endings;
pub mod format;
pub mod index;
mod interned;
pub mod lock;
pub mod pack;
pub mod pins;
pub mod recover;
pub mod replay;
pub mod scan;
pub mod segment;
pub mod stage;
mod start;
pub mod wal;
