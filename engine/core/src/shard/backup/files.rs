//! Copying what the catalog names: packs whole, segments and their indexes up to the end of their extents.
//!
//! Driven by the copied catalog, which nothing changes any more; the files are pinned, and bytes inside an extent are
//! never written again. Each copy is checked against its index when it is there. What was damaged before and is
//! known as such is copied as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use crate::io::{Disk, OpenMode, read_up_to_at};
use crate::log::audit::{Bad, Fault, Files, examine};
use crate::log::catalog::{CATALOG_FILE, Catalog};
use crate::log::index::INDEX_ENTRY_BYTES;
use crate::log::pack::{self, PACKS_DIRECTORY};
use crate::log::segment::{self, Part, SEGMENTS_DIRECTORY};
use crate::model::{ContentType, Extent, FileRef, StreamId};
use crate::stream::handle::Stream;
use crate::stream::snapshot;

use super::manifest::{FileRecord, ManifestWriter, SequentialWriter};
use super::{BackupError, Job};

const PIECE_BYTES: usize = 1 << 20;
/// Streams looked at per step of the walk over the catalog.
const PAGE_STREAMS: usize = 1000;

/// What a catalog names, counted while it is copied.
#[derive(Default)]
pub struct Census {
    pub streams: u64,
    /// About what will be copied.
    pub bytes: u64,
    pub checkpoint: u64,
}

impl Census {
    /// Counts one stream; `Err` is a finding: its entry does not decode.
    pub fn add(&mut self, path: &[u8], value: &[u8]) -> Result<(), String> {
        self.streams += 1;
        let stream = decode(value).ok_or_else(|| undecodable(path))?;
        let state = stream.lock();
        for extent in state.extents.iter() {
            if let FileRef::Segment { .. } = extent.file {
                self.bytes += extent.len + u64::from(extent.index_count) * INDEX_ENTRY_BYTES as u64;
            }
        }
        Ok(())
    }

    /// Counts packs by their files; one that is missing is found when it is copied.
    pub fn add_packs(&mut self, disk: &dyn Disk, packs: &[(u32, u64)]) {
        for (number, live_bytes) in packs {
            let length = disk
                .open(&pack::path(*number), OpenMode::Read)
                .and_then(|file| file.len());
            self.bytes += length.unwrap_or(*live_bytes);
        }
    }
}

fn decode(value: &[u8]) -> Option<Stream> {
    let bytes = snapshot::unseal(value)?;
    snapshot::decode(bytes, &|text| Arc::new(ContentType::new(text)))
}

fn undecodable(path: &[u8]) -> String {
    let path = String::from_utf8_lossy(path);
    format!("{CATALOG_FILE}: the entry of stream {path:?} does not decode")
}

/// Copies every pack that has live bytes, and the staged ones that frames of the log have taken over. A missing one
/// of the catalog is told by the streams that miss it; without one of the log the copy would not start.
pub fn copy_packs(
    job: &mut Job<'_>,
    catalog: &Catalog,
    adopted: &BTreeSet<u32>,
    manifest: &mut ManifestWriter,
) -> Result<(), BackupError> {
    job.to.create_dir_all(PACKS_DIRECTORY)?;
    let named = catalog.packs()?.into_iter().map(|(number, _)| number);
    let numbers: BTreeSet<u32> = named.chain(adopted.iter().copied()).collect();
    for number in numbers {
        let Some(record) = copy_file(job, &pack::path(number), u64::MAX)? else {
            if adopted.contains(&number) {
                let what = "a frame of the log needs it and it is missing";
                let path = pack::path(number);
                return Err(BackupError::new("backup_failed", format!("{path}: {what}")));
            }
            continue;
        };
        manifest.add(&record)?;
    }
    Ok(())
}

/// Notes damage, unless it is known: then readers are told of a gap, and the copy says the same.
fn tell_bad(job: &mut Job<'_>, stream: &Stream, bad: &Bad) -> Result<(), BackupError> {
    let known = stream.lock().damaged.as_ref().is_some_and(|ranges| {
        let covers = |(start, end): &(u64, u64)| *start <= bad.start && bad.end <= *end;
        ranges.iter().any(covers)
    });
    if known {
        return Ok(());
    }
    job.damage(format!(
        "{} byte {}: stream {:?}: {}",
        bad.file, bad.byte, stream.path, bad.what
    ))
}

