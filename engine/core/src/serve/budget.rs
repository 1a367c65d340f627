//! Bytes held for clients, all together: answers that they have not taken, and requests that wait behind those.
//!
//! Each buffer has a bound of its own; this one is for their sum, because clients that read nothing come by the
//! thousand. `connections` counts what a connection buffers whenever it is put back, `live` the pieces of events that
//! are kept, `proxy` what arrives from the control plane. While there is room nothing is different. Without it nobody waits for others, and
//! only large answers of the control plane are refused, which exist once: answers are sent one by one, and what a socket does
//! not take is forgotten and read again when it does.
//!
//! Invariants
//! - `I-HELD-1` What is held is at most `client_bytes_max`, a little for each connection (`CONNECTION_FREE_BYTES`), and
//!   what one connection may buffer in its turn (`OUTPUT_PAUSE_BYTES`) for each reactor.
//! - `I-HELD-2` Bodies and events leave half of the room to acknowledgements, which cannot be read again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::limits::{OUTPUT_PAUSE_BYTES, PIPELINE_MAX, READ_AHEAD_BYTES, TIGHT_OUTPUT_BYTES};
use crate::metrics::Metrics;
use crate::serve::conn::Conn;
use crate::serve::events::Piece;
use crate::serve::reactor::Reactor;

/// Body bytes that count against `inflight_bytes_max` until they are dropped, wherever the body is now.
pub struct Reserved {
    metrics: Arc<Metrics>,
    bytes: u64,
}

impl Reserved {
    #[cfg(test)]
    pub fn nothing(metrics: &Arc<Metrics>) -> Reserved {
        let metrics = Arc::clone(metrics);
        Reserved { metrics, bytes: 0 }
    }

    /// What was counted for the body that a connection has received.
    pub fn of(conn: &mut Conn, metrics: &Arc<Metrics>) -> Reserved {
        Reserved {
            metrics: Arc::clone(metrics),
            bytes: std::mem::take(&mut conn.reserved),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.metrics.inflight_bytes.sub(self.bytes);
    }
}

impl Reactor {
    /// Whether small replies may be buffered for clients that do not take them.
    pub fn room_for_replies(&self) -> bool {
        self.room_below(self.engine.config.client_bytes_max)
    }

    /// The same for what can be read again.
    pub fn room_for_bodies(&self) -> bool {
        self.room_below(self.engine.config.client_bytes_max / 2)
    }

    /// Whether an answer that cannot be read again, and of which `held` bytes are counted, may grow.
    pub fn room_for_more(&self, held: u64) -> bool {
        self.room_below(self.engine.config.client_bytes_max.saturating_add(held))
    }

    fn room_below(&self, bound: u64) -> bool {
        let metrics = &self.engine.metrics;
        let room = metrics.client_bytes.get() < bound;
        if !room {
            metrics.client_bytes_full.add(1);
        }
        room
    }

    /// Whether so much is owed to the client that its next request waits.
    pub fn is_full(&self, conn: &Conn) -> bool {
        let unsent = conn.unsent();
        conn.gate_count() >= PIPELINE_MAX
            || unsent > OUTPUT_PAUSE_BYTES
            || unsent > TIGHT_OUTPUT_BYTES && !self.room_for_replies()
    }

    /// Whether a read waits until what is before it has left: an answer of any size would come on top.
    pub fn is_full_for_reads(&self, conn: &Conn) -> bool {
        let unsent = conn.unsent();
        unsent > READ_AHEAD_BYTES || unsent > 0 && !self.room_for_bodies()
    }

    /// Counts what a connection buffers now.
    pub fn count_held(&self, conn: &mut Conn) {
        let held = conn.held();
        self.set_counted(conn, held);
    }

    pub fn count_nothing(&self, conn: &mut Conn) {
        self.set_counted(conn, 0);
    }

    fn set_counted(&self, conn: &mut Conn, held: u64) {
        let metrics = &self.engine.metrics;
        if held > conn.counted {
            metrics.client_bytes.add(held - conn.counted);
        } else if held < conn.counted {
            metrics.client_bytes.sub(conn.counted - held);
        }
        conn.counted = held;
    }
}

/// A piece that connections keep until their sockets take it: counted once, however many they are.
pub struct Kept {
    pub piece: Arc<Piece>,
    metrics: Arc<Metrics>,
}

impl Kept {
    pub fn new(piece: Arc<Piece>, metrics: &Arc<Metrics>) -> Kept {
        if piece.keepers.fetch_add(1, Relaxed) == 0 {
            metrics.client_bytes.add(piece.memory());
        }
        Kept {
            piece,
            metrics: Arc::clone(metrics),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.piece.keepers.fetch_sub(1, Relaxed) == 1 {
            self.metrics.client_bytes.sub(self.piece.memory());
        }
    }
}

/// What has arrived of an answer that its connection does not have yet.
pub struct Arriving {
    metrics: Arc<Metrics>,
    counted: u64,
}

impl Arriving {
    pub fn new(metrics: &Arc<Metrics>) -> Arriving {
        Arriving {
            metrics: Arc::clone(metrics),
            counted: 0,
        }
    }

    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// It takes this much memory now, which only grows.
    pub fn grow(&mut self, memory: usize) {
        let grown = (memory as u64).saturating_sub(self.counted);
        self.metrics.client_bytes.add(grown);
        self.counted += grown;
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.metrics.client_bytes.sub(self.counted);
    }
}

/// How many connections keep a piece.
pub type Keepers = AtomicU32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrives_is_counted_until_it_is_dropped() {
        let metrics = Arc::new(Metrics::default());
        let (mut one, mut other) = (Arriving::new(&metrics), Arriving::new(&metrics));
        one.grow(100);
        other.grow(50);
        one.grow(300);
        assert_eq!((one.counted(), metrics.client_bytes.get()), (300, 350));
        drop(one);
        assert_eq!(metrics.client_bytes.get(), 50);
        drop(other);
        assert_eq!(metrics.client_bytes.get(), 0);
    }
}
