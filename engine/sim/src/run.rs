//! The lives of a server, one after the other: start, check, work, break.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use millstream_core::config::Config;
use millstream_core::io::Doors;
use millstream_core::shard::engine::{Engine, Opened};

use crate::check;
use crate::disk::{Fault, Lies, Machine};
use crate::doors::{Dice, SimClock, SimRandom};
use crate::history::History;
use crate::model::World;
use crate::plan::{End, Life, Op, Plan};
use crate::workload::{Parked, ResolvedFork, after_unclean_start};

/// Deliberate bugs, to see that they are caught.
#[derive(Clone, Copy, Default, Debug)]
pub struct Bugs {
    pub lies: Lies,
    /// Clients hear of success when it is staged, not when it is synced.
    pub ack_early: bool,
    /// A duplicate is answered before the original is synced.
    pub early_duplicate: bool,
}

/// What went wrong, with everything that led there.
#[derive(Debug)]
pub struct Failed {
    pub problem: String,
    pub trace: Vec<String>,
}

#[derive(Clone, Copy, Default, Debug)]
pub struct Summary {
    pub starts: u64,
    pub calls: u64,
    pub faults_hit: u64,
}

pub struct Sim {
    pub machine: Arc<Machine>,
    pub clock: Arc<SimClock>,
    random: Arc<SimRandom>,
    dice: Dice,
    engine: Option<Arc<Engine>>,
    pub world: World,
    pub history: History,
    /// Long sleeps so far: time does not go back with the log.
    pub sleeps: u64,
    pub counter: u64,
    pub parked: Vec<Parked>,
    /// What each incarnation was created with.
    pub requests: BTreeMap<u64, (Op, Option<ResolvedFork>)>,
    pub bugs: Bugs,
    pub trace: Vec<String>,
    /// Start-ups that died: each may have left its first frame in the log.
    died: u64,
    /// A clean mark was staged behind everything.
    marked: bool,
    pub summary: Summary,
}

pub fn config() -> Config {
    Config {
        listen: false,
        reactors: 1,
        // As small as it can be: a full batch and a reserve.
        wal_file_bytes: 0,
        append_max_bytes: 1 << 20,
        ..Config::default()
    }
}

/// Runs a plan. A panic inside the engine is a failure like any other.
pub fn run(plan: &Plan, bugs: Bugs) -> Result<Summary, Failed> {
    let mut sim = Sim::new(plan.seed, bugs);
    let result = catch_unwind(AssertUnwindSafe(|| {
        plan.lives.iter().try_for_each(|life| sim.live(life))?;
        sim.start(None, End::PowerCut)
    }));
    let problem = match result {
        Ok(Ok(())) => {
            sim.summary.calls = sim.machine.calls();
            return Ok(sim.summary);
        }
        Ok(Err(problem)) => problem,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            format!("panic: {}", text.unwrap_or_default())
        }
    };
    let trace = std::mem::take(&mut sim.trace);
    // The disk must not change under an engine that is dropped half way through something.
    sim.machine.process_crash();
    Err(Failed { problem, trace })
}

impl Sim {
    pub fn new(seed: u64, bugs: Bugs) -> Sim {
        let machine = Machine::new(seed);
        machine.set_lies(bugs.lies);
        let mut history = History::default();
        history.restart(0, World::default());
        Sim {
            machine,
            clock: SimClock::new(),
            random: SimRandom::new(seed),
            dice: Dice::new(seed ^ 0xc0ffee),
            engine: None,
            world: World::default(),
            history,
            sleeps: 0,
            counter: 0,
            parked: Vec::new(),
            requests: BTreeMap::new(),
            bugs,
            trace: Vec::new(),
            died: 0,
            marked: false,
            summary: Summary::default(),
        }
    }

    pub fn engine(&self) -> Arc<Engine> {
        Arc::clone(
            self.engine
                .as_ref()
                .expect("operations run only while a server lives"),
        )
    }

    fn live(&mut self, life: &Life) -> Result<(), String> {
        self.start(life.start_fault, life.start_end)?;
        if let Some(end) = life.stillborn {
            self.end(end)?;
            self.start(None, end)?;
        }
        self.machine.arm(life.fault);
        for op in &life.ops {
            if self.machine.is_off() {
                break;
            }
            self.clock.advance_ms(1);
            self.operate(op)?;
        }
        self.machine.arm(None);
        if !self.machine.is_off() && !self.machine.fault_was_hit() {
            check::world(&self.engine(), &self.world, self.sleeps)?;
        }
        self.clock.set_back_ms(life.clock_set_back_ms);
        self.end(life.end)
    }

    // Ends

    pub fn end(&mut self, end: End) -> Result<(), String> {
        if let Some(hit) = self.machine.take_fault_hit() {
            self.summary.faults_hit += 1;
            self.trace.push(format!("  ({hit})"));
        }
        self.machine.arm(None);
        if let (End::CleanStop { .. }, false) = (end, self.machine.is_off()) {
            self.stop_cleanly()?;
        }
        self.trace.push(format!("{end:?}"));
        match end {
            End::ProcessCrash | End::CleanStop { power_cut: false } => self.machine.process_crash(),
            End::PowerCut | End::CleanStop { power_cut: true } => self.machine.power_cut(),
        }
        self.engine = None;
        self.parked.clear();
        Ok(())
    }

