//! Mode `append`: appends of one size over many connections, closed loop or at a fixed rate.
//!
//! Closed loop: each connection keeps `pipeline` requests outstanding. With `--refill burst`
//! (default) the next `pipeline` requests leave in one write when all answers are in, which suits
//! a server that answers one by one; `window` replaces each answered request at once.
//! Open loop (`--rate`): request i is due at start + i / rate, whatever the server does; latency
//! counts from when it was due, so a stalled server cannot hide the requests it delayed.
//!
//! Only 2xx answers within the measuring window (after the warm-up, before the end) are counted;
//! everything sent is verified afterwards. A 503 is counted apart; it fails the run unless
//! `--busy allow` says that the server may decline.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::appender::{Appender, Requests, Statuses, streams_of};
use crate::histogram::Histogram;
use crate::json::Object;
use crate::options::Options;
use crate::payload::Payloads;
use crate::slices::Slices;
use crate::sys::{self, Poller};
use crate::targets;
use crate::verify::{self, Ledger};

/// How long to wait for outstanding answers after the last request.
const DRAIN: Duration = Duration::from_secs(20);
/// Complaints kept per thread.
const MAX_COMPLAINTS: usize = 10;

struct Config {
    durability: String,
    connections: usize,
    threads: usize,
    pipeline: usize,
    refill_window: bool,
    busy_allowed: bool,
    /// Requests per second over all connections; 0 = closed loop.
    rate: f64,
    warmup: Duration,
    duration: Duration,
    /// Width of the latency slices; zero = none.
    slice: Duration,
}

struct Connection {
    appender: Appender,
    /// Open loop: requests that are due but not sent because the pipeline is full.
    due: VecDeque<Instant>,
}

struct ThreadResult {
    counted: u64,
    latency: Histogram,
    slices: Slices,
    statuses: Statuses,
    ledgers: Vec<Ledger>,
    broken: u64,
    unanswered: u64,
    complaints: Vec<String>,
}

struct Worker<'a> {
    config: &'a Config,
    requests: &'a Requests,
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
    let payloads = Payloads::new(
        options.take("run", std::process::id())?,
        options.take_count("body", 256)?,
    )?;
    let prefix: String = options.take("prefix", format!("bench/{}", std::process::id()))?;
    let config = Config {
        durability: options.take("durability", String::new())?,
        connections,
        threads: options.take_count("threads", 1)?.min(connections),
        pipeline: options.take_count("pipeline", 1)?,
        refill_window: options.take_choice("refill", ["burst", "window"])? == "window",
        busy_allowed: options.take_choice("busy", ["fail", "allow"])? == "allow",
        rate: options.take_seconds("rate", 0.0)?,
        warmup: Duration::from_secs_f64(options.take_seconds("warmup", 1.0)?),
        duration: Duration::from_secs_f64(options.take_seconds("seconds", 10.0)?),
        slice: Duration::from_millis(options.take("slice-ms", 0)?),
    };
    options.finish()?;

    let targets = targets::targets(&prefix, streams);
    targets::create(server, &targets, &config.durability)?;
    let requests = Requests::new(server, payloads, &targets);
    let result = run_threads(&config, &requests)?;
    report(&config, &requests, &targets, result)
}

