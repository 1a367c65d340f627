//! `POST /v1/tails`: the question as JSON, its evaluation, the answer as JSON.
//!
//! A question is parsed once and may be evaluated several times: `waits` keeps those that wait for a change.

use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::limits::{TAILS_PLACES_MAX, TAILS_STREAMS_MAX, TAILS_WAIT_MAX_MS};
use crate::log::endings::Ending;
use crate::model::{Offset, StreamId, is_reserved};
use crate::refusal::Refusal;
use crate::serve::pipeline::lists::Bounded;
use crate::serve::pipeline::news::News;
use crate::serve::pipeline::patterns::{Matcher, Pattern, Patterns, Turn};
use crate::serve::pipeline::{Answer, Held, take_answer_room};
use crate::shard::engine::{Engine, Undone};
use crate::shard::tails::{Found, Place, Tail, Wanted};
use crate::stream::handle::Stream;
use crate::stream::offsets::Gap;

/// A question that is well formed.
pub struct Question {
    pub(super) which: Which,
    /// Stamp of the earlier answer; `None`: everything is wanted.
    pub(super) since: Option<u64>,
    /// Streams of a pattern are wanted page by page: those behind this name.
    after: Option<Box<str>>,
    pub wait_ms: u64,
    /// What it takes beside a pattern, which counts by itself.
    _held: Held,
}

pub(super) enum Which {
    Named(Vec<Named>),
    Matching(Arc<Pattern>),
}

pub(super) struct Named {
    pub(super) name: Box<str>,
    /// The one that is meant; if it is gone, its end is told.
    incarnation: Option<StreamId>,
    at: Vec<Wanted>,
}

impl Named {
    fn memory_len(&self) -> usize {
        let texts = self.at.iter().map(|wanted| match wanted {
            Wanted::Offset(text) => text.len(),
            _ => 0,
        });
        size_of::<Named>()
            + self.name.len()
            + self.at.len() * size_of::<Wanted>()
            + texts.sum::<usize>()
    }
}

// --- the question ----------------------------------------------------------------------------

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked<'a> {
    #[serde(borrow)]
    streams: Option<Bounded<AskedStream<'a>, TAILS_STREAMS_MAX>>,
    #[serde(borrow)]
    pattern: Option<Cow<'a, str>>,
    #[serde(borrow)]
    cursor: Option<Cow<'a, str>>,
    #[serde(borrow)]
    after: Option<Cow<'a, str>>,
    #[serde(default)]
    wait_ms: u64,
}

enum AskedStream<'a> {
    Name(Cow<'a, str>),
    With(AskedPlaces<'a>),
}

/// By hand: to tell them apart, a derived one would first keep all of it in a form that takes many times its bytes.
impl<'de: 'a, 'a> Deserialize<'de> for AskedStream<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NameOrPlaces)
    }
}

struct NameOrPlaces;

