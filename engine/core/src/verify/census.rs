//! The catalog by itself: every entry decodes, `ids` and `streams` agree, extents cover each stream, packs are
//! counted right, forks and their sources know each other.
//!
//! One walk over one view. Streams that the log has touched count as the log leaves them. Bytes are not looked at
//! here (see `extents`).
//!
//! Invariant: memory grows with packs and with streams that have forks, not with streams.

use std::collections::{BTreeMap, HashMap};

use crate::log::catalog::{CATALOG_FILE, CatalogError, CatalogView};
use crate::log::endings::Ending;
use crate::log::pack::section_bytes;
use crate::model::{Class, Extent, FileRef, StreamId};
use crate::stream::handle::Stream;
use crate::stream::snapshot;
use crate::stream::state::{Life, StreamState};
use crate::verify::meter::Meter;
use crate::verify::report::Report;
use crate::verify::shadow::{Shadow, Shadows, catalog_shadow, decode};

/// Entries read at once.
pub const PAGE_ENTRIES: usize = 1000;

pub struct Census<'a> {
    view: &'a CatalogView,
    shadows: &'a Shadows<'a>,
    report: &'a mut Report,
    pack_live: BTreeMap<u32, u64>,
    /// Streams that name another as their source, by that.
    forks: HashMap<StreamId, u32>,
    /// What streams say about their forks.
    said: HashMap<StreamId, (u32, Box<str>)>,
}

/// What is wrong with a catalog value, before anything in it is believed.
pub fn decode_entry(path: &[u8], value: &[u8]) -> Result<Stream, &'static str> {
    let bytes = snapshot::unseal(value).ok_or("the entry fails its checksum")?;
    let stream = decode(bytes).ok_or("the entry does not decode")?;
    if stream.path.as_bytes() != path {
        return Err("the entry belongs to another path");
    }
    Ok(stream)
}

/// Live bytes that an extent accounts for in its pack.
pub fn pack_bytes(extent: &Extent) -> Option<(u32, u64)> {
    match extent.file {
        FileRef::Pack { number } => Some((number, section_bytes(extent.len, extent.index_count))),
        FileRef::Segment { .. } | FileRef::Spill { .. } => None,
    }
}

/// Ranges of a stream that are known to be damaged.
pub fn damaged_ranges(state: &StreamState) -> &[(u64, u64)] {
    state.damaged.as_deref().map_or(&[], Vec::as_slice)
}

pub fn is_covered_by(ranges: &[(u64, u64)], start: u64, end: u64) -> bool {
    let mut position = start;
    for (from, to) in ranges {
        if *from <= position && position < *to {
            position = *to;
        }
    }
    position >= end
}

