//! What can be made to go wrong with a disk: which call fails and how, and which lies it tells.

use std::io;

const EIO: i32 = 5;
pub(super) const ENOSPC: i32 = 28;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Call {
    Open,
    MakeDirectory,
    Rename,
    Remove,
    List,
    SyncDirectory,
    FreeBytes,
    Read,
    Write,
    Sync,
    Len,
    SetLen,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    Eio,
    Enospc,
    /// A write or read does less than asked, without an error.
    Short,
    /// The machine goes off inside the call.
    Off,
}

/// The `after`-th call from now on (0 = the next one) of this kind, or of any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    pub after: u64,
    pub call: Option<Call>,
    pub failure: Failure,
}

/// Deliberate bugs: what a careless engine would amount to, seen from the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lies {
    /// Syncs of log files do nothing and succeed.
    pub skip_log_sync: bool,
    /// Syncs of packs and segments do nothing and succeed.
    pub skip_cold_sync: bool,
    /// Syncs of the catalog do nothing and succeed.
    pub skip_catalog_sync: bool,
    /// Syncs of directories do nothing and succeed.
    pub skip_directory_sync: bool,
    /// A write that fails is reported as done.
    pub ignore_write_errors: bool,
    /// A sync that fails is reported as done.
    pub ignore_sync_errors: bool,
    /// The machine has the same boot id after a power cut.
    pub reuse_boot_id: bool,
}

pub(super) fn off() -> io::Error {
    io::Error::other("the machine is off")
}

pub(super) fn error_of(failure: Failure) -> io::Error {
    match failure {
        Failure::Eio => io::Error::from_raw_os_error(EIO),
        Failure::Enospc => io::Error::from_raw_os_error(ENOSPC),
        Failure::Short | Failure::Off => off(),
    }
}
