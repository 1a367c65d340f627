//! The kernel interface of the generator: readiness polling, limits, processor time.
//!
//! Every `unsafe` block of the crate is in this file. Sockets themselves are plain
//! `std::net::TcpStream`s in non-blocking mode, so nothing above needs raw descriptors.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Readiness events fetched per call; more than that are fetched by the next call.
const EVENTS_PER_WAIT: usize = 512;

/// One readiness report. Writability needs no mark: every report leads to a flush.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    pub token: usize,
    /// Something to read, or an end or error that a read will tell.
    pub readable: bool,
}

/// A level-triggered epoll set.
pub struct Poller {
    fd: OwnedFd,
    raw: Vec<libc::epoll_event>,
}

impl Poller {
    pub fn new() -> io::Result<Self> {
        // SAFETY: epoll_create1 takes no pointers; a negative result is checked before use.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just returned by the kernel and is owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self {
            fd,
            raw: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS_PER_WAIT],
        })
    }

    pub fn add(&self, socket: &TcpStream, token: usize) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, socket, token, false)
    }

    /// Switches the interest in writability; reading is always of interest.
    pub fn want_write(&self, socket: &TcpStream, token: usize, write: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, socket, token, write)
    }

    fn control(&self, op: i32, socket: &TcpStream, token: usize, write: bool) -> io::Result<()> {
        let mut events = (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
        if write {
            events |= libc::EPOLLOUT as u32;
        }
        let mut event = libc::epoll_event {
            events,
            u64: token as u64,
        };
        // SAFETY: both descriptors are open for the duration of the call and `event` is a valid
        // epoll_event that the kernel only reads.
        let result =
            unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), op, socket.as_raw_fd(), &raw mut event) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Waits until a socket is ready or `timeout` has passed and appends what is ready to `out`.
    /// The timeout has nanosecond resolution, which an open-loop schedule needs.
    pub fn wait(&mut self, timeout: Duration, out: &mut Vec<Ready>) -> io::Result<()> {
        out.clear();
        let limit = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
        };
        // SAFETY: `raw` holds EVENTS_PER_WAIT writable events, `limit` outlives the call, and no
        // signal mask is passed.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.fd.as_raw_fd(),
                self.raw.as_mut_ptr(),
                EVENTS_PER_WAIT as libc::c_int,
                &raw const limit,
                std::ptr::null::<libc::sigset_t>(),
                0usize,
            )
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted {
                Ok(())
            } else {
                Err(error)
            };
        }
        for event in &self.raw[..count as usize] {
            let bits = event.events;
            let broken = bits & ((libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLRDHUP) as u32) != 0;
            out.push(Ready {
                token: event.u64 as usize,
                readable: bits & (libc::EPOLLIN as u32) != 0 || broken,
            });
        }
        Ok(())
    }
}

/// Connects, without Nagle's delay, in non-blocking mode.
pub fn connect_nonblocking(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpStream::connect_timeout(&address, Duration::from_secs(10))?;
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Lets timed waits of this thread end when asked and not up to 50 us later.
pub fn sharpen_timers() -> io::Result<()> {
    // SAFETY: PR_SET_TIMERSLACK takes one integer and touches no memory of the caller.
    let result = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Runs this thread before all ordinary ones, as if the load came from another machine.
pub fn run_first() -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: 1 };
    // SAFETY: thread 0 is the calling one and `parameter` is a valid sched_param, only read.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameter) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Raises the descriptor limit of the generator to its hard limit.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid rlimit for the kernel to fill.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is a valid rlimit that the kernel only reads.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limit.rlim_cur)
}

/// Processor time of this process so far, user and kernel, in seconds.
pub fn processor_seconds() -> f64 {
    // SAFETY: an all-zero rusage is a valid value of that plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid rusage for the kernel to fill; RUSAGE_SELF cannot fail.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
