//! Mode `append`: appends of one size over many connections, closed loop or at a fixed rate.
//!
//! Closed loop: each connection keeps `pipeline` requests outstanding. With `--refill burst`
//! (default) the next `pipeline` requests leave in one write when all answers are in, which suits
//! a server that answers one by one; `window` replaces each answered request at once.
//! Open loop (`--rate`): request i is due at start + i / rate, whatever the server does; latency
//! counts from when it was due, so a stalled server cannot hide the requests it delayed.
//!
//! Only answers within the measuring window (after the warm-up, before the end) are counted;
//! everything sent is verified afterwards.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::histogram::Histogram;
use crate::http::{Client, Event, ResponseReader};
use crate::json::Object;
use crate::options::Options;
use crate::payload::{Payloads, Tag};
use crate::slices::Slices;
use crate::sys::{self, Poller};
use crate::verify::{self, Ledger};
use crate::wire::{Arrival, Wire};

const CONTENT_TYPE: &str = "application/octet-stream";
const INPUT_BYTES: usize = 64 * 1024;
/// How long to wait for outstanding answers after the last request.
const DRAIN: Duration = Duration::from_secs(20);
/// Complaints kept per thread.
const MAX_COMPLAINTS: usize = 10;

struct Config {
    server: SocketAddr,
    pipeline: usize,
    refill_window: bool,
    /// Requests per second over all connections of one thread; 0 = closed loop.
    rate_per_thread: f64,
    warmup: Duration,
    duration: Duration,
    /// Width of the latency slices; zero = none.
    slice: Duration,
}

struct Connection {
    wire: Wire,
    ledger: Ledger,
    /// When each outstanding request was sent (closed loop) or due (open loop).
    outstanding: VecDeque<Instant>,
    /// Open loop: requests that are due but not sent because the pipeline is full.
    due: VecDeque<Instant>,
    /// Set while an answer with a body is being read; the fast path never needs it.
    reader: ResponseReader,
    slow_status: u16,
    broken: bool,
}

struct ThreadResult {
    counted: u64,
    latency: Histogram,
    slices: Slices,
    ledgers: Vec<Ledger>,
    broken: u64,
    unanswered: u64,
    complaints: Vec<String>,
}

struct Worker<'a> {
    config: &'a Config,
    payloads: &'a Payloads,
    heads: &'a [Vec<u8>],
    end_of_head: memchr::memmem::Finder<'static>,
    poller: Poller,
    connections: Vec<Connection>,
    measure_from: Instant,
    stop_at: Instant,
    result: ThreadResult,
}

pub fn run(mut options: Options) -> Result<(String, bool), String> {
    let server = options.take_server()?;
    let connections = options.take_count("connections", 64)?;
    let streams = options.take_count("streams", connections)?;
    let threads = options.take_count("threads", 1)?.min(connections);
    let rate: f64 = options.take_seconds("rate", 0.0)?;
    let payloads = Payloads::new(
        options.take("run", std::process::id())?,
        options.take_count("body", 256)?,
    )?;
    let prefix: String = options.take("prefix", format!("bench/{}", std::process::id()))?;
    let refill: String = options.take("refill", "burst".to_owned())?;
    let config = Config {
        server,
        pipeline: options.take_count("pipeline", 1)?,
        refill_window: match refill.as_str() {
            "burst" => false,
            "window" => true,
            other => return Err(format!("--refill must be burst or window, not {other:?}")),
        },
        rate_per_thread: rate / threads as f64,
        warmup: Duration::from_secs_f64(options.take_seconds("warmup", 1.0)?),
        duration: Duration::from_secs_f64(options.take_seconds("seconds", 10.0)?),
        slice: Duration::from_millis(options.take("slice-ms", 0)?),
    };
    options.finish()?;

    let targets: Vec<String> = (0..streams)
        .map(|stream| format!("/v1/stream/{prefix}/{stream}"))
        .collect();
    create_streams(server, &targets)?;
    let heads: Vec<Vec<u8>> = targets
        .iter()
        .map(|target| head_of(target, server, payloads.length()))
        .collect();
    let result = run_threads(&config, &payloads, &heads, connections, threads)?;
    report(
        &config,
        &payloads,
        &targets,
        connections,
        threads,
        rate,
        result,
    )
}

