//! Clock and randomness from a seed: the same seed gives the same run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millstream_core::io::{Clock, Random};

/// A small generator (splitmix64): every draw depends on the seed and on how many came before.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed ^ 0x5851_f42d_4c95_7f2d)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// A number below `bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw().checked_rem(bound).unwrap_or(0)
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// A generator of its own, so that draws here do not move draws there.
    pub fn split(&mut self) -> Dice {
        Dice::new(self.draw())
    }
}

const BEGIN_MS: u64 = 1_700_000_000_000;

/// Time that passes only when the simulation says so.
pub struct SimClock {
    wall_ms: AtomicU64,
    monotonic_us: AtomicU64,
}

impl SimClock {
    pub fn new() -> Arc<SimClock> {
        Arc::new(SimClock {
            wall_ms: AtomicU64::new(BEGIN_MS),
            monotonic_us: AtomicU64::new(1),
        })
    }

    pub fn advance_ms(&self, by_ms: u64) {
        self.wall_ms.fetch_add(by_ms, Ordering::Relaxed);
        self.monotonic_us.fetch_add(by_ms * 1000, Ordering::Relaxed);
    }

    /// Time since the simulation began; looking costs nothing.
    pub fn elapsed_ms(&self) -> u64 {
        self.monotonic_us.load(Ordering::Relaxed) / 1000
    }

    /// The wall clock is set back, as a time server may do.
    pub fn set_back_ms(&self, by_ms: u64) {
        self.wall_ms.fetch_sub(by_ms, Ordering::Relaxed);
    }
}

impl Clock for SimClock {
    fn wall_ms(&self) -> u64 {
        self.wall_ms.load(Ordering::Relaxed)
    }

    fn monotonic_us(&self) -> u64 {
        // Every look costs a microsecond, so that nothing that waits for time waits for ever.
        self.monotonic_us.fetch_add(1, Ordering::Relaxed)
    }
}

pub struct SimRandom(AtomicU64);

impl SimRandom {
    pub fn new(seed: u64) -> Arc<SimRandom> {
        Arc::new(SimRandom(AtomicU64::new(seed)))
    }
}

impl Random for SimRandom {
    fn next_u64(&self) -> u64 {
        let count = self.0.fetch_add(0x9e37_79b9, Ordering::Relaxed);
        Dice::new(count).draw()
    }
}
