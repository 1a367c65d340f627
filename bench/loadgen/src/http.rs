//! HTTP/1.1 as a client sees it: an incremental response reader and a small blocking client.
//!
//! [`ResponseReader`] owns no bytes: it is handed what arrived and says how much of it it used, so
//! the measuring loops parse in place. Bodies by length, chunked, and until close are understood;
//! anything else is an error, never a guess.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const MAX_HEADERS: usize = 64;
const READ_BUFFER_BYTES: usize = 256 * 1024;
/// A server that says nothing for this long on the blocking client has failed.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(60);

/// The parts of a response head that the generator acts on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    pub next_offset: Option<String>,
    pub up_to_date: bool,
    pub durability: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    NeedMore,
    Head(Head),
    Body(&'a [u8]),
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Length(u64),
    ChunkSize,
    ChunkData(u64),
    ChunkDataEnd,
    Trailer,
    UntilClose,
    End,
}

pub struct ResponseReader {
    state: State,
}

impl ResponseReader {
    pub fn new() -> Self {
        Self { state: State::Head }
    }

    /// True between responses: a connection may end here without losing anything.
    pub fn is_between_responses(&self) -> bool {
        self.state == State::Head
    }

    /// Takes one step over `input`; returns how many bytes were used and what they meant.
    pub fn next<'a>(&mut self, input: &'a [u8]) -> Result<(usize, Event<'a>), String> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match self.state {
                State::Head => {
                    let Some((length, head)) = self.parse_head(rest)? else {
                        return Ok((used, Event::NeedMore));
                    };
                    return Ok((used + length, Event::Head(head)));
                }
                State::End => {
                    self.state = State::Head;
                    return Ok((used, Event::End));
                }
                State::Length(left) | State::ChunkData(left) => {
                    if rest.is_empty() {
                        return Ok((used, Event::NeedMore));
                    }
                    let take = rest.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    let left = left - take as u64;
                    self.state = match (self.state, left) {
                        (State::Length(_), 0) => State::End,
                        (State::Length(_), _) => State::Length(left),
                        (_, 0) => State::ChunkDataEnd,
                        (_, _) => State::ChunkData(left),
                    };
                    return Ok((used + take, Event::Body(&rest[..take])));
                }
                State::UntilClose => {
                    if rest.is_empty() {
                        return Ok((used, Event::NeedMore));
                    }
                    return Ok((input.len(), Event::Body(rest)));
                }
                State::ChunkSize => match httparse::parse_chunk_size(rest) {
                    Ok(httparse::Status::Partial) => return Ok((used, Event::NeedMore)),
                    Ok(httparse::Status::Complete((length, size))) => {
                        used += length;
                        self.state = if size == 0 {
                            State::Trailer
                        } else {
                            State::ChunkData(size)
                        };
                    }
                    Err(_) => return Err("malformed chunk size".to_owned()),
                },
                State::ChunkDataEnd => {
                    if rest.len() < 2 {
                        return Ok((used, Event::NeedMore));
                    }
                    if &rest[..2] != b"\r\n" {
                        return Err("chunk data not followed by CRLF".to_owned());
                    }
                    used += 2;
                    self.state = State::ChunkSize;
                }
                State::Trailer => {
                    // Trailer lines carry nothing of interest; the first empty line ends the body.
                    let Some(end) = memchr::memmem::find(rest, b"\r\n") else {
                        return Ok((used, Event::NeedMore));
                    };
                    used += end + 2;
                    if end == 0 {
                        self.state = State::End;
                    }
                }
            }
        }
    }

    fn parse_head(&mut self, input: &[u8]) -> Result<Option<(usize, Head)>, String> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let length = match response.parse(input) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(error) => return Err(format!("malformed response head: {error}")),
        };
        let mut head = Head {
            status: response.code.unwrap_or(0),
            ..Head::default()
        };
        let (mut body_length, mut chunked) = (None, false);
        for header in response.headers.iter() {
            let value = || String::from_utf8_lossy(header.value).trim().to_owned();
            if header.name.eq_ignore_ascii_case("stream-next-offset") {
                head.next_offset = Some(value());
            } else if header.name.eq_ignore_ascii_case("stream-up-to-date") {
                head.up_to_date = value().eq_ignore_ascii_case("true");
            } else if header.name.eq_ignore_ascii_case("stream-durability") {
                head.durability = Some(value());
            } else if header.name.eq_ignore_ascii_case("content-length") {
                let parsed = value().parse::<u64>();
                body_length = Some(parsed.map_err(|_| "malformed Content-Length".to_owned())?);
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                if !value().eq_ignore_ascii_case("chunked") {
                    return Err("unsupported Transfer-Encoding".to_owned());
                }
                chunked = true;
            }
        }
        let bodiless = head.status == 204 || head.status == 304;
        self.state = match (chunked, body_length) {
            _ if (100..200).contains(&head.status) => State::Head,
            _ if bodiless => State::End,
            (true, _) => State::ChunkSize,
            (false, Some(0)) => State::End,
            (false, Some(length)) => State::Length(length),
            (false, None) => State::UntilClose,
        };
        Ok(Some((length, head)))
    }
}

/// A blocking connection for preparing and for reading back.
pub struct Client {
    socket: TcpStream,
    host: String,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    reader: ResponseReader,
}