impl<'de> Visitor<'de> for NameOrPlaces {
    type Value = AskedStream<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a name, or an object with name, incarnation and at")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(AskedStream::Name(name.into()))
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(AskedStream::Name(name.to_owned().into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        AskedPlaces::deserialize(MapAccessDeserializer::new(map)).map(AskedStream::With)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedPlaces<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(default, borrow)]
    incarnation: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    at: Bounded<AskedPlace<'a>, TAILS_PLACES_MAX>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum AskedPlace<'a> {
    Number(u64),
    TimeMs(u64),
    Byte(u64),
    Offset(#[serde(borrow)] Cow<'a, str>),
}

impl From<AskedPlace<'_>> for Wanted {
    fn from(asked: AskedPlace<'_>) -> Wanted {
        match asked {
            AskedPlace::Number(number) => Wanted::Number(number),
            AskedPlace::TimeMs(time_ms) => Wanted::TimeMs(time_ms),
            AskedPlace::Byte(byte) => Wanted::Byte(byte),
            AskedPlace::Offset(text) => Wanted::Offset(text.into()),
        }
    }
}

impl Question {
    pub fn parse(engine: &Engine, patterns: &Patterns, body: &[u8]) -> Result<Question, Refusal> {
        let asked: Asked<'_> = super::parse_json(body)?;
        let hold = |bytes| Held::new(&engine.metrics, bytes);
        let which = match (asked.streams, asked.pattern) {
            (Some(streams), None) => Which::Named(parse_names(streams.0)?),
            (None, Some(pattern)) => Which::Matching(patterns.get(&pattern, hold)?),
            _ => return Err(bad("Give exactly one of streams and pattern.")),
        };
        let has_pattern = matches!(which, Which::Matching(_));
        if asked.after.is_some() && (asked.cursor.is_some() || !has_pattern) {
            return Err(bad("after is for a pattern without a cursor."));
        }
        if asked.wait_ms > TAILS_WAIT_MAX_MS {
            return Err(bad(format!("wait_ms is at most {TAILS_WAIT_MAX_MS}.")));
        }
        let since = asked
            .cursor
            .and_then(|cursor| engine.shard.changes.parse(&cursor));
        let named = match &which {
            Which::Named(named) => named.iter().map(Named::memory_len).sum(),
            Which::Matching(_) => 0,
        };
        let after: Option<Box<str>> = asked.after.map(Into::into);
        let named = named + after.as_ref().map_or(0, |after| after.len());
        Ok(Question {
            which,
            since,
            after,
            wait_ms: asked.wait_ms,
            _held: hold(size_of::<Question>() + named),
        })
    }

    pub fn has_pattern(&self) -> bool {
        matches!(self.which, Which::Matching(_))
    }

    fn named(&self, number: usize) -> Option<&Named> {
        match &self.which {
            Which::Named(named) => named.get(number),
            Which::Matching(_) => None,
        }
    }
}

fn bad(detail: impl Into<Cow<'static, str>>) -> Refusal {
    Refusal::with(ErrorCode::BadRequest, detail)
}

fn parse_names(streams: Vec<AskedStream<'_>>) -> Result<Vec<Named>, Refusal> {
    if streams.len() > TAILS_STREAMS_MAX {
        return Err(Refusal::with(
            ErrorCode::TooManyStreams,
            format!("A question is about at most {TAILS_STREAMS_MAX} streams."),
        ));
    }
    let named = streams
        .into_iter()
        .map(|stream| match stream {
            AskedStream::Name(name) => Ok(Named {
                name: name.into(),
                incarnation: None,
                at: Vec::new(),
            }),
            AskedStream::With(places) => Ok(Named {
                name: places.name.into(),
                incarnation: places.incarnation.as_deref().map(parse_id).transpose()?,
                at: places.at.0.into_iter().map(Wanted::from).collect(),
            }),
        })
        .collect::<Result<Vec<Named>, Refusal>>()?;
    if let Some(reserved) = named.iter().find(|named| is_reserved(&named.name)) {
        return Err(bad(format!("{:?} is a reserved name.", reserved.name)));
    }
    if named.iter().map(|named| named.at.len()).sum::<usize>() > TAILS_PLACES_MAX {
        return Err(bad(format!(
            "A question asks for at most {TAILS_PLACES_MAX} places."
        )));
    }
    Ok(named)
}

fn parse_id(text: &str) -> Result<StreamId, Refusal> {
    let parsed = text.parse().map(StreamId);
    parsed.map_err(|_| bad(format!("{text:?} is not an incarnation.")))
}

// --- its evaluation --------------------------------------------------------------------------

/// An answer before it is rendered.
pub struct Evaluated {
    pub(super) stamp: u64,
    complete: bool,
    missing: Vec<Box<str>>,
    /// How streams ended that are missing, or were meant and are replaced.
    removed: Vec<Ending>,
    streams: Vec<(Tail, Places)>,
    /// There are more behind this name.
    next: Option<Box<str>>,
    /// What is not looked at yet: a look may have to wait for the log, and goes on here then.
    looks: VecDeque<Look>,
    /// Of what matched before: names of which nothing may be left.
    gone: BTreeSet<Box<str>>,
}

/// A stream to be told of, and the number of who named it.
struct Look {
    stream: Option<Arc<Stream>>,
    asked: Option<usize>,
}

impl Look {
    fn at(stream: Arc<Stream>) -> Look {
        Look {
            stream: Some(stream),
            asked: None,
        }
    }
}

/// What a name takes, about.
const NAME_BYTES: usize = 64;

type Places = Option<Vec<Result<Found, Refusal>>>;

/// What the places of a stream take, with what is said of those that it does not have.
fn places_len(places: &[Result<Found, Refusal>]) -> usize {
    let refused = places.iter().filter_map(|place| place.as_ref().err());
    let said: usize = refused.map(|refusal| refusal.sentence().len()).sum();
    size_of_val(places) + said
}

impl Evaluated {
    fn new(stamp: u64, complete: bool) -> Evaluated {
        Evaluated {
            stamp,
            complete,
            missing: Vec::new(),
            removed: Vec::new(),
            streams: Vec::new(),
            next: None,
            looks: VecDeque::new(),
            gone: BTreeSet::new(),
        }
    }

    /// Looks at the streams, each when what it is is final. `Undone::Wait`: the next one is not; again after the next
    /// commit.
    pub fn look(&mut self, engine: &Engine, question: &Question) -> Result<(), Undone> {
        while let Some(look) = self.looks.front() {
            let tail = look
                .stream
                .as_ref()
                .map(|stream| engine.settled_tail(stream));
            let tail = tail.transpose()?.flatten();
            let Some(Look { stream, asked }) = self.looks.pop_front() else {
                break;
            };
            match (asked.and_then(|number| question.named(number)), stream) {
                (Some(asked), Some(stream)) if let Some(tail) = tail => {
                    self.meet(engine, asked, &stream, tail)?;
                }
                (Some(asked), _) => self.miss(engine, asked),
                (None, Some(stream)) => match tail {
                    Some(tail) => self.push_matching(tail)?,
                    None => drop(self.gone.insert(stream.path.clone())),
                },
                (None, None) => {}
            }
        }
        if question.has_pattern() {
            self.finish_matching(engine);
        }
        Ok(())
    }

    fn push_matching(&mut self, tail: Tail) -> Result<(), Undone> {
        if self.complete && self.streams.len() == TAILS_STREAMS_MAX {
            return Err(Undone::refused(Refusal::with(
                ErrorCode::TooManyStreams,
                format!("More than {TAILS_STREAMS_MAX} streams match the pattern."),
            )));
        }
        self.streams.push((tail, None));
        Ok(())
    }

    fn finish_matching(&mut self, engine: &Engine) {
        self.streams
            .sort_unstable_by(|(one, _), (other, _)| one.name.cmp(&other.name));
        if self.complete {
            return;
        }
        // One that was created again is there.
        for (tail, _) in &self.streams {
            self.gone.remove(&tail.name);
        }
        self.missing = std::mem::take(&mut self.gone).into_iter().collect();
        let ends = self.missing.iter();
        self.removed = ends.filter_map(|name| engine.ending(name, None)).collect();
    }

    /// What it takes while it waits, about.
    pub fn memory_len(&self) -> usize {
        let streams = self.looks.iter().filter_map(|look| look.stream.as_ref());
        // Nobody else has it: it was read for this answer.
        let own = streams.filter(|stream| Arc::strong_count(stream) == 1);
        let read: u64 = own.map(|stream| stream.lock().looked_at_memory()).sum();
        let places = self
            .streams
            .iter()
            .filter_map(|(_, places)| places.as_deref());
        let told = self.streams.len() * (size_of::<(Tail, Places)>() + NAME_BYTES)
            + (self.missing.len() + self.gone.len()) * NAME_BYTES
            + self.removed.len() * (size_of::<Ending>() + NAME_BYTES)
            + places.map(places_len).sum::<usize>();
        told + self.looks.len() * size_of::<Look>() + read as usize
    }

    /// A named stream is not there.
    fn miss(&mut self, engine: &Engine, asked: &Named) {
        self.missing.push(asked.name.clone());
        self.removed
            .extend(engine.ending(&asked.name, asked.incarnation));
    }

    /// A named stream is there, or another one that has its name now.
    fn meet(
        &mut self,
        engine: &Engine,
        asked: &Named,
        stream: &Arc<Stream>,
        tail: Tail,
    ) -> Result<(), Undone> {
        if let Some(meant) = asked.incarnation.filter(|meant| *meant != tail.incarnation) {
            self.removed.extend(engine.ending(&asked.name, Some(meant)));
        }
        let places = find_places(engine, stream, asked)?;
        self.streams.push((tail, places));
        Ok(())
    }

    /// How much there is to tell, about: names are long, places are short.
    fn told_bytes(&self) -> usize {
        let places = self.streams.iter().flat_map(|(_, places)| places);
        let places: usize = places.map(Vec::len).sum();
        1024 * (self.streams.len() + self.missing.len() + self.removed.len()) + 256 * places
    }

    /// Whether there is anything to tell.
    pub fn is_news(&self) -> bool {
        self.complete || !self.missing.is_empty() || !self.streams.is_empty()
    }
}

/// What the answer to a question is about, as things are now; [`Evaluated::look`] follows. `news` is of the question's own stamp or of an earlier one.
pub fn evaluate(
    engine: &Engine,
    question: &Question,
    news: &News,
    turn: &Turn<'_>,
) -> Result<Evaluated, Undone> {
    if let Some(since) = question.since.filter(|since| news.tells_since(*since)) {
        let mut evaluated = Evaluated::new(news.stamp, false);
        match &question.which {
            Which::Named(named) => changed_named(engine, named, since, news, &mut evaluated)?,
            Which::Matching(pattern) => {
                let matcher = pattern.matcher(turn)?;
                changed_matching(&matcher, since, news, &mut evaluated)?;
            }
        }
        return Ok(evaluated);
    }
    let mut evaluated = Evaluated::new(engine.shard.changes.begin(), true);
    match &question.which {
        Which::Named(named) => {
            for (number, asked) in named.iter().enumerate() {
                evaluated.looks.push_back(Look {
                    stream: engine.find_to_read(&asked.name)?,
                    asked: Some(number),
                });
            }
        }
        Which::Matching(pattern) => {
            let matcher = pattern.matcher(turn)?;
            let (prefix, after) = (matcher.prefix(), question.after.as_deref());
            let found = engine.all_matching(prefix, after, &|name| matcher.matches(name))?;
            evaluated.looks = found.streams.into_iter().map(Look::at).collect();
            evaluated.next = found.next;
        }
    }
    Ok(evaluated)
}

/// Places, and why there are none. That is said of offsets that the stream does not have, and of nothing else: what fails
/// for another reason fails the question, so that nobody takes it for a loss.
fn find_places(engine: &Engine, stream: &Arc<Stream>, asked: &Named) -> Result<Places, Undone> {
    let found = |wanted: &Wanted| {
        if engine.stopping.load(Ordering::Acquire) {
            return Err(Undone::refused(ErrorCode::ShuttingDown));
        }
        match engine.find_place(stream, wanted) {
            Err(refusal) if !refusal.code.is_about_offset() => Err(Undone::refused(refusal)),
            told => Ok(told),
        }
    };
    let places = (!asked.at.is_empty()).then(|| asked.at.iter().map(found).collect());
    places.transpose()
}

/// Which of some streams have changed.
fn changed_named(
    engine: &Engine,
    named: &[Named],
    since: u64,
    news: &News,
    evaluated: &mut Evaluated,
) -> Result<(), Undone> {
    for (number, asked) in named.iter().enumerate() {
        let changed = news.changed(&asked.name, since);
        // One that was created again and is not visible yet is no news.
        if changed.is_some()
            || (news.removed(&asked.name, since) && engine.find_to_read(&asked.name)?.is_none())
        {
            evaluated.looks.push_back(Look {
                stream: changed.cloned(),
                asked: Some(number),
            });
        }
    }
    Ok(())
}

fn changed_matching(
    matcher: &Matcher<'_>,
    since: u64,
    news: &News,
    evaluated: &mut Evaluated,
) -> Result<(), Undone> {
    let prefix = matcher.prefix();
    for stream in news.all_changed(prefix, since) {
        if matcher.matches(&stream.path)? {
            evaluated.looks.push_back(Look::at(Arc::clone(stream)));
        }
    }
    for name in news.all_removed(prefix, since) {
        if matcher.matches(name)? {
            evaluated.gone.insert(name.into());
        }
    }
    Ok(())
}

// --- the answer ------------------------------------------------------------------------------

/// The answer to a question about which nothing is known behind its earlier answer.
pub fn no_news(engine: &Engine, since: u64) -> Result<Answer, Undone> {
    render(engine, &Evaluated::new(since, false))
}

#[derive(Serialize)]
struct Told<'a> {
    cursor: String,
    complete: bool,
    now_ms: u64,
    missing: &'a [Box<str>],
    removed: Vec<ToldEnding<'a>>,
    streams: Vec<ToldStream<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<&'a str>,
}

#[derive(Serialize)]
struct ToldEnding<'a> {
    name: &'a str,
    incarnation: String,
    tail: ToldPlace,
    epoch: u64,
    time_ms: u64,
}

