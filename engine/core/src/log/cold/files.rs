//! The bounded set of files open for reading segments and packs.
//!
//! An idle stream holds no descriptor: files are opened when a read needs them and the least recently
//! used one is closed when there are too many. Used by `cold` only.
//!
//! Invariants: at most `files_max` files stay in the set (a read in progress keeps its own alive on top);
//! a file opened before a removal is never kept after it, so that a path that is used again is never
//! served from the old file.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use super::check::kind_of;
use super::spill;
use crate::io::wanted::{self, Fetch, Key, Told};
use crate::io::{Disk, DiskFile, OpenMode};
use crate::log::pack;
use crate::log::segment::{self, Part};
use crate::model::FileRef;

/// One file on disk. A pack keeps its index inside, so it has no `Part::Index` of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileKey {
    pub file: FileRef,
    pub part: Part,
}

impl FileKey {
    pub fn data(file: FileRef) -> FileKey {
        FileKey {
            file,
            part: Part::Data,
        }
    }

    pub fn index(file: FileRef) -> FileKey {
        match file {
            FileRef::Segment { .. } => FileKey {
                file,
                part: Part::Index,
            },
            FileRef::Pack { .. } | FileRef::Spill { .. } => FileKey::data(file),
        }
    }

    pub fn path(&self) -> String {
        match self.file {
            FileRef::Segment { owner, number } => segment::path(owner, number, self.part),
            FileRef::Pack { number } => pack::path(number),
            FileRef::Spill { number } => spill::path(number),
        }
    }

    /// Adds the path to an error and keeps its kind; the code of a broken medium becomes one.
    pub fn explain(&self, error: io::Error) -> io::Error {
        io::Error::new(kind_of(&error), format!("{}: {error}", self.path()))
    }
}

struct OpenFile {
    file: Arc<dyn DiskFile>,
    used: u64,
}

#[derive(Default)]
struct State {
    open: HashMap<FileKey, OpenFile>,
    /// Counts look-ups; the smallest `used` is the oldest.
    tick: u64,
    /// Counts removals.
    removals: u64,
}

#[derive(Clone)]
pub struct OpenFiles {
    disk: Arc<dyn Disk>,
    files_max: usize,
    state: Arc<Mutex<State>>,
}

impl OpenFiles {
    pub fn new(disk: Arc<dyn Disk>, files_max: usize) -> OpenFiles {
        OpenFiles {
            disk,
            files_max: files_max.max(1),
            state: Arc::default(),
        }
    }

    /// The file, opened for reading if it is not open yet. `WouldBlock` if the thread must not wait for that.
    pub fn get(&self, key: FileKey) -> io::Result<Arc<dyn DiskFile>> {
        let removals = {
            let mut state = self.state.lock();
            state.tick += 1;
            let tick = state.tick;
            if let Some(open) = state.open.get_mut(&key) {
                open.used = tick;
                return Ok(open.file.clone());
            }
            state.removals
        };
        if !wanted::may_wait() {
            let fetch = || -> Option<Fetch> {
                let files = self.clone();
                Some(Box::new(move || files.get(key).map(|_| ())))
            };
            match wanted::want(Key::File(key.path()), fetch) {
                Some(Told::Failed(failure)) => return Err(failure.into()),
                Some(_) => {}
                None => return Err(wanted::would_block()),
            }
        }
        // Opened without the lock: a slow disk must not hold up readers of open files.
        let file = self
            .disk
            .open(&key.path(), OpenMode::Read)
            .map_err(|error| key.explain(error))?;
        let mut state = self.state.lock();
        if state.removals == removals {
            while state.open.len() >= self.files_max && !state.open.contains_key(&key) {
                close_oldest(&mut state);
            }
            let used = state.tick;
            state.open.insert(
                key,
                OpenFile {
                    file: file.clone(),
                    used,
                },
            );
        }
        Ok(file)
    }

    /// Closes a file that is about to be unlinked.
    pub fn forget(&self, key: FileKey) {
        let mut state = self.state.lock();
        state.removals += 1;
        state.open.remove(&key);
    }

    #[cfg(test)]
    pub fn open_count(&self) -> usize {
        self.state.lock().open.len()
    }
}

/// A scan over a few hundred entries, paid only next to an `open`, is cheaper than keeping a list in order.
fn close_oldest(state: &mut State) {
    let oldest = state
        .open
        .iter()
        .min_by_key(|(_, open)| open.used)
        .map(|(key, _)| *key);
    if let Some(key) = oldest {
        state.open.remove(&key);
    }
}
