//! One stream, deterministically: state, decisions and read planning. No I/O; time is an argument.
//!
//! The same functions run for live requests, in recovery and in simulation.

pub mod append;
pub mod change;
pub mod commit;
pub mod damage;
pub mod handle;
pub mod hot;
pub mod json;
pub mod key;
pub mod lifecycle;
pub mod line;
pub mod locate;
pub mod memory;
pub mod messages;
pub mod offsets;
pub mod producers;
pub mod snapshot;
pub mod state;
pub mod unsettled;
