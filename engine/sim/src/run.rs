//! The lives of a server, one after the other: start, check, work, break.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use millstream_core::config::Config;
use millstream_core::io::sabotage::{self, Sabotage};
use millstream_core::shard::engine::Engine;

use crate::disk::{Lies, Machine};
use crate::doors::{Dice, SimClock, SimRandom};
use crate::history::History;
use crate::model::{Marks, StageModel, World};
use crate::plan::{End, Life, Op, Plan};
use crate::tally::{Tally, Way};
use crate::workload::{Parked, ResolvedFork};

/// Short, so that it runs out within a life.
pub const DISK_SYNC_MS: u64 = 8;
/// Real time, for a thread that real time keeps waiting.
const PATIENCE: Duration = Duration::from_secs(60);
/// Small, so that ephemeral streams outgrow it.
const EPHEMERAL_BYTES: u64 = 16 << 10;

/// Deliberate bugs, to see that they are caught.
#[derive(Clone, Copy, Default, Debug)]
pub struct Bugs {
    pub lies: Lies,
    /// Clients hear of success when it is staged, not when it is synced.
    pub ack_early: bool,
    /// Clients of `disk` streams hear of success when it is staged, not when it is written.
    pub ack_disk_early: bool,
    /// The clock for `disk` streams runs a thousand times too slow.
    pub slow_disk_clock: bool,
    /// A duplicate is answered before the original is synced.
    pub early_duplicate: bool,
    /// A bug inside the engine.
    pub sabotage: Option<Sabotage>,
}

/// What went wrong, with everything that led there.
#[derive(Debug)]
pub struct Failed {
    pub problem: String,
    pub trace: Vec<String>,
}

#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Summary {
    pub starts: u64,
    pub calls: u64,
    pub faults_hit: u64,
    /// Damaged copies that were tried, and those that refused to start.
    pub damages: u64,
    pub damages_refused: u64,
    /// Appends that found no space.
    pub full: u64,
    /// Commits of stages, and those of them whose files were taken over.
    pub commits: u64,
    pub adopted: u64,
    /// What each fault hit, and whether the log had failed when that life ended.
    pub hits: Vec<(String, bool)>,
    pub tally: Tally,
}

impl Summary {
    pub fn add(&mut self, other: &Summary) {
        self.starts += other.starts;
        self.calls += other.calls;
        self.faults_hit += other.faults_hit;
        self.damages += other.damages;
        self.damages_refused += other.damages_refused;
        self.full += other.full;
        self.commits += other.commits;
        self.adopted += other.adopted;
        self.hits.extend_from_slice(&other.hits);
        self.tally.add(&other.tally);
    }
}

pub struct Sim {
    pub machine: Arc<Machine>,
    pub clock: Arc<SimClock>,
    pub(crate) random: Arc<SimRandom>,
    pub(crate) dice: Dice,
    pub(crate) engine: Option<Arc<Engine>>,
    pub world: World,
    pub history: History,
    /// Long sleeps so far: time does not go back with the log.
    pub sleeps: u64,
    pub counter: u64,
    pub parked: Vec<Parked>,
    /// Stages that clients were told of, by slot; a committed one stays until its slot is used again.
    pub staged: BTreeMap<usize, StageModel>,
    /// What each incarnation was created with.
    pub requests: BTreeMap<u64, (Op, Option<ResolvedFork>)>,
    pub bugs: Bugs,
    pub trace: Vec<String>,
    pub(crate) since: SinceStart,
    /// Something beside stands at a pause; if it is a sync, nobody else can sync.
    pub(crate) standing_still: bool,
    pub(crate) sync_stands_still: bool,
    pub(crate) boot_known: bool,
    pub summary: Summary,
}

/// What has happened since the last start that came through.
#[derive(Clone, Copy, Default, Debug)]
pub struct SinceStart {
    /// Start-ups that died: each may have left its first frame in the log.
    pub died: u64,
    /// A clean mark was staged behind everything, and it was synced: nothing can be lost behind it.
    pub marked: bool,
    pub stopped: bool,
    pub power_was_cut: bool,
    /// A write or sync failed: pages may be gone from the cache, too.
    pub log_failed: bool,
    /// The next start is told that the directory comes from a backup.
    pub restored: bool,
}

