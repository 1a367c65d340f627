//! One connection: its buffers, its place in the order of replies, and what it is doing.
//!
//! Replies are rendered into `output` in request order as soon as they are decided. A *gate* marks where bytes
//! begin that may not leave before the log has come far enough, so acknowledgements need no objects of their own.
//!
//! Invariants
//! - `I-CONN-1` No byte at or behind the first closed gate is sent.
//! - `I-CONN-2` An idle connection holds no buffer; what one holds beyond a small part is counted (`budget`).

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::error::ErrorCode;
use crate::io::wanted::{Key, Told};
use crate::limits::CONNECTION_FREE_BYTES;
use crate::metrics::Metrics;
use crate::model::{Class, Gate};
use crate::refusal::Refusal;
use crate::serve::http::ChunkDecoder;
use crate::serve::live::{LongPoll, Sse};
use crate::serve::pipeline::waits::Asker;
use crate::serve::pipeline::{Job, Unsent};
use crate::serve::timing::{self, TimingSlot};
use crate::shard::commit::Shard;
use crate::stream::handle::Stream;

/// Room for gates that an idle connection keeps.
const GATES_KEPT: usize = 128;

/// What a connection is doing.
pub enum Phase {
    /// Reading and answering requests.
    Request,
    /// A chunked body is arriving.
    Chunked(Box<ChunkedBody>),
    /// The request at the front waits for the log or the disk; it is looked at again after the next commit, or when what
    /// it lacked is at hand.
    Waiting(Option<Box<ChunkedBody>>),
    /// A body too large to be copied is on its way, piece by piece.
    Sending(Box<Sending>),
    LongPoll(Box<LongPoll>),
    Sse(Box<Sse>),
    /// The control plane is working on the request.
    Proxied,
    /// A worker of the pipeline has the request.
    Working(Arc<Asker>),
    /// An answer of the pipeline is on its way, in the buffers that the worker wrote.
    Handing(Box<Handing>),
    /// The last bytes go out, then the rest of the input is discarded for a moment and the socket closed.
    Closing,
}

pub struct ChunkedBody {
    pub head: Vec<u8>,
    pub body: Vec<u8>,
    pub decoder: ChunkDecoder,
    pub complete: bool,
}

/// A range of a stream on its way to the socket. Holds no bytes.
pub struct Sending {
    pub stream: Arc<Stream>,
    pub position: u64,
    pub end: u64,
    pub suffix: Option<u8>,
    /// Up to where bytes were in the page cache, and when that was seen: asking for each piece would cost.
    pub at_hand: (u64, u64),
}

/// Bytes that belong to the connection and leave as they lie.
pub struct Handing {
    /// What is left, the first piece from `sent` on.
    pub pieces: VecDeque<Vec<u8>>,
    pub sent: usize,
    pub _unsent: Unsent,
}

pub struct Conn {
    socket: OwnedFd,
    pub token: u64,
    pub phase: Phase,
    pub input: Vec<u8>,
    /// How much of `input` the head parser has seen.
    pub scanned: usize,
    /// Bytes the request at the front needs in all; 0 = not known yet.
    pub needed: usize,
    /// Bytes counted against the global bound for bodies under way.
    pub reserved: u64,
    /// Bytes counted against the global bound for what is held for clients.
    pub counted: u64,
    /// Input is there that waits until output has left.
    pub paused: bool,
    pub continued: bool,
    /// When the body under way began to arrive, and when the front request began to wait; 0 = neither.
    pub body_since_ms: u64,
    pub waiting_since_ms: u64,
    /// A job for the pipeline and the length of its body, until the body is there to go with it.
    pub job: Option<(Box<Job>, usize)>,
    pub output: Vec<u8>,
    pub sent: usize,
    gates: VecDeque<HeldBack>,
    /// Timing headers that wait for their figures, in the order of the gates.
    pub timings: VecDeque<TimingSlot>,
    /// The request at the front asked for its timing, and when it was there in full.
    pub timing: bool,
    pub received_us: u64,
    /// Epoll interest as the kernel knows it.
    pub interest: u32,
    pub keep_alive: bool,
    pub deadline_ms: u64,
    /// When the wheel will look at this connection.
    pub armed_ms: u64,
    pub in_flush_list: bool,
    /// It lets others go first, and goes on by itself (`turns`).
    pub goes_on: bool,
    /// How long what it asks for takes, of late (`turns`).
    pub cost_us: u64,
    /// The socket is full; wait until it is writable.
    pub blocked: bool,
    /// Bytes that have left, and how many there were when it was found so last: time that a client has for each of them.
    pub left: u64,
    pub blocked_at: u64,
    /// How many of them its side had acknowledged when it was looked at since.
    pub taken: Option<u64>,
    /// The kernel calls it writable and takes nothing: it is asked again at this time. 0: it is not like that.
    pub rests_until_ms: u64,
    pub dead: bool,
    /// Something is being fetched from the disk before this connection can go on.
    pub loading: bool,
    /// What is not there, as far as the request at the front has asked for it: at most the few streams that it names.
    pub absent: Vec<(Key, Told)>,
    pub write_shut: bool,
    /// The peer has said that it sends nothing more; what it has sent before may still be in the socket.
    pub half_closed: bool,
    /// All of that has been read.
    pub input_ended: bool,
}

struct HeldBack {
    start: usize,
    gate: Gate,
    /// An append of this class, and when it came: its time is measured when the gate opens.
    append: Option<Measured>,
    /// The answer to a request that changes nothing.
    only_reads: bool,
}

