//! The listening socket: bound before recovery (a second server fails early), listening only after it.
//!
//! One socket is shared by all reactors with `EPOLLEXCLUSIVE`; without `SO_REUSEPORT` nobody can steal the port.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::error::EngineError;
use crate::serve::sys::set_option;

const BACKLOG: i32 = 4096;

pub struct Listener {
    socket: OwnedFd,
    pub address: SocketAddr,
}

impl Listener {
    pub fn bind(host: &str, port: u16) -> Result<Listener, EngineError> {
        let named = format!("{host}:{port}");
        let address = (host, port)
            .to_socket_addrs()
            .map_err(|error| {
                EngineError::new("bind_failed", format!("cannot resolve {named}: {error}"))
            })?
            .next()
            .ok_or_else(|| EngineError::new("bind_failed", format!("{named} has no address")))?;
        match bind_socket(address) {
            Ok(listener) => Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(EngineError::new(
                "port_in_use",
                format!("{named} is already in use"),
            )),
            Err(error) => Err(EngineError::new(
                "bind_failed",
                format!("cannot bind {named}: {error}"),
            )),
        }
    }

    pub fn listen(&self) -> io::Result<()> {
        // SAFETY: no pointers.
        let result = unsafe { libc::listen(self.socket.as_raw_fd(), BACKLOG) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    pub fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

fn bind_socket(address: SocketAddr) -> io::Result<Listener> {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // SAFETY: no pointers; the result is checked before it is owned.
    let descriptor = unsafe {
        libc::socket(
            family,
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        )
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    set_option(descriptor, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    let result = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(v4.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: a live sockaddr_in with its size.
            unsafe {
                libc::bind(
                    descriptor,
                    (&raw const raw).cast(),
                    size_of_val(&raw) as libc::socklen_t,
                )
            }
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: a live sockaddr_in6 with its size.
            unsafe {
                libc::bind(
                    descriptor,
                    (&raw const raw).cast(),
                    size_of_val(&raw) as libc::socklen_t,
                )
            }
        }
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let bound = std::net::TcpListener::from(socket);
    let address = bound.local_addr()?;
    Ok(Listener {
        socket: bound.into(),
        address,
    })
}