impl SinceStart {
    pub fn way(&self, clean: bool) -> Way {
        match (clean, self.power_was_cut, self.log_failed) {
            (true, _, _) => Way::Clean,
            (false, true, _) => Way::PowerCut,
            (false, false, true) => Way::FailedLog,
            (false, false, false) => Way::Kill,
        }
    }
}

pub fn config(bugs: Bugs, restored: bool) -> Config {
    let slowness = if bugs.slow_disk_clock { 1000 } else { 1 };
    Config {
        listen: false,
        reactors: 1,
        // As small as it can be: a full batch and a reserve.
        wal_file_bytes: 0,
        append_max_bytes: 1 << 20,
        disk_sync_ms: DISK_SYNC_MS * slowness,
        ephemeral_bytes_max: EPHEMERAL_BYTES,
        // Stages wait for ever: time is not what is tried here.
        stage_ttl_s: u64::MAX / 2000,
        restored,
        ..Config::default()
    }
}

/// Runs a plan. A panic inside the engine is a failure like any other.
pub fn run(plan: &Plan, bugs: Bugs) -> Result<Summary, Failed> {
    let mut sim = Sim::new(plan.seed, bugs);
    sim.boot_known = plan.boot_known;
    sabotage::set(bugs.sabotage);
    let result = catch_unwind(AssertUnwindSafe(|| {
        plan.lives.iter().try_for_each(|life| sim.live(life))?;
        sim.start(None, End::PowerCut)
    }));
    sabotage::set(None);
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
            staged: BTreeMap::new(),
            requests: BTreeMap::new(),
            bugs,
            trace: Vec::new(),
            since: SinceStart::default(),
            standing_still: false,
            sync_stands_still: false,
            boot_known: true,
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
        self.try_damages(&life.damages)?;
        self.since.restored = life.restored;
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
        if !self.machine.is_off() {
            self.check_live()?;
        }
        self.clock.set_back_ms(life.clock_set_back_ms);
        self.end(life.end)
    }

    // Ends

    pub fn end(&mut self, end: End) -> Result<(), String> {
        if let Some(hit) = self.machine.take_fault_hit() {
            self.summary.faults_hit += 1;
            self.trace.push(format!("  ({hit})"));
            let engine = self.engine.as_ref();
            let log_failed = engine.is_some_and(|engine| engine.shard.failed());
            self.summary.hits.push((hit, log_failed));
        }
        self.machine.arm(None);
        if let (End::CleanStop { .. }, false) = (end, self.machine.is_off()) {
            self.stop_cleanly()?;
        }
        self.trace.push(format!("{end:?}"));
        let engine = self.engine.take();
        // A log that stopped because the machine did has lost no page that a kill would not.
        let failed = engine.is_some_and(|engine| engine.shard.failed());
        self.since.log_failed |= failed && !self.machine.is_off();
        match end {
            End::ProcessCrash | End::CleanStop { power_cut: false } => self.machine.process_crash(),
            End::PowerCut | End::CleanStop { power_cut: true } => {
                self.since.power_was_cut = true;
                self.machine.power_cut();
            }
        }
        self.parked.clear();
        Ok(())
    }

    fn stop_cleanly(&mut self) -> Result<(), String> {
        let engine = self.engine();
        while engine.shard.commit(None) {}
        self.deliver()?;
        let stopped = std::thread::scope(|scope| {
            scope.spawn(|| {
                sabotage::set(self.bugs.sabotage);
                engine.shard.run_commit_thread();
            });
            let stopped = engine.write_clean_mark(PATIENCE);
            engine.shard.stop_threads();
            stopped
        });
        let staged = engine.shard.staged();
        self.since.marked = true;
        self.history.note(staged, &self.world);
        self.since.stopped = stopped;
        if stopped {
            self.history.promise(Marks {
                written: staged,
                synced: staged,
            });
        } else if !engine.shard.failed() {
            return Err("a clean stop was not possible".into());
        }
        Ok(())
    }
}
