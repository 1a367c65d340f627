//! The index: encoding, searches and damage.

use super::*;
use crate::io::tests::CrashDisk;
use crate::io::{Disk, OpenMode, write_all_at};
use crate::model::{FileRef, StreamId};

const ENTRY: IndexEntry = IndexEntry {
    end: 8,
    records: 1,
    time_ms: 1_700_000_000_000,
    crc: 0x0102_0304,
};

#[test]
fn an_entry_is_thirty_two_bytes_little_endian() {
    let mut bytes = Vec::new();
    encode(&ENTRY, &mut bytes);
    assert_eq!(bytes.len(), INDEX_ENTRY_BYTES);
    assert_eq!(bytes[..8], [8, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[24..28], [4, 3, 2, 1]);
    assert_eq!(decode(&bytes), Some(ENTRY));
    assert_eq!(decode(&bytes[..31]), None);
    for bit in 0..INDEX_ENTRY_BYTES * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(decode(&damaged), None, "bit {bit}");
    }
}

#[test]
fn a_search_finds_every_entry_at_every_size() {
    for count in [1u32, 2, 127, 128, 129, 130, 257, 1000] {
        let disk = CrashDisk::new();
        let file = disk.open("index", OpenMode::CreateNew).unwrap();
        let mut bytes = vec![0u8; 8];
        for number in 0..count {
            let end = u64::from(number + 1) * 10;
            encode(
                &IndexEntry {
                    end,
                    records: end,
                    time_ms: 1,
                    crc: 0,
                },
                &mut bytes,
            );
        }
        write_all_at(&*file, &bytes, 0).unwrap();
        let extent = Extent {
            start: 0,
            len: u64::from(count) * 10,
            file: FileRef::Segment {
                owner: StreamId(1),
                number: 0,
            },
            file_position: 0,
            index_position: 8,
            index_count: count,
            base_records: 0,
        };
        for number in 0..count {
            let end = u64::from(number + 1) * 10;
            let (found, entry) = search(&*file, &extent, &|entry| entry.end < end).unwrap();
            assert_eq!((found, entry.map(|entry| entry.end)), (number, Some(end)));
        }
        assert_eq!(search(&*file, &extent, &|_| true).unwrap(), (count, None));
    }
}

#[test]
fn order_and_checksums_are_checked() {
    let crc = crc32c::crc32c(b"abcd");
    let good = [IndexEntry {
        end: 14,
        records: 3,
        time_ms: 5,
        crc,
    }];
    assert_eq!(check_bytes(10, 2, b"abcd", &good), Ok(()));
    assert!(
        check_bytes(10, 2, b"abcx", &good)
            .unwrap_err()
            .contains("10..14")
    );
    assert!(check_bytes(10, 4, b"abcd", &good).is_err(), "records fall");
    assert!(
        check_bytes(9, 2, b"abcd", &good).is_err(),
        "does not end where the bytes end"
    );
    assert!(
        check_bytes(14, 2, b"", &good).is_err(),
        "an append of no bytes"
    );
    let later = IndexEntry {
        end: 15,
        records: 3,
        time_ms: 4,
        crc: 0,
    };
    assert!(
        check_order(10, 2, 5, &[good[0], later]).is_err(),
        "time falls"
    );
    assert_eq!(check_order(10, 2, 0, &[]), Ok(()));
}
