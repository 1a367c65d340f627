//! Creates, repeated creates and forks.

use millstream_core::error::ErrorCode;
use millstream_core::model::{Class, Gate, Offset};
use millstream_core::shard::create::Created;
use millstream_core::shard::engine::{Engine, Undone};
use millstream_core::stream::lifecycle::{CreateRequest, ForkRequest};
use millstream_core::stream::offsets;

use super::{Done, Told};
use crate::check;
use crate::model::{Piece, Standing, StreamModel};
use crate::plan::{ForkWish, Op, PATHS};
use crate::run::Sim;

const TTL_SECONDS: u64 = 1_000;
const JSON_TYPE: &str = "application/json";
const BINARY_TYPE: &str = "application/octet-stream";

impl Sim {
    pub(super) fn create(&mut self, op: &Op) -> Done {
        let Op::Create {
            path,
            json,
            class,
            ttl,
            closed,
            size,
            fork,
        } = op.clone()
        else {
            return Err("not a create".into());
        };
        let path = PATHS[path];
        let source_json = fork
            .and_then(|fork| self.world.at(PATHS[fork.source]))
            .map(|model| model.json);
        let json = source_json.unwrap_or(json && fork.is_none());
        let content = (size > 0).then(|| self.payload(json, size));
        let (body, piece) = content.map_or((Vec::new(), None), |(body, piece)| (body, Some(piece)));
        let mut prediction = Err(Vec::new());
        let mut request_fork = None;
        let result = self.patiently(|sim, engine| {
            let resolved = fork
                .map(|wish| sim.resolve_fork(engine, wish))
                .transpose()?;
            request_fork = resolved.clone();
            prediction = sim.predict_create(path, fork, resolved.as_ref());
            let request = CreateRequest {
                content_type: fork
                    .is_none()
                    .then_some(if json { JSON_TYPE } else { BINARY_TYPE }),
                ttl_seconds: ttl.then_some(TTL_SECONDS),
                expires_at_ms: None,
                closed,
                class: Some(class),
                fork: resolved.as_ref().map(|fork| ForkRequest {
                    source_path: fork.source,
                    offset: fork.offset,
                    sub_offset: fork.sub_offset,
                }),
                received_ms: 0,
            };
            Ok(engine.create(path, &request, &body, engine.now_ms()))
        })?;
        let source = fork.map(|fork| PATHS[fork.source]);
        let about = |sim: &Sim, reason: &Undone| match reason {
            Undone::Refused { refusal, .. } if refusal.code == ErrorCode::StreamConflict => {
                sim.state_at(path)
            }
            _ => source.map_or(Told::Nothing, |source| sim.identity_at(source)),
        };
        let created = match (result, &prediction) {
            (None, _) => return Ok("waits".into()),
            (Some(Err(reason)), Err(codes)) => {
                let about = about(self, &reason);
                return self.refused(&reason, codes, about);
            }
            (Some(Err(reason)), Ok(base)) => {
                let about = about(self, &reason);
                return self.refused(&reason, &base.or_refused, about);
            }
            (Some(Ok(created)), _) => created,
        };
        if !created.new {
            return self.was_there(path, &created);
        }
        let Ok(base) = prediction else {
            return Err(format!("created, should be refused with {prediction:?}"));
        };
        let first = base.prefix.clone().into_iter().chain(piece).collect();
        self.created(op, &created, json, base, first)?;
        self.requests
            .insert(created.stream.id.0, (op.clone(), request_fork));
        self.acknowledge_at(path, created.gate, created.offset)?;
        Ok(format!(
            "incarnation {} at {} gate {:?}",
            created.stream.id.0, created.offset, created.gate
        ))
    }

