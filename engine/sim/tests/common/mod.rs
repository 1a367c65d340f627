//! Short ways to write a plan by hand.

#![allow(dead_code)]

use millstream_core::model::Class;
use millstream_sim::disk::Fault;
use millstream_sim::plan::{End, ForkWish, Life, Op, Plan, ProducerWish};

pub fn create(path: usize, class: Class, size: usize, fork: Option<ForkWish>) -> Op {
    Op::Create {
        path,
        json: false,
        class,
        ttl: false,
        closed: false,
        size,
        fork,
    }
}

pub fn append(path: usize, size: usize, seq_step: Option<i64>) -> Op {
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

pub fn close(path: usize, size: usize) -> Op {
    Op::Append {
        path,
        size,
        producer: None,
        stream_seq: Some(1),
        close: true,
    }
}

pub fn tail_of(source: usize) -> Option<ForkWish> {
    Some(ForkWish {
        source,
        boundary: None,
        sub_offset: 0,
    })
}

pub fn checkpoint(meanwhile: Vec<Op>) -> Op {
    Op::Checkpoint {
        pause_after: 1,
        meanwhile,
    }
}

pub fn life(ops: Vec<Op>, fault: Option<Fault>, end: End) -> Life {
    Life {
        start_fault: None,
        start_end: End::PowerCut,
        stillborn: None,
        ops,
        fault,
        end,
        clock_set_back_ms: 0,
        restored: false,
        damages: Vec::new(),
    }
}

pub fn plan(seed: u64, lives: Vec<Life>) -> Plan {
    Plan {
        seed,
        boot_known: true,
        lives,
    }
}

/// Rows of two streams in one stage.
pub fn stage(slot: usize, paths: [usize; 2], size: usize) -> Op {
    let rows = [paths[0], paths[1], paths[0]].map(|path| (path, size));
    Op::Stage {
        slot,
        rows: rows.to_vec(),
        strict: true,
    }
}

pub fn commit(slot: usize) -> Op {
    Op::CommitStage {
        slot,
        producer: 0,
        step: 0,
    }
}
