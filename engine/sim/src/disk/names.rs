//! The names of a disk, and the changes of them that a power cut may undo one by one.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub(super) enum NameChange {
    Create { path: String, node: u64 },
    Rename { from: String, to: String, node: u64 },
    Remove { path: String },
    MakeDirectory { path: String },
}

impl NameChange {
    pub(super) fn directory(&self) -> &str {
        match self {
            NameChange::Create { path, .. }
            | NameChange::Remove { path }
            | NameChange::MakeDirectory { path } => parent(path),
            NameChange::Rename { to, .. } => parent(to),
        }
    }
}

#[derive(Clone, Default, Debug)]
pub(super) struct Names {
    pub(super) files: BTreeMap<String, u64>,
    pub(super) directories: BTreeSet<String>,
}

impl Names {
    pub(super) fn apply(&mut self, change: &NameChange) {
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

    pub(super) fn has_directory(&self, path: &str) -> bool {
        path.is_empty() || (self.directories.contains(path) && self.has_directory(parent(path)))
    }
}

pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

pub(super) fn base_name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}
