//! What happened to each class over many crashes: the numbers behind the durability table of the docs.

use std::fmt::Write;

use millstream_core::model::Class;

pub const CLASSES: [Class; 4] = [Class::Ephemeral, Class::Memory, Class::Disk, Class::Fsync];

/// How a server came to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    Clean = 0,
    Kill = 1,
    PowerCut = 2,
    /// A kill after a write or sync that failed: the page cache may have forgotten.
    FailedLog = 3,
}

const WAYS: [(Way, &str); 4] = [
    (Way::Clean, "clean_stop"),
    (Way::Kill, "kill"),
    (Way::PowerCut, "power_cut"),
    (Way::FailedLog, "kill_after_failed_log"),
];

/// Numbers of one class and one way to end.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Losses {
    /// Ends that streams of the class lived through.
    pub ends: u64,
    /// Of those, how many cost acknowledged records.
    pub ends_with_loss: u64,
    pub records_lost: u64,
    /// Streams that lost something, and those of them whose epoch rose.
    pub streams_with_loss: u64,
    pub reported: u64,
}

#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct ClassTally {
    pub records_acknowledged: u64,
    pub by_way: [Losses; 4],
}

#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Tally {
    pub classes: [ClassTally; 4],
}

impl Tally {
    pub fn of(&mut self, class: Class) -> &mut ClassTally {
        &mut self.classes[(class as usize).min(CLASSES.len() - 1)]
    }

    pub fn add(&mut self, other: &Tally) {
        for (mine, other) in self.classes.iter_mut().zip(&other.classes) {
            mine.records_acknowledged += other.records_acknowledged;
            for (mine, other) in mine.by_way.iter_mut().zip(&other.by_way) {
                mine.ends += other.ends;
                mine.ends_with_loss += other.ends_with_loss;
                mine.records_lost += other.records_lost;
                mine.streams_with_loss += other.streams_with_loss;
                mine.reported += other.reported;
            }
        }
    }

    /// Written by hand: a handful of numbers is not worth a dependency.
    pub fn to_json(&self, totals: &[(&str, u64)]) -> String {
        let mut out = "{\n".to_owned();
        for (name, number) in totals {
            let _ = writeln!(out, "  \"{name}\": {number},");
        }
        out.push_str("  \"classes\": {");
        for (number, class) in CLASSES.into_iter().enumerate() {
            let tally = &self.classes[number];
            let separator = if number == 0 { "" } else { "," };
            let _ = write!(
                out,
                "{separator}\n    \"{}\": {{\n      \"records_acknowledged\": {}",
                class.name(),
                tally.records_acknowledged
            );
            for (way, name) in WAYS {
                let losses = &tally.by_way[way as usize];
                let _ = write!(
                    out,
                    ",\n      \"{name}\": {{\"ends\": {}, \"ends_with_loss\": {}, \"records_lost\": {}, \"streams_with_loss\": {}, \"losses_reported\": {}}}",
                    losses.ends,
                    losses.ends_with_loss,
                    losses.records_lost,
                    losses.streams_with_loss,
                    losses.reported
                );
            }
            out.push_str("\n    }");
        }
        out.push_str("\n  }\n}\n");
        out
    }
}