/// The request up to its body; all bodies of a run have one length.
fn head_of(target: &str, server: SocketAddr, length: usize) -> Vec<u8> {
    format!(
        "POST {target} HTTP/1.1\r\nHost: {server}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\n\r\n"
    )
    .into_bytes()
}

fn create_streams(server: SocketAddr, targets: &[String]) -> Result<(), String> {
    let mut client = Client::connect(server).map_err(|error| format!("cannot connect: {error}"))?;
    for target in targets {
        let head = client.call("PUT", target, Some(CONTENT_TYPE), b"")?;
        if head.status != 201 {
            return Err(format!("PUT {target} answered {}", head.status));
        }
    }
    Ok(())
}

/// Streams of one connection: its share of them, or one shared stream if there are fewer streams.
fn streams_of(connection: usize, connections: usize, streams: usize) -> Vec<usize> {
    if streams < connections {
        return vec![connection % streams];
    }
    (connection..streams).step_by(connections).collect()
}

fn run_threads(
    config: &Config,
    payloads: &Payloads,
    heads: &[Vec<u8>],
    connections: usize,
    threads: usize,
) -> Result<ThreadResult, String> {
    let mut workers = Vec::new();
    for thread in 0..threads {
        let own: Vec<Ledger> = (thread..connections)
            .step_by(threads)
            .map(|connection| Ledger {
                connection: connection as u32,
                streams: streams_of(connection, connections, heads.len()),
                ..Ledger::default()
            })
            .collect();
        workers.push(Worker::new(config, payloads, heads, own)?);
    }
    let start = Instant::now();
    for worker in &mut workers {
        worker.measure_from = start + config.warmup;
        worker.stop_at = worker.measure_from + config.duration;
        worker.result.slices.starts_at(worker.measure_from);
    }
    let results: Vec<Result<ThreadResult, String>> = std::thread::scope(|scope| {
        let handles: Vec<_> = workers
            .into_iter()
            .map(|worker| scope.spawn(move || worker.run(start)))
            .collect();
        let lost = || Err("a load thread panicked".to_owned());
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap_or_else(|_| lost()))
            .collect()
    });
    let mut total = ThreadResult::new(config.slice);
    for result in results {
        total.merge(result?);
    }
    Ok(total)
}

impl ThreadResult {
    fn new(slice: Duration) -> Self {
        Self {
            counted: 0,
            latency: Histogram::new(),
            slices: Slices::new(slice),
            ledgers: Vec::new(),
            broken: 0,
            unanswered: 0,
            complaints: Vec::new(),
        }
    }

    fn merge(&mut self, other: Self) {
        self.counted += other.counted;
        self.latency.merge(&other.latency);
        self.slices.merge(other.slices);
        self.ledgers.extend(other.ledgers);
        self.broken += other.broken;
        self.unanswered += other.unanswered;
        self.complaints.extend(other.complaints);
    }

    fn complain(&mut self, text: String) {
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints.push(text);
        }
    }
}

