//! Runs seeds until one fails: `simulate [first seed] [count]`. Each failure is printed with its shrunk plan.

use millstream_sim::campaign::run_seed;
use millstream_sim::run::Bugs;

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.parse::<u64>().ok());
    let first = arguments.next().unwrap_or(0);
    let count = arguments.next().unwrap_or(1000);
    let mut starts = 0;
    let mut failures = 0;
    for seed in first..first.saturating_add(count) {
        match run_seed(seed, Bugs::default()) {
            Ok(summary) => starts += summary.starts,
            Err(report) => {
                println!("{report}");
                failures += 1;
            }
        }
    }
    println!("{count} seeds from {first}, {starts} starts, {failures} failures");
    if failures > 0 {
        std::process::exit(1);
    }
}