/// Copies the segments of every stream, in the order of their paths, and checks what was copied of it.
pub fn copy_segments(
    job: &mut Job<'_>,
    catalog: &Catalog,
    manifest: &mut ManifestWriter,
) -> Result<(), BackupError> {
    job.to.create_dir_all(SEGMENTS_DIRECTORY)?;
    let to = Arc::clone(&job.to);
    let mut files = Files::new(&*to);
    let mut after: Vec<u8> = Vec::new();
    loop {
        let mut page = Vec::new();
        catalog.scan(b"", &after, PAGE_STREAMS, &mut |path, value| {
            page.push((path.to_vec(), decode(value)));
            true
        })?;
        let Some((last, _)) = page.last() else {
            return Ok(());
        };
        after.clone_from(last);
        for (_, stream) in &page {
            // What does not decode was told when the catalog was copied.
            let Some(stream) = stream else { continue };
            let extents = Arc::clone(&stream.lock().extents);
            copy_stream(job, &extents, manifest)?;
            let records = stream.lock().records;
            let (found, _) = examine(&mut files, stream.id, &extents, records, &mut |_| Ok(()))?;
            // Where only a section's header is damaged nothing of the stream is.
            let mut lost = found.iter().filter(|bad| bad.fault != Fault::Section);
            lost.try_for_each(|bad| tell_bad(job, stream, bad))?;
        }
    }
}

/// Each segment up to where the stream's extents in it end; one that is missing is found with the stream.
fn copy_stream(
    job: &mut Job<'_>,
    extents: &[Extent],
    manifest: &mut ManifestWriter,
) -> Result<(), BackupError> {
    let mut ends: BTreeMap<(StreamId, u32), (u64, u64)> = BTreeMap::new();
    for extent in extents {
        if let FileRef::Segment { owner, number } = extent.file {
            let index_bytes = u64::from(extent.index_count) * INDEX_ENTRY_BYTES as u64;
            let (data, index) = ends.entry((owner, number)).or_default();
            *data = (*data).max(extent.file_position.saturating_add(extent.len));
            *index = (*index).max(extent.index_position.saturating_add(index_bytes));
        }
    }
    for ((owner, number), (data, index)) in ends {
        job.to
            .create_dir_all(&segment::bucket_directory(segment::bucket(owner)))?;
        for (part, end) in [(Part::Data, data), (Part::Index, index)] {
            let copied = copy_file(job, &segment::path(owner, number, part), end)?;
            copied.iter().try_for_each(|record| manifest.add(record))?;
        }
    }
    Ok(())
}

/// Copies the first `end` bytes of a file, or as many as there are. `None`: there is no such file.
fn copy_file(job: &mut Job<'_>, path: &str, end: u64) -> Result<Option<FileRecord>, BackupError> {
    let from = match job.engine.doors.disk.open(path, OpenMode::Read) {
        Ok(from) => from,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(BackupError::at(path, &error)),
    };
    let explain = |error: io::Error| BackupError::at(path, &error);
    let mut out = SequentialWriter::create(&*job.to, path).map_err(explain)?;
    let mut piece = vec![0; PIECE_BYTES.min(usize::try_from(end).unwrap_or(PIECE_BYTES))];
    let mut position = 0;
    while position < end {
        let wanted = (end - position).min(piece.len() as u64) as usize;
        let count = read_up_to_at(&*from, &mut piece[..wanted], position).map_err(explain)?;
        out.write(&piece[..count]).map_err(explain)?;
        position += count as u64;
        job.wrote(count as u64)?;
        if count < wanted {
            break;
        }
    }
    out.finish().map(Some).map_err(explain)
}

/// Length and checksum of a file that was not written in order.
pub fn record_of(disk: &dyn Disk, path: &str) -> Result<FileRecord, BackupError> {
    let explain = |error: io::Error| BackupError::at(path, &error);
    let file = disk.open(path, OpenMode::ReadWrite).map_err(explain)?;
    file.sync_all().map_err(explain)?;
    let mut record = FileRecord {
        path: path.to_owned(),
        bytes: 0,
        crc: 0,
    };
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let count = read_up_to_at(&*file, &mut piece, record.bytes).map_err(explain)?;
        record.crc = crc32c::crc32c_append(record.crc, &piece[..count]);
        record.bytes += count as u64;
        if count < piece.len() {
            return Ok(record);
        }
    }
}

/// Directories that hold segments and packs, innermost first.
pub fn directories(disk: &dyn Disk) -> io::Result<Vec<String>> {
    let mut found: Vec<String> = disk
        .list(SEGMENTS_DIRECTORY)?
        .into_iter()
        .filter(|entry| entry.is_dir)
        .map(|entry| format!("{SEGMENTS_DIRECTORY}/{}", entry.name))
        .collect();
    found.extend([SEGMENTS_DIRECTORY.to_owned(), PACKS_DIRECTORY.to_owned()]);
    Ok(found)
}
