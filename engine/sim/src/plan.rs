//! A plan: everything that will happen, drawn from the seed before anything runs.
//!
//! Operations name things loosely ("the third boundary", "the next sequence number"), so that a plan stays
//! meaningful when operations are taken out of it: that is what lets a failing plan be shrunk.

use millstream_core::model::Class;

use crate::disk::{Call, Failure, Fault};
use crate::doors::Dice;
use crate::tally::CLASSES;

/// Mixes of classes; a plan uses one of them.
const MIXES: [&[Class]; 6] = [
    &[Class::Fsync],
    &[Class::Fsync, Class::Fsync, Class::Memory],
    &[Class::Disk, Class::Disk, Class::Disk, Class::Fsync],
    &CLASSES,
    &CLASSES,
    &[
        Class::Ephemeral,
        Class::Ephemeral,
        Class::Memory,
        Class::Disk,
    ],
];

pub const PATHS: [&str; 6] = ["a", "b", "c/d", "e", "f", "g"];
/// Places for stages.
const SLOTS: u64 = 3;

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
        class: Class,
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
    /// A delete, and the same create behind it.
    Renew {
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
    /// Rows, in order, are put into a stage, unless one waits in this slot. Unless it is `strict`, another stream
    /// stands in for one that takes no rows.
    Stage {
        slot: usize,
        rows: Vec<(usize, usize)>,
        strict: bool,
    },
    /// The stage of a slot, or the next one that waits, is committed, or if it is already, asked for again. `step`: from
    /// the producer's next epoch.
    CommitStage {
        slot: usize,
        producer: u8,
        step: i64,
    },
    DropStage {
        slot: usize,
    },
    Delete {
        path: usize,
    },
    SetClass {
        path: usize,
        class: Class,
    },
    Read {
        path: usize,
    },
    Commit,
    /// What is staged is written; nobody syncs.
    Write,
    /// A sync; `meanwhile` happens while it stands still.
    SlowSync {
        meanwhile: Vec<Op>,
    },
    /// A checkpoint; `meanwhile` happens while it stands at one of its calls.
    Checkpoint {
        pause_after: u64,
        meanwhile: Vec<Op>,
    },
    /// Ephemeral bytes beyond their budget leave memory.
    Spill,
    /// Somebody else takes the space but for these bytes, until it is free again.
    FillDisk {
        spare_bytes: u64,
    },
    FreeDisk,
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
    /// The directory is taken for one that came from a backup: every stream begins a new epoch.
    pub restored: bool,
    /// Before the server starts, copies of its disk are damaged, and a server tries each of them.
    pub damages: Vec<Damage>,
}

/// One flipped bit: in which kind of file, and where in it (drawn from `dice`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    pub kind: FileKind,
    pub dice: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    Log,
    Pack,
    Segment,
    Catalog,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    /// Whether the kernel tells its boot id.
    pub boot_known: bool,
    pub lives: Vec<Life>,
}

impl Plan {
    pub fn draw(seed: u64) -> Plan {
        let mut dice = Dice::new(seed);
        // Large appends fill log files, which are then left, freed and recycled.
        let large = dice.chance(6);
        let classes = dice.pick(&MIXES);
        let count = 2 + dice.below(4);
        let mut drawer = Drawer {
            dice: dice.split(),
            large,
            classes,
            sender: (0, 0),
        };
        let mut lives: Vec<Life> = (0..count).map(|_| drawer.life()).collect();
        // Most of what follows needs streams to happen to.
        let creates: Vec<Op> = (0..3).map(|_| drawer.create()).collect();
        lives[0].ops.splice(0..0, creates);
        Plan {
            seed,
            boot_known: !dice.chance(10),
            lives,
        }
    }

    pub fn op_count(&self) -> usize {
        self.lives.iter().map(|life| life.ops.len()).sum()
    }
}

