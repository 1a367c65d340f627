//! What the stretches of a scanned log mean: which frames count, what was cut by a crash, what is damage.
//!
//! The same judgement as recovery's, on a picture of the whole log at once. A hole is the end of the log if nothing
//! behind it proves that the hole had been synced (pages land out of order, so whole batches may lie behind it).
//! It is harmless if a later file begins at or before it: a start has cut there and gone on. Otherwise it is damage.
//!
//! Invariants:
//! - pure: no I/O, so that every case can be tested by its numbers;
//! - [`Judgement::pieces`] name every sequence at most once, ascending; without damage and from the checkpoint on
//!   they have no hole.

use crate::codec::FILE_HEADER_BYTES;
use crate::model::StreamId;
use crate::verify::log_scan::{Run, ScannedFile};

/// Sequences `from..to` of one run count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub file: usize,
    pub run: usize,
    pub from: u64,
    pub to: u64,
}

/// Frames `from..to` were promised and are not there. Empty where only a header is bad.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    pub file: usize,
    pub byte: u64,
    pub from: u64,
    pub to: u64,
    pub what: String,
}

#[derive(Default, Debug)]
pub struct Judgement {
    pub pieces: Vec<Piece>,
    pub damage: Vec<Damage>,
    /// Whole frames behind a cut, which nobody was promised.
    pub discarded: u64,
    /// Sequence that the next frame would get.
    pub next: u64,
}

impl Damage {
    /// Streams that the bad frames seem to be of.
    pub fn suspects(&self, files: &[ScannedFile]) -> Vec<StreamId> {
        let known = files.get(self.file).map_or(&[][..], |file| &file.suspects);
        let here = known
            .iter()
            .filter(|(sequence, _)| (self.from..self.to).contains(sequence));
        let mut streams: Vec<StreamId> = here.map(|(_, stream)| *stream).collect();
        streams.sort_unstable();
        streams.dedup();
        streams
    }
}

pub fn judge(files: &[ScannedFile], checkpoint: u64) -> Judgement {
    let first = files.iter().find_map(ScannedFile::first_sequence);
    let mut judge = Judge {
        files,
        checkpoint,
        judged: Judgement {
            next: first.unwrap_or(checkpoint + 1),
            ..Judgement::default()
        },
        last: 0,
    };
    judge.missing_start(first);
    judge.walk();
    judge.ending();
    judge.judged
}

struct Judge<'f> {
    files: &'f [ScannedFile],
    checkpoint: u64,
    judged: Judgement,
    /// The file in which the walk has come furthest.
    last: usize,
}

enum Step {
    On,
    /// A later file goes on from here.
    Jump(usize),
    /// The log ends here.
    Cut,
}

