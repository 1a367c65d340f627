//! Runs seeds and prints each failure with its shrunk plan.
//!
//! ```text
//! simulate [first seed] [count]        default: 1000 seeds from 0
//! simulate --seconds N [first seed]    as many as fit
//!          --report FILE               what each class lost, as JSON
//! ```

use std::process::ExitCode;
use std::time::Duration;

use millstream_sim::campaign::run_seeds;

const USAGE: &str = "usage: simulate [--seconds N] [--report FILE] [first seed] [count]";

struct Wish {
    first: u64,
    count: u64,
    time: Option<Duration>,
    report: Option<String>,
}

fn wish(mut arguments: impl Iterator<Item = String>) -> Option<Wish> {
    let mut numbers = Vec::new();
    let (mut time, mut report) = (None, None);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => time = Some(Duration::from_secs(arguments.next()?.parse().ok()?)),
            "--report" => report = Some(arguments.next()?),
            number => numbers.push(number.parse().ok()?),
        }
    }
    let count = if time.is_some() { u64::MAX } else { 1000 };
    (numbers.len() <= 2).then(|| Wish {
        first: numbers.first().copied().unwrap_or(0),
        count: numbers.get(1).copied().unwrap_or(count),
        time,
        report,
    })
}

fn main() -> ExitCode {
    let Some(wish) = wish(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let outcome = run_seeds(wish.first, wish.count, wish.time);
    outcome
        .reports
        .iter()
        .for_each(|report| println!("{report}"));
    println!(
        "{} seeds from {}, {} starts, {} faults hit, {} bits flipped, {} failures",
        outcome.seeds,
        wish.first,
        outcome.summary.starts,
        outcome.summary.faults_hit,
        outcome.summary.damages,
        outcome.failures
    );
    if let Some(path) = wish.report
        && let Err(error) = std::fs::write(&path, outcome.to_json())
    {
        eprintln!("{path}: {error}");
        return ExitCode::from(2);
    }
    ExitCode::from(u8::from(outcome.failures > 0))
}