struct Drawer {
    dice: Dice,
    large: bool,
    /// Drawn from for each new stream.
    classes: &'static [Class],
    /// The path and the producer of the last append that had one: it often sends the next one, too.
    sender: (usize, u8),
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
            restored: self.dice.chance(25),
            damages: self.damages(),
        }
    }

    fn damages(&mut self) -> Vec<Damage> {
        let kinds = [
            FileKind::Log,
            FileKind::Pack,
            FileKind::Segment,
            FileKind::Catalog,
        ];
        let count = if self.dice.chance(4) { 2 } else { 0 };
        (0..count)
            .map(|_| Damage {
                kind: self.dice.pick(&kinds),
                dice: self.dice.draw(),
            })
            .collect()
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

    fn ops(&mut self, below: u64) -> Vec<Op> {
        (0..self.dice.below(below))
            .map(|_| self.op(false))
            .collect()
    }

    fn op(&mut self, outer: bool) -> Op {
        match self.dice.below(if outer { 120 } else { 80 }) {
            0..14 => self.create(),
            14..16 => Op::Recreate { path: self.path() },
            16..44 => self.append(),
            44..49 => self.stage(),
            49..55 => self.commit_stage(),
            55 => Op::DropStage {
                slot: self.dice.below(SLOTS) as usize,
            },
            56..60 => Op::Delete { path: self.path() },
            60..62 => Op::Renew { path: self.path() },
            62..68 => Op::Commit,
            68..75 => Op::Write,
            75..79 => Op::SetClass {
                path: self.path(),
                class: self.dice.pick(&CLASSES),
            },
            79..87 => Op::Commit,
            87..95 => Op::Checkpoint {
                pause_after: self.dice.below(14),
                meanwhile: self.ops(5),
            },
            95..101 => Op::SlowSync {
                meanwhile: self.ops(6),
            },
            101..103 => Op::Spill,
            103..107 => Op::PrepareSpares,
            107..109 => Op::Purge,
            109 => Op::Sleep,
            110 => Op::Sweep,
            111 => Op::Evict,
            112 => self.full_disk(),
            113 => Op::FreeDisk,
            114..117 => Op::Read { path: self.path() },
            _ => Op::Check,
        }
    }

    fn stage(&mut self) -> Op {
        let slot = self.dice.below(SLOTS) as usize;
        let paths = [self.path(), self.path(), self.path()];
        let mut rows = Vec::new();
        let (adopted, placed) = (self.dice.chance(3), self.large && self.dice.chance(2));
        for _ in 0..1 + self.dice.below(6) {
            let size = match (adopted, self.size()) {
                (true, _) => 100_000 + self.dice.below(100_000) as usize,
                (false, size) => size.min(5_000),
            };
            rows.push((self.dice.pick(&paths), size));
        }
        if placed {
            // Enough to stay where it is staged.
            rows.extend([(paths[0], 1_000_000); 5]);
        }
        let strict = self.dice.chance(5);
        Op::Stage { slot, rows, strict }
    }

    fn commit_stage(&mut self) -> Op {
        Op::CommitStage {
            slot: self.dice.below(SLOTS) as usize,
            producer: self.dice.below(2) as u8,
            step: self.dice.pick(&[0, 0, 0, 0, 1, -1]),
        }
    }

    fn full_disk(&mut self) -> Op {
        let spare_bytes = self.dice.pick(&[0, 4 << 10, 1 << 20, 8 << 20]);
        Op::FillDisk { spare_bytes }
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
            class: self.dice.pick(self.classes),
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
        let mut path = self.path();
        let producer = self.dice.chance(2).then(|| {
            if self.dice.chance(3) {
                self.sender = (path, self.dice.below(3) as u8);
            }
            path = self.sender.0;
            ProducerWish {
                id: self.sender.1,
                new_epoch: self.dice.chance(12),
                seq_step: self.dice.pick(&[0, 0, 0, 0, 0, -1, -1, -2, -3, 1, 2]),
            }
        });
        let close = self.dice.chance(24);
        Op::Append {
            path,
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
