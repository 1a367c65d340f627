//! The mark of a data directory: which format it has, and whether its first start is through.
//!
//! Asked first by `recover`; a directory of another format is left alone.

use crate::error::EngineError;
use crate::io::{Disk, OpenMode, read_up_to_at, write_all_at};
use crate::log::catalog::CATALOG_FILE;
use crate::log::wal::WAL_DIR;

pub(crate) const FORMAT_FILE: &str = "format";
/// Where a restore collects its files before they get their places.
pub(crate) const RESTORE_DIRECTORY: &str = "restore.partial";
pub(crate) const FORMAT_FILE_NEW: &str = "format.new";
pub(crate) const FORMAT: &[u8] = b"millstream 1\n";

/// Refuses directories of another format; begins a new one. Returns whether it is new.
///
/// A new directory has its mark under another name until its first start is through: as long as only that one is
/// there nothing was ever promised, and whatever a first start that died has left is swept away.
pub(super) fn check_format(disk: &dyn Disk) -> Result<bool, EngineError> {
    let io_error = |error| EngineError::io("format file", error);
    let present = disk.list("").map_err(io_error)?;
    let has = |name: &str| present.iter().find(|entry| entry.name == name);
    if let Some(entry) = has(FORMAT_FILE) {
        let file = disk.open(FORMAT_FILE, OpenMode::Read).map_err(io_error)?;
        let mut bytes = vec![0; entry.len.min(64) as usize];
        let count = read_up_to_at(&*file, &mut bytes, 0).map_err(io_error)?;
        if &bytes[..count] == FORMAT {
            return Ok(false);
        }
        let found = String::from_utf8_lossy(&bytes[..count]).trim().to_owned();
        return Err(EngineError::new(
            "format_unknown",
            format!("the data directory has format {found:?}; this version reads \"millstream 1\""),
        ));
    }
    let foreign = [WAL_DIR, CATALOG_FILE, RESTORE_DIRECTORY]
        .into_iter()
        .find_map(has);
    if let (Some(foreign), None) = (foreign, has(FORMAT_FILE_NEW)) {
        return Err(EngineError::new(
            "format_missing",
            format!(
                "the data directory has {:?} but no format file",
                foreign.name
            ),
        ));
    }
    begin_directory(disk, has(CATALOG_FILE).is_some()).map_err(io_error)?;
    Ok(true)
}

/// Writes the mark of a directory that is being made, then removes what an earlier attempt may have left.
fn begin_directory(disk: &dyn Disk, has_catalog: bool) -> std::io::Result<()> {
    let file = disk.open(FORMAT_FILE_NEW, OpenMode::CreateOrOpen)?;
    file.set_len(0)?;
    write_all_at(&*file, FORMAT, 0)?;
    file.sync_all()?;
    // Before anything else has a name: what follows is recognised by this one.
    disk.sync_dir("")?;
    disk.create_dir_all(WAL_DIR)?;
    for entry in disk.list(WAL_DIR)? {
        disk.remove(&format!("{WAL_DIR}/{}", entry.name))?;
    }
    if has_catalog {
        disk.remove(CATALOG_FILE)?;
    }
    disk.sync_dir(WAL_DIR)?;
    disk.sync_dir("")
}

/// The first start is through: from here on log and catalog must both be there.
pub(super) fn finish_directory(disk: &dyn Disk) -> Result<(), EngineError> {
    disk.rename(FORMAT_FILE_NEW, FORMAT_FILE)
        .and_then(|()| disk.sync_dir(""))
        .map_err(|error| EngineError::io("format file", error))
}

/// A directory that was in use has both a log and a catalog; one without the other lost a part.
pub(super) fn check_presence(
    disk: &dyn Disk,
    fresh: bool,
    no_log: bool,
) -> Result<(), EngineError> {
    let entries = disk
        .list("")
        .map_err(|error| EngineError::io("data directory", error))?;
    let catalog = entries.iter().any(|entry| entry.name == CATALOG_FILE);
    if !fresh && catalog && no_log {
        return Err(EngineError::new(
            "log_missing",
            "the catalog is there but the log directory is empty or missing; is a device not mounted?",
        ));
    }
    if !catalog && !no_log {
        return Err(EngineError::new(
            "catalog_missing",
            "the log is there but the catalog is missing; restore catalog.redb or move the directory aside",
        ));
    }
    Ok(())
}
