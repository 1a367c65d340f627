//! Reading back: is every acknowledged payload there, once, and in order per connection?
//!
//! A connection's sequences go round its streams in turn, and its answers arrive in order, so what
//! was acknowledged is known exactly. Within one stream the sequences of one connection must rise
//! strictly (that excludes duplicates and disorder); a skipped sequence must not have been
//! acknowledged; one that was refused with 4xx must not be there at all.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Instant;

use crate::http::Client;
use crate::json::Object;
use crate::payload::{Payloads, checksum};

/// Complaints kept for the report; further ones are counted only.
const MAX_COMPLAINTS: usize = 10;

/// What one connection knows about its own appends when the load ends.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub connection: u32,
    /// Streams of this connection; sequence `n` went to `streams[n % streams.len()]`.
    pub streams: Vec<usize>,
    /// Sequences below this were answered.
    pub answered: u64,
    /// Sequences below this were sent (those from `answered` on have an unknown outcome).
    pub sent: u64,
    /// Answered with 4xx: must be absent.
    pub refused: BTreeSet<u64>,
    /// Answered with anything else that is not 2xx: may be there at most once.
    pub unknown: BTreeSet<u64>,
}

impl Ledger {
    /// Takes note of the next answer.
    pub fn settle(&mut self, status: u16) {
        let sequence = self.answered;
        self.answered += 1;
        match status {
            200..=299 => {}
            400..=499 => {
                self.refused.insert(sequence);
            }
            _ => {
                self.unknown.insert(sequence);
            }
        }
    }

    pub fn stream_of(&self, sequence: u64) -> usize {
        self.streams[(sequence % self.streams.len() as u64) as usize]
    }

    fn is_acknowledged(&self, sequence: u64) -> bool {
        sequence < self.answered
            && !self.refused.contains(&sequence)
            && !self.unknown.contains(&sequence)
    }

    pub fn acknowledged(&self) -> u64 {
        self.answered - (self.refused.len() + self.unknown.len()) as u64
    }

    /// First sequence of this connection in `stream`.
    fn first_in(&self, stream: usize) -> Option<u64> {
        self.streams
            .iter()
            .position(|own| *own == stream)
            .map(|index| index as u64)
    }
}

/// Checks the payloads of one stream in the order in which they are read.
pub struct StreamCheck<'a> {
    stream: usize,
    payloads: &'a Payloads,
    ledgers: &'a BTreeMap<u32, Ledger>,
    /// The next sequence that a connection may show here.
    expected: BTreeMap<u32, u64>,
    carry: Vec<u8>,
    scratch: Vec<u8>,
}

#[derive(Default)]
pub struct Findings {
    pub payloads: u64,
    pub bytes: u64,
    pub acknowledged_present: u64,
    pub unacknowledged_present: u64,
    pub missing: u64,
    pub disordered: u64,
    pub foreign: u64,
    /// Sum of the checksums of all payloads of this run, whatever their order.
    pub checksum: u64,
    pub complaints: Vec<String>,
}

impl Findings {
    fn complain(&mut self, text: String) {
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints.push(text);
        }
    }

    pub fn is_clean(&self) -> bool {
        self.missing == 0 && self.disordered == 0 && self.foreign == 0
    }
}

impl<'a> StreamCheck<'a> {
    pub fn new(stream: usize, payloads: &'a Payloads, ledgers: &'a BTreeMap<u32, Ledger>) -> Self {
        let expected = ledgers
            .values()
            .filter_map(|ledger| Some((ledger.connection, ledger.first_in(stream)?)))
            .collect();
        Self {
            stream,
            payloads,
            ledgers,
            expected,
            carry: Vec::new(),
            scratch: Vec::new(),
        }
    }

    pub fn feed(&mut self, mut bytes: &[u8], findings: &mut Findings) {
        let length = self.payloads.length();
        findings.bytes += bytes.len() as u64;
        if !self.carry.is_empty() {
            let take = bytes.len().min(length - self.carry.len());
            self.carry.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.carry.len() < length {
                return;
            }
            let whole = std::mem::take(&mut self.carry);
            self.payload(&whole, findings);
        }
        let mut pieces = bytes.chunks_exact(length);
        for piece in &mut pieces {
            self.payload(piece, findings);
        }
        self.carry.extend_from_slice(pieces.remainder());
    }

