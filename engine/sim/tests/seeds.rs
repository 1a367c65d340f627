//! Seeds: every run is another history of crashes. `MILLSTREAM_SIM_SEEDS` = how many, `MILLSTREAM_SIM_SEED` = this one.

use millstream_sim::campaign::{run_seed, setting};
use millstream_sim::run::Bugs;

/// Unoptimised builds run about ten times slower; `make test` runs this crate optimised.
const SEEDS: u64 = if cfg!(debug_assertions) { 100 } else { 2000 };

#[test]
fn nothing_promised_is_lost_in_any_seed() {
    if let Some(seed) = setting("MILLSTREAM_SIM_SEED") {
        run_seed(seed, Bugs::default()).unwrap_or_else(|report| panic!("{report}"));
        return;
    }
    let count = setting("MILLSTREAM_SIM_SEEDS").unwrap_or(SEEDS);
    let mut faults_hit = 0;
    for seed in 0..count {
        match run_seed(seed, Bugs::default()) {
            Ok(summary) => faults_hit += summary.faults_hit,
            Err(report) => panic!("{report}"),
        }
    }
    // A harness that injects nothing proves nothing.
    assert!(
        faults_hit * 4 > count,
        "{faults_hit} faults in {count} seeds"
    );
}
