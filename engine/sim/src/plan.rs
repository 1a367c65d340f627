//! A plan: everything that will happen, drawn from the seed before anything runs.
//!
//! Operations name things loosely ("the third boundary", "the next sequence number"), so that a plan stays
//! meaningful when operations are taken out of it: that is what lets a failing plan be shrunk.

use crate::disk::{Call, Failure, Fault};
use crate::doors::Dice;

pub const PATHS: [&str; 6] = ["a", "b", "c/d", "e", "f", "g"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkWish {
    pub source: usize,
    /// Which boundary of the source, counted from its start; `None` = its tail.
    pub boundary: Option<u64>,
    pub sub_offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerWish {
    pub id: u8,
    pub new_epoch: bool,
    /// From the next sequence number: 0 = that one, below = a replay, above = a gap.
    pub seq_step: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Create {
        path: usize,
        json: bool,
        memory: bool,
        ttl: bool,
        closed: bool,
        /// Bytes, or JSON messages; 0 = no first content.
        size: usize,
        fork: Option<ForkWish>,
    },
    /// The same create again.
    Recreate {
        path: usize,
    },
    Append {
        path: usize,
        size: usize,
        producer: Option<ProducerWish>,
        /// From the last `Stream-Seq`: above 0 goes on, otherwise it conflicts.
        stream_seq: Option<i64>,
        close: bool,
    },
    Delete {
        path: usize,
    },
    Read {
        path: usize,
    },
    Commit,
    /// A checkpoint; `meanwhile` happens while it stands at one of its calls.
    Checkpoint {
        pause_after: u64,
        meanwhile: Vec<Op>,
    },
    PrepareSpares,
    Purge,
    /// Long enough for every TTL.
    Sleep,
    Sweep,
    Evict,
    Check,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    ProcessCrash,
    PowerCut,
    /// The mark of a clean stop is written first.
    CleanStop {
        power_cut: bool,
    },
}

/// One life of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    /// Hits the start-up.
    pub start_fault: Option<Fault>,
    /// How a start-up that failed, or was cut off, ends.
    pub start_end: End,
    /// The server dies right after its start, and starts again.
    pub stillborn: Option<End>,
    pub ops: Vec<Op>,
    pub fault: Option<Fault>,
    pub end: End,
    pub clock_set_back_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    pub lives: Vec<Life>,
}

impl Plan {
    pub fn draw(seed: u64) -> Plan {
        let mut dice = Dice::new(seed);
        // Large appends fill log files, which are then left, freed and recycled.
        let large = dice.chance(6);
        let memory_share = dice.pick(&[0, 3, 8]);
        let count = 2 + dice.below(4);
        let mut drawer = Drawer {
            dice: dice.split(),
            large,
            memory_share,
        };
        let lives = (0..count).map(|_| drawer.life()).collect();
        Plan { seed, lives }
    }

    pub fn op_count(&self) -> usize {
        self.lives.iter().map(|life| life.ops.len()).sum()
    }
}

struct Drawer {
    dice: Dice,
    large: bool,
    /// Of 10 streams.
    memory_share: u64,
}

impl Drawer {
    fn life(&mut self) -> Life {
        let start_fault = self.dice.chance(4).then(|| self.fault(60));
        let fault = self.dice.chance(2).then(|| self.fault(150));
        let stillborn = self.dice.chance(3).then(|| self.crash());
        let count = self.dice.below(if self.large { 24 } else { 40 });
        let ops = (0..count).map(|_| self.op(true)).collect();
        Life {
            start_fault,
            start_end: self.crash(),
            stillborn,
            ops,
            fault,
            end: self.end(),
            clock_set_back_ms: if self.dice.chance(6) {
                self.dice.below(1000)
            } else {
                0
            },
        }
    }

    fn crash(&mut self) -> End {
        self.dice.pick(&[End::ProcessCrash, End::PowerCut])
    }

    fn end(&mut self) -> End {
        match self.dice.below(10) {
            0 => End::CleanStop { power_cut: false },
            1 => End::CleanStop { power_cut: true },
            2..5 => End::ProcessCrash,
            _ => End::PowerCut,
        }
    }

    fn fault(&mut self, within: u64) -> Fault {
        let failure = self.dice.pick(&[
            Failure::Off,
            Failure::Off,
            Failure::Off,
            Failure::Eio,
            Failure::Eio,
            Failure::Enospc,
            Failure::Short,
        ]);
        let call = self.dice.pick(&[
            None,
            None,
            Some(Call::Write),
            Some(Call::Sync),
            Some(Call::SyncDirectory),
            Some(Call::Open),
            Some(Call::Rename),
            Some(Call::Read),
        ]);
        let within = if call.is_some() { within / 6 } else { within };
        Fault {
            after: self.dice.below(within),
            call,
            failure,
        }
    }

    fn path(&mut self) -> usize {
        // Low numbers more often, so that things happen to the same stream.
        let (first, second) = (self.dice.below(6), self.dice.below(6));
        first.min(second) as usize
    }

    fn size(&mut self) -> usize {
        if self.large && self.dice.chance(3) {
            return (2 << 20) + self.dice.below(6 << 20) as usize;
        }
        match self.dice.below(12) {
            0 => 40_000 + self.dice.below(60_000) as usize,
            1..4 => 500 + self.dice.below(3000) as usize,
            _ => 1 + self.dice.below(120) as usize,
        }
    }

    fn op(&mut self, outer: bool) -> Op {
        match self.dice.below(if outer { 100 } else { 70 }) {
            0..14 => self.create(),
            14..16 => Op::Recreate { path: self.path() },
            16..56 => self.append(),
            56..62 => Op::Delete { path: self.path() },
            62..70 => Op::Commit,
            70..78 => Op::Commit,
            78..86 => Op::Checkpoint {
                pause_after: self.dice.below(14),
                meanwhile: (0..self.dice.below(5)).map(|_| self.op(false)).collect(),
            },
            86..90 => Op::PrepareSpares,
            90..92 => Op::Purge,
            92 => Op::Sleep,
            93 => Op::Sweep,
            94 => Op::Evict,
            95..98 => Op::Read { path: self.path() },
            _ => Op::Check,
        }
    }

    fn create(&mut self) -> Op {
        let fork = self.dice.chance(3).then(|| ForkWish {
            source: self.path(),
            boundary: self.dice.chance(2).then(|| self.dice.below(12)),
            sub_offset: if self.dice.chance(3) {
                1 + self.dice.below(5)
            } else {
                0
            },
        });
        Op::Create {
            path: self.path(),
            json: self.dice.chance(4),
            memory: self.dice.below(10) < self.memory_share,
            ttl: self.dice.chance(8),
            closed: self.dice.chance(12),
            size: if self.dice.chance(2) {
                1 + self.dice.below(200) as usize
            } else {
                0
            },
            fork,
        }
    }

    fn append(&mut self) -> Op {
        let producer = self.dice.chance(2).then(|| ProducerWish {
            id: self.dice.below(3) as u8,
            new_epoch: self.dice.chance(10),
            seq_step: self.dice.pick(&[0, 0, 0, 0, 0, -1, -1, -2, 1]),
        });
        let close = self.dice.chance(24);
        Op::Append {
            path: self.path(),
            size: if close && self.dice.chance(2) {
                0
            } else {
                self.size()
            },
            producer,
            stream_seq: self
                .dice
                .chance(6)
                .then(|| self.dice.pick(&[1, 1, 1, 0, -1])),
            close,
        }
    }
}
