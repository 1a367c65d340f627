//! The list of a backup's files: written, read back, and refused when it is anything else.

use super::*;
use crate::io::tests::TestDirectory;

fn record(number: u64) -> FileRecord {
    FileRecord {
        path: format!("packs/{number:08x}.pack"),
        bytes: number * 7,
        crc: number as u32 ^ 0xdead_beef,
    }
}

fn read_back(disk: &dyn Disk) -> io::Result<Vec<FileRecord>> {
    let mut found = Vec::new();
    read_files(disk, &mut |record| {
        found.push(record);
        Ok::<(), io::Error>(())
    })?;
    Ok(found)
}

#[test]
fn a_manifest_larger_than_its_buffers_is_read_as_it_was_written() {
    for count in [0, 1, 10_000] {
        let directory = TestDirectory::new();
        let disk = directory.disk();
        let wanted: Vec<FileRecord> = (0..count).map(record).collect();
        let mut writer = ManifestWriter::create(&*disk).expect("creates");
        wanted
            .iter()
            .try_for_each(|record| writer.add(record))
            .expect("adds");
        assert_eq!(writer.files, count);
        let manifest = writer.finish(&[("commit_number", 9)]).expect("finishes");
        write_mark(&*disk, &manifest).expect("marks");
        assert_eq!(read_mark(&*disk), Ok(manifest));
        assert_eq!(read_back(&*disk).expect("reads"), wanted);
        let text = std::fs::read_to_string(directory.path().join(MANIFEST_FILE)).expect("text");
        let json: serde_json::Value = serde_json::from_str(&text).expect("is JSON");
        assert_eq!(json["files"].as_array().map(Vec::len), Some(count as usize));
        assert_eq!(json["commit_number"], 9);
    }
}

#[test]
fn a_cut_or_changed_manifest_is_refused() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let mut writer = ManifestWriter::create(&*disk).expect("creates");
    (0..3)
        .try_for_each(|number| writer.add(&record(number)))
        .expect("adds");
    writer.finish(&[("streams", 1)]).expect("finishes");
    let path = directory.path().join(MANIFEST_FILE);
    let whole = std::fs::read_to_string(&path).expect("text");
    for damaged in [
        whole[..whole.find("],").expect("end")].to_owned(),
        whole.replace("\"bytes\": 7", "\"bytes\": 07"),
        whole.replace("crc32c", "crc32"),
        String::new(),
    ] {
        std::fs::write(&path, &damaged).expect("written");
        assert!(read_back(&*disk).is_err(), "{damaged}");
    }
}

#[test]
fn a_mark_says_what_is_wrong_with_it() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let refused = read_mark(&*disk).expect_err("no mark");
    assert!(refused.contains("not finished"), "{refused}");
    let path = directory.path().join(MARK_FILE);
    for (text, part) in [
        ("millstream 99\nbackup.json 1 00000000\n", "millstream 99"),
        ("millstream 1\nbackup.json one 00000000\n", "damaged"),
        ("millstream 1\n", "damaged"),
    ] {
        std::fs::write(&path, text).expect("written");
        let refused = read_mark(&*disk).expect_err("refused");
        assert!(refused.contains(part), "{refused}");
    }
}
