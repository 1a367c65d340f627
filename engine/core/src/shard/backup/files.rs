//! Copying what the catalog names: packs whole, segments and their indexes up to the end of their extents.
//!
//! Driven by the copied catalog, which nothing changes any more; the files are pinned, and bytes inside an extent are
//! never written again. Each copy is checked against its index when it is there. What was damaged before and is
//! known as such is copied as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use crate::io::{Disk, OpenMode, read_up_to_at};
use crate::log::catalog::{CATALOG_FILE, Catalog};
use crate::log::index::INDEX_ENTRY_BYTES;
use crate::log::pack::{self, PACKS_DIRECTORY, Section, section_bytes};
use crate::log::segment::{self, Part, SEGMENTS_DIRECTORY};
use crate::model::{ContentType, Extent, FileRef, StreamId};
use crate::stream::handle::Stream;
use crate::stream::snapshot;

use super::check::{Bad, check_extent};
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
    snapshot::decode(bytes, |text| Arc::new(ContentType::new(text)))
}

fn undecodable(path: &[u8]) -> String {
    let path = String::from_utf8_lossy(path);
    format!("{CATALOG_FILE}: the entry of stream {path:?} does not decode")
}

/// A pack that was copied.
pub struct PackCopy {
    bytes: u64,
    /// Its sections could be walked, and what is bad in them was told.
    checked: bool,
}

/// Copies every pack that has live bytes, and the staged ones that frames of the log have taken over. A missing one
/// of the catalog is told by the streams that miss it; without one of the log the copy would not start.
pub fn copy_packs(
    job: &mut Job<'_>,
    catalog: &Catalog,
    adopted: &BTreeSet<u32>,
    manifest: &mut ManifestWriter,
) -> Result<BTreeMap<u32, PackCopy>, BackupError> {
    job.to.create_dir_all(PACKS_DIRECTORY)?;
    let mut packs = BTreeMap::new();
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
        let copied = PackCopy {
            bytes: record.bytes,
            checked: check_pack(job, catalog, number)?,
        };
        packs.insert(number, copied);
    }
    Ok(packs)
}

/// Checks every section of a copied pack in one pass. Damage in a section that no stream uses any more is none.
/// `false`: a section's header is damaged, so each stream has to be looked at.
fn check_pack(job: &mut Job<'_>, catalog: &Catalog, number: u32) -> Result<bool, BackupError> {
    let path = pack::path(number);
    let file = job.to.open(&path, OpenMode::Read)?;
    let mut position = pack::FILE_HEADER_BYTES as u64;
    let mut found: Vec<(StreamId, Extent, Bad)> = Vec::new();
    let mut failed = None;
    let walked = pack::walk(&*file, number, &mut |section| {
        let extent = extent_of(number, position, &section);
        position += section_bytes(section.len, section.index_count);
        let mut bad = |bad| found.push((section.stream, extent, bad));
        if let Err(error) = check_extent(&*file, &*file, &extent, &mut bad) {
            failed = Some(error);
        }
    });
    if let Some(error) = failed {
        return Err(BackupError::at(&path, &error));
    }
    match walked {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(false),
        Err(error) => return Err(BackupError::at(&path, &error)),
    }
    for (id, extent, bad) in found {
        let Some(stream_path) = catalog.path_of(id)? else {
            continue;
        };
        let value = catalog.get(&stream_path)?;
        let Some(stream) = value.and_then(|value| decode(&value)) else {
            continue;
        };
        if stream.id == id && stream.lock().extents.contains(&extent) {
            tell_bad(job, &stream, &path, &bad)?;
        }
    }
    Ok(true)
}

fn extent_of(number: u32, position: u64, section: &Section) -> Extent {
    let index_bytes = u64::from(section.index_count) * INDEX_ENTRY_BYTES as u64;
    let behind = position.saturating_add(section_bytes(section.len, section.index_count));
    Extent {
        start: section.start,
        len: section.len,
        file: FileRef::Pack { number },
        file_position: position + section_bytes(0, 0),
        index_position: behind.saturating_sub(index_bytes),
        index_count: section.index_count,
        base_records: section.base_records,
    }
}

/// Notes damage, unless it is known: then readers are told of a gap, and the copy says the same.
fn tell_bad(job: &mut Job<'_>, stream: &Stream, file: &str, bad: &Bad) -> Result<(), BackupError> {
    let known = stream.lock().damaged.as_ref().is_some_and(|ranges| {
        let covers = |(start, end): &(u64, u64)| *start <= bad.start && bad.end <= *end;
        ranges.iter().any(covers)
    });
    if known {
        return Ok(());
    }
    job.damage(format!(
        "{file}: bytes {}..{} of stream {:?}: {}",
        bad.start, bad.end, stream.path, bad.what
    ))
}

