//! A machine with one disk, behind the engine's doors.
//!
//! Names and bytes exist twice: as the running system sees them, and as they would be after a power cut. A call can
//! be made to fail by its number; the machine can go off in the middle of any call. Every start gets a disk of its
//! own, so that an engine of an earlier life can no longer change anything, not even while it is dropped.
//!
//! Invariants
//! - `I-SIMDISK-1` A name that was created, renamed or removed is durable only after `sync_dir` of its directory;
//!   until then a power cut keeps or loses each such change by itself.
//! - `I-SIMDISK-2` A process crash loses nothing that was written; a power cut keeps only what was synced and a
//!   random part of the rest.
//! - `I-SIMDISK-3` Everything random comes from the machine's own dice.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use millstream_core::io::{DirEntry, Disk, DiskFile, OpenMode};
use parking_lot::{Condvar, Mutex};

use crate::doors::Dice;
use crate::image::{Fate, FileImage};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Call {
    Open,
    MakeDirectory,
    Rename,
    Remove,
    List,
    SyncDirectory,
    FreeBytes,
    Read,
    Write,
    Sync,
    Len,
    SetLen,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    Eio,
    Enospc,
    /// A write or read does less than asked, without an error.
    Short,
    /// The machine goes off inside the call.
    Off,
}

/// The `after`-th call from now on (0 = the next one) of this kind, or of any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    pub after: u64,
    pub call: Option<Call>,
    pub failure: Failure,
}

/// Deliberate bugs: what a careless engine would amount to, seen from the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lies {
    /// Syncs of log files do nothing and succeed.
    pub skip_log_sync: bool,
    /// Syncs of directories do nothing and succeed.
    pub skip_directory_sync: bool,
    /// A write that fails is reported as done.
    pub ignore_write_errors: bool,
    /// A sync that fails is reported as done.
    pub ignore_sync_errors: bool,
}

#[derive(Clone, Debug)]
enum NameChange {
    Create { path: String, node: u64 },
    Rename { from: String, to: String, node: u64 },
    Remove { path: String },
    MakeDirectory { path: String },
}

impl NameChange {
    fn directory(&self) -> &str {
        match self {
            NameChange::Create { path, .. }
            | NameChange::Remove { path }
            | NameChange::MakeDirectory { path } => parent(path),
            NameChange::Rename { to, .. } => parent(to),
        }
    }
}

#[derive(Clone, Default, Debug)]
struct Names {
    files: BTreeMap<String, u64>,
    directories: BTreeSet<String>,
}

impl Names {
    fn apply(&mut self, change: &NameChange) {
        match change {
            NameChange::Create { path, node } => {
                self.files.insert(path.clone(), *node);
            }
            NameChange::Rename { from, to, node } => {
                self.files.remove(from);
                self.files.insert(to.clone(), *node);
            }
            NameChange::Remove { path } => {
                self.files.remove(path);
            }
            NameChange::MakeDirectory { path } => {
                self.directories.insert(path.clone());
            }
        }
    }

    fn has_directory(&self, path: &str) -> bool {
        path.is_empty() || (self.directories.contains(path) && self.has_directory(parent(path)))
    }
}

#[derive(Clone)]
struct State {
    boot: u64,
    off: bool,
    names: Names,
    durable: Names,
    /// Changes of names that no `sync_dir` has covered, oldest first.
    pending: Vec<NameChange>,
    nodes: BTreeMap<u64, FileImage>,
    next_node: u64,
    calls: u64,
    fault: Option<Fault>,
    fault_hit: Option<String>,
    lies: Lies,
    capacity_bytes: u64,
    dice: Dice,
}

/// The computer: survives its processes and its power cuts.
pub struct Machine {
    state: Mutex<State>,
    pause: Mutex<Option<PauseAfter>>,
    pause_changed: Condvar,
}

/// Stops the thread that makes the n-th call on a file of the log or of cold storage, until it is let go.
struct PauseAfter {
    after: u64,
    paused: bool,
    released: bool,
    finished: bool,
}

impl Machine {
    pub fn new(seed: u64) -> Arc<Machine> {
        Machine::from(State {
            boot: 0,
            off: false,
            names: Names::default(),
            durable: Names::default(),
            pending: Vec::new(),
            nodes: BTreeMap::new(),
            next_node: 0,
            calls: 0,
            fault: None,
            fault_hit: None,
            lies: Lies::default(),
            capacity_bytes: u64::MAX,
            dice: Dice::new(seed),
        })
    }

    fn from(state: State) -> Arc<Machine> {
        Arc::new(Machine {
            state: Mutex::new(state),
            pause: Mutex::new(None),
            pause_changed: Condvar::new(),
        })
    }

    /// An equal machine, to try something out on.
    pub fn twin(&self) -> Arc<Machine> {
        Machine::from(self.state.lock().clone())
    }

