//! Deletes, changes of class, reads that renew, and a disk that is full for a while.

use millstream_core::error::ErrorCode;
use millstream_core::model::{Class, Gate};
use millstream_core::shard::engine::Engine;

use super::{Done, Told};
use crate::model::{EndingModel, Standing};
use crate::run::Sim;

impl Sim {
    pub(super) fn delete(&mut self, path: &'static str) -> Done {
        let standing = self.world.standing(path, self.sleeps);
        let result = self.patiently(|_, engine| {
            let stream = match engine.find(path) {
                Ok(Some(stream)) => stream,
                Ok(None) => return Ok(Err(Engine::missing())),
                Err(reason) => return Ok(Err(reason)),
            };
            Ok(engine.delete(&stream, engine.now_ms()))
        })?;
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) => {
                let about = self.identity_at(path);
                self.refused(&reason, refusals_of(standing), about)
            }
            Some(Ok(_)) if standing != Standing::Live => {
                Err(format!("deleted, it is {standing:?}"))
            }
            Some(Ok(gate)) => {
                let time_ms = self.engine().now_ms();
                let Some(model) = self.world.at_mut(path) else {
                    return Err("deleted, but it never was".into());
                };
                model.deleted = true;
                // Its purge, if it is due at once, comes behind it.
                model.control = gate.sequence;
                model.newest = model.newest.max(gate.sequence);
                let ending = EndingModel {
                    path,
                    tail: model.tail_offset(),
                    records: model.records_of(model.pieces.len()),
                    sequence: gate.sequence,
                    time_ms,
                };
                let told = Told::Identity(Box::new(model.clone()));
                let id = model.id;
                self.world.endings.insert(id, ending);
                self.park(gate, told)?;
                Ok(format!("gate {gate:?}"))
            }
        }
    }

    pub(super) fn set_class(&mut self, path: &'static str, class: Class) -> Done {
        let standing = self.world.standing(path, self.sleeps);
        let result = self.patiently(|_, engine| {
            let stream = match engine.find(path) {
                Ok(Some(stream)) => stream,
                Ok(None) => return Ok(Err(Engine::missing())),
                Err(reason) => return Ok(Err(reason)),
            };
            Ok(engine.set_class(&stream, class, engine.now_ms()))
        })?;
        if !matches!(result, Some(Ok(_)))
            && let Ok(Some(stream)) = self.engine().find(path)
        {
            self.engine().abandon_class_change(&stream);
        }
        match result {
            None => Ok("waits".into()),
            Some(Err(reason)) => {
                let about = self.identity_at(path);
                self.refused(&reason, refusals_of(standing), about)
            }
            Some(Ok(_)) if standing != Standing::Live => {
                Err(format!("changed, but it is {standing:?}"))
            }
            Some(Ok(gate)) => self.changed_class(path, class, gate),
        }
    }

    fn changed_class(&mut self, path: &'static str, class: Class, gate: Gate) -> Done {
        let sequence = self.engine().shard.staged();
        let Some(model) = self.world.at_mut(path) else {
            return Err("changed, but it never was".into());
        };
        if model.class != class {
            model.class = class;
            model.control = sequence;
            model.newest = sequence;
            // Whoever enters or leaves `ephemeral` has everything in a checkpoint.
            model
                .pieces
                .iter_mut()
                .for_each(|piece| piece.volatile = false);
        }
        let told = Told::Identity(Box::new(model.clone()));
        self.park(gate, told)?;
        Ok(format!("gate {gate:?}"))
    }

    pub(super) fn read(&mut self, path: &'static str) -> Done {
        let engine = self.engine();
        let live = self.world.standing(path, self.sleeps) == Standing::Live;
        if let (true, Ok(Some(stream))) = (live, engine.find(path)) {
            let mut state = stream.lock();
            engine.renew(&stream, &mut state);
        }
        self.check_live().map(|()| String::new())
    }

    pub(super) fn disk_is_full(&self) -> bool {
        self.machine.has_capacity()
    }

    /// Space returns: from here on everything works again, without a restart.
    pub(super) fn free_disk(&mut self) -> Done {
        if !self.disk_is_full() {
            return Ok("was not full".into());
        }
        self.machine.set_capacity(u64::MAX);
        self.engine().prepare_spares();
        if self.engine().shard.failed() && !self.faulty() {
            return Err("a full disk stopped the log for good".into());
        }
        Ok(String::new())
    }
}

fn refusals_of(standing: Standing) -> &'static [ErrorCode] {
    match standing {
        Standing::Live => &[],
        Standing::Kept => &[ErrorCode::StreamGone],
        Standing::Fading => &[ErrorCode::StreamGone, ErrorCode::StreamNotFound],
        Standing::Absent => &[ErrorCode::StreamNotFound],
    }
}
