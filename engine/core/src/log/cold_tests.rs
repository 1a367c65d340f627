//! Cold storage against a naive model, on the real file system and on a disk that loses what was not synced.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::io::tests::{CrashDisk, TestDirectory};
use crate::log::pack::PACK_EXTENTS_MAX;
use crate::log::segment::{SEGMENT_MAX_BYTES, SEGMENT_MIN_BYTES};

pub(super) const SMALL: usize = 100;
pub(super) const BIG: usize = SEGMENT_MIN_BYTES as usize;

/// A stream with everything it should contain.
pub(super) struct Model {
    pub(super) id: StreamId,
    pub(super) extents: Vec<Extent>,
    pub(super) bytes: Vec<u8>,
    pub(super) index: Vec<IndexEntry>,
    /// How much of it is checkpointed: bytes and entries.
    pub(super) stored: (usize, usize),
}

impl Model {
    pub(super) fn new(id: u64) -> Model {
        let id = StreamId(id);
        Model {
            id,
            extents: Vec::new(),
            bytes: Vec::new(),
            index: Vec::new(),
            stored: (0, 0),
        }
    }

    pub(super) fn append(&mut self, len: usize, records: u64, time_step_ms: u64) {
        let fill = (self.id.0 as usize * 31 + self.index.len() * 7) as u8;
        let block: Vec<u8> = (0..251).map(|at| fill.wrapping_add(at)).collect();
        let mut bytes = block.repeat(len / block.len() + 1);
        bytes.truncate(len);
        let last = self.index.last().copied();
        self.index.push(IndexEntry {
            end: (self.bytes.len() + len) as u64,
            records: last.map_or(0, |entry| entry.records) + records,
            time_ms: last.map_or(1000, |entry| entry.time_ms) + time_step_ms,
            crc: crc32c::crc32c(&bytes),
        });
        self.bytes.extend(bytes);
    }

    pub(super) fn add_to(&mut self, writer: &mut CheckpointWriter<'_>) -> io::Result<()> {
        let (bytes, entries) = self.stored;
        let base_records = entries
            .checked_sub(1)
            .map_or(0, |last| self.index[last].records);
        let mut extents = self.extents.clone();
        writer.add(
            self.id,
            &mut extents,
            bytes as u64,
            base_records,
            &self.bytes[bytes..],
            &self.index[entries..],
        )?;
        self.extents = extents;
        self.stored = (self.bytes.len(), self.index.len());
        Ok(())
    }

    pub(super) fn check(&self, store: &ColdStore) {
        let (stored, entries) = self.stored;
        let mut position = self.extents.first().map_or(0, |extent| extent.start);
        for extent in &self.extents {
            assert_eq!(extent.start, position, "extents are contiguous");
            position = end_of(extent);
        }
        assert_eq!(position, stored as u64);
        let mut buffer = vec![0u8; stored + 10];
        assert_eq!(store.read(&self.extents, 0, &mut buffer).unwrap(), stored);
        assert!(
            buffer[..stored] == self.bytes[..stored],
            "bytes of {:?} differ",
            self.id
        );
        assert_eq!(
            store.entries(&self.extents, 0, usize::MAX).unwrap(),
            self.index[..entries]
        );
    }

    fn check_searches(&self, store: &ColdStore, number: u64) {
        let index = &self.index[..self.stored.1];
        let extents = &self.extents;
        let first = |test: &dyn Fn(&IndexEntry) -> bool| index.iter().copied().find(|e| test(e));
        let limit = number as usize % 7;
        assert_eq!(
            store.entry_at_or_after(extents, number).unwrap(),
            first(&|entry| entry.end >= number)
        );
        assert_eq!(
            store.entry_at_or_before(extents, number).unwrap(),
            index.iter().copied().rfind(|entry| entry.end <= number)
        );
        assert_eq!(
            store.entry_by_records(extents, number).unwrap(),
            first(&|entry| entry.records >= number)
        );
        assert_eq!(
            store.entry_by_time(extents, number).unwrap(),
            first(&|entry| entry.time_ms >= number)
        );
        let after = index.iter().copied().filter(|entry| entry.end > number);
        assert_eq!(
            store.entries(extents, number, limit).unwrap(),
            after.take(limit).collect::<Vec<_>>()
        );
    }

    pub(super) fn packs(&self) -> usize {
        let is_pack = |extent: &&Extent| matches!(extent.file, FileRef::Pack { .. });
        self.extents.iter().filter(is_pack).count()
    }
}

