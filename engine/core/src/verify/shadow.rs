//! The log's frames held against the catalog: does each one apply where it says?
//!
//! Replay itself, over streams that keep no bytes, so memory grows with the streams in the log and not with its size.
//! Afterwards they say what the log adds to the catalog, which the relations between streams need.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::codec::Frame;
use crate::log::catalog::{CatalogError, CatalogView};
use crate::log::replay::{NotApplied, Replay, Streams};
use crate::model::{Adopted, Class, ContentType, StreamId};
use crate::stream::change::Section;
use crate::stream::handle::Stream;
use crate::stream::hot::Hot;
use crate::stream::offsets::Losses;
use crate::stream::snapshot;
use crate::stream::state::{Life, StreamState};

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
        }
    }
}

/// A frame that does not fit.
pub struct Misfit {
    pub stream: Option<Box<str>>,
    pub what: String,
}

pub struct Shadows<'v> {
    replay: Replay<Shadowed<'v>>,
    /// Streams with a frame that did not fit: what follows it cannot fit either.
    broken: HashSet<StreamId>,
}

/// Decodes a catalog value or a create's configuration, which verification does for every stream once.
pub fn decode(bytes: &[u8]) -> Option<Stream> {
    snapshot::decode(bytes, &|text| Arc::new(ContentType::new(text)))
}

pub fn decode_value(value: &[u8]) -> Option<Stream> {
    snapshot::unseal(value).and_then(decode)
}

impl<'v> Shadows<'v> {
    pub fn new(view: &'v CatalogView) -> Shadows<'v> {
        let streams = Shadowed {
            view,
            streams: HashMap::new(),
            by_path: HashMap::new(),
            adopted: Vec::new(),
        };
        Shadows {
            replay: Replay::new(streams, Losses::default(), 0, None),
            broken: HashSet::new(),
        }
    }

    /// What the log says about a stream, if it says anything.
    pub fn get(&self, id: StreamId) -> Option<Shadow> {
        let stream = self.replay.streams.streams.get(&id)?;
        Some(Shadow::of(stream))
    }

    /// The path of a stream that the log or the catalog knows.
    pub fn path_of(&mut self, id: StreamId) -> Result<Option<Box<str>>, CatalogError> {
        let found = self.replay.streams.by_id(id)?;
        Ok(found.map(|stream| stream.path.clone()))
    }

    /// Streams that the log has touched.
    pub fn iter(&self) -> impl Iterator<Item = (StreamId, Shadow)> {
        let streams = self.replay.streams.streams.iter();
        streams.map(|(id, stream)| (*id, Shadow::of(stream)))
    }

    /// What frames have taken over from staged packs, with the stream and where it begins there.
    pub fn adopted(&self) -> impl Iterator<Item = (Shadow, u64, Adopted)> {
        let streams = &self.replay.streams;
        streams.adopted.iter().filter_map(|(id, start, section)| {
            let stream = streams.streams.get(id)?;
            Some((Shadow::of(stream), *start, *section))
        })
    }

    /// Streams with frames that neither the catalog nor a create knows.
    pub fn unknown(&self) -> Vec<StreamId> {
        self.replay.unknown()
    }

    /// Applies one frame. `Err` is the catalog's failure, `Ok(Some)` a frame that does not fit.
    pub fn apply(&mut self, frame: &Frame<'_>) -> Result<Option<Misfit>, CatalogError> {
        if self.broken.contains(&frame.stream) {
            return Ok(None);
        }
        match self.replay.apply(frame) {
            Ok(()) => Ok(None),
            Err(NotApplied::Failed(error)) => Err(error),
            Err(NotApplied::Unfit { stream, what }) => {
                self.broken.insert(frame.stream);
                Ok(Some(Misfit { stream, what }))
            }
        }
    }
}

/// Streams of a catalog as the log changes them, without bytes.
struct Shadowed<'v> {
    view: &'v CatalogView,
    streams: HashMap<StreamId, Arc<Stream>>,
    /// Paths that the log has given to a newer stream.
    by_path: HashMap<Box<str>, StreamId>,
    adopted: Vec<(StreamId, u64, Adopted)>,
}

impl Streams for Shadowed<'_> {
    type Error = CatalogError;

    fn by_path(&mut self, path: &str) -> Result<Option<Arc<Stream>>, CatalogError> {
        if let Some(id) = self.by_path.get(path) {
            return Ok(self.streams.get(id).cloned());
        }
        let value = self.view.get(path.as_bytes())?;
        Ok(value.and_then(|value| decode_value(&value)).map(Arc::new))
    }

    fn by_id(&mut self, id: StreamId) -> Result<Option<Arc<Stream>>, CatalogError> {
        if let Some(known) = self.streams.get(&id) {
            return Ok(Some(Arc::clone(known)));
        }
        let found = catalog_stream(self.view, id)?.map(Arc::new);
        if let Some(stream) = &found {
            self.streams.insert(id, Arc::clone(stream));
        }
        Ok(found)
    }

    fn intern(&self, content_type: &str) -> Arc<ContentType> {
        Arc::new(ContentType::new(content_type))
    }

    fn insert(&mut self, stream: &Arc<Stream>) {
        self.by_path.insert(stream.path.clone(), stream.id);
        self.streams.insert(stream.id, Arc::clone(stream));
    }

    /// Without the index: what is in the packs is examined later.
    fn sections(
        &mut self,
        frame: &Frame<'_>,
        adopted: Vec<Adopted>,
    ) -> Result<Vec<Section>, CatalogError> {
        let mut start = frame.position;
        for section in &adopted {
            self.adopted.push((frame.stream, start, *section));
            start = start.saturating_add(section.len);
        }
        let section = |section: Adopted| (section, Vec::new());
        Ok(adopted.into_iter().map(section).collect())
    }

    fn ending(&mut self, _: &Stream, _: &StreamState, _: &Frame<'_>, _: &Losses) {}

    fn changed(&mut self, _: &Arc<Stream>, state: &mut StreamState) {
        state.hot = Hot::starting_at(state.tail);
        state.abandoned.clear();
    }
}

fn catalog_stream(view: &CatalogView, id: StreamId) -> Result<Option<Stream>, CatalogError> {
    let Some(path) = view.path_of(id)? else {
        return Ok(None);
    };
    let stream = view.get(&path)?.and_then(|value| decode_value(&value));
    Ok(stream.filter(|stream| stream.id == id))
}

/// A stream as the catalog has it.
pub fn catalog_shadow(view: &CatalogView, id: StreamId) -> Result<Option<Shadow>, CatalogError> {
    Ok(catalog_stream(view, id)?.as_ref().map(Shadow::of))
}
