//! Mode `catchup`: connections that read whole streams from the start, over and over.
//!
//! The content of a stream is a slice of one block of noise, at a place of its own, so a read can
//! be compared byte by byte without storing every stream. The length of every read is compared;
//! the bytes of the first read of each stream on each connection, and of every `sample`th read
//! after it, are compared as well (a full comparison of every read would measure the generator).
//! Only reads that were complete, of the right length and finished within the window are counted.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::histogram::Histogram;
use crate::http::{self, Client, Event, Head, ResponseReader};
use crate::json::Object;
use crate::options::Options;
use crate::payload;
use crate::sys::{self, Poller};
use crate::wire::{Arrival, Wire};

const CONTENT_TYPE: &str = "application/octet-stream";
/// Small enough to stay in the cache of a core, large enough to make few calls.
const SCRATCH_BYTES: usize = 256 * 1024;
/// Distance between the contents of two streams in the block of noise.
const STREAM_STEP_BYTES: usize = 64;
const STALL: Duration = Duration::from_secs(30);
const MAX_COMPLAINTS: usize = 10;

struct Config {
    server: SocketAddr,
    targets: Vec<String>,
    stream_bytes: usize,
    write_bytes: usize,
    sample: u64,
    warmup: Duration,
    duration: Duration,
    noise: Vec<u8>,
}

impl Config {
    fn content(&self, stream: usize) -> &[u8] {
        let start = stream * STREAM_STEP_BYTES;
        &self.noise[start..start + self.stream_bytes]
    }
}

struct Reader {
    wire: Wire,
    responses: ResponseReader,
    stream: usize,
    reads: u64,
    started: Instant,
    offset: String,
    position: usize,
    compare: bool,
    head: Head,
    broken: bool,
}

#[derive(Default)]
struct Tally {
    reads: u64,
    bytes: u64,
    responses: u64,
    compared: u64,
    wrong: u64,
    broken: u64,
    complaints: Vec<String>,
}

pub fn run(mut options: Options) -> Result<(String, bool), String> {
    let server = options.take_server()?;
    let connections = options.take_count("connections", 64)?;
    let streams = options.take_count("streams", connections)?;
    let threads = options.take_count("threads", 1)?.min(connections);
    let prefix: String = options.take("prefix", format!("bench/{}", std::process::id()))?;
    let stream_bytes = options.take_count("stream-bytes", 2_000_000)?;
    let config = Config {
        server,
        targets: (0..streams)
            .map(|stream| format!("/v1/stream/{prefix}/{stream}"))
            .collect(),
        stream_bytes,
        write_bytes: options.take_count("body", 64 * 1024)?,
        sample: options.take_count("sample", 16)? as u64,
        warmup: Duration::from_secs_f64(options.take_seconds("warmup", 1.0)?),
        duration: Duration::from_secs_f64(options.take_seconds("seconds", 10.0)?),
        noise: payload::noise(
            u64::from(std::process::id()),
            stream_bytes + streams * STREAM_STEP_BYTES,
        ),
    };
    options.finish()?;
    prepare(&config)?;
    let start = Instant::now();
    let results: Vec<Result<(Tally, Histogram), String>> = std::thread::scope(|scope| {
        let config = &config;
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let own: Vec<usize> = (thread..connections)
                    .step_by(threads)
                    .map(|one| one % streams)
                    .collect();
                scope.spawn(move || Worker::new(config, own, start)?.run())
            })
            .collect();
        let lost = || Err("a load thread panicked".to_owned());
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap_or_else(|_| lost()))
            .collect()
    });
    let (mut total, mut latency) = (Tally::default(), Histogram::new());
    for result in results {
        let (tally, histogram) = result?;
        latency.merge(&histogram);
        total.merge(tally);
    }
    Ok(report(&config, connections, &total, &latency))
}