    /// The disk as the process that starts now sees it.
    pub fn disk(self: &Arc<Machine>) -> Arc<FakeDisk> {
        Arc::new(FakeDisk {
            boot: self.state.lock().boot,
            machine: Arc::clone(self),
        })
    }

    pub fn set_lies(&self, lies: Lies) {
        self.state.lock().lies = lies;
    }

    pub fn set_capacity(&self, bytes: u64) {
        self.state.lock().capacity_bytes = bytes;
    }

    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used_bytes()
    }

    pub fn arm(&self, fault: Option<Fault>) {
        self.state.lock().fault = fault;
    }

    /// What the last fault hit; asking clears it.
    pub fn take_fault_hit(&self) -> Option<String> {
        self.state.lock().fault_hit.take()
    }

    pub fn fault_was_hit(&self) -> bool {
        self.state.lock().fault_hit.is_some()
    }

    pub fn is_off(&self) -> bool {
        self.state.lock().off
    }

    pub fn calls(&self) -> u64 {
        self.state.lock().calls
    }

    /// kill -9: everything written stays in the page cache, synced or not.
    pub fn process_crash(&self) {
        let mut state = self.state.lock();
        state.boot += 1;
        state.off = false;
        state.fault = None;
    }

    /// The power goes: what was not synced is lost, or partly kept in any order.
    pub fn power_cut(&self) {
        let mut state = self.state.lock();
        let State {
            nodes,
            pending,
            durable,
            dice,
            ..
        } = &mut *state;
        let fate = dice.pick(&[
            Fate::AllLost,
            Fate::AllKept,
            Fate::Coin,
            Fate::Coin,
            Fate::Coin,
        ]);
        // A journal keeps a prefix of the changes of names; without one each stands for itself.
        let journal = dice.chance(2);
        let mut alive = true;
        for change in pending.drain(..) {
            let kept = match fate {
                Fate::AllLost => false,
                Fate::AllKept => true,
                Fate::Coin => dice.chance(2),
            };
            alive = if journal { alive && kept } else { kept };
            if alive {
                durable.apply(&change);
            }
        }
        let directories = durable.clone();
        durable
            .files
            .retain(|path, _| directories.has_directory(parent(path)));
        let named: BTreeSet<u64> = durable.files.values().copied().collect();
        nodes.retain(|node, _| named.contains(node));
        nodes
            .values_mut()
            .for_each(|file| file.power_cut(fate, dice));
        state.names = state.durable.clone();
        state.boot += 1;
        state.off = false;
        state.fault = None;
    }

    pub fn flip_bit(&self, path: &str, byte: u64, bit: u8) {
        let mut state = self.state.lock();
        if let Some(node) = state.names.files.get(path).copied()
            && let Some(file) = state.nodes.get_mut(&node)
        {
            file.flip_bit(byte, bit);
        }
    }

    /// Files with the numbers of their 4 KiB pages that hold anything.
    pub fn stored_pages(&self) -> Vec<(String, Vec<u64>)> {
        let state = self.state.lock();
        let files = state.names.files.iter();
        files
            .map(|(path, node)| (path.clone(), state.nodes[node].stored_pages()))
            .collect()
    }

    /// The next thread that reaches its `after`-th call on a log, pack or segment file stops there.
    pub fn pause_after(&self, after: u64) {
        *self.pause.lock() = Some(PauseAfter {
            after,
            paused: false,
            released: false,
            finished: false,
        });
    }

    /// Waits until a thread has stopped at the pause (`true`), or said that it is done (`false`).
    pub fn wait_for_pause(&self) -> bool {
        let mut pause = self.pause.lock();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        loop {
            match &*pause {
                Some(pause) if pause.paused => return true,
                Some(pause) if !pause.finished => {}
                _ => return false,
            }
            let timed_out = self
                .pause_changed
                .wait_until(&mut pause, deadline)
                .timed_out();
            assert!(
                !timed_out,
                "a checkpoint neither finished nor reached its pause"
            );
        }
    }

    pub fn release(&self) {
        if let Some(pause) = &mut *self.pause.lock() {
            pause.released = true;
        }
        self.pause_changed.notify_all();
    }

    pub fn finished(&self) {
        if let Some(pause) = &mut *self.pause.lock() {
            pause.finished = true;
        }
        self.pause_changed.notify_all();
    }

    pub fn forget_pause(&self) {
        *self.pause.lock() = None;
    }

    fn maybe_pause(&self, path: &str) {
        let held_by_store = !["wal/", "packs/", "segments/"]
            .iter()
            .any(|directory| path.starts_with(directory));
        let mut pause = self.pause.lock();
        match &mut *pause {
            // The catalog's store holds its own locks while it calls.
            _ if held_by_store => return,
            Some(pause) if pause.after == 0 && !pause.paused => pause.paused = true,
            Some(pause) => {
                pause.after = pause.after.saturating_sub(1);
                return;
            }
            None => return,
        }
        self.pause_changed.notify_all();
        while pause.as_ref().is_some_and(|pause| !pause.released) {
            self.pause_changed.wait(&mut pause);
        }
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

fn missing(path: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("no {path:?}"))
}

