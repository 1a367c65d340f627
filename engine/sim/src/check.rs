//! Compares the engine with a world of the model: through its reading paths, its listing, and its state.
//!
//! Every function answers with the first difference in words, or with nothing.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use millstream_core::limits::ENDINGS_MAX_AGE_MS;
use millstream_core::model::{Class, StreamId};
use millstream_core::refusal::Refusal;
use millstream_core::shard::engine::{Engine, Undone};
use millstream_core::shard::stages::Found;
use millstream_core::stream::handle::Stream;
use millstream_core::stream::offsets::{self, GapReason};
use millstream_core::stream::state::Life;

use crate::history::History;
use crate::model::{Marks, StageModel, StreamModel, World, committer_bytes, producer_bytes};
use crate::plan::PATHS;

pub type Checked = Result<(), String>;

fn differ<T: PartialEq + std::fmt::Debug>(what: &str, path: &str, engine: T, model: T) -> Checked {
    if engine == model {
        return Ok(());
    }
    Err(format!("{path}: {what} is {engine:?}, should be {model:?}"))
}

pub fn undone(reason: &Undone) -> String {
    match reason {
        Undone::Wait => "has to wait".into(),
        Undone::Refused { refusal, .. } => {
            format!("refused: {} ({})", refusal.sentence(), refusal.code.code())
        }
    }
}

fn find(engine: &Engine, path: &str) -> Result<Option<Arc<Stream>>, String> {
    engine
        .find(path)
        .map_err(|reason| format!("{path} cannot be looked up: {}", undone(&reason)))
}

/// Everything: streams, bytes, boundaries, producers, fork counts.
pub fn world(engine: &Engine, world: &World, marks: Marks, sleeps: u64) -> Checked {
    PATHS
        .into_iter()
        .try_for_each(|path| at_path(engine, world, path, marks, sleeps))
}

/// As [`world`] for a server with a damaged disk: what it cannot read it may refuse, but nothing may be wrong.
/// Returns how many streams could not be read whole.
pub fn believable(engine: &Engine, world: &World, sleeps: u64) -> Result<usize, String> {
    let mut unreadable = 0;
    for path in PATHS {
        match at_path(engine, world, path, Marks::ALL, sleeps) {
            Err(problem) if is_read_error(&problem) => unreadable += 1,
            other => other?,
        }
    }
    Ok(unreadable)
}

/// Whether a check ended because something could not be read, rather than because it was wrong.
pub fn is_read_error(problem: &str) -> bool {
    problem.contains("read failed") || problem.contains("looked up")
}

fn at_path(
    engine: &Engine,
    world: &World,
    path: &'static str,
    marks: Marks,
    sleeps: u64,
) -> Checked {
    let found = find(engine, path)?;
    let expected = world
        .at(path)
        .filter(|stream| !world.is_dead(stream, sleeps));
    match (&found, expected) {
        (Some(stream), Some(model)) => live_stream(engine, stream, model, marks),
        (None, Some(model)) => Err(format!("{path} (incarnation {}) is lost", model.id)),
        (Some(stream), None) => {
            let state = stream.lock();
            if state.life == Life::Live && !engine.has_expired(&state, engine.now_ms()) {
                return Err(format!(
                    "{path} (incarnation {}) is there, should be deleted or never was",
                    stream.id.0
                ));
            }
            Ok(())
        }
        (None, None) => Ok(()),
    }
}

/// Deletes leave their ends behind, exactly, as soon as they are synced and whatever happens then; and what is still
/// there has none.
pub fn endings(engine: &Engine, world: &World, marks: Marks, sleeps: u64) -> Checked {
    for (id, model) in &world.endings {
        if engine.now_ms().saturating_sub(model.time_ms) > ENDINGS_MAX_AGE_MS {
            continue;
        }
        let found = engine.ending(model.path, Some(StreamId(*id)));
        let found = found.map(|ending| (ending.tail, ending.records));
        let told = model.sequence <= marks.synced;
        let expected = told.then_some((model.tail, model.records));
        differ("end", model.path, found, expected)?;
    }
    for (_, ending) in engine.directory.endings.all() {
        let id = ending.incarnation.0;
        let Some(model) = world.streams.get(&id).filter(|model| !model.deleted) else {
            continue;
        };
        if !world.is_dead(model, sleeps) {
            return Err(format!("{}: it lives and has ended", model.path));
        }
        // An expired one. What an ephemeral one had is forgotten by a restart, but not where it ended.
        if model.class != Class::Ephemeral {
            differ("last byte", model.path, ending.tail.position, model.tail())?;
            let records = model.records_of(model.pieces.len());
            differ("last record", model.path, ending.records, records)?;
        }
    }
    Ok(())
}

