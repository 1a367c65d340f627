//! What a backup consists of: `backup.json` lists every file, `format.backup` says that all of them are there.
//!
//! ```text
//! backup.json     {
//!                 "format": "millstream 1",
//!                 "files": [
//!                 {"path": "catalog.redb", "bytes": 24576, "crc32c": "0a1b2c3d"},
//!                 {"path": "wal/0000000000000001.wal", "bytes": 64, "crc32c": "99887766"}
//!                 ],
//!                 "commit_number": 42, ...
//!                 }
//! format.backup   millstream 1
//!                 backup.json 310 5e4d3c2b        (its length and CRC32C)
//! ```
//! JSON for people and scripts, one file to a line: a million files are written and read without holding them.
//! The reader (`millstream.server.backup_manifest` in Python) takes exactly what is written here.
//!
//! Invariants: `format.backup` is written last, when everything else is synced; the name `format` is never used,
//! so that no server takes a backup for a data directory.

use std::io;
use std::sync::Arc;

use crate::io::{Disk, DiskFile, OpenMode, write_all_at};
use crate::log::format::FORMAT;

pub const MANIFEST_FILE: &str = "backup.json";
pub const MARK_FILE: &str = "format.backup";
const BUFFER_BYTES: usize = 256 * 1024;

/// One file of a backup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileRecord {
    pub path: String,
    pub bytes: u64,
    pub crc: u32,
}

impl FileRecord {
    fn line(&self) -> String {
        format!(
            "{{\"path\": \"{}\", \"bytes\": {}, \"crc32c\": \"{:08x}\"}}",
            self.path, self.bytes, self.crc
        )
    }
}

/// Writes one file from its beginning to its end and knows its checksum.
pub struct SequentialWriter {
    path: String,
    file: Arc<dyn DiskFile>,
    written: u64,
    crc: u32,
}

impl SequentialWriter {
    pub fn create(disk: &dyn Disk, path: &str) -> io::Result<SequentialWriter> {
        Ok(SequentialWriter {
            path: path.to_owned(),
            file: disk.open(path, OpenMode::CreateNew)?,
            written: 0,
            crc: 0,
        })
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        write_all_at(&*self.file, bytes, self.written)?;
        self.written += bytes.len() as u64;
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        Ok(())
    }

    pub fn finish(self) -> io::Result<FileRecord> {
        self.file.sync_all()?;
        Ok(FileRecord {
            path: self.path,
            bytes: self.written,
            crc: self.crc,
        })
    }
}

/// Writes the list as the files are made.
pub struct ManifestWriter {
    out: SequentialWriter,
    buffer: Vec<u8>,
    pub files: u64,
    pub bytes: u64,
}

impl ManifestWriter {
    pub fn create(disk: &dyn Disk) -> io::Result<ManifestWriter> {
        let format = String::from_utf8_lossy(FORMAT).trim().to_owned();
        Ok(ManifestWriter {
            out: SequentialWriter::create(disk, MANIFEST_FILE)?,
            buffer: format!("{{\n\"format\": \"{format}\",\n\"files\": [").into_bytes(),
            files: 0,
            bytes: 0,
        })
    }

    pub fn add(&mut self, record: &FileRecord) -> io::Result<()> {
        let comma = if self.files == 0 { "\n" } else { ",\n" };
        self.buffer.extend_from_slice(comma.as_bytes());
        self.buffer.extend_from_slice(record.line().as_bytes());
        self.files += 1;
        self.bytes += record.bytes;
        if self.buffer.len() >= BUFFER_BYTES {
            self.out.write(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }

    /// Ends the list with numbers about the whole.
    pub fn finish(mut self, numbers: &[(&str, u64)]) -> io::Result<FileRecord> {
        let lines: Vec<String> = numbers
            .iter()
            .map(|(name, value)| format!("\"{name}\": {value}"))
            .collect();
        self.buffer
            .extend_from_slice(format!("\n],\n{}\n}}\n", lines.join(",\n")).as_bytes());
        self.out.write(&self.buffer)?;
        self.out.finish()
    }
}

/// Says that the backup is whole. Everything it lists is synced, names included.
pub fn write_mark(disk: &dyn Disk, manifest: &FileRecord) -> io::Result<()> {
    let mut out = SequentialWriter::create(disk, MARK_FILE)?;
    out.write(FORMAT)?;
    out.write(mark_line(manifest).as_bytes())?;
    out.finish()?;
    disk.sync_dir("")
}

fn mark_line(manifest: &FileRecord) -> String {
    format!(
        "{} {} {:08x}\n",
        manifest.path, manifest.bytes, manifest.crc
    )
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
