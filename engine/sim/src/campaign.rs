//! Many seeds, or one again, with a report that lets a person see what happened.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::plan::Plan;
use crate::run::{Bugs, Failed, Summary, run};
use crate::shrink::shrink;

/// How often a failing plan is run again to make it smaller.
const SHRINK_TRIES: usize = 400;
/// Failures that are worth a report of their own; more of the same help nobody.
const REPORTS_MAX: usize = 10;

/// What many seeds came to.
#[derive(Default)]
pub struct Outcome {
    pub seeds: u64,
    pub failures: u64,
    pub reports: Vec<String>,
    pub summary: Summary,
}

impl Outcome {
    pub fn to_json(&self) -> String {
        let Summary {
            starts,
            faults_hit,
            damages,
            damages_refused,
            ..
        } = self.summary;
        self.summary.tally.to_json(&[
            ("seeds", self.seeds),
            ("starts", starts),
            ("faults_injected", faults_hit),
            ("bits_flipped", damages),
            ("bits_flipped_refused", damages_refused),
            ("promise_violations", self.failures),
        ])
    }
}

/// Runs one seed; a failure comes back as a report with a plan cut down to what it needs.
pub fn run_seed(seed: u64, bugs: Bugs) -> Result<Summary, String> {
    let plan = Plan::draw(seed);
    run(&plan, bugs).map_err(|failed| report(&plan, bugs, failed))
}

fn report(plan: &Plan, bugs: Bugs, failed: Failed) -> String {
    let smaller = shrink(plan, SHRINK_TRIES, &mut |plan| run(plan, bugs).is_err());
    let seed = plan.seed;
    let mut report = format!(
        "seed {seed}: {}\nreplay with: cargo run --release -p millstream-sim --bin simulate -- {seed} 1\n",
        failed.problem
    );
    let (problem, trace) = match run(&smaller, bugs) {
        Err(failed) => (failed.problem, failed.trace),
        // Cannot be: the plan was kept because it fails. Then the whole story is better than none.
        Ok(_) => (failed.problem, failed.trace),
    };
    let _ = writeln!(
        report,
        "shrunk from {} operations to {}: {problem}",
        plan.op_count(),
        smaller.op_count()
    );
    for life in &smaller.lives {
        let _ = writeln!(
            report,
            "life: start fault {:?} then {:?}, stillborn {:?}, fault {:?}, end {:?}",
            life.start_fault, life.start_end, life.stillborn, life.fault, life.end
        );
    }
    trace.iter().for_each(|line| {
        let _ = writeln!(report, "{line}");
    });
    report
}

/// Runs `count` seeds from `first` on, or as many as the time allows, on all cores.
pub fn run_seeds(first: u64, count: u64, time: Option<Duration>) -> Outcome {
    let begun = Instant::now();
    let next = AtomicU64::new(first);
    let end = first.saturating_add(count);
    let outcome = Mutex::new(Outcome::default());
    let over = || time.is_some_and(|time| begun.elapsed() >= time);
    let work = || {
        while !over() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return;
            }
            let result = run_seed(seed, Bugs::default());
            let mut outcome = outcome.lock();
            outcome.seeds += 1;
            match result {
                Ok(summary) => outcome.summary.add(&summary),
                Err(report) => {
                    outcome.failures += 1;
                    if outcome.reports.len() < REPORTS_MAX {
                        outcome.reports.push(report);
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |count| count.get()) {
            scope.spawn(work);
        }
    });
    outcome.into_inner()
}

/// The first seed that fails with the bugs, and passes without; and how it fails.
pub fn first_caught(mut seeds: std::ops::Range<u64>, bugs: Bugs) -> Option<(u64, String)> {
    seeds.find_map(|seed| {
        let plan = Plan::draw(seed);
        let failed = run(&plan, bugs).err()?;
        run(&plan, Bugs::default()).ok()?;
        Some((seed, failed.problem))
    })
}

/// A number from the environment.
pub fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
