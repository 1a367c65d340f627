//! What frames of the log have taken over from staged packs: no catalog names it yet, and a start needs it.
//!
//! Invariant: a pack is an error here exactly if a start would refuse it, or a reader would miss bytes of it.

use std::collections::BTreeSet;
use std::io;

use crate::io::{Disk, OpenMode};
use crate::log::catalog::CatalogError;
use crate::log::pack;
use crate::log::stage;
use crate::model::Adopted;
use crate::stream::state::Life;
use crate::verify::meter::{self, Meter};
use crate::verify::report::Report;
use crate::verify::shadow::{Shadow, Shadows};

/// Checks every section; returns the packs that the log needs.
pub fn check(
    disk: &dyn Disk,
    shadows: &Shadows<'_>,
    meter: &mut Meter<'_>,
    report: &mut Report,
) -> Result<BTreeSet<u32>, CatalogError> {
    let mut packs = BTreeSet::new();
    for (shadow, start, section) in shadows.adopted() {
        packs.insert(section.pack);
        if shadow.life == Life::Gone {
            continue;
        }
        check_section(disk, &shadow, start, &section, report).map_err(CatalogError::Io)?;
        meter.add(section.len).map_err(CatalogError::Io)?;
    }
    Ok(packs)
}

fn check_section(
    disk: &dyn Disk,
    shadow: &Shadow,
    start: u64,
    section: &Adopted,
    report: &mut Report,
) -> io::Result<()> {
    let path = pack::path(section.pack);
    let examined = disk
        .open(&path, OpenMode::Read)
        .and_then(|file| stage::examine(&*file, section));
    let bad = match examined {
        Ok(bad) => bad,
        Err(error) if meter::is_stop(&error) => return Err(error),
        Err(error) => {
            let end = start.saturating_add(section.len);
            let what = format!("bytes {start}..{end}, which a commit took over: {error}");
            report.stream_error(&path, Some(section.index_at), &shadow.path, what);
            return Ok(());
        }
    };
    for (from, to) in bad {
        let what = format!(
            "bytes {}..{}, which a commit took over, fail their checksum",
            start.saturating_add(from),
            start.saturating_add(to)
        );
        let byte = Some(section.file_position.saturating_add(from));
        report.stream_error(&path, byte, &shadow.path, what);
    }
    Ok(())
}

#[cfg(test)]
#[path = "adopted_tests.rs"]
mod tests;