fn off() -> io::Error {
    io::Error::other("the machine is off")
}

impl State {
    /// Counts a call; `Some` = this one fails so. `Err` = the machine is off, or this process is dead.
    fn step(&mut self, boot: u64, call: Call, path: &str) -> io::Result<Option<Failure>> {
        if self.off || boot != self.boot {
            return Err(off());
        }
        self.calls += 1;
        let Some(fault) = &mut self.fault else {
            return Ok(None);
        };
        if fault.call.is_some_and(|wanted| wanted != call) {
            return Ok(None);
        }
        if fault.after > 0 {
            fault.after -= 1;
            return Ok(None);
        }
        let failure = fault.failure;
        if failure == Failure::Short && !matches!(call, Call::Read | Call::Write) {
            return Ok(None);
        }
        self.fault = None;
        self.fault_hit = Some(format!("{failure:?} in {call:?} of {path:?}"));
        if failure == Failure::Off {
            self.off = true;
        }
        Ok(Some(failure))
    }

    /// For calls that either happen or do not.
    fn step_whole(&mut self, boot: u64, call: Call, path: &str) -> io::Result<()> {
        match self.step(boot, call, path)? {
            None | Some(Failure::Short) => Ok(()),
            Some(failure) => Err(error_of(failure)),
        }
    }

    fn used_bytes(&self) -> u64 {
        let named = self.names.files.values();
        named.map(|node| self.nodes[node].len()).sum()
    }

    fn change(&mut self, change: NameChange) {
        self.names.apply(&change);
        self.pending.push(change);
    }
}

fn error_of(failure: Failure) -> io::Error {
    match failure {
        Failure::Eio => io::Error::from_raw_os_error(EIO),
        Failure::Enospc => io::Error::from_raw_os_error(ENOSPC),
        Failure::Short | Failure::Off => off(),
    }
}

pub struct FakeDisk {
    machine: Arc<Machine>,
    boot: u64,
}

impl Disk for FakeDisk {
    fn open(&self, path: &str, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.machine.state.lock();
        state.step_whole(self.boot, Call::Open, path)?;
        let node = match (state.names.files.get(path).copied(), mode) {
            (Some(_), OpenMode::CreateNew) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Some(node), _) => node,
            (None, OpenMode::Read | OpenMode::ReadWrite) => return Err(missing(path)),
            (None, _) => {
                if !state.names.has_directory(parent(path)) {
                    return Err(missing(parent(path)));
                }
                let node = state.next_node;
                state.next_node += 1;
                state.nodes.insert(node, FileImage::default());
                state.change(NameChange::Create {
                    path: path.into(),
                    node,
                });
                node
            }
        };
        Ok(Arc::new(FakeFile {
            machine: Arc::clone(&self.machine),
            boot: self.boot,
            node,
            path: path.into(),
            writable: mode != OpenMode::Read,
        }))
    }

    fn create_dir_all(&self, path: &str) -> io::Result<()> {
        let mut state = self.machine.state.lock();
        state.step_whole(self.boot, Call::MakeDirectory, path)?;
        let mut prefix = String::new();
        for part in path.split('/') {
            if !prefix.is_empty() {
                prefix.push('/');
            }
            prefix.push_str(part);
            if !state.names.directories.contains(&prefix) {
                state.change(NameChange::MakeDirectory {
                    path: prefix.clone(),
                });
            }
        }
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.machine.maybe_pause(from);
        let mut state = self.machine.state.lock();
        state.step_whole(self.boot, Call::Rename, from)?;
        let node = *state.names.files.get(from).ok_or_else(|| missing(from))?;
        state.change(NameChange::Rename {
            from: from.into(),
            to: to.into(),
            node,
        });
        Ok(())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.machine.maybe_pause(path);
        let mut state = self.machine.state.lock();
        state.step_whole(self.boot, Call::Remove, path)?;
        if !state.names.files.contains_key(path) {
            return Err(missing(path));
        }
        state.change(NameChange::Remove { path: path.into() });
        Ok(())
    }

    fn list(&self, directory: &str) -> io::Result<Vec<DirEntry>> {
        let mut state = self.machine.state.lock();
        state.step_whole(self.boot, Call::List, directory)?;
        if !state.names.has_directory(directory) {
            return Err(missing(directory));
        }
        let mut entries = Vec::new();
        for (path, node) in &state.names.files {
            if parent(path) == directory {
                entries.push(DirEntry {
                    name: base_name(path),
                    len: state.nodes[node].len(),
                    is_dir: false,
                });
            }
        }
        for path in &state.names.directories {
            if parent(path) == directory {
                entries.push(DirEntry {
                    name: base_name(path),
                    len: 0,
                    is_dir: true,
                });
            }
        }
        entries.sort_unstable_by(|left, right| left.name.cmp(&right.name));
        Ok(entries)
    }

    fn sync_dir(&self, directory: &str) -> io::Result<()> {
        self.machine.maybe_pause(&format!("{directory}/"));
        let mut state = self.machine.state.lock();
        match state.step(self.boot, Call::SyncDirectory, directory)? {
            None | Some(Failure::Short) => {}
            Some(_) if state.lies.ignore_sync_errors && !state.off => return Ok(()),
            Some(failure) => return Err(error_of(failure)),
        }
        if state.lies.skip_directory_sync {
            return Ok(());
        }
        let State {
            pending, durable, ..
        } = &mut *state;
        pending.retain(|change| {
            let covered = change.directory() == directory;
            if covered {
                durable.apply(change);
            }
            !covered
        });
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let mut state = self.machine.state.lock();
        state.step_whole(self.boot, Call::FreeBytes, "")?;
        Ok(state.capacity_bytes.saturating_sub(state.used_bytes()))
    }
}

