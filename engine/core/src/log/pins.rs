//! Pins: while one is held, files stay on disk although nothing needs them any more.
//!
//! A backup reads the catalog once and then copies for minutes what it names. Whoever frees log files, segments
//! or packs asks here first, and does it later if a pin is held. Sits below `cold` and maintenance.
//!
//! Invariants
//! - `I-PIN-1` Freeing asks after the catalog has stopped naming a file, and a pin is taken before the catalog is
//!   read. So a file that was freed beside a new pin is never one that the reader of the catalog will look for.
//! - `I-PIN-2` What was put off is owed until the last pin is gone; then it is done once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Log files are held for a short time, segments and packs for as long as it takes to copy them.
#[derive(Default)]
pub struct Pins {
    pub log: Pinned,
    pub files: Pinned,
}

/// One kind of files.
#[derive(Default)]
pub struct Pinned {
    pins: AtomicUsize,
    owed: AtomicBool,
}

/// Held as long as it lives.
pub struct Pin<'a> {
    pinned: &'a Pinned,
}

impl Pinned {
    pub fn hold(&self) -> Pin<'_> {
        self.pins.fetch_add(1, Ordering::SeqCst);
        Pin { pinned: self }
    }

    pub fn held(&self) -> bool {
        self.pins.load(Ordering::SeqCst) > 0
    }

    /// Whether the caller must put off what it wanted to free; notes that this is owed.
    pub fn defers(&self) -> bool {
        let held = self.held();
        if held {
            self.owed.store(true, Ordering::SeqCst);
        }
        held
    }

    /// True once after the last pin is gone, if something was put off meanwhile. Asked by the thread that frees.
    pub fn take_owed(&self) -> bool {
        !self.held() && self.owed.swap(false, Ordering::SeqCst)
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.pinned.pins.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_off_is_owed_once_after_the_last_pin() {
        let pinned = Pinned::default();
        assert!(!pinned.defers() && !pinned.take_owed());
        let first = pinned.hold();
        let second = pinned.hold();
        assert!(pinned.defers());
        drop(first);
        assert!(pinned.defers() && !pinned.take_owed());
        drop(second);
        assert!(!pinned.defers());
        assert!(pinned.take_owed());
        assert!(!pinned.take_owed());
    }

    #[test]
    fn a_pin_that_held_nothing_up_owes_nothing() {
        let pinned = Pinned::default();
        drop(pinned.hold());
        assert!(!pinned.take_owed());
    }
}
