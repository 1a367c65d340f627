//! One fixed workload, broken at every disk call it makes: each call fails in each way, each failure is followed by
//! a process crash or a power cut, and then by a power cut right after the restart.

use millstream_sim::disk::{Call, Failure, Fault};
use millstream_sim::plan::{End, ForkWish, Life, Op, Plan, ProducerWish};
use millstream_sim::run::{Bugs, run};

/// Every call in optimised builds; unoptimised ones take samples, or they would take minutes.
const STRIDE: usize = if cfg!(debug_assertions) { 9 } else { 1 };

fn create(path: usize, memory: bool, size: usize, fork: Option<ForkWish>) -> Op {
    Op::Create {
        path,
        json: false,
        memory,
        ttl: false,
        closed: false,
        size,
        fork,
    }
}

fn append(path: usize, size: usize, seq_step: Option<i64>) -> Op {
    Op::Append {
        path,
        size,
        producer: seq_step.map(|seq_step| ProducerWish {
            id: 1,
            new_epoch: false,
            seq_step,
        }),
        stream_seq: None,
        close: false,
    }
}

fn checkpoint(meanwhile: Vec<Op>) -> Op {
    Op::Checkpoint {
        pause_after: 1,
        meanwhile,
    }
}

fn workload() -> Vec<Op> {
    let tail_of_first = ForkWish {
        source: 0,
        boundary: None,
        sub_offset: 0,
    };
    vec![
        create(0, false, 100, None),
        create(1, true, 50, None),
        append(0, 700, Some(0)),
        append(1, 80, None),
        Op::Commit,
        append(0, 33_000, Some(0)),
        append(0, 10, Some(-1)),
        checkpoint(vec![
            append(0, 90, Some(0)),
            append(1, 60, None),
            Op::Commit,
        ]),
        create(2, false, 20, Some(tail_of_first)),
        append(2, 300, None),
        Op::Delete { path: 0 },
        Op::Commit,
        Op::Append {
            path: 1,
            size: 30,
            producer: None,
            stream_seq: Some(1),
            close: true,
        },
        Op::PrepareSpares,
        checkpoint(vec![append(2, 40, None)]),
        append(2, 45, Some(0)),
        Op::Commit,
    ]
}

fn life(ops: Vec<Op>, fault: Option<Fault>, end: End) -> Life {
    Life {
        start_fault: None,
        start_end: End::PowerCut,
        stillborn: None,
        ops,
        fault,
        end,
        clock_set_back_ms: 0,
    }
}

/// The fault hits the workload; a restart, a short life, a power cut.
fn in_the_workload(fault: Fault, end: End) -> Plan {
    let mut second = life(
        vec![
            append(2, 5, Some(0)),
            Op::Commit,
            checkpoint(vec![]),
            append(1, 7, None),
        ],
        None,
        End::PowerCut,
    );
    second.stillborn = fault.after.is_multiple_of(2).then_some(End::PowerCut);
    Plan {
        seed: fault.after,
        lives: vec![life(workload(), Some(fault), end), second],
    }
}

/// The workload ends in a crash; the fault hits the start that follows.
fn in_the_start(fault: Fault, end: End) -> Plan {
    let mut second = life(vec![append(2, 5, Some(0)), Op::Commit], None, End::PowerCut);
    second.start_fault = Some(fault);
    second.start_end = end;
    Plan {
        seed: fault.after,
        lives: vec![life(workload(), None, End::PowerCut), second],
    }
}

/// Breaks call after call until the fault no longer finds one.
fn at_every_call(
    call: Option<Call>,
    failure: Failure,
    plan_for: &dyn Fn(Fault, End) -> Plan,
) -> u64 {
    for after in (0..2000).step_by(STRIDE) {
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
        if !hit {
            return after;
        }
    }
    panic!("the workload makes too many calls");
}

#[test]
fn the_machine_goes_off_at_every_call_of_a_workload() {
    assert!(at_every_call(None, Failure::Off, &in_the_workload) > 80);
}

#[test]
fn every_call_of_a_workload_fails_once() {
    assert!(at_every_call(None, Failure::Eio, &in_the_workload) > 80);
}

#[test]
fn every_write_finds_the_disk_full_or_is_short() {
    assert!(at_every_call(Some(Call::Write), Failure::Enospc, &in_the_workload) > 20);
    assert!(at_every_call(Some(Call::Write), Failure::Short, &in_the_workload) > 20);
}

#[test]
fn the_machine_goes_off_at_every_call_of_a_start() {
    assert!(at_every_call(None, Failure::Off, &in_the_start) > 20);
}

#[test]
fn every_call_of_a_start_fails_once() {
    assert!(at_every_call(None, Failure::Eio, &in_the_start) > 20);
}