    /// Puts a new stream into the model.
    fn created(
        &mut self,
        op: &Op,
        created: &Created,
        json: bool,
        base: Base,
        first: Vec<Piece>,
    ) -> Result<(), String> {
        let Op::Create {
            path,
            class,
            ttl,
            closed,
            ..
        } = op
        else {
            return Err("not a create".into());
        };
        let sequence = self.engine().shard.staged();
        let gate = Gate::synced(sequence);
        let (id, epoch) = (created.stream.id.0, created.offset.epoch);
        if (base.source.is_none() || !first.is_empty()) && epoch != id {
            return Err(format!("a new stream's first bytes are in epoch {epoch}"));
        }
        let mut pieces = base.pieces;
        pieces.extend(first.into_iter().map(|piece| Piece {
            gate,
            volatile: *class == Class::Ephemeral,
            ..piece
        }));
        let model = StreamModel {
            id,
            path: PATHS[*path],
            json,
            class: *class,
            ttl: *ttl || base.ttl,
            born_in_sleep: self.sleeps,
            deleted: false,
            closed: *closed,
            closed_by: None,
            close_gate: gate,
            source: base.source,
            ever_forked: false,
            pieces,
            producers: Default::default(),
            committers: Default::default(),
            stream_seq: None,
            epoch,
            control: sequence,
            newest: sequence,
        };
        self.world.insert(model, self.sleeps);
        Ok(())
    }

    fn was_there(&mut self, path: &'static str, created: &Created) -> Done {
        let live = self.world.standing(path, self.sleeps) == Standing::Live;
        match self.world.at(path).filter(|_| live).cloned() {
            None => Err("answered as if it were there".into()),
            Some(model) => {
                self.park(created.gate, Told::State(Box::new(model)))?;
                Ok(format!("was there, gate {:?}", created.gate))
            }
        }
    }

    fn resolve_fork(&self, engine: &Engine, wish: ForkWish) -> Result<ResolvedFork, String> {
        let source = PATHS[wish.source];
        let mut resolved = ResolvedFork {
            source,
            offset: None,
            pieces: 0,
            sub_offset: wish.sub_offset,
        };
        let Some(model) = self.world.at(source) else {
            return Ok(resolved);
        };
        let visible = model.visible(self.marks());
        resolved.pieces = visible;
        let Some(boundary) = wish.boundary else {
            return Ok(resolved);
        };
        resolved.pieces = boundary as usize % (visible + 1);
        let position = model.bytes_of(resolved.pieces);
        let found = engine.find(source).map_err(|reason| check::undone(&reason));
        let Ok(Some(stream)) = found else {
            return Ok(resolved);
        };
        resolved.offset = Some(if position == 0 {
            Offset::START
        } else {
            offsets::offset_after(&stream.lock(), &engine.losses, position)
        });
        Ok(resolved)
    }

    /// What a create begins with, or the codes it may be refused with.
    fn predict_create(
        &self,
        path: &'static str,
        fork: Option<ForkWish>,
        resolved: Option<&ResolvedFork>,
    ) -> Result<Base, Vec<ErrorCode>> {
        let mut base = Base::default();
        match self.world.standing(path, self.sleeps) {
            Standing::Live | Standing::Kept => return Err(vec![ErrorCode::StreamConflict]),
            Standing::Fading => base.or_refused.push(ErrorCode::StreamConflict),
            Standing::Absent => {}
        }
        let (Some(wish), Some(resolved)) = (fork, resolved) else {
            return Ok(base);
        };
        let source = match (
            self.world.standing(resolved.source, self.sleeps),
            self.world.at(resolved.source),
        ) {
            (Standing::Live, Some(source)) => source,
            (Standing::Kept, _) => {
                return Err(vec![ErrorCode::ForkSourceGone, ErrorCode::StreamConflict]);
            }
            (Standing::Fading, _) => {
                return Err(vec![
                    ErrorCode::ForkSourceGone,
                    ErrorCode::ForkSourceMissing,
                    ErrorCode::StreamConflict,
                ]);
            }
            _ => {
                return Err(vec![
                    ErrorCode::ForkSourceMissing,
                    ErrorCode::StreamConflict,
                ]);
            }
        };
        base.source = Some(source.id);
        base.ttl = source.ttl;
        let kept = source.pieces[..resolved.pieces].iter().cloned();
        // The source keeps them for the fork, whatever they were.
        base.pieces = kept
            .map(|piece| Piece {
                gate: Gate::OPEN,
                volatile: false,
                // Producers are the source's.
                tag: None,
                ..piece
            })
            .collect();
        if wish.sub_offset > 0 {
            let visible = source.visible(self.marks());
            let next = source.pieces[..visible].get(resolved.pieces);
            base.prefix = next.and_then(|piece| first_units(piece, source.json, wish.sub_offset));
            if base.prefix.is_none() {
                return Err(vec![
                    ErrorCode::ForkOffsetInvalid,
                    ErrorCode::StreamConflict,
                ]);
            }
        }
        Ok(base)
    }

