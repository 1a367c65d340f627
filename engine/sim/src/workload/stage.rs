//! Stages and their commits: rows of several streams, appended to all of them or to none.

use std::collections::BTreeMap;

use millstream_core::error::ErrorCode;
use millstream_core::model::Gate;
use millstream_core::shard::adopt::{CommitRequest, CommitStage, Committed};
use millstream_core::shard::engine::{Engine, Undone};
use millstream_core::shard::stage::{StageBuilder, Staged};

use super::{Done, Told};
use crate::model::{Outcome, Piece, ShareModel, StageModel, Standing, committer_name};
use crate::plan::PATHS;
use crate::run::Sim;

/// One row: where it goes and what it is.
type Row = (&'static str, Vec<u8>);

const DEAD: [ErrorCode; 3] = [
    ErrorCode::StreamNotFound,
    ErrorCode::StreamGone,
    ErrorCode::StreamRecreated,
];

impl Sim {
    pub(super) fn stage(&mut self, slot: usize, rows: &[(usize, usize)], strict: bool) -> Done {
        let waiting = |stage: &StageModel| !self.world.committed.contains_key(&stage.id);
        if self.staged.get(&slot).is_some_and(waiting) {
            return Ok("one waits".into());
        }
        let mut shares: BTreeMap<&'static str, ShareModel> = BTreeMap::new();
        let mut values: Vec<Row> = Vec::new();
        let mut allowed = Vec::new();
        for (path, size) in rows {
            let path = self.target(*path, strict);
            let standing = self.world.standing(path, self.sleeps);
            let model = self.world.at(path).filter(|_| standing == Standing::Live);
            let (json, stream) = model.map_or((false, 0), |model| (model.json, model.id));
            match model {
                None => allowed.extend(DEAD),
                Some(model) if model.closed => allowed.push(ErrorCode::StreamClosed),
                Some(_) => {}
            }
            let (value, piece) = self.row(json, *size);
            values.push((path, value));
            let share = shares.entry(path).or_insert(ShareModel {
                stream,
                path,
                pieces: Vec::new(),
            });
            share.add(piece, json);
        }
        self.counter += 1;
        let id = format!("stage-{}", self.counter);
        let checksum = self.counter as u32;
        let result = self.patiently(|_, engine| Ok(put(engine, &id, checksum, &values)))?;
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) => self.refused(&reason, &allowed, Told::Nothing),
            Some(Ok(_)) if !allowed.is_empty() => Err(format!("staged, should be {allowed:?}")),
            Some(Ok(staged)) => {
                for path in shares.keys() {
                    let told = self.identity_at(path);
                    self.park(Gate::OPEN, told)?;
                }
                let shares = shares.into_values().collect();
                let stage = StageModel {
                    id,
                    checksum,
                    shares,
                };
                self.staged.insert(slot, stage);
                Ok(format!("pack {}", staged.record.pack))
            }
        }
    }

    /// The path, or the next one whose stream takes rows.
    fn target(&self, path: usize, strict: bool) -> &'static str {
        let mut nearby = (0..PATHS.len()).map(|step| PATHS[(path + step) % PATHS.len()]);
        let takes_rows = |path: &&str| {
            let open = self.world.at(path).is_some_and(|model| !model.closed);
            open && self.world.standing(path, self.sleeps) == Standing::Live
        };
        let found = if strict {
            None
        } else {
            nearby.find(takes_rows)
        };
        found.unwrap_or(PATHS[path])
    }

    /// One record: a JSON value or bytes, and what is stored of it.
    fn row(&mut self, json: bool, size: usize) -> (Vec<u8>, Piece) {
        self.counter += 1;
        if !json {
            let mut bytes = format!("<{}:", self.counter).into_bytes();
            bytes.resize(size.max(bytes.len()), b'a' + (self.counter % 26) as u8);
            let piece = Piece::new(&bytes, 1);
            return (bytes, piece);
        }
        // Short, so that all of a stage are one append.
        let value = format!("[\"{}\", \"{}\"]", self.counter, "z".repeat(size.min(900)));
        let piece = Piece::new(format!("{value},").as_bytes(), 1);
        (value.into_bytes(), piece)
    }

    pub(super) fn commit_stage(&mut self, slot: usize, producer: u8, step: i64) -> Done {
        let slot = self.staged.range(slot..).next().map(|(slot, _)| *slot);
        let slot = slot.or(self.staged.keys().next().copied());
        let Some(stage) = slot.and_then(|slot| self.staged.get(&slot)).cloned() else {
            return Ok("none".into());
        };
        let (producer, epoch) = match self.world.committed.get(&stage.id) {
            Some(before) => *before,
            None => (producer, self.next_epoch(&stage, producer, step)),
        };
        let name = committer_name(producer);
        let adopted_before = self.engine().cold.adopted_sections();
        let result = self.patiently(|_, engine| {
            Ok(engine.commit_stages(&CommitRequest {
                producer: &name,
                epoch,
                streams: stage.shares.iter().map(|share| share.path).collect(),
                stages: vec![CommitStage {
                    id: &stage.id,
                    checksum: stage.checksum,
                }],
            }))
        })?;
        let live = self.world.all_live(&stage, self.sleeps);
        let predicted = self.world.judge_commit(&stage, producer, epoch);
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) => self.commit_refused(&reason, live, predicted),
            Some(Ok(done)) => {
                self.summary.commits += u64::from(!done.duplicate);
                let adopted = self.engine().cold.adopted_sections();
                self.summary.adopted += u64::from(adopted > adopted_before);
                self.committed(&stage, (producer, epoch), live, predicted, &done)
            }
        }
    }

    fn next_epoch(&self, stage: &StageModel, producer: u8, step: i64) -> u64 {
        let known = self.world.committer_epochs(stage, producer);
        let next = known.into_iter().max().map_or(1, |known| known + 1) as i64;
        (next + step).max(0) as u64
    }

    fn commit_refused(&mut self, reason: &Undone, live: bool, predicted: Outcome) -> Done {
        let mut allowed = Vec::new();
        if let Outcome::Refuse(code) = predicted {
            allowed.push(code);
        }
        if !live {
            // What a dead stream still knows depends on clean-up.
            allowed.extend(DEAD);
            allowed.extend([ErrorCode::ProducerFenced, ErrorCode::StageGone]);
        }
        self.refused(reason, &allowed, Told::Nothing)
    }

    fn committed(
        &mut self,
        stage: &StageModel,
        (producer, epoch): (u8, u64),
        live: bool,
        predicted: Outcome,
        done: &Committed,
    ) -> Done {
        let as_predicted = match predicted {
            Outcome::Accept => !done.duplicate && live,
            Outcome::Duplicate => done.duplicate,
            _ => false,
        };
        if !as_predicted {
            let taken = if done.duplicate { "a duplicate" } else { "new" };
            return Err(format!(
                "taken as {taken}, should be {predicted:?}, all live: {live}"
            ));
        }
        if done.duplicate {
            self.park(done.gate, Told::Nothing)?;
            return Ok(format!("told before, gate {:?}", done.gate));
        }
        if done.streams.len() != stage.shares.len() {
            return Err(format!("{} streams were told", done.streams.len()));
        }
        let sequence = self.engine().shard.staged();
        self.world.commit(stage, producer, epoch, sequence);
        for told in &done.streams {
            let share = stage.shares.iter().find(|share| *share.path == *told.name);
            let share = share.ok_or_else(|| format!("{} was not staged", told.name))?;
            self.acknowledge_at(share.path, done.gate, told.to)?;
        }
        Ok(format!("epoch {epoch} gate {:?}", done.gate))
    }

    pub(super) fn drop_stage(&mut self, slot: usize) -> Done {
        let Some(stage) = self.staged.get(&slot).cloned() else {
            return Ok("none".into());
        };
        let committed = self.world.committed.contains_key(&stage.id);
        let result = self.patiently(|_, engine| Ok(engine.drop_stage(&stage.id)))?;
        let gone = [ErrorCode::StageCommitted, ErrorCode::StageGone];
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) if committed => self.refused(&reason, &gone, Told::Nothing),
            Some(Err(reason)) => self.refused(&reason, &[], Told::Nothing),
            Some(Ok(())) if committed => Err("a committed stage was removed".into()),
            Some(Ok(())) => {
                // Whether the name of its file is gone for good nobody can tell.
                self.staged.remove(&slot);
                Ok(String::new())
            }
        }
    }
}

impl ShareModel {
    /// Rows of a JSON stream are one append, those of others one each.
    fn add(&mut self, piece: Piece, json: bool) {
        match self.pieces.last_mut() {
            Some(last) if json => {
                let bytes = [&last.bytes[..], &piece.bytes].concat();
                *last = Piece::new(&bytes, last.records + 1);
            }
            _ => self.pieces.push(piece),
        }
    }
}

fn put(engine: &Engine, id: &str, checksum: u32, rows: &[Row]) -> Result<Staged, Undone> {
    let bytes = rows.iter().map(|(_, value)| value.len() as u64).sum();
    let mut builder = StageBuilder::new(engine, rows.len() as u64, bytes)?;
    for (path, value) in rows {
        let target = builder.target(path)?;
        builder.push(target, value)?;
    }
    builder.finish(id, checksum, bytes)
}