/// An append whose time from request to acknowledgement is measured.
#[derive(Clone, Copy)]
pub struct Measured {
    pub class: Class,
    pub received_us: u64,
}

impl Conn {
    pub fn new(socket: OwnedFd, token: u64) -> Conn {
        Conn {
            socket,
            token,
            phase: Phase::Request,
            input: Vec::new(),
            scanned: 0,
            needed: 0,
            reserved: 0,
            counted: 0,
            paused: false,
            continued: false,
            body_since_ms: 0,
            waiting_since_ms: 0,
            job: None,
            output: Vec::new(),
            sent: 0,
            gates: VecDeque::new(),
            timings: VecDeque::new(),
            timing: false,
            received_us: 0,
            interest: 0,
            keep_alive: true,
            deadline_ms: 0,
            armed_ms: u64::MAX,
            in_flush_list: false,
            goes_on: false,
            cost_us: 0,
            left: 0,
            blocked_at: u64::MAX,
            taken: None,
            rests_until_ms: 0,
            blocked: false,
            dead: false,
            loading: false,
            absent: Vec::new(),
            write_shut: false,
            half_closed: false,
            input_ended: false,
        }
    }

    pub fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Holds back everything rendered from `start` on until the gate opens.
    pub fn close_gate(&mut self, start: usize, gate: Gate, append: Option<Measured>) {
        match self.gates.back() {
            // A later gate that opens no later adds nothing.
            Some(last) if last.gate.covers(gate) && append.is_none() => {}
            _ => self.gates.push_back(HeldBack {
                start,
                gate,
                append,
                only_reads: false,
            }),
        }
    }

    /// Notes that the reply that was held back last, if it was that one, is to a request that changes nothing.
    pub fn only_reads(&mut self, start: usize) {
        if let Some(last) = self.gates.back_mut()
            && last.start == start
        {
            last.only_reads = true;
        }
    }

    pub fn gate_count(&self) -> usize {
        self.gates.len()
    }

    /// Lets out what the log has reached, with its figures.
    pub fn open_gates(&mut self, shard: &Shard, metrics: &Metrics, now_us: u64) {
        while let Some(held) = self.gates.pop_front_if(|held| shard.reached(held.gate)) {
            if let Some(append) = held.append {
                metrics
                    .append_seconds
                    .observe(append.class, now_us.saturating_sub(append.received_us));
            }
            while let Some(slot) = self
                .timings
                .pop_front_if(|slot| held.gate.covers(slot.gate))
            {
                let times = shard.recent.of(slot.gate.sequence);
                timing::fill(&mut self.output, &slot, &times, now_us);
            }
        }
    }

    /// Drops every reply that is still held back, because the log has failed. Returns what the first one becomes.
    pub fn drop_gated(&mut self) -> Option<Refusal> {
        let first = self.gates.front()?;
        let refusal = match first.only_reads {
            true => Refusal::with(
                ErrorCode::ServerBusy,
                "The log failed before the answer was final.",
            ),
            false => ErrorCode::OutcomeUnknown.into(),
        };
        self.output.truncate(first.start);
        self.gates.clear();
        self.timings.clear();
        Some(refusal)
    }

    /// End of what may be sent now.
    pub fn sendable(&self) -> usize {
        self.gates
            .front()
            .map_or(self.output.len(), |held| held.start)
    }

    pub fn has_sendable(&self) -> bool {
        self.sent < self.sendable()
    }

    pub fn output_is_done(&self) -> bool {
        self.sent == self.output.len()
    }

    /// Notes that `count` more bytes left; gives the buffer back when it is empty.
    pub fn advance(&mut self, count: usize) {
        self.sent += count;
        if self.output_is_done() && self.gates.is_empty() {
            self.sent = 0;
            if self.output.capacity() > 4096 {
                self.output = Vec::new();
            } else {
                self.output.clear();
            }
            if self.gates.capacity() > GATES_KEPT {
                self.gates = VecDeque::new();
                self.timings = VecDeque::new();
            }
        } else if self.sent > 256 * 1024 {
            self.drop_sent();
        }
    }

    fn drop_sent(&mut self) {
        self.output.drain(..self.sent);
        for held in &mut self.gates {
            held.start -= self.sent;
        }
        for slot in &mut self.timings {
            slot.at -= self.sent;
        }
        self.sent = 0;
    }

    /// Memory of the buffers, less what is counted as a body under way.
    fn buffered(&self) -> usize {
        let input = self.input.capacity();
        input.saturating_sub(usize::try_from(self.reserved).unwrap_or(usize::MAX))
            + self.output.capacity()
            + self.gates.capacity() * size_of::<HeldBack>()
            + self.timings.capacity() * size_of::<TimingSlot>()
    }

    /// What is to be counted for this connection. Large buffers with little in them are made smaller first.
    #[inline]
    pub fn held(&mut self) -> u64 {
        let small = self.input.capacity() == 0
            && self.output.capacity() <= CONNECTION_FREE_BYTES / 4
            && self.gates.capacity() <= GATES_KEPT
            && self.timings.capacity() == 0;
        if small || self.buffered() <= CONNECTION_FREE_BYTES {
            return 0;
        }
        if self.needed == 0 && self.input.len() < self.input.capacity() / 4 {
            self.input.shrink_to_fit();
        }
        if self.unsent() < self.output.capacity() / 4 {
            self.drop_sent();
            self.output.shrink_to_fit();
        }
        let held = self.buffered();
        if held <= CONNECTION_FREE_BYTES {
            0
        } else {
            held as u64
        }
    }

    pub fn unsent(&self) -> usize {
        self.output.len() - self.sent
    }
}
