//! `POST /v1/commit`: what was staged is appended to all its streams or to none.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::limits::{COMMIT_STAGES_MAX, STAGE_STREAMS_MAX};
use crate::refusal::Refusal;
use crate::serve::pipeline::lists::Bounded;
use crate::serve::pipeline::{Answer, Request};
use crate::shard::adopt::{CommitRequest, CommitStage, Committed};
use crate::shard::engine::{Engine, Undone};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    producer: String,
    epoch: u64,
    #[serde(default)]
    streams: Bounded<String, STAGE_STREAMS_MAX>,
    stages: Bounded<AskedStage, COMMIT_STAGES_MAX>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedStage {
    id: String,
    checksum: String,
}

#[derive(Serialize)]
struct Told<'a> {
    duplicate: bool,
    streams: Vec<ToldStream<'a>>,
}

#[derive(Serialize)]
struct ToldStream<'a> {
    name: &'a str,
    incarnation: String,
    rows: u64,
    from: String,
    to: String,
}

pub fn post(engine: &Arc<Engine>, request: &Request) -> Result<Answer, Undone> {
    let asked: Asked = serde_json::from_slice(&request.body)
        .map_err(|error| refuse(format!("The body is not a commit: {error}.")))?;
    let mut stages = Vec::with_capacity(asked.stages.0.len());
    for stage in &asked.stages.0 {
        let checksum = u32::from_str_radix(&stage.checksum, 16).ok();
        let checksum = checksum.filter(|_| stage.checksum.len() == 8);
        let Some(checksum) = checksum else {
            let what = format!("The checksum of stage {:?} is not 8 digits.", stage.id);
            return Err(refuse(what));
        };
        stages.push(CommitStage {
            id: &stage.id,
            checksum,
        });
    }
    let committed = engine.commit_stages(&CommitRequest {
        producer: &asked.producer,
        epoch: asked.epoch,
        streams: asked.streams.0.iter().map(String::as_str).collect(),
        stages,
    })?;
    answer(&committed)
}

fn refuse(detail: String) -> Undone {
    Undone::refused(Refusal::with(ErrorCode::BadRequest, detail))
}

fn answer(committed: &Committed) -> Result<Answer, Undone> {
    let streams = committed.streams.iter().map(|stream| ToldStream {
        name: &stream.name,
        incarnation: stream.incarnation.0.to_string(),
        rows: stream.rows,
        from: stream.from.to_string(),
        to: stream.to.to_string(),
    });
    let told = Told {
        duplicate: committed.duplicate,
        streams: streams.collect(),
    };
    let body = serde_json::to_vec(&told).map_err(|_| Undone::refused(ErrorCode::Internal))?;
    let mut answer = Answer::json(200, body);
    answer.gate = committed.gate;
    Ok(answer)
}