pub(super) fn checkpoint<'m>(
    store: &ColdStore,
    streams: impl IntoIterator<Item = &'m mut Model>,
) -> CheckpointSummary {
    let mut writer = store.begin_checkpoint(&|| {});
    for stream in streams {
        stream.add_to(&mut writer).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn small_streams_share_a_pack_and_big_ones_have_a_segment() {
    let directory = TestDirectory::new();
    let store = ColdStore::new(directory.disk(), 16).unwrap();
    let mut streams: Vec<Model> = (0..10).map(Model::new).collect();
    for stream in &mut streams {
        stream.append(if stream.id.0 < 5 { SMALL } else { BIG }, 1, 1);
    }
    let summary = checkpoint(&store, &mut streams);
    assert_eq!((summary.packs.as_slice(), summary.segments), (&[0][..], 5));
    assert_eq!(
        summary.pack_live,
        [(0, 5 * section_bytes(SMALL as u64, 1) as i64)]
    );
    assert_eq!(summary.bytes, 5 * (SMALL + BIG) as u64);
    streams.iter().for_each(|stream| stream.check(&store));
    assert_eq!(
        store.pack_streams(0).unwrap(),
        (0..5).map(StreamId).collect::<Vec<_>>()
    );
    let on_disk = std::fs::read(
        directory
            .path()
            .join("segments/07/0000000000000007-00000000.seg"),
    );
    assert_eq!(
        on_disk.unwrap(),
        streams[7].bytes,
        "a segment is exactly the wire bytes"
    );
}

#[test]
fn a_segment_grows_in_place_and_absorbs_the_packs_behind_it() {
    let disk = CrashDisk::new();
    let store = ColdStore::new(disk.clone(), 16).unwrap();
    let mut stream = Model::new(9);
    for (len, extents, packs) in [
        (BIG, 1, 0),
        (BIG, 1, 0),
        (SMALL, 2, 1),
        (SMALL, 3, 2),
        (BIG, 1, 0),
        (SMALL, 2, 1),
    ] {
        stream.append(len, 1, 1);
        let summary = checkpoint(&store, [&mut stream]);
        assert_eq!(
            (stream.extents.len(), stream.packs()),
            (extents, packs),
            "after {len}"
        );
        stream.check(&store);
        if len == BIG && stream.index.len() == 5 {
            let gone = -(section_bytes(SMALL as u64, 1) as i64);
            assert_eq!(summary.pack_live, [(0, gone), (1, gone)]);
        }
    }
}

#[test]
fn many_pack_extents_are_merged_and_leave_for_a_segment_when_they_outgrow_it() {
    let disk = CrashDisk::new();
    let store = ColdStore::new(disk.clone(), 16).unwrap();
    let (mut tiny, mut larger) = (Model::new(1), Model::new(2));
    let mut live = BTreeMap::new();
    for _ in 0..3 * PACK_EXTENTS_MAX {
        tiny.append(SMALL, 1, 1);
        larger.append(BIG / 8, 1, 1);
        for (number, change) in checkpoint(&store, [&mut tiny, &mut larger]).pack_live {
            *live.entry(number).or_insert(0) += change;
        }
        assert!(tiny.packs() <= PACK_EXTENTS_MAX + 1 && larger.packs() <= PACK_EXTENTS_MAX + 1);
        tiny.check(&store);
        larger.check(&store);
    }
    assert_eq!(
        tiny.packs(),
        tiny.extents.len(),
        "100 bytes at a time never need a file"
    );
    assert!(matches!(larger.extents[0].file, FileRef::Segment { .. }));
    // What the deltas add up to is exactly what the extents hold.
    let mut held: BTreeMap<u32, i64> = BTreeMap::new();
    for (number, released) in pack_release(&tiny.extents)
        .into_iter()
        .chain(pack_release(&larger.extents))
    {
        *held.entry(number).or_insert(0) -= released;
    }
    live.retain(|_, bytes| *bytes != 0);
    assert_eq!(live, held);
}

#[test]
fn a_stream_may_be_added_twice_in_one_checkpoint() {
    let store = ColdStore::new(CrashDisk::new(), 16).unwrap();
    for lens in [[SMALL, SMALL, BIG], [SMALL, BIG, SMALL], [BIG, BIG, BIG]] {
        let mut stream = Model::new(lens.iter().sum::<usize>() as u64);
        let mut writer = store.begin_checkpoint(&|| {});
        for len in lens {
            stream.append(len, 1, 1);
            stream.add_to(&mut writer).unwrap();
        }
        assert_eq!(writer.finish().unwrap().damaged, []);
        assert_eq!(stream.extents.len(), if lens[2] == BIG { 1 } else { 2 });
        stream.check(&store);
    }
}

#[test]
fn segments_roll_over_on_an_append_boundary() {
    let directory = TestDirectory::new();
    let store = ColdStore::new(directory.disk(), 16).unwrap();
    let mut stream = Model::new(3);
    for _ in 0..7 {
        stream.append(20 << 20, 1, 1);
    }
    checkpoint(&store, [&mut stream]);
    stream.append(20 << 20, 1, 1);
    stream.append(SEGMENT_MAX_BYTES as usize + 1, 1, 1);
    stream.append(1, 1, 1);
    checkpoint(&store, [&mut stream]);
    let lens: Vec<u64> = stream
        .extents
        .iter()
        .map(|extent| extent.len >> 20)
        .collect();
    assert_eq!(lens, [60, 60, 40, 64, 0]);
    stream.check(&store);
    store.remove_stream(&stream.extents).unwrap();
    assert_eq!(directory.disk().list("segments/03").unwrap(), []);
    let gone = store.read(&stream.extents, 0, &mut [0u8; 1]).unwrap_err();
    assert_eq!(gone.kind(), io::ErrorKind::NotFound);
}

#[test]
fn rewriting_empties_old_packs() {
    let disk = CrashDisk::new();
    let store = ColdStore::new(disk.clone(), 16).unwrap();
    let mut streams: Vec<Model> = (0..20).map(Model::new).collect();
    let mut live: BTreeMap<u32, i64> = BTreeMap::new();
    for round in 0..4 {
        for stream in &mut streams {
            stream.append(if stream.id.0 == 3 { BIG - 1 } else { SMALL }, round + 1, 1);
        }
        for (number, change) in checkpoint(&store, &mut streams).pack_live {
            *live.entry(number).or_insert(0) += change;
        }
    }
    let mut writer = store.begin_checkpoint(&|| {});
    for stream in &mut streams {
        writer
            .rewrite(stream.id, &mut stream.extents, &HashSet::new())
            .unwrap();
    }
    for (number, change) in writer.finish().unwrap().pack_live {
        *live.entry(number).or_insert(0) += change;
    }
    for number in 0..4 {
        assert_eq!(live[&number], 0);
        store.remove_pack(number).unwrap();
    }
    for stream in &streams {
        assert_eq!(stream.extents.len(), 1);
        assert_eq!(
            stream.packs(),
            usize::from(stream.id.0 != 3),
            "the big one has a segment"
        );
        stream.check(&store);
    }
}

#[test]
fn five_thousand_streams_keep_within_sixty_four_open_files() {
    let disk = CrashDisk::new();
    let store = ColdStore::new(disk.clone(), 64).unwrap();
    let mut streams: Vec<Model> = (0..5000).map(Model::new).collect();
    for step in [1, 10] {
        for stream in streams.iter_mut().step_by(step) {
            stream.append(BIG, 1, 1);
        }
        checkpoint(&store, &mut streams);
    }
    streams.iter().for_each(|stream| stream.check(&store));
    // One more for a file that is in use while the set is full of others.
    assert!(
        disk.open_peak() <= 64 + 1,
        "{} files were open",
        disk.open_peak()
    );
    assert!(store.files.open_count() <= 48);
    disk.power_cut(1);
    let store = ColdStore::new(disk, 64).unwrap();
    streams
        .iter()
        .step_by(50)
        .for_each(|stream| stream.check(&store));
}

#[test]
fn pieces_lead_to_the_bytes() {
    let store = ColdStore::new(CrashDisk::new(), 16).unwrap();
    let mut stream = Model::new(1);
    stream.append(BIG, 1, 1);
    checkpoint(&store, [&mut stream]);
    stream.append(SMALL, 1, 1);
    checkpoint(&store, [&mut stream]);
    let position = BIG as u64 + 10;
    let piece = store.piece(&stream.extents, position).unwrap().unwrap();
    assert_eq!(piece.len, SMALL as u64 - 10);
    let mut bytes = vec![0u8; piece.len as usize];
    read_exact_at(&*piece.file, &mut bytes, piece.file_position).unwrap();
    assert!(bytes == stream.bytes[position as usize..]);
    assert!(
        store
            .piece(&stream.extents, stream.bytes.len() as u64)
            .unwrap()
            .is_none()
    );
    let trimmed = &stream.extents[1..];
    let before = store.read(trimmed, 0, &mut [0u8; 1]).unwrap_err();
    assert_eq!(before.kind(), io::ErrorKind::InvalidInput);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn searches_and_reads_agree_with_a_naive_model(
        rounds in prop::collection::vec(
            prop::collection::vec((0..3usize, 1..200usize, 0..4u64, 0..3u64), 0..60), 1..14),
        probes in prop::collection::vec((0..3usize, 0.0..1.1f64), 30),
        seed in any::<u64>(),
    ) {
        let disk = CrashDisk::new();
        let store = ColdStore::new(disk.clone(), 8).unwrap();
        let mut streams: Vec<Model> = (0..3).map(|id| Model::new(id * 256)).collect();
        for appends in &rounds {
            for (stream, len, records, time_step_ms) in appends {
                // The third stream is big now and then, so that it mixes segments and packs.
                let len = if *stream == 2 && len % 11 == 0 { BIG } else { *len };
                streams[*stream].append(len, *records, *time_step_ms);
            }
            checkpoint(&store, &mut streams);
        }
        disk.power_cut(seed);
        let store = ColdStore::new(disk, 8).unwrap();
        for stream in &streams {
            stream.check(&store);
        }
        for (stream, share) in probes {
            let stream = &streams[stream];
            let last = stream.index.last().copied();
            let ranges = last.map_or([10, 10, 10], |last| [last.end, last.records, last.time_ms]);
            for range in ranges {
                let number = (range as f64 * share) as u64;
                (number.saturating_sub(1)..=number + 1)
                    .for_each(|number| stream.check_searches(&store, number));
            }
            // Every boundary is where an off-by-one would show.
            for entry in stream.index.iter().step_by(11) {
                stream.check_searches(&store, entry.end);
                stream.check_searches(&store, entry.time_ms);
            }
        }
    }
}
