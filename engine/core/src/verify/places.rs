//! The directory itself: the mark of its format, files that do not belong, files that nobody names any more.
//!
//! Leftovers are notes: a start or a checkpoint removes its own, and what is foreign is left alone.

use std::collections::BTreeSet;
use std::io;

use crate::io::{Disk, OpenMode, read_up_to_at};
use crate::log::catalog::{CATALOG_FILE, CatalogError, CatalogView};
use crate::log::format::{FORMAT, FORMAT_FILE, FORMAT_FILE_NEW, RESTORE_DIRECTORY};
use crate::log::pack::{self, PACKS_DIRECTORY};
use crate::log::segment::{self, SEGMENTS_DIRECTORY};
use crate::log::stage;
use crate::log::wal::{FAILED_MARK, WAL_DIR};
use crate::model::{FileRef, StreamId};
use crate::verify::report::Report;
use crate::verify::shadow::decode_value;

/// Where a repair keeps what it replaces.
pub const REPAIR_PREFIX: &str = "repair-";
/// Everything the server makes at the top, beside the directories of repairs.
const OWN_NAMES: [&str; 10] = [
    FORMAT_FILE,
    FORMAT_FILE_NEW,
    CATALOG_FILE,
    "catalog.redb.new",
    "lock",
    FAILED_MARK,
    WAL_DIR,
    SEGMENTS_DIRECTORY,
    PACKS_DIRECTORY,
    RESTORE_DIRECTORY,
];
const SPILL_DIRECTORY: &str = "spill";

/// Whether a directory holds Millstream's data; what is wrong with its mark is reported.
pub fn check_format(disk: &dyn Disk, report: &mut Report) -> io::Result<bool> {
    let file = match disk.open(FORMAT_FILE, OpenMode::Read) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            report.error(FORMAT_FILE, None, "the mark of the format is missing");
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    let mut bytes = [0u8; 64];
    let count = read_up_to_at(&*file, &mut bytes, 0)?;
    if &bytes[..count] == FORMAT {
        return Ok(true);
    }
    let found = String::from_utf8_lossy(&bytes[..count]).trim().to_owned();
    let what = format!("the directory has format {found:?}; this version reads \"millstream 1\"");
    report.error(FORMAT_FILE, Some(0), what);
    Ok(false)
}

/// Bytes below a directory, for the progress.
pub fn bytes_in(disk: &dyn Disk, directory: &str) -> io::Result<u64> {
    let entries = match disk.list(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut total = 0;
    for entry in entries {
        total += match entry.is_dir {
            true => bytes_in(disk, &format!("{directory}/{}", entry.name))?,
            false => entry.len,
        };
    }
    Ok(total)
}

/// Notes what does not belong. `adopted`: packs that the log needs. `live`: a checkpoint may be writing files that
/// nothing names yet.
pub fn check_strangers(
    disk: &dyn Disk,
    view: &CatalogView,
    adopted: &BTreeSet<u32>,
    live: bool,
    report: &mut Report,
) -> Result<(), CatalogError> {
    for entry in disk.list("").map_err(CatalogError::Io)? {
        let own = OWN_NAMES.contains(&entry.name.as_str())
            || entry.name == SPILL_DIRECTORY
            || (entry.is_dir && entry.name.starts_with(REPAIR_PREFIX));
        if !own {
            report.note(&entry.name, None, "this is not one of the server's files");
        }
    }
    check_packs(disk, view, adopted, live, report)?;
    check_segments(disk, view, live, report)
}

fn check_packs(
    disk: &dyn Disk,
    view: &CatalogView,
    adopted: &BTreeSet<u32>,
    live: bool,
    report: &mut Report,
) -> Result<(), CatalogError> {
    let named: BTreeSet<u32> = view
        .packs()?
        .into_iter()
        .map(|(number, _)| number)
        .collect();
    for entry in list(disk, PACKS_DIRECTORY)? {
        let path = format!("{PACKS_DIRECTORY}/{}", entry.name);
        match pack::parse_name(&entry.name) {
            None => report.note(&path, None, "this is not one of the server's files"),
            Some(number) if live || named.contains(&number) || adopted.contains(&number) => {}
            Some(number) => {
                // A stage that waits for its commit belongs here.
                let staged = stage::read(disk, number).map_err(CatalogError::Io)?;
                if staged.is_none() {
                    let what = "no stream has bytes in it; the server removes it";
                    report.note(&path, None, what);
                }
            }
        }
    }
    Ok(())
}

fn check_segments(
    disk: &dyn Disk,
    view: &CatalogView,
    live: bool,
    report: &mut Report,
) -> Result<(), CatalogError> {
    for bucket in list(disk, SEGMENTS_DIRECTORY)? {
        let directory = format!("{SEGMENTS_DIRECTORY}/{}", bucket.name);
        if !bucket.is_dir {
            report.note(&directory, None, "this is not one of the server's files");
            continue;
        }
        for entry in list(disk, &directory)? {
            let path = format!("{directory}/{}", entry.name);
            match segment::parse_name(&entry.name) {
                None => report.note(&path, None, "this is not one of the server's files"),
                Some((owner, number, _)) => {
                    if !live && !is_named(view, owner, number)? {
                        report.note(
                            &path,
                            None,
                            "no stream has bytes in it; the next start removes it",
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

fn is_named(view: &CatalogView, owner: StreamId, number: u32) -> Result<bool, CatalogError> {
    let Some(path) = view.path_of(owner)? else {
        return Ok(false);
    };
    let Some(stream) = view.get(&path)?.and_then(|value| decode_value(&value)) else {
        return Ok(false);
    };
    let wanted = FileRef::Segment { owner, number };
    let state = stream.lock();
    Ok(state.extents.iter().any(|extent| extent.file == wanted))
}

fn list(disk: &dyn Disk, directory: &str) -> Result<Vec<crate::io::DirEntry>, CatalogError> {
    match disk.list(directory) {
        Ok(entries) => Ok(entries),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(CatalogError::Io(error)),
    }
}
