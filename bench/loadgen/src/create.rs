//! Modes `create` and `create-verify`: many streams with one record each over one connection.
//!
//! They are two modes because memory and restart are measured between them: reading the streams
//! back touches every one, and after a kill it is what proves that each create was durable.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::histogram::Histogram;
use crate::http::{Client, Event, Head, ResponseReader};
use crate::json::Object;
use crate::options::Options;
use crate::payload::{Payloads, Tag};
use crate::sys::{self, Poller};
use crate::wire::{Arrival, Wire};

const CONTENT_TYPE: &str = "application/octet-stream";
const INPUT_BYTES: usize = 256 * 1024;
const STALL: Duration = Duration::from_secs(30);
const MAX_COMPLAINTS: usize = 10;

struct Config {
    server: SocketAddr,
    count: u64,
    pipeline: u64,
    prefix: String,
    payloads: Payloads,
    /// Creates beyond this many seconds are not attempted; the report says how many were.
    limit: Duration,
}

fn config(mut options: Options) -> Result<Config, String> {
    let config = Config {
        server: options.take_server()?,
        count: options.take_count("count", 100_000)? as u64,
        pipeline: options.take_count("pipeline", 64)? as u64,
        prefix: options.take("prefix", "bench/create".to_owned())?,
        payloads: Payloads::new(options.take("run", 1)?, options.take_count("body", 100)?)?,
        limit: Duration::from_secs_f64(options.take_seconds("limit", 300.0)?),
    };
    options.finish()?;
    Ok(config)
}

fn expected(config: &Config, index: u64, out: &mut Vec<u8>) {
    out.clear();
    config.payloads.append_to(
        out,
        Tag {
            connection: 0,
            sequence: index,
        },
    );
}

struct Answers {
    created: u64,
    failed: u64,
    latency: Histogram,
    complaints: Vec<String>,
}

pub fn run(options: Options) -> Result<(String, bool), String> {
    let config = config(options)?;
    let mut poller = Poller::new().map_err(|error| format!("epoll: {error}"))?;
    let mut wire = Wire::open(config.server, &poller, 0, INPUT_BYTES)?;
    let mut responses = ResponseReader::new();
    let mut answers = Answers {
        created: 0,
        failed: 0,
        latency: Histogram::new(),
        complaints: Vec::new(),
    };
    let mut sent_at = std::collections::VecDeque::new();
    let (mut sent, mut answered, mut status) = (0u64, 0u64, 0u16);
    let (mut body, mut ready) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while answered < config.count {
        let open = start.elapsed() < config.limit;
        if !open && sent == answered {
            break;
        }
        let now = Instant::now();
        while open && sent < config.count && sent - answered < config.pipeline {
            expected(&config, sent, &mut body);
            put(&mut wire.out, &config, sent, &body);
            sent_at.push_back(now);
            sent += 1;
        }
        wire.flush(&poller)?;
        poller
            .wait(STALL, &mut ready)
            .map_err(|error| format!("epoll: {error}"))?;
        if ready.is_empty() {
            return Err(format!(
                "no answer for {} s after {answered} creates",
                STALL.as_secs()
            ));
        }
        match wire.receive()? {
            Arrival::Closed => {
                return Err(format!("closed by the server after {answered} creates"));
            }
            Arrival::Nothing => continue,
            Arrival::Bytes(_) => {}
        }
        let now = Instant::now();
        loop {
            let (used, event) = responses.next(wire.arrived())?;
            let ended = matches!(event, Event::End);
            let wait = matches!(event, Event::NeedMore);
            if let Event::Head(Head { status: found, .. }) = event {
                status = found;
            }
            wire.consume(used);
            if ended {
                let since = sent_at
                    .pop_front()
                    .ok_or("an answer that nobody asked for")?;
                answers.take(answered, status, now - since);
                answered += 1;
            }
            if wait {
                break;
            }
        }
    }
    Ok(report(&config, &answers, start.elapsed().as_secs_f64()))
}

fn put(out: &mut Vec<u8>, config: &Config, index: u64, body: &[u8]) {
    let head = format!(
        "PUT /v1/stream/{}/{index} HTTP/1.1\r\nHost: {}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {}\r\n\r\n",
        config.prefix,
        config.server,
        body.len()
    );
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(body);
}

impl Answers {
    fn take(&mut self, index: u64, status: u16, waited: Duration) {
        if status == 201 {
            self.created += 1;
            self.latency.record(waited.as_nanos() as u64);
            return;
        }
        self.failed += 1;
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints
                .push(format!("create {index} answered {status}"));
        }
    }
}

fn report(config: &Config, answers: &Answers, seconds: f64) -> (String, bool) {
    let ok = answers.created == config.count;
    let json = Object::new()
        .text("mode", "create")
        .boolean("ok", ok)
        .integer("asked", config.count)
        .integer("pipeline", config.pipeline)
        .integer("body_bytes", config.payloads.length() as u64)
        .integer("created", answers.created)
        .integer("failed", answers.failed)
        .number("seconds", seconds)
        .number("per_second", answers.created as f64 / seconds)
        .raw("latency_us", &answers.latency.to_json())
        .number("load_cpu_seconds", sys::processor_seconds())
        .texts("complaints", &answers.complaints)
        .finish();
    (json, ok)
}

/// Reads all streams back, pipelined; each must hold exactly its one record.
pub fn verify(options: Options) -> Result<(String, bool), String> {
    let config = config(options)?;
    let mut client =
        Client::connect(config.server).map_err(|error| format!("cannot connect: {error}"))?;
    let (mut right, mut wrong) = (0u64, 0u64);
    let mut complaints = Vec::new();
    let (mut wanted, mut found) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for first in (0..config.count).step_by(config.pipeline as usize) {
        let indexes = first..(first + config.pipeline).min(config.count);
        let mut requests = Vec::new();
        for index in indexes.clone() {
            let target = format!("/v1/stream/{}/{index}?offset=-1", config.prefix);
            requests.extend(crate::http::request(
                "GET",
                &target,
                &config.server.to_string(),
                None,
                b"",
            ));
        }
        client.send_raw(&requests)?;
        for index in indexes {
            found.clear();
            let head = client.receive(|bytes| found.extend_from_slice(bytes))?;
            expected(&config, index, &mut wanted);
            if head.status == 200 && head.up_to_date && found == wanted {
                right += 1;
                continue;
            }
            wrong += 1;
            if complaints.len() < MAX_COMPLAINTS {
                complaints.push(format!(
                    "stream {index}: status {}, {} bytes",
                    head.status,
                    found.len()
                ));
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let ok = right == config.count;
    let json = Object::new()
        .text("mode", "create-verify")
        .boolean("ok", ok)
        .integer("right", right)
        .integer("wrong", wrong)
        .number("seconds", seconds)
        .number("per_second", right as f64 / seconds)
        .texts("complaints", &complaints)
        .finish();
    Ok((json, ok))
}
