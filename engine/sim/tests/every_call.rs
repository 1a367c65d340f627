//! One fixed workload in all classes, broken at every disk call it makes: each call fails in each way, each failure
//! is followed by a process crash or a power cut, and then by a power cut right after the restart.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{append, checkpoint, close, commit, create, life, plan, stage, tail_of};
use millstream_core::model::Class;
use millstream_sim::disk::{Call, Failure, Fault};
use millstream_sim::plan::{End, Op, Plan};
use millstream_sim::run::{Bugs, run};

/// Every call in optimised builds; unoptimised ones take samples, or they would take minutes.
const STRIDE: u64 = if cfg!(debug_assertions) { 9 } else { 1 };
const CALLS_MAX: u64 = 4000;

fn workload() -> Vec<Op> {
    let mut ops = vec![
        create(0, Class::Fsync, 100, None),
        create(1, Class::Memory, 50, None),
        create(3, Class::Disk, 60, None),
        create(4, Class::Ephemeral, 70, None),
        Op::Commit,
        append(0, 700, Some(0)),
        append(1, 80, None),
        append(3, 90, Some(0)),
        append(4, 20_000, None),
        Op::Write,
        Op::Spill,
        Op::Commit,
        stage(0, [0, 3], 60),
        stage(1, [0, 1], 120_000),
        commit(0),
        append(0, 33_000, Some(0)),
        append(0, 10, Some(-1)),
        commit(1),
        append(1, 25, None),
        Op::SlowSync {
            meanwhile: vec![append(3, 40, Some(0)), Op::Write, append(4, 30, None)],
        },
        checkpoint(vec![
            append(0, 90, Some(0)),
            append(1, 60, None),
            Op::Commit,
        ]),
        Op::Sweep,
        stage(2, [3, 4], 90_000),
        commit(1),
        commit(2),
    ];
    ops.extend([
        create(2, Class::Fsync, 20, tail_of(0)),
        append(2, 300, None),
        Op::Delete { path: 0 },
        Op::SetClass {
            path: 1,
            class: Class::Fsync,
        },
        Op::SetClass {
            path: 4,
            class: Class::Disk,
        },
        append(1, 30, None),
        append(4, 35, None),
        Op::Write,
        create(5, Class::Memory, 15, tail_of(4)),
        Op::Commit,
        close(1, 30),
        Op::PrepareSpares,
        checkpoint(vec![append(2, 40, None), append(4, 45, None)]),
        append(2, 45, Some(0)),
        Op::SetClass {
            path: 3,
            class: Class::Memory,
        },
        append(3, 25, Some(0)),
        Op::Commit,
    ]);
    ops
}

/// The fault hits the workload; a restart, a short life, a power cut.
fn in_the_workload(fault: Fault, end: End) -> Plan {
    let mut second = life(
        vec![
            append(2, 5, Some(0)),
            append(4, 5, None),
            commit(0),
            commit(1),
            commit(2),
            Op::Commit,
            checkpoint(vec![]),
            append(3, 7, None),
        ],
        None,
        End::PowerCut,
    );
    second.stillborn = fault.after.is_multiple_of(2).then_some(End::PowerCut);
    plan(
        fault.after,
        vec![life(workload(), Some(fault), end), second],
    )
}

/// The workload ends in a crash; the fault hits the start that follows.
fn in_the_start(fault: Fault, end: End) -> Plan {
    let mut second = life(vec![append(2, 5, Some(0)), Op::Commit], None, End::PowerCut);
    second.start_fault = Some(fault);
    second.start_end = end;
    plan(
        fault.after,
        vec![life(workload(), None, End::PowerCut), second],
    )
}

/// Breaks call after call until the fault no longer finds one. Returns how many there are.
fn at_every_call(
    call: Option<Call>,
    failure: Failure,
    plan_for: &(dyn Fn(Fault, End) -> Plan + Sync),
) -> u64 {
    let (next, calls) = (AtomicU64::new(0), AtomicU64::new(CALLS_MAX));
    let stop = AtomicBool::new(false);
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let after = next.fetch_add(STRIDE, Ordering::Relaxed);
            if !at_call(after, call, failure, plan_for) {
                calls.fetch_min(after, Ordering::Relaxed);
                stop.store(true, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(work);
        work();
        other.join().unwrap_or_else(|panic| {
            stop.store(true, Ordering::Relaxed);
            std::panic::resume_unwind(panic)
        });
    });
    let calls = calls.into_inner();
    assert!(calls < CALLS_MAX, "the workload makes too many calls");
    calls
}

