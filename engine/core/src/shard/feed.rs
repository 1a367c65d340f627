//! The change feed of the control plane: which watched streams changed, coalesced and bounded.
//!
//! Python hands in globs once; the commit path matches each stream once per set of globs (the answer is kept
//! on the stream) and never calls Python. When the set overflows, the reader is told to rescan.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use crate::limits::DIRTY_PATHS_MAX;
use crate::stream::handle::Stream;

#[derive(Default)]
pub struct Feed {
    /// Grows with every set of globs: answers kept for an older set do not count.
    version: AtomicU64,
    active: AtomicBool,
    globs: RwLock<Vec<Glob>>,
    changed: Mutex<Changed>,
    delivered: Condvar,
}

#[derive(Default)]
struct Changed {
    paths: HashSet<Box<str>>,
    overflow: bool,
    stopped: bool,
}

impl Feed {
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// Replaces the watched globs.
    pub fn watch(&self, patterns: &[String]) {
        let mut globs = self.globs.write();
        *globs = patterns.iter().map(|pattern| Glob::new(pattern)).collect();
        self.version.fetch_add(1, Ordering::AcqRel);
        self.active.store(!globs.is_empty(), Ordering::Release);
    }

    /// Notes a changed stream if a glob matches it.
    pub fn note(&self, stream: &Arc<Stream>) {
        let version = self.version.load(Ordering::Acquire);
        let matches = stream.cached_match(version).unwrap_or_else(|| {
            let found = self
                .globs
                .read()
                .iter()
                .any(|glob| glob.matches(&stream.path));
            stream.cache_match(version, found);
            found
        });
        if !matches {
            return;
        }
        let mut changed = self.changed.lock();
        if changed.paths.contains(&*stream.path) {
            return;
        }
        if changed.paths.len() >= DIRTY_PATHS_MAX {
            changed.overflow = true;
            return;
        }
        changed.paths.insert(stream.path.clone());
    }

    pub fn deliver(&self) {
        self.delivered.notify_all();
    }

    /// Waits for changes; returns the paths and whether some were dropped.
    pub fn take(&self, timeout: Duration) -> (Vec<String>, bool) {
        let deadline = Instant::now() + timeout;
        let mut changed = self.changed.lock();
        while changed.paths.is_empty() && !changed.overflow && !changed.stopped {
            if self
                .delivered
                .wait_until(&mut changed, deadline)
                .timed_out()
            {
                break;
            }
        }
        let overflow = std::mem::take(&mut changed.overflow);
        let paths = changed.paths.drain().map(String::from).collect();
        (paths, overflow)
    }

    pub fn stop(&self) {
        self.changed.lock().stopped = true;
        self.deliver();
    }
}

/// `*` = one path segment, `**` = any number of them, also none.
pub struct Glob {
    segments: Vec<Box<str>>,
}

impl Glob {
    pub fn new(pattern: &str) -> Glob {
        Glob {
            segments: pattern.split('/').map(Box::from).collect(),
        }
    }

    /// Greedy with one point to return to: linear in practice, never exponential.
    pub fn matches(&self, path: &str) -> bool {
        let parts: Vec<&str> = path.split('/').collect();
        let (mut at, mut part) = (0, 0);
        let mut retry: Option<(usize, usize)> = None;
        while part < parts.len() {
            match self.segments.get(at).map(|segment| &**segment) {
                Some("**") => {
                    retry = Some((at + 1, part));
                    at += 1;
                }
                Some(segment) if segment == "*" || segment == parts[part] => {
                    at += 1;
                    part += 1;
                }
                _ => match retry {
                    Some((resume, skipped)) => {
                        at = resume;
                        part = skipped + 1;
                        retry = Some((resume, part));
                    }
                    None => return false,
                },
            }
        }
        self.segments[at..].iter().all(|segment| &**segment == "**")
    }
}

#[cfg(test)]
mod tests {
    use super::Glob;

    #[test]
    fn globs() {
        for (pattern, path, expected) in [
            ("a/*", "a/b", true),
            ("a/*", "a/b/c", false),
            ("a/**", "a", true),
            ("a/**", "a/b/c", true),
            ("**/c", "a/b/c", true),
            ("**/c", "c", true),
            ("a/**/c/*", "a/x/c/y/c/z", true),
            ("a/**/c/*", "a/x/c/y/z", false),
            ("*", "a", true),
            ("a", "b", false),
            ("**", "a/b", true),
        ] {
            assert_eq!(
                Glob::new(pattern).matches(path),
                expected,
                "{pattern} {path}"
            );
        }
    }
}
