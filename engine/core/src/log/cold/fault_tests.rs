//! Cold storage when things go wrong: dead checkpoints, damaged and missing files, callers' mistakes.

use super::tests::{BIG, Model, SMALL, checkpoint};
use super::*;
use crate::io::OpenMode;
use crate::io::tests::CrashDisk;
use std::collections::HashSet;

#[test]
fn leftovers_of_a_dead_checkpoint_are_overwritten() {
    let disk = CrashDisk::new();
    let mut stream = Model::new(4);
    {
        let store = ColdStore::new(disk.clone(), 16).unwrap();
        stream.append(BIG, 1, 1);
        checkpoint(&store, [&mut stream]);
        let mut dead = Model::new(4);
        dead.extents = stream.extents.clone();
        (dead.bytes, dead.index) = (stream.bytes.clone(), stream.index.clone());
        dead.stored = stream.stored;
        for _ in 0..3 {
            dead.append(BIG * 2, 9, 9);
        }
        let mut writer = store.begin_checkpoint(&|| {});
        dead.add_to(&mut writer).unwrap();
        let mut tiny = Model::new(5);
        tiny.append(SMALL, 1, 1);
        tiny.add_to(&mut writer).unwrap();
        writer.finish().unwrap(); // the catalog never hears of it
    }
    let store = ColdStore::new(disk.clone(), 16).unwrap();
    stream.check(&store);
    stream.append(BIG, 1, 1);
    let mut tiny = Model::new(6);
    tiny.append(SMALL, 1, 1);
    let summary = checkpoint(&store, [&mut stream, &mut tiny]);
    assert_eq!(summary.packs, [1], "numbers go on after the orphan");
    assert_eq!(stream.extents.len(), 1);
    stream.check(&store);
    tiny.check(&store);
    let live: Vec<(u32, u64)> = summary
        .pack_live
        .iter()
        .map(|(number, bytes)| (*number, *bytes as u64))
        .collect();
    let usage = store.pack_usage(&live).unwrap();
    assert_eq!(
        usage.iter().map(|pack| pack.live_bytes).collect::<Vec<_>>(),
        [0, live[0].1]
    );
    assert_eq!(usage[1].file_bytes, 16 + live[0].1);
    store.remove_pack(0).unwrap();
    store.remove_pack(0).unwrap();
    assert_eq!(disk.file_len("packs/00000000.pack"), None);
    tiny.check(&store);
}

#[test]
fn damaged_packs_stay_where_they_are_and_the_stream_goes_on() {
    let disk = CrashDisk::new();
    let store = ColdStore::new(disk.clone(), 16).unwrap();
    let mut streams = [Model::new(1), Model::new(2)];
    streams
        .iter_mut()
        .for_each(|stream| stream.append(SMALL, 1, 1));
    checkpoint(&store, &mut streams);
    disk.flip_bit(
        "packs/00000000.pack",
        streams[0].extents[0].file_position + 50,
        3,
    );
    streams
        .iter_mut()
        .for_each(|stream| stream.append(BIG, 1, 1));
    let summary = checkpoint(&store, &mut streams);
    assert_eq!(summary.damaged, [StreamId(1)]);
    assert_eq!(streams.iter().map(Model::packs).collect::<Vec<_>>(), [1, 0]);
    streams[1].check(&store);
    let mut tail = vec![0u8; BIG];
    assert_eq!(
        store
            .read(&streams[0].extents, SMALL as u64, &mut tail)
            .unwrap(),
        BIG
    );
    assert!(tail == streams[0].bytes[SMALL..]);
    let mut writer = store.begin_checkpoint(&|| {});
    let before = streams[0].extents.clone();
    writer
        .rewrite(StreamId(1), &mut streams[0].extents, &HashSet::new())
        .unwrap();
    assert_eq!(writer.finish().unwrap().damaged, [StreamId(1)]);
    assert_eq!(streams[0].extents, before);
}

#[test]
fn a_short_or_missing_segment_is_an_error_and_is_not_written_behind() {
    for missing in [false, true] {
        let disk = CrashDisk::new();
        let store = ColdStore::new(disk.clone(), 16).unwrap();
        let mut stream = Model::new(1);
        stream.append(BIG, 1, 1);
        checkpoint(&store, [&mut stream]);
        let path = "segments/01/0000000000000001-00000000.seg";
        if missing {
            disk.remove(path).unwrap();
        } else {
            disk.truncate(path, BIG - 1);
            let short = store
                .read(&stream.extents, 0, &mut vec![0u8; BIG])
                .unwrap_err();
            assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
            assert!(short.to_string().contains(path), "{short}");
            assert_eq!(store.read(&stream.extents, 0, &mut [0u8; 10]).unwrap(), 10);
        }
        stream.append(BIG, 1, 1);
        assert_eq!(checkpoint(&store, [&mut stream]).damaged, [StreamId(1)]);
        let FileRef::Segment { number, .. } = stream.extents[1].file else {
            panic!("a segment")
        };
        assert_eq!((stream.extents.len(), number), (2, 1));
        let mut tail = vec![0u8; BIG];
        assert_eq!(
            store.read(&stream.extents, BIG as u64, &mut tail).unwrap(),
            BIG
        );
        assert!(tail == stream.bytes[BIG..]);
    }
}

