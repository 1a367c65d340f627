//! One SSE subscriber: response framing, event parsing, and the check that no event is lost.
//!
//! All events of a run are tagged payloads of one length on one text stream, so an event that
//! carries several appends, or a part of one, is put together again from the concatenation of all
//! data. Sequences must arrive without a gap. A server may end a connection; the subscriber then
//! resumes from the offset of the last control event, and what was delivered after that control
//! may be delivered again (counted apart, since the protocol allows it).

use std::net::SocketAddr;

use crate::http::{Event, ResponseReader};
use crate::payload::Payloads;
use crate::sys::Poller;
use crate::wire::{Arrival, Wire};

/// A line longer than this is not an event of a benchmark.
const MAX_LINE_BYTES: usize = 8 * 1024 * 1024;

/// What the event being read is; an event ends with an empty line and the next one starts anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Other,
    Data,
    Control,
}

pub struct Subscriber {
    wire: Wire,
    responses: ResponseReader,
    kind: Kind,
    line: Vec<u8>,
    data: Vec<u8>,
    control: Vec<u8>,
    scratch: Vec<u8>,
    pub next: u64,
    next_at_control: u64,
    delivered: u64,
    pub is_ready: bool,
    pub reconnects: u64,
    pub redelivered: u64,
}

impl Subscriber {
    /// Connects and asks for the live tail (`offset` is `now` at first).
    pub fn open(
        server: SocketAddr,
        poller: &Poller,
        token: usize,
        target: &str,
        offset: &str,
    ) -> Result<Self, String> {
        let mut wire = Wire::open(server, poller, token, 0)?;
        let request = format!(
            "GET {target}?offset={offset}&live=sse HTTP/1.1\r\nHost: {server}\r\nAccept: text/event-stream\r\n\r\n"
        );
        wire.out.extend_from_slice(request.as_bytes());
        wire.flush(poller)?;
        Ok(Self {
            wire,
            responses: ResponseReader::new(),
            kind: Kind::Other,
            line: Vec::new(),
            data: Vec::new(),
            control: Vec::new(),
            scratch: Vec::new(),
            next: 0,
            next_at_control: 0,
            delivered: 0,
            is_ready: false,
            reconnects: 0,
            redelivered: 0,
        })
    }

    /// Reads what has arrived; `deliver` gets each sequence that this subscriber sees first.
    /// `Ok(false)`: the server ended the response and [`Self::resume`] is due.
    pub fn receive(
        &mut self,
        poller: &Poller,
        buffer: &mut [u8],
        payloads: &Payloads,
        mut deliver: impl FnMut(u64),
    ) -> Result<bool, String> {
        self.wire.flush(poller)?;
        let count = match self.wire.receive_shared(buffer)? {
            Arrival::Nothing => return Ok(true),
            Arrival::Closed => return Ok(false),
            Arrival::Bytes(count) => count,
        };
        let mut bytes = &buffer[..count];
        loop {
            let (used, event) = self.responses.next(bytes)?;
            bytes = &bytes[used..];
            match event {
                Event::NeedMore => {
                    self.wire.hold_back(bytes);
                    return Ok(true);
                }
                Event::Head(head) if head.status != 200 => {
                    return Err(format!("subscription answered {}", head.status));
                }
                Event::Head(_) => {}
                Event::Body(body) => self.lines(body, payloads, &mut deliver)?,
                Event::End => return Ok(false),
            }
        }
    }

    /// Opens a new connection behind the last control event.
    pub fn resume(
        &mut self,
        server: SocketAddr,
        poller: &Poller,
        token: usize,
        target: &str,
    ) -> Result<(), String> {
        let offset = control_offset(&self.control).ok_or("ended before the first control event")?;
        let fresh = Self::open(server, poller, token, target, &offset)?;
        *self = Self {
            next: self.next_at_control,
            next_at_control: self.next_at_control,
            delivered: self.delivered,
            control: std::mem::take(&mut self.control),
            is_ready: self.is_ready,
            reconnects: self.reconnects + 1,
            redelivered: self.redelivered,
            ..fresh
        };
        Ok(())
    }

