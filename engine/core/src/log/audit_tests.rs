//! Every flipped byte of a segment or its index is found, and nothing whole is called bad.

use super::*;
use crate::io::tests::TestDirectory;
use crate::io::write_all_at;
use crate::log::index::encode;

const FILE: FileRef = FileRef::Segment {
    owner: StreamId(1),
    number: 0,
};

fn path_of(name: &str) -> String {
    match name {
        "data" => data_path(FILE),
        _ => index_path(FILE),
    }
}

struct Written {
    directory: TestDirectory,
    extent: Extent,
}

/// Appends of the given sizes behind 5 bytes that belong to nobody.
fn written(sizes: &[usize]) -> Written {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let (mut bytes, mut index, mut end) = (b"....!".to_vec(), Vec::new(), 100u64);
    for (number, size) in sizes.iter().enumerate() {
        let append: Vec<u8> = (0..*size).map(|at| (at * 31 + number) as u8).collect();
        end += *size as u64;
        let entry = IndexEntry {
            end,
            records: 7 + number as u64,
            time_ms: 50,
            crc: crc32c::crc32c(&append),
        };
        encode(&entry, &mut index);
        bytes.extend_from_slice(&append);
    }
    for (name, content) in [("data", &bytes), ("index", &index)] {
        let path = path_of(name);
        let (bucket, _) = path.rsplit_once('/').expect("a bucket");
        disk.create_dir_all(bucket).expect("makes");
        let file = disk.open(&path, OpenMode::CreateNew).expect("creates");
        write_all_at(&*file, content, 0).expect("writes");
    }
    Written {
        directory,
        extent: Extent {
            start: 100,
            len: end - 100,
            file: FILE,
            file_position: 5,
            index_position: 0,
            index_count: sizes.len() as u32,
            base_records: 6,
        },
    }
}

impl Written {
    fn bad(&self) -> Vec<Bad> {
        let disk = self.directory.disk();
        let records = self.extent.base_records + u64::from(self.extent.index_count);
        let mut files = Files::new(&*disk);
        let found = examine(
            &mut files,
            StreamId(1),
            &[self.extent],
            records,
            &mut |_| Ok(()),
        );
        found.expect("checks").0
    }

    fn flip(&self, name: &str, at: u64) {
        let disk = self.directory.disk();
        let file = disk
            .open(&path_of(name), OpenMode::ReadWrite)
            .expect("opens");
        let mut byte = [0];
        read_exact_at(&*file, &mut byte, at).expect("reads");
        write_all_at(&*file, &[byte[0] ^ 0x40], at).expect("writes");
    }
}

#[test]
fn whole_bytes_pass_and_each_flipped_byte_is_found() {
    let files = written(&[3, 1, 10, 2]);
    assert_eq!(files.bad(), []);
    for at in 5..21 {
        files.flip("data", at);
        let bad = files.bad();
        assert_eq!(bad.len(), 1, "byte {at}");
        assert!(bad[0].start <= 95 + at && 95 + at < bad[0].end, "{bad:?}");
        files.flip("data", at);
    }
    files.flip("data", 0);
    assert_eq!(files.bad(), [], "what no extent names is not checked");
    for at in 0..4 * 32 {
        files.flip("index", at);
        assert!(!files.bad().is_empty(), "index byte {at}");
        files.flip("index", at);
    }
}

#[test]
fn appends_larger_than_a_window_are_checked_to_their_last_byte() {
    let size = 2 * PIECE_BYTES + 17;
    let files = written(&[size, 5]);
    assert_eq!(files.bad(), []);
    files.flip("data", 5 + size as u64 - 1);
    let bad = files.bad();
    assert_eq!(bad.len(), 1);
    assert_eq!((bad[0].start, bad[0].end), (100, 100 + size as u64));
}

#[test]
fn short_files_are_bad_from_where_they_end() {
    let files = written(&[10, 10, 10]);
    let disk = files.directory.disk();
    let index = disk
        .open(&path_of("index"), OpenMode::ReadWrite)
        .expect("opens");
    index.set_len(40).expect("cut");
    assert_eq!(files.bad().len(), 1);
    let files = written(&[10, 10, 10]);
    let disk = files.directory.disk();
    let data = disk
        .open(&path_of("data"), OpenMode::ReadWrite)
        .expect("opens");
    data.set_len(20).expect("cut");
    let bad = files.bad();
    assert_eq!((bad[0].start, bad[0].end), (110, 130), "{bad:?}");
}
