//! Packs: sections, walks and damage.

use super::*;
use crate::io::tests::CrashDisk;
use crate::io::{Disk, read_exact_at};

fn entry(end: u64) -> IndexEntry {
    IndexEntry {
        end,
        records: end,
        time_ms: 1,
        crc: 0,
    }
}

fn written(streams: u64) -> (Arc<CrashDisk>, Vec<Extent>) {
    let disk = CrashDisk::new();
    disk.create_dir_all(PACKS_DIRECTORY).unwrap();
    let mut writer = PackWriter::create(&*disk, 7).unwrap();
    let mut extents = Vec::new();
    for stream in 0..streams {
        let bytes = vec![stream as u8; 100 + stream as usize % 50];
        let index = [entry(bytes.len() as u64)];
        extents.push(
            writer
                .append(StreamId(stream), 0, 0, &[&bytes], &[&index])
                .unwrap(),
        );
    }
    writer.finish().unwrap();
    (disk, extents)
}

fn walked(disk: &CrashDisk) -> io::Result<Vec<Section>> {
    let file = disk.open(&path(7), OpenMode::Read)?;
    let mut sections = Vec::new();
    walk(&*file, 7, &mut |section| sections.push(section))?;
    Ok(sections)
}

#[test]
fn names_go_there_and_back() {
    assert_eq!(path(0x12ab), "packs/000012ab.pack");
    assert_eq!(parse_name("000012ab.pack"), Some(0x12ab));
    assert_eq!(parse_name("12ab.pack"), None);
    assert_eq!(parse_name("000012ab.pack.tmp"), None);
}

#[test]
fn the_example_of_the_format_holds() {
    let (disk, extents) = written(1);
    assert_eq!(section_bytes(100, 1), 176);
    assert_eq!(disk.file_len(&path(7)), Some(16 + 176));
    assert_eq!(
        (extents[0].file_position, extents[0].index_position),
        (56, 160)
    );
}

#[test]
fn sections_of_many_writes_are_found_again() {
    let (disk, extents) = written(20_000);
    let file = disk.open(&path(7), OpenMode::Read).unwrap();
    let sections = walked(&disk).unwrap();
    assert_eq!(sections.len(), extents.len());
    for (section, extent) in sections.iter().zip(&extents) {
        assert_eq!((section.start, section.len), (extent.start, extent.len));
        let mut bytes = vec![0u8; extent.len as usize];
        read_exact_at(&*file, &mut bytes, extent.file_position).unwrap();
        assert!(bytes.iter().all(|byte| *byte == section.stream.0 as u8));
        assert_eq!(extent.index_position % 8, 0);
    }
    let total: u64 = extents
        .iter()
        .map(|extent| section_bytes(extent.len, 1))
        .sum();
    assert_eq!(disk.file_len(&path(7)), Some(16 + total as usize));
}

#[test]
fn any_flipped_bit_in_a_header_and_any_cut_is_noticed() {
    for byte in (0..16).chain(16..56).chain(192..232) {
        let (disk, _) = written(3);
        disk.flip_bit(&path(7), byte, (byte % 8) as u8);
        let error = walked(&disk).expect_err("a damaged header was believed");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {byte}");
    }
    let (disk, _) = written(3);
    disk.truncate(&path(7), disk.file_len(&path(7)).unwrap() - 1);
    assert_eq!(
        walked(&disk).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
}

#[test]
fn a_pack_under_another_number_is_refused() {
    let (disk, _) = written(3);
    let file = disk.open(&path(7), OpenMode::Read).unwrap();
    assert!(walk(&*file, 8, &mut |_| {}).is_err());
}