/// All that a start has made of a disk, one line each.
pub fn dump(engine: &Engine) -> Result<Vec<String>, String> {
    let mut lines = vec![
        format!("log at {}", engine.shard.synced()),
        format!("losses {:?}", engine.losses),
        format!("highest epoch {}", engine.highest_epoch()),
        format!("endings {:?}", engine.directory.endings.all()),
    ];
    for path in PATHS {
        let Some(stream) = find(engine, path)? else {
            lines.push(format!("{path}: none"));
            continue;
        };
        let bytes = {
            let state = stream.lock();
            // One that is gone has given its bytes back.
            let gone = state.life == Life::Gone;
            let tail = if gone { 0 } else { state.tail };
            drop(state);
            let read = engine.read_range(&stream, 0, tail);
            let bytes = read.map_err(|error| format!("{path}: read failed: {error}"))?;
            let mut hasher = DefaultHasher::new();
            bytes.hash(&mut hasher);
            hasher.finish()
        };
        let mut producers: Vec<_> = {
            let state = stream.lock();
            let known = state.producers().into_iter().flat_map(|known| known.iter());
            known
                .map(|(id, known)| format!("{id:?} {known:?}"))
                .collect()
        };
        producers.sort_unstable();
        let state = stream.lock();
        lines.push(format!(
            "{path}: {:?} {:?} since {} {:?} closed {} {:?} epochs {} {:?} {:?} {:?} forks {} {producers:?} {:?} {:?} \
             tail {} records {} at {} {} {:?} bytes {bytes:x}",
            state.id,
            state.class,
            state.class_since,
            state.life,
            state.closed,
            state.closed_by,
            state.first_epoch,
            state.later_epochs,
            state.expiry,
            state.fork,
            state.fork_count,
            state.stream_seq,
            state.extents,
            state.tail,
            state.records,
            state.applied_sequence,
            state.last_time_ms,
            state.visible,
        ));
    }
    Ok(lines)
}

fn live_stream(
    engine: &Engine,
    stream: &Arc<Stream>,
    model: &StreamModel,
    marks: Marks,
) -> Checked {
    state(stream, model, marks)?;
    bytes(engine, stream, model, marks)
}

fn state(stream: &Arc<Stream>, model: &StreamModel, marks: Marks) -> Checked {
    let path = model.path;
    differ("incarnation", path, stream.id.0, model.id)?;
    {
        let state = stream.lock();
        differ("life", path, state.life, Life::Live)?;
        differ("class", path, state.class, model.class)?;
        differ("closed", path, state.closed, model.closed)?;
        let tag = model
            .closed_by
            .map(|tag| (tag.id_bytes().to_vec(), tag.epoch, tag.seq));
        let by = state.closed_by.as_ref();
        let by = by.map(|by| (by.id.to_vec(), by.epoch, by.seq));
        differ("closing producer", path, by, tag)?;
        differ("tail", path, state.tail, model.tail())?;
        differ(
            "records",
            path,
            state.records,
            model.records_of(model.pieces.len()),
        )?;
        differ(
            "visible tail",
            path,
            state.visible.tail,
            model.bytes_of(model.visible(marks)),
        )?;
        differ(
            "visible close",
            path,
            state.visible.closed,
            model.visible_closed(marks),
        )?;
        let visible_records = model.records_of(model.visible(marks));
        differ(
            "visible records",
            path,
            state.visible.records,
            visible_records,
        )?;
        let seq = state.stream_seq.as_deref().map(<[u8]>::to_vec);
        differ("Stream-Seq", path, seq, model.stream_seq.clone())?;
        let ttl = state
            .expiry
            .as_ref()
            .is_some_and(|expiry| expiry.ttl_seconds.is_some());
        differ("TTL", path, ttl, model.ttl)?;
        let producers = state.producers().map_or_else(BTreeMap::new, |producers| {
            let all = producers.iter();
            all.map(|(id, known)| (id.to_vec(), (known.epoch, known.last_seq)))
                .collect()
        });
        let expected = model.producers.iter();
        let expected = expected.map(|(id, known)| {
            let id = producer_bytes(*id).to_vec();
            (id, (known.epoch, known.seq))
        });
        let committers = model.committers.iter();
        let committers = committers.map(|(id, epoch)| (committer_bytes(*id), (*epoch, 0)));
        let expected = expected.chain(committers).collect();
        differ("producers", path, producers, expected)?;
    }
    Ok(())
}

