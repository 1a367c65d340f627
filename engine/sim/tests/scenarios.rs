//! Histories that random plans meet too rarely, written by hand and run with many fates of the power cut.

mod common;

use common::{append, checkpoint, close, commit, create, life, plan, stage, tail_of};
use millstream_core::io::sabotage::Sabotage;
use millstream_core::model::Class;
use millstream_sim::disk::{Call, Failure, Fault};
use millstream_sim::plan::{End, Life, Op};
use millstream_sim::run::{Bugs, run};

/// The dice of the seed decide which sectors and names a power cut keeps.
const FATES: u64 = if cfg!(debug_assertions) { 8 } else { 60 };
/// To tear a group between two of its frames takes some luck.
const FATES_OF_GROUPS: u64 = 60;
/// For histories that fill files of megabytes.
const FATES_OF_LARGE: u64 = if cfg!(debug_assertions) { 4 } else { 24 };

fn passes_with_every_fate(lives: &[Life], fates: u64) {
    for seed in 0..fates {
        if let Err(failed) = run(&plan(seed, lives.to_vec()), Bugs::default()) {
            let trace = failed.trace.join("\n");
            panic!("fate {seed}: {}\n{trace}", failed.problem);
        }
    }
}

/// How many fates bring the bug to light: none would mean that the history does not lead where it should.
fn fates_that_catch(lives: &[Life], sabotage: Sabotage, fates: u64) -> usize {
    let bugs = Bugs {
        sabotage: Some(sabotage),
        ..Bugs::default()
    };
    (0..fates)
        .filter(|seed| run(&plan(*seed, lives.to_vec()), bugs).is_err())
        .count()
}

const MIB: usize = 1 << 20;
/// What a frame and its batch need beside the payload.
const AROUND_BYTES: usize = 64 + 56;
const START_BATCH_BYTES: usize = AROUND_BYTES + 26;
const FIRST_FILE_BYTES: usize = 4 * MIB;
const LATER_FILE_BYTES: usize = 10 * MIB;

/// Appends, each in a batch of its own, that leave less than `left` bytes of `room`.
fn fill(path: usize, mut room: usize, left: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    while room > left {
        let most = (MIB - AROUND_BYTES).min(room - AROUND_BYTES);
        // The last one must not leave a rest that is too small to be filled.
        let size = if room - AROUND_BYTES - most > 2 * AROUND_BYTES {
            most.min(room - 4 * AROUND_BYTES)
        } else {
            most
        };
        ops.extend([append(path, size, None), Op::Write]);
        room -= size + AROUND_BYTES;
    }
    ops
}

/// One batch of many frames and one behind it are written into a second file, of which the first is lost. The file is
/// recycled, and a batch of the same length brings the discarded one into line, with the very sequence it had.
fn discarded_frames_in_line() -> Vec<Life> {
    // Checkpoints, so that no start has anything to copy and every file begins with a start frame alone.
    let made = vec![
        create(0, Class::Memory, 0, None),
        Op::Commit,
        checkpoint(Vec::new()),
    ];
    let fill_first = || fill(0, FIRST_FILE_BYTES - 64 - START_BATCH_BYTES, 100);
    let fill_later = || fill(0, LATER_FILE_BYTES - 64, 100);
    // One for the start, those that fill two files, and the one that takes the place of these.
    let frames = 2 + fill_first().len() / 2 + fill_later().len() / 2;
    let mut discarded = fill_first();
    discarded.push(checkpoint(Vec::new()));
    discarded.extend((0..frames).map(|_| append(0, 16, None)));
    discarded.extend([Op::Write, append(0, 16, None), Op::Write]);
    let mut in_line = vec![checkpoint(Vec::new())];
    in_line.extend(fill_first());
    in_line.extend(fill_later());
    in_line.extend([append(0, frames * (56 + 16) - 56, None), Op::Commit]);
    vec![
        life(made, None, End::PowerCut),
        life(discarded, None, End::PowerCut),
        life(in_line, None, End::ProcessCrash),
        life(Vec::new(), None, End::PowerCut),
    ]
}