    fn payload(&mut self, bytes: &[u8], findings: &mut Findings) {
        findings.payloads += 1;
        let tag = self.payloads.recognise(bytes, &mut self.scratch);
        let place = tag.and_then(|tag| {
            let ledger = self.ledgers.get(&tag.connection)?;
            let here = tag.sequence < ledger.sent && ledger.stream_of(tag.sequence) == self.stream;
            let expected = self.expected.get_mut(&tag.connection)?;
            here.then_some((tag.sequence, ledger, expected))
        });
        let Some((sequence, ledger, expected)) = place else {
            findings.foreign += 1;
            let text = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
            findings.complain(format!(
                "stream {}: not a payload of this place: {text:?}",
                self.stream
            ));
            return;
        };
        if sequence < *expected {
            findings.disordered += 1;
            findings.complain(format!(
                "stream {}: connection {} sequence {sequence} again or late",
                self.stream, ledger.connection
            ));
            return;
        }
        findings.checksum = findings.checksum.wrapping_add(checksum(bytes));
        let skipped = *expected..sequence;
        *expected = sequence + ledger.streams.len() as u64;
        if ledger.refused.contains(&sequence) {
            findings.foreign += 1;
            findings.complain(format!(
                "stream {}: refused sequence {sequence} is there",
                self.stream
            ));
        } else if ledger.is_acknowledged(sequence) {
            findings.acknowledged_present += 1;
        } else {
            findings.unacknowledged_present += 1;
        }
        report_missing(self.stream, ledger, skipped, findings);
    }

    pub fn finish(self, findings: &mut Findings) {
        if !self.carry.is_empty() {
            findings.foreign += 1;
            findings.complain(format!("stream {}: ends inside a payload", self.stream));
        }
        for (connection, expected) in &self.expected {
            let ledger = &self.ledgers[connection];
            report_missing(self.stream, ledger, *expected..ledger.answered, findings);
        }
    }
}

/// Counts the acknowledged sequences in `skipped` (which starts at one of this stream's own).
fn report_missing(
    stream: usize,
    ledger: &Ledger,
    skipped: std::ops::Range<u64>,
    findings: &mut Findings,
) {
    for sequence in skipped.step_by(ledger.streams.len()) {
        if ledger.is_acknowledged(sequence) {
            findings.missing += 1;
            findings.complain(format!(
                "stream {stream}: connection {} sequence {sequence} acknowledged but missing",
                ledger.connection
            ));
        }
    }
}