#[test]
fn a_damaged_index_is_noticed() {
    let disk = CrashDisk::new();
    let store = ColdStore::new(disk.clone(), 16).unwrap();
    let mut stream = Model::new(1);
    stream.append(BIG, 1, 1);
    checkpoint(&store, [&mut stream]);
    disk.flip_bit("segments/01/0000000000000001-00000000.idx", 6, 0);
    let kind = |error: io::Error| error.kind();
    assert_eq!(
        store.entry_at_or_after(&stream.extents, 1).map_err(kind),
        Err(io::ErrorKind::InvalidData)
    );
    assert_eq!(
        store.entries(&stream.extents, 0, 10).map_err(kind),
        Err(io::ErrorKind::InvalidData)
    );
}

#[test]
fn mistakes_of_the_caller_are_refused_and_void_the_checkpoint() {
    let store = ColdStore::new(CrashDisk::new(), 16).unwrap();
    let mut stream = Model::new(1);
    stream.append(SMALL, 1, 1);
    checkpoint(&store, [&mut stream]);
    let entry = |end| IndexEntry {
        end,
        records: 2,
        time_ms: 2000,
        crc: 0,
    };
    for (start, bytes, index) in [
        (99, &b"a"[..], vec![entry(100)]),
        (100, b"a", vec![]),
        (100, b"a", vec![entry(102)]),
        (100, b"ab", vec![entry(102), entry(102)]),
    ] {
        let mut writer = store.begin_checkpoint(&|| {});
        let mut extents = stream.extents.clone();
        let refused = writer
            .add(stream.id, &mut extents, start, 1, bytes, &index)
            .unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(extents, stream.extents);
        assert!(writer.finish().is_err());
    }
}

#[test]
fn orphaned_segments_are_swept_and_live_ones_stay() {
    let disk = CrashDisk::new();
    let store = ColdStore::new(disk.clone(), 16).unwrap();
    let mut streams: Vec<Model> = (0..4).map(Model::new).collect();
    streams
        .iter_mut()
        .for_each(|stream| stream.append(BIG, 1, 1));
    checkpoint(&store, &mut streams);
    drop(
        disk.open("segments/00/foreign", OpenMode::CreateNew)
            .unwrap(),
    );
    assert_eq!(
        store
            .sweep_segments(&mut |owner, _| owner.0 % 2 == 0)
            .unwrap(),
        4
    );
    streams
        .iter()
        .step_by(2)
        .for_each(|stream| stream.check(&store));
    assert_eq!(
        disk.file_len("segments/01/0000000000000001-00000000.seg"),
        None
    );
    assert_eq!(disk.file_len("segments/00/foreign"), Some(0));
}

#[test]
fn a_path_used_again_is_not_served_from_the_removed_file() {
    let store = ColdStore::new(CrashDisk::new(), 16).unwrap();
    let mut old = Model::new(1);
    old.append(BIG, 1, 1);
    checkpoint(&store, [&mut old]);
    old.check(&store);
    store.remove_stream(&old.extents).unwrap();
    let mut new = Model::new(1);
    new.append(1, 1, 1);
    new.append(BIG, 1, 1);
    checkpoint(&store, [&mut new]);
    new.check(&store);
}

/// The disk fails at each operation of a checkpoint in turn, then the power goes: the extents from before still
/// read whole, and the checkpoint can be repeated from them.
#[test]
fn a_checkpoint_may_die_at_any_operation() {
    let mut step = 1;
    loop {
        let disk = CrashDisk::new();
        let mut streams: Vec<Model> = (0..8).map(Model::new).collect();
        let store = ColdStore::new(disk.clone(), 16).unwrap();
        for round in 0..3 {
            for stream in &mut streams {
                let big = stream.id.0 % 2 == 0 || round == 2 && stream.id.0 < 4;
                stream.append(if big { BIG + 777 } else { SMALL }, 2, 1);
            }
            if round < 2 {
                checkpoint(&store, &mut streams);
            }
        }
        let before: Vec<_> = streams
            .iter()
            .map(|stream| (stream.extents.clone(), stream.stored))
            .collect();
        disk.fail_from(disk.operations() + step);
        let mut writer = store.begin_checkpoint(&|| {});
        let added = streams
            .iter_mut()
            .try_for_each(|stream| stream.add_to(&mut writer));
        let finished = added.and_then(|()| writer.finish()).is_ok();
        disk.fail_from(0);
        disk.power_cut(step);
        let store = ColdStore::new(disk.clone(), 16).unwrap();
        if finished {
            streams.iter().for_each(|stream| stream.check(&store));
            assert!(step > 20, "the faults did not reach the checkpoint");
            return;
        }
        for (stream, (extents, stored)) in streams.iter_mut().zip(before) {
            (stream.extents, stream.stored) = (extents, stored);
            stream.check(&store);
        }
        checkpoint(&store, &mut streams);
        disk.power_cut(step + 1);
        streams.iter().for_each(|stream| stream.check(&store));
        step += 1;
    }
}
