//! Commits, deliveries of what they reached, and the two things that take long: a sync and a checkpoint. Either
//! stands still at one of its disk calls while other operations go on.

use std::sync::Arc;

use millstream_core::io::sabotage;
use millstream_core::log::checkpoint::CheckpointError;

use super::Done;
use crate::plan::Op;
use crate::run::{DISK_SYNC_MS, Sim};

impl Sim {
    /// Commits all that is staged. Afterwards no reply may be left waiting, or it would wait for ever.
    pub(super) fn commit(&mut self, sync_all: bool) -> Done {
        if self.sync_stands_still {
            return self.write();
        }
        let engine = self.engine();
        if sync_all {
            let staged = engine.shard.staged();
            if let Ok(mut open) = engine.shard.open() {
                open.sync_target = open.sync_target.max(staged);
            }
        }
        while engine.shard.commit(None) {}
        if engine.shard.failed() {
            if !self.faulty() {
                return Err("the log failed though the disk did not".into());
            }
            return Ok("failed".into());
        }
        self.deliver()?;
        match self.parked.first() {
            Some(parked) => Err(format!(
                "a reply that waits for {:?} is left behind at {:?} with nothing more to commit",
                parked.gate,
                self.marks()
            )),
            None => Ok(format!("{:?}", self.marks())),
        }
    }

    /// Writes without waiting for any sync, as a reactor with `disk` appends does.
    pub(super) fn write(&mut self) -> Done {
        let engine = self.engine();
        if engine.shard.try_write(0).is_none() {
            return Err("writing waits for a sync".into());
        }
        if engine.shard.failed() && !self.faulty() {
            return Err("the log failed though the disk did not".into());
        }
        self.deliver()?;
        Ok(format!("{:?}", self.marks()))
    }

    /// Hands out what the log has reached.
    pub(crate) fn deliver(&mut self) -> Result<(), String> {
        let marks = self.marks();
        self.history.promise(marks);
        for parked in std::mem::take(&mut self.parked) {
            if marks.reach(parked.gate) {
                self.tell(parked)?;
            } else {
                self.parked.push(parked);
            }
        }
        Ok(())
    }

    /// What the commit thread does when its clock for `disk` streams runs out.
    pub(super) fn run_disk_clock(&mut self) -> Result<(), String> {
        let now_ms = self.clock.elapsed_ms();
        let Some((sequence, since_ms)) = self.history.oldest_unsynced_disk() else {
            return Ok(());
        };
        let engine = self.engine();
        if now_ms < since_ms + DISK_SYNC_MS || self.sync_stands_still || engine.shard.failed() {
            return Ok(());
        }
        while engine.shard.commit(None) {}
        self.deliver()?;
        if self.marks().synced < sequence && !engine.shard.failed() {
            return Err(format!(
                "a disk append at {sequence} is still not synced after {} ms",
                now_ms - since_ms
            ));
        }
        Ok(())
    }

    /// A sync that stands still: weak appends go on, and are written, without it.
    pub(super) fn slow_sync(&mut self, meanwhile: &[Op]) -> Done {
        if self.standing_still {
            return self.commit(false);
        }
        let engine = self.engine();
        let staged = engine.shard.staged();
        if let Ok(mut open) = engine.shard.open() {
            open.sync_target = open.sync_target.max(staged);
        }
        self.machine.pause_at_sync();
        self.sync_stands_still = true;
        let worked = self.stand_still(meanwhile, || while engine.shard.commit(None) {});
        self.sync_stands_still = false;
        worked?.1?;
        if engine.shard.failed() && !self.faulty() {
            return Err("the log failed though the disk did not".into());
        }
        self.deliver()?;
        Ok(format!("{:?}", self.marks()))
    }

    pub(super) fn checkpoint(&mut self, pause_after: u64, meanwhile: &[Op]) -> Done {
        if self.standing_still {
            return self.commit(false);
        }
        self.commit(true)?;
        let engine = self.engine();
        self.machine.pause_after(pause_after);
        let (result, worked) = self.stand_still(meanwhile, || engine.checkpoint())?;
        worked?;
        self.checkpointed(result)
    }

    /// Something waits for a checkpoint: what maintenance would do by itself.
    pub(super) fn checkpoint_for_waiters(&mut self) -> Result<(), String> {
        if self.standing_still || self.engine().shard.failed() {
            return Ok(());
        }
        self.commit(true)?;
        let result = self.engine().checkpoint();
        self.checkpointed(result).map(drop)
    }

    fn checkpointed(&mut self, result: Result<(), CheckpointError>) -> Done {
        let engine = self.engine();
        self.note_kept();
        match result {
            Ok(()) => self.check_live().map(|()| "done".into()),
            Err(error) if self.faulty() || engine.shard.failed() || self.disk_is_full() => {
                // As the maintenance thread does.
                if error.is_final() {
                    engine.shard.fail("the catalog could not be written");
                }
                self.check_live().map(|()| format!("failed: {error}"))
            }
            Err(error) => Err(format!("checkpoint failed: {error}")),
        }
    }

    /// Bytes of ephemeral streams that a checkpoint has taken along for a fork or a change of class.
    fn note_kept(&mut self) {
        let engine = self.engine();
        for model in self.world.streams.values_mut() {
            let volatile = model.pieces.iter().any(|piece| piece.volatile);
            if let (true, Ok(Some(stream))) = (
                volatile,
                engine
                    .directory
                    .get_by_id(millstream_core::model::StreamId(model.id)),
            ) {
                let kept = stream.lock().cold_end();
                let mut end = 0;
                for piece in &mut model.pieces {
                    end += piece.bytes.len() as u64;
                    piece.volatile &= end > kept;
                }
            }
        }
    }

    /// Runs `work` beside the operations of `meanwhile`, which begin when it stands at its pause.
    fn stand_still<T: Send>(
        &mut self,
        meanwhile: &[Op],
        work: impl FnOnce() -> T + Send,
    ) -> Result<(T, Result<(), String>), String> {
        let machine = &*Arc::clone(&self.machine);
        self.standing_still = true;
        let (result, worked) = std::thread::scope(|scope| {
            let bug = self.bugs.sabotage;
            let beside = scope.spawn(move || {
                sabotage::set(bug);
                let result = work();
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
                // The work may go on to wait for a sync, and nobody else is here to do it.
                if worked.is_ok() && !self.sync_stands_still && !self.machine.is_off() {
                    worked = self.commit(true).map(drop);
                }
                machine.release();
            }
            (beside.join(), worked)
        });
        self.standing_still = false;
        self.machine.forget_pause();
        let result = result.map_err(|_| "the work beside panicked".to_owned())?;
        Ok((result, worked))
    }
}
