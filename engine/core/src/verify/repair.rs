//! Repair of a stopped directory: keeps everything that checks, says what is given up, and keeps the originals.
//!
//! A new catalog is built beside the old one from every entry that decodes (`rebuild`), the log's whole frames are
//! applied to it, those behind a hole too (`salvage`), a checkpoint makes that lasting, and only then the new
//! catalog takes the old one's name and a new, empty log the place of the old.
//!
//! Invariants
//! - `I-REPAIR-1` Until the new catalog has its name nothing that the old one names has changed, but for files of
//!   streams that the log had deleted: a repair that dies can be run again.
//! - `I-REPAIR-2` Everything that is replaced or forgotten is first copied aside and synced.
//! - `I-REPAIR-3` Where acknowledged frames are lost every stream begins a new epoch, so that no offset ever
//!   names two different byte strings.
//! - `I-REPAIR-4` A range that cannot be read back is marked in its stream: readers get a gap, not wrong bytes.

mod aside;
mod filler;
mod rebuild;
mod relations;
mod salvage;

use std::sync::Arc;

use crate::codec::adopt::{UsedUp, decode_used_up};
use crate::error::EngineError;
use crate::io::{BootId, Disk, Doors};
use crate::limits::WAL_FIRST_FILE_BYTES;
use crate::log::catalog::{CATALOG_FILE, Catalog, CatalogError, CatalogView};
use crate::log::checkpoint::{
    Checkpoint, META_BOOT, META_CHECKPOINT, META_HIGHEST_EPOCH, META_LOSSES, META_USED_UP,
};
use crate::log::cold::ColdStore;
use crate::log::directory::Directory;
use crate::log::wal::{WAL_DIR, file_name, prepare_new};
use crate::metrics::Metrics;
use crate::model::{Class, EPOCHS_USED_UP, next_epoch};
use crate::stream::offsets::{GapReason, Loss, Losses};
use crate::verify::judge::{Judgement, judge};
use crate::verify::log_scan::{ScannedFile, list_log, scan_file};
use crate::verify::meter::Meter;
use crate::verify::overlay::OverlayDisk;
use crate::verify::repair::aside::Aside;
use crate::verify::repair::rebuild::{Rebuild, Rebuilt};
use crate::verify::repair::salvage::Salvage;

/// Files that a repair has open for reading and writing bytes.
const OPEN_FILES: usize = 64;
/// Sentences of each kind that are kept; the rest is only counted.
const TOLD_MAX: usize = 1000;

/// Something that could not be kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GivenUp {
    pub stream: Option<String>,
    pub what: String,
}

/// What a repair did.
#[derive(Clone, Default, Debug)]
pub struct Repaired {
    /// Directory, below the data directory, with the originals.
    pub kept_in: String,
    pub done: Vec<String>,
    pub given_up: Vec<GivenUp>,
    /// How many things were given up, those not listed included.
    pub given_up_count: u64,
}

impl Repaired {
    fn did(&mut self, what: impl Into<String>) {
        if self.done.len() < TOLD_MAX {
            self.done.push(what.into());
        }
    }

    fn gave_up(&mut self, stream: Option<&str>, what: impl Into<String>) {
        self.given_up_count += 1;
        if self.given_up.len() < TOLD_MAX {
            self.given_up.push(GivenUp {
                stream: stream.map(str::to_owned),
                what: what.into(),
            });
        }
    }
}

/// Repairs a directory whose lock the caller holds.
pub fn repair(doors: &Doors, meter: &mut Meter<'_>) -> Result<Repaired, EngineError> {
    let disk = &doors.disk;
    let old = Catalog::open(OverlayDisk::over(Arc::clone(disk))).map_err(catalog_failed)?;
    let view = old.view().map_err(catalog_failed)?;
    let meta = Meta::read(&view)?;
    let log = OldLog::read(&**disk, meta.checkpoint, meter)?;

    let mut repaired = Repaired::default();
    let mut aside = Aside::begin(disk, doors.clock.wall_ms()).map_err(io_failed)?;
    repaired.kept_in = aside.directory().to_owned();
    aside.copy(CATALOG_FILE).map_err(io_failed)?;
    for file in log.files.iter().filter(|file| !file.runs.is_empty()) {
        aside.copy(&file.name).map_err(io_failed)?;
    }
    let successor = Catalog::begin_successor(&**disk).map_err(catalog_failed)?;
    let rebuilt = Rebuild::new(disk, &view, &successor, &mut aside, &mut repaired)
        .run(meter)
        .map_err(catalog_failed)?;
    aside.finish().map_err(io_failed)?;

    let successor = Arc::new(successor);
    finish(doors, &successor, &rebuilt, meta, &log, &mut repaired)?;
    drop(successor);
    drop((view, old));
    Catalog::take_over(disk).map_err(catalog_failed)?;
    repaired.did("the catalog was written anew from every entry that checks");
    for file in &log.files {
        disk.remove(&file.name).map_err(io_failed)?;
    }
    disk.sync_dir(WAL_DIR).map_err(io_failed)?;
    repaired.did("the log begins anew behind a checkpoint of what it had");
    Ok(repaired)
}

