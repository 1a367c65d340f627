//! Verification: every checksum and relation of a data directory, stopped or running, and its repair.
//!
//! Above `shard`, beside `serve`. The walk goes over the log (`log_scan`, `judge`, `shadow`), the catalog (`census`),
//! the bytes of every stream (`extents`, and `adopted` before their first checkpoint) and the directory itself (`places`). A stopped directory is read through
//! an overlay, so nothing in it changes; a running one through the engine's own catalog.
//!
//! Invariants
//! - `I-VERIFY-1` Without repair no byte of the directory changes.
//! - `I-VERIFY-2` What is an error here is what a start refuses or what a reader would miss; leftovers are notes.
//! - `I-VERIFY-3` On a running server nothing is reported that a second look at the newest catalog explains.

mod adopted;
mod census;
mod judge;
mod log_scan;
mod meter;
mod overlay;
mod places;
mod repair;
mod report;
mod shadow;

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::error::EngineError;
use crate::io::{Clock, Disk, Doors};
use crate::log::audit::{Bad, Fault, Files, examine};
use crate::log::catalog::{CATALOG_FILE, Catalog, CatalogError};
use crate::log::checkpoint::META_CHECKPOINT;
use crate::log::lock::DirectoryLock;
use crate::log::pack::PACKS_DIRECTORY;
use crate::log::segment::SEGMENTS_DIRECTORY;
use crate::log::wal::WAL_DIR;
use crate::shard::engine::Engine;
use crate::verify::census::{Census, PAGE_ENTRIES, damaged_ranges, decode_entry, is_covered_by};
use crate::verify::judge::{Judgement, judge};
use crate::verify::log_scan::{ScannedFile, frames_of, list_log, scan_file};
use crate::verify::meter::Meter;
use crate::verify::shadow::Shadows;

pub use crate::verify::meter::Listener;
pub use crate::verify::repair::{GivenUp, Repaired};
pub use crate::verify::report::{Finding, Report, Severity};

/// On a running server files move under the walk: so often a look is repeated before it is believed.
const LIVE_ATTEMPTS: usize = 5;

/// Verifies the directory of a stopped server. It is locked meanwhile.
pub fn verify_directory(root: &Path, listener: Listener<'_>) -> Result<Report, EngineError> {
    let _lock = lock(root)?;
    let doors = Doors::real(root).map_err(|error| EngineError::io("data directory", error))?;
    verify_stopped(&doors.disk, &doors.clock, listener)
}

/// What a repair found, did, and left.
pub struct Outcome {
    pub before: Report,
    /// `None`: there was nothing to repair, or nothing that could be.
    pub repaired: Option<Repaired>,
    /// The second look, after a repair.
    pub after: Option<Report>,
}

/// Repairs the directory of a stopped server, and verifies it again.
pub fn repair_directory(root: &Path, listener: Listener<'_>) -> Result<Outcome, EngineError> {
    let _lock = lock(root)?;
    let doors = Doors::real(root).map_err(|error| EngineError::io("data directory", error))?;
    repair_stopped(&doors, listener)
}

/// Repairs a directory that nobody else uses.
pub fn repair_stopped(doors: &Doors, listener: Listener<'_>) -> Result<Outcome, EngineError> {
    let before = verify_stopped(&doors.disk, &doors.clock, &mut *listener)?;
    if before.is_clean() || before.beyond_repair {
        return Ok(Outcome {
            before,
            repaired: None,
            after: None,
        });
    }
    let mut meter = Meter::new(Arc::clone(&doors.clock), &mut *listener);
    meter
        .begin(before.stream_bytes)
        .map_err(|error| failed(CatalogError::Io(error)))?;
    let repaired = repair::repair(doors, &mut meter)?;
    let after = verify_stopped(&doors.disk, &doors.clock, listener)?;
    Ok(Outcome {
        before,
        repaired: Some(repaired),
        after: Some(after),
    })
}

/// Takes the lock of a directory that must exist already.
fn lock(root: &Path) -> Result<DirectoryLock, EngineError> {
    let name = root.display().to_string();
    if !root.is_dir() {
        let missing = io::Error::new(io::ErrorKind::NotFound, "there is no such directory");
        return Err(EngineError::io(&name, missing));
    }
    DirectoryLock::acquire(root)
}

