//! How a commit reaches those who wait: one mailbox per reactor, one condition for blocking callers.
//!
//! Acknowledgements are not handed over one by one. A reactor keeps its own queue of (commit number,
//! connection); a commit moves the watermark and rings. So an ack costs no cross-thread message.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::model::Stage;
use crate::stream::handle::Stream;

/// A reactor's bell and the streams whose readers it must look at.
pub struct Mailbox {
    event: OwnedFd,
    /// Set while a ring is pending, so that a burst costs one system call.
    rung: AtomicBool,
    /// What the reactor has parked, by stage. It sets this before it looks at the watermarks a last time, a
    /// commit moves its watermark before it looks at this: one of the two always sees the other.
    waiting: AtomicU8,
    woken: Mutex<Vec<Arc<Stream>>>,
}

impl Mailbox {
    pub fn new() -> std::io::Result<Mailbox> {
        // SAFETY: eventfd takes no pointers; the result is checked before it is owned.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: `fd` is a fresh descriptor that nothing else owns.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Mailbox {
            event,
            rung: AtomicBool::new(false),
            waiting: AtomicU8::new(0),
            woken: Mutex::default(),
        })
    }

    pub fn descriptor(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    pub fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            let one = 1u64.to_ne_bytes();
            // SAFETY: writes 8 bytes from a live buffer. The only failure is a full counter, which is a ring too.
            unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Called by the reactor before it looks at watermarks and woken streams, so that no ring is lost.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: reads 8 bytes into a live buffer; an empty counter (EAGAIN) is fine.
        unsafe {
            libc::read(
                self.event.as_raw_fd(),
                count.as_mut_ptr().cast(),
                count.len(),
            )
        };
        self.rung.store(false, Ordering::Release);
    }

    pub fn set_waiting(&self, written: bool, synced: bool) {
        let mask = u8::from(written) | u8::from(synced) << 1;
        self.waiting.store(mask, Ordering::SeqCst);
    }

    /// Whether something is parked until the log has come this far.
    pub fn is_waiting(&self, stage: Stage) -> bool {
        let bit = if stage == Stage::Synced { 2 } else { 1 };
        self.waiting.load(Ordering::SeqCst) & bit != 0
    }

    pub fn add_woken(&self, streams: &mut Vec<Arc<Stream>>) {
        self.woken.lock().append(streams);
    }

    pub fn take_woken(&self, into: &mut Vec<Arc<Stream>>) {
        into.append(&mut self.woken.lock());
    }
}

/// Blocking callers (the Python handle, maintenance) that wait for a commit number.
#[derive(Default)]
pub struct Waiters {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Waiters {
    /// Waits until `done` says so. `done` is asked again after every commit.
    pub fn wait_until(&self, done: impl Fn() -> bool, timeout: Duration) -> bool {
        let deadline = std::time::Instant::now() + timeout;
        let mut count = self.count.lock();
        *count += 1;
        let mut finished = done();
        while !finished {
            let timed_out = self.changed.wait_until(&mut count, deadline).timed_out();
            finished = done();
            if timed_out {
                break;
            }
        }
        *count -= 1;
        finished
    }

    pub fn notify(&self) {
        if *self.count.lock() > 0 {
            self.changed.notify_all();
        }
    }
}