#[test]
fn discarded_frames_of_a_recycled_file_stay_discarded() {
    let lives = discarded_frames_in_line();
    passes_with_every_fate(&lives, FATES_OF_LARGE);
    let caught = fates_that_catch(&lives, Sabotage::ForgetGeneration, FATES_OF_LARGE);
    assert!(caught > 0, "the discarded frames never came into line");
}

#[test]
fn discarded_frames_of_a_cut_file_stay_discarded() {
    let unsynced = |size| {
        (0..6)
            .flat_map(|_| [append(0, size, None), Op::Write])
            .collect::<Vec<Op>>()
    };
    let mut first = vec![create(0, Class::Memory, 10, None), Op::Commit];
    first.extend(unsynced(600));
    // The same sizes again: whatever was cut off behind them is where it would fit.
    passes_with_every_fate(
        &[
            life(first, None, End::PowerCut),
            life(unsynced(600), None, End::PowerCut),
            life(unsynced(600), None, End::ProcessCrash),
            life(vec![append(0, 600, None), Op::Commit], None, End::PowerCut),
        ],
        FATES,
    );
}

#[test]
fn a_second_file_is_written_while_the_first_is_not_synced() {
    for class in [Class::Memory, Class::Disk] {
        let mut ops = vec![
            create(0, class, 0, None),
            create(1, Class::Fsync, 0, None),
            Op::Commit,
        ];
        ops.extend(fill(0, FIRST_FILE_BYTES - MIB, 0));
        ops.extend([append(0, MIB - 500, None), Op::Write]);
        ops.extend([append(0, MIB - 500, None), Op::Write]);
        ops.extend([
            append(0, 40, None),
            Op::Write,
            append(1, 30, None),
            Op::Write,
        ]);
        passes_with_every_fate(
            &[
                life(ops.clone(), None, End::PowerCut),
                life(
                    vec![append(0, 40, None), append(1, 30, None), Op::Commit],
                    None,
                    End::PowerCut,
                ),
            ],
            FATES_OF_LARGE,
        );
        // And a sync that fails in one of the two.
        for after in 0..6 {
            let fault = Fault {
                after,
                call: Some(Call::Sync),
                failure: Failure::Eio,
            };
            let mut failing = ops.clone();
            failing.push(Op::Commit);
            let second = life(vec![append(0, 40, None), Op::Commit], None, End::PowerCut);
            let mut reborn = second.clone();
            reborn.stillborn = Some(End::PowerCut);
            for end in [End::ProcessCrash, End::PowerCut] {
                let first = life(failing.clone(), Some(fault), end);
                let lives = [first, reborn.clone(), second.clone()];
                for seed in 0..3 {
                    if let Err(failed) = run(&plan(seed, lives.to_vec()), Bugs::default()) {
                        panic!(
                            "{after} {end:?}: {}\n{}",
                            failed.problem,
                            failed.trace.join("\n")
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_group_is_taken_whole_or_not_at_all() {
    let lives = [
        life(
            vec![create(0, Class::Fsync, 40, None), Op::Commit],
            None,
            End::ProcessCrash,
        ),
        life(
            vec![create(1, Class::Fsync, 3000, tail_of(0)), Op::Write],
            None,
            End::PowerCut,
        ),
        life(vec![append(0, 10, None), Op::Commit], None, End::PowerCut),
    ];
    passes_with_every_fate(&lives, FATES);
    assert!(fates_that_catch(&lives, Sabotage::SplitGroups, FATES_OF_GROUPS) > 0);
}

#[test]
fn a_commit_is_taken_whole_or_not_at_all() {
    let streams = (0..3).map(|path| create(path, Class::Fsync, 40, None));
    let mut made: Vec<Op> = streams.collect();
    made.extend([stage(0, [0, 1], 9_000), stage(1, [1, 2], 9_000), Op::Commit]);
    let lives = [
        life(made, None, End::PowerCut),
        life(vec![commit(0), commit(1), Op::Write], None, End::PowerCut),
        life(vec![commit(0), commit(1), Op::Commit], None, End::PowerCut),
    ];
    passes_with_every_fate(&lives, FATES);
    assert!(fates_that_catch(&lives, Sabotage::SplitGroups, FATES_OF_GROUPS) > 0);
}

#[test]
fn a_failed_sync_then_a_restart_then_a_power_cut() {
    let work = || {
        vec![
            create(0, Class::Fsync, 40, None),
            create(1, Class::Disk, 40, None),
            Op::Commit,
            append(0, 900, Some(0)),
            append(1, 700, Some(0)),
            Op::Write,
            append(0, 300, Some(0)),
            Op::Commit,
            append(0, 300, Some(0)),
            Op::Commit,
        ]
    };
    let again = || {
        vec![
            append(0, 50, Some(0)),
            append(1, 50, Some(0)),
            append(0, 50, Some(-1)),
            Op::Commit,
        ]
    };
    for after in 0..4 {
        let fault = Fault {
            after,
            call: Some(Call::Sync),
            failure: Failure::Eio,
        };
        for end in [End::ProcessCrash, End::PowerCut] {
            let mut second = life(again(), None, End::PowerCut);
            second.stillborn = Some(End::PowerCut);
            passes_with_every_fate(
                &[
                    life(work(), Some(fault), end),
                    second,
                    life(again(), None, End::PowerCut),
                ],
                FATES,
            );
        }
    }
}

#[test]
fn a_power_cut_right_after_a_restart_takes_nothing_that_the_restart_has_shown() {
    let ops = vec![
        create(0, Class::Disk, 40, None),
        create(1, Class::Memory, 40, None),
        Op::Commit,
        append(0, 2000, Some(0)),
        append(1, 2000, Some(0)),
        Op::Write,
        append(0, 700, Some(0)),
        Op::Write,
    ];
    let mut second = life(
        vec![append(0, 30, Some(0)), Op::Write],
        None,
        End::ProcessCrash,
    );
    second.stillborn = Some(End::PowerCut);
    let lives = [
        life(ops, None, End::ProcessCrash),
        second,
        life(Vec::new(), None, End::PowerCut),
    ];
    passes_with_every_fate(&lives, FATES);
    assert!(fates_that_catch(&lives, Sabotage::TrustPageCache, FATES) > 0);
}

#[test]
fn what_was_deleted_or_closed_stays_so_and_a_fork_outlives_its_source_in_every_class() {
    let classes = [Class::Ephemeral, Class::Memory, Class::Disk, Class::Fsync];
    for class in classes {
        for fork_class in classes {
            let ops = vec![
                create(0, class, 60, None),
                create(2, class, 60, None),
                Op::Commit,
                append(0, 500, None),
                create(1, fork_class, 20, tail_of(0)),
                Op::Commit,
                Op::Delete { path: 0 },
                close(2, 33),
                Op::Commit,
                append(1, 100, None),
            ];
            let later = || {
                vec![
                    append(1, 30, None),
                    append(2, 5, None),
                    checkpoint(Vec::new()),
                ]
            };
            let lives = [
                life(ops, None, End::PowerCut),
                life(later(), None, End::ProcessCrash),
                life(later(), None, End::PowerCut),
            ];
            for seed in 0..FATES / 10 + 1 {
                if let Err(failed) = run(&plan(seed, lives.to_vec()), Bugs::default()) {
                    panic!(
                        "{class:?} and {fork_class:?}: {}\n{}",
                        failed.problem,
                        failed.trace.join("\n")
                    );
                }
            }
        }
    }
}

#[test]
fn a_full_disk_refuses_appends_and_recovers_without_a_restart() {
    for class in [Class::Memory, Class::Disk, Class::Fsync] {
        let mut ops = vec![
            create(0, class, 100, None),
            create(1, class, 100, None),
            Op::Commit,
            Op::FillDisk { spare_bytes: 4096 },
        ];
        // More than two log files hold: some of it finds no room.
        ops.extend(fill(0, 2 * LATER_FILE_BYTES, 0));
        // What makes room, or ends something, is still possible.
        ops.extend([close(0, 0), Op::Delete { path: 0 }, Op::Commit]);
        ops.extend([
            Op::FreeDisk,
            checkpoint(Vec::new()),
            append(1, 900, Some(0)),
        ]);
        ops.extend([Op::Commit, append(1, 2000, Some(0)), Op::Commit, Op::Check]);
        let lives = vec![
            life(ops, None, End::PowerCut),
            life(
                vec![append(1, 50, Some(0)), Op::Commit],
                None,
                End::PowerCut,
            ),
        ];
        for seed in 0..4 {
            match run(&plan(seed, lives.clone()), Bugs::default()) {
                Ok(summary) => assert!(summary.full > 0, "{class:?}: the disk was never full"),
                Err(failed) => {
                    panic!("{class:?}: {}\n{}", failed.problem, failed.trace.join("\n"));
                }
            }
        }
    }
}

/// Streams of all kinds are deleted at all distances from a checkpoint, and their names used again.
fn removals() -> Vec<Life> {
    let delete = |path| Op::Delete { path };
    let made = vec![
        create(0, Class::Fsync, 10, None),
        create(1, Class::Ephemeral, 10, None),
        create(2, Class::Memory, 10, None),
        append(0, 600, None),
        append(1, 700, None),
        append(2, 800, None),
        Op::Commit,
        checkpoint(Vec::new()),
        // A fork is deleted in two steps, its source when the fork is gone.
        create(3, Class::Fsync, 20, tail_of(0)),
        Op::Commit,
        append(1, 300, None),
        append(2, 300, None),
        delete(0),
        delete(1),
        Op::Commit,
        create(1, Class::Ephemeral, 40, None),
        Op::Commit,
        delete(1),
        Op::Commit,
    ];
    // The memory of some goes from the log to the catalog while others are deleted.
    let moved = vec![
        checkpoint(vec![delete(3), Op::Write]),
        delete(2),
        Op::Commit,
        checkpoint(Vec::new()),
        create(2, Class::Memory, 5, None),
        append(2, 50, None),
        Op::Commit,
        delete(2),
        Op::Write,
    ];
    vec![
        life(made, None, End::PowerCut),
        life(moved, None, End::PowerCut),
        life(vec![checkpoint(Vec::new())], None, End::PowerCut),
        life(Vec::new(), None, End::ProcessCrash),
    ]
}

#[test]
fn where_deleted_streams_ended_is_remembered() {
    let lives = removals();
    passes_with_every_fate(&lives, FATES);
    let caught = fates_that_catch(&lives, Sabotage::ForgetEndings, FATES);
    assert_eq!(
        caught as u64, FATES,
        "what a checkpoint drops was not missed"
    );
}

#[test]
fn an_epoch_that_a_refused_create_took_hides_no_loss() {
    let class = |path, class| Op::SetClass { path, class };
    // The create finds no space and its epoch is in no frame of its own; the class that follows counts from it.
    let lives = [
        life(
            vec![
                create(1, Class::Fsync, 0, None),
                create(0, Class::Fsync, 93, None),
                Op::FillDisk { spare_bytes: 4096 },
                Op::PrepareSpares,
                Op::Renew { path: 0 },
                class(1, Class::Ephemeral),
                Op::Commit,
            ],
            None,
            End::PowerCut,
        ),
        life(Vec::new(), None, End::PowerCut),
    ];
    passes_with_every_fate(&lives, FATES);
}

#[test]
fn a_spare_prepared_beside_a_recycled_one_keeps_the_order_of_the_log() {
    let mut first = vec![create(0, Class::Fsync, 0, None), Op::Commit];
    first.extend((0..3).flat_map(|_| [append(0, 7 * MIB, None), Op::Commit]));
    let meanwhile = || vec![Op::PrepareSpares, append(0, 7 * MIB, None), Op::Commit];
    for pause_after in 1..24 {
        let mut ops = first.clone();
        ops.push(Op::Checkpoint {
            pause_after,
            meanwhile: meanwhile(),
        });
        ops.extend((0..3).flat_map(|_| [append(0, 7 * MIB, None), Op::Commit]));
        passes_with_every_fate(&[life(ops, None, End::PowerCut)], 2);
    }
}

#[test]
fn producers_of_a_stream_that_lost_its_memory_are_not_duplicates_under_another_class() {
    let lives = [
        life(
            vec![
                create(2, Class::Ephemeral, 126, None),
                append(2, 120, Some(0)),
                checkpoint(Vec::new()),
            ],
            None,
            End::PowerCut,
        ),
        life(
            vec![
                Op::SetClass {
                    path: 2,
                    class: Class::Fsync,
                },
                append(2, 100, Some(-1)),
                append(2, 100, Some(0)),
                Op::Commit,
            ],
            None,
            End::PowerCut,
        ),
    ];
    passes_with_every_fate(&lives, FATES);
}