/// Verifies a directory that nobody else uses.
pub fn verify_stopped(
    disk: &Arc<dyn Disk>,
    clock: &Arc<dyn Clock>,
    listener: Listener<'_>,
) -> Result<Report, EngineError> {
    let mut report = Report::default();
    let overlay = overlay::OverlayDisk::over(Arc::clone(disk));
    let meter = Meter::new(Arc::clone(clock), listener);
    if let Some(catalog) = open_stopped(&overlay, &mut report).map_err(failed)? {
        let walk = Walk {
            disk: &*overlay,
            catalog: &catalog,
            live: None,
            meter,
            report: &mut report,
        };
        walk.run().map_err(failed)?;
    }
    Ok(report)
}

/// Verifies the directory of a running server, up to what was written when it began.
pub fn verify_running(engine: &Engine, listener: Listener<'_>) -> Result<Report, EngineError> {
    let mut report = Report::default();
    let meter = Meter::new(Arc::clone(&engine.doors.clock), listener);
    let walk = Walk {
        disk: &*engine.doors.disk,
        catalog: engine.directory.catalog(),
        live: Some(engine),
        meter,
        report: &mut report,
    };
    walk.run().map_err(failed)?;
    Ok(report)
}

/// A walk that could not go on: the disk failed in the middle, or its listener had enough.
fn failed(error: CatalogError) -> EngineError {
    match error {
        CatalogError::Io(error) => EngineError::io("verification", error),
        full @ CatalogError::Full => EngineError::from(full),
        CatalogError::Corrupt(what) => EngineError::new("catalog_damaged", what),
    }
}

/// Looks at format and presence, then opens the catalog. `None`: there is nothing to walk, and it is reported.
fn open_stopped(
    overlay: &Arc<dyn Disk>,
    report: &mut Report,
) -> Result<Option<Catalog>, CatalogError> {
    if !places::check_format(&**overlay, report).map_err(CatalogError::Io)? {
        report.beyond_repair = true;
        return Ok(None);
    }
    let present = overlay.list("").map_err(CatalogError::Io)?;
    if !present.iter().any(|entry| entry.name == CATALOG_FILE) {
        report.error(
            CATALOG_FILE,
            None,
            "the catalog is missing; restore a backup of the whole directory",
        );
        report.beyond_repair = true;
        return Ok(None);
    }
    let checked = Catalog::open(Arc::clone(overlay)).and_then(|mut catalog| catalog.check_pages());
    match checked {
        Ok(true) => {}
        Ok(false) => report.error(
            CATALOG_FILE,
            None,
            "its newest state fails the checksums of its pages",
        ),
        Err(error @ (CatalogError::Io(_) | CatalogError::Full)) => return Err(error),
        Err(CatalogError::Corrupt(what)) => {
            report.error(CATALOG_FILE, None, format!("its pages are damaged: {what}"));
        }
    }
    // The check may have changed its copy; the walk begins with the file as it is.
    match Catalog::open(Arc::clone(overlay)) {
        Ok(catalog) => Ok(Some(catalog)),
        Err(error @ (CatalogError::Io(_) | CatalogError::Full)) => Err(error),
        Err(CatalogError::Corrupt(what)) => {
            let advice = "restore a backup of the whole directory";
            report.error(
                CATALOG_FILE,
                None,
                format!("it cannot be opened: {what}; {advice}"),
            );
            report.beyond_repair = true;
            Ok(None)
        }
    }
}

struct Walk<'a, 'p> {
    disk: &'a dyn Disk,
    catalog: &'a Catalog,
    live: Option<&'a Engine>,
    meter: Meter<'p>,
    report: &'a mut Report,
}

