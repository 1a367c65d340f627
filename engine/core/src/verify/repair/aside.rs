//! Originals kept aside: `repair-<utc time>/` below the data directory, with the paths they had.
//!
//! Invariant: `finish` returns only after every copy, and its name, is synced.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use crate::io::{Disk, OpenMode, read_up_to_at, write_all_at};
use crate::verify::places::REPAIR_PREFIX;

const PIECE_BYTES: usize = 1 << 20;

pub struct Aside {
    disk: Arc<dyn Disk>,
    directory: String,
    copied: BTreeSet<String>,
    directories: BTreeSet<String>,
}

impl Aside {
    pub fn begin(disk: &Arc<dyn Disk>, now_ms: u64) -> io::Result<Aside> {
        let directory = format!("{REPAIR_PREFIX}{}", utc_stamp(now_ms));
        disk.create_dir_all(&directory)?;
        Ok(Aside {
            disk: Arc::clone(disk),
            directories: BTreeSet::from([String::new(), directory.clone()]),
            directory,
            copied: BTreeSet::new(),
        })
    }

    pub fn directory(&self) -> &str {
        &self.directory
    }

    /// Copies a file once; one that is not there needs no copy.
    pub fn copy(&mut self, path: &str) -> io::Result<()> {
        if !self.copied.insert(path.to_owned()) {
            return Ok(());
        }
        let from = match self.disk.open(path, OpenMode::Read) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let target = format!("{}/{path}", self.directory);
        self.make_parents(&target)?;
        let to = self.disk.open(&target, OpenMode::CreateOrOpen)?;
        to.set_len(0)?;
        let mut buffer = vec![0u8; PIECE_BYTES];
        let mut position = 0;
        loop {
            let count = read_up_to_at(&*from, &mut buffer, position)?;
            if count == 0 {
                break;
            }
            write_all_at(&*to, &buffer[..count], position)?;
            position += count as u64;
        }
        to.sync_all()
    }

    fn make_parents(&mut self, target: &str) -> io::Result<()> {
        let mut parent = target;
        while let Some((upper, _)) = parent.rsplit_once('/') {
            self.directories.insert(upper.to_owned());
            parent = upper;
        }
        match target.rsplit_once('/') {
            Some((upper, _)) => self.disk.create_dir_all(upper),
            None => Ok(()),
        }
    }

    pub fn finish(&self) -> io::Result<()> {
        self.directories
            .iter()
            .try_for_each(|directory| self.disk.sync_dir(directory))
    }
}

/// `20261115T235959Z`.
fn utc_stamp(now_ms: u64) -> String {
    let seconds = now_ms / 1000;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01 in eras of 400 years: the leap day is then the last of its year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_dates() {
        assert_eq!(utc_stamp(0), "19700101T000000Z");
        assert_eq!(utc_stamp(951_782_399_999), "20000228T235959Z");
        assert_eq!(utc_stamp(951_782_400_000), "20000229T000000Z");
        assert_eq!(utc_stamp(1_763_251_199_000), "20251115T235959Z");
    }
}
