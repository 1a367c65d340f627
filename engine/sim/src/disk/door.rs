//! The engine's door to a machine's disk: every call is counted, may fail, and changes only what it may.

use std::io;
use std::sync::Arc;

use millstream_core::io::{DirEntry, Disk, DiskFile, OpenMode};

use super::Machine;
use super::faults::{Call, ENOSPC, Failure, Lies, error_of, off};
use super::names::{NameChange, base_name, parent};
use super::state::State;
use crate::doors::Dice;
use crate::image::FileImage;

fn missing(path: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("no {path:?}"))
}

pub struct FakeDisk {
    pub(super) machine: Arc<Machine>,
    pub(super) boot: u64,
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
        self.machine.maybe_pause(Call::Rename, from);
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
        self.machine.maybe_pause(Call::Remove, path);
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
        self.machine
            .maybe_pause(Call::SyncDirectory, &format!("{directory}/"));
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
        self.machine.maybe_pause(Call::Sync, &self.path);
        let skipped = |lies: Lies| match self.path.split('/').next() {
            Some("wal") => lies.skip_log_sync,
            Some("packs" | "segments") => lies.skip_cold_sync,
            Some("catalog.redb") => lies.skip_catalog_sync,
            _ => false,
        };
        self.with(Call::Sync, |file, dice, failure, lies| match failure {
            None | Some(Failure::Short) => {
                if !skipped(lies) {
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
        self.machine.maybe_pause(Call::Write, &self.path);
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
