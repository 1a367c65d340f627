//! Millstream's engine: it moves bytes and keeps promises.
//!
//! Layers, downward only (see ARCHITECTURE.md for the walks):
//!
//! ```text
//! serve    sockets, HTTP, live readers, the way to the control plane
//! verify   every checksum and relation of a data directory, and its repair (beside serve)
//! shard    open batch, group commit, acknowledgements; the operations on streams
//! log      log files, recovery, checkpoints, segments, packs, catalog, the directory of streams
//! stream   one stream, deterministically: state, decisions, offsets (no I/O)
//! codec    frames of the log           refusal  what is answered instead of success
//! model    the one vocabulary
//! limits   error   io (doors)   config   metrics   report
//! ```

pub mod codec;
pub mod config;
pub mod error;
pub mod io;
pub mod limits;
pub mod log;
pub mod metrics;
pub mod model;
pub mod refusal;
pub mod report;
pub mod serve;
pub mod shard;
pub mod stream;
pub mod verify;
