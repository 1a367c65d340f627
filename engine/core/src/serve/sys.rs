//! The system calls of the event loop, each with its proof; everything above is safe code.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub struct Epoll {
    descriptor: OwnedFd,
}

impl Epoll {
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: no pointers; the result is checked before it is owned.
        let descriptor = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nothing else owns.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(Epoll { descriptor })
    }

    pub fn add(&self, fd: RawFd, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, interest, token)
    }

    pub fn modify(&self, fd: RawFd, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, interest, token)
    }

    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0)
    }

    fn control(&self, operation: i32, fd: RawFd, interest: u32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: interest,
            u64: token,
        };
        // SAFETY: `event` lives through the call, which copies it.
        let result =
            unsafe { libc::epoll_ctl(self.descriptor.as_raw_fd(), operation, fd, &mut event) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Waits for events; an interrupted wait is an empty one.
    pub fn wait(&self, events: &mut [libc::epoll_event], timeout_ms: i32) -> io::Result<usize> {
        // SAFETY: the kernel writes at most `events.len()` entries into the live slice.
        let count = unsafe {
            libc::epoll_wait(
                self.descriptor.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as i32,
                timeout_ms,
            )
        };
        if count >= 0 {
            return Ok(count as usize);
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            error => Err(error),
        }
    }
}

/// Connects to a unix socket without waiting: a full backlog is an error.
pub fn connect_unix(path: &str) -> io::Result<OwnedFd> {
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    if path.len() >= address.sun_path.len() {
        return Err(io::Error::other("the socket's path is too long"));
    }
    for (slot, byte) in address.sun_path.iter_mut().zip(path.bytes()) {
        *slot = byte as libc::c_char;
    }
    let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers; the result is checked before it is owned.
    let descriptor = unsafe { libc::socket(libc::AF_UNIX, flags, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let size = size_of_val(&address) as libc::socklen_t;
    // SAFETY: a live sockaddr_un with its size, zero-terminated because the path is shorter than its field.
    if unsafe { libc::connect(descriptor, (&raw const address).cast(), size) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(socket)
}

/// Receives into `buffer` without blocking.
pub fn receive(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: writes at most `buffer.len()` bytes into the live slice.
    let count = unsafe {
        libc::recv(
            fd,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            libc::MSG_DONTWAIT,
        )
    };
    if count < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(count as usize)
    }
}

/// Sends without blocking and without SIGPIPE; `more` = further bytes follow at once.
pub fn send(fd: RawFd, bytes: &[u8], more: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
    // SAFETY: reads at most `bytes.len()` bytes from the live slice.
    let count = unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), flags) };
    if count < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(count as usize)
    }
}

/// Bytes that were sent and that the peer's side has not acknowledged.
pub fn unacknowledged(fd: RawFd) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: writes an int into the live variable. A socket that is gone has nothing under way.
    let refused = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) } != 0;
    if refused {
        0
    } else {
        u64::try_from(bytes).unwrap_or(0)
    }
}

/// Tells the peer that nothing more comes.
pub fn shutdown_write(fd: RawFd) {
    // SAFETY: no pointers. A socket that is gone already needs no shutdown.
    unsafe { libc::shutdown(fd, libc::SHUT_WR) };
}

/// Send buffer of a connection from this machine. Its round trip is nothing, so a small buffer loses no speed and keeps
/// the bytes on their way in the processor's caches: large bodies move several times faster. Across a network the
/// kernel's own tuning stays on.
const LOOPBACK_SEND_BYTES: i32 = 64 * 1024;

/// Accepts one connection, non-blocking, without delaying small packets.
pub fn accept(listener: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut peer: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut size = size_of_val(&peer) as libc::socklen_t;
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes at most `size` bytes into the live struct; the result is checked before it is owned.
    let descriptor = unsafe { libc::accept4(listener, (&raw mut peer).cast(), &mut size, flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    set_option(descriptor, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    if is_loopback(&peer) {
        set_option(
            descriptor,
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            LOOPBACK_SEND_BYTES,
        )?;
    }
    Ok(socket)
}

fn is_loopback(peer: &libc::sockaddr_storage) -> bool {
    match i32::from(peer.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that this is a sockaddr_in, which is smaller than the storage.
            let v4 = unsafe { &*std::ptr::from_ref(peer).cast::<libc::sockaddr_in>() };
            v4.sin_addr.s_addr.to_ne_bytes()[0] == 127
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is a sockaddr_in6, which is smaller than the storage.
            let v6 = unsafe { &*std::ptr::from_ref(peer).cast::<libc::sockaddr_in6>() };
            std::net::Ipv6Addr::from(v6.sin6_addr.s6_addr).is_loopback()
        }
        _ => false,
    }
}

pub fn set_option(fd: RawFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    let size = size_of::<i32>() as libc::socklen_t;
    // SAFETY: passes a live i32 with its size.
    let result = unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), size) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Raises the soft limit of open files to the hard one. Returns the limit that holds.
pub fn raise_descriptor_limit() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes into the live struct.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return 1024;
    }
    let wanted = libc::rlimit {
        rlim_cur: limit.rlim_max,
        rlim_max: limit.rlim_max,
    };
    // SAFETY: reads the live struct; on failure the old limit holds.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &wanted) } == 0 {
        limit.rlim_cur = wanted.rlim_cur;
    }
    usize::try_from(limit.rlim_cur)
        .unwrap_or(usize::MAX)
        .min(1 << 20)
}

pub fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Lets threads that answer somebody go first: this one prepares files and moves bytes in the background, and a
/// slice of its work is longer than an append.
pub fn give_way() {
    const BACKGROUND_NICE: libc::c_int = 10;
    // SAFETY: takes no pointers. On Linux, 0 names the calling thread alone.
    let refused = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, BACKGROUND_NICE) } != 0;
    if refused {
        crate::report!(
            "a background thread keeps its priority: {}",
            std::io::Error::last_os_error()
        );
    }
}