fn run_threads(config: &Config, requests: &Requests) -> Result<ThreadResult, String> {
    let mut workers = Vec::new();
    for thread in 0..config.threads {
        let own: Vec<Ledger> = (thread..config.connections)
            .step_by(config.threads)
            .map(|connection| Ledger {
                connection: connection as u32,
                streams: streams_of(connection, config.connections, requests.streams()),
                ..Ledger::default()
            })
            .collect();
        workers.push(Worker::new(config, requests, own)?);
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
            statuses: Statuses::default(),
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
        self.statuses.merge(&other.statuses);
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
    fn new(config: &'a Config, requests: &'a Requests, own: Vec<Ledger>) -> Result<Self, String> {
        let poller = Poller::new().map_err(|error| format!("epoll: {error}"))?;
        let mut connections = Vec::with_capacity(own.len());
        for (token, ledger) in own.into_iter().enumerate() {
            connections.push(Connection {
                appender: Appender::open(requests.server, &poller, token, ledger)?,
                due: VecDeque::new(),
            });
        }
        let now = Instant::now();
        Ok(Self {
            config,
            requests,
            poller,
            connections,
            measure_from: now,
            stop_at: now,
            result: ThreadResult::new(config.slice),
        })
    }

    fn run(mut self, start: Instant) -> Result<ThreadResult, String> {
        let rate = self.config.rate / self.config.threads as f64;
        let open_loop = rate > 0.0;
        let due_at = |index: u64| start + Duration::from_secs_f64(index as f64 / rate);
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
                while due_at(issued) <= now.min(self.stop_at) {
                    let index = issued as usize % self.connections.len();
                    self.connections[index].due.push_back(due_at(issued));
                    self.pump(index, now);
                    issued += 1;
                }
                wake = wake.min(due_at(issued).max(now));
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
        self.connections.iter().all(|one| {
            one.appender.broken || (one.appender.outstanding() == 0 && one.due.is_empty())
        })
    }

    /// Builds and sends the requests that connection `index` may send now.
    fn pump(&mut self, index: usize, now: Instant) {
        let connection = &mut self.connections[index];
        let appender = &mut connection.appender;
        if appender.broken {
            return;
        }
        let open_loop = self.config.rate > 0.0;
        let may_refill = open_loop || self.config.refill_window || appender.outstanding() == 0;
        while may_refill && appender.outstanding() < self.config.pipeline {
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
            appender.append(self.requests, since);
        }
        if let Err(error) = appender.flush(&self.poller) {
            self.break_connection(index, error);
        }
    }

    fn handle(&mut self, index: usize, readable: bool) {
        if self.connections[index].appender.broken {
            return;
        }
        if readable {
            let (from, until, result) = (self.measure_from, self.stop_at, &mut self.result);
            let appender = &mut self.connections[index].appender;
            let outcome = appender.receive(self.requests, |answer, now| {
                if !answer.is_success() {
                    result.statuses.add(answer.status);
                    result.complain(format!("append answered {}", answer.status));
                } else if now >= from && now < until {
                    result.counted += 1;
                    let waited = (now - answer.since).as_nanos() as u64;
                    result.latency.record(waited);
                    result.slices.record(now, waited);
                }
            });
            if let Err(error) = outcome {
                return self.break_connection(index, error);
            }
        }
        self.pump(index, Instant::now());
    }

    fn break_connection(&mut self, index: usize, error: String) {
        let appender = &mut self.connections[index].appender;
        appender.broken = true;
        self.result.broken += 1;
        let connection = appender.ledger.connection;
        self.result
            .complain(format!("connection {connection}: {error}"));
    }

    fn finish(mut self) -> ThreadResult {
        for connection in self.connections {
            let ledger = connection.appender.ledger;
            self.result.unanswered += ledger.sent - ledger.answered;
            self.result.ledgers.push(ledger);
        }
        self.result
    }
}

fn report(
    config: &Config,
    requests: &Requests,
    targets: &[String],
    result: ThreadResult,
) -> Result<(String, bool), String> {
    let cpu = sys::processor_seconds();
    let (busy, refused) = (result.statuses.busy(), result.statuses.refused());
    let ledgers: BTreeMap<u32, Ledger> = result
        .ledgers
        .into_iter()
        .map(|ledger| (ledger.connection, ledger))
        .collect();
    let (verified, clean) =
        verify::read_back(requests.server, targets, &requests.payloads, &ledgers)?;
    let ok = clean
        && refused == 0
        && (busy == 0 || config.busy_allowed)
        && result.broken == 0
        && result.unanswered == 0
        && result.counted > 0;
    let window = config.duration.as_secs_f64();
    let json = Object::new()
        .text("mode", "append")
        .boolean("ok", ok)
        .text("durability", &config.durability)
        .integer("connections", config.connections as u64)
        .integer("pipeline", config.pipeline as u64)
        .integer("streams", targets.len() as u64)
        .integer("body_bytes", requests.payloads.length() as u64)
        .integer("threads", config.threads as u64)
        .number("rate", config.rate)
        .number("window_seconds", window)
        .integer("counted", result.counted)
        .number("per_second", result.counted as f64 / window)
        .integer("busy", busy)
        .integer("refused", refused)
        .raw("statuses", &result.statuses.to_json())
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
