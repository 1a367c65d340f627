//! Blocking access for callers in the same process: the control plane and embedding. Same operations, same
//! promises; each call returns when its acknowledgement would have been sent.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::ErrorCode;
use crate::limits::LOG_PATIENCE;
use crate::model::{Class, ContentType, Gate, Media, Offset};
use crate::refusal::Refusal;
use crate::shard::adopt::{CommitRequest, Committed};
use crate::shard::batch::NotStaged;
use crate::shard::create::json_refusal;
use crate::shard::engine::{Engine, Undone};
use crate::shard::plan::ReadFrom;
use crate::shard::stage::{StageBuilder, Staged};
use crate::shard::write::WriteScratch;
use crate::stream::append::AppendRequest;
use crate::stream::handle::Stream;
use crate::stream::json;
use crate::stream::lifecycle::CreateRequest;
use crate::stream::offsets::Gap;

/// A read's answer as HTTP would give it.
pub struct LocalRead {
    pub body: Vec<u8>,
    pub next: Offset,
    pub up_to_date: bool,
    pub closed: bool,
    /// Bytes before the body that cannot be had.
    pub gap: Option<Gap>,
}

impl Engine {
    /// Repeats an operation that had to wait, and waits for the commit number of its outcome.
    pub(super) fn until_done<T>(
        &self,
        mut attempt: impl FnMut() -> Result<(T, Gate), Undone>,
    ) -> Result<T, Refusal> {
        let started_us = self.doors.clock.monotonic_us();
        loop {
            let outcome = attempt().map_err(|undone| match undone {
                // For a log that moves no more nobody waits.
                Undone::Wait if self.shard.failed() => NotStaged::Failed.into(),
                undone => undone,
            });
            match outcome {
                Ok((value, gate)) => return self.acknowledged(gate).map(|()| value),
                Err(Undone::Refused { refusal, gate }) => {
                    self.acknowledged(gate)?;
                    return Err(refusal);
                }
                Err(Undone::Wait) => {
                    if self.doors.clock.monotonic_us().saturating_sub(started_us)
                        > LOG_PATIENCE.as_micros() as u64
                    {
                        return Err(ErrorCode::ServerBusy.into());
                    }
                    self.shard.kick();
                    let before = self.shard.synced();
                    self.shard
                        .waiters
                        .wait_until(|| self.shard.synced() > before, Duration::from_millis(20));
                }
            }
        }
    }

    /// The same for what only asks: it has no outcome that could be unknown.
    fn until_told<T>(
        &self,
        attempt: impl FnMut() -> Result<(T, Gate), Undone>,
    ) -> Result<T, Refusal> {
        let told = self.until_done(attempt);
        told.map_err(|refusal| match refusal.code {
            ErrorCode::OutcomeUnknown => ErrorCode::ServerBusy.into(),
            _ => refusal,
        })
    }

    fn acknowledged(&self, gate: Gate) -> Result<(), Refusal> {
        if gate.is_open() || self.shard.wait_for(gate, LOG_PATIENCE) {
            return Ok(());
        }
        Err(ErrorCode::OutcomeUnknown.into())
    }

    fn local_stream(&self, path: &str) -> Result<Arc<Stream>, Undone> {
        self.find(path)?.ok_or_else(Engine::missing)
    }

    /// Creates a stream; `false` if it was there with the same configuration.
    pub fn local_create(
        &self,
        path: &str,
        content_type: &str,
        class: Option<Class>,
    ) -> Result<bool, Refusal> {
        if let Some(needs) = class.and_then(Class::needs) {
            return Err(Refusal::with(
                ErrorCode::DurabilityUnavailable,
                format!("The class {needs}."),
            ));
        }
        let request = CreateRequest {
            content_type: Some(content_type),
            class,
            ..CreateRequest::default()
        };
        self.until_done(|| {
            self.create(path, &request, &[], self.now_ms())
                .map(|created| (created.new, created.gate))
        })
    }

    /// Appends; returns the new tail.
    pub fn local_append(&self, path: &str, data: &[u8]) -> Result<Offset, Refusal> {
        let mut scratch = WriteScratch::default();
        self.until_done(|| {
            let stream = self.local_stream(path)?;
            let request = AppendRequest {
                content_type: Some(stream.content_type.media_type.as_bytes()),
                body_empty: data.is_empty(),
                ..AppendRequest::default()
            };
            let mut wire = Vec::new();
            let (bytes, records) = if stream.content_type.media == Media::Json && !data.is_empty() {
                let records =
                    json::flatten_into(data, &mut wire).map_err(|error| json_refusal(&error));
                (wire.as_slice(), records)
            } else {
                (data, Ok(u32::from(!data.is_empty())))
            };
            let appended = self.append(
                &stream,
                &request,
                bytes,
                records,
                self.now_ms(),
                &mut scratch,
            )?;
            Ok((appended.offset, appended.gate))
        })
    }