/// Writes every stream in appends of `write_bytes`.
fn prepare(config: &Config) -> Result<(), String> {
    let mut client =
        Client::connect(config.server).map_err(|error| format!("cannot connect: {error}"))?;
    for (stream, target) in config.targets.iter().enumerate() {
        let head = client.call("PUT", target, Some(CONTENT_TYPE), b"")?;
        if head.status != 201 {
            return Err(format!("PUT {target} answered {}", head.status));
        }
        for piece in config.content(stream).chunks(config.write_bytes) {
            let head = client.call("POST", target, Some(CONTENT_TYPE), piece)?;
            if !(200..300).contains(&head.status) {
                return Err(format!("POST {target} answered {}", head.status));
            }
        }
    }
    Ok(())
}

struct Worker<'a> {
    config: &'a Config,
    poller: Poller,
    readers: Vec<Reader>,
    scratch: Vec<u8>,
    measure_from: Instant,
    stop_at: Instant,
    tally: Tally,
    latency: Histogram,
}

impl<'a> Worker<'a> {
    fn new(config: &'a Config, streams: Vec<usize>, start: Instant) -> Result<Self, String> {
        let poller = Poller::new().map_err(|error| format!("epoll: {error}"))?;
        let mut readers = Vec::with_capacity(streams.len());
        for (token, stream) in streams.into_iter().enumerate() {
            readers.push(Reader {
                wire: Wire::open(config.server, &poller, token, 0)?,
                responses: ResponseReader::new(),
                stream,
                reads: 0,
                started: start,
                offset: String::new(),
                position: 0,
                compare: true,
                head: Head::default(),
                broken: false,
            });
        }
        let measure_from = start + config.warmup;
        Ok(Self {
            config,
            poller,
            readers,
            scratch: vec![0; SCRATCH_BYTES],
            measure_from,
            stop_at: measure_from + config.duration,
            tally: Tally::default(),
            latency: Histogram::new(),
        })
    }

    fn run(mut self) -> Result<(Tally, Histogram), String> {
        for index in 0..self.readers.len() {
            self.begin(index);
        }
        let mut ready = Vec::new();
        let mut last_event = Instant::now();
        loop {
            let now = Instant::now();
            if now >= self.stop_at || self.readers.iter().all(|reader| reader.broken) {
                break;
            }
            if now - last_event > STALL {
                return Err(format!("nothing arrived for {} s", STALL.as_secs()));
            }
            let wake = self.stop_at.min(last_event + STALL) - now + Duration::from_millis(1);
            self.poller
                .wait(wake, &mut ready)
                .map_err(|error| format!("epoll: {error}"))?;
            if !ready.is_empty() {
                last_event = Instant::now();
            }
            for event in &ready {
                if self.readers[event.token].broken {
                    continue;
                }
                if let Err(error) = self.handle(event.token, event.readable) {
                    self.fail(event.token, &error);
                }
            }
        }
        Ok((self.tally, self.latency))
    }

    fn fail(&mut self, index: usize, error: &str) {
        self.readers[index].broken = true;
        self.tally.broken += 1;
        self.tally.complain(format!("reader {index}: {error}"));
    }

    /// Starts a whole read on connection `index`.
    fn begin(&mut self, index: usize) {
        let reader = &mut self.readers[index];
        reader.started = Instant::now();
        reader.position = 0;
        reader.compare = reader.reads.is_multiple_of(self.config.sample);
        reader.offset.clear();
        reader.offset.push_str("-1");
        if let Err(error) = self.ask(index) {
            self.fail(index, &error);
        }
    }

    fn ask(&mut self, index: usize) -> Result<(), String> {
        let reader = &mut self.readers[index];
        let target = &self.config.targets[reader.stream];
        let request = format!(
            "GET {target}?offset={} HTTP/1.1\r\nHost: {}\r\n\r\n",
            reader.offset, self.config.server
        );
        reader.wire.out.extend_from_slice(request.as_bytes());
        reader.wire.flush(&self.poller)
    }

