//! What has changed since a moment, gathered once for all questions that ask.
//!
//! A thousand questions that wait then cost one walk over the streams in memory per look and not a thousand, and
//! their names and patterns meet only what has changed.
//!
//! Invariant: the stamp is begun first, then streams are looked at under their locks, then removals and evictions are
//! read: what is not told here bears this stamp or a later one (`I-CHANGE-1`).

use std::sync::Arc;

use crate::model::is_reserved;
use crate::serve::pipeline::tails::{Question, Which};
use crate::shard::engine::Engine;
use crate::stream::handle::Stream;

pub struct News {
    /// Everything before it is told.
    pub stamp: u64,
    /// Nothing can be told of what was before: that stamp or an earlier one.
    untold: u64,
    /// Streams in memory with the stamp of their newest change, by name; gone ones included.
    changed: Vec<(Arc<Stream>, u64)>,
    /// Names that were removed, with the newest stamp of each, by name.
    removed: Vec<(Box<str>, u64)>,
}

impl News {
    /// What the questions must know. One that knows no earlier answer needs nothing.
    pub fn gather<'q>(engine: &Engine, questions: impl Iterator<Item = &'q Question>) -> News {
        let asked: Vec<(u64, &Which)> = questions
            .filter_map(|question| Some((question.since?, &question.which)))
            .collect();
        let stamp = engine.shard.changes.begin();
        let Some(since) = asked.iter().map(|(since, _)| *since).min() else {
            return News {
                stamp,
                untold: u64::MAX,
                changed: Vec::new(),
                removed: Vec::new(),
            };
        };
        let mut changed: Vec<(Arc<Stream>, u64)> = concerned(engine, &asked)
            .into_iter()
            .filter(|stream| !stream.is_reserved())
            .filter_map(|stream| {
                let changed = stream.lock().changed;
                (changed >= since).then_some((stream, changed))
            })
            .collect();
        changed.sort_unstable_by(|(one, _), (other, _)| one.path.cmp(&other.path));
        changed.dedup_by(|(one, _), (other, _)| one.id == other.id);
        let (forgotten, names) = engine.shard.changes.removed_since(since);
        let mut removed: Vec<(Box<str>, u64)> = names
            .into_iter()
            .filter(|(name, _)| !is_reserved(name))
            .collect();
        // The newest one of a name comes first and stays.
        removed.sort_unstable_by(|one, other| one.0.cmp(&other.0).then(other.1.cmp(&one.1)));
        removed.dedup_by(|one, other| one.0 == other.0);
        News {
            stamp,
            untold: forgotten
                .max(engine.directory.evicted_stamp())
                .max(since.saturating_sub(1)),
            changed,
            removed,
        }
    }

    /// Whether all that has changed at a stamp or later is here.
    pub fn tells_since(&self, since: u64) -> bool {
        since > self.untold
    }

    pub fn changed(&self, name: &str, since: u64) -> Option<&Arc<Stream>> {
        let found = self
            .changed
            .binary_search_by(|(stream, _)| (*stream.path).cmp(name));
        let (stream, changed) = self.changed.get(found.ok()?)?;
        (*changed >= since).then_some(stream)
    }

    pub fn all_changed(&self, prefix: &str, since: u64) -> impl Iterator<Item = &Arc<Stream>> {
        let from = self
            .changed
            .partition_point(|(stream, _)| *stream.path < *prefix);
        self.changed[from..]
            .iter()
            .take_while(move |(stream, _)| stream.path.starts_with(prefix))
            .filter(move |(_, changed)| *changed >= since)
            .map(|(stream, _)| stream)
    }

    pub fn removed(&self, name: &str, since: u64) -> bool {
        let found = self
            .removed
            .binary_search_by(|(gone, _)| (**gone).cmp(name));
        found.is_ok_and(|at| self.removed.get(at).is_some_and(|(_, when)| *when >= since))
    }

    pub fn all_removed(&self, prefix: &str, since: u64) -> impl Iterator<Item = &str> {
        self.removed
            .iter()
            .filter(move |(name, when)| *when >= since && name.starts_with(prefix))
            .map(|(name, _)| &**name)
    }
}

/// Streams in memory that the questions may be about: those that they name, or a walk where that is less.
fn concerned(engine: &Engine, asked: &[(u64, &Which)]) -> Vec<Arc<Stream>> {
    let directory = &engine.directory;
    let names = asked.iter().map(|(_, which)| match which {
        Which::Named(named) => named.len(),
        Which::Matching(_) => usize::MAX,
    });
    let count = names.fold(0, usize::saturating_add);
    if count as u64 <= engine.metrics.streams_cached.get() {
        let named = asked.iter().flat_map(|(_, which)| match which {
            Which::Named(named) => named.as_slice(),
            Which::Matching(_) => &[],
        });
        return named
            .filter_map(|named| directory.in_memory_at(&named.name))
            .collect();
    }
    match asked {
        [(_, Which::Matching(pattern))] => directory.cached_below(pattern.prefix()),
        _ => directory.cached_below(""),
    }
}
