//! Mode `mixed`: several open-loop loads on one server at a time, one durability class each.
//!
//! `--load memory:2000:16:50,fsync:5000:64` is class, appends per second, connections and, if given,
//! for how many microseconds before each request the thread spins instead of sleeping, because
//! waking up takes longer than many an append. Each load has a thread of its own, so that taking in a burst of answers of one class does not delay reading the
//! clock for another. Within a load, request i is due in the i-th interval of 1 / rate, at a place
//! that depends on i alone: the rate is exact and two loads do not march in step. What is due is
//! sent, whatever the server does; latency counts from when it was due. Requests are assigned to
//! the window by when they were due, and one that was never answered counts with the time waited,
//! a lower bound. How late the generator itself sent is reported beside it. `--realtime N` gives the
//! threads of the first N loads real-time priority (the system must allow it).

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::appender::{Appender, BUSY, Requests, Statuses};
use crate::histogram::Histogram;
use crate::json::Object;
use crate::options::Options;
use crate::payload::{Payloads, mixed_bits};
use crate::sys::{self, Poller};
use crate::targets;
use crate::verify::{self, Ledger};

/// How long to wait for outstanding answers after the last request.
const DRAIN: Duration = Duration::from_secs(20);
/// From opening the connections to the first request: all threads are up by then.
const LEAD: Duration = Duration::from_millis(100);
const MAX_COMPLAINTS: usize = 10;
const MAX_LOADS: usize = 8;

#[derive(Clone, Debug, PartialEq)]
struct Load {
    class: String,
    rate: f64,
    connections: usize,
    spin: Duration,
}

#[derive(Clone, Copy)]
struct Schedule {
    start: Instant,
    measure_from: Instant,
    stop_at: Instant,
    rate: f64,
}

struct Tally {
    scheduled: u64,
    counted: u64,
    /// Requests that found every place of their connection's pipeline taken.
    held_back: u64,
    latency: Histogram,
    lateness: Histogram,
    /// Answers that were not 2xx, in and out of the window.
    statuses: Statuses,
    /// Requests of the window that the server declined for now.
    declined: u64,
    broken: u64,
    unanswered: u64,
    outstanding_most: usize,
    complaints: Vec<String>,
}

struct Worker<'a> {
    requests: &'a Requests,
    pipeline: usize,
    schedule: Schedule,
    /// Whether the thread has real-time priority.
    runs_first: bool,
    spin: Duration,
    poller: Poller,
    connections: Vec<Appender>,
    /// Per connection: what is due but not sent because the pipeline is full.
    due: Vec<VecDeque<Instant>>,
    outstanding: usize,
    tally: Tally,
}

fn parse_loads(text: &str) -> Result<Vec<Load>, String> {
    let loads: Vec<Load> = text.split(',').map(parse_load).collect::<Result<_, _>>()?;
    if loads.len() > MAX_LOADS {
        return Err(format!("--load takes at most {MAX_LOADS} loads"));
    }
    Ok(loads)
}

fn parse_load(text: &str) -> Result<Load, String> {
    let bad = || format!("--load: {text:?} is not class:rate:connections[:spin_us]");
    let parts: Vec<&str> = text.split(':').collect();
    let (class, rate, connections, spin_us) = match parts[..] {
        [class, rate, connections] => (class, rate, connections, "0"),
        [class, rate, connections, spin_us] => (class, rate, connections, spin_us),
        _ => return Err(bad()),
    };
    let rate: f64 = rate.parse().map_err(|_| bad())?;
    let connections: usize = connections.parse().map_err(|_| bad())?;
    let spin_us: u32 = spin_us.parse().map_err(|_| bad())?;
    if class.is_empty() || connections == 0 || !(rate > 0.0 && rate < 1e7) {
        return Err(bad());
    }
    Ok(Load {
        class: class.to_owned(),
        rate,
        connections,
        spin: Duration::from_micros(u64::from(spin_us)),
    })
}

