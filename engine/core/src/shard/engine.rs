//! The engine: everything below the sockets, assembled.
//!
//! `serve` calls it from reactor threads, the Python handle from blocking callers, simulation directly.

use crate::report;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::codec::{FRAME_HEADER_BYTES, Frame, FrameKind};
use crate::config::Config;
use crate::error::{EngineError, ErrorCode};
use crate::io::Doors;
use crate::io::sabotage::{self, Sabotage};
use crate::log::catalog::CatalogError;
use crate::log::cold::ColdStore;
use crate::log::directory::Directory;
use crate::log::recover::recover;
use crate::log::wal::WalCursor;
use crate::metrics::Metrics;
use crate::model::{EPOCHS_USED_UP, Gate, Offset, Stage, StreamId, next_epoch};
use crate::refusal::Refusal;
use crate::shard::ack::Mailbox;
use crate::shard::batch::NotStaged;
use crate::shard::commit::{RetainedFile, Shard};
use crate::shard::fault::Fault;
use crate::shard::stages::Stages;
use crate::stream::handle::Stream;
use crate::stream::offsets::{self, Losses};
use crate::stream::state::StreamState;

pub struct Engine {
    pub config: Config,
    pub doors: Doors,
    pub metrics: Arc<Metrics>,
    pub shard: Shard,
    pub directory: Directory,
    pub cold: ColdStore,
    pub losses: Losses,
    highest_epoch: AtomicU64,
    /// What to add to the monotonic clock.
    steady_origin_ms: u64,
    /// Made once, when the log has failed.
    hidden_lives: OnceLock<HashMap<Box<str>, Arc<Stream>>>,
    pub stopping: AtomicBool,
    /// The server will stop: the control plane is still there, and takes no new waits on itself.
    pub ending: AtomicBool,
    pub maintenance: crate::shard::maintain::Maintenance,
    pub loads: crate::shard::loads::Loads,
    pub marks: crate::shard::marks::Marks,
    pub stages: Stages,
    /// Highest log file generation in use.
    pub highest_generation: AtomicU64,
    /// The log file that this run began with; older ones belong to earlier runs.
    pub first_generation: u64,
}

/// An operation that could not be decided or staged yet, or was refused.
pub enum Undone {
    /// Nothing has changed; try again after the next commit, or when what was `wanted` is at hand.
    Wait,
    /// Refused on state that becomes final when `gate` opens.
    Refused { refusal: Refusal, gate: Gate },
}

impl Undone {
    /// The same in other words, made of the sentence it has.
    pub fn saying(self, says: impl FnOnce(&str) -> String) -> Undone {
        match self {
            Undone::Refused { refusal, gate } => {
                let detail = says(refusal.sentence());
                let refusal = refusal.saying(detail);
                Undone::Refused { refusal, gate }
            }
            Undone::Wait => Undone::Wait,
        }
    }

    pub fn refused(refusal: impl Into<Refusal>) -> Undone {
        Undone::Refused {
            refusal: refusal.into(),
            gate: Gate::OPEN,
        }
    }
}

impl From<NotStaged> for Undone {
    fn from(reason: NotStaged) -> Undone {
        match reason {
            NotStaged::Wait => Undone::Wait,
            NotStaged::Full => Undone::refused(ErrorCode::StorageFull),
            NotStaged::Failed => Undone::refused(Refusal::with(
                ErrorCode::ServerBusy,
                "The log has failed; the server takes no writes until it is restarted.",
            )),
        }
    }
}

impl From<CatalogError> for Undone {
    fn from(error: CatalogError) -> Undone {
        if error.would_block() {
            return Undone::Wait;
        }
        report!("catalog: {error}");
        Undone::refused(Refusal::with(
            ErrorCode::Internal,
            "The catalog could not be read.",
        ))
    }
}