    /// Changes the class of a stream; returns when the change is durable.
    pub fn local_set_class(&self, path: &str, class: Class) -> Result<Class, Refusal> {
        let changed = self.until_done(|| {
            let stream = self.local_stream(path)?;
            match self.set_class(&stream, class, self.now_ms()) {
                // It waits for a checkpoint: for one that may not come nobody waits.
                Err(Undone::Wait) if self.ending.load(Ordering::Acquire) => {
                    Err(Undone::refused(ErrorCode::ShuttingDown))
                }
                Err(Undone::Wait) if self.metrics.wal_full.get() > 0 => {
                    Err(Undone::refused(ErrorCode::StorageFull))
                }
                done => done.map(|gate| (class, gate)),
            }
        });
        if changed.is_err()
            && let Ok(stream) = self.local_stream(path)
        {
            self.abandon_class_change(&stream);
        }
        changed
    }

    /// Stages records, one (stream, value) each.
    pub fn local_stage(&self, id: &str, rows: &[(&str, &[u8])]) -> Result<Staged, Refusal> {
        self.until_done(|| {
            let bytes = rows
                .iter()
                .map(|(stream, value)| stream.len() + value.len());
            let bytes = bytes.sum::<usize>() as u64;
            let mut builder = StageBuilder::new(self, rows.len() as u64, bytes)?;
            let mut checksum = 0;
            for (stream, value) in rows {
                let target = builder.target(stream)?;
                builder.push(target, value)?;
                checksum = crc32c::crc32c_append(checksum, stream.as_bytes());
                checksum = crc32c::crc32c_append(checksum, value);
            }
            Ok((builder.finish(id, checksum, bytes)?, Gate::OPEN))
        })
    }

    pub fn local_drop_stage(&self, id: &str) -> Result<(), Refusal> {
        self.until_done(|| self.drop_stage(id).map(|()| ((), Gate::OPEN)))
    }

    /// Appends what was staged to all its streams or to none.
    pub fn local_commit(&self, request: &CommitRequest<'_>) -> Result<Committed, Refusal> {
        self.until_done(|| {
            let committed = self.commit_stages(request)?;
            let gate = committed.gate;
            Ok((committed, gate))
        })
    }

    pub fn local_delete(&self, path: &str) -> Result<bool, Refusal> {
        let deleted = self.until_done(|| {
            let stream = self.local_stream(path)?;
            self.delete(&stream, self.now_ms()).map(|gate| ((), gate))
        });
        match deleted {
            Ok(()) => Ok(true),
            Err(refusal) if refusal.code == ErrorCode::StreamNotFound => Ok(false),
            Err(refusal) => Err(refusal),
        }
    }

    /// The visible tail; `None` if there is no such stream.
    pub fn local_tail(&self, path: &str) -> Result<Option<Offset>, Refusal> {
        let found = self.until_told(|| {
            let stream = self.local_stream(path)?;
            let mut state = stream.lock();
            self.check_life(&stream, &mut state, self.now_ms())?;
            Ok((self.visible_tail(&state), self.control_gate(&state)))
        });
        match found {
            Ok(tail) => Ok(Some(tail)),
            Err(refusal)
                if matches!(
                    refusal.code,
                    ErrorCode::StreamNotFound | ErrorCode::StreamGone
                ) =>
            {
                Ok(None)
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Whether bytes of a stream are lost for good: not only in files that are not there now.
    pub fn local_damaged(&self, path: &str) -> Result<bool, Refusal> {
        self.until_told(|| {
            let stream = self.local_stream(path)?;
            let state = stream.lock();
            Ok((state.damaged.is_some(), self.control_gate(&state)))
        })
    }

    /// Reads up to `max_bytes` from an offset (`-1`, `now` or a given one).
    pub fn local_read(
        &self,
        path: &str,
        offset: &str,
        max_bytes: u64,
    ) -> Result<LocalRead, Refusal> {
        let stream = self.until_told(|| {
            let stream = self.local_stream(path)?;
            let gate = {
                let mut state = stream.lock();
                self.check_life(&stream, &mut state, self.now_ms())?;
                self.control_gate(&state)
            };
            Ok((stream, gate))
        })?;
        self.past_damage(|| self.read_once(&stream, offset, max_bytes))
    }

    fn read_once(
        &self,
        stream: &Arc<Stream>,
        offset: &str,
        max_bytes: u64,
    ) -> Result<LocalRead, Refusal> {
        let mut reading = self.reading(stream);
        let plan = reading.plan(ReadFrom::parse(offset.as_bytes())?)?;
        let window = reading.window(plan.position, max_bytes)?;
        let mut bytes = Vec::with_capacity((window.end - window.start) as usize);
        reading.copy(&window, &mut bytes)?;
        Ok(LocalRead {
            body: as_body(&stream.content_type, bytes),
            next: window.next,
            up_to_date: window.up_to_date,
            closed: window.closed,
            gap: plan.gap,
        })
    }
}

fn as_body(content_type: &ContentType, bytes: Vec<u8>) -> Vec<u8> {
    if content_type.media != Media::Json {
        return bytes;
    }
    let mut body = Vec::with_capacity(bytes.len() + 2);
    body.push(b'[');
    body.extend_from_slice(bytes.strip_suffix(b",").unwrap_or(&bytes));
    body.push(b']');
    body
}