    /// The stream is deleted, and the same PUT makes another one of the path.
    pub(super) fn renew(&mut self, path: &'static str) -> Done {
        let request = self.world.at(path).map(|model| model.id);
        let request = request.and_then(|id| self.requests.get(&id).cloned());
        let Some((op, _)) = request else {
            return Ok("nothing there".into());
        };
        let deleted = self.delete(path)?;
        // A crash may come between the two.
        let between = self.engine().shard.staged();
        self.history.note(between, &self.world);
        Ok(format!("{deleted}, then {}", self.create(&op)?))
    }

    /// The same PUT again: the same stream, unless it was closed since.
    pub(super) fn recreate(&mut self, path: &'static str) -> Done {
        let live = self.world.standing(path, self.sleeps) == Standing::Live;
        let model = self.world.at(path).filter(|_| live);
        let request = model.and_then(|model| self.requests.get(&model.id).cloned());
        let (
            Some((
                Op::Create {
                    json,
                    ttl,
                    closed,
                    fork,
                    ..
                },
                resolved,
            )),
            Some(model),
        ) = (request, model.cloned())
        else {
            return Ok("nothing there".into());
        };
        let same = model.closed == closed;
        let request = CreateRequest {
            content_type: fork
                .is_none()
                .then_some(if json { JSON_TYPE } else { BINARY_TYPE }),
            ttl_seconds: ttl.then_some(TTL_SECONDS),
            closed,
            // Compared with the current one, whatever the stream was created with.
            class: Some(model.class),
            fork: resolved.as_ref().map(|fork| ForkRequest {
                source_path: fork.source,
                offset: fork.offset,
                sub_offset: fork.sub_offset,
            }),
            ..CreateRequest::default()
        };
        let engine = self.engine();
        match engine.create(path, &request, b"ignored", engine.now_ms()) {
            Ok(created) if created.new || !same => Err("created a second time".into()),
            Ok(created) => self.was_there(path, &created),
            Err(reason) if same => self.refused(&reason, &[], Told::Nothing),
            Err(reason) => {
                let about = self.state_at(path);
                self.refused(&reason, &[ErrorCode::StreamConflict], about)
            }
        }
    }
}

/// A fork's request with everything named.
#[derive(Clone, Debug)]
pub struct ResolvedFork {
    source: &'static str,
    offset: Option<Offset>,
    pieces: usize,
    sub_offset: u64,
}

#[derive(Default, Debug)]
struct Base {
    source: Option<u64>,
    pieces: Vec<Piece>,
    prefix: Option<Piece>,
    ttl: bool,
    or_refused: Vec<ErrorCode>,
}

/// The first bytes, or JSON messages, of an append.
fn first_units(piece: &Piece, json: bool, count: u64) -> Option<Piece> {
    if !json {
        return Some(Piece::new(piece.bytes.get(..count as usize)?, 1));
    }
    // Messages may be arrays, whose commas end nothing; no string of the workload has a bracket or a comma.
    let mut depth = 0;
    let mut ends = piece.bytes.iter().enumerate().filter(|(_, byte)| {
        match byte {
            b'[' => depth += 1,
            b']' => depth -= 1,
            _ => {}
        }
        **byte == b',' && depth == 0
    });
    let (end, _) = ends.nth(count as usize - 1)?;
    Some(Piece::new(&piece.bytes[..=end], count))
}
