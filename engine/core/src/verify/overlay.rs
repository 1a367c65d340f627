//! A data directory that cannot be changed: reads come from the disk, writes stay in memory.
//!
//! The catalog's store writes when it opens and closes. Verification must leave every byte as it is, so it opens
//! the catalog through this door. Sits between `verify` and the real disk.
//!
//! Invariants:
//! - no call reaches the disk that could change it;
//! - what was written is read back, page by page; memory grows with the pages written, which for opening,
//!   checking and closing a catalog are its headers and its allocator's pages.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::io::{DirEntry, Disk, DiskFile, OpenMode, read_up_to_at};

const PAGE_BYTES: u64 = 4096;

pub struct OverlayDisk {
    below: Arc<dyn Disk>,
}

impl OverlayDisk {
    pub fn over(below: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(OverlayDisk { below })
    }
}

fn refused(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("{what} while nothing may change"),
    )
}

impl Disk for OverlayDisk {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        match mode {
            OpenMode::Read => self.below.open(path, OpenMode::Read),
            OpenMode::ReadWrite => {
                let file = self.below.open(path, OpenMode::Read)?;
                let len = file.len()?;
                Ok(Arc::new(OverlayFile {
                    below: file,
                    state: Mutex::new(Written {
                        len,
                        below_valid: len,
                        pages: HashMap::new(),
                    }),
                }))
            }
            OpenMode::CreateNew | OpenMode::CreateOrOpen => Err(refused("a file was created")),
        }
    }

    fn create_dir_all(&self, _path: &str) -> io::Result<()> {
        Err(refused("a directory was created"))
    }

    fn rename(&self, _from: &str, _to: &str) -> io::Result<()> {
        Err(refused("a file was renamed"))
    }

    fn remove(&self, _path: &str) -> io::Result<()> {
        Err(refused("a file was removed"))
    }

    fn list(&self, dir: &str) -> io::Result<Vec<DirEntry>> {
        self.below.list(dir)
    }

    /// Nothing was written, so nothing is to be made durable.
    fn sync_dir(&self, _dir: &str) -> io::Result<()> {
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        self.below.free_bytes()
    }
}

struct Written {
    len: u64,
    /// What the disk has behind this was cut off and must not come back when the file grows again.
    below_valid: u64,
    pages: HashMap<u64, Box<[u8]>>,
}

struct OverlayFile {
    below: Arc<dyn DiskFile>,
    state: Mutex<Written>,
}

impl OverlayFile {
    /// A page as it is on disk, zeros behind what counts of it.
    fn page_below(&self, number: u64, below_valid: u64) -> io::Result<Box<[u8]>> {
        let mut page = vec![0u8; PAGE_BYTES as usize].into_boxed_slice();
        let start = number * PAGE_BYTES;
        let count = below_valid.saturating_sub(start).min(PAGE_BYTES) as usize;
        read_up_to_at(&*self.below, &mut page[..count], start)?;
        Ok(page)
    }
}

impl DiskFile for OverlayFile {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let state = self.state.lock();
        let left = state.len.saturating_sub(position);
        let number = position / PAGE_BYTES;
        let offset = (position % PAGE_BYTES) as usize;
        // At most to the end of this page: the next one may come from elsewhere.
        let count = buffer
            .len()
            .min(PAGE_BYTES as usize - offset)
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        if count == 0 {
            return Ok(0);
        }
        match state.pages.get(&number) {
            Some(page) => buffer[..count].copy_from_slice(&page[offset..offset + count]),
            None => {
                let page = self.page_below(number, state.below_valid)?;
                buffer[..count].copy_from_slice(&page[offset..offset + count]);
            }
        }
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        let mut state = self.state.lock();
        let number = position / PAGE_BYTES;
        let offset = (position % PAGE_BYTES) as usize;
        let count = bytes.len().min(PAGE_BYTES as usize - offset);
        if !state.pages.contains_key(&number) {
            let page = self.page_below(number, state.below_valid)?;
            state.pages.insert(number, page);
        }
        if let Some(page) = state.pages.get_mut(&number) {
            page[offset..offset + count].copy_from_slice(&bytes[..count]);
        }
        state.len = state.len.max(position + count as u64);
        Ok(count)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.state.lock().len)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        if len < state.len {
            state.below_valid = state.below_valid.min(len);
            state.pages.retain(|number, _| *number * PAGE_BYTES < len);
            if let Some(page) = state.pages.get_mut(&(len / PAGE_BYTES)) {
                page[(len % PAGE_BYTES) as usize..].fill(0);
            }
        }
        state.len = len;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::tests::TestDirectory;
    use crate::io::{read_exact_at, write_all_at};

    #[test]
    fn writes_are_read_back_and_never_reach_the_disk() {
        let directory = TestDirectory::new();
        let content: Vec<u8> = (0..10_000u32).map(|number| number as u8).collect();
        std::fs::write(directory.path().join("file"), &content).expect("written");
        let overlay = OverlayDisk::over(directory.disk());
        let file = overlay.open("file", OpenMode::ReadWrite).expect("opens");
        write_all_at(&*file, &[7; 5000], 4000).expect("kept in memory");
        file.set_len(8000).expect("cut");
        file.set_len(20_000).expect("grown");
        let mut expected = content.clone();
        expected[4000..9000].fill(7);
        expected.truncate(8000);
        expected.resize(20_000, 0);
        let mut read = vec![1; 20_000];
        read_exact_at(&*file, &mut read, 0).expect("read");
        assert!(read == expected);
        assert!(std::fs::read(directory.path().join("file")).expect("still there") == content);
        assert!(overlay.open("new", OpenMode::CreateNew).is_err());
        assert!(overlay.remove("file").is_err());
        assert!(overlay.rename("file", "other").is_err());
    }
}
