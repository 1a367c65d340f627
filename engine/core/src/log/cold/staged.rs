//! Packs that the catalog does not name and that are not garbage: stages that wait for a commit, and sections that a
//! commit has taken over and no checkpoint has placed yet.
//!
//! Beside the packs of checkpoints; the shard says what waits and what was taken, replay says it again after a restart.
//!
//! Invariants
//! - `I-KEEP-1` A pack is kept from before its first byte is written until nothing in memory or in the log that a
//!   restart would replay needs it.
//! - `I-KEEP-2` A section that a checkpoint has placed, or whose stream has left the catalog, is let go only when that
//!   whole checkpoint is through: until then a restart replays the frame that names it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;

use super::files::FileKey;
use super::{ColdStore, pack_numbers_used_up};
use crate::codec::adopt::{RELATIVE_ENTRY_BYTES, UsedUp, decode_entries};
use crate::io::{DiskFile, read_exact_at};
use crate::log::index::damage;
use crate::log::pack::{self, PACKS_DIRECTORY};
use crate::log::stage::{self, StageHead, StageRecord, StageSection};
use crate::model::{Adopted, Extent, FileRef, IndexEntry};

/// No section has a longer index: a frame that says otherwise must not make us allocate what it says.
const INDEX_MAX_BYTES: u64 = 4 << 30;

#[derive(Default)]
pub(super) struct Kept {
    waiting: HashSet<u32>,
    adopted: HashMap<u32, AdoptedPack>,
    /// Placed or gone since the last whole checkpoint.
    leaving: Vec<u32>,
}

/// A pack that was taken over.
#[derive(Default)]
struct AdoptedPack {
    /// How many sections are not placed yet.
    sections: u64,
    /// It is no stage any more, for good.
    spent: bool,
}

impl Kept {
    pub(super) fn holds(&self, pack: u32) -> bool {
        self.waiting.contains(&pack) || self.adopted.contains_key(&pack)
    }
}

