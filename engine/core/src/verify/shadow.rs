//! The log's frames held against the catalog: does each one apply where it says?
//!
//! What replay does, without the bytes: of each stream that the log touches only its end, life and forks are kept,
//! so memory grows with the streams in the log and not with its size. Afterwards the shadows say what the log adds
//! to the catalog, which the relations between streams need.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::codec::{AppendExtra, Frame, FrameKind, adopt};
use crate::log::catalog::{CatalogError, CatalogView};
use crate::model::{Adopted, Class, ContentType, StreamId};
use crate::stream::handle::Stream;
use crate::stream::snapshot;
use crate::stream::state::Life;

/// What a stream is after the log, as far as others depend on it.
#[derive(Clone, Debug)]
pub struct Shadow {
    pub path: Box<str>,
    pub class: Class,
    pub life: Life,
    pub start: u64,
    pub tail: u64,
    pub fork_count: u32,
    pub fork_source: Option<StreamId>,
    /// What frames have taken over from staged packs, with where it begins.
    pub adopted: Vec<(u64, Adopted)>,
    applied: u64,
}

impl Shadow {
    pub fn of(stream: &Stream) -> Shadow {
        let state = stream.lock();
        Shadow {
            path: stream.path.clone(),
            class: state.class,
            life: state.life,
            start: state.start,
            tail: state.tail,
            fork_count: state.fork_count,
            fork_source: state.fork.as_ref().map(|fork| fork.source),
            adopted: Vec::new(),
            applied: state.applied_sequence,
        }
    }
}

/// A frame that does not fit.
pub struct Misfit {
    pub stream: Option<Box<str>>,
    pub what: String,
}

pub struct Shadows<'v> {
    view: &'v CatalogView,
    streams: HashMap<StreamId, Shadow>,
    /// Paths that the log has given to a newer stream.
    by_path: HashMap<Box<str>, StreamId>,
    /// Streams with frames that nobody knows; their purge must follow.
    unknown: HashSet<StreamId>,
}

/// Decodes a catalog value or a create's configuration, which verification does for every stream once.
pub fn decode(bytes: &[u8]) -> Option<Stream> {
    snapshot::decode(bytes, |text| Arc::new(ContentType::new(text)))
}

pub fn decode_value(value: &[u8]) -> Option<Stream> {
    snapshot::unseal(value).and_then(decode)
}