/// What readers get, piece by piece, and that each append ends where it should.
fn bytes(engine: &Engine, stream: &Arc<Stream>, model: &StreamModel, marks: Marks) -> Checked {
    let path = model.path;
    let failed = |error: std::io::Error| format!("{path}: read failed: {error}");
    let (mut position, mut records) = (0, 0);
    for (number, piece) in model.pieces[..model.visible(marks)].iter().enumerate() {
        let end = position + piece.bytes.len() as u64;
        let read = engine.read_range(stream, position, end).map_err(failed)?;
        if *read != *piece.bytes {
            let at = read
                .iter()
                .zip(piece.bytes.iter())
                .position(|(left, right)| left != right);
            return Err(format!(
                "{path}: append {number} at {position}..{end} reads differently from byte {at:?} on"
            ));
        }
        records += piece.records;
        position = end;
        let refused = |refusal: Refusal| format!("{path}: read failed: {}", refusal.sentence());
        if !engine.is_boundary(stream, position).map_err(refused)? {
            return Err(format!("{path}: {position} should be a boundary"));
        }
        let counted = engine.records_at(stream, position).map_err(failed)?;
        differ("records at a boundary", path, counted, records)?;
    }
    Ok(())
}

/// The epoch of each tail.
pub fn epochs(engine: &Engine, world: &World, sleeps: u64) -> Checked {
    for model in world.live(sleeps) {
        if let Some(stream) = find(engine, model.path)? {
            let tail = engine.applied_tail(&stream.lock());
            differ("epoch", model.path, tail.epoch, model.epoch)?;
        }
    }
    Ok(())
}

/// Fork counts, once clean-up has done all it can.
pub fn fork_counts(engine: &Engine, world: &World, sleeps: u64) -> Checked {
    for model in world.live(sleeps) {
        let children = world.children(model.id);
        let needed = children.filter(|child| world.needed(child, sleeps)).count() as u32;
        if let Some(stream) = find(engine, model.path)? {
            differ("fork count", model.path, stream.lock().fork_count, needed)?;
        }
    }
    Ok(())
}

/// Reads every stream from its start by the offsets it is given, as a client does.
pub fn walk(engine: &Engine, world: &World, sleeps: u64) -> Checked {
    for model in world.live(sleeps) {
        let path = model.path;
        let mut offset = "-1".to_owned();
        let mut body = Vec::new();
        let mut epoch = 0;
        for _ in 0..1000 {
            let read = engine
                .local_read(path, &offset, 64 * 1024)
                .map_err(|refusal| format!("{path} at {offset}: {}", refusal.sentence()))?;
            let inner = if model.json {
                &read.body[1..read.body.len() - 1]
            } else {
                &read.body[..]
            };
            body.extend_from_slice(inner);
            if model.json && !inner.is_empty() {
                body.push(b',');
            }
            let here = read.next.to_string();
            // The epochs up to the stream's own are those of its forefathers: no loss begins them.
            let lossy = read.next.epoch > model.id.max(epoch);
            if lossy && offset != "-1" && read.gap.is_none() {
                return Err(format!(
                    "{path}: {offset} to {here} passes a possible loss in silence"
                ));
            }
            epoch = read.next.epoch;
            if read.up_to_date {
                differ("tail of a reader", path, read.next.epoch, model.epoch)?;
                differ("closed at the end", path, read.closed, model.closed)?;
                break;
            }
            if here == offset {
                return Err(format!("{path}: a reader does not get beyond {offset}"));
            }
            offset = here;
        }
        let parts: Vec<&[u8]> = model.pieces.iter().map(|piece| &*piece.bytes).collect();
        let expected = parts.concat();
        if body != expected {
            return Err(format!(
                "{path}: a reader got {} bytes, {} are there, or others",
                body.len(),
                expected.len()
            ));
        }
    }
    Ok(())
}