impl Client {
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let socket = TcpStream::connect_timeout(&address, Duration::from_secs(10))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(BLOCKING_TIMEOUT))?;
        socket.set_write_timeout(Some(BLOCKING_TIMEOUT))?;
        Ok(Self {
            socket,
            host: address.to_string(),
            buffer: vec![0; READ_BUFFER_BYTES],
            start: 0,
            end: 0,
            reader: ResponseReader::new(),
        })
    }

    pub fn send(
        &mut self,
        method: &str,
        target: &str,
        content_type: Option<&str>,
        body: &[u8],
    ) -> Result<(), String> {
        let request = request(method, target, &self.host, content_type, body);
        self.send_raw(&request)
    }

    pub fn send_raw(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.socket
            .write_all(bytes)
            .map_err(|error| format!("cannot send: {error}"))
    }

    /// Reads one whole response, handing the body to `sink` piece by piece.
    pub fn receive(&mut self, mut sink: impl FnMut(&[u8])) -> Result<Head, String> {
        let mut head: Option<Head> = None;
        loop {
            let (used, event) = self.reader.next(&self.buffer[self.start..self.end])?;
            match event {
                Event::NeedMore => {
                    self.start += used;
                    self.fill()?;
                    continue;
                }
                // An interim response (100) is followed by the real one.
                Event::Head(found) if found.status >= 200 => head = Some(found),
                Event::Head(_) => {}
                Event::Body(bytes) => sink(bytes),
                Event::End => {
                    self.start += used;
                    return head.ok_or_else(|| "response without a head".to_owned());
                }
            }
            self.start += used;
        }
    }

    fn fill(&mut self) -> Result<(), String> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.buffer.len() {
            return Err("response head larger than the read buffer".to_owned());
        }
        match self.socket.read(&mut self.buffer[self.end..]) {
            Ok(0) => Err("connection closed in the middle of a response".to_owned()),
            Ok(count) => {
                self.end += count;
                Ok(())
            }
            Err(error) => Err(format!("cannot receive: {error}")),
        }
    }

    pub fn call(
        &mut self,
        method: &str,
        target: &str,
        content_type: Option<&str>,
        body: &[u8],
    ) -> Result<Head, String> {
        self.send(method, target, content_type, body)?;
        self.receive(|_| {})
    }

    /// Reads a stream from its start, following `Stream-Next-Offset` until it is up to date.
    /// Returns how many responses it took.
    pub fn read_stream(
        &mut self,
        target: &str,
        mut sink: impl FnMut(&[u8]),
    ) -> Result<u64, String> {
        let mut offset = "-1".to_owned();
        let mut responses = 0;
        loop {
            self.send("GET", &format!("{target}?offset={offset}"), None, b"")?;
            let head = self.receive(&mut sink)?;
            responses += 1;
            match next_read(&head, &offset)? {
                None => return Ok(responses),
                Some(next) => offset = next,
            }
        }
    }
}

/// Where a catch-up reader goes on after a response from `offset`; `None` when it is up to date.
pub fn next_read(head: &Head, offset: &str) -> Result<Option<String>, String> {
    if head.status != 200 {
        return Err(format!("read answered {}", head.status));
    }
    if head.up_to_date {
        return Ok(None);
    }
    match &head.next_offset {
        None => Err("read without Stream-Next-Offset".to_owned()),
        Some(next) if next == offset => Err(format!("read does not advance beyond {offset}")),
        Some(next) => Ok(Some(next.clone())),
    }
}

/// The bytes of one request.
pub fn request(
    method: &str,
    target: &str,
    host: &str,
    content_type: Option<&str>,
    body: &[u8],
) -> Vec<u8> {
    let mut bytes = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n").into_bytes();
    if let Some(content_type) = content_type {
        bytes.extend_from_slice(format!("Content-Type: {content_type}\r\n").as_bytes());
    }
    if !body.is_empty() || method == "POST" || method == "PUT" {
        bytes.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
    }
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(body);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `bytes` in pieces of `step` and collects status codes, bodies and ends.
    fn run(bytes: &[u8], step: usize) -> Result<Vec<(u16, Vec<u8>)>, String> {
        let (mut reader, mut held, mut done) = (ResponseReader::new(), Vec::new(), Vec::new());
        let (mut status, mut body) = (0, Vec::new());
        for piece in bytes.chunks(step) {
            held.extend_from_slice(piece);
            loop {
                let (used, event) = reader.next(&held)?;
                let stop = match event {
                    Event::NeedMore => true,
                    Event::Head(head) => {
                        status = head.status;
                        false
                    }
                    Event::Body(bytes) => {
                        body.extend_from_slice(bytes);
                        false
                    }
                    Event::End => {
                        done.push((status, std::mem::take(&mut body)));
                        false
                    }
                };
                held.drain(..used);
                if stop {
                    break;
                }
            }
        }
        Ok(done)
    }

    #[test]
    fn any_split_gives_the_same_responses() {
        let bytes = b"HTTP/1.1 204 No Content\r\nStream-Next-Offset: 1\r\n\r\n\
            HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello\
            HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: v\r\n\r\n\
            HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n";
        let expected = vec![
            (204, vec![]),
            (200, b"hello".to_vec()),
            (200, b"abcde".to_vec()),
            (201, vec![]),
        ];
        for step in 1..bytes.len() {
            assert_eq!(run(bytes, step).as_ref(), Ok(&expected), "step {step}");
        }
    }

    #[test]
    fn malformed_framing_is_an_error() {
        assert!(run(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", 7).is_err());
        assert!(run(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", 7).is_err());
        assert!(
            run(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcXX",
                99
            )
            .is_err()
        );
    }

    #[test]
    fn a_reader_that_does_not_advance_is_an_error() {
        let head = Head {
            status: 200,
            next_offset: Some("5".into()),
            ..Head::default()
        };
        assert!(next_read(&head, "5").is_err());
        assert_eq!(next_read(&head, "4"), Ok(Some("5".to_owned())));
        let done = Head {
            up_to_date: true,
            ..head
        };
        assert_eq!(next_read(&done, "4"), Ok(None));
    }
}