impl<'v> Shadows<'v> {
    pub fn new(view: &'v CatalogView) -> Shadows<'v> {
        Shadows {
            view,
            streams: HashMap::new(),
            by_path: HashMap::new(),
            unknown: HashSet::new(),
        }
    }

    /// What the log says about a stream, if it says anything.
    pub fn get(&self, id: StreamId) -> Option<&Shadow> {
        self.streams.get(&id)
    }

    /// Streams that the log has touched.
    pub fn iter(&self) -> impl Iterator<Item = (StreamId, &Shadow)> {
        self.streams.iter().map(|(id, shadow)| (*id, shadow))
    }

    /// Streams with frames that neither the catalog nor a create knows.
    pub fn unknown(&self) -> Vec<StreamId> {
        let mut unknown: Vec<StreamId> = self.unknown.iter().copied().collect();
        unknown.sort_unstable();
        unknown
    }

    /// Loads a stream from the catalog unless the log has it already.
    pub fn load(&mut self, id: StreamId) -> Result<Option<&mut Shadow>, CatalogError> {
        if !self.streams.contains_key(&id) {
            let Some(shadow) = catalog_shadow(self.view, id)? else {
                return Ok(None);
            };
            self.streams.insert(id, shadow);
        }
        Ok(self.streams.get_mut(&id))
    }

    /// Applies one frame. `Err` is the catalog's failure, `Ok(Some)` a frame that does not fit.
    pub fn apply(&mut self, frame: &Frame<'_>) -> Result<Option<Misfit>, CatalogError> {
        match frame.kind {
            FrameKind::Start | FrameKind::CleanStop => Ok(None),
            FrameKind::Create => self.create(frame),
            _ => self.change(frame),
        }
    }

    fn create(&mut self, frame: &Frame<'_>) -> Result<Option<Misfit>, CatalogError> {
        let Some(stream) = decode(frame.extra).filter(|stream| stream.id == frame.stream) else {
            return Ok(misfit(None, frame, "the configuration does not decode"));
        };
        let existing = match self.by_path.get(&stream.path) {
            Some(id) => Some(*id),
            None => self
                .view
                .get(stream.path.as_bytes())?
                .and_then(|value| decode_value(&value).map(|stream| stream.id)),
        };
        match existing {
            Some(id) if id == frame.stream => return Ok(None),
            Some(id) if id > frame.stream => {
                // The path has been taken over since; the purge of this one is in the log too.
                self.unknown.insert(frame.stream);
                return Ok(None);
            }
            _ => {}
        }
        let mut shadow = Shadow::of(&stream);
        shadow.tail += frame.payload.len() as u64;
        shadow.applied = frame.sequence;
        self.by_path.insert(stream.path.clone(), stream.id);
        self.streams.insert(stream.id, shadow);
        Ok(None)
    }

    fn change(&mut self, frame: &Frame<'_>) -> Result<Option<Misfit>, CatalogError> {
        let Some(shadow) = self.load(frame.stream)? else {
            if frame.kind == FrameKind::Purge {
                self.unknown.remove(&frame.stream);
            } else {
                self.unknown.insert(frame.stream);
            }
            return Ok(None);
        };
        if frame.sequence <= shadow.applied {
            return Ok(None);
        }
        shadow.applied = frame.sequence;
        match frame.kind {
            FrameKind::Append => return Ok(append(shadow, frame)),
            FrameKind::Adopt => return Ok(adopt(shadow, frame)),
            FrameKind::SoftDelete => shadow.life = Life::SoftDeleted,
            FrameKind::Purge => shadow.life = Life::Gone,
            FrameKind::ForkAdded => shadow.fork_count += 1,
            FrameKind::ForkReleased => shadow.fork_count = shadow.fork_count.saturating_sub(1),
            FrameKind::Configure => {
                let Some(class) = frame.extra.first().copied().and_then(Class::from_u8) else {
                    let path = Some(shadow.path.clone());
                    return Ok(misfit(path, frame, "the class does not decode"));
                };
                shadow.class = class;
            }
            FrameKind::Touch | FrameKind::Create | FrameKind::Start | FrameKind::CleanStop => {}
        }
        Ok(None)
    }
}

fn append(shadow: &mut Shadow, frame: &Frame<'_>) -> Option<Misfit> {
    let path = Some(shadow.path.clone());
    if AppendExtra::decode(frame.flags, frame.extra).is_none() {
        return misfit(path, frame, "the producer tuple does not decode");
    }
    // A frame without bytes may close a stream whose bytes go through no frame: then it has no place.
    if frame.payload.is_empty() {
        return None;
    }
    go_on(shadow, frame, frame.payload.len() as u64)
}

fn adopt(shadow: &mut Shadow, frame: &Frame<'_>) -> Option<Misfit> {
    let extra = AppendExtra::decode(frame.flags, frame.extra);
    match (
        extra.and_then(|extra| extra.producer),
        adopt::decode(frame.payload),
    ) {
        (Some(_), Some(sections)) => {
            let mut start = frame.position;
            for section in sections.iter().filter(|section| section.len > 0) {
                shadow.adopted.push((start, *section));
                start = start.saturating_add(section.len);
            }
            go_on(shadow, frame, adopt::total_len(&sections))
        }
        _ => {
            let path = Some(shadow.path.clone());
            misfit(path, frame, "the staged sections do not decode")
        }
    }
}

fn go_on(shadow: &mut Shadow, frame: &Frame<'_>, len: u64) -> Option<Misfit> {
    let path = Some(shadow.path.clone());
    let expected = shadow.tail;
    shadow.tail = frame.position.saturating_add(len);
    if frame.position == expected {
        return None;
    }
    let what = format!(
        "it appends at {} but the stream ends at {expected}",
        frame.position
    );
    misfit(path, frame, &what)
}

fn misfit(stream: Option<Box<str>>, frame: &Frame<'_>, what: &str) -> Option<Misfit> {
    Some(Misfit {
        stream,
        what: format!(
            "frame {} of stream {} cannot be applied: {what}",
            frame.sequence, frame.stream.0
        ),
    })
}

/// A stream as the catalog has it.
pub fn catalog_shadow(view: &CatalogView, id: StreamId) -> Result<Option<Shadow>, CatalogError> {
    let Some(path) = view.path_of(id)? else {
        return Ok(None);
    };
    let value = view.get(&path)?;
    let stream = value.and_then(|value| decode_value(&value));
    Ok(stream
        .filter(|stream| stream.id == id)
        .map(|stream| Shadow::of(&stream)))
}
