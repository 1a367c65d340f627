//! Who works on the log: the commit thread, and the write thread while that one is busy with a sync.
//!
//! Pure coordination; what the work is stands in `commit`.
//!
//! Invariant: a kick is never lost. It is kept for the commit thread in any case; while a sync runs the write
//! thread gets it too if there are weak frames, because the commit thread may come back late. Strong frames wait
//! for the next sync anyway, so they wake nobody.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

#[derive(Default)]
pub struct Work {
    state: Mutex<State>,
    commit: Condvar,
    write: Condvar,
}

#[derive(Default)]
struct State {
    commit_pending: bool,
    weak_pending: bool,
    write_pending: bool,
    syncing: bool,
    stop: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    Work,
    Stop,
}

impl Work {
    /// `weak`: some of what is staged does not wait for a sync.
    pub fn kick(&self, weak: bool) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.commit_pending, true) && !state.syncing {
            self.commit.notify_one();
        }
        state.weak_pending |= weak;
        self.pass_on(&mut state);
    }

    /// From here on kicks go to the write thread, and so does one that came just before.
    pub fn begin_sync(&self) {
        let mut state = self.state.lock();
        state.syncing = true;
        self.pass_on(&mut state);
    }

    fn pass_on(&self, state: &mut State) {
        let wanted = state.syncing && state.weak_pending;
        if wanted && !std::mem::replace(&mut state.write_pending, true) {
            self.write.notify_one();
        }
    }

    pub fn end_sync(&self) {
        let mut state = self.state.lock();
        state.syncing = false;
        if state.commit_pending {
            // A reactor may have synced; then the commit thread sleeps.
            self.commit.notify_one();
        }
    }

    /// Waits for a kick, or until `due` has passed.
    pub fn wait_commit(&self, due: Option<Duration>) -> Wake {
        let mut state = self.state.lock();
        if !state.commit_pending && !state.stop {
            match due {
                Some(due) => {
                    self.commit.wait_for(&mut state, due);
                }
                None => self.commit.wait(&mut state),
            }
        }
        state.commit_pending = false;
        state.weak_pending = false;
        if state.stop { Wake::Stop } else { Wake::Work }
    }

    pub fn wait_write(&self) -> Wake {
        let mut state = self.state.lock();
        while !state.write_pending && !state.stop {
            self.write.wait(&mut state);
        }
        state.write_pending = false;
        state.weak_pending = false;
        if state.stop { Wake::Stop } else { Wake::Work }
    }

    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.commit.notify_all();
        self.write.notify_all();
    }
}