pub fn run(mut options: Options) -> Result<(String, bool), String> {
    let server = options.take_server()?;
    let loads = parse_loads(&options.take("load", "memory:2000:16".to_owned())?)?;
    let pipeline = options.take_count("pipeline", 256)?;
    let prefix: String = options.take("prefix", format!("bench/{}", std::process::id()))?;
    let payloads = Payloads::new(
        options.take("run", std::process::id())?,
        options.take_count("body", 256)?,
    )?;
    let realtime: usize = options.take("realtime", 0)?;
    let warmup = Duration::from_secs_f64(options.take_seconds("warmup", 1.0)?);
    let duration = Duration::from_secs_f64(options.take_seconds("seconds", 10.0)?);
    options.finish()?;

    // One stream per connection, numbered through all loads.
    let total = loads.iter().map(|load| load.connections).sum();
    let targets = targets::targets(&prefix, total);
    let mut first = 0;
    for load in &loads {
        let own = &targets[first..first + load.connections];
        targets::create(server, own, &load.class)?;
        first += load.connections;
    }
    let requests = Requests::new(server, payloads, &targets);
    let mut workers = Vec::new();
    let mut first = 0;
    for load in &loads {
        workers.push(Worker::new(&requests, pipeline, load, first)?);
        first += load.connections;
    }
    let start = Instant::now() + LEAD;
    for (worker, load) in workers.iter_mut().zip(&loads) {
        worker.schedule = Schedule::new(start, warmup, duration, load.rate);
    }
    for worker in workers.iter_mut().take(realtime) {
        worker.runs_first = true;
    }
    let finished = run_threads(workers)?;
    let cpu = sys::processor_seconds();
    let (mut tallies, mut ledgers) = (Vec::new(), BTreeMap::new());
    for (tally, own) in finished {
        tallies.push(tally);
        ledgers.extend(own.into_iter().map(|ledger| (ledger.connection, ledger)));
    }
    let (verified, clean) = verify::read_back(server, &targets, &requests.payloads, &ledgers)?;
    let ok = clean && tallies.iter().all(Tally::is_right);
    let described: Vec<String> = loads
        .iter()
        .zip(&tallies)
        .map(|(load, tally)| tally.to_json(load, duration))
        .collect();
    let json = Object::new()
        .text("mode", "mixed")
        .boolean("ok", ok)
        .number("window_seconds", duration.as_secs_f64())
        .integer("body_bytes", requests.payloads.length() as u64)
        .integer("pipeline", pipeline as u64)
        .raw("loads", &format!("[{}]", described.join(",")))
        .number("load_cpu_seconds", cpu)
        .raw("verify", &verified)
        .finish();
    Ok((json, ok))
}

fn run_threads(workers: Vec<Worker<'_>>) -> Result<Vec<(Tally, Vec<Ledger>)>, String> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = workers
            .into_iter()
            .map(|worker| scope.spawn(move || worker.run()))
            .collect();
        let lost = || Err("a load thread panicked".to_owned());
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap_or_else(|_| lost()))
            .collect()
    })
}

impl Schedule {
    fn new(start: Instant, warmup: Duration, duration: Duration, rate: f64) -> Self {
        let measure_from = start + warmup;
        Self {
            start,
            measure_from,
            stop_at: measure_from + duration,
            rate,
        }
    }

    /// When request `index` is due; never decreasing.
    fn due_at(&self, index: u64) -> Instant {
        let place = mixed_bits(index) as f64 / (u64::MAX as f64 + 1.0);
        self.start + Duration::from_secs_f64((index as f64 + place) / self.rate)
    }

    fn measures(&self, due: Instant) -> bool {
        due >= self.measure_from && due < self.stop_at
    }
}

impl Tally {
    fn new() -> Self {
        Self {
            scheduled: 0,
            counted: 0,
            held_back: 0,
            latency: Histogram::new(),
            lateness: Histogram::new(),
            statuses: Statuses::default(),
            declined: 0,
            broken: 0,
            unanswered: 0,
            outstanding_most: 0,
            complaints: Vec::new(),
        }
    }

