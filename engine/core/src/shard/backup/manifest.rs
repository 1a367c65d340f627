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
//! The reader takes exactly what the writer writes; anything else is damage.
//!
//! Invariants: `format.backup` is written last, when everything else is synced; the name `format` is never used,
//! so that no server takes a backup for a data directory.

use std::io;
use std::sync::Arc;

use crate::io::{Disk, DiskFile, OpenMode, read_up_to_at, write_all_at};
use crate::log::format::FORMAT;

pub const MANIFEST_FILE: &str = "backup.json";
pub const MARK_FILE: &str = "format.backup";
const BUFFER_BYTES: usize = 256 * 1024;
/// No line is longer: a path has at most 64 characters.
const LINE_MAX_BYTES: usize = 4096;

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

    /// The inverse of `line`, with or without the comma behind it.
    fn parse(line: &str) -> Option<FileRecord> {
        let line = line.strip_suffix(',').unwrap_or(line);
        let rest = line.strip_prefix("{\"path\": \"")?;
        let (path, rest) = rest.split_once("\", \"bytes\": ")?;
        let (bytes, rest) = rest.split_once(", \"crc32c\": \"")?;
        let record = FileRecord {
            path: path.to_owned(),
            bytes: bytes.parse().ok()?,
            crc: u32::from_str_radix(rest.strip_suffix("\"}")?, 16).ok()?,
        };
        (record.line() == line).then_some(record)
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

/// What the mark says about the manifest. `Err` says in a sentence why this is not a backup that can be restored.
pub fn read_mark(disk: &dyn Disk) -> Result<FileRecord, String> {
    let file = disk.open(MARK_FILE, OpenMode::Read).map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            format!("there is no {MARK_FILE}: this is not a backup, or one that was not finished")
        } else {
            format!("{MARK_FILE}: {error}")
        }
    })?;
    let mut bytes = vec![0; 256];
    let count = read_up_to_at(&*file, &mut bytes, 0)
        .map_err(|error| format!("{MARK_FILE} cannot be read: {error}"))?;
    let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
    let own = String::from_utf8_lossy(FORMAT);
    let Some(line) = text.strip_prefix(&*own) else {
        let found = text.lines().next().unwrap_or("");
        return Err(format!(
            "{MARK_FILE} says {found:?}; this version restores {:?}",
            own.trim()
        ));
    };
    let parts: Vec<&str> = line.trim_end().split(' ').collect();
    let parsed = match parts.as_slice() {
        [MANIFEST_FILE, length, crc] => length.parse().ok().zip(u32::from_str_radix(crc, 16).ok()),
        _ => None,
    };
    parsed
        .map(|(bytes, crc)| FileRecord {
            path: MANIFEST_FILE.to_owned(),
            bytes,
            crc,
        })
        .filter(|record| mark_line(record) == line)
        .ok_or_else(|| format!("{MARK_FILE} is damaged"))
}

fn mark_line(manifest: &FileRecord) -> String {
    format!(
        "{} {} {:08x}\n",
        manifest.path, manifest.bytes, manifest.crc
    )
}

/// Visits every file of a manifest whose checksum has been compared. The visitor's error ends the walk.
pub fn read_files<E: From<io::Error>>(
    disk: &dyn Disk,
    visit: &mut dyn FnMut(FileRecord) -> Result<(), E>,
) -> Result<(), E> {
    let file = disk.open(MANIFEST_FILE, OpenMode::Read)?;
    let damaged = || {
        let what = format!("{MANIFEST_FILE} is not in the form this version writes");
        E::from(io::Error::new(io::ErrorKind::InvalidData, what))
    };
    let mut buffer: Vec<u8> = Vec::new();
    let (mut position, mut in_files, mut done) = (0u64, false, false);
    let mut piece = vec![0; BUFFER_BYTES];
    loop {
        let count = read_up_to_at(&*file, &mut piece, position)?;
        position += count as u64;
        buffer.extend_from_slice(&piece[..count]);
        let mut from = 0;
        while let Some(end) = memchr::memchr(b'\n', &buffer[from..]) {
            let line = std::str::from_utf8(&buffer[from..from + end]).map_err(|_| damaged())?;
            from += end + 1;
            match (in_files, line) {
                (false, "\"files\": [") if !done => in_files = true,
                (true, "],") => (in_files, done) = (false, true),
                (true, "") => {}
                (true, line) => visit(FileRecord::parse(line).ok_or_else(damaged)?)?,
                (false, _) => {}
            }
        }
        buffer.drain(..from);
        if buffer.len() > LINE_MAX_BYTES {
            return Err(damaged());
        }
        if count == 0 {
            return if done { Ok(()) } else { Err(damaged()) };
        }
    }
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