impl<'a> Worker<'a> {
    fn new(
        config: &'a Config,
        payloads: &'a Payloads,
        heads: &'a [Vec<u8>],
        own: Vec<Ledger>,
    ) -> Result<Self, String> {
        let poller = Poller::new().map_err(|error| format!("epoll: {error}"))?;
        let mut connections = Vec::with_capacity(own.len());
        for (token, ledger) in own.into_iter().enumerate() {
            connections.push(Connection {
                wire: Wire::open(config.server, &poller, token, INPUT_BYTES)?,
                ledger,
                outstanding: VecDeque::new(),
                due: VecDeque::new(),
                reader: ResponseReader::new(),
                slow_status: 0,
                broken: false,
            });
        }
        let now = Instant::now();
        Ok(Self {
            config,
            payloads,
            heads,
            end_of_head: memchr::memmem::Finder::new(b"\r\n\r\n"),
            poller,
            connections,
            measure_from: now,
            stop_at: now,
            result: ThreadResult::new(config.slice),
        })
    }

    fn run(mut self, start: Instant) -> Result<ThreadResult, String> {
        let open_loop = self.config.rate_per_thread > 0.0;
        let due_at = |index: u64, rate: f64| start + Duration::from_secs_f64(index as f64 / rate);
        let mut issued = 0u64;
        let mut ready = Vec::new();
        if !open_loop {
            (0..self.connections.len()).for_each(|index| self.pump(index, Instant::now()));
        }
        loop {
            let now = Instant::now();
            let mut wake = if now < self.stop_at {
                self.stop_at
            } else {
                self.stop_at + DRAIN
            };
            if now >= self.stop_at && (self.is_idle() || now >= wake) {
                break;
            }
            if open_loop {
                while due_at(issued, self.config.rate_per_thread) <= now.min(self.stop_at) {
                    let index = issued as usize % self.connections.len();
                    self.connections[index]
                        .due
                        .push_back(due_at(issued, self.config.rate_per_thread));
                    self.pump(index, now);
                    issued += 1;
                }
                wake = wake.min(due_at(issued, self.config.rate_per_thread).max(now));
            }
            self.poller
                .wait(wake - now, &mut ready)
                .map_err(|error| format!("epoll: {error}"))?;
            for event in &ready {
                self.handle(event.token, event.readable);
            }
        }
        Ok(self.finish())
    }

    fn is_idle(&self) -> bool {
        self.connections
            .iter()
            .all(|one| one.broken || (one.outstanding.is_empty() && one.due.is_empty()))
    }

    /// Builds and sends the requests that connection `index` may send now.
    fn pump(&mut self, index: usize, now: Instant) {
        let connection = &mut self.connections[index];
        if connection.broken {
            return;
        }
        let open_loop = self.config.rate_per_thread > 0.0;
        let may_refill =
            open_loop || self.config.refill_window || connection.outstanding.is_empty();
        while may_refill && connection.outstanding.len() < self.config.pipeline {
            let since = if open_loop {
                let Some(due) = connection.due.pop_front() else {
                    break;
                };
                due
            } else if now < self.stop_at {
                now
            } else {
                break;
            };
            let ledger = &mut connection.ledger;
            let stream = ledger.streams[(ledger.sent % ledger.streams.len() as u64) as usize];
            connection.wire.out.extend_from_slice(&self.heads[stream]);
            let tag = Tag {
                connection: ledger.connection,
                sequence: ledger.sent,
            };
            self.payloads.append_to(&mut connection.wire.out, tag);
            ledger.sent += 1;
            connection.outstanding.push_back(since);
        }
        if let Err(error) = connection.wire.flush(&self.poller) {
            self.break_connection(index, error);
        }
    }

    fn handle(&mut self, index: usize, readable: bool) {
        if self.connections[index].broken {
            return;
        }
        if readable {
            let outcome = match self.connections[index].wire.receive() {
                Ok(Arrival::Bytes(_)) => self.answers(index),
                Ok(Arrival::Nothing) => Ok(()),
                Ok(Arrival::Closed) => Err("closed by the server".to_owned()),
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                return self.break_connection(index, error);
            }
        }
        self.pump(index, Instant::now());
    }

