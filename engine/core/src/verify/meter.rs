//! How far a long walk has come: told at most a few times per second, and the place where it can be stopped.

use std::io;
use std::sync::Arc;

use crate::io::Clock;

const EVERY_US: u64 = 250_000;

/// What a walk tells while it runs: bytes done and bytes in all. `false` from the listener ends the walk.
pub type Listener<'p> = &'p mut dyn FnMut(u64, u64) -> bool;

pub struct Meter<'p> {
    clock: Arc<dyn Clock>,
    listener: Listener<'p>,
    done: u64,
    total: u64,
    told_us: u64,
}

impl<'p> Meter<'p> {
    pub fn new(clock: Arc<dyn Clock>, listener: Listener<'p>) -> Meter<'p> {
        let told_us = clock.monotonic_us();
        Meter {
            clock,
            listener,
            done: 0,
            total: 0,
            told_us,
        }
    }

    /// A new walk of this many bytes begins.
    pub fn begin(&mut self, total: u64) -> io::Result<()> {
        (self.done, self.total) = (0, total);
        self.tell()
    }

    pub fn add(&mut self, bytes: u64) -> io::Result<()> {
        self.done += bytes;
        if self.clock.monotonic_us().saturating_sub(self.told_us) < EVERY_US {
            return Ok(());
        }
        self.tell()
    }

    /// The walk is through, whatever was estimated.
    pub fn finish(&mut self) -> io::Result<()> {
        self.total = self.total.max(self.done);
        self.done = self.total;
        self.tell()
    }

    fn tell(&mut self) -> io::Result<()> {
        self.told_us = self.clock.monotonic_us();
        if (self.listener)(self.done.min(self.total), self.total) {
            return Ok(());
        }
        Err(stopped())
    }
}

fn stopped() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "stopped by its caller")
}

/// Whether an error is the listener's wish to stop, and no fault.
pub fn is_stop(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted
}