impl<'a> Census<'a> {
    pub fn new(
        view: &'a CatalogView,
        shadows: &'a Shadows<'a>,
        report: &'a mut Report,
    ) -> Census<'a> {
        Census {
            view,
            shadows,
            report,
            pack_live: BTreeMap::new(),
            forks: HashMap::new(),
            said: HashMap::new(),
        }
    }

    /// Walks everything.
    pub fn run(mut self, meter: &mut Meter<'_>) -> Result<(), CatalogError> {
        let mut after: Option<Vec<u8>> = None;
        loop {
            let page = self.view.streams(after.as_deref(), PAGE_ENTRIES)?;
            let Some((last, _)) = page.last() else { break };
            after = Some(last.clone());
            for (path, value) in &page {
                self.entry(path, value)?;
            }
            meter.add(0).map_err(CatalogError::Io)?;
        }
        self.new_streams()?;
        self.check_ids()?;
        self.check_packs()?;
        self.check_endings()?;
        self.check_fork_counts();
        Ok(())
    }

    fn entry(&mut self, path: &[u8], value: &[u8]) -> Result<(), CatalogError> {
        self.report.streams += 1;
        let name = String::from_utf8_lossy(path).into_owned();
        let stream = match decode_entry(path, value) {
            Ok(stream) => stream,
            Err(what) => {
                self.report.stream_error(CATALOG_FILE, None, &name, what);
                return Ok(());
            }
        };
        let state = stream.lock();
        if let Err(what) = check_state(&state) {
            self.report.stream_error(CATALOG_FILE, None, &name, what);
        }
        for extent in state.extents.iter() {
            if let Some((number, live)) = pack_bytes(extent) {
                *self.pack_live.entry(number).or_default() += live;
            }
        }
        for (start, end) in damaged_ranges(&state) {
            let what = format!("bytes {start}..{end} are known to be damaged: readers get a gap");
            self.report.stream_note(CATALOG_FILE, &name, what);
        }
        let listed = self.view.path_of(stream.id)?;
        if listed.as_deref() != Some(path) {
            let what = format!("its id {} does not lead to it", stream.id.0);
            self.report.stream_error(CATALOG_FILE, None, &name, what);
        }
        let damaged = damaged_ranges(&state).to_vec();
        drop(state);
        let shadow = self.shadows.get(stream.id);
        let shadow = shadow.unwrap_or_else(|| Shadow::of(&stream));
        self.relations(stream.id, &shadow, &damaged)
    }

    /// What is remembered of removed streams.
    fn check_endings(&mut self) -> Result<(), CatalogError> {
        for (sequence, value) in self.view.endings()? {
            if Ending::decode(&value).is_none() {
                let what =
                    format!("where the stream ended that frame {sequence} removed does not decode");
                self.report.error(CATALOG_FILE, None, what);
            }
        }
        Ok(())
    }

    /// Streams that only the log knows.
    fn new_streams(&mut self) -> Result<(), CatalogError> {
        for (id, shadow) in self.shadows.iter() {
            if self.view.path_of(id)?.is_none() {
                self.relations(id, &shadow, &[])?;
            }
        }
        Ok(())
    }

    /// Forks and sources.
    fn relations(
        &mut self,
        id: StreamId,
        shadow: &Shadow,
        damaged: &[(u64, u64)],
    ) -> Result<(), CatalogError> {
        if shadow.life == Life::Gone {
            return Ok(());
        }
        if shadow.fork_count > 0 {
            self.said
                .insert(id, (shadow.fork_count, shadow.path.clone()));
        }
        let Some(source) = shadow.fork_source else {
            return Ok(());
        };
        *self.forks.entry(source).or_default() += 1;
        let found = match self.shadows.get(source) {
            Some(source) => Some(source),
            None => catalog_shadow(self.view, source)?,
        };
        let what = match found.filter(|source| source.life != Life::Gone) {
            None if is_covered_by(damaged, 0, shadow.start) => return Ok(()),
            None => format!("it is a fork of stream {}, which is not there", source.0),
            // Of an ephemeral source a restart leaves nothing; a fork has its own copy then or a gap.
            Some(found)
                if found.tail >= shadow.start
                    || found.class == Class::Ephemeral
                    || is_covered_by(damaged, found.tail, shadow.start) =>
            {
                return Ok(());
            }
            Some(found) => format!(
                "it is a fork of {:?} at {}, which ends at {}",
                found.path, shadow.start, found.tail
            ),
        };
        self.report
            .stream_error(CATALOG_FILE, None, &shadow.path, what);
        Ok(())
    }

    fn check_ids(&mut self) -> Result<(), CatalogError> {
        let mut after = None;
        loop {
            let page = self.view.ids(after, PAGE_ENTRIES)?;
            let Some((last, _)) = page.last() else {
                return Ok(());
            };
            after = Some(*last);
            for (id, path) in &page {
                let value = self.view.get(path)?;
                let known = value
                    .as_deref()
                    .is_some_and(|value| encoded_id(value) == Some(*id));
                if !known {
                    let what = format!("id {} leads to a path that has another stream", id.0);
                    let name = String::from_utf8_lossy(path);
                    self.report.stream_error(CATALOG_FILE, None, &name, what);
                }
            }
        }
    }

    fn check_packs(&mut self) -> Result<(), CatalogError> {
        let mut counted = std::mem::take(&mut self.pack_live);
        for (number, live) in self.view.packs()? {
            self.report.packs += 1;
            let found = counted.remove(&number).unwrap_or(0);
            if found != live {
                let what = format!("{live} live bytes are counted, its streams have {found}");
                self.report
                    .error(&crate::log::pack::path(number), None, what);
            }
        }
        for (number, found) in counted {
            let what = format!("no live bytes are counted, its streams have {found}");
            self.report
                .error(&crate::log::pack::path(number), None, what);
        }
        Ok(())
    }

    fn check_fork_counts(&mut self) {
        for (id, (said, path)) in &self.said {
            let found = self.forks.remove(id).unwrap_or(0);
            if found != *said {
                let what = format!("it counts {said} forks, there are {found}");
                self.report.stream_error(CATALOG_FILE, None, path, what);
            }
        }
        for (source, found) in &self.forks {
            let path = match self.shadows.get(*source) {
                Some(shadow) => Some(shadow.path),
                None => catalog_shadow(self.view, *source)
                    .ok()
                    .flatten()
                    .map(|shadow| shadow.path),
            };
            // A source that is not there has been told with each fork.
            if let Some(path) = path {
                let what = format!("it counts no forks, there are {found}");
                self.report.stream_error(CATALOG_FILE, None, &path, what);
            }
        }
    }
}

fn encoded_id(value: &[u8]) -> Option<StreamId> {
    let bytes = value.get(1..9)?.try_into().ok()?;
    Some(StreamId(u64::from_le_bytes(bytes)))
}

/// The entry against itself: extents from start to tail, epochs and damaged ranges in order.
pub fn check_state(state: &StreamState) -> Result<(), String> {
    let (mut end, mut records) = (state.start, state.start_records);
    for (number, extent) in state.extents.iter().enumerate() {
        let whole = extent.start.checked_add(extent.len).is_some()
            && extent.file_position.checked_add(extent.len).is_some();
        if extent.start != end || !whole || extent.len == 0 {
            return Err(format!(
                "extent {number} begins at {}, the one before it ends at {end}",
                extent.start
            ));
        }
        if extent.base_records < records || extent.base_records > state.records {
            return Err(format!(
                "extent {number} counts {} records before it, of {}..{}",
                extent.base_records, records, state.records
            ));
        }
        (end, records) = (extent.end(), extent.base_records);
    }
    if end != state.tail {
        return Err(format!(
            "its extents end at {end}, the stream ends at {}",
            state.tail
        ));
    }
    let mut epoch = (state.first_epoch, 0);
    for later in &state.later_epochs {
        if later.0 <= epoch.0 || later.1 < epoch.1 || later.1 > state.tail {
            return Err(format!("epoch {} at {} is out of order", later.0, later.1));
        }
        epoch = *later;
    }
    let mut damaged_end = 0;
    for (start, end) in damaged_ranges(state) {
        if start < &damaged_end || end <= start || *end > state.tail {
            return Err(format!("damaged range {start}..{end} is out of order"));
        }
        damaged_end = *end;
    }
    Ok(())
}
