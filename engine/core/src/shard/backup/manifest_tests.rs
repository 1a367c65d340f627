//! The list of a backup's files, as it is written.

use super::*;
use crate::io::tests::TestDirectory;

fn record(number: u64) -> FileRecord {
    FileRecord {
        path: format!("packs/{number:08x}.pack"),
        bytes: number * 7,
        crc: number as u32 ^ 0xdead_beef,
    }
}

#[test]
fn a_manifest_larger_than_its_buffers_is_whole() {
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
        let mark = std::fs::read_to_string(directory.path().join(MARK_FILE)).expect("mark");
        let checked = format!("backup.json {} {:08x}\n", manifest.bytes, manifest.crc);
        assert_eq!(mark, format!("millstream 1\n{checked}"));
        let text = std::fs::read_to_string(directory.path().join(MANIFEST_FILE)).expect("text");
        let json: serde_json::Value = serde_json::from_str(&text).expect("is JSON");
        assert_eq!(crc32c::crc32c(text.as_bytes()), manifest.crc);
        let files = json["files"].as_array().expect("files");
        assert_eq!(files.len(), wanted.len());
        for (file, record) in files.iter().zip(&wanted) {
            assert_eq!(file["path"], *record.path);
            assert_eq!(file["bytes"], record.bytes);
            assert_eq!(file["crc32c"], format!("{:08x}", record.crc));
        }
        assert_eq!(json["commit_number"], 9);
    }
}
