//! One file twice: as the page cache shows it, and as the platter holds it.
//!
//! Invariants
//! - `I-IMAGE-1` Pages that are absent read as zeros; an image's pages never reach beyond its length.
//! - `I-IMAGE-2` A sector that is not dirty is equal in both images, except after a failed sync: then the kernel has
//!   thrown the dirty mark away, and no later sync writes what it covered.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::doors::Dice;

pub const SECTOR_BYTES: usize = 512;
const PAGE_BYTES: usize = 4096;
const SECTORS_PER_PAGE: usize = PAGE_BYTES / SECTOR_BYTES;
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

type Page = Arc<[u8; PAGE_BYTES]>;

#[derive(Clone, Default, Debug)]
struct Image {
    pages: BTreeMap<u64, Page>,
    len: u64,
}

impl Image {
    fn page(&self, number: u64) -> &[u8; PAGE_BYTES] {
        self.pages.get(&number).map_or(&ZEROS, |page| page)
    }

    fn page_mut(&mut self, number: u64) -> &mut [u8; PAGE_BYTES] {
        Arc::make_mut(
            self.pages
                .entry(number)
                .or_insert_with(|| Arc::new([0; PAGE_BYTES])),
        )
    }

    fn truncate(&mut self, len: u64) {
        let keep = len.div_ceil(PAGE_BYTES as u64);
        self.pages.split_off(&keep);
        let within = (len % PAGE_BYTES as u64) as usize;
        if within > 0 && self.pages.contains_key(&(len / PAGE_BYTES as u64)) {
            self.page_mut(len / PAGE_BYTES as u64)[within..].fill(0);
        }
        self.len = len;
    }
}

/// What a power cut does to sectors that were not synced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    AllLost,
    AllKept,
    /// Each by a coin, in no order; now and then one is torn inside.
    Coin,
}

#[derive(Clone, Default, Debug)]
pub struct FileImage {
    cache: Image,
    platter: Image,
    /// Sectors of each page that were written since the last sync.
    dirty: BTreeMap<u64, u8>,
    /// A sync has failed: images may differ where nothing is dirty.
    poisoned: bool,
}

impl FileImage {
    pub fn len(&self) -> u64 {
        self.cache.len
    }

    pub fn is_empty(&self) -> bool {
        self.cache.len == 0
    }

    pub fn read(&self, buffer: &mut [u8], position: u64) -> usize {
        let count = (self.cache.len.saturating_sub(position)).min(buffer.len() as u64) as usize;
        for (page, within, from, to) in pieces(position, count) {
            let source = &self.cache.page(page)[within..within + (to - from)];
            buffer[from..to].copy_from_slice(source);
        }
        count
    }

    pub fn write(&mut self, bytes: &[u8], position: u64) {
        for (page, within, from, to) in pieces(position, bytes.len()) {
            let source = &bytes[from..to];
            let absent = !self.cache.pages.contains_key(&page);
            // Prewriting zeros must not cost memory.
            if absent && source == &ZEROS[..source.len()] {
                if self.platter.pages.contains_key(&page) {
                    self.mark(page, within, source.len());
                }
                continue;
            }
            self.cache.page_mut(page)[within..within + source.len()].copy_from_slice(source);
            self.mark(page, within, source.len());
        }
        self.cache.len = self.cache.len.max(position + bytes.len() as u64);
    }

    fn mark(&mut self, page: u64, within: usize, len: usize) {
        let sectors = within / SECTOR_BYTES..(within + len).div_ceil(SECTOR_BYTES);
        let mask = self.dirty.entry(page).or_default();
        sectors.for_each(|sector| *mask |= 1 << sector);
    }

    pub fn set_len(&mut self, len: u64) {
        if len < self.cache.len {
            let first = len / PAGE_BYTES as u64;
            let stored: Vec<u64> = self
                .cache
                .pages
                .range(first..)
                .chain(self.platter.pages.range(first..))
                .map(|(page, _)| *page)
                .collect();
            for page in stored {
                let from = if page == first {
                    (len % PAGE_BYTES as u64) as usize
                } else {
                    0
                };
                self.mark(page, from, PAGE_BYTES - from);
            }
            self.cache.truncate(len);
        }
        self.cache.len = len;
    }

    pub fn sync(&mut self) {
        for (page, mask) in std::mem::take(&mut self.dirty) {
            match self.cache.pages.get(&page) {
                Some(bytes) if !self.poisoned => {
                    self.platter.pages.insert(page, Arc::clone(bytes));
                }
                None if !self.poisoned => {
                    self.platter.pages.remove(&page);
                }
                _ => self.keep_sectors(page, mask, SECTOR_BYTES),
            }
        }
        self.platter.truncate(self.cache.len);
    }

    /// The kernel's two ways to fail: some sectors land, and all of them count as clean afterwards. Those that did
    /// not land stay in the cache, or are thrown out of it, so that what was there before shows again.
    pub fn fail_sync(&mut self, dice: &mut Dice) {
        let thrown_out = dice.chance(2);
        for (page, mask) in std::mem::take(&mut self.dirty) {
            let landed = mask & dice.draw() as u8;
            self.keep_sectors(page, landed, SECTOR_BYTES);
            if thrown_out {
                self.throw_out(page, mask & !landed);
            }
        }
        self.platter.len = self.platter.len.max(self.highest_kept());
        self.poisoned = true;
    }

    fn throw_out(&mut self, page: u64, mask: u8) {
        let source = *self.platter.page(page);
        let target = self.cache.page_mut(page);
        for sector in (0..SECTORS_PER_PAGE).filter(|sector| mask & (1 << sector) != 0) {
            let at = sector * SECTOR_BYTES;
            target[at..at + SECTOR_BYTES].copy_from_slice(&source[at..at + SECTOR_BYTES]);
        }
    }