impl Walk<'_, '_> {
    fn run(mut self) -> Result<(), CatalogError> {
        let mut total = 0;
        for directory in [WAL_DIR, SEGMENTS_DIRECTORY, PACKS_DIRECTORY] {
            total += places::bytes_in(self.disk, directory).map_err(CatalogError::Io)?;
        }
        self.meter.begin(total).map_err(CatalogError::Io)?;
        match self.walk() {
            // Pages of the catalog that cannot be read are a finding like others, only a large one.
            Err(CatalogError::Corrupt(what)) => {
                let advice = "restore a backup of the whole directory";
                self.report.error(
                    CATALOG_FILE,
                    None,
                    format!("it cannot be read: {what}; {advice}"),
                );
                self.report.beyond_repair = true;
            }
            Err(error) => return Err(error),
            Ok(()) => {}
        }
        self.meter.finish().map_err(CatalogError::Io)
    }

    fn walk(&mut self) -> Result<(), CatalogError> {
        let attempts = if self.live.is_some() {
            LIVE_ATTEMPTS
        } else {
            1
        };
        for attempt in 1..=attempts {
            let mut found = Report::default();
            self.log_and_catalog(&mut found)?;
            if found.is_clean() || attempt == attempts {
                self.report.take(found);
                break;
            }
        }
        self.streams()
    }

    /// The log, the catalog, and what they say about each other.
    fn log_and_catalog(&mut self, report: &mut Report) -> Result<(), CatalogError> {
        // Taken first: what was written by now must be found, what comes later may be half there.
        let written = self.live.map(|engine| engine.shard.written());
        let view = self.catalog.view()?;
        let checkpoint = view.meta_number(META_CHECKPOINT)?;
        let files = self.scan_log(report)?;
        if files.is_empty() {
            let what = "the log is missing; is a device not mounted?";
            report.error(WAL_DIR, None, what);
            report.beyond_repair = true;
            return Ok(());
        }
        let mut judged = judge(&files, checkpoint);
        if let Some(written) = written {
            forget_unwritten(&mut judged, written);
            if judged.next <= written {
                let what = format!(
                    "frame {} was written and is not there: the log ends before {written}",
                    judged.next
                );
                report.error(WAL_DIR, None, what);
            }
        }
        let mut shadows = Shadows::new(&view);
        report_log(&files, &judged, self.live.is_some(), report);
        apply(&files, &judged, &mut shadows, checkpoint, report)?;
        report_damage(&files, &judged, &mut shadows, report)?;
        Census::new(&view, &shadows, report).run(&mut self.meter)?;
        let adopted = adopted::check(self.disk, &shadows, &mut self.meter, report)?;
        places::check_strangers(self.disk, &view, &adopted, self.live.is_some(), report)
    }

    fn scan_log(&mut self, report: &mut Report) -> Result<Vec<ScannedFile>, CatalogError> {
        let (listed, foreign) = list_log(self.disk).map_err(CatalogError::Io)?;
        for name in foreign {
            report.note(&name, None, "this is not a log file and is ignored");
        }
        let mut files = Vec::with_capacity(listed.len());
        for generation in listed {
            match scan_file(self.disk, generation, &mut self.meter) {
                Ok(file) => files.push(file),
                Err(error) if meter::is_stop(&error) => return Err(CatalogError::Io(error)),
                // Freed since it was listed: what it had is in a checkpoint, which the next look sees.
                Err(error) if self.live.is_some() && error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let name = crate::log::wal::file_name(generation);
                    report.error(&name, None, format!("it cannot be read: {error}"));
                }
            }
        }
        report.log_files = files.len() as u64;
        Ok(files)
    }

    /// The bytes of every stream.
    fn streams(&mut self) -> Result<(), CatalogError> {
        let disk = self.disk;
        let mut files = Files::new(disk);
        let mut after: Option<Vec<u8>> = None;
        loop {
            // A view per page: a walk over all bytes may take hours, and a view keeps old pages alive.
            let page = self
                .catalog
                .view()?
                .streams(after.as_deref(), PAGE_ENTRIES)?;
            let Some((last, _)) = page.last() else {
                return Ok(());
            };
            after = Some(last.clone());
            for (path, value) in page {
                self.stream(&mut files, &path, value)?;
            }
        }
    }

    fn stream(
        &mut self,
        files: &mut Files<'_>,
        path: &[u8],
        mut value: Vec<u8>,
    ) -> Result<(), CatalogError> {
        for _ in 0..LIVE_ATTEMPTS {
            // An entry that does not decode has been reported with the catalog.
            let Ok(stream) = decode_entry(path, &value) else {
                return Ok(());
            };
            let state = stream.lock();
            let (bad, examined) = examine(
                files,
                stream.id,
                &state.extents,
                state.records,
                &mut |bytes| self.meter.add(bytes),
            )
            .map_err(CatalogError::Io)?;
            if !bad.is_empty() && self.live.is_some() {
                // A checkpoint may have moved the bytes since: only what the newest entry names counts.
                files.forget();
                match self.catalog.get(path)? {
                    None => return Ok(()),
                    Some(newest) if newest != value => {
                        value = newest;
                        continue;
                    }
                    Some(_) => {}
                }
            }
            self.report.stream_bytes += examined.bytes;
            self.report.appends += examined.appends;
            report_bad(&stream.path, &bad, damaged_ranges(&state), self.report);
            return Ok(());
        }
        Ok(())
    }
}