impl Engine {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        config: Config,
        doors: Doors,
        metrics: Arc<Metrics>,
        shard: Shard,
        directory: Directory,
        cold: ColdStore,
        losses: Losses,
        highest_epoch: u64,
        highest_generation: u64,
    ) -> Engine {
        let running_ms = doors.clock.monotonic_us() / 1000;
        Engine {
            steady_origin_ms: doors.clock.wall_ms().wrapping_sub(running_ms),
            config,
            doors,
            metrics,
            shard,
            directory,
            cold,
            losses,
            highest_epoch: AtomicU64::new(highest_epoch),
            hidden_lives: OnceLock::new(),
            stopping: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            maintenance: crate::shard::maintain::Maintenance::default(),
            loads: crate::shard::loads::Loads::default(),
            marks: crate::shard::marks::Marks::default(),
            stages: Stages::default(),
            highest_generation: AtomicU64::new(highest_generation),
            first_generation: highest_generation,
        }
    }

    /// Fails once the server stops: for long work that can be given up.
    pub fn check_running(&self) -> io::Result<()> {
        if self.stopping.load(Ordering::Acquire) {
            return Err(io::Error::other("the server is stopping"));
        }
        Ok(())
    }

    pub fn now_ms(&self) -> u64 {
        self.doors.clock.wall_ms()
    }

    /// Time that passes evenly, whatever is done to the wall clock; the two agreed when the engine opened.
    pub fn steady_ms(&self) -> u64 {
        let running_ms = self.doors.clock.monotonic_us() / 1000;
        self.steady_origin_ms.wrapping_add(running_ms)
    }

    /// A number never used before, here, in an earlier life of this directory or in one that it was restored from.
    pub fn take_epoch(&self, now_ms: u64) -> Result<StreamId, Undone> {
        let next = |highest: u64| next_epoch(highest, now_ms);
        self.highest_epoch
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, next)
            .ok()
            .and_then(next)
            .map(StreamId)
            .ok_or_else(|| Undone::refused(Refusal::with(ErrorCode::Internal, EPOCHS_USED_UP)))
    }

    pub fn highest_epoch(&self) -> u64 {
        self.highest_epoch.load(Ordering::Acquire)
    }

    /// What a reply that reveals this state must wait for.
    pub fn reveal_gate(&self, state: &StreamState) -> Gate {
        let gate = match state.class.stage() {
            Stage::Synced => Gate::synced(state.reveal_sequence),
            // What the stream is must be final in every class before anything is told about it.
            _ if state.control_sequence.max(state.held_sequence) > self.shard.synced() => {
                Gate::synced(state.reveal_sequence)
            }
            stage => Gate {
                sequence: state.reveal_sequence,
                stage,
            },
        };
        self.unless_reached(gate)
    }

    /// The gate behind which the stream's identity and configuration are final.
    pub fn control_gate(&self, state: &StreamState) -> Gate {
        self.unless_reached(Gate::synced(state.control_sequence))
    }

    fn unless_reached(&self, gate: Gate) -> Gate {
        if self.shard.reached(gate) {
            Gate::OPEN
        } else {
            gate
        }
    }

    /// How far the next append to this stream must come before it is told or shown.
    pub fn append_stage(&self, state: &StreamState) -> Stage {
        let unsettled = state.control_sequence > self.shard.synced();
        if unsettled && !sabotage::is(Sabotage::ForgetControl) {
            // Who recovers an older configuration would not know that these bytes may be missing.
            Stage::Synced
        } else {
            state.class.stage()
        }
    }

    pub fn visible_tail(&self, state: &StreamState) -> Offset {
        offsets::visible_tail(state, &self.losses)
    }

    pub fn applied_tail(&self, state: &StreamState) -> Offset {
        offsets::applied_tail(state, &self.losses)
    }

    /// Loads the stream at a path for a reader or writer; deleted and expired ones included.
    pub fn find(&self, path: &str) -> Result<Option<Arc<Stream>>, Undone> {
        Ok(self.directory.get(path)?)
    }

    /// The same for who only reads: its producers may be left out.
    pub fn find_to_read(&self, path: &str) -> Result<Option<Arc<Stream>>, Undone> {
        let found = self.directory.get_to_read(path)?;
        Ok(found.map(|stream| self.as_told_last(stream)))
    }

    /// Once the log has failed, what nobody may be told of any more does not hide what was there before it.
    pub fn as_told_last(&self, stream: Arc<Stream>) -> Arc<Stream> {
        if !self.shard.failed() {
            return stream;
        }
        let synced = self.shard.synced();
        let hidden = self
            .hidden_lives
            .get_or_init(|| self.directory.hidden_lives(synced));
        hidden.get(&*stream.path).map_or(stream, Arc::clone)
    }
}

/// An engine that has recovered, and what it found.
pub struct Opened {
    pub engine: Arc<Engine>,
    pub frames: u64,
    pub clean: bool,
}

impl Engine {
    /// Recovers a data directory. The caller holds its lock.
    pub fn open(
        config: Config,
        doors: Doors,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Opened, EngineError> {
        let metrics = Arc::new(Metrics::default());
        let recovered = recover(&config, &doors, &metrics, progress)?;
        let retained = recovered
            .retained
            .into_iter()
            .map(|(file, last_sequence)| RetainedFile {
                file: Arc::new(file),
                last_sequence,
            })
            .collect();
        let mailboxes: Result<Vec<Mailbox>, _> = (0..config.reactor_count())
            .map(|_| Mailbox::new())
            .collect();
        let mailboxes = mailboxes.map_err(|error| EngineError::io("event descriptor", error))?;
        let cursor = WalCursor::resume(recovered.current, recovered.position);
        let shard = Shard::new(
            doors.clone(),
            Arc::clone(&metrics),
            cursor,
            recovered.next_sequence,
            retained,
            mailboxes,
            config.disk_sync_ms,
            Fault::new(config.fault_sync_delay_ms, config.fault_fail),
        );
        let engine = Engine::new(
            config,
            doors,
            metrics,
            shard,
            recovered.directory,
            recovered.cold,
            recovered.losses,
            recovered.highest_epoch,
            recovered.highest_generation,
        );
        engine.recall_damage()?;
        engine.recall_stages(recovered.stages);
        recovered
            .unneeded
            .into_iter()
            .for_each(|stream| engine.maintenance.request_purge(stream));
        Ok(Opened {
            engine: Arc::new(engine),
            frames: recovered.frames,
            clean: recovered.clean,
        })
    }

    /// Writes the mark of a clean shutdown as the last frame. Nothing may be staged behind it.
    pub fn write_clean_mark(&self, timeout: Duration) -> bool {
        let sequence = match self.shard.open() {
            Ok(mut open) => {
                if open.admit(FRAME_HEADER_BYTES, true).is_err() {
                    return false;
                }
                open.push(
                    Frame::control(FrameKind::CleanStop, StreamId(0), self.now_ms()),
                    false,
                )
            }
            Err(_) => return false,
        };
        self.shard.wait_synced(sequence, timeout)
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "meanwhile_tests.rs"]
mod meanwhile_tests;