/// Whether there was such a call to break.
fn at_call(
    after: u64,
    call: Option<Call>,
    failure: Failure,
    plan_for: &(dyn Fn(Fault, End) -> Plan + Sync),
) -> bool {
    let fault = Fault {
        after,
        call,
        failure,
    };
    let mut hit = false;
    for end in [End::ProcessCrash, End::PowerCut] {
        match run(&plan_for(fault, end), Bugs::default()) {
            Ok(summary) => hit |= summary.faults_hit > 0,
            Err(failed) => panic!(
                "{fault:?} then {end:?}: {}\n{}",
                failed.problem,
                failed.trace.join("\n")
            ),
        }
    }
    hit && after < CALLS_MAX
}

#[test]
fn the_workload_passes_unharmed() {
    let unharmed = plan(1, vec![life(workload(), None, End::PowerCut)]);
    let summary = run(&unharmed, Bugs::default());
    let summary = summary.unwrap_or_else(|failed| {
        panic!("{}\n{}", failed.problem, failed.trace.join("\n"));
    });
    assert_eq!((summary.commits, summary.adopted), (3, 2));
    for tally in summary.tally.classes {
        assert!(tally.records_acknowledged > 2, "{:?}", summary.tally);
    }
}

#[test]
fn the_machine_goes_off_at_every_call_of_a_workload() {
    assert!(at_every_call(None, Failure::Off, &in_the_workload) > 100);
}

#[test]
fn every_call_of_a_workload_fails_once() {
    assert!(at_every_call(None, Failure::Eio, &in_the_workload) > 100);
}

#[test]
fn every_call_of_a_workload_finds_the_disk_full_once() {
    assert!(at_every_call(None, Failure::Enospc, &in_the_workload) > 100);
}

#[test]
fn every_write_is_short_once() {
    assert!(at_every_call(Some(Call::Write), Failure::Short, &in_the_workload) > 30);
}

#[test]
fn the_machine_goes_off_at_every_call_of_a_start() {
    assert!(at_every_call(None, Failure::Off, &in_the_start) > 20);
}

#[test]
fn every_call_of_a_start_fails_once() {
    assert!(at_every_call(None, Failure::Eio, &in_the_start) > 20);
}

/// Streams that a checkpoint has to write, and what goes on after it has found no space.
fn checkpoint_without_space() -> Vec<Op> {
    let mut ops = vec![
        create(0, Class::Fsync, 100, None),
        create(1, Class::Disk, 50, None),
        create(2, Class::Memory, 50, None),
        append(0, 40_000, Some(0)),
        append(1, 90, Some(0)),
        Op::Commit,
        checkpoint(vec![append(0, 60, Some(0)), Op::Commit]),
        append(0, 80, Some(0)),
        append(2, 70, None),
        Op::Delete { path: 1 },
        Op::Commit,
        checkpoint(vec![append(2, 30, None), Op::Commit]),
    ];
    ops.extend([
        append(0, 20, Some(0)),
        append(2, 25, None),
        create(1, Class::Fsync, 10, None),
        Op::Commit,
        Op::Check,
        checkpoint(Vec::new()),
        append(0, 35_000, Some(0)),
        Op::Commit,
        checkpoint(Vec::new()),
        Op::Check,
    ]);
    ops
}

/// Space is missing for one write and there again afterwards: the log never fails for it, whichever write of the
/// catalog, a pack or a segment it was, and everything is there after a crash.
#[test]
fn a_checkpoint_that_finds_no_space_is_taken_back_at_every_write() {
    let mut hits = Vec::new();
    for call in [Call::Write, Call::SetLen] {
        for after in 0..CALLS_MAX {
            let fault = Fault {
                after,
                call: Some(call),
                failure: Failure::Enospc,
            };
            let before = hits.len();
            for end in [End::ProcessCrash, End::PowerCut] {
                let second = vec![Op::Check, append(0, 5, Some(0)), Op::Commit];
                let lives = vec![
                    life(checkpoint_without_space(), Some(fault), end),
                    life(second, None, end),
                ];
                match run(&plan(after, lives), Bugs::default()) {
                    Ok(summary) => hits.extend(summary.hits),
                    Err(failed) => panic!(
                        "{fault:?} then {end:?}: {}\n{}",
                        failed.problem,
                        failed.trace.join("\n")
                    ),
                }
            }
            if hits.len() == before {
                break;
            }
        }
    }
    // The log itself is written where there is room already: a write of it that fails is no lack of space.
    hits.retain(|(hit, _)| !hit.contains("wal/"));
    let failed: Vec<_> = hits.iter().filter(|(_, failed)| *failed).collect();
    assert!(
        failed.is_empty(),
        "the log has failed for good: {failed:#?}"
    );
    let of_catalog = hits.iter().filter(|(hit, _)| hit.contains("catalog"));
    assert!(of_catalog.count() > 40);
}
