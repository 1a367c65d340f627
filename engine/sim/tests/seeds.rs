//! Seeds: every run is another history of crashes. `MILLSTREAM_SIM_SEEDS` = how many, `MILLSTREAM_SIM_SEED` = this one,
//! `MILLSTREAM_SIM_REPORT` = the file for what each class lost.

use millstream_core::model::Class;
use millstream_sim::campaign::{run_seed, run_seeds, setting};
use millstream_sim::plan::Plan;
use millstream_sim::run::{Bugs, Summary, run};
use millstream_sim::tally::{CLASSES, Losses, Way};

/// Unoptimised builds run about ten times slower; `make test` runs this crate optimised.
const SEEDS: u64 = if cfg!(debug_assertions) { 100 } else { 2000 };

#[test]
fn nothing_promised_is_lost_in_any_seed() {
    if let Some(seed) = setting("MILLSTREAM_SIM_SEED") {
        run_seed(seed, Bugs::default()).unwrap_or_else(|report| panic!("{report}"));
        return;
    }
    let count = setting("MILLSTREAM_SIM_SEEDS").unwrap_or(SEEDS);
    let outcome = run_seeds(0, count, None);
    if let Ok(path) = std::env::var("MILLSTREAM_SIM_REPORT") {
        std::fs::write(&path, outcome.to_json()).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    assert!(outcome.failures == 0, "{}", outcome.reports.join("\n"));
    // A harness that injects nothing proves nothing.
    let Summary {
        faults_hit,
        damages,
        damages_refused,
        commits,
        adopted,
        tally,
        ..
    } = outcome.summary;
    assert!(
        commits > count / 2 && adopted > 0 && adopted < commits,
        "{commits} commits in {count} seeds, {adopted} of them adopted"
    );
    assert!(
        faults_hit * 4 > count,
        "{faults_hit} faults in {count} seeds"
    );
    assert!(
        damages > damages_refused && damages_refused > 0,
        "{damages_refused} of {damages} flipped bits refused"
    );
    for class in CLASSES {
        let of_class = tally.classes[class as usize];
        assert!(
            of_class.records_acknowledged > count,
            "{class:?}: {of_class:?}"
        );
        let lost = |way: Way| of_class.by_way[way as usize].records_lost > 0;
        let lost = [Way::Clean, Way::Kill, Way::PowerCut].map(lost);
        // Clean stop, kill, power cut: exactly where the class may lose, it is seen to lose, and never elsewhere.
        let may_lose = match class {
            Class::Ephemeral => [true, true, true],
            Class::Memory => [false, true, true],
            Class::Disk => [false, false, true],
            _ => [false, false, false],
        };
        assert_eq!(lost, may_lose, "{class:?}: {of_class:?}");
        let unreported = |losses: &Losses| losses.reported < losses.streams_with_loss;
        assert!(
            !of_class.by_way.iter().any(unreported),
            "{class:?}: {of_class:?}"
        );
    }
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..SEEDS / 50 {
        let plan = Plan::draw(seed);
        let [first, second] = [0, 1].map(|_| run(&plan, Bugs::default()).ok());
        assert_eq!(first, second, "seed {seed}");
    }
}