impl ColdStore {
    /// Writes a stage to a new pack, which is kept until it is dropped or adopted.
    pub fn write_stage(
        &self,
        head: StageHead,
        sections: &[StageSection<'_>],
        go_on: &dyn Fn() -> io::Result<()>,
    ) -> io::Result<StageRecord> {
        let number = self.take_pack_number()?;
        self.kept.lock().waiting.insert(number);
        let written = stage::write(&*self.disk, number, head, sections, go_on);
        if written.is_err() {
            self.kept.lock().waiting.remove(&number);
        }
        written
    }

    pub(super) fn take_pack_number(&self) -> io::Result<u32> {
        let mut next = self.next_pack.lock();
        let number = *next;
        *next = number.checked_add(1).ok_or_else(pack_numbers_used_up)?;
        Ok(number)
    }

    /// Gives a waiting stage up and unlinks its file.
    pub fn drop_stage(&self, pack: u32) -> io::Result<()> {
        self.kept.lock().waiting.remove(&pack);
        self.remove_pack(pack)
    }

    /// Makes the removal of packs last.
    pub fn sync_packs(&self) -> io::Result<()> {
        self.disk.sync_dir(PACKS_DIRECTORY)
    }

    /// Finds the stages that an earlier run has left: packs that the catalog (`live`) does not name, no frame of the
    /// log has adopted, and that hold a whole record. Those that are used up are removed.
    pub fn find_stages(
        &self,
        live: &[(u32, u64)],
        used_up: &[UsedUp],
    ) -> io::Result<Vec<StageRecord>> {
        let named: HashSet<u32> = live.iter().map(|(number, _)| *number).collect();
        let mut found = Vec::new();
        for entry in self.disk.list(PACKS_DIRECTORY)? {
            let Some(number) = pack::parse_name(&entry.name) else {
                continue;
            };
            if named.contains(&number) || self.kept.lock().holds(number) {
                continue;
            }
            match stage::read(&*self.disk, number)? {
                Some(record) if used_up.contains(&record.used_up()) => {
                    self.remove_pack(number)?;
                }
                Some(record) => {
                    self.kept.lock().waiting.insert(number);
                    found.push(record);
                }
                None => {}
            }
        }
        if !used_up.is_empty() {
            // Before what says so is freed or forgotten. The run before may have removed a file without that.
            self.sync_packs()?;
        }
        Ok(found)
    }

    /// A frame has taken over these sections: their packs stay until a checkpoint has placed them.
    pub fn adopt(&self, sections: &[Adopted]) {
        let mut kept = self.kept.lock();
        for section in sections {
            kept.waiting.remove(&section.pack);
            kept.adopted.entry(section.pack).or_default().sections += 1;
        }
    }

    /// A checkpoint has placed these sections, or their stream is gone; see [`ColdStore::settle_adopted`].
    pub fn let_go(&self, sections: impl Iterator<Item = Adopted>) {
        let mut kept = self.kept.lock();
        kept.leaving.extend(sections.map(|section| section.pack));
    }

    /// A whole checkpoint is through: what it has placed is the catalog's from here on.
    pub fn settle_adopted(&self) {
        let mut kept = self.kept.lock();
        for pack in std::mem::take(&mut kept.leaving) {
            if let Some(adopted) = kept.adopted.get_mut(&pack) {
                adopted.sections -= 1;
                if adopted.sections == 0 {
                    kept.adopted.remove(&pack);
                }
            }
        }
    }

    /// How many sections were taken over and are not placed yet.
    pub fn adopted_sections(&self) -> u64 {
        let kept = self.kept.lock();
        kept.adopted.values().map(|pack| pack.sections).sum()
    }

    /// The mark of a pack that was taken over is gone, and that is synced.
    pub(super) fn note_spent(&self, pack: u32) {
        if let Some(adopted) = self.kept.lock().adopted.get_mut(&pack) {
            adopted.spent = true;
        }
    }

    pub(super) fn is_spent(&self, pack: u32) -> bool {
        let kept = self.kept.lock();
        kept.adopted.get(&pack).is_some_and(|pack| pack.spent)
    }

    /// Packs that frames of the log have taken over, sorted.
    pub fn adopted_packs(&self) -> Vec<u32> {
        let mut packs: Vec<u32> = self.kept.lock().adopted.keys().copied().collect();
        packs.sort_unstable();
        packs
    }

    /// The relative index of a staged section. `InvalidData`: it is not the one that the section speaks of.
    pub fn relative_index(&self, section: &Adopted) -> io::Result<Vec<IndexEntry>> {
        let key = key_of(section);
        let len = u64::from(section.index_count) * RELATIVE_ENTRY_BYTES as u64;
        if len > INDEX_MAX_BYTES {
            return Err(key.explain(damage("the index of a stage is too long".to_owned())));
        }
        let mut bytes = vec![0; len as usize];
        read_exact_at(&*self.files.get(key)?, &mut bytes, section.index_at)
            .map_err(|error| key.explain(error))?;
        decode_entries(section, &bytes).ok_or_else(|| {
            let what = format!(
                "the index of a stage at byte {} is damaged",
                section.index_at
            );
            key.explain(damage(what))
        })
    }

    /// Reads bytes of a staged section, from `at` in it on.
    pub fn read_staged(&self, section: &Adopted, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        let key = key_of(section);
        read_exact_at(
            &*self.files.get(key)?,
            buffer,
            section.file_position.saturating_add(at),
        )
        .map_err(|error| key.explain(error))
    }

    /// The file of a staged section, for the kernel to move.
    pub fn staged_file(&self, section: &Adopted) -> io::Result<Arc<dyn DiskFile>> {
        self.files.get(key_of(section))
    }
}

/// The extent that a section becomes where it begins at `start`, with `base_records` before it.
pub fn extent_of(section: &Adopted, start: u64, base_records: u64) -> Extent {
    Extent {
        start,
        len: section.len,
        file: FileRef::Pack {
            number: section.pack,
        },
        file_position: section.file_position,
        index_position: section.file_position + pack::padded(section.len),
        index_count: section.index_count,
        base_records,
    }
}

fn key_of(section: &Adopted) -> FileKey {
    FileKey::data(FileRef::Pack {
        number: section.pack,
    })
}