fn report_bad(path: &str, bad: &[Bad], damaged: &[(u64, u64)], report: &mut Report) {
    for bad in bad {
        let known = bad.fault == Fault::Bytes && is_covered_by(damaged, bad.start, bad.end);
        if !known {
            report.stream_error(&bad.file, Some(bad.byte), path, bad.what.clone());
        }
    }
}

/// What lies behind `written` was under way while it was read.
fn forget_unwritten(judged: &mut Judgement, written: u64) {
    let first = judged
        .damage
        .iter()
        .map(|damage| damage.from)
        .find(|from| *from > written);
    if let Some(first) = first {
        judged.damage.retain(|damage| damage.from < first);
        judged.pieces.retain(|piece| piece.from < first);
        judged.next = first;
    }
}

fn report_log(files: &[ScannedFile], judged: &Judgement, live: bool, report: &mut Report) {
    for file in files {
        if !file.header_whole && !file.runs.is_empty() {
            report.error(&file.name, Some(0), "the file header is damaged");
        }
        if file.hopeless {
            report.error(&file.name, None, "it has more holes than can be counted");
        }
    }
    if judged.discarded > 0 && !live {
        let what = format!(
            "{} frames behind a torn tail were never acknowledged and are ignored",
            judged.discarded
        );
        report.note(WAL_DIR, None, what);
    }
}

/// Damage of the log, with the stream that a bad frame seems to be of.
fn report_damage(
    files: &[ScannedFile],
    judged: &Judgement,
    shadows: &mut Shadows<'_>,
    report: &mut Report,
) -> Result<(), CatalogError> {
    for damage in &judged.damage {
        let mut stream = None;
        for id in damage.suspects(files) {
            stream = shadows.path_of(id)?.map(String::from);
            if stream.is_some() {
                break;
            }
        }
        report.add(Finding {
            severity: Severity::Error,
            file: files
                .get(damage.file)
                .map_or_else(|| WAL_DIR.to_owned(), |file| file.name.clone()),
            byte: Some(damage.byte),
            stream,
            what: damage.what.clone(),
        });
    }
    Ok(())
}

/// Lets the frames that count pass over the shadows.
fn apply(
    files: &[ScannedFile],
    judged: &Judgement,
    shadows: &mut Shadows<'_>,
    checkpoint: u64,
    report: &mut Report,
) -> Result<(), CatalogError> {
    for piece in &judged.pieces {
        let file = &files[piece.file];
        let run = &file.runs[piece.run];
        frames_of(file, run, piece.from, piece.to, &mut |frame, byte| {
            report.frames += 1;
            if frame.sequence <= checkpoint {
                return Ok::<(), CatalogError>(());
            }
            if let Some(misfit) = shadows.apply(frame)? {
                match misfit.stream {
                    Some(path) => report.stream_error(&file.name, Some(byte), &path, misfit.what),
                    None => report.error(&file.name, Some(byte), misfit.what),
                }
            }
            Ok(())
        })?;
    }
    for id in shadows.unknown() {
        let what = format!(
            "the log has frames of stream {} which the catalog does not know",
            id.0
        );
        report.error(WAL_DIR, None, what);
    }
    Ok(())
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
