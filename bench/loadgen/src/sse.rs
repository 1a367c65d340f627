//! Modes `sse` and `idle`: many subscribers of one stream.
//!
//! `sse`: a publisher posts at a fixed rate, whatever the server does (a late answer delays no
//! later post). Delivery latency runs from just before a post is written to the moment at which a
//! subscriber's read that completes the event returns, for every subscriber. An event that has not
//! arrived when the drain time is over is lost: the run fails, and the delivery enters the histogram
//! with the time waited so far, a lower bound, so that a server cannot look better by not delivering.
//!
//! `idle`: subscribers that wait, for measuring what they cost. Prints one line when all are ready
//! and ends when its standard input does.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::histogram::Histogram;
use crate::http::{Client, Event, ResponseReader};
use crate::json::Object;
use crate::options::Options;
use crate::payload::{Payloads, Tag};
use crate::subscriber::Subscriber;
use crate::sys::{self, Poller};
use crate::verify::{self, Ledger};
use crate::wire::{Arrival, Wire};

const CONTENT_TYPE: &str = "text/plain";
const SCRATCH_BYTES: usize = 256 * 1024;
const READY_WITHIN: Duration = Duration::from_secs(30);
const IDLE_TICK: Duration = Duration::from_millis(100);
const MAX_COMPLAINTS: usize = 10;

struct Audience {
    server: SocketAddr,
    target: String,
    poller: Poller,
    subscribers: Vec<Option<Subscriber>>,
    payloads: Payloads,
    scratch: Vec<u8>,
    sent_at: Vec<Instant>,
    /// Events below this are the warm-up: delivered and checked, not timed.
    first_timed: u64,
    latency: Histogram,
    deliveries: u64,
    /// Deliveries per event, to know which ones reached everybody.
    per_event: Vec<u32>,
    reconnects: u64,
    redelivered: u64,
    complaints: Vec<String>,
}

impl Audience {
    /// Creates the stream and connects all subscribers; returns when each has seen its first control.
    fn gather(
        server: SocketAddr,
        prefix: &str,
        count: usize,
        payloads: Payloads,
    ) -> Result<Self, String> {
        let target = format!("/v1/stream/{prefix}/live");
        let mut client =
            Client::connect(server).map_err(|error| format!("cannot connect: {error}"))?;
        let head = client.call("PUT", &target, Some(CONTENT_TYPE), b"")?;
        if head.status != 201 {
            return Err(format!("PUT {target} answered {}", head.status));
        }
        let mut audience = Self {
            server,
            target,
            poller: Poller::new().map_err(|error| format!("epoll: {error}"))?,
            subscribers: Vec::with_capacity(count),
            payloads,
            scratch: vec![0; SCRATCH_BYTES],
            sent_at: Vec::new(),
            first_timed: 0,
            latency: Histogram::new(),
            deliveries: 0,
            per_event: Vec::new(),
            reconnects: 0,
            redelivered: 0,
            complaints: Vec::new(),
        };
        for token in 0..count {
            let one = Subscriber::open(server, &audience.poller, token, &audience.target, "now")?;
            audience.subscribers.push(Some(one));
        }
        audience.await_ready()?;
        Ok(audience)
    }

    fn await_ready(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + READY_WITHIN;
        while self.subscribers.iter().flatten().any(|one| !one.is_ready) {
            let now = Instant::now();
            if now >= deadline || self.alive() < self.subscribers.len() {
                let ready = self
                    .subscribers
                    .iter()
                    .flatten()
                    .filter(|one| one.is_ready)
                    .count();
                return Err(format!(
                    "only {ready} subscribers are ready: {:?}",
                    self.complaints
                ));
            }
            self.turn(deadline - now)?;
        }
        Ok(())
    }

    /// Waits for and handles one round of events; true if one was for the token after the last
    /// subscriber, which is the publisher's.
    fn turn(&mut self, timeout: Duration) -> Result<bool, String> {
        let mut ready = Vec::new();
        self.poller
            .wait(timeout, &mut ready)
            .map_err(|error| format!("epoll: {error}"))?;
        let mut publisher = false;
        for event in ready {
            if event.token < self.subscribers.len() {
                self.receive(event.token);
            } else {
                publisher = true;
            }
        }
        Ok(publisher)
    }