    fn handle(&mut self, index: usize, readable: bool) -> Result<(), String> {
        self.readers[index].wire.flush(&self.poller)?;
        if !readable {
            return Ok(());
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let outcome = match self.readers[index].wire.receive_shared(&mut scratch) {
            Ok(Arrival::Bytes(count)) => self.take(index, &scratch[..count]),
            Ok(Arrival::Nothing) => Ok(()),
            Ok(Arrival::Closed) => Err("closed by the server".to_owned()),
            Err(error) => Err(error),
        };
        self.scratch = scratch;
        outcome
    }

    fn take(&mut self, index: usize, mut bytes: &[u8]) -> Result<(), String> {
        loop {
            let reader = &mut self.readers[index];
            let (used, event) = reader.responses.next(bytes)?;
            bytes = &bytes[used..];
            match event {
                Event::NeedMore => {
                    reader.wire.hold_back(bytes);
                    return Ok(());
                }
                Event::Head(head) => reader.head = head,
                Event::Body(body) => self.body(index, body)?,
                Event::End => self.response_ended(index)?,
            }
        }
    }

    fn body(&mut self, index: usize, body: &[u8]) -> Result<(), String> {
        let reader = &mut self.readers[index];
        let end = reader.position + body.len();
        let content = self.config.content(reader.stream);
        if end > content.len() || (reader.compare && &content[reader.position..end] != body) {
            self.tally.wrong += 1;
            return Err(format!(
                "wrong bytes in {}..{end} of stream {}",
                reader.position, reader.stream
            ));
        }
        reader.position = end;
        Ok(())
    }

    fn response_ended(&mut self, index: usize) -> Result<(), String> {
        let reader = &mut self.readers[index];
        self.tally.responses += 1;
        if let Some(next) = http::next_read(&reader.head, &reader.offset)? {
            reader.offset = next;
            return self.ask(index);
        }
        if reader.position != self.config.stream_bytes {
            self.tally.wrong += 1;
            return Err(format!(
                "read {} of {} bytes",
                reader.position, self.config.stream_bytes
            ));
        }
        reader.reads += 1;
        let now = Instant::now();
        if now >= self.measure_from && now < self.stop_at {
            self.tally.reads += 1;
            self.tally.bytes += reader.position as u64;
            self.latency
                .record((now - reader.started).as_nanos() as u64);
        }
        self.tally.compared += u64::from(reader.compare);
        self.begin(index);
        Ok(())
    }
}

impl Tally {
    fn merge(&mut self, other: Self) {
        self.reads += other.reads;
        self.bytes += other.bytes;
        self.responses += other.responses;
        self.compared += other.compared;
        self.wrong += other.wrong;
        self.broken += other.broken;
        self.complaints.extend(other.complaints);
    }

    fn complain(&mut self, text: String) {
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints.push(text);
        }
    }
}

fn report(
    config: &Config,
    connections: usize,
    tally: &Tally,
    latency: &Histogram,
) -> (String, bool) {
    let ok = tally.wrong == 0 && tally.broken == 0 && tally.reads > 0 && tally.compared > 0;
    let window = config.duration.as_secs_f64();
    let json = Object::new()
        .text("mode", "catchup")
        .boolean("ok", ok)
        .integer("connections", connections as u64)
        .integer("streams", config.targets.len() as u64)
        .integer("stream_bytes", config.stream_bytes as u64)
        .integer("append_bytes", config.write_bytes as u64)
        .number("window_seconds", window)
        .integer("reads", tally.reads)
        .integer("responses", tally.responses)
        .number("bytes_per_second", tally.bytes as f64 / window)
        .integer("reads_compared_in_full", tally.compared)
        .integer("wrong", tally.wrong)
        .integer("broken_connections", tally.broken)
        .raw("latency_us", &latency.to_json())
        .number("load_cpu_seconds", sys::processor_seconds())
        .texts("complaints", &tally.complaints)
        .finish();
    (json, ok)
}
