//! Compares the engine with a world of the model: through its reading paths, its listing, and its state.
//!
//! Every function answers with the first difference in words, or with nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use millstream_core::model::Class;
use millstream_core::shard::engine::{Engine, Undone};
use millstream_core::stream::handle::Stream;
use millstream_core::stream::offsets::{self, GapReason};
use millstream_core::stream::state::Life;

use crate::history::History;
use crate::model::{StreamModel, World};
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
pub fn world(engine: &Engine, world: &World, sleeps: u64) -> Checked {
    let now_ms = engine.now_ms();
    for path in PATHS {
        let found = find(engine, path)?;
        let expected = world
            .at(path)
            .filter(|stream| !world.is_dead(stream, sleeps));
        match (&found, expected) {
            (Some(stream), Some(model)) => live_stream(engine, stream, model)?,
            (None, Some(model)) => {
                return Err(format!("{path} (incarnation {}) is lost", model.id));
            }
            (Some(stream), None) => {
                let state = stream.lock();
                if state.life == Life::Live && !state.expired(now_ms) {
                    return Err(format!(
                        "{path} (incarnation {}) is there, should be deleted or never was",
                        stream.id.0
                    ));
                }
            }
            (None, None) => {}
        }
    }
    Ok(())
}

fn live_stream(engine: &Engine, stream: &Arc<Stream>, model: &StreamModel) -> Checked {
    let path = model.path;
    differ("incarnation", path, stream.id.0, model.id)?;
    {
        let state = stream.lock();
        differ("life", path, state.life, Life::Live)?;
        let class = if model.fsync {
            Class::Fsync
        } else {
            Class::Memory
        };
        differ("class", path, state.class, class)?;
        differ("closed", path, state.closed, model.closed)?;
        let tag = model
            .closed_by
            .map(|tag| (vec![tag.id], tag.epoch, tag.seq));
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
            model.bytes_of(model.visible),
        )?;
        differ(
            "visible close",
            path,
            state.visible.closed,
            model.visible_closed,
        )?;
        let visible_records = model.records_of(model.visible);
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
        let producers = state
            .producers
            .as_ref()
            .map_or_else(BTreeMap::new, |producers| {
                let all = producers.iter();
                all.map(|(id, known)| (id.to_vec(), (known.epoch, known.last_seq)))
                    .collect()
            });
        let expected = model.producers.iter();
        let expected = expected
            .map(|(id, known)| (vec![*id], (known.epoch, known.seq)))
            .collect();
        differ("producers", path, producers, expected)?;
    }
    bytes(engine, stream, model)
}

/// What readers get, piece by piece, and that each append ends where it should.
fn bytes(engine: &Engine, stream: &Arc<Stream>, model: &StreamModel) -> Checked {
    let path = model.path;
    let failed = |error: std::io::Error| format!("{path}: read failed: {error}");
    let (mut position, mut records) = (0, 0);
    for (number, piece) in model.pieces[..model.visible].iter().enumerate() {
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
        if !engine.is_boundary(stream, position).map_err(failed)? {
            return Err(format!("{path}: {position} should be a boundary"));
        }
        let counted = engine.records_at(stream, position).map_err(failed)?;
        differ("records at a boundary", path, counted, records)?;
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
            if read.up_to_date {
                differ("closed at the end", path, read.closed, model.visible_closed)?;
                break;
            }
            if here == offset {
                return Err(format!("{path}: a reader does not get beyond {offset}"));
            }
            offset = here;
        }
        let expected: Vec<u8> = model.pieces[..model.visible]
            .iter()
            .flat_map(|piece| piece.bytes.iter().copied())
            .collect();
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

/// The listing names exactly the living.
pub fn listing(engine: &Engine, world: &World, sleeps: u64) -> Checked {
    let listed = engine
        .list("", "", 1000)
        .map_err(|reason| undone(&reason))?;
    let listed: Vec<(String, u64, u64, bool)> = listed
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
            let tail = model.bytes_of(model.visible);
            (model.path.to_owned(), model.id, tail, model.visible_closed)
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
            // A fork shares its source's epochs: only its incarnation tells it from an earlier fork here.
            if incarnation != model.id && model.source.is_some() {
                continue;
            }
            let what = format!(
                "{}: offset {offset} of incarnation {incarnation}",
                model.path
            );
            let resolved = offsets::resolve(&state, &engine.losses, offset);
            let start =
                resolved.map_err(|refusal| format!("{what} is refused: {}", refusal.sentence()))?;
            match start.gap {
                _ if offset.position == 0 && start.position == 0 => {}
                Some(gap) if incarnation != model.id => {
                    differ("gap reason", &what, gap.reason, GapReason::Recreated)?;
                    differ("position", &what, start.position, 0)?;
                }
                None if incarnation != model.id => {
                    return Err(format!("{what} is taken for one of the new stream"));
                }
                Some(gap) if model.fsync && (model.source.is_none() || gap.certain) => {
                    return Err(format!("{what} leads to a gap in an fsync stream"));
                }
                Some(gap) if gap.certain => {}
                _ => {
                    differ("position", &what, start.position, offset.position)?;
                    if model.pieces.get(..pieces.len()) != Some(pieces) {
                        return Err(format!("{what} names other bytes now"));
                    }
                }
            }
        }
    }
    Ok(())
}
