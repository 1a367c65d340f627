//! Runs operations against the engine as a server would, and says in the model what they mean.
//!
//! There are no threads but one: a checkpoint, which stands still at a chosen disk call while other operations run.
//! Acknowledgements wait in a list for their commit number, as a reactor's would.

use std::sync::Arc;

use millstream_core::codec::ProducerTag;
use millstream_core::error::ErrorCode;
use millstream_core::log::checkpoint::CheckpointError;
use millstream_core::model::{Class, Offset};
use millstream_core::shard::engine::{Engine, Undone};
use millstream_core::shard::write::WriteScratch;
use millstream_core::stream::append::AppendRequest;
use millstream_core::stream::json;
use millstream_core::stream::lifecycle::{CreateRequest, ForkRequest};
use millstream_core::stream::offsets;

use crate::check;
use crate::model::{AppendWish, Outcome, Piece, Standing, StreamModel, Tag, World};
use crate::plan::{ForkWish, Op, PATHS, ProducerWish};
use crate::run::Sim;

const TTL_SECONDS: u64 = 1_000;
/// Longer than any TTL with its slack.
const SLEEP_MS: u64 = 10_000_000;
const JSON_TYPE: &str = "application/json";
const BINARY_TYPE: &str = "application/octet-stream";

/// A reply that waits for its commit number, and what its receiver learns then.
pub struct Parked {
    gate: u64,
    learns: Option<(StreamModel, Offset, usize)>,
}

type Done = Result<String, String>;

impl Sim {
    pub fn operate(&mut self, op: &Op) -> Result<(), String> {
        let before = self.engine().shard.staged();
        let said = match op {
            Op::Create { .. } => self.create(op),
            Op::Recreate { path } => self.recreate(PATHS[*path]),
            Op::Append {
                path,
                size,
                producer,
                stream_seq,
                close,
            } => self.append(PATHS[*path], *size, *producer, *stream_seq, *close),
            Op::Delete { path } => self.delete(PATHS[*path]),
            Op::Read { path } => self.read(PATHS[*path]),
            Op::Commit => self.commit(false),
            Op::Checkpoint {
                pause_after,
                meanwhile,
            } => self.checkpoint(*pause_after, meanwhile),
            Op::PrepareSpares => {
                self.engine().prepare_spares();
                Ok(String::new())
            }
            Op::Purge => {
                self.engine().purge_requested();
                Ok(String::new())
            }
            Op::Sleep => {
                self.sleeps += 1;
                self.clock.advance_ms(SLEEP_MS);
                Ok(String::new())
            }
            Op::Sweep => {
                let engine = self.engine();
                engine.sweep_expired(engine.now_ms());
                Ok(String::new())
            }
            Op::Evict => {
                self.engine().directory.evict(0);
                Ok(String::new())
            }
            Op::Check => self.check_live().map(|()| String::new()),
        };
        let said = said.map_err(|problem| format!("{op:?}: {problem}"))?;
        let after = self.engine().shard.staged();
        self.trace
            .push(format!("  {before}..{after} {op:?} -> {said}"));
        self.history.note(after, &self.world);
        if self.bugs.ack_early {
            self.history.promise(after);
        }
        self.deliver()
    }

    /// Whether errors are to be expected: something was made to fail in this life.
    fn faulty(&self) -> bool {
        self.machine.fault_was_hit() || self.machine.is_off()
    }

    fn check_live(&mut self) -> Result<(), String> {
        let checked = check::world(&self.engine(), &self.world, self.sleeps);
        match checked {
            Err(problem) if self.faulty() && problem.contains("read failed") => Ok(()),
            Err(problem) if self.faulty() && problem.contains("looked up") => Ok(()),
            other => other,
        }
    }

