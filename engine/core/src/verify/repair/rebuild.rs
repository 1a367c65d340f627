//! The new catalog: every entry of the old one that checks, with what is damaged in its files marked.
//!
//! Writing it anew also mends what only counts or points: ids, live bytes of packs, pages of the store.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::io::{Disk, OpenMode};
use crate::log::audit::{Bad, Fault, Files, data_path, examine, index_path};
use crate::log::catalog::{Catalog, CatalogError, CatalogView, Change};
use crate::log::directory::Directory;
use crate::log::endings::{Ending, Unwritten};
use crate::log::index;
use crate::log::pack::{self, PACKS_DIRECTORY};
use crate::log::segment::{self, Part};
use crate::model::{Extent, FileRef, StreamId};
use crate::stream::handle::Stream;
use crate::stream::snapshot;
use crate::stream::state::StreamState;
use crate::verify::census::{PAGE_ENTRIES, check_state, damaged_ranges, decode_entry, pack_bytes};
use crate::verify::meter::Meter;
use crate::verify::repair::Repaired;
use crate::verify::repair::aside::Aside;
use crate::verify::repair::filler::{Fillers, segments_of};

/// What the rest of the repair has to know.
#[derive(Default)]
pub struct Rebuilt {
    /// Packs that cannot be walked any more: whoever lives there moves out with the checkpoint.
    pub leave_packs: HashSet<u32>,
    moving: Vec<Box<str>>,
}

impl Rebuilt {
    pub fn mark_moving(&self, directory: &Directory) -> Result<(), CatalogError> {
        for path in &self.moving {
            if let Some(stream) = directory.get(path)? {
                let mut state = stream.lock();
                directory.mark_dirty(&stream, &mut state.dirty);
            }
        }
        Ok(())
    }
}

/// An entry as the new catalog gets it.
struct Kept {
    id: StreamId,
    value: Vec<u8>,
    extents: Vec<Extent>,
}

pub struct Rebuild<'a> {
    disk: &'a Arc<dyn Disk>,
    view: &'a CatalogView,
    successor: &'a Catalog,
    aside: &'a mut Aside,
    repaired: &'a mut Repaired,
    rebuilt: Rebuilt,
    /// Paths whose entry does not check.
    lost: BTreeSet<Vec<u8>>,
}

