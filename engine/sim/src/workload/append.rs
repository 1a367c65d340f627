//! Appends and closes, with and without a producer.

use std::sync::Arc;

use millstream_core::codec::ProducerTag;
use millstream_core::error::ErrorCode;
use millstream_core::model::{Gate, Offset};
use millstream_core::shard::engine::{Engine, Undone};
use millstream_core::shard::write::{Appended, WriteScratch};
use millstream_core::stream::append::AppendRequest;
use millstream_core::stream::handle::Stream;
use millstream_core::stream::json;

use super::{Done, Told};
use crate::model::{AppendWish, Marks, Outcome, StreamModel, Tag};
use crate::plan::ProducerWish;
use crate::run::Sim;

impl Sim {
    pub(super) fn append(
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
                Ok(None) => return Ok(Err(Engine::missing())),
                Err(reason) => return Ok(Err(reason)),
            };
            Ok(send(engine, &stream, &wish, &body, json, &mut scratch))
        })?;
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) => {
                let about = self.state_at(path);
                match predicted {
                    Outcome::Refuse(code) => self.refused(&reason, &[code], about),
                    Outcome::RefuseDead => {
                        let codes = [ErrorCode::StreamGone, ErrorCode::StreamNotFound];
                        self.refused(&reason, &codes, about)
                    }
                    _ => self.refused(&reason, &[], Told::Nothing),
                }
            }
            Some(Ok(done)) => self.appended(path, &wish, predicted, &done),
        }
    }

    fn appended(
        &mut self,
        path: &'static str,
        wish: &AppendWish,
        predicted: Outcome,
        done: &Appended,
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
            if predicted == Outcome::Duplicate && !self.world.has(path, wish.tag) {
                return Err("called a duplicate, and the stream does not have it".into());
            }
            return self.answered_again(path, predicted, done.gate);
        }
        if wish.tag.is_some() && self.world.has(path, wish.tag) {
            return Err("stored, and the stream has it already".into());
        }
        let (sequence, marks) = (self.engine().shard.staged(), self.marks());
        self.world.append(path, wish, sequence, marks);
        self.acknowledge_at(path, done.gate, done.offset)?;
        Ok(format!("at {} gate {:?}", done.offset, done.gate))
    }

    fn answered_again(&mut self, path: &'static str, predicted: Outcome, gate: Gate) -> Done {
        if self.bugs.early_duplicate {
            self.history.promise(Marks {
                written: gate.sequence,
                synced: gate.sequence,
            });
            return Ok("told at once".into());
        }
        self.park(gate, self.state_at(path))?;
        Ok(format!("{predicted:?} gate {gate:?}"))
    }

    /// The reply to something new: it says where the stream ends now.
    pub(super) fn acknowledge_at(
        &mut self,
        path: &'static str,
        gate: Gate,
        offset: Offset,
    ) -> Result<(), String> {
        let Some(model) = self.world.at(path) else {
            return Ok(());
        };
        if offset != model.tail_offset() {
            let tail = model.tail_offset();
            return Err(format!("answered with {offset}, the tail is {tail}"));
        }
        let told = Told::Offset(Box::new(model.clone()), offset, model.pieces.len());
        self.park(gate, told)
    }
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
    stream: &Arc<Stream>,
    wish: &AppendWish,
    body: &[u8],
    json: bool,
    scratch: &mut WriteScratch,
) -> Result<Appended, Undone> {
    let id = wish.tag.map(Tag::id_bytes);
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