    fn stop_cleanly(&mut self) -> Result<(), String> {
        let engine = self.engine();
        while engine.shard.commit(None) {}
        let stopped = std::thread::scope(|scope| {
            scope.spawn(|| engine.shard.run_commit_thread());
            let stopped = engine.write_clean_mark(Duration::from_secs(5));
            engine.shard.stop_threads();
            stopped
        });
        let staged = engine.shard.staged();
        self.marked = true;
        self.history.note(staged, &self.world);
        if stopped {
            self.history.promise(staged);
        } else if !engine.shard.failed() {
            return Err("a clean stop was not possible".into());
        }
        Ok(())
    }

    // Starts

    fn open(&self, machine: &Arc<Machine>) -> Result<Opened, String> {
        let doors = Doors {
            clock: Arc::clone(&self.clock) as _,
            random: Arc::clone(&self.random) as _,
            disk: machine.disk(),
            boot_id: Some([1; 16]),
        };
        Engine::open(config(), doors, &mut |_| {}).map_err(|error| error.to_string())
    }

    pub fn start(&mut self, fault: Option<Fault>, end: End) -> Result<(), String> {
        let twin = self.dice.chance(4).then(|| self.machine.twin());
        self.machine.arm(fault);
        let opened = self.open(&self.machine);
        let hit = self.machine.take_fault_hit();
        self.summary.faults_hit += u64::from(hit.is_some());
        self.machine.arm(None);
        self.summary.starts += 1;
        let opened = match (opened, &hit) {
            (Ok(opened), _) if !self.machine.is_off() => opened,
            (Err(problem), None) => return Err(format!("it does not start: {problem}")),
            (opened, _) => {
                let said = opened.map_or_else(|problem| problem, |_| "opened".into());
                self.trace.push(format!("start-up died: {hit:?}: {said}"));
                self.died += 1;
                self.end(end)?;
                return self.start(None, end);
            }
        };
        let engine = Arc::clone(&opened.engine);
        let start_sequence = engine.shard.synced();
        self.trace.push(format!(
            "start: log ends at {}, {} frames, clean {}",
            start_sequence - 1,
            opened.frames,
            opened.clean
        ));
        self.engine = Some(Arc::clone(&engine));
        if let (Some(twin), None) = (twin, hit) {
            let again = self.open(&twin)?;
            let sequence = again.engine.shard.synced();
            twin.process_crash();
            if sequence != start_sequence {
                return Err(format!(
                    "started twice, found {start_sequence} and {sequence}"
                ));
            }
        }
        self.settle(&engine);
        self.world = self.find_world(&engine, start_sequence - 1, opened.clean)?;
        self.died = 0;
        self.marked = false;
        self.history.restart(start_sequence, self.world.clone());
        self.history.note(engine.shard.staged(), &self.world);
        self.check_recovered(&engine, opened.clean)
    }

    /// Lets maintenance finish what it does by itself after a start.
    fn settle(&self, engine: &Engine) {
        for path in crate::plan::PATHS {
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

    /// The model's world that the recovered log stands for. It must hold everything promised.
    fn find_world(&self, engine: &Engine, end_of_log: u64, clean: bool) -> Result<World, String> {
        let promised = self.history.promised();
        if end_of_log < promised {
            return Err(format!(
                "acknowledged up to {promised}, but the log ends at {end_of_log}"
            ));
        }
        if clean && !self.marked && self.summary.starts > 1 + self.died {
            return Err("taken for a clean stop, but there was none".into());
        }
        let mut problem = String::new();
        // Start-ups that died may have left a frame each.
        for cut in (promised.max(end_of_log.saturating_sub(self.died))..=end_of_log).rev() {
            for candidate in self.history.worlds_at(cut) {
                let mut world = candidate.clone();
                world.publish_all();
                match check::world(engine, &world, self.sleeps) {
                    Ok(()) => {
                        if !clean {
                            after_unclean_start(&mut world);
                        }
                        return Ok(world);
                    }
                    Err(found) if problem.is_empty() => {
                        problem = format!("log ends at {cut}: {found}")
                    }
                    Err(_) => {}
                }
            }
        }
        Err(problem)
    }

    fn check_recovered(&mut self, engine: &Engine, clean: bool) -> Result<(), String> {
        check::fork_counts(engine, &self.world, self.sleeps)?;
        check::walk(engine, &self.world, self.sleeps)?;
        check::listing(engine, &self.world, self.sleeps)?;
        check::offsets(engine, &self.world, &self.history, self.sleeps)?;
        let live: Vec<_> = self.world.live(self.sleeps).cloned().collect();
        for model in &live {
            let Ok(Some(stream)) = engine.find(model.path) else {
                continue;
            };
            let tail = engine.visible_tail(&stream.lock());
            let seen = self.history.highest_epoch_seen(model);
            if !clean && !model.fsync && tail.epoch <= seen {
                return Err(format!(
                    "{}: the tail may be lost, but its epoch is still {}",
                    model.path, tail.epoch
                ));
            }
            self.history.observe(model, tail, model.pieces.len())?;
        }
        Ok(())
    }
}
