//! Runs operations against the engine as a server would, and says in the model what they mean.
//!
//! There are no threads but one, which stands still at a chosen disk call while other operations run.
//! Acknowledgements wait in a list for their gate, as a reactor's would.

mod append;
mod commit;
mod create;
mod lifecycle;
mod stage;

use millstream_core::error::ErrorCode;
use millstream_core::model::{Gate, Offset};
use millstream_core::shard::engine::{Engine, Undone};

pub use self::create::ResolvedFork;
use crate::check;
use crate::model::{Marks, Piece, StreamModel};
use crate::plan::{Op, PATHS};
use crate::run::Sim;

/// Longer than any TTL with its slack.
const SLEEP_MS: u64 = 10_000_000;

/// A reply that waits for its gate, and what its receiver learns then.
pub struct Parked {
    gate: Gate,
    told: Told,
}

pub enum Told {
    /// This stream as it was decided on.
    State(Box<StreamModel>),
    /// Only that this stream is there or not, and what it is.
    Identity(Box<StreamModel>),
    /// The offset behind these many pieces.
    Offset(Box<StreamModel>, Offset, usize),
    /// Nothing that could be taken back.
    Nothing,
}

type Done = Result<String, String>;

impl Sim {
    pub fn operate(&mut self, op: &Op) -> Result<(), String> {
        let before = self.engine().shard.staged();
        let said = self.perform(op);
        let said = said.map_err(|problem| format!("{op:?}: {problem}"))?;
        let after = self.engine().shard.staged();
        self.trace
            .push(format!("  {before}..{after} {op:?} -> {said}"));
        self.history.note(after, &self.world);
        if self.bugs.ack_early {
            self.history.promise(Marks {
                written: after,
                synced: after,
            });
        }
        if self.bugs.ack_disk_early {
            self.history.promise(Marks {
                written: after,
                synced: 0,
            });
        }
        self.deliver()?;
        self.run_disk_clock()
    }