    fn receive(&mut self, token: usize) {
        let Some(one) = self.subscribers[token].as_mut() else {
            return;
        };
        let mut seen: Option<(u64, u64)> = None;
        let outcome = one.receive(
            &self.poller,
            &mut self.scratch,
            &self.payloads,
            |sequence| {
                seen = Some((seen.map_or(sequence, |(first, _)| first), sequence));
            },
        );
        let now = Instant::now();
        if let Some((first, last)) = seen {
            for sequence in first..=last {
                self.delivered(sequence, now);
            }
        }
        let outcome = match outcome {
            Ok(true) => Ok(()),
            Ok(false) => self.resume(token),
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            self.complain(format!("subscriber {token}: {error}"));
            if let Some(gone) = self.subscribers[token].take() {
                self.settle(gone.delivered(), now);
            }
        }
    }

    fn resume(&mut self, token: usize) -> Result<(), String> {
        let one = self.subscribers[token]
            .as_mut()
            .ok_or("no such subscriber")?;
        one.resume(self.server, &self.poller, token, &self.target)?;
        self.reconnects += 1;
        Ok(())
    }

    fn delivered(&mut self, sequence: u64, now: Instant) {
        let Some(sent) = self.sent_at.get(sequence as usize) else {
            return;
        };
        self.deliveries += 1;
        self.per_event[sequence as usize] += 1;
        if sequence >= self.first_timed {
            self.latency.record((now - *sent).as_nanos() as u64);
        }
    }

    /// Enters the events from `from` on as not delivered to one subscriber, with the time so far.
    fn settle(&mut self, from: u64, now: Instant) {
        for sequence in from.max(self.first_timed)..self.sent_at.len() as u64 {
            self.latency
                .record((now - self.sent_at[sequence as usize]).as_nanos() as u64);
        }
    }

    fn alive(&self) -> usize {
        self.subscribers.iter().flatten().count()
    }

    fn everything_arrived(&self) -> bool {
        let published = self.sent_at.len() as u64;
        self.subscribers
            .iter()
            .flatten()
            .all(|one| one.delivered() == published)
    }

    fn complain(&mut self, text: String) {
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints.push(text);
        }
    }
}

/// The publishing connection.
struct Publisher {
    wire: Wire,
    responses: ResponseReader,
    unanswered: VecDeque<Instant>,
    latency: Histogram,
    ledger: Ledger,
    status: u16,
}

impl Publisher {
    fn open(audience: &Audience) -> Result<Self, String> {
        let token = audience.subscribers.len();
        Ok(Self {
            wire: Wire::open(audience.server, &audience.poller, token, 64 * 1024)?,
            responses: ResponseReader::new(),
            unanswered: VecDeque::new(),
            latency: Histogram::new(),
            ledger: Ledger {
                streams: vec![0],
                ..Ledger::default()
            },
            status: 0,
        })
    }

    fn publish(&mut self, audience: &mut Audience) -> Result<(), String> {
        let mut body = Vec::with_capacity(audience.payloads.length());
        audience.payloads.append_to(
            &mut body,
            Tag {
                connection: 0,
                sequence: self.ledger.sent,
            },
        );
        let host = audience.server.to_string();
        let request =
            crate::http::request("POST", &audience.target, &host, Some(CONTENT_TYPE), &body);
        self.wire.out.extend_from_slice(&request);
        let now = Instant::now();
        audience.sent_at.push(now);
        audience.per_event.push(0);
        self.unanswered.push_back(now);
        self.ledger.sent += 1;
        self.wire.flush(&audience.poller)
    }

    fn receive(&mut self, poller: &Poller) -> Result<(), String> {
        self.wire.flush(poller)?;
        match self.wire.receive()? {
            Arrival::Closed => return Err("publisher: closed by the server".to_owned()),
            Arrival::Nothing => return Ok(()),
            Arrival::Bytes(_) => {}
        }
        let now = Instant::now();
        loop {
            let (used, event) = self.responses.next(self.wire.arrived())?;
            let (mut ended, mut wait) = (false, false);
            match event {
                Event::NeedMore => wait = true,
                Event::Head(head) => self.status = head.status,
                Event::Body(_) => {}
                Event::End => ended = true,
            }
            self.wire.consume(used);
            if ended {
                let since = self
                    .unanswered
                    .pop_front()
                    .ok_or("an answer that nobody asked for")?;
                self.latency.record((now - since).as_nanos() as u64);
                if !(200..300).contains(&self.status) {
                    return Err(format!("publish answered {}", self.status));
                }
                self.ledger.answered += 1;
            }
            if wait {
                return Ok(());
            }
        }
    }
}

