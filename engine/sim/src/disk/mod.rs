//! A machine with one disk, behind the engine's doors.
//!
//! Names and bytes exist twice: as the running system sees them, and as they would be after a power cut. A call can
//! be made to fail by its number; the machine can go off in the middle of any call. Every start gets a disk of its
//! own, so that an engine of an earlier life can no longer change anything, not even while it is dropped.
//!
//! Invariants
//! - `I-SIMDISK-1` A name that was created, renamed or removed is durable only after `sync_dir` of its directory;
//!   until then a power cut keeps or loses each such change by itself.
//! - `I-SIMDISK-2` A process crash loses nothing that was written; a power cut keeps only what was synced and a
//!   random part of the rest.
//! - `I-SIMDISK-3` Everything random comes from the machine's own dice.

mod door;
mod faults;
mod names;
mod pause;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

pub use self::door::FakeDisk;
pub use self::faults::{Call, Failure, Fault, Lies};
use self::names::{Names, parent};
use self::pause::PauseAfter;
use self::state::State;
use crate::doors::Dice;
use crate::image::Fate;

/// The computer: survives its processes and its power cuts.
pub struct Machine {
    state: Mutex<State>,
    pause: Mutex<Option<PauseAfter>>,
    pause_changed: Condvar,
}

impl Machine {
    pub fn new(seed: u64) -> Arc<Machine> {
        Machine::from(State {
            boot: 0,
            power_ons: 1,
            off: false,
            names: Names::default(),
            durable: Names::default(),
            pending: Vec::new(),
            nodes: BTreeMap::new(),
            next_node: 0,
            calls: 0,
            fault: None,
            fault_hit: None,
            lies: Lies::default(),
            capacity_bytes: u64::MAX,
            dice: Dice::new(seed),
        })
    }

    fn from(state: State) -> Arc<Machine> {
        Arc::new(Machine {
            state: Mutex::new(state),
            pause: Mutex::new(None),
            pause_changed: Condvar::new(),
        })
    }

    /// An equal machine, to try something out on.
    pub fn twin(&self) -> Arc<Machine> {
        Machine::from(self.state.lock().clone())
    }

    /// The disk as the process that starts now sees it.
    pub fn disk(self: &Arc<Machine>) -> Arc<FakeDisk> {
        Arc::new(FakeDisk {
            boot: self.state.lock().boot,
            machine: Arc::clone(self),
        })
    }

    pub fn set_lies(&self, lies: Lies) {
        self.state.lock().lies = lies;
    }

    pub fn set_capacity(&self, bytes: u64) {
        self.state.lock().capacity_bytes = bytes;
    }

    /// Whether there is an end to the space.
    pub fn has_capacity(&self) -> bool {
        self.state.lock().capacity_bytes != u64::MAX
    }

    /// What the kernel calls this boot: another one after each power cut, the same after a kill.
    pub fn boot_id(&self) -> [u8; 16] {
        let mut dice = Dice::new(self.state.lock().power_ons);
        (u128::from(dice.draw()) << 64 | u128::from(dice.draw())).to_be_bytes()
    }

    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used_bytes()
    }

    pub fn arm(&self, fault: Option<Fault>) {
        self.state.lock().fault = fault;
    }

    /// What the last fault hit; asking clears it.
    pub fn take_fault_hit(&self) -> Option<String> {
        self.state.lock().fault_hit.take()
    }

    pub fn fault_was_hit(&self) -> bool {
        self.state.lock().fault_hit.is_some()
    }

    pub fn is_off(&self) -> bool {
        self.state.lock().off
    }

    pub fn calls(&self) -> u64 {
        self.state.lock().calls
    }

    /// kill -9: everything written stays in the page cache, synced or not.
    pub fn process_crash(&self) {
        let mut state = self.state.lock();
        state.boot += 1;
        state.off = false;
        state.fault = None;
    }

    /// The power goes: what was not synced is lost, or partly kept in any order.
    pub fn power_cut(&self) {
        let mut state = self.state.lock();
        let State {
            nodes,
            pending,
            durable,
            dice,
            ..
        } = &mut *state;
        let fate = dice.pick(&[
            Fate::AllLost,
            Fate::AllKept,
            Fate::Coin,
            Fate::Coin,
            Fate::Coin,
        ]);
        // A journal keeps a prefix of the changes of names; without one each stands for itself.
        let journal = dice.chance(2);
        let mut alive = true;
        for change in pending.drain(..) {
            let kept = match fate {
                Fate::AllLost => false,
                Fate::AllKept => true,
                Fate::Coin => dice.chance(2),
            };
            alive = if journal { alive && kept } else { kept };
            if alive {
                durable.apply(&change);
            }
        }
        let directories = durable.clone();
        durable
            .files
            .retain(|path, _| directories.has_directory(parent(path)));
        let named: BTreeSet<u64> = durable.files.values().copied().collect();
        nodes.retain(|node, _| named.contains(node));
        nodes
            .values_mut()
            .for_each(|file| file.power_cut(fate, dice));
        state.names = state.durable.clone();
        state.boot += 1;
        state.power_ons += u64::from(!state.lies.reuse_boot_id);
        state.off = false;
        state.fault = None;
    }

    pub fn flip_bit(&self, path: &str, byte: u64, bit: u8) {
        let mut state = self.state.lock();
        if let Some(node) = state.names.files.get(path).copied()
            && let Some(file) = state.nodes.get_mut(&node)
        {
            file.flip_bit(byte, bit);
        }
    }

    /// Files with the numbers of their 4 KiB pages that hold anything.
    pub fn stored_pages(&self) -> Vec<(String, Vec<u64>)> {
        let state = self.state.lock();
        let files = state.names.files.iter();
        files
            .map(|(path, node)| (path.clone(), state.nodes[node].stored_pages()))
            .collect()
    }
}
