//! The test of the tests: each deliberate bug is caught within a bounded number of seeds.

use millstream_sim::campaign::first_failure;
use millstream_sim::disk::Lies;
use millstream_sim::run::Bugs;

fn assert_caught(name: &str, bugs: Bugs, within: u64) {
    match first_failure(0..within, bugs) {
        Some(seed) => println!("{name}: caught by seed {seed}"),
        None => panic!("{name} went unnoticed in {within} seeds"),
    }
}

fn lying(lies: Lies) -> Bugs {
    Bugs {
        lies,
        ..Bugs::default()
    }
}

#[test]
fn a_skipped_log_sync_is_caught() {
    let lies = Lies {
        skip_log_sync: true,
        ..Lies::default()
    };
    assert_caught("skip the sync", lying(lies), 50);
}

#[test]
fn a_skipped_directory_sync_is_caught() {
    let lies = Lies {
        skip_directory_sync: true,
        ..Lies::default()
    };
    assert_caught("skip the directory sync", lying(lies), 50);
}

#[test]
fn an_ignored_write_error_is_caught() {
    let lies = Lies {
        ignore_write_errors: true,
        ..Lies::default()
    };
    assert_caught("ignore a write error", lying(lies), 300);
}

#[test]
fn an_ignored_sync_error_is_caught() {
    let lies = Lies {
        ignore_sync_errors: true,
        ..Lies::default()
    };
    assert_caught("ignore a sync error", lying(lies), 300);
}

#[test]
fn an_early_acknowledgement_is_caught() {
    let bugs = Bugs {
        ack_early: true,
        ..Bugs::default()
    };
    assert_caught("acknowledge early", bugs, 50);
}

#[test]
fn a_duplicate_answered_before_it_is_durable_is_caught() {
    let bugs = Bugs {
        early_duplicate: true,
        ..Bugs::default()
    };
    assert_caught("answer a duplicate early", bugs, 300);
}
