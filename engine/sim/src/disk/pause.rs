//! Holding a thread at one of its disk calls while the others go on.

use super::Machine;
use super::faults::Call;

/// Stops the thread that makes the n-th call on a file of the log or of cold storage, until it is let go.
pub(super) struct PauseAfter {
    /// `None` = any that changes something.
    call: Option<Call>,
    after: u64,
    paused: bool,
    released: bool,
    finished: bool,
}

impl Machine {
    /// The next thread that reaches its `after`-th call on a log, pack or segment file stops there.
    pub fn pause_after(&self, after: u64) {
        self.pause_before(None, after);
    }

    /// The next thread that syncs one of those files stops there.
    pub fn pause_at_sync(&self) {
        self.pause_before(Some(Call::Sync), 0);
    }

    fn pause_before(&self, call: Option<Call>, after: u64) {
        *self.pause.lock() = Some(PauseAfter {
            call,
            after,
            paused: false,
            released: false,
            finished: false,
        });
    }

    /// Waits until a thread has stopped at the pause (`true`), or said that it is done (`false`).
    pub fn wait_for_pause(&self) -> bool {
        let mut pause = self.pause.lock();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
        loop {
            match &*pause {
                Some(pause) if pause.paused => return true,
                Some(pause) if !pause.finished => {}
                _ => return false,
            }
            let timed_out = self
                .pause_changed
                .wait_until(&mut pause, deadline)
                .timed_out();
            assert!(
                !timed_out,
                "the work beside neither finished nor reached its pause"
            );
        }
    }

    pub fn release(&self) {
        if let Some(pause) = &mut *self.pause.lock() {
            pause.released = true;
        }
        self.pause_changed.notify_all();
    }

    pub fn finished(&self) {
        if let Some(pause) = &mut *self.pause.lock() {
            pause.finished = true;
        }
        self.pause_changed.notify_all();
    }

    pub fn forget_pause(&self) {
        *self.pause.lock() = None;
    }

    pub(super) fn maybe_pause(&self, call: Call, path: &str) {
        let held_by_store = !["wal/", "packs/", "segments/"]
            .iter()
            .any(|directory| path.starts_with(directory));
        let mut pause = self.pause.lock();
        match &mut *pause {
            // The catalog's store holds its own locks while it calls.
            _ if held_by_store => return,
            Some(pause) if pause.call.is_some_and(|wanted| wanted != call) => return,
            Some(pause) if pause.after == 0 && !pause.paused => pause.paused = true,
            Some(pause) => {
                pause.after = pause.after.saturating_sub(1);
                return;
            }
            None => return,
        }
        self.pause_changed.notify_all();
        while pause.as_ref().is_some_and(|pause| !pause.released) {
            self.pause_changed.wait(&mut pause);
        }
    }
}