/// Applies the log to the new catalog and makes the result lasting, all under names that do not count yet.
fn finish(
    doors: &Doors,
    successor: &Arc<Catalog>,
    rebuilt: &Rebuilt,
    meta: Meta,
    log: &OldLog,
    repaired: &mut Repaired,
) -> Result<(), EngineError> {
    let disk = &doors.disk;
    let metrics = Arc::new(Metrics::default());
    let cold = ColdStore::new(Arc::clone(disk), OPEN_FILES).map_err(io_failed)?;
    let directory = Directory::new(Arc::clone(successor), Arc::clone(&metrics));
    directory.recall_endings().map_err(catalog_failed)?;
    rebuilt.mark_moving(&directory).map_err(catalog_failed)?;
    let mut salvage = Salvage::new(&directory, &cold, &metrics, &meta, repaired);
    salvage.run(log)?;
    let mut used_up = salvage.used_up();
    used_up.extend_from_slice(&meta.used_up);
    let learnt = salvage.finish();
    let (mut losses, mut highest_epoch) = (learnt.losses, learnt.highest_epoch);
    if log.has_lost_frames() {
        highest_epoch = next_epoch(highest_epoch, doors.clock.wall_ms())
            .ok_or_else(|| EngineError::new("epochs_used_up", EPOCHS_USED_UP))?;
        losses.add(Loss {
            epoch: highest_epoch,
            reach: Class::Object,
            reason: GapReason::Corruption,
        });
        repaired.did("every stream begins a new epoch: frames that were acknowledged are lost");
    }
    relations::mend(&directory, repaired).map_err(catalog_failed)?;
    prepare_new(&**disk, log.highest_generation + 1, WAL_FIRST_FILE_BYTES).map_err(io_failed)?;
    let checkpoint = Checkpoint {
        directory: &directory,
        cold: &cold,
        metrics: &metrics,
        now_ms: doors.clock.wall_ms(),
        steady_ms: doors.clock.wall_ms(),
        losses: &losses,
        highest_epoch,
        boot_id: learnt.boot_id,
        staged: log.judged.next - 1,
        used_up: &used_up,
        leave_packs: &rebuilt.leave_packs,
        // What was in the log is copied aside and synced; nothing waits for it any more.
        wait_synced: &|_| true,
        meanwhile: &|| {},
    };
    checkpoint
        .run()
        .map_err(|error| EngineError::new("io_error", format!("checkpoint of the repair: {error}")))
}

/// What the old catalog says about the whole directory.
struct Meta {
    checkpoint: u64,
    highest_epoch: u64,
    losses: Losses,
    boot_id: Option<BootId>,
    used_up: Vec<UsedUp>,
}

impl Meta {
    fn read(view: &CatalogView) -> Result<Meta, EngineError> {
        let bytes = |name: &str| {
            let all = view.all_meta().map_err(catalog_failed)?;
            let found = all.into_iter().find(|(found, _)| found == name);
            Ok::<Vec<u8>, EngineError>(found.map(|(_, value)| value).unwrap_or_default())
        };
        Ok(Meta {
            checkpoint: view.meta_number(META_CHECKPOINT).map_err(catalog_failed)?,
            highest_epoch: view
                .meta_number(META_HIGHEST_EPOCH)
                .map_err(catalog_failed)?,
            losses: Losses::decode(&bytes(META_LOSSES)?).unwrap_or_default(),
            boot_id: BootId::try_from(bytes(META_BOOT)?).ok(),
            used_up: decode_used_up(&bytes(META_USED_UP)?),
        })
    }
}

/// The log as it was found.
struct OldLog {
    files: Vec<ScannedFile>,
    judged: Judgement,
    checkpoint: u64,
    highest_generation: u64,
}

impl OldLog {
    fn read(
        disk: &dyn Disk,
        checkpoint: u64,
        meter: &mut Meter<'_>,
    ) -> Result<OldLog, EngineError> {
        let (listed, _) = list_log(disk).map_err(io_failed)?;
        let mut files = Vec::new();
        for generation in &listed {
            let scanned = scan_file(disk, *generation, meter);
            files.push(scanned.map_err(|error| EngineError::io(&file_name(*generation), error))?);
        }
        Ok(OldLog {
            judged: judge(&files, checkpoint),
            files,
            checkpoint,
            highest_generation: listed.last().copied().unwrap_or(0),
        })
    }

    /// Whether something behind the checkpoint was promised and is gone.
    fn has_lost_frames(&self) -> bool {
        let mut damage = self.judged.damage.iter();
        damage.any(|damage| damage.from < damage.to && damage.to > self.checkpoint + 1)
            || self.files.iter().any(|file| file.hopeless)
    }
}

fn catalog_failed(error: CatalogError) -> EngineError {
    match error {
        CatalogError::Io(error) => io_failed(error),
        full @ CatalogError::Full => EngineError::from(full),
        CatalogError::Corrupt(what) => EngineError::new(
            "catalog_damaged",
            format!("{what}; nothing was changed, restore a backup of the whole directory"),
        ),
    }
}

fn io_failed(error: std::io::Error) -> EngineError {
    EngineError::io("repair", error)
}

#[cfg(test)]
#[path = "repair_tests.rs"]
mod tests;