/// Reads all `targets` back and returns the findings as JSON with whether they are clean.
pub fn read_back(
    server: SocketAddr,
    targets: &[String],
    payloads: &Payloads,
    ledgers: &BTreeMap<u32, Ledger>,
) -> Result<(String, bool), String> {
    let started = Instant::now();
    let mut client = Client::connect(server).map_err(|error| format!("verify: {error}"))?;
    let mut findings = Findings::default();
    for (stream, target) in targets.iter().enumerate() {
        let mut check = StreamCheck::new(stream, payloads, ledgers);
        client
            .read_stream(target, |bytes| check.feed(bytes, &mut findings))
            .map_err(|error| format!("verify {target}: {error}"))?;
        check.finish(&mut findings);
    }
    let acknowledged: u64 = ledgers.values().map(Ledger::acknowledged).sum();
    let clean = findings.is_clean() && findings.acknowledged_present == acknowledged;
    let json = Object::new()
        .boolean("clean", clean)
        .integer("acknowledged", acknowledged)
        .integer("acknowledged_present", findings.acknowledged_present)
        .integer("unacknowledged_present", findings.unacknowledged_present)
        .integer("missing", findings.missing)
        .integer("repeated_or_disordered", findings.disordered)
        .integer("foreign", findings.foreign)
        .integer("payloads", findings.payloads)
        .integer("bytes", findings.bytes)
        .text("checksum", &format!("{:016x}", findings.checksum))
        .number("seconds", started.elapsed().as_secs_f64())
        .texts("complaints", &findings.complaints)
        .finish();
    Ok((json, clean))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::Tag;

    fn ledgers() -> BTreeMap<u32, Ledger> {
        // Connection 0 owns streams 0 and 2, connection 1 shares stream 0; 4 of 6 sent are answered.
        let first = Ledger {
            connection: 0,
            streams: vec![0, 2],
            answered: 4,
            sent: 6,
            ..Ledger::default()
        };
        let second = Ledger {
            connection: 1,
            streams: vec![0],
            answered: 2,
            sent: 2,
            ..Ledger::default()
        };
        BTreeMap::from([(0, first), (1, second)])
    }

    fn check(ledgers: &BTreeMap<u32, Ledger>, tags: &[(u32, u64)], cut: usize) -> Findings {
        let payloads = Payloads::new(1, 64).unwrap();
        let mut bytes = Vec::new();
        for (connection, sequence) in tags {
            payloads.append_to(
                &mut bytes,
                Tag {
                    connection: *connection,
                    sequence: *sequence,
                },
            );
        }
        let mut findings = Findings::default();
        let mut check = StreamCheck::new(0, &payloads, ledgers);
        bytes
            .chunks(cut)
            .for_each(|piece| check.feed(piece, &mut findings));
        check.finish(&mut findings);
        findings
    }

    #[test]
    fn a_complete_stream_is_clean_however_it_is_cut() {
        for cut in [1, 7, 63, 64, 65, 1000] {
            let found = check(&ledgers(), &[(0, 0), (1, 0), (1, 1), (0, 2)], cut);
            assert!(
                found.is_clean() && found.acknowledged_present == 4,
                "{:?}",
                found.complaints
            );
        }
    }

    #[test]
    fn an_unacknowledged_payload_may_be_there_once_only() {
        let once = check(&ledgers(), &[(0, 0), (1, 0), (1, 1), (0, 2), (0, 4)], 64);
        assert!(once.is_clean());
        assert_eq!(once.unacknowledged_present, 1);
        let twice = check(
            &ledgers(),
            &[(0, 0), (1, 0), (1, 1), (0, 2), (0, 4), (0, 4)],
            64,
        );
        assert_eq!(twice.disordered, 1);
    }

    #[test]
    fn losses_duplicates_disorder_and_strangers_are_found() {
        assert_eq!(check(&ledgers(), &[(0, 0), (1, 0), (1, 1)], 64).missing, 1);
        assert_eq!(check(&ledgers(), &[(0, 2), (1, 0), (1, 1)], 64).missing, 1);
        assert_eq!(
            check(&ledgers(), &[(0, 0), (0, 0), (0, 2), (1, 0), (1, 1)], 64).disordered,
            1
        );
        assert_eq!(
            check(&ledgers(), &[(0, 2), (0, 0), (1, 0), (1, 1)], 64).disordered,
            1
        );
        // Sequence 1 of connection 0 belongs to stream 2; sequence 8 was never sent.
        assert_eq!(
            check(&ledgers(), &[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], 64).foreign,
            1
        );
        assert_eq!(
            check(&ledgers(), &[(0, 0), (0, 2), (0, 8), (1, 0), (1, 1)], 64).foreign,
            1
        );
        // A refused payload must be absent, and its absence is no loss.
        let mut refused = ledgers();
        refused.get_mut(&0).unwrap().refused.insert(2);
        assert!(check(&refused, &[(0, 0), (1, 0), (1, 1)], 64).is_clean());
        assert_eq!(
            check(&refused, &[(0, 0), (0, 2), (1, 0), (1, 1)], 64).foreign,
            1
        );
    }

    #[test]
    fn only_success_is_an_acknowledgement() {
        let mut ledger = Ledger {
            streams: vec![0],
            ..Ledger::default()
        };
        [204, 409, 503, 200]
            .into_iter()
            .for_each(|status| ledger.settle(status));
        assert_eq!((ledger.answered, ledger.acknowledged()), (4, 2));
        assert_eq!(ledger.refused, BTreeSet::from([1]));
        assert_eq!(ledger.unknown, BTreeSet::from([2]));
    }

    #[test]
    fn a_stream_that_ends_inside_a_payload_is_found() {
        let payloads = Payloads::new(1, 64).unwrap();
        let ledgers = ledgers();
        let mut findings = Findings::default();
        let mut check = StreamCheck::new(0, &payloads, &ledgers);
        check.feed(b"0000", &mut findings);
        check.finish(&mut findings);
        assert_eq!(findings.foreign, 1);
    }
}
