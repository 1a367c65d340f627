//! One non-blocking connection of a measuring loop: what is still to be sent, what has arrived.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::sys::{self, Poller};

pub struct Wire {
    socket: TcpStream,
    token: usize,
    pub out: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    start: usize,
    end: usize,
    /// What a shared read left incomplete; such connections own no input buffer.
    held: Vec<u8>,
    waits_to_write: bool,
}

/// What a read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    Bytes(usize),
    Nothing,
    Closed,
}

impl Wire {
    /// Connects and registers under `token`; `input_bytes` bounds what is buffered of an answer.
    pub fn open(
        server: SocketAddr,
        poller: &Poller,
        token: usize,
        input_bytes: usize,
    ) -> Result<Self, String> {
        let socket =
            sys::connect_nonblocking(server).map_err(|error| format!("cannot connect: {error}"))?;
        poller
            .add(&socket, token)
            .map_err(|error| format!("cannot poll: {error}"))?;
        Ok(Self {
            socket,
            token,
            out: Vec::new(),
            sent: 0,
            input: vec![0; input_bytes],
            start: 0,
            end: 0,
            held: Vec::new(),
            waits_to_write: false,
        })
    }

    /// Sends as much of `out` as the kernel takes and asks for a wake-up if something is left.
    pub fn flush(&mut self, poller: &Poller) -> Result<(), String> {
        while self.sent < self.out.len() {
            match self.socket.write(&self.out[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("send: {error}")),
            }
        }
        let left = self.sent < self.out.len();
        if !left {
            self.out.clear();
            self.sent = 0;
        }
        if left != self.waits_to_write {
            self.waits_to_write = left;
            poller
                .want_write(&self.socket, self.token, left)
                .map_err(|error| format!("cannot poll: {error}"))?;
        }
        Ok(())
    }

    /// One read into the input buffer, behind what is still unused.
    pub fn receive(&mut self) -> Result<Arrival, String> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.input.len() {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.input.len() {
            return Err("answer larger than the input buffer".to_owned());
        }
        let arrival = read(&mut self.socket, &mut self.input[self.end..])?;
        if let Arrival::Bytes(count) = arrival {
            self.end += count;
        }
        Ok(arrival)
    }

    pub fn arrived(&self) -> &[u8] {
        &self.input[self.start..self.end]
    }

    pub fn consume(&mut self, count: usize) {
        self.start += count;
    }

    /// One read into a buffer shared by many connections, behind what this one held back.
    /// With `Bytes(n)` the first `n` bytes of `scratch` are valid.
    pub fn receive_shared(&mut self, scratch: &mut [u8]) -> Result<Arrival, String> {
        let held = self.held.len();
        if held >= scratch.len() {
            return Err("answer larger than the input buffer".to_owned());
        }
        scratch[..held].copy_from_slice(&self.held);
        let arrival = read(&mut self.socket, &mut scratch[held..])?;
        if let Arrival::Bytes(count) = arrival {
            self.held.clear();
            return Ok(Arrival::Bytes(held + count));
        }
        Ok(arrival)
    }

    /// Keeps an incomplete rest for the next [`Self::receive_shared`].
    pub fn hold_back(&mut self, rest: &[u8]) {
        self.held.extend_from_slice(rest);
    }
}

fn read(socket: &mut TcpStream, buffer: &mut [u8]) -> Result<Arrival, String> {
    match socket.read(buffer) {
        Ok(0) => Ok(Arrival::Closed),
        Ok(count) => Ok(Arrival::Bytes(count)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(Arrival::Nothing)
        }
        Err(error) => Err(format!("receive: {error}")),
    }
}