    /// Repeats an operation that has to wait, as a reactor does after each commit.
    fn patiently<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Sim, &Engine) -> Result<Option<Result<T, Undone>>, String>,
    ) -> Result<Option<Result<T, Undone>>, String> {
        for _ in 0..4 {
            let engine = self.engine();
            match attempt(self, &engine)? {
                Some(Err(Undone::Wait)) => {
                    self.commit(false)?;
                    self.engine().prepare_spares();
                }
                other => return Ok(other),
            }
        }
        Ok(None)
    }

    fn refused(&self, reason: &Undone, allowed: &[ErrorCode]) -> Done {
        let Undone::Refused { refusal, .. } = reason else {
            return Ok("waits".into());
        };
        let by_fault = [
            ErrorCode::ServerBusy,
            ErrorCode::Internal,
            ErrorCode::StorageFull,
        ];
        if allowed.contains(&refusal.code) || (self.faulty() && by_fault.contains(&refusal.code)) {
            return Ok(refusal.code.code().into());
        }
        Err(format!("{}, should be {allowed:?}", check::undone(reason)))
    }

    fn payload(&mut self, json: bool, size: usize) -> (Vec<u8>, Piece) {
        self.counter += 1;
        if !json {
            let mut bytes = format!("<{}:", self.counter).into_bytes();
            bytes.resize(size.max(1), b'a' + (self.counter % 26) as u8);
            let piece = Piece::new(&bytes, 1);
            return (bytes, piece);
        }
        let count = 1 + size % 4;
        let filler = "x".repeat((size / count).min(200_000));
        let messages: Vec<String> = (0..count)
            .map(|number| format!("\"{}.{number}{filler}\"", self.counter))
            .collect();
        let wire: String = messages
            .iter()
            .map(|message| format!("{message},"))
            .collect();
        let body = format!("[{}]", messages.join(", "));
        (body.into_bytes(), Piece::new(wire.as_bytes(), count as u64))
    }

    // Appends

    fn append(
        &mut self,
        path: &'static str,
        size: usize,
        producer: Option<ProducerWish>,
        stream_seq: Option<i64>,
        close: bool,
    ) -> Done {
        let model = self.world.at(path);
        let json = model.is_some_and(|model| model.json);
        let tag = producer.map(|wish| tag_for(model, wish));
        let stream_seq = stream_seq.map(|step| {
            let last = model.and_then(|model| model.stream_seq.as_ref());
            let last = last.and_then(|seq| std::str::from_utf8(seq).ok()?.parse::<i64>().ok());
            format!("{:06}", (last.unwrap_or(5) + step).max(0)).into_bytes()
        });
        let content = (size > 0).then(|| self.payload(json, size));
        let (body, piece) = content.map_or((Vec::new(), None), |(body, piece)| (body, Some(piece)));
        let wish = AppendWish {
            tag,
            stream_seq,
            close,
            piece,
        };
        let mut scratch = WriteScratch::default();
        let mut predicted = Outcome::Accept;
        let result = self.patiently(|sim, engine| {
            predicted = sim.world.judge(path, &wish, sim.sleeps);
            let found = engine.find(path);
            let stream = match found {
                Ok(Some(stream)) => stream,
                Ok(None) => return Ok(Some(Err(Engine::missing()))),
                Err(reason) => return Ok(Some(Err(reason))),
            };
            Ok(Some(send(
                engine,
                &stream,
                &wish,
                &body,
                json,
                &mut scratch,
            )))
        })?;
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) => match predicted {
                Outcome::Refuse(code) => self.refused(&reason, &[code]),
                Outcome::RefuseDead => {
                    self.refused(&reason, &[ErrorCode::StreamGone, ErrorCode::StreamNotFound])
                }
                _ => self.refused(&reason, &[]),
            },
            Some(Ok(done)) => self.appended(path, &wish, predicted, &done),
        }
    }

    fn appended(
        &mut self,
        path: &'static str,
        wish: &AppendWish,
        predicted: Outcome,
        done: &millstream_core::shard::write::Appended,
    ) -> Done {
        let as_predicted = match predicted {
            Outcome::Accept => !done.duplicate,
            Outcome::Duplicate | Outcome::AlreadyClosed => done.duplicate,
            _ => false,
        };
        if !as_predicted {
            let taken = if done.duplicate { "a duplicate" } else { "new" };
            return Err(format!("taken as {taken}, should be {predicted:?}"));
        }
        if done.duplicate {
            if self.bugs.early_duplicate {
                self.history.promise(done.gate.sequence);
            }
            self.parked.push(Parked {
                gate: done.gate.sequence,
                learns: None,
            });
            return Ok(format!("{predicted:?} gate {}", done.gate.sequence));
        }
        self.world.append(path, wish);
        self.park(path, done.gate.sequence, done.offset)?;
        Ok(format!("at {} gate {}", done.offset, done.gate.sequence))
    }

    fn park(&mut self, path: &'static str, gate: u64, offset: Offset) -> Result<(), String> {
        let Some(model) = self.world.at(path) else {
            return Ok(());
        };
        let pieces = model.pieces.len();
        if offset.position != model.tail() {
            return Err(format!(
                "answered with {offset}, the tail is {}",
                model.tail()
            ));
        }
        if gate == 0 && model.fsync {
            return Err("an fsync stream's reply does not wait for the log".into());
        }
        let learns = Some((model.clone(), offset, pieces));
        self.parked.push(Parked { gate, learns });
        Ok(())
    }

    // Create, fork, delete

    fn create(&mut self, op: &Op) -> Done {
        let Op::Create {
            path,
            json,
            memory,
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
                class: Some(if memory { Class::Memory } else { Class::Fsync }),
                fork: resolved.as_ref().map(|fork| ForkRequest {
                    source_path: fork.source,
                    offset: fork.offset,
                    sub_offset: fork.sub_offset,
                }),
                received_ms: 0,
            };
            Ok(Some(engine.create(path, &request, &body, engine.now_ms())))
        })?;
        let created = match (result, &prediction) {
            (None, _) => return Ok("waits".into()),
            (Some(Err(reason)), Err(codes)) => return self.refused(&reason, codes),
            (Some(Err(reason)), Ok(base)) => return self.refused(&reason, &base.or_refused),
            (Some(Ok(created)), _) => created,
        };
        if !created.new {
            let live = self.world.standing(path, self.sleeps) == Standing::Live;
            return if live {
                Ok("was there".into())
            } else {
                Err("answered as if it were there".into())
            };
        }
        let Ok(base) = prediction else {
            return Err(format!("created, should be refused with {prediction:?}"));
        };
        let inherited = base.pieces.len();
        let mut model = StreamModel {
            id: created.stream.id.0,
            path,
            json,
            fsync: !memory,
            ttl: ttl || base.ttl,
            born_in_sleep: self.sleeps,
            deleted: false,
            closed,
            closed_by: None,
            source: base.source,
            ever_forked: false,
            pieces: base.pieces,
            visible: inherited,
            visible_closed: false,
            producers: Default::default(),
            stream_seq: None,
            losses: 0,
        };
        let first: Vec<Piece> = base.prefix.into_iter().chain(piece).collect();
        if !first.is_empty() {
            let bytes: Vec<u8> = first
                .iter()
                .flat_map(|piece| piece.bytes.iter().copied())
                .collect();
            model.pieces.push(Piece::new(
                &bytes,
                first.iter().map(|piece| piece.records).sum(),
            ));
        }
        if memory {
            model.publish();
        }
        self.world.insert(model, self.sleeps);
        self.requests
            .insert(created.stream.id.0, (op.clone(), request_fork));
        self.park(path, created.gate.sequence, created.offset)?;
        Ok(format!(
            "incarnation {} at {} gate {}",
            created.stream.id.0, created.offset, created.gate.sequence
        ))
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
        resolved.pieces = model.visible;
        let Some(boundary) = wish.boundary else {
            return Ok(resolved);
        };
        resolved.pieces = boundary as usize % (model.visible + 1);
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
        base.pieces = source.pieces[..resolved.pieces].to_vec();
        if wish.sub_offset > 0 {
            let next = source.pieces[..source.visible].get(resolved.pieces);
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

    /// The same PUT again: the same stream, unless it was closed since.
    fn recreate(&mut self, path: &'static str) -> Done {
        let live = self.world.standing(path, self.sleeps) == Standing::Live;
        let model = self.world.at(path).filter(|_| live);
        let request = model.and_then(|model| self.requests.get(&model.id).cloned());
        let (
            Some((
                Op::Create {
                    json,
                    memory,
                    ttl,
                    closed,
                    fork,
                    ..
                },
                resolved,
            )),
            Some(model),
        ) = (request, model)
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
            class: Some(if memory { Class::Memory } else { Class::Fsync }),
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
            Ok(created) => {
                self.parked.push(Parked {
                    gate: created.gate.sequence,
                    learns: None,
                });
                Ok(format!("the same, gate {}", created.gate.sequence))
            }
            Err(reason) if same => self.refused(&reason, &[]),
            Err(reason) => self.refused(&reason, &[ErrorCode::StreamConflict]),
        }
    }

    fn delete(&mut self, path: &'static str) -> Done {
        let standing = self.world.standing(path, self.sleeps);
        let allowed: &[ErrorCode] = match standing {
            Standing::Live => &[],
            Standing::Kept => &[ErrorCode::StreamGone],
            Standing::Fading => &[ErrorCode::StreamGone, ErrorCode::StreamNotFound],
            Standing::Absent => &[ErrorCode::StreamNotFound],
        };
        let result = self.patiently(|_, engine| {
            let stream = match engine.find(path) {
                Ok(Some(stream)) => stream,
                Ok(None) => return Ok(Some(Err(Engine::missing()))),
                Err(reason) => return Ok(Some(Err(reason))),
            };
            Ok(Some(engine.delete(&stream, engine.now_ms())))
        })?;
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) => self.refused(&reason, allowed),
            Some(Ok(_)) if standing != Standing::Live => {
                Err(format!("deleted, it is {standing:?}"))
            }
            Some(Ok(gate)) => {
                if let Some(model) = self.world.at_mut(path) {
                    model.deleted = true;
                }
                self.parked.push(Parked {
                    gate: gate.sequence,
                    learns: None,
                });
                Ok(format!("gate {}", gate.sequence))
            }
        }
    }

    fn read(&mut self, path: &'static str) -> Done {
        let engine = self.engine();
        let live = self.world.standing(path, self.sleeps) == Standing::Live;
        if let (true, Ok(Some(stream))) = (live, engine.find(path)) {
            let mut state = stream.lock();
            engine.renew_for_read(&stream, &mut state, engine.now_ms());
        }
        self.check_live().map(|()| String::new())
    }

    // Commits and checkpoints

    /// Commits all that is staged. Afterwards no reply may be left waiting, or it would wait for ever.
    pub fn commit(&mut self, sync_all: bool) -> Done {
        let engine = self.engine();
        if sync_all && let Ok(mut open) = engine.shard.open() {
            open.sync_target = open.next_sequence - 1;
        }
        while engine.shard.commit(None) {}
        if engine.shard.failed() {
            if !self.faulty() {
                return Err("the log failed though the disk did not".into());
            }
            return Ok("failed".into());
        }
        self.world.publish_all();
        self.deliver()?;
        match self.parked.first() {
            Some(parked) => Err(format!(
                "a reply that waits for {} is left behind at {} with nothing more to commit",
                parked.gate,
                engine.shard.synced()
            )),
            None => Ok(format!("synced {}", engine.shard.synced())),
        }
    }

    /// Hands out what the log has reached.
    pub fn deliver(&mut self) -> Result<(), String> {
        let synced = self.engine().shard.synced();
        self.history.promise(synced);
        for parked in std::mem::take(&mut self.parked) {
            if parked.gate > synced {
                self.parked.push(parked);
            } else if let Some((stream, offset, pieces)) = parked.learns {
                self.history.observe(&stream, offset, pieces)?;
            }
        }
        Ok(())
    }

    fn checkpoint(&mut self, pause_after: u64, meanwhile: &[Op]) -> Done {
        self.commit(true)?;
        let engine = self.engine();
        let machine = Arc::clone(&self.machine);
        machine.pause_after(pause_after);
        let (result, worked) = std::thread::scope(|scope| {
            let checkpoint = scope.spawn(|| {
                let result = engine.checkpoint();
                machine.finished();
                result
            });
            let mut worked = Ok(());
            if machine.wait_for_pause() {
                worked = meanwhile.iter().try_for_each(|op| {
                    if self.machine.is_off() {
                        Ok(())
                    } else {
                        self.operate(op)
                    }
                });
                machine.release();
            }
            (checkpoint.join(), worked)
        });
        self.machine.forget_pause();
        worked?;
        let result = result.map_err(|_| "the checkpoint panicked".to_owned())?;
        match result {
            Ok(()) => self.check_live().map(|()| "done".into()),
            Err(error) if !self.faulty() && !engine.shard.failed() => {
                Err(format!("checkpoint failed: {error}"))
            }
            Err(error) => {
                // As the maintenance thread does.
                if let CheckpointError::Catalog(_) = &error {
                    engine.shard.fail("the catalog could not be written");
                }
                self.check_live().map(|()| format!("failed: {error}"))
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
    let mut ends = piece
        .bytes
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b',');
    let (end, _) = ends.nth(count as usize - 1)?;
    Some(Piece::new(&piece.bytes[..=end], count))
}

fn tag_for(model: Option<&StreamModel>, wish: ProducerWish) -> Tag {
    let known = model.and_then(|model| model.producers.get(&wish.id));
    let (epoch, next) = known.map_or((0, 0), |known| (known.epoch, known.seq as i64 + 1));
    let (epoch, next) = if wish.new_epoch {
        (epoch + 1, 0)
    } else {
        (epoch, next)
    };
    Tag {
        id: wish.id,
        epoch,
        seq: (next + wish.seq_step).max(0) as u64,
    }
}

fn send(
    engine: &Engine,
    stream: &Arc<millstream_core::stream::handle::Stream>,
    wish: &AppendWish,
    body: &[u8],
    json: bool,
    scratch: &mut WriteScratch,
) -> Result<millstream_core::shard::write::Appended, Undone> {
    let id = wish.tag.map(|tag| [tag.id]);
    let request = AppendRequest {
        content_type: Some(stream.content_type.media_type.as_bytes()),
        body_empty: body.is_empty(),
        close: wish.close,
        producer: wish.tag.zip(id.as_ref()).map(|(tag, id)| ProducerTag {
            id,
            epoch: tag.epoch,
            seq: tag.seq,
        }),
        stream_seq: wish.stream_seq.as_deref(),
        if_match: None,
    };
    let mut wire = Vec::new();
    if json && !body.is_empty() {
        let records = json::flatten_into(body, &mut wire)
            .map_err(|error| millstream_core::shard::create::json_refusal(&error));
        return engine.append(stream, &request, &wire, records, engine.now_ms(), scratch);
    }
    let records = Ok(u32::from(!body.is_empty()));
    engine.append(stream, &request, body, records, engine.now_ms(), scratch)
}

/// Memory streams may have lost their tail: their producers begin anew.
pub fn after_unclean_start(world: &mut World) {
    let weak = world.streams.values_mut().filter(|stream| !stream.fsync);
    weak.for_each(|stream| stream.losses += 1);
}