impl<'a> From<&'a Ending> for ToldEnding<'a> {
    fn from(ending: &'a Ending) -> ToldEnding<'a> {
        ToldEnding {
            name: &ending.name,
            incarnation: ending.incarnation.0.to_string(),
            tail: ToldPlace {
                offset: ending.tail,
                number: ending.records,
            },
            epoch: ending.newest_epoch,
            time_ms: ending.time_ms,
        }
    }
}

#[derive(Serialize)]
struct ToldStream<'a> {
    name: &'a str,
    incarnation: String,
    content_type: &'a str,
    class: &'static str,
    closed: bool,
    first: ToldPlace,
    tail: ToldPlace,
    bytes: u64,
    time_ms: Option<u64>,
    epochs: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<Vec<ToldFound<'a>>>,
}

#[derive(Serialize)]
struct ToldPlace {
    #[serde(serialize_with = "as_text")]
    offset: Offset,
    number: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ToldFound<'a> {
    Place {
        #[serde(flatten)]
        place: ToldPlace,
        time_ms: Option<u64>,
        gap: Option<ToldGap>,
    },
    Error {
        error: ToldError<'a>,
    },
}

#[derive(Serialize)]
struct ToldError<'a> {
    code: &'static str,
    detail: &'a str,
}

/// A gap as the pipeline paths tell it.
#[derive(Serialize)]
pub struct ToldGap {
    #[serde(serialize_with = "as_text")]
    pub from: Offset,
    #[serde(serialize_with = "as_text")]
    pub to: Offset,
    pub reason: &'static str,
    pub certain: bool,
}