    fn highest_kept(&self) -> u64 {
        let pages = self.platter.pages.keys().next_back();
        pages.map_or(0, |page| {
            ((page + 1) * PAGE_BYTES as u64).min(self.cache.len)
        })
    }

    fn keep_sectors(&mut self, page: u64, mask: u8, bytes_each: usize) {
        let source = *self.cache.page(page);
        if mask == 0 {
            return;
        }
        let target = self.platter.page_mut(page);
        for sector in (0..SECTORS_PER_PAGE).filter(|sector| mask & (1 << sector) != 0) {
            let at = sector * SECTOR_BYTES;
            target[at..at + bytes_each].copy_from_slice(&source[at..at + bytes_each]);
        }
    }

    pub fn power_cut(&mut self, fate: Fate, dice: &mut Dice) {
        let grown_to = self.cache.len;
        for (page, mask) in std::mem::take(&mut self.dirty) {
            let kept = match fate {
                Fate::AllLost => 0,
                Fate::AllKept => mask,
                Fate::Coin => mask & dice.draw() as u8,
            };
            self.keep_sectors(page, kept, SECTOR_BYTES);
            let torn = mask & !kept;
            if fate == Fate::Coin && torn != 0 && dice.chance(8) {
                let first = 1u8 << torn.trailing_zeros();
                self.keep_sectors(page, first, dice.below(SECTOR_BYTES as u64) as usize);
            }
        }
        let len_kept = match fate {
            Fate::AllLost => false,
            Fate::AllKept => true,
            Fate::Coin => dice.chance(2),
        };
        if len_kept {
            self.platter.truncate(grown_to);
        } else {
            let len = self.platter.len;
            self.platter.truncate(len);
        }
        self.cache = self.platter.clone();
        self.poisoned = false;
    }

    pub fn flip_bit(&mut self, byte: u64, bit: u8) {
        for image in [&mut self.cache, &mut self.platter] {
            if byte < image.len {
                image.page_mut(byte / PAGE_BYTES as u64)[(byte % PAGE_BYTES as u64) as usize] ^=
                    1 << bit;
            }
        }
    }

    /// Bytes of the cache image that are not zero pages, for picking what to damage.
    pub fn stored_pages(&self) -> Vec<u64> {
        self.cache.pages.keys().copied().collect()
    }
}

/// Cuts a range into pages: page number, position inside it, range of the caller's buffer.
fn pieces(position: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= len {
            return None;
        }
        let at = position + done as u64;
        let within = (at % PAGE_BYTES as u64) as usize;
        let count = (PAGE_BYTES - within).min(len - done);
        let piece = (at / PAGE_BYTES as u64, within, done, done + count);
        done += count;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(file: &FileImage) -> Vec<u8> {
        let mut bytes = vec![0; file.len() as usize];
        let count = file.read(&mut bytes, 0);
        assert_eq!(count, bytes.len());
        bytes
    }

    #[test]
    fn unsynced_bytes_are_lost_and_synced_ones_are_not() {
        let mut file = FileImage::default();
        file.write(&[7; 5000], 0);
        file.sync();
        file.write(&[8; 1000], 4500);
        assert_eq!(text(&file)[4999], 8);
        file.power_cut(Fate::AllLost, &mut Dice::new(1));
        assert_eq!(text(&file), vec![7; 5000]);
    }

    #[test]
    fn a_coin_keeps_whole_sectors_out_of_order() {
        let mut seen_hole = false;
        for seed in 0..50 {
            let mut file = FileImage::default();
            file.write(&[1; 4096], 0);
            file.sync();
            file.write(&[2; 4096], 0);
            file.power_cut(Fate::Coin, &mut Dice::new(seed));
            let bytes = text(&file);
            assert_eq!(bytes.len(), 4096);
            let last_of_each: Vec<u8> = bytes
                .chunks(SECTOR_BYTES)
                .map(|sector| sector[511])
                .collect();
            seen_hole |= last_of_each.windows(2).any(|pair| pair == [1, 2]);
        }
        assert!(
            seen_hole,
            "a later sector must be able to survive an earlier one"
        );
    }

    #[test]
    fn a_second_sync_after_a_failed_one_proves_nothing() {
        let (mut lost, mut forgotten) = (false, false);
        for seed in 0..20 {
            let mut file = FileImage::default();
            file.write(&[1; 4096], 0);
            file.fail_sync(&mut Dice::new(seed));
            forgotten |= text(&file) != vec![1; 4096];
            file.write(&[3; 10], 8192);
            file.sync();
            file.power_cut(Fate::AllLost, &mut Dice::new(seed));
            assert_eq!(text(&file)[8192..8202], [3; 10]);
            lost |= text(&file)[..4096] != [1; 4096];
        }
        assert!(lost && forgotten);
    }

    #[test]
    fn truncating_is_undone_by_a_power_cut_unless_synced() {
        let mut file = FileImage::default();
        file.write(&[5; 6000], 0);
        file.sync();
        file.set_len(100);
        file.set_len(6000);
        assert_eq!(text(&file)[100..], [0; 5900]);
        let mut synced = file.clone();
        file.power_cut(Fate::AllLost, &mut Dice::new(1));
        assert_eq!(text(&file), vec![5; 6000]);
        synced.sync();
        synced.power_cut(Fate::AllLost, &mut Dice::new(1));
        assert_eq!(text(&synced)[100..], [0; 5900]);
    }
}