    /// Declined requests are reported, not wrong; everything else must have gone well.
    fn is_right(&self) -> bool {
        self.statuses.refused() == 0
            && self.broken == 0
            && self.unanswered == 0
            && self.counted + self.declined == self.scheduled
            && self.counted > 0
    }

    fn complain(&mut self, text: String) {
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints.push(text);
        }
    }

    fn to_json(&self, load: &Load, window: Duration) -> String {
        Object::new()
            .text("durability", &load.class)
            .number("rate", load.rate)
            .integer("connections", load.connections as u64)
            .integer("spin_us", load.spin.as_micros() as u64)
            .integer("scheduled", self.scheduled)
            .integer("counted", self.counted)
            .number("per_second", self.counted as f64 / window.as_secs_f64())
            .integer("busy", self.declined)
            .integer("refused", self.statuses.refused())
            .raw("statuses", &self.statuses.to_json())
            .integer("broken_connections", self.broken)
            .integer("unanswered", self.unanswered)
            .integer("held_back", self.held_back)
            .integer("outstanding_most", self.outstanding_most as u64)
            .raw("latency_us", &self.latency.to_json())
            .raw("lateness_us", &self.lateness.to_json())
            .texts("complaints", &self.complaints)
            .finish()
    }
}

impl<'a> Worker<'a> {
    fn new(
        requests: &'a Requests,
        pipeline: usize,
        load: &Load,
        first: usize,
    ) -> Result<Self, String> {
        let poller = Poller::new().map_err(|error| format!("epoll: {error}"))?;
        let mut connections = Vec::with_capacity(load.connections);
        for token in 0..load.connections {
            let ledger = Ledger {
                connection: (first + token) as u32,
                streams: vec![first + token],
                ..Ledger::default()
            };
            connections.push(Appender::open(requests.server, &poller, token, ledger)?);
        }
        Ok(Self {
            requests,
            pipeline,
            schedule: Schedule::new(Instant::now(), Duration::ZERO, Duration::ZERO, load.rate),
            runs_first: false,
            spin: load.spin,
            poller,
            due: vec![VecDeque::new(); connections.len()],
            connections,
            outstanding: 0,
            tally: Tally::new(),
        })
    }

    fn run(mut self) -> Result<(Tally, Vec<Ledger>), String> {
        sys::sharpen_timers().map_err(|error| format!("timer slack: {error}"))?;
        if self.runs_first {
            sys::run_first().map_err(|error| format!("real-time priority: {error}"))?;
        }
        let schedule = self.schedule;
        let (mut issued, mut ready) = (0u64, Vec::new());
        let mut next = schedule.due_at(0);
        loop {
            let mut now = Instant::now();
            while next <= now && next < schedule.stop_at {
                self.issue(issued, next, now);
                issued += 1;
                next = schedule.due_at(issued);
                now = Instant::now();
            }
            let over = next >= schedule.stop_at;
            if over && (self.is_idle() || now >= schedule.stop_at + DRAIN) {
                break;
            }
            let wake = if over { schedule.stop_at + DRAIN } else { next };
            let wait = wake.saturating_duration_since(now);
            let wait = wait.saturating_sub(self.spin);
            self.poller
                .wait(wait, &mut ready)
                .map_err(|error| format!("epoll: {error}"))?;
            for event in &ready {
                self.handle(event.token, event.readable);
            }
        }
        Ok(self.finish())
    }

    /// Takes request `index` off the schedule and sends it, or holds it back behind a full pipeline.
    fn issue(&mut self, index: u64, due: Instant, now: Instant) {
        let place = (index % self.connections.len() as u64) as usize;
        if self.schedule.measures(due) {
            self.tally.scheduled += 1;
            self.tally.held_back +=
                u64::from(self.connections[place].outstanding() >= self.pipeline);
        }
        self.due[place].push_back(due);
        self.pump(place, now);
    }