fn all_bad(extent: &Extent, what: &str) -> Bad {
    Bad {
        start: extent.start,
        end: extent.end(),
        what: what.to_owned(),
    }
}

/// Copies the segments of every stream, in the order of their paths.
pub fn copy_segments(
    job: &mut Job<'_>,
    catalog: &Catalog,
    packs: &BTreeMap<u32, PackCopy>,
    manifest: &mut ManifestWriter,
) -> Result<(), BackupError> {
    job.to.create_dir_all(SEGMENTS_DIRECTORY)?;
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
            if let Some(stream) = stream {
                copy_stream(job, stream, packs, manifest)?;
            }
        }
    }
}

fn copy_stream(
    job: &mut Job<'_>,
    stream: &Stream,
    packs: &BTreeMap<u32, PackCopy>,
    manifest: &mut ManifestWriter,
) -> Result<(), BackupError> {
    let extents = Arc::clone(&stream.lock().extents);
    let mut segments: BTreeMap<(StreamId, u32), Vec<Extent>> = BTreeMap::new();
    for extent in extents.iter() {
        match extent.file {
            FileRef::Segment { owner, number } => {
                segments.entry((owner, number)).or_default().push(*extent);
            }
            FileRef::Pack { number } => check_in_pack(job, stream, extent, number, packs)?,
            FileRef::Spill { .. } => {
                let bad = all_bad(extent, "they lie in a file that ends with the process");
                tell_bad(job, stream, CATALOG_FILE, &bad)?;
            }
        }
    }
    for ((owner, number), extents) in segments {
        copy_segment(job, stream, owner, number, &extents, manifest)?;
    }
    Ok(())
}

/// What the walk over the pack could not see of one stream's extent.
fn check_in_pack(
    job: &mut Job<'_>,
    stream: &Stream,
    extent: &Extent,
    number: u32,
    packs: &BTreeMap<u32, PackCopy>,
) -> Result<(), BackupError> {
    let path = pack::path(number);
    let Some(copied) = packs.get(&number) else {
        return tell_bad(job, stream, &path, &all_bad(extent, "the file is missing"));
    };
    if extent.file_position.saturating_add(extent.len) > copied.bytes {
        return tell_bad(job, stream, &path, &all_bad(extent, "the file is short"));
    }
    if copied.checked {
        return Ok(());
    }
    let file = job.to.open(&path, OpenMode::Read)?;
    let mut found = Vec::new();
    check_extent(&*file, &*file, extent, &mut |bad| found.push(bad))
        .map_err(|error| BackupError::at(&path, &error))?;
    found
        .iter()
        .try_for_each(|bad| tell_bad(job, stream, &path, bad))
}

fn copy_segment(
    job: &mut Job<'_>,
    stream: &Stream,
    owner: StreamId,
    number: u32,
    extents: &[Extent],
    manifest: &mut ManifestWriter,
) -> Result<(), BackupError> {
    job.to
        .create_dir_all(&segment::bucket_directory(segment::bucket(owner)))?;
    let data_path = segment::path(owner, number, Part::Data);
    let index_path = segment::path(owner, number, Part::Index);
    let end_of = |position: u64, len: u64| position.saturating_add(len);
    let data_end = extents
        .iter()
        .map(|extent| end_of(extent.file_position, extent.len))
        .max();
    let index_end = extents
        .iter()
        .map(|extent| {
            let len = u64::from(extent.index_count) * INDEX_ENTRY_BYTES as u64;
            end_of(extent.index_position, len)
        })
        .max();
    for (path, end) in [(&data_path, data_end), (&index_path, index_end)] {
        match copy_file(job, path, end.unwrap_or(0))? {
            Some(record) => manifest.add(&record)?,
            None => {
                let bad = |extent| all_bad(extent, "the file is missing");
                let mut bads = extents.iter().map(bad);
                return bads.try_for_each(|bad| tell_bad(job, stream, path, &bad));
            }
        }
    }
    let data = job.to.open(&data_path, OpenMode::Read)?;
    let index = job.to.open(&index_path, OpenMode::Read)?;
    let mut found = Vec::new();
    for extent in extents {
        check_extent(&*data, &*index, extent, &mut |bad| found.push(bad))
            .map_err(|error| BackupError::at(&data_path, &error))?;
    }
    found
        .iter()
        .try_for_each(|bad| tell_bad(job, stream, &data_path, bad))
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
