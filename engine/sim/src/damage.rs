//! Flipped bits: a copy of the disk gets one, and a server tries to live with it.
//!
//! Whatever it does, it must not show wrong bytes. A log damaged where it is proven to have been synced is refused;
//! behind that it is cut, as a torn tail is. Damaged packs and segments are read errors or gaps of their streams. A
//! damaged catalog is an error wherever it shows.

use std::sync::Arc;

use millstream_core::io::{Clock, Disk};
use millstream_core::shard::engine::Engine;
use millstream_core::verify::verify_stopped;

use crate::check;
use crate::disk::Machine;
use crate::doors::Dice;
use crate::plan::{Damage, FileKind};
use crate::run::Sim;
use crate::start::adopt_volatile;

impl Sim {
    pub(crate) fn try_damages(&mut self, damages: &[Damage]) -> Result<(), String> {
        for damage in damages {
            let twin = self.machine.twin();
            twin.set_capacity(u64::MAX);
            let Some(place) = flip(&twin, *damage) else {
                continue;
            };
            self.summary.damages += 1;
            let outcome = match self.open(&twin) {
                Err(problem) => self.refused_damage(*damage, &problem),
                Ok(opened) => {
                    let outcome = self.lives_with(&opened.engine, *damage);
                    twin.process_crash();
                    drop(opened);
                    outcome.or_else(|problem| self.verified(&twin, *damage, problem))
                }
            };
            let said = outcome.map_err(|problem| format!("{damage:?} at {place}: {problem}"))?;
            self.trace.push(format!("{damage:?} at {place}: {said}"));
        }
        Ok(())
    }

    /// The store checks no page that it reads: a flipped bit in a key hides its stream, and only verification tells.
    fn verified(
        &self,
        twin: &Arc<Machine>,
        damage: Damage,
        problem: String,
    ) -> Result<String, String> {
        if damage.kind != FileKind::Catalog || !problem.ends_with("is lost") {
            return Err(problem);
        }
        let clock: Arc<dyn Clock> = Arc::clone(&self.clock) as _;
        let disk: Arc<dyn Disk> = twin.disk();
        match verify_stopped(&disk, &clock, &mut |_, _| true) {
            Ok(report) if report.is_clean() => Err(format!("{problem}, and nothing tells")),
            Ok(_) => Ok(format!("{problem}: verification tells")),
            Err(error) => Ok(format!("{problem}: verification tells: {error}")),
        }
    }

    fn refused_damage(&mut self, damage: Damage, problem: &str) -> Result<String, String> {
        self.summary.damages_refused += 1;
        let expected: &[&str] = match damage.kind {
            FileKind::Log => &["log_damaged"],
            // The store may fall back to an older state of itself, which the log has left behind.
            FileKind::Catalog => &["catalog_damaged", "log_damaged", "log_and_catalog_disagree"],
            // A start opens no file of a stream, but for the indexes of what a commit has just taken over.
            FileKind::Pack => &["has committed staged bytes"],
            FileKind::Segment => &[],
        };
        if expected.iter().any(|code| problem.contains(code)) {
            return Ok(format!("refused: {problem}"));
        }
        Err(format!("it does not start: {problem}"))
    }

    /// The server runs. All it shows must be true, but it may fail to show it.
    fn lives_with(&self, engine: &Arc<Engine>, damage: Damage) -> Result<String, String> {
        let end_of_log = engine.shard.synced() - 1;
        let required = self.required(self.since);
        let proven = if damage.kind == FileKind::Log {
            self.history.proven(required)
        } else {
            required
        };
        if end_of_log < proven {
            return Err(format!(
                "synced up to {proven} for all to see, but the log ends at {end_of_log}"
            ));
        }
        let mut problem = "no such world".to_owned();
        let first = self.history.first_sequence();
        let lowest = end_of_log.saturating_sub(self.since.died);
        for cut in (lowest..=end_of_log).rev() {
            for world in self.history.worlds_at(cut.max(first)) {
                let mut world = world.clone();
                adopt_volatile(engine, &mut world);
                match check::believable(engine, &world, self.sleeps) {
                    Ok(unreadable) => return Ok(format!("{unreadable} could not be read")),
                    Err(found) => problem = found,
                }
            }
        }
        Err(problem)
    }
}

/// Flips one bit that holds something; says where.
fn flip(machine: &Machine, damage: Damage) -> Option<String> {
    let mut dice = Dice::new(damage.dice);
    let files = machine.stored_pages();
    let of_kind: Vec<_> = files
        .iter()
        .filter(|(path, pages)| !pages.is_empty() && is_kind(path, damage.kind))
        .collect();
    if of_kind.is_empty() {
        return None;
    }
    let (path, pages) = of_kind[dice.below(of_kind.len() as u64) as usize];
    let page = pages[dice.below(pages.len() as u64) as usize];
    // Small files use little of their pages: half of the flips hit the front.
    let within = if dice.chance(2) {
        dice.below(4096)
    } else {
        dice.below(512)
    };
    let (byte, bit) = (page * 4096 + within, dice.below(8) as u8);
    machine.flip_bit(path, byte, bit);
    Some(format!("{path} byte {byte} bit {bit}"))
}

fn is_kind(path: &str, kind: FileKind) -> bool {
    match kind {
        FileKind::Log => path.starts_with("wal/"),
        FileKind::Pack => path.starts_with("packs/"),
        FileKind::Segment => path.starts_with("segments/"),
        FileKind::Catalog => path == "catalog.redb",
    }
}