fn base_name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

struct FakeFile {
    machine: Arc<Machine>,
    boot: u64,
    node: u64,
    path: String,
    writable: bool,
}

impl FakeFile {
    /// Runs `work` on the image. A file whose name is gone stays readable for those who hold it open.
    fn with<T>(
        &self,
        call: Call,
        work: impl FnOnce(&mut FileImage, &mut Dice, Option<Failure>, Lies) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.machine.state.lock();
        let failure = state.step(self.boot, call, &self.path)?;
        let State {
            nodes, dice, lies, ..
        } = &mut *state;
        let file = nodes
            .get_mut(&self.node)
            .ok_or_else(|| missing(&self.path))?;
        work(file, dice, failure, *lies)
    }

    fn over_capacity(&self, end: u64) -> bool {
        let state = self.machine.state.lock();
        if state.capacity_bytes == u64::MAX {
            return false;
        }
        let own = state.nodes.get(&self.node).map_or(0, FileImage::len);
        end > own && state.used_bytes().saturating_sub(own) + end > state.capacity_bytes
    }

    fn sync_any(&self) -> io::Result<()> {
        self.machine.maybe_pause(&self.path);
        let is_log = self.path.starts_with("wal/");
        self.with(Call::Sync, |file, dice, failure, lies| match failure {
            None | Some(Failure::Short) => {
                if !(is_log && lies.skip_log_sync) {
                    file.sync();
                }
                Ok(())
            }
            Some(Failure::Off) => Err(off()),
            Some(failure) => {
                file.fail_sync(dice);
                if lies.ignore_sync_errors {
                    return Ok(());
                }
                Err(error_of(failure))
            }
        })
    }
}

impl DiskFile for FakeFile {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.with(Call::Read, |file, dice, failure, _| match failure {
            None => Ok(file.read(buffer, position)),
            Some(Failure::Short) => {
                let few = dice.below(buffer.len() as u64).max(1) as usize;
                let few = few.min(buffer.len());
                Ok(file.read(&mut buffer[..few], position))
            }
            Some(failure) => Err(error_of(failure)),
        })
    }

    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        self.machine.maybe_pause(&self.path);
        if !self.writable {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if self.over_capacity(position + bytes.len() as u64) {
            return Err(io::Error::from_raw_os_error(ENOSPC));
        }
        self.with(Call::Write, |file, dice, failure, lies| match failure {
            None => {
                file.write(bytes, position);
                Ok(bytes.len())
            }
            Some(Failure::Short) => {
                let few = dice.below(bytes.len() as u64).max(1) as usize;
                let few = few.min(bytes.len());
                file.write(&bytes[..few], position);
                Ok(few)
            }
            Some(failure) => {
                // Torn at any byte: what was begun before it failed stays in the cache.
                let few = dice.below(bytes.len() as u64 + 1) as usize;
                file.write(&bytes[..few], position);
                if lies.ignore_write_errors && failure != Failure::Off {
                    return Ok(bytes.len());
                }
                Err(error_of(failure))
            }
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_any()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync_any()
    }

    fn len(&self) -> io::Result<u64> {
        self.with(Call::Len, |file, _, failure, _| match failure {
            None | Some(Failure::Short) => Ok(file.len()),
            Some(failure) => Err(error_of(failure)),
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.with(Call::SetLen, |file, _, failure, _| match failure {
            None | Some(Failure::Short) => {
                file.set_len(len);
                Ok(())
            }
            Some(failure) => Err(error_of(failure)),
        })
    }
}