pub fn run(mut options: Options) -> Result<(String, bool), String> {
    let server = options.take_server()?;
    let count = options.take_count("subscribers", 1000)?;
    let rate = options.take_seconds("rate", 50.0)?;
    let payloads = Payloads::new(
        options.take("run", std::process::id())?,
        options.take_count("body", 256)?,
    )?;
    let prefix: String = options.take("prefix", format!("bench/{}", std::process::id()))?;
    let warmup = options.take_seconds("warmup", 1.0)?;
    let seconds = options.take_seconds("seconds", 10.0)?;
    let drain = Duration::from_secs_f64(options.take_seconds("drain", 10.0)?);
    options.finish()?;
    if rate <= 0.0 {
        return Err("--rate must be above 0".to_owned());
    }

    let mut audience = Audience::gather(server, &prefix, count, payloads)?;
    let mut publisher = Publisher::open(&audience)?;
    audience.first_timed = (warmup * rate) as u64;
    let events = ((warmup + seconds) * rate) as u64;
    let start = Instant::now();
    let mut finish_by = None;
    loop {
        let now = Instant::now();
        let due = start + Duration::from_secs_f64(publisher.ledger.sent as f64 / rate);
        let wake = if publisher.ledger.sent < events {
            if due <= now {
                publisher.publish(&mut audience)?;
                continue;
            }
            due
        } else {
            *finish_by.get_or_insert(now + drain)
        };
        let complete = publisher.unanswered.is_empty() && audience.everything_arrived();
        if finish_by.is_some() && (complete || now >= wake) {
            break;
        }
        if audience.turn(wake - now)? {
            publisher.receive(&audience.poller)?;
        }
    }
    report(audience, publisher, count, rate, seconds)
}

fn report(
    mut audience: Audience,
    publisher: Publisher,
    count: usize,
    rate: f64,
    seconds: f64,
) -> Result<(String, bool), String> {
    let cpu = sys::processor_seconds();
    let now = Instant::now();
    let left: Vec<u64> = audience
        .subscribers
        .iter()
        .flatten()
        .map(Subscriber::delivered)
        .collect();
    left.into_iter().for_each(|from| audience.settle(from, now));
    audience.redelivered = audience
        .subscribers
        .iter()
        .flatten()
        .map(|one| one.redelivered)
        .sum();
    let published = publisher.ledger.sent;
    let lost = published * count as u64 - audience.deliveries;
    let complete = audience
        .per_event
        .iter()
        .filter(|seen| **seen as usize == count)
        .count();
    let alive = audience.alive();
    // The subscribers go first: reading back should not compete with them.
    audience.subscribers.clear();
    let unanswered = publisher.unanswered.len() as u64;
    let ledgers = BTreeMap::from([(0, publisher.ledger)]);
    let targets = [audience.target.clone()];
    let (verified, clean) =
        verify::read_back(audience.server, &targets, &audience.payloads, &ledgers)?;
    let ok =
        clean && lost == 0 && alive == count && unanswered == 0 && audience.latency.count() > 0;
    let json = Object::new()
        .text("mode", "sse")
        .boolean("ok", ok)
        .integer("subscribers", count as u64)
        .number("rate", rate)
        .number("window_seconds", seconds)
        .integer("events", published)
        .integer("events_complete", complete as u64)
        .integer("deliveries", audience.deliveries)
        .integer("deliveries_lost", lost)
        .integer("subscribers_failed", (count - alive) as u64)
        .integer("reconnects", audience.reconnects)
        .integer("redelivered", audience.redelivered)
        .integer("publish_unanswered", unanswered)
        .raw("latency_us", &audience.latency.to_json())
        .raw("publish_latency_us", &publisher.latency.to_json())
        .number("load_cpu_seconds", cpu)
        .texts("complaints", &audience.complaints)
        .raw("verify", &verified)
        .finish();
    Ok((json, ok))
}

pub fn run_idle(mut options: Options) -> Result<(String, bool), String> {
    let server = options.take_server()?;
    let count = options.take_count("subscribers", 1000)?;
    let prefix: String = options.take("prefix", format!("bench/{}", std::process::id()))?;
    options.finish()?;
    let mut audience = Audience::gather(server, &prefix, count, Payloads::new(0, 256)?)?;
    let over = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&over);
    std::thread::spawn(move || {
        // Whatever ends the input, an end or an error, ends the wait.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        flag.store(true, Ordering::Release);
    });
    println!("{}", Object::new().integer("ready", count as u64).finish());
    std::io::stdout()
        .flush()
        .map_err(|error| format!("standard output: {error}"))?;
    while !over.load(Ordering::Acquire) {
        audience.turn(IDLE_TICK)?;
    }
    let alive = audience.alive();
    let ok = alive == count;
    let json = Object::new()
        .text("mode", "idle")
        .boolean("ok", ok)
        .integer("subscribers", count as u64)
        .integer("subscribers_failed", (count - alive) as u64)
        .integer("reconnects", audience.reconnects)
        .texts("complaints", &audience.complaints)
        .finish();
    Ok((json, ok))
}
