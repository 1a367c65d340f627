//! Timers: a wheel of slots. Arming costs a push; moving a deadline later costs nothing, because an entry that
//! fires early is put back by its owner.

use std::collections::VecDeque;

const SLOTS: usize = 512;
const TICK_MS: u64 = 50;

pub struct Wheel {
    slots: Vec<Vec<u64>>,
    /// Tick up to which everything has fired.
    done: u64,
}

impl Wheel {
    pub fn new(now_ms: u64) -> Wheel {
        Wheel {
            slots: (0..SLOTS).map(|_| Vec::new()).collect(),
            done: now_ms / TICK_MS,
        }
    }

    /// Fires `token` at or shortly after `at_ms`; farther than one turn fires early. Returns when.
    pub fn arm(&mut self, token: u64, at_ms: u64) -> u64 {
        let tick = (at_ms.div_ceil(TICK_MS)).clamp(self.done + 1, self.done + SLOTS as u64 - 1);
        self.slots[tick as usize % SLOTS].push(token);
        tick * TICK_MS
    }

    /// Takes everything that is due.
    pub fn take_due(&mut self, now_ms: u64, due: &mut VecDeque<u64>) {
        let target = now_ms / TICK_MS;
        while self.done < target {
            self.done += 1;
            due.extend(self.slots[self.done as usize % SLOTS].drain(..));
            // After a long sleep one turn is enough: every slot has been seen.
            if target - self.done > SLOTS as u64 {
                self.done = target - SLOTS as u64;
            }
        }
    }

    pub fn tick_ms(&self) -> u64 {
        TICK_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fires_once_and_never_early_within_a_turn() {
        let mut wheel = Wheel::new(1000);
        wheel.arm(7, 1120);
        let mut due = VecDeque::new();
        wheel.take_due(1100, &mut due);
        assert!(due.is_empty());
        wheel.take_due(1150, &mut due);
        assert_eq!(due, [7]);
        due.clear();
        wheel.take_due(90_000_000, &mut due);
        assert!(due.is_empty());
    }
}