    fn perform(&mut self, op: &Op) -> Done {
        match op {
            Op::Create { .. } => self.create(op),
            Op::Recreate { path } => self.recreate(PATHS[*path]),
            Op::Renew { path } => self.renew(PATHS[*path]),
            Op::Append {
                path,
                size,
                producer,
                stream_seq,
                close,
            } => self.append(PATHS[*path], *size, *producer, *stream_seq, *close),
            Op::Stage { slot, rows, strict } => self.stage(*slot, rows, *strict),
            Op::CommitStage {
                slot,
                producer,
                step,
            } => self.commit_stage(*slot, *producer, *step),
            Op::DropStage { slot } => self.drop_stage(*slot),
            Op::Delete { path } => self.delete(PATHS[*path]),
            Op::SetClass { path, class } => self.set_class(PATHS[*path], *class),
            Op::Read { path } => self.read(PATHS[*path]),
            Op::Commit => self.commit(false),
            Op::Write => self.write(),
            Op::SlowSync { meanwhile } => self.slow_sync(meanwhile),
            Op::Checkpoint {
                pause_after,
                meanwhile,
            } => self.checkpoint(*pause_after, meanwhile),
            Op::Spill => {
                self.engine().spill_volatile();
                Ok(String::new())
            }
            Op::FillDisk { spare_bytes } => {
                let used = self.machine.used_bytes();
                self.machine.set_capacity(used + *spare_bytes);
                Ok(String::new())
            }
            Op::FreeDisk => self.free_disk(),
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
                engine.sweep_stages(engine.now_ms());
                Ok(String::new())
            }
            Op::Evict => {
                self.engine().directory.evict(0);
                Ok(String::new())
            }
            Op::Check => self.check_live().map(|()| String::new()),
        }
    }

    /// Whether errors are to be expected: something was made to fail in this life.
    pub(super) fn faulty(&self) -> bool {
        self.machine.fault_was_hit() || self.machine.is_off()
    }

    pub(crate) fn marks(&self) -> Marks {
        let shard = &self.engine().shard;
        // In this order: what is synced is written.
        let synced = shard.synced();
        Marks {
            written: shard.written().max(synced),
            synced,
        }
    }

    /// The engine must be as the model says, and whatever a reader sees now is seen for good.
    pub(crate) fn check_live(&mut self) -> Result<(), String> {
        let engine = self.engine();
        check::endings(&engine, &self.world, self.marks(), self.sleeps)?;
        let checked = check::world(&engine, &self.world, self.marks(), self.sleeps);
        match checked {
            Err(problem) if self.faulty() && check::is_read_error(&problem) => Ok(()),
            Err(problem) => Err(problem),
            Ok(()) => match check::epochs(&engine, &self.world, self.sleeps) {
                Err(problem) if self.faulty() && check::is_read_error(&problem) => Ok(()),
                Err(problem) => Err(problem),
                Ok(()) => self.observe_tails(&engine),
            },
        }
    }

    fn observe_tails(&mut self, engine: &Engine) -> Result<(), String> {
        let marks = self.marks();
        for model in self.world.live(self.sleeps) {
            // Nothing of a stream shows before it is there for good.
            if model.control > marks.synced {
                continue;
            }
            let Ok(Some(stream)) = engine.find(model.path) else {
                continue;
            };
            let tail = engine.visible_tail(&stream.lock());
            self.history.observe(model, tail, model.visible(marks))?;
        }
        Ok(())
    }

    /// Repeats an operation that has to wait, as a reactor does after each commit. Weak appends are refused where
    /// strong ones wait; their clients try again.
    fn patiently<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Sim, &Engine) -> Result<Result<T, Undone>, String>,
    ) -> Result<Option<Result<T, Undone>>, String> {
        for round in 0..6 {
            let engine = self.engine();
            match attempt(self, &engine)? {
                Err(Undone::Wait) => {}
                Err(Undone::Refused { refusal, .. })
                    if refusal.code == ErrorCode::ServerBusy && !engine.shard.failed() => {}
                other => return Ok(Some(other)),
            }
            if self.machine.is_off() {
                return Ok(None);
            }
            self.commit(false)?;
            self.engine().prepare_spares();
            self.engine().spill_volatile();
            if round >= 2 {
                self.checkpoint_for_waiters()?;
            }
        }
        if self.standing_still || self.faulty() || self.disk_is_full() {
            return Ok(None);
        }
        Err("waits for ever".into())
    }

    /// A refusal must be one of those the model allows. `told` is what it gives away.
    fn refused(&mut self, reason: &Undone, allowed: &[ErrorCode], told: Told) -> Done {
        let Undone::Refused { refusal, gate } = reason else {
            return Ok("waits".into());
        };
        if allowed.contains(&refusal.code) {
            let code = refusal.code.code();
            self.park(*gate, told)?;
            return Ok(code.into());
        }
        let by_fault = [
            ErrorCode::ServerBusy,
            ErrorCode::Internal,
            ErrorCode::StorageFull,
        ];
        let full = self.disk_is_full() && refusal.code == ErrorCode::StorageFull;
        self.summary.full += u64::from(full);
        if full || (self.faulty() && by_fault.contains(&refusal.code)) {
            return Ok(refusal.code.code().into());
        }
        Err(format!("{}, should be {allowed:?}", check::undone(reason)))
    }

    /// Hands a reply over at once if its gate is open, else lets it wait.
    fn park(&mut self, gate: Gate, told: Told) -> Result<(), String> {
        let parked = Parked { gate, told };
        if gate.is_open() {
            return self.tell(parked);
        }
        self.parked.push(parked);
        Ok(())
    }

    /// What a client hears must not be able to go away again.
    fn tell(&mut self, parked: Parked) -> Result<(), String> {
        let marks = self.marks();
        match parked.told {
            Told::Nothing => Ok(()),
            Told::State(model) if !model.may_be_told(marks) => Err(format!(
                "a reply tells of {} at {}/{}, but the log is at {marks:?}",
                model.path, model.control, model.newest
            )),
            Told::Identity(model) if model.control > marks.synced => Err(format!(
                "a reply tells that {} is as it is since {}, but the log is at {marks:?}",
                model.path, model.control
            )),
            Told::State(_) | Told::Identity(_) => Ok(()),
            Told::Offset(model, offset, pieces) => {
                if !model.may_be_told(marks) {
                    return Err(format!(
                        "{} is acknowledged at {}/{}, but the log is at {marks:?}",
                        model.path, model.control, model.newest
                    ));
                }
                let now_ms = self.clock.elapsed_ms();
                let records = self.history.acknowledge(&model, pieces, now_ms);
                self.summary.tally.of(model.class).records_acknowledged += records;
                self.history.observe(&model, offset, pieces)
            }
        }
    }

    pub(super) fn state_at(&self, path: &str) -> Told {
        let model = self.world.at(path).cloned();
        model.map_or(Told::Nothing, |model| Told::State(Box::new(model)))
    }

    pub(super) fn identity_at(&self, path: &str) -> Told {
        let model = self.world.at(path).cloned();
        model.map_or(Told::Nothing, |model| Told::Identity(Box::new(model)))
    }

    fn payload(&mut self, json: bool, size: usize) -> (Vec<u8>, Piece) {
        self.counter += 1;
        if !json {
            let mut bytes = format!("<{}:", self.counter).into_bytes();
            // Never shorter than its number: no two payloads are equal.
            bytes.resize(size.max(bytes.len()), b'a' + (self.counter % 26) as u8);
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
}
