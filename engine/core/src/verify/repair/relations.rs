//! What streams know about each other, counted again after a repair: forks of a source, and the ranges of a fork
//! that its source cannot give any more.
//!
//! Streams in memory are those that the log has changed; they override their catalog entries.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::log::catalog::{CatalogError, CatalogView};
use crate::log::directory::Directory;
use crate::model::StreamId;
use crate::stream::handle::Stream;
use crate::stream::state::Life;
use crate::verify::census::PAGE_ENTRIES;
use crate::verify::repair::Repaired;
use crate::verify::repair::rebuild::mark_damaged;
use crate::verify::shadow::decode_value;

/// One stream's side of its relations.
struct Side {
    path: Box<str>,
    id: StreamId,
    start: u64,
    fork_count: u32,
    source: Option<StreamId>,
}

impl Side {
    fn of(stream: &Stream) -> Option<Side> {
        let state = stream.lock();
        (state.life != Life::Gone).then(|| Side {
            path: stream.path.clone(),
            id: stream.id,
            start: state.start,
            fork_count: state.fork_count,
            source: state.fork.as_ref().map(|fork| fork.source),
        })
    }
}

pub fn mend(directory: &Directory, repaired: &mut Repaired) -> Result<(), CatalogError> {
    let changed: BTreeMap<Box<str>, Arc<Stream>> = directory
        .cached_below("")
        .into_iter()
        .map(|stream| (stream.path.clone(), stream))
        .collect();
    let view = directory.catalog().view()?;
    let mut forks: HashMap<StreamId, u32> = HashMap::new();
    each(&view, &changed, &mut |side| {
        if let Some(source) = side.source {
            *forks.entry(source).or_default() += 1;
        }
        Ok(())
    })?;
    each(&view, &changed, &mut |side| {
        let found = forks.get(&side.id).copied().unwrap_or(0);
        if found != side.fork_count {
            set_fork_count(directory, &side, found)?;
            repaired.did(format!(
                "{}: {found} forks are counted instead of {}",
                side.path, side.fork_count
            ));
        }
        match side.source {
            Some(source) => mend_fork(directory, &side, source, repaired),
            None => Ok(()),
        }
    })
}

fn each(
    view: &CatalogView,
    changed: &BTreeMap<Box<str>, Arc<Stream>>,
    visit: &mut dyn FnMut(Side) -> Result<(), CatalogError>,
) -> Result<(), CatalogError> {
    for side in changed.values().filter_map(|stream| Side::of(stream)) {
        visit(side)?;
    }
    let mut after: Option<Vec<u8>> = None;
    loop {
        let page = view.streams(after.as_deref(), PAGE_ENTRIES)?;
        let Some((last, _)) = page.last() else {
            return Ok(());
        };
        after = Some(last.clone());
        for (_, value) in &page {
            let stream = decode_value(value).filter(|stream| !changed.contains_key(&stream.path));
            if let Some(side) = stream.and_then(|stream| Side::of(&stream)) {
                visit(side)?;
            }
        }
    }
}

fn set_fork_count(directory: &Directory, side: &Side, count: u32) -> Result<(), CatalogError> {
    if let Some(stream) = directory.get(&side.path)? {
        let mut state = stream.lock();
        state.recount_forks(count);
        directory.mark_dirty(&stream, &mut state.dirty);
    }
    Ok(())
}

/// What a fork inherits and its source does not have is a gap of the fork.
fn mend_fork(
    directory: &Directory,
    side: &Side,
    source: StreamId,
    repaired: &mut Repaired,
) -> Result<(), CatalogError> {
    let available = match directory.get_by_id(source)? {
        Some(source) => {
            let state = source.lock();
            match state.life {
                Life::Gone => 0,
                Life::Live | Life::SoftDeleted if state.is_volatile() => return Ok(()),
                Life::Live | Life::SoftDeleted => state.tail,
            }
        }
        None => 0,
    };
    if available >= side.start {
        return Ok(());
    }
    let Some(stream) = directory.get(&side.path)? else {
        return Ok(());
    };
    let mut state = stream.lock();
    if mark_damaged(&mut state, available, side.start) {
        directory.mark_dirty(&stream, &mut state.dirty);
        let what = format!(
            "bytes {available}..{}: its source has lost them",
            side.start
        );
        repaired.gave_up(Some(&side.path), what);
    }
    Ok(())
}