impl Judge<'_> {
    fn missing_start(&mut self, first: Option<u64>) {
        let needed = self.checkpoint + 1;
        let Some(first) = first.filter(|first| *first > needed) else {
            return;
        };
        let file = self
            .files
            .iter()
            .position(|file| !file.runs.is_empty())
            .unwrap_or(0);
        self.judged.damage.push(Damage {
            file,
            byte: 0,
            from: needed,
            to: first,
            what: format!(
                "the log begins at {first} but the last checkpoint is {}: a log file is missing",
                self.checkpoint
            ),
        });
    }

    fn walk(&mut self) {
        let mut number = 0;
        'files: while let Some(file) = self.files.get(number) {
            if let Some(first) = file.first_sequence()
                && first <= self.checkpoint + 1
            {
                // Nothing up to the checkpoint is needed: of files freed before a power cut some may be back.
                self.judged.next = self.judged.next.max(first);
            }
            for (run_number, run) in file.runs.iter().enumerate() {
                match self.step(number, run_number, run) {
                    Step::On => {}
                    Step::Jump(later) => {
                        number = later;
                        continue 'files;
                    }
                    Step::Cut => {
                        self.discard_from(number, run_number, self.files.len());
                        self.last = self.files.len();
                        return;
                    }
                }
            }
            if !file.runs.is_empty() {
                self.last = number;
            }
            number += 1;
        }
    }

    fn step(&mut self, number: usize, run_number: usize, run: &Run) -> Step {
        let file = &self.files[number];
        let next = self.judged.next;
        let behind_damage = run_number > 0 || !file.begins_whole || run.first > next;
        if run.next <= next && !(run_number > 0 && run.first >= next) {
            return Step::On;
        }
        if behind_damage {
            if let Some(later) = self.continued_by(number, next) {
                self.discard_from(number, run_number, later);
                return Step::Jump(later);
            }
            if self.proven_from(number, run_number) < next {
                return Step::Cut;
            }
            self.damaged_before(number, run_number, run);
        }
        let from = self.judged.next.max(run.first);
        if from < run.complete {
            self.judged.pieces.push(Piece {
                file: number,
                run: run_number,
                from,
                to: run.complete,
            });
            self.judged.next = run.complete;
        }
        Step::On
    }

    /// A later file that begins at or before `next`: a start that has cut there.
    fn continued_by(&self, number: usize, next: u64) -> Option<usize> {
        let later = self.files.iter().enumerate().skip(number + 1);
        let mut found = later.filter(|(_, file)| {
            file.begins_whole && file.first_sequence().is_some_and(|first| first <= next)
        });
        found.next().map(|(later, _)| later)
    }

    /// Highest sequence proven to be synced by a header at or behind this run.
    fn proven_from(&self, number: usize, run_number: usize) -> u64 {
        let here = self.files[number].runs[run_number..].iter();
        let here = here.map(|run| run.synced).max().unwrap_or(0);
        let trailing = self.files[number].trailing_synced;
        let later = self.files[number + 1..].iter().map(proven_by);
        here.max(trailing).max(later.max().unwrap_or(0))
    }

    fn damaged_before(&mut self, number: usize, run_number: usize, run: &Run) {
        // What was left out of the run before as an open group is whole by itself, and all there is.
        if let Some(piece) = self.judged.pieces.last_mut() {
            let before = &self.files[piece.file].runs[piece.run];
            if before.complete == piece.to {
                piece.to = before.next;
                self.judged.next = self.judged.next.max(before.next);
            }
        }
        let next = self.judged.next;
        let byte = match run_number.checked_sub(1) {
            Some(before) => self.files[number].runs[before].end_byte,
            None => FILE_HEADER_BYTES,
        };
        let proven = self.proven_from(number, run_number);
        let what = if run.first > next {
            format!("frame {next} is damaged, but it was synced: frames up to {proven} were")
        } else {
            format!("the batch header before frame {next} is damaged, but it was synced")
        };
        self.judged.damage.push(Damage {
            file: number,
            byte,
            from: next,
            to: run.first.max(next),
            what,
        });
        self.judged.next = next.max(run.first);
    }

    fn discard_from(&mut self, number: usize, run_number: usize, to_file: usize) {
        let here = self.files[number].runs[run_number..].iter();
        let between = self.files[number + 1..to_file].iter();
        let runs = here.chain(between.flat_map(|file| file.runs.iter()));
        self.judged.discarded += runs.map(|run| run.next - run.first).sum::<u64>();
    }

    /// Headers without a whole frame behind the end may still prove that there was more.
    fn ending(&mut self) {
        let next = self.judged.next;
        let proven = self.files.get(self.last..).unwrap_or(&[]).iter();
        let proven = proven.map(|file| file.trailing_synced).max().unwrap_or(0);
        if proven >= next {
            let file = &self.files[self.last];
            self.judged.damage.push(Damage {
                file: self.last,
                byte: file
                    .runs
                    .last()
                    .map_or(FILE_HEADER_BYTES, |run| run.end_byte),
                from: next,
                to: proven + 1,
                what: format!(
                    "frame {next} is damaged, but it was synced: frames up to {proven} were"
                ),
            });
            self.judged.next = proven + 1;
        }
        if self.judged.next <= self.checkpoint {
            let (from, to) = (self.judged.next, self.checkpoint + 1);
            self.judged.damage.push(Damage {
                file: self.last.min(self.files.len().saturating_sub(1)),
                byte: 0,
                from,
                to,
                what: format!(
                    "the log ends at {} before the checkpoint {}",
                    from - 1,
                    self.checkpoint
                ),
            });
            self.judged.next = to;
        }
    }
}

fn proven_by(file: &ScannedFile) -> u64 {
    let runs = file.runs.iter().map(|run| run.synced).max().unwrap_or(0);
    runs.max(file.trailing_synced)
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