    /// Takes all complete answers out of the input of connection `index`.
    fn answers(&mut self, index: usize) -> Result<(), String> {
        let now = Instant::now();
        loop {
            let connection = &mut self.connections[index];
            let bytes = connection.wire.arrived();
            // Nearly every answer is 204 without a body: find its end and look no further.
            if connection.reader.is_between_responses() && bytes.starts_with(b"HTTP/1.1 204") {
                let Some(end) = self.end_of_head.find(bytes) else {
                    return Ok(());
                };
                connection.wire.consume(end + 4);
                self.answered(index, 204, now)?;
                continue;
            }
            let (used, event) = connection.reader.next(bytes)?;
            let mut ended = false;
            match event {
                Event::NeedMore => {
                    connection.wire.consume(used);
                    return Ok(());
                }
                Event::Head(head) => connection.slow_status = head.status,
                Event::Body(_) => {}
                Event::End => ended = true,
            }
            connection.wire.consume(used);
            if ended {
                let status = connection.slow_status;
                self.answered(index, status, now)?;
            }
        }
    }

    fn answered(&mut self, index: usize, status: u16, now: Instant) -> Result<(), String> {
        let connection = &mut self.connections[index];
        let since = connection
            .outstanding
            .pop_front()
            .ok_or("an answer that nobody asked for")?;
        let sequence = connection.ledger.answered;
        connection.ledger.answered += 1;
        match status {
            200..=299 => {
                if now >= self.measure_from && now < self.stop_at {
                    self.result.counted += 1;
                    let waited = (now - since).as_nanos() as u64;
                    self.result.latency.record(waited);
                    self.result.slices.record(now, waited);
                }
                return Ok(());
            }
            400..=499 => connection.ledger.refused.insert(sequence),
            _ => connection.ledger.unknown.insert(sequence),
        };
        self.result.complain(format!("append answered {status}"));
        Ok(())
    }

    fn break_connection(&mut self, index: usize, error: String) {
        self.connections[index].broken = true;
        self.result.broken += 1;
        self.result.complain(format!(
            "connection {}: {error}",
            self.connections[index].ledger.connection
        ));
    }

    fn finish(mut self) -> ThreadResult {
        for connection in self.connections {
            self.result.unanswered += connection.ledger.sent - connection.ledger.answered;
            self.result.ledgers.push(connection.ledger);
        }
        self.result
    }
}

fn report(
    config: &Config,
    payloads: &Payloads,
    targets: &[String],
    connections: usize,
    threads: usize,
    rate: f64,
    result: ThreadResult,
) -> Result<(String, bool), String> {
    let cpu = sys::processor_seconds();
    let refused: usize = result
        .ledgers
        .iter()
        .map(|ledger| ledger.refused.len() + ledger.unknown.len())
        .sum();
    let ledgers: BTreeMap<u32, Ledger> = result
        .ledgers
        .into_iter()
        .map(|ledger| (ledger.connection, ledger))
        .collect();
    let (verified, clean) = verify::read_back(config.server, targets, payloads, &ledgers)?;
    let ok =
        clean && refused == 0 && result.broken == 0 && result.unanswered == 0 && result.counted > 0;
    let window = config.duration.as_secs_f64();
    let json = Object::new()
        .text("mode", "append")
        .boolean("ok", ok)
        .integer("connections", connections as u64)
        .integer("pipeline", config.pipeline as u64)
        .integer("streams", targets.len() as u64)
        .integer("body_bytes", payloads.length() as u64)
        .integer("threads", threads as u64)
        .number("rate", rate)
        .number("window_seconds", window)
        .integer("counted", result.counted)
        .number("per_second", result.counted as f64 / window)
        .integer("refused", refused as u64)
        .integer("broken_connections", result.broken)
        .integer("unanswered", result.unanswered)
        .raw("latency_us", &result.latency.to_json())
        .raw("latency_slices", &result.slices.to_json())
        .number("load_cpu_seconds", cpu)
        .texts("complaints", &result.complaints)
        .raw("verify", &verified)
        .finish();
    Ok((json, ok))
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
}
