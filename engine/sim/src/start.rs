//! Starts: what a server finds on the disk must be what the model says it may be.
//!
//! The log says how far it reached. The world of that step must be there whole, nothing promised may lie behind it,
//! and whatever could have been lost must be reported by a risen epoch.

use std::collections::BTreeMap;
use std::sync::Arc;

use millstream_core::io::Doors;
use millstream_core::model::Class;
use millstream_core::shard::engine::{Engine, Opened};

use crate::check;
use crate::disk::{Fault, Machine};
use crate::model::{Marks, Producer, StreamModel, World};
use crate::plan::{End, PATHS};
use crate::run::{Sim, SinceStart, config};

impl Sim {
    pub(crate) fn open(&self, machine: &Arc<Machine>) -> Result<Opened, String> {
        let doors = Doors {
            clock: Arc::clone(&self.clock) as _,
            random: Arc::clone(&self.random) as _,
            disk: machine.disk(),
            boot_id: self.boot_known.then(|| machine.boot_id()),
        };
        Engine::open(config(self.bugs, self.since.restored), doors, &mut |_| {})
            .map_err(|error| error.to_string())
    }

    pub fn start(&mut self, fault: Option<Fault>, end: End) -> Result<(), String> {
        let twin = self.dice.chance(3).then(|| self.machine.twin());
        self.machine.arm(fault);
        let opened = self.open(&self.machine);
        let hit = self.machine.take_fault_hit();
        self.summary.faults_hit += u64::from(hit.is_some());
        self.machine.arm(None);
        self.summary.starts += 1;
        let full = self.machine.has_capacity();
        let opened = match (opened, &hit) {
            (Ok(opened), _) if !self.machine.is_off() => opened,
            (Err(problem), None) if !full => {
                return Err(format!("it does not start: {problem}"));
            }
            (opened, _) => {
                let said = opened.map_or_else(|problem| problem, |_| "opened".into());
                self.trace.push(format!("start-up died: {hit:?}: {said}"));
                self.since.died += 1;
                self.machine.set_capacity(u64::MAX);
                self.end(end)?;
                return self.start(None, end);
            }
        };
        self.machine.set_capacity(u64::MAX);
        let engine = Arc::clone(&opened.engine);
        self.trace.push(format!(
            "start: log ends at {}, {} frames, clean {}, {:?}",
            engine.shard.synced() - 1,
            opened.frames,
            opened.clean,
            self.since
        ));
        self.engine = Some(Arc::clone(&engine));
        if let (Some(twin), None) = (twin, hit) {
            self.start_again(&engine, &twin)?;
        }
        self.find_out(&engine, &opened)
    }

    /// Recovery of an equal disk must give an equal server.
    fn start_again(&self, engine: &Engine, twin: &Arc<Machine>) -> Result<(), String> {
        let again = self
            .open(twin)
            .map_err(|problem| format!("a second start fails: {problem}"))?;
        let (first, second) = (check::dump(engine)?, check::dump(&again.engine)?);
        twin.process_crash();
        match first.iter().zip(&second).find(|(one, two)| one != two) {
            None if first.len() == second.len() => Ok(()),
            differing => Err(format!("started twice, and they differ: {differing:?}")),
        }
    }

    fn find_out(&mut self, engine: &Arc<Engine>, opened: &Opened) -> Result<(), String> {
        let start_sequence = engine.shard.synced();
        let since = std::mem::take(&mut self.since);
        settle(engine);
        self.world = self.find_world(engine, start_sequence - 1, opened.clean, since)?;
        self.adopt_epochs(engine, opened.clean, since)?;
        self.history.restart(start_sequence, self.world.clone());
        self.history.note(engine.shard.staged(), &self.world);
        check::fork_counts(engine, &self.world, self.sleeps)?;
        check::walk(engine, &self.world, self.sleeps)?;
        check::listing(engine, &self.world, self.sleeps)?;
        check::endings(engine, &self.world, Marks::ALL, self.sleeps)?;
        check::stages(engine, &self.world, self.staged.values())?;
        check::offsets(engine, &self.world, &self.history, self.sleeps)?;
        let live: Vec<StreamModel> = self.world.live(self.sleeps).cloned().collect();
        for model in &live {
            let (tail, count) = (model.tail_offset(), model.pieces.len());
            self.history.observe(model, tail, count)?;
        }
        Ok(())
    }

    /// What must have survived: everything synced, and if the page cache did, everything written.
    pub(crate) fn required(&self, since: SinceStart) -> u64 {
        let promised = self.history.promised();
        if since.power_was_cut || since.log_failed {
            promised.synced
        } else {
            promised.written
        }
    }

    /// The model's world that the recovered log stands for. It must hold everything promised.
    fn find_world(
        &self,
        engine: &Engine,
        end_of_log: u64,
        clean: bool,
        since: SinceStart,
    ) -> Result<World, String> {
        let required = self.required(since);
        if end_of_log < required {
            return Err(format!(
                "acknowledged up to {required}, but the log ends at {end_of_log}"
            ));
        }
        if clean && !since.marked && self.summary.starts > 1 + since.died {
            return Err("taken for a clean stop, but there was none".into());
        }
        if !clean && since.stopped && since.died == 0 && !since.restored {
            return Err("a clean stop is not taken for one".into());
        }
        let mut problem = String::new();
        // Start-ups that died may have left a frame each.
        for cut in (required.max(end_of_log.saturating_sub(since.died))..=end_of_log).rev() {
            for candidate in self.history.worlds_at(cut) {
                let mut world = candidate.clone();
                adopt_volatile(engine, &mut world);
                match check::world(engine, &world, Marks::ALL, self.sleeps) {
                    Ok(()) => return Ok(world),
                    Err(found) if problem.is_empty() => {
                        problem = format!("log ends at {cut}: {found}");
                    }
                    Err(_) => {}
                }
            }
        }
        Err(problem)
    }