impl<'a> Rebuild<'a> {
    pub fn new(
        disk: &'a Arc<dyn Disk>,
        view: &'a CatalogView,
        successor: &'a Catalog,
        aside: &'a mut Aside,
        repaired: &'a mut Repaired,
    ) -> Rebuild<'a> {
        Rebuild {
            disk,
            view,
            successor,
            aside,
            repaired,
            rebuilt: Rebuilt::default(),
            lost: BTreeSet::new(),
        }
    }

    pub fn run(mut self, meter: &mut Meter<'_>) -> Result<Rebuilt, CatalogError> {
        let meta = self.view.all_meta()?;
        let meta: Vec<(&str, &[u8])> = meta
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_slice()))
            .collect();
        self.successor
            .commit_with(&[], &meta, &[], &self.endings()?)?;
        let disk = Arc::clone(self.disk);
        let mut files = Files::new(&*disk);
        let mut after: Option<Vec<u8>> = None;
        loop {
            let page = self.view.streams(after.as_deref(), PAGE_ENTRIES)?;
            let Some((last, _)) = page.last() else { break };
            after = Some(last.clone());
            let mut changes = Vec::with_capacity(page.len());
            let mut pack_live: Vec<(u32, i64)> = Vec::new();
            for (path, value) in page {
                if let Some(kept) = self.entry(&mut files, &path, value, meter)? {
                    let live = kept.extents.iter().filter_map(pack_bytes);
                    pack_live.extend(
                        live.map(|(number, bytes)| {
                            (number, i64::try_from(bytes).unwrap_or(i64::MAX))
                        }),
                    );
                    changes.push(Change::Put {
                        path,
                        id: kept.id,
                        value: kept.value,
                    });
                }
            }
            self.successor.commit(&changes, &[], &pack_live)?;
        }
        self.keep_lost_files()?;
        Ok(self.rebuilt)
    }

    /// What is remembered of removed streams, as far as it checks.
    fn endings(&mut self) -> Result<Unwritten, CatalogError> {
        let rows = match self.view.endings() {
            Err(CatalogError::Corrupt(what)) => {
                self.repaired
                    .gave_up(None, format!("where removed streams ended: {what}"));
                return Ok(Unwritten::default());
            }
            read => read?,
        };
        let count = rows.len();
        let good = rows.into_iter();
        let put: Vec<_> = good
            .filter(|(_, value)| Ending::decode(value).is_some())
            .collect();
        if put.len() < count {
            let what = format!("where {} removed streams ended", count - put.len());
            self.repaired.gave_up(None, what);
        }
        Ok(Unwritten {
            put,
            forget_below: 0,
        })
    }

    /// The entry as the new catalog gets it; `None` if it is given up.
    fn entry(
        &mut self,
        files: &mut Files<'_>,
        path: &[u8],
        value: Vec<u8>,
        meter: &mut Meter<'_>,
    ) -> Result<Option<Kept>, CatalogError> {
        let stream = match decode_entry(path, &value)
            .map_err(str::to_owned)
            .and_then(|stream| {
                let checked = check_state(&stream.lock());
                checked.map(|()| stream)
            }) {
            Ok(stream) => stream,
            Err(what) => {
                let name = String::from_utf8_lossy(path).into_owned();
                let what = format!("the whole stream: {what}");
                self.repaired.gave_up(Some(&name), what);
                self.lost.insert(path.to_vec());
                return Ok(None);
            }
        };
        let (bad, extents) = {
            let state = stream.lock();
            let tell = &mut |bytes| meter.add(bytes);
            let found = examine(files, stream.id, &state.extents, state.records, tell);
            (found.map_err(CatalogError::Io)?.0, state.extents.to_vec())
        };
        if bad.is_empty() {
            return Ok(Some(Kept {
                id: stream.id,
                value,
                extents,
            }));
        }
        let extents = self.mend(&stream, &extents, &bad)?;
        let mut value = Vec::new();
        let state = stream.lock();
        snapshot::encode(&stream.path, &stream.content_type, &state, &mut value);
        snapshot::encode_extents(&extents, &mut value);
        snapshot::seal(&mut value);
        Ok(Some(Kept {
            id: stream.id,
            value,
            extents,
        }))
    }

    /// Marks what is bad, and puts fillers where an index is.
    fn mend(
        &mut self,
        stream: &Stream,
        extents: &[Extent],
        bad: &[Bad],
    ) -> Result<Vec<Extent>, CatalogError> {
        let bad = self.escalate(stream, extents, bad);
        let mut fillers =
            Fillers::new(&**self.disk, stream.id, extents).map_err(CatalogError::Io)?;
        let mut mended = Vec::with_capacity(extents.len());
        let mut state = stream.lock();
        for (number, extent) in extents.iter().enumerate() {
            let here: Vec<&Bad> = bad.iter().filter(|bad| bad.extent == number).collect();
            if !here.iter().any(|bad| bad.fault == Fault::Index) {
                mended.push(*extent);
                continue;
            }
            for path in [data_path(extent.file), index_path(extent.file)] {
                self.aside.copy(&path).map_err(CatalogError::Io)?;
            }
            let before = mended.last().map_or(state.created_ms, |last| {
                last_time(&**self.disk, last).unwrap_or(state.created_ms)
            });
            fillers
                .split(extent, &here, before, &mut mended)
                .map_err(CatalogError::Io)?;
        }
        for bad in bad.iter().filter(|bad| bad.fault != Fault::Section) {
            if mark_damaged(&mut state, bad.start, bad.end) {
                let what = format!("bytes {}..{}: {}", bad.start, bad.end, bad.what);
                self.repaired.gave_up(Some(&stream.path), what);
            }
        }
        Ok(mended)
    }

    /// Sections that a pack cannot show any more move out of it. Bytes that do not check cannot be moved, so where
    /// both come together the pack's piece of the stream is given up whole.
    fn escalate(&mut self, stream: &Stream, extents: &[Extent], bad: &[Bad]) -> Vec<Bad> {
        let mut bad = bad.to_vec();
        let moves = bad.iter().any(|bad| bad.fault == Fault::Section);
        if moves {
            for bad in bad.iter().filter(|bad| bad.fault == Fault::Section) {
                if let FileRef::Pack { number } = extents[bad.extent].file {
                    self.rebuilt.leave_packs.insert(number);
                }
            }
            self.rebuilt.moving.push(stream.path.clone());
        }
        let records = stream.lock().records;
        for bad in &mut bad {
            let extent = &extents[bad.extent];
            let in_pack = matches!(extent.file, FileRef::Pack { .. });
            let whole =
                in_pack && (bad.fault == Fault::Index || (moves && bad.fault == Fault::Bytes));
            if whole {
                let next = extents.get(bad.extent + 1);
                bad.fault = Fault::Index;
                (bad.start, bad.end) = (extent.start, extent.end());
                bad.entries = (0, extent.index_count);
                bad.records_before = extent.base_records;
                bad.records_after = next.map_or(records, |next| next.base_records);
            }
        }
        // One extent may have had several; given up whole it has one.
        bad.dedup_by(|later, earlier| {
            later.extent == earlier.extent
                && later.fault == Fault::Index
                && earlier.fault == Fault::Index
                && later.start == earlier.start
        });
        bad
    }

    /// Nothing names the files of a lost stream any more, and the next start would remove them.
    fn keep_lost_files(&mut self) -> Result<(), CatalogError> {
        if self.lost.is_empty() {
            return Ok(());
        }
        let mut ids = BTreeSet::new();
        let mut after = None;
        loop {
            let page = self.view.ids(after, PAGE_ENTRIES)?;
            let Some((last, _)) = page.last() else { break };
            after = Some(*last);
            let lost = page.iter().filter(|(_, path)| self.lost.contains(path));
            ids.extend(lost.map(|(id, _)| *id));
        }
        for id in &ids {
            for number in segments_of(&**self.disk, *id).map_err(CatalogError::Io)? {
                for part in [Part::Data, Part::Index] {
                    let path = segment::path(*id, number, part);
                    self.aside.copy(&path).map_err(CatalogError::Io)?;
                }
            }
        }
        self.keep_packs_of(&ids)
    }

    fn keep_packs_of(&mut self, ids: &BTreeSet<StreamId>) -> Result<(), CatalogError> {
        for entry in self.disk.list(PACKS_DIRECTORY).map_err(CatalogError::Io)? {
            let Some(number) = pack::parse_name(&entry.name) else {
                continue;
            };
            let path = pack::path(number);
            let file = self.disk.open(&path, OpenMode::Read);
            let file = file.map_err(CatalogError::Io)?;
            let mut has = false;
            let walked = pack::walk(&*file, number, &mut |section| {
                has |= ids.contains(&section.stream);
            });
            // One that cannot be walked may have it.
            if has || walked.is_err() {
                self.aside.copy(&path).map_err(CatalogError::Io)?;
            }
        }
        Ok(())
    }
}

/// Time of an extent's last append.
fn last_time(disk: &dyn Disk, extent: &Extent) -> Option<u64> {
    let last = extent.index_count.checked_sub(1)?;
    let file = disk.open(&index_path(extent.file), OpenMode::Read).ok()?;
    let entries = index::read_entries(&*file, extent.index_position, last, 1).ok()?;
    entries.first().map(|entry| entry.time_ms)
}

/// Adds a range to those that readers are not given. `false`: it was known.
pub fn mark_damaged(state: &mut StreamState, start: u64, end: u64) -> bool {
    let known = damaged_ranges(state);
    if start >= end || crate::verify::census::is_covered_by(known, start, end) {
        return false;
    }
    let mut ranges = known.to_vec();
    ranges.push((start, end));
    ranges.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (start, end) in ranges {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    state.damaged = Some(Box::new(merged));
    true
}
