//! Modes `fill` and `fill-verify`: a given number of records, and reading exactly these back.
//!
//! They are two modes because the server is killed and started between them. What `fill` writes
//! follows from its options alone, so `fill-verify` with the same options knows every byte: each
//! record must be there once and in order, and the sum of the checksums must be the one that
//! `fill` printed. Any answer that is not 2xx ends the run: a log with holes measures nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::appender::{Appender, Requests, streams_of};
use crate::histogram::Histogram;
use crate::json::Object;
use crate::options::Options;
use crate::payload::{Payloads, Tag, checksum};
use crate::sys::{self, Poller};
use crate::targets;
use crate::verify::{self, Ledger};

const STALL: Duration = Duration::from_secs(30);

struct Config {
    durability: String,
    count: u64,
    connections: usize,
    pipeline: usize,
    targets: Vec<String>,
    requests: Requests,
}

fn config(mut options: Options) -> Result<Config, String> {
    let server = options.take_server()?;
    let connections = options.take_count("connections", 64)?;
    let streams = options.take_count("streams", 64)?;
    let prefix: String = options.take("prefix", "bench/fill".to_owned())?;
    let payloads = Payloads::new(options.take("run", 1)?, options.take_count("body", 1024)?)?;
    let targets = targets::targets(&prefix, streams);
    let config = Config {
        durability: options.take("durability", String::new())?,
        count: options.take_count("count", 1_000_000)? as u64,
        connections,
        pipeline: options.take_count("pipeline", 32)?,
        requests: Requests::new(server, payloads, &targets),
        targets,
    };
    options.finish()?;
    Ok(config)
}

impl Config {
    /// How many records connection number `connection` writes.
    fn share(&self, connection: usize) -> u64 {
        let connections = self.connections as u64;
        self.count / connections + u64::from((connection as u64) < self.count % connections)
    }

    fn ledger(&self, connection: usize) -> Ledger {
        Ledger {
            connection: connection as u32,
            streams: streams_of(connection, self.connections, self.requests.streams()),
            ..Ledger::default()
        }
    }

    /// The sum over everything that this run writes.
    fn checksum(&self) -> u64 {
        let (mut sum, mut bytes) = (0u64, Vec::new());
        for connection in 0..self.connections {
            for sequence in 0..self.share(connection) {
                bytes.clear();
                let tag = Tag {
                    connection: connection as u32,
                    sequence,
                };
                self.requests.payloads.append_to(&mut bytes, tag);
                sum = sum.wrapping_add(checksum(&bytes));
            }
        }
        sum
    }
}

pub fn run(options: Options) -> Result<(String, bool), String> {
    let config = config(options)?;
    let requests = &config.requests;
    // Before the writing: a quiet server may tidy up its log, and the kill should come at once.
    let checksum = config.checksum();
    targets::create(requests.server, &config.targets, &config.durability)?;
    let mut poller = Poller::new().map_err(|error| format!("epoll: {error}"))?;
    let mut connections = Vec::with_capacity(config.connections);
    for index in 0..config.connections {
        let ledger = config.ledger(index);
        connections.push(Appender::open(requests.server, &poller, index, ledger)?);
    }
    let (mut latency, mut stored, mut failed) = (Histogram::new(), 0u64, None);
    let mut ready = Vec::new();
    let start = Instant::now();
    for (index, connection) in connections.iter_mut().enumerate() {
        refill(&config, connection, config.share(index), &poller)?;
    }
    while stored < config.count {
        poller
            .wait(STALL, &mut ready)
            .map_err(|error| format!("epoll: {error}"))?;
        if ready.is_empty() {
            let seconds = STALL.as_secs();
            return Err(format!("no answer for {seconds} s after {stored} records"));
        }
        for event in &ready {
            let connection = &mut connections[event.token];
            if event.readable {
                connection.receive(requests, |answer, now| {
                    stored += 1;
                    latency.record((now - answer.since).as_nanos() as u64);
                    if !answer.is_success() {
                        failed = Some(answer.status);
                    }
                })?;
            }
            if let Some(status) = failed {
                return Err(format!("append answered {status} after {stored} records"));
            }
            refill(&config, connection, config.share(event.token), &poller)?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes = stored * requests.payloads.length() as u64;
    let json = Object::new()
        .text("mode", "fill")
        .boolean("ok", true)
        .text("durability", &config.durability)
        .integer("acknowledged", stored)
        .integer("bytes", bytes)
        .text("checksum", &format!("{checksum:016x}"))
        .integer("streams", config.targets.len() as u64)
        .integer("connections", config.connections as u64)
        .number("seconds", seconds)
        .number("per_second", stored as f64 / seconds)
        .raw("latency_us", &latency.to_json())
        .number("load_cpu_seconds", sys::processor_seconds())
        .finish();
    Ok((json, true))
}

fn refill(
    config: &Config,
    connection: &mut Appender,
    share: u64,
    poller: &Poller,
) -> Result<(), String> {
    let now = Instant::now();
    while connection.ledger.sent < share && connection.outstanding() < config.pipeline {
        connection.append(&config.requests, now);
    }
    connection.flush(poller)
}

pub fn verify(options: Options) -> Result<(String, bool), String> {
    let config = config(options)?;
    let ledgers: BTreeMap<u32, Ledger> = (0..config.connections)
        .map(|connection| {
            let mut ledger = config.ledger(connection);
            ledger.sent = config.share(connection);
            ledger.answered = ledger.sent;
            (ledger.connection, ledger)
        })
        .collect();
    let requests = &config.requests;
    let (verified, ok) = verify::read_back(
        requests.server,
        &config.targets,
        &requests.payloads,
        &ledgers,
    )?;
    let json = Object::new()
        .text("mode", "fill-verify")
        .boolean("ok", ok)
        .raw("verify", &verified)
        .finish();
    Ok((json, ok))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_are_the_whole() {
        let options = "--url 127.0.0.1:80 --count 1003 --connections 10 --streams 4 --body 64";
        let parsed = Options::parse(options.split_whitespace().map(str::to_owned)).unwrap();
        let config = config(parsed).unwrap();
        let shares: Vec<u64> = (0..10).map(|index| config.share(index)).collect();
        assert_eq!(shares.iter().sum::<u64>(), 1003);
        assert_eq!((shares[2], shares[3]), (101, 100));
        assert_ne!(config.checksum(), 0);
    }
}