    /// Takes over the epochs that the start has begun, and counts what each class has lost.
    fn adopt_epochs(
        &mut self,
        engine: &Engine,
        clean: bool,
        since: SinceStart,
    ) -> Result<(), String> {
        let must_reach = match (clean, since.power_was_cut || since.log_failed) {
            _ if since.restored => Class::Object,
            (true, _) => Class::Ephemeral,
            _ if since.stopped => Class::Ephemeral,
            (false, true) => Class::Disk,
            (false, false) => Class::Memory,
        };
        let may_reach = if since.restored {
            Class::Object
        } else if clean && since.died == 0 {
            Class::Ephemeral
        } else if since.power_was_cut || since.log_failed || !self.boot_known {
            Class::Disk
        } else {
            Class::Memory
        };
        let way = since.way(clean) as usize;
        let mut seen = BTreeMap::new();
        let ids: Vec<u64> = self.world.live(self.sleeps).map(|model| model.id).collect();
        for id in ids {
            let Some(model) = self.world.streams.get_mut(&id) else {
                continue;
            };
            let Ok(Some(stream)) = engine.find(model.path) else {
                continue;
            };
            let epoch = engine.applied_tail(&stream.lock()).epoch;
            let known = self.history.highest_epoch_seen(model).max(model.epoch);
            let (path, class) = (model.path, model.class);
            // A close waits for the sync of everything before it, if that has frames at all.
            let ended = model.closed && class != Class::Ephemeral;
            if class <= must_reach && !ended && epoch <= known {
                return Err(format!(
                    "{path}: its tail may be lost, but its epoch is still {epoch}"
                ));
            }
            if (class > may_reach || ended) && epoch != model.epoch {
                return Err(format!(
                    "{path}: its epoch rose from {} to {epoch}, but this {} stream cannot have lost anything",
                    model.epoch,
                    class.name()
                ));
            }
            let lost = self.history.settle_losses(model);
            if lost > 0 && (ended || class == Class::Fsync || class > may_reach) {
                return Err(format!(
                    "{path}: {lost} acknowledged records of a {} stream are gone",
                    class.name()
                ));
            }
            let losses = &mut self.summary.tally.of(class).by_way[way];
            let entry = seen.entry(class).or_insert((false, false));
            losses.ends += u64::from(!std::mem::replace(&mut entry.0, true));
            if lost > 0 {
                losses.ends_with_loss += u64::from(!std::mem::replace(&mut entry.1, true));
                losses.records_lost += lost;
                losses.streams_with_loss += 1;
                losses.reported += u64::from(epoch > model.epoch);
            }
            model.epoch = epoch;
        }
        Ok(())
    }
}

/// Lets maintenance finish what it does by itself after a start.
fn settle(engine: &Engine) {
    for path in PATHS {
        drop(engine.find(path));
    }
    engine.prepare_spares();
    let mut cursor = Some(Vec::new());
    while cursor.is_some() {
        engine.load_expiring(&mut cursor);
    }
    engine.sweep_expired(engine.now_ms());
    for _ in 0..8 {
        engine.purge_requested();
    }
    while engine.shard.commit(None) {}
}

/// What only the process had is gone; a checkpoint that was cut off may have kept more than it said.
pub(crate) fn adopt_volatile(engine: &Engine, world: &mut World) {
    for model in world.streams.values_mut() {
        let lasting = model
            .pieces
            .iter()
            .take_while(|piece| !piece.volatile)
            .count();
        if model.class != Class::Ephemeral && lasting == model.pieces.len() {
            continue;
        }
        let by_id = engine
            .directory
            .get_by_id(millstream_core::model::StreamId(model.id));
        // On a damaged disk its id may not lead to it any more.
        let by_path = || engine.find(model.path).ok().flatten();
        let found = by_id.ok().flatten().or_else(by_path);
        let Some(stream) = found.filter(|stream| stream.id.0 == model.id) else {
            continue;
        };
        let state = stream.lock();
        let closing = |model: &StreamModel| {
            let newest = model.pieces.last().and_then(|piece| piece.tag);
            newest.is_some() && newest == model.closed_by
        };
        let closed_with_bytes = closing(model);
        if let Some(count) = model.pieces_up_to(state.tail)
            && count >= lasting
        {
            model.pieces.truncate(count);
            model
                .pieces
                .iter_mut()
                .for_each(|piece| piece.volatile = false);
        }
        if closed_with_bytes && !closing(model) {
            model.closed_by = None;
        }
        // They go with the bytes: whatever is kept of those is never stored again.
        model.stream_seq = state.stream_seq.as_deref().map(<[u8]>::to_vec);
        model.producers = state
            .producers()
            .into_iter()
            .flat_map(|known| known.iter())
            .fold(BTreeMap::new(), |mut all, (id, known)| {
                let producer = Producer {
                    epoch: known.epoch,
                    seq: known.last_seq,
                    stream_epoch: known.stream_epoch,
                    skipped: known.skipped,
                };
                // Those of commits are not lost with the bytes.
                if let [id @ b'a'..=b'z'] = id[..] {
                    all.insert(id - b'a', producer);
                }
                all
            });
    }
}