/// Every stage that a client was told of waits, unless it was committed: then it waits no more.
pub fn stages<'a>(
    engine: &Engine,
    world: &World,
    stages: impl Iterator<Item = &'a StageModel>,
) -> Checked {
    for stage in stages {
        let waits = matches!(engine.stages.find(&stage.id), Found::Waiting(_));
        let committed = world.committed.contains_key(&stage.id);
        differ("waiting", &stage.id, waits, !committed)?;
    }
    Ok(())
}

/// The listing names exactly the living.
pub fn listing(engine: &Engine, world: &World, sleeps: u64) -> Checked {
    let page = engine
        .list_now("", "", 1000)
        .map_err(|reason| undone(&reason))?;
    let listed: Vec<(String, u64, u64, bool)> = page
        .into_listed(1000)
        .streams
        .into_iter()
        .map(|info| {
            (
                info.path,
                info.incarnation.0,
                info.tail.position,
                info.closed,
            )
        })
        .collect();
    let expected: Vec<(String, u64, u64, bool)> = world
        .live(sleeps)
        .map(|model| {
            let tail = model.tail();
            (model.path.to_owned(), model.id, tail, model.closed)
        })
        .collect();
    differ("listing", "", listed, expected)
}

/// Every offset that was ever handed out still names its bytes, or leads to a gap where it may.
pub fn offsets(engine: &Engine, world: &World, history: &History, sleeps: u64) -> Checked {
    for model in world.live(sleeps) {
        let Some(stream) = find(engine, model.path)? else {
            continue;
        };
        let state = stream.lock();
        for (incarnation, offset, pieces) in history.observed_at(model.path) {
            let what = format!(
                "{}: offset {offset} of incarnation {incarnation}",
                model.path
            );
            let resolved = offsets::resolve(&state, &engine.losses, offset);
            let start =
                resolved.map_err(|refusal| format!("{what} is refused: {}", refusal.sentence()))?;
            match start.gap {
                _ if offset.position == 0 && start.position == 0 => {}
                Some(gap) if incarnation != model.id && gap.certain => {
                    differ("gap reason", &what, gap.reason, GapReason::Recreated)?;
                    // A fork may have a beginning in common with what was here before: reading goes on behind it.
                    let common = model.pieces_up_to(start.position);
                    let common = common.and_then(|count| model.pieces.get(..count));
                    if !common.is_some_and(|common| pieces.starts_with(common)) {
                        return Err(format!("{what} goes on at {}, too late", start.position));
                    }
                }
                _ if incarnation != model.id => {
                    let same = model.pieces.get(..pieces.len()) == Some(pieces);
                    if model.source.is_none() || !same {
                        return Err(format!("{what} is taken for one of the new stream"));
                    }
                    differ("position", &what, start.position, offset.position)?;
                }
                gap => {
                    let kept = model.pieces.get(..pieces.len()) == Some(pieces);
                    match (kept, gap.is_some_and(|gap| gap.certain)) {
                        (true, false) => {
                            differ("position", &what, start.position, offset.position)?;
                        }
                        (true, true) => {
                            return Err(format!("{what} leads to a gap, but nothing is missing"));
                        }
                        (false, true) => {}
                        (false, false) => {
                            return Err(format!("{what} names other bytes now"));
                        }
                    }
                }
            }
        }
    }
    Ok(())
}