impl From<Gap> for ToldGap {
    fn from(gap: Gap) -> ToldGap {
        ToldGap {
            from: gap.from,
            to: gap.to,
            reason: gap.reason.name(),
            certain: gap.certain,
        }
    }
}

fn as_text<S: serde::Serializer>(offset: &Offset, out: S) -> Result<S::Ok, S::Error> {
    out.collect_str(offset)
}

impl From<Place> for ToldPlace {
    fn from(place: Place) -> ToldPlace {
        ToldPlace {
            offset: place.offset,
            number: place.number,
        }
    }
}

fn tell_found(found: &Result<Found, Refusal>) -> ToldFound<'_> {
    match found {
        Ok(found) => ToldFound::Place {
            place: found.place.into(),
            time_ms: found.time_ms,
            gap: found.gap.map(ToldGap::from),
        },
        Err(refusal) => ToldFound::Error {
            error: ToldError {
                code: refusal.code.code(),
                detail: refusal.sentence(),
            },
        },
    }
}

pub fn render(engine: &Engine, evaluated: &Evaluated) -> Result<Answer, Undone> {
    let _room = take_answer_room(&engine.metrics, evaluated.told_bytes())?;
    let streams = evaluated.streams.iter().map(|(tail, places)| ToldStream {
        name: &tail.name,
        incarnation: tail.incarnation.0.to_string(),
        content_type: &tail.content_type.text,
        class: tail.class.name(),
        closed: tail.closed,
        first: tail.first.into(),
        tail: tail.tail.into(),
        bytes: tail.bytes,
        time_ms: tail.time_ms,
        epochs: tail.epochs,
        at: places
            .as_ref()
            .map(|places| places.iter().map(tell_found).collect()),
    });
    let told = Told {
        cursor: engine.shard.changes.cursor(evaluated.stamp),
        complete: evaluated.complete,
        now_ms: engine.now_ms(),
        missing: &evaluated.missing,
        removed: evaluated.removed.iter().map(ToldEnding::from).collect(),
        streams: streams.collect(),
        next: evaluated.next.as_deref(),
    };
    let body = super::to_json(&told).map_err(Undone::refused)?;
    Ok(Answer::json(200, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Class, ContentType};

    const PLACE: Place = Place {
        offset: Offset::START,
        number: 0,
    };

    fn told(places: Places) -> Evaluated {
        let tail = Tail {
            name: "a".into(),
            incarnation: StreamId(1),
            content_type: Arc::new(ContentType::new("text/plain")),
            class: Class::Fsync,
            closed: false,
            first: PLACE,
            tail: PLACE,
            bytes: 0,
            time_ms: None,
            epochs: 1,
        };
        let mut evaluated = Evaluated::new(0, false);
        evaluated.streams.push((tail, places));
        evaluated
    }

    #[test]
    fn places_of_an_answer_that_waits_are_counted() {
        let none = told(None).memory_len();
        let found = |_| {
            Ok(Found {
                place: PLACE,
                time_ms: None,
                gap: None,
            })
        };
        let found = told(Some((0..1000).map(found).collect())).memory_len();
        assert!(found - none >= 1000 * size_of::<Found>());
        let refused = |_| Err(bad("x".repeat(100)));
        let refused = told(Some((0..1000).map(refused).collect())).memory_len();
        assert!(refused - found >= 1000 * 100, "what is said of each, too");
    }
}