    fn is_idle(&self) -> bool {
        let idle = |(one, due): (&Appender, &VecDeque<Instant>)| {
            one.broken || (one.outstanding() == 0 && due.is_empty())
        };
        self.connections.iter().zip(&self.due).all(idle)
    }

    fn pump(&mut self, place: usize, now: Instant) {
        let connection = &mut self.connections[place];
        if connection.broken {
            return;
        }
        while connection.outstanding() < self.pipeline {
            let Some(due) = self.due[place].pop_front() else {
                break;
            };
            connection.append(self.requests, due);
            self.outstanding += 1;
            if self.schedule.measures(due) {
                let late = now.saturating_duration_since(due);
                self.tally.lateness.record(late.as_nanos() as u64);
            }
        }
        self.tally.outstanding_most = self.tally.outstanding_most.max(self.outstanding);
        if let Err(error) = connection.flush(&self.poller) {
            self.break_connection(place, error);
        }
    }

    fn handle(&mut self, place: usize, readable: bool) {
        let connection = &mut self.connections[place];
        if connection.broken {
            return;
        }
        if readable {
            let (schedule, tally, outstanding) =
                (self.schedule, &mut self.tally, &mut self.outstanding);
            let outcome = connection.receive(self.requests, |answer, now| {
                *outstanding -= 1;
                if !answer.is_success() {
                    tally.statuses.add(answer.status);
                    let declined = answer.status == BUSY && schedule.measures(answer.since);
                    tally.declined += u64::from(declined);
                    tally.complain(format!("append answered {}", answer.status));
                } else if schedule.measures(answer.since) {
                    tally.counted += 1;
                    let waited = now.saturating_duration_since(answer.since);
                    tally.latency.record(waited.as_nanos() as u64);
                }
            });
            if let Err(error) = outcome {
                return self.break_connection(place, error);
            }
        }
        self.pump(place, Instant::now());
    }

    fn break_connection(&mut self, place: usize, error: String) {
        let connection = &mut self.connections[place];
        connection.broken = true;
        let number = connection.ledger.connection;
        self.tally.broken += 1;
        self.tally.complain(format!("connection {number}: {error}"));
    }

    fn finish(mut self) -> (Tally, Vec<Ledger>) {
        let end = Instant::now();
        let mut ledgers = Vec::with_capacity(self.connections.len());
        for (connection, due) in self.connections.into_iter().zip(self.due) {
            for since in connection.unanswered().chain(due) {
                if self.schedule.measures(since) {
                    self.tally.unanswered += 1;
                    let waited = end.saturating_duration_since(since);
                    self.tally.latency.record(waited.as_nanos() as u64);
                }
            }
            ledgers.push(connection.ledger);
        }
        (self.tally, ledgers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_parsed_or_refused() {
        let found = parse_loads("memory:2000:16:50,fsync:0.5:1").unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[1].class.as_str(), found[1].rate), ("fsync", 0.5));
        assert_eq!(found[0].spin, Duration::from_micros(50));
        assert_eq!(found[1].spin, Duration::ZERO);
        for bad in [
            "",
            "memory",
            "memory:0:1",
            "memory:5:0",
            ":5:1",
            "a:b:1",
            "a:1:1:x",
            "a:1:1:1:1",
        ] {
            assert!(parse_loads(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_schedule_keeps_its_rate_and_never_goes_back() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let schedule = Schedule::new(start, second, second, 2000.0);
        let times: Vec<Instant> = (0..4001).map(|index| schedule.due_at(index)).collect();
        assert!(times.is_sorted());
        let measured = times.iter().filter(|due| schedule.measures(**due)).count();
        assert_eq!(measured, 2000);
        let places: Vec<u128> = (0..8u64)
            .map(|index| (times[index as usize] - start).as_nanos() - u128::from(index) * 500_000)
            .collect();
        assert!(places.iter().all(|place| *place < 500_000));
        assert!(places.windows(2).any(|pair| pair[0] != pair[1]));
    }
}
