//! The test of the tests: each deliberate bug is caught within a bounded number of seeds, by a run that passes
//! without the bug.

use millstream_core::io::sabotage::Sabotage;
use millstream_sim::campaign::first_caught;
use millstream_sim::disk::Lies;
use millstream_sim::run::Bugs;

fn assert_caught(name: &str, bugs: Bugs, within: u64) {
    match first_caught(0..within, bugs) {
        Some((seed, problem)) => println!("{name}: caught by seed {seed}: {problem}"),
        None => panic!("{name} went unnoticed in {within} seeds"),
    }
}

fn lying(lies: Lies) -> Bugs {
    Bugs {
        lies,
        ..Bugs::default()
    }
}

fn sabotaged(sabotage: Sabotage) -> Bugs {
    Bugs {
        sabotage: Some(sabotage),
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
fn a_skipped_sync_of_packs_and_segments_is_caught() {
    let lies = Lies {
        skip_cold_sync: true,
        ..Lies::default()
    };
    assert_caught("skip the sync of cold files", lying(lies), 300);
}

#[test]
fn a_skipped_sync_of_the_catalog_is_caught() {
    let lies = Lies {
        skip_catalog_sync: true,
        ..Lies::default()
    };
    assert_caught("skip the sync of the catalog", lying(lies), 300);
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
fn a_boot_id_that_stays_through_a_power_cut_is_caught() {
    let lies = Lies {
        reuse_boot_id: true,
        ..Lies::default()
    };
    assert_caught("reuse a boot id", lying(lies), 50);
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
fn an_acknowledgement_of_disk_before_the_write_is_caught() {
    let bugs = Bugs {
        ack_disk_early: true,
        ..Bugs::default()
    };
    assert_caught("acknowledge disk early", bugs, 50);
}

#[test]
fn a_duplicate_answered_before_it_is_durable_is_caught() {
    let bugs = Bugs {
        early_duplicate: true,
        ..Bugs::default()
    };
    assert_caught("answer a duplicate early", bugs, 1000);
}

#[test]
fn a_dropped_checksum_is_caught() {
    assert_caught("drop the checksum", sabotaged(Sabotage::DropChecksum), 300);
}

#[test]
fn trust_in_the_page_cache_is_caught() {
    assert_caught(
        "trust the page cache",
        sabotaged(Sabotage::TrustPageCache),
        300,
    );
}

#[test]
fn a_loss_without_a_new_epoch_is_caught() {
    assert_caught("keep the epoch", sabotaged(Sabotage::SilentLoss), 50);
}

#[test]
fn bytes_shown_before_they_are_synced_are_caught() {
    assert_caught("show early", sabotaged(Sabotage::ShowEarly), 50);
}

#[test]
fn an_append_that_overtakes_a_change_of_class_is_caught() {
    assert_caught("forget control", sabotaged(Sabotage::ForgetControl), 50);
}

#[test]
fn a_stage_that_is_acknowledged_before_it_is_synced_is_caught() {
    assert_caught("stage unsynced", sabotaged(Sabotage::StageUnsynced), 100);
}

#[test]
fn a_disk_stream_that_is_not_synced_in_time_is_caught() {
    let bugs = Bugs {
        slow_disk_clock: true,
        ..Bugs::default()
    };
    assert_caught("let the disk clock run late", bugs, 100);
}

#[test]
fn forks_in_the_epoch_of_their_source_are_caught() {
    assert_caught("share epochs", sabotaged(Sabotage::ShareEpochs), 300);
}

#[test]
fn a_read_that_passes_a_loss_without_a_word_is_caught() {
    assert_caught("skip a gap", sabotaged(Sabotage::PlanSkipsGap), 100);
}

#[test]
fn a_replay_that_takes_a_frame_for_something_else_is_caught() {
    assert_caught("replay differs", sabotaged(Sabotage::ReplayDiffers), 100);
}

#[test]
fn a_locator_that_takes_a_stale_extent_is_caught() {
    assert_caught("stale extent", sabotaged(Sabotage::StaleExtent), 100);
}
