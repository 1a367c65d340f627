//! A stage is found again whole, or not at all.

use super::*;
use crate::io::tests::TestDirectory;
use crate::log::cold::ColdStore;

fn entries(lengths: &[u64]) -> Vec<IndexEntry> {
    let (mut end, mut records) = (0, 0);
    let entry = |length: &u64| {
        end += length;
        records += 1;
        IndexEntry {
            end,
            records,
            time_ms: 0,
            crc: *length as u32,
        }
    };
    lengths.iter().map(entry).collect()
}

fn head() -> StageHead {
    StageHead {
        id: "task-1.0".into(),
        time_ms: 77,
        body_bytes: 4000,
        checksum: 0x1234_5678,
        rows: 3,
    }
}

#[test]
fn a_stage_is_found_again_and_its_sections_read_back() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let store = ColdStore::new(disk.clone(), 16).expect("opens");
    let (first, second) = (entries(&[5, 6]), entries(&[3]));
    let sections = [
        StageSection {
            stream: StreamId(9),
            name: "a/ä",
            bytes: b"hello world",
            index: &first,
        },
        StageSection {
            stream: StreamId(11),
            name: "b",
            bytes: b"abc",
            index: &second,
        },
    ];
    let record = store
        .write_stage(head(), &sections, &|| Ok(()))
        .expect("writes");
    assert!(record.file_bytes <= file_bytes(&head(), &sections));
    let file = disk
        .open(&pack::path(record.pack), OpenMode::Read)
        .expect("opens");
    assert_eq!(file.len().expect("length"), record.file_bytes);
    assert_eq!(
        read(&*disk, record.pack).expect("reads"),
        Some(record.clone())
    );
    let again = ColdStore::new(disk, 16).expect("opens again");
    let found = again.find_stages(&[], &[]).expect("looks");
    assert_eq!(found.as_slice(), std::slice::from_ref(&record));
    assert!(
        again.find_stages(&[], &[]).expect("looks").is_empty(),
        "kept now"
    );
    let third = ColdStore::new(directory.disk(), 16).expect("opens again");
    let other = UsedUp::new(record.pack, 78, &record.head.id);
    let found = third.find_stages(&[], &[other]).expect("looks");
    assert_eq!(found.len(), 1, "another stage under the same number");
    let [a, b] = &record.streams[..] else {
        panic!("two streams");
    };
    assert_eq!((&*a.name, a.section.records), ("a/ä", 2));
    assert_eq!(again.relative_index(&a.section).expect("index"), first);
    assert_eq!(again.relative_index(&b.section).expect("index"), second);
    let mut bytes = [0; 5];
    again.read_staged(&a.section, 6, &mut bytes).expect("reads");
    assert_eq!(&bytes, b"world");
}

#[test]
fn a_cut_or_damaged_file_is_no_stage_and_not_an_error() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let index = entries(&[100]);
    let sections = [StageSection {
        stream: StreamId(9),
        name: "s",
        bytes: &[7; 100],
        index: &index,
    }];
    let record = write(&*disk_with_packs(&disk), 3, head(), &sections, &|| Ok(())).expect("writes");
    let file = disk
        .open(&pack::path(3), OpenMode::ReadWrite)
        .expect("opens");
    let mut whole = vec![0; record.file_bytes as usize];
    read_exact_at(&*file, &mut whole, 0).expect("reads");
    let record_at = whole
        .windows(8)
        .position(|window| window == MAGIC)
        .expect("has a record");
    for at in record_at..record_at + RECORD_HEADER_BYTES + 60 {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x41;
        write_all_at(&*file, &damaged, 0).expect("writes");
        assert_eq!(read(&*disk, 3).expect("reads"), None, "byte {at}");
    }
    for len in 0..whole.len() as u64 {
        write_all_at(&*file, &whole, 0).expect("writes");
        file.set_len(len).expect("cuts");
        assert_eq!(read(&*disk, 3).expect("reads"), None, "cut at {len}");
    }
}

fn disk_with_packs(disk: &std::sync::Arc<dyn Disk>) -> std::sync::Arc<dyn Disk> {
    disk.create_dir_all(PACKS_DIRECTORY).expect("creates");
    std::sync::Arc::clone(disk)
}

#[test]
fn an_empty_stage_has_a_record_too() {
    let directory = TestDirectory::new();
    let disk = disk_with_packs(&directory.disk());
    let record = write(&*disk, 0, head(), &[], &|| Ok(())).expect("writes");
    assert_eq!(read(&*disk, 0).expect("reads"), Some(record));
}

#[test]
fn a_stage_that_was_copied_is_not_offered_again() {
    let directory = TestDirectory::new();
    let store = ColdStore::new(directory.disk(), 16).expect("opens");
    let record = store.write_stage(head(), &[], &|| Ok(())).expect("writes");
    let again = ColdStore::new(directory.disk(), 16).expect("opens again");
    let found = again.find_stages(&[], &[record.used_up()]).expect("looks");
    assert!(found.is_empty());
    let left = directory.disk().list(PACKS_DIRECTORY).expect("lists");
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_stage_that_is_given_up_at_any_moment_leaves_no_file() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let store = ColdStore::new(disk.clone(), 16).expect("opens");
    let index = entries(&[5, 6]);
    let section = |stream| StageSection {
        stream: StreamId(stream),
        name: "a",
        bytes: b"hello world",
        index: &index,
    };
    let sections = [section(9), section(11)];
    let files = || disk.list(PACKS_DIRECTORY).expect("listed").len();
    let before = files();
    for moments in 0usize.. {
        let left = std::cell::Cell::new(moments);
        let go_on = || {
            let next = left.get().checked_sub(1);
            left.set(next.ok_or_else(|| io::Error::other("enough"))?);
            Ok(())
        };
        match store.write_stage(head(), &sections, &go_on) {
            Err(error) => assert_eq!((error.to_string(), files()), ("enough".into(), before)),
            Ok(_) => {
                assert!(
                    moments > sections.len(),
                    "each section, and before the sync"
                );
                break;
            }
        }
    }
}
