//! Everything a machine's disk is: names and files, cached and durable, and what is armed to fail.

use std::collections::BTreeMap;
use std::io;

use super::faults::{Call, Failure, Fault, Lies, error_of, off};
use super::names::{NameChange, Names};
use crate::doors::Dice;
use crate::image::FileImage;

#[derive(Clone)]
pub(super) struct State {
    /// Counts processes: each start is one.
    pub(super) boot: u64,
    /// Counts boots of the machine.
    pub(super) power_ons: u64,
    pub(super) off: bool,
    pub(super) names: Names,
    pub(super) durable: Names,
    /// Changes of names that no `sync_dir` has covered, oldest first.
    pub(super) pending: Vec<NameChange>,
    pub(super) nodes: BTreeMap<u64, FileImage>,
    pub(super) next_node: u64,
    pub(super) calls: u64,
    pub(super) fault: Option<Fault>,
    pub(super) fault_hit: Option<String>,
    pub(super) lies: Lies,
    pub(super) capacity_bytes: u64,
    pub(super) dice: Dice,
}

impl State {
    /// Counts a call; `Some` = this one fails so. `Err` = the machine is off, or this process is dead.
    pub(super) fn step(
        &mut self,
        boot: u64,
        call: Call,
        path: &str,
    ) -> io::Result<Option<Failure>> {
        if self.off || boot != self.boot {
            return Err(off());
        }
        self.calls += 1;
        let Some(fault) = &mut self.fault else {
            return Ok(None);
        };
        if fault.call.is_some_and(|wanted| wanted != call) {
            return Ok(None);
        }
        if fault.after > 0 {
            fault.after -= 1;
            return Ok(None);
        }
        let failure = fault.failure;
        if failure == Failure::Short && !matches!(call, Call::Read | Call::Write) {
            return Ok(None);
        }
        self.fault = None;
        self.fault_hit = Some(format!("{failure:?} in {call:?} of {path:?}"));
        if failure == Failure::Off {
            self.off = true;
        }
        Ok(Some(failure))
    }

    /// For calls that either happen or do not.
    pub(super) fn step_whole(&mut self, boot: u64, call: Call, path: &str) -> io::Result<()> {
        match self.step(boot, call, path)? {
            None | Some(Failure::Short) => Ok(()),
            Some(failure) => Err(error_of(failure)),
        }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        let named = self.names.files.values();
        named.map(|node| self.nodes[node].len()).sum()
    }

    pub(super) fn change(&mut self, change: NameChange) {
        self.names.apply(&change);
        self.pending.push(change);
    }
}
