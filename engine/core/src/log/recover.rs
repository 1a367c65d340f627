//! Start-up: read the log, rebuild what it promises, and begin a new file.
//!
//! `format` says whose directory it is, `scan` which frames count, `replay` what they mean, `start` what is
//! written before anything is visible.
//!
//! Invariants
//! - `I-RECOVER-1` Before anything recovered is visible, all frames above the proven sync are in the new file,
//!   synced: a page that survived in the cache may still die with the power.
//! - `I-RECOVER-2` Recovery changes no old file, so that it can run again and give the same.

use std::sync::Arc;

use crate::codec::adopt::decode_used_up;
use crate::config::Config;
use crate::error::EngineError;
use crate::io::{BootId, Doors};
use crate::limits::OPEN_FILES_MAX;
use crate::log::catalog::Catalog;
use crate::log::checkpoint::{
    META_BOOT, META_CHECKPOINT, META_HIGHEST_EPOCH, META_LOSSES, META_USED_UP,
};
use crate::log::cold::ColdStore;
use crate::log::directory::Directory;
use crate::log::format::{check_format, check_presence, finish_directory};
use crate::log::replay::{OpenedStreams, Replay};
use crate::log::scan::{Scan, log_files};
use crate::log::stage::StageRecord;
use crate::log::start::{Ended, LastRun, begin_new_file, has_failed_mark};
use crate::log::wal::{FAILED_MARK, WalFile};
use crate::metrics::Metrics;
use crate::model::StreamId;
use crate::stream::offsets::Losses;

/// What a start needs to go on.
pub struct Recovered {
    pub directory: Directory,
    pub cold: ColdStore,
    pub current: WalFile,
    /// Bytes of the new file already used.
    pub position: u64,
    pub next_sequence: u64,
    /// Older files with the last sequence in each.
    pub retained: Vec<(WalFile, u64)>,
    pub losses: Losses,
    pub highest_epoch: u64,
    pub highest_generation: u64,
    pub unneeded: Vec<StreamId>,
    /// What clients have staged and nobody has committed.
    pub stages: Vec<StageRecord>,
    pub frames: u64,
    pub clean: bool,
}

pub fn recover(
    config: &Config,
    doors: &Doors,
    metrics: &Arc<Metrics>,
    progress: &mut dyn FnMut(&str),
) -> Result<Recovered, EngineError> {
    let disk = &*doors.disk;
    let fresh = check_format(disk)?;
    let names = log_files(disk)?;
    check_presence(disk, fresh, names.is_empty())?;
    let catalog = Arc::new(Catalog::open(Arc::clone(&doors.disk)).map_err(EngineError::from)?);
    let meta_number = |name: &str| -> Result<u64, EngineError> {
        let value = catalog.meta(name).map_err(EngineError::from)?;
        Ok(value
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u64::from_le_bytes))
    };
    let checkpoint = meta_number(META_CHECKPOINT)?;
    let highest_epoch = meta_number(META_HIGHEST_EPOCH)?;
    let meta_bytes = |name: &str| -> Result<Vec<u8>, EngineError> {
        let value = catalog.meta(name).map_err(EngineError::from)?;
        Ok(value.unwrap_or_default())
    };
    let losses = Losses::decode(&meta_bytes(META_LOSSES)?)
        .ok_or_else(|| EngineError::new("catalog_damaged", "the list of losses does not decode"))?;
    let last_boot = BootId::try_from(meta_bytes(META_BOOT)?).ok();
    let known_used_up = decode_used_up(&meta_bytes(META_USED_UP)?);
    let cold = ColdStore::new(Arc::clone(&doors.disk), OPEN_FILES_MAX)
        .map_err(|error| EngineError::io("cold store", error))?;
    let directory = Directory::new(catalog, Arc::clone(metrics));
    directory.recall_endings().map_err(EngineError::from)?;

    let mut scan = Scan::open(disk, &names, checkpoint)?;
    let streams = OpenedStreams {
        directory: &directory,
        cold: &cold,
        metrics,
    };
    let mut replay = Replay::new(streams, losses, highest_epoch, last_boot);
    scan.run(&mut replay, progress)?;
    replay.finish()?;
    let mut used_up = std::mem::take(&mut replay.used_up);
    used_up.extend(known_used_up);
    let failed = has_failed_mark(disk)?;
    let last = LastRun {
        losses: replay.losses.clone(),
        highest_epoch: replay.highest_epoch,
        ended: if config.restored {
            Ended::Elsewhere
        } else if replay.clean || (fresh && names.is_empty()) {
            Ended::Cleanly
        } else if !failed && doors.boot_id.is_some() && replay.boot_id == doors.boot_id {
            Ended::Killed
        } else {
            Ended::WithTheMachine
        },
    };
    let clean = last.ended == Ended::Cleanly;
    let (unneeded, frames) = (std::mem::take(&mut replay.unneeded), replay.frames);
    let started = begin_new_file(doors, &scan, config, last)?;
    // Removes files because of what the log says, which lasts only from here on.
    let live = directory.catalog().packs().map_err(EngineError::from)?;
    let stages = cold
        .find_stages(&live, &used_up)
        .map_err(|error| EngineError::io("staged packs", error))?;
    if fresh {
        finish_directory(disk)?;
    }
    if failed {
        // What the failure may have cost is in the start frame now.
        disk.remove(FAILED_MARK)
            .and_then(|()| disk.sync_dir(""))
            .map_err(|error| EngineError::io(FAILED_MARK, error))?;
    }
    if frames > 0 {
        progress(&format!(
            "recovered {frames} frames from {} log files",
            names.len()
        ));
    }
    metrics.wal_retained_bytes.set(scan.retained_bytes);
    Ok(Recovered {
        directory,
        cold,
        current: started.file,
        position: started.position,
        next_sequence: started.next_sequence,
        retained: scan
            .files
            .into_iter()
            .map(|file| (file.wal, file.last_sequence))
            .collect(),
        losses: started.losses,
        highest_epoch: started.highest_epoch,
        highest_generation: started.generation,
        unneeded,
        stages,
        frames,
        clean,
    })
}
