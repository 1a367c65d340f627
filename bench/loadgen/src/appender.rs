//! One connection that appends: what it sends, what is outstanding on it, which answers came.
//!
//! The modes that append decide when to send; this file knows how. Answers arrive in the order of
//! the requests, so each answer is settled in the connection's ledger against the oldest
//! outstanding request, and nothing is ever counted twice.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Instant;

use crate::http::{Event, ResponseReader};
use crate::json::Object;
use crate::payload::{Payloads, Tag};
use crate::sys::Poller;
use crate::targets::CONTENT_TYPE;
use crate::verify::Ledger;
use crate::wire::{Arrival, Wire};

const INPUT_BYTES: usize = 64 * 1024;
/// The answer of a server that declines for now.
pub const BUSY: u16 = 503;

/// What all connections of a run share: the request heads, one per stream, and the bodies.
pub struct Requests {
    pub server: SocketAddr,
    pub payloads: Payloads,
    heads: Vec<Vec<u8>>,
    end_of_head: memchr::memmem::Finder<'static>,
}

impl Requests {
    /// All bodies of a run have one length, so a head is written once per stream.
    pub fn new(server: SocketAddr, payloads: Payloads, targets: &[String]) -> Self {
        let length = payloads.length();
        let head = |target: &String| {
            format!(
                "POST {target} HTTP/1.1\r\nHost: {server}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\n\r\n"
            )
            .into_bytes()
        };
        Self {
            server,
            heads: targets.iter().map(head).collect(),
            payloads,
            end_of_head: memchr::memmem::Finder::new(b"\r\n\r\n"),
        }
    }

    pub fn streams(&self) -> usize {
        self.heads.len()
    }
}

/// Answers that were not 2xx, by status.
#[derive(Default)]
pub struct Statuses {
    counts: BTreeMap<u16, u64>,
}

impl Statuses {
    pub fn add(&mut self, status: u16) {
        *self.counts.entry(status).or_default() += 1;
    }

    pub fn merge(&mut self, other: &Self) {
        for (status, count) in &other.counts {
            *self.counts.entry(*status).or_default() += count;
        }
    }

    /// How often the server declined for now.
    pub fn busy(&self) -> u64 {
        self.counts.get(&BUSY).copied().unwrap_or(0)
    }

    /// All other answers that were not 2xx.
    pub fn refused(&self) -> u64 {
        self.counts.values().sum::<u64>() - self.busy()
    }

    /// `{"400":3,"503":17}`
    pub fn to_json(&self) -> String {
        let counts = self.counts.iter();
        counts
            .fold(Object::new(), |object, (status, count)| {
                object.integer(&status.to_string(), *count)
            })
            .finish()
    }
}

/// One answer: its status and when its request was sent or due.
pub struct Answer {
    pub status: u16,
    pub since: Instant,
}

impl Answer {
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

pub struct Appender {
    wire: Wire,
    pub ledger: Ledger,
    /// When each outstanding request was sent (closed loop) or due (open loop).
    outstanding: VecDeque<Instant>,
    /// Used while an answer with a body is being read; the fast path never needs it.
    reader: ResponseReader,
    slow_status: u16,
    pub broken: bool,
}

impl Appender {
    pub fn open(
        server: SocketAddr,
        poller: &Poller,
        token: usize,
        ledger: Ledger,
    ) -> Result<Self, String> {
        Ok(Self {
            wire: Wire::open(server, poller, token, INPUT_BYTES)?,
            ledger,
            outstanding: VecDeque::new(),
            reader: ResponseReader::new(),
            slow_status: 0,
            broken: false,
        })
    }

    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Requests that were sent and never answered, by when they were sent or due.
    pub fn unanswered(&self) -> impl Iterator<Item = Instant> {
        self.outstanding.iter().copied()
    }

    /// Builds the next request; `since` is what its latency counts from.
    pub fn append(&mut self, requests: &Requests, since: Instant) {
        let stream = self.ledger.stream_of(self.ledger.sent);
        self.wire.out.extend_from_slice(&requests.heads[stream]);
        let tag = Tag {
            connection: self.ledger.connection,
            sequence: self.ledger.sent,
        };
        requests.payloads.append_to(&mut self.wire.out, tag);
        self.ledger.sent += 1;
        self.outstanding.push_back(since);
    }

    pub fn flush(&mut self, poller: &Poller) -> Result<(), String> {
        self.wire.flush(poller)
    }

    /// Reads once and hands over every complete answer with the moment of the read.
    pub fn receive(
        &mut self,
        requests: &Requests,
        mut settled: impl FnMut(Answer, Instant),
    ) -> Result<(), String> {
        match self.wire.receive()? {
            Arrival::Bytes(_) => {}
            Arrival::Nothing => return Ok(()),
            Arrival::Closed => return Err("closed by the server".to_owned()),
        }
        let now = Instant::now();
        loop {
            let bytes = self.wire.arrived();
            // Nearly every answer is 204 without a body: find its end and look no further.
            if self.reader.is_between_responses() && bytes.starts_with(b"HTTP/1.1 204") {
                let Some(end) = requests.end_of_head.find(bytes) else {
                    return Ok(());
                };
                self.wire.consume(end + 4);
                settled(self.settle(204)?, now);
                continue;
            }
            let (used, event) = self.reader.next(bytes)?;
            let mut ended = false;
            match event {
                Event::NeedMore => {
                    self.wire.consume(used);
                    return Ok(());
                }
                Event::Head(head) => self.slow_status = head.status,
                Event::Body(_) => {}
                Event::End => ended = true,
            }
            self.wire.consume(used);
            if ended {
                settled(self.settle(self.slow_status)?, now);
            }
        }
    }

    fn settle(&mut self, status: u16) -> Result<Answer, String> {
        let since = self
            .outstanding
            .pop_front()
            .ok_or("an answer that nobody asked for")?;
        self.ledger.settle(status);
        Ok(Answer { status, since })
    }
}

/// Streams of one connection: its share of them, or one shared stream if there are fewer streams.
pub fn streams_of(connection: usize, connections: usize, streams: usize) -> Vec<usize> {
    if streams < connections {
        return vec![connection % streams];
    }
    (connection..streams).step_by(connections).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stream_belongs_to_one_connection_if_there_are_enough() {
        let mut owned: Vec<usize> = (0..3)
            .flat_map(|connection| streams_of(connection, 3, 8))
            .collect();
        owned.sort_unstable();
        assert_eq!(owned, (0..8).collect::<Vec<_>>());
        assert_eq!(streams_of(5, 8, 4), vec![1]);
    }

    #[test]
    fn busy_answers_are_counted_apart() {
        let (mut all, mut more) = (Statuses::default(), Statuses::default());
        [503, 400, 503].into_iter().for_each(|one| all.add(one));
        [503, 500].into_iter().for_each(|one| more.add(one));
        all.merge(&more);
        assert_eq!((all.busy(), all.refused()), (3, 2));
        assert_eq!(all.to_json(), "{\"400\":1,\"500\":1,\"503\":3}");
    }
}
