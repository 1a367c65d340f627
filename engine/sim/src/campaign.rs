//! Many seeds in a row, or one again, with a report that lets a person see what happened.

use std::fmt::Write;

use crate::plan::Plan;
use crate::run::{Bugs, Summary, run};
use crate::shrink::shrink;

/// How often a failing plan is run again to make it smaller.
const SHRINK_TRIES: usize = 400;

/// Runs one seed; a failure comes back as a report with a plan cut down to what it needs.
pub fn run_seed(seed: u64, bugs: Bugs) -> Result<Summary, String> {
    let plan = Plan::draw(seed);
    let failed = match run(&plan, bugs) {
        Ok(summary) => return Ok(summary),
        Err(failed) => failed,
    };
    let smaller = shrink(&plan, SHRINK_TRIES, &mut |plan| run(plan, bugs).is_err());
    let mut report = format!(
        "seed {seed}: {}\nreplay with MILLSTREAM_SIM_SEED={seed}\n",
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
    Err(report)
}

/// The first failing seed of a range, if there is one.
pub fn first_failure(seeds: impl Iterator<Item = u64>, bugs: Bugs) -> Option<u64> {
    seeds
        .into_iter()
        .find(|seed| run(&Plan::draw(*seed), bugs).is_err())
}

/// A number from the environment.
pub fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