    fn lines(
        &mut self,
        mut body: &[u8],
        payloads: &Payloads,
        deliver: &mut impl FnMut(u64),
    ) -> Result<(), String> {
        while let Some(end) = memchr::memchr(b'\n', body) {
            if self.line.is_empty() {
                self.one_line(&body[..end], payloads, deliver)?;
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&body[..end]);
                self.one_line(&line, payloads, deliver)?;
                line.clear();
                self.line = line;
            }
            body = &body[end + 1..];
        }
        self.line.extend_from_slice(body);
        if self.line.len() > MAX_LINE_BYTES {
            Err("event line too long".to_owned())
        } else {
            Ok(())
        }
    }

    fn one_line(
        &mut self,
        line: &[u8],
        payloads: &Payloads,
        deliver: &mut impl FnMut(u64),
    ) -> Result<(), String> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if let Some(data) = line.strip_prefix(b"data:") {
            let data = data.strip_prefix(b" ").unwrap_or(data);
            match self.kind {
                Kind::Data => self.data.extend_from_slice(data),
                Kind::Control => {
                    self.control.clear();
                    self.control.extend_from_slice(data);
                }
                Kind::Other => {}
            }
        } else if let Some(kind) = line.strip_prefix(b"event:") {
            self.kind = match kind.trim_ascii() {
                b"data" => Kind::Data,
                b"control" => Kind::Control,
                _ => Kind::Other,
            };
        } else if line.is_empty() {
            match std::mem::replace(&mut self.kind, Kind::Other) {
                Kind::Data => return self.payloads(payloads, deliver),
                Kind::Control => {
                    self.is_ready = true;
                    self.next_at_control = self.next;
                }
                Kind::Other => {}
            }
        }
        Ok(())
    }

    fn payloads(
        &mut self,
        payloads: &Payloads,
        deliver: &mut impl FnMut(u64),
    ) -> Result<(), String> {
        let whole = self.data.len() - self.data.len() % payloads.length();
        for piece in self.data[..whole].chunks_exact(payloads.length()) {
            let tag = payloads
                .recognise(piece, &mut self.scratch)
                .ok_or("an event that nobody published")?;
            if tag.sequence != self.next {
                return Err(format!(
                    "event {} where {} was due",
                    tag.sequence, self.next
                ));
            }
            self.next += 1;
            if tag.sequence < self.delivered {
                self.redelivered += 1;
            } else {
                self.delivered = self.next;
                deliver(tag.sequence);
            }
        }
        self.data.drain(..whole);
        Ok(())
    }

    /// How many events this subscriber has seen, each once, from the first on.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }
}

/// The offset in a control event: the string after `"streamNextOffset":`.
fn control_offset(control: &[u8]) -> Option<String> {
    let name = b"\"streamNextOffset\":";
    let start = memchr::memmem::find(control, name)? + name.len();
    let value = control[start..].trim_ascii_start().strip_prefix(b"\"")?;
    let end = memchr::memchr(b'"', value)?;
    String::from_utf8(value[..end].to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::Tag;
    use std::net::TcpListener;

    fn subscriber() -> (TcpListener, Poller, Subscriber) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let poller = Poller::new().unwrap();
        let subscriber =
            Subscriber::open(listener.local_addr().unwrap(), &poller, 0, "/x", "now").unwrap();
        (listener, poller, subscriber)
    }

    fn event(payloads: &Payloads, sequences: &[u64]) -> Vec<u8> {
        let mut bytes = b"event: data\ndata:".to_vec();
        sequences.iter().for_each(|one| {
            payloads.append_to(
                &mut bytes,
                Tag {
                    connection: 0,
                    sequence: *one,
                },
            )
        });
        bytes.extend_from_slice(
            b"\n\nevent: control\ndata:{\"streamNextOffset\":\"0_7\",\"upToDate\":true}\n\n",
        );
        bytes
    }

    #[test]
    fn events_are_delivered_in_order_however_they_are_cut() {
        let payloads = Payloads::new(1, 64).unwrap();
        let bytes = [
            event(&payloads, &[0]),
            event(&payloads, &[1, 2]),
            b": idle\n\n".to_vec(),
        ]
        .concat();
        for step in [1, 3, 17, 1000] {
            let (_listener, _poller, mut one) = subscriber();
            let mut seen = Vec::new();
            for piece in bytes.chunks(step) {
                one.lines(piece, &payloads, &mut |sequence| seen.push(sequence))
                    .unwrap();
            }
            assert_eq!(seen, vec![0, 1, 2]);
            assert!(one.is_ready);
            assert_eq!(control_offset(&one.control).as_deref(), Some("0_7"));
        }
    }

    #[test]
    fn a_gap_a_repetition_and_a_stranger_are_errors() {
        let payloads = Payloads::new(1, 64).unwrap();
        for wrong in [
            event(&payloads, &[1]),
            event(&payloads, &[0, 0]),
            b"event: data\ndata:".to_vec(),
        ] {
            let (_listener, _poller, mut one) = subscriber();
            let bytes = [wrong, vec![b'x'; 64], b"\n\n".to_vec()].concat();
            assert!(one.lines(&bytes, &payloads, &mut |_| {}).is_err());
        }
    }

    #[test]
    fn after_a_resume_only_what_followed_the_control_may_come_again() {
        let payloads = Payloads::new(1, 64).unwrap();
        let (listener, poller, mut one) = subscriber();
        let mut seen = Vec::new();
        one.lines(&event(&payloads, &[0]), &payloads, &mut |sequence| {
            seen.push(sequence)
        })
        .unwrap();
        let second = event(&payloads, &[1]);
        let data_only = &second[..memchr::memmem::find(&second, b"event: control").unwrap()];
        one.lines(data_only, &payloads, &mut |sequence| seen.push(sequence))
            .unwrap();
        one.resume(listener.local_addr().unwrap(), &poller, 0, "/x")
            .unwrap();
        one.lines(&event(&payloads, &[1, 2]), &payloads, &mut |sequence| {
            seen.push(sequence)
        })
        .unwrap();
        assert_eq!(
            (seen, one.redelivered, one.delivered()),
            (vec![0, 1, 2], 1, 3)
        );
    }
}
