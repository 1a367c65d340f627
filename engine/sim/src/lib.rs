//! The simulation: the real engine on a disk that breaks, driven from one seed, judged by a model.
//!
//! ```text
//! campaign  many seeds, or one again, with a report of what failed
//! plan      seed -> lives of a server: operations, faults, how each life ends     (shrink cuts a plan down)
//! workload  runs a plan's operations against the engine, without sockets and threads
//! run       the lives in order: open, check, work, break, and again
//! start     what a start found, and whether that may be; damage does the same with flipped bits
//! model     what the operations mean; check compares the engine with it
//! disk      durable and volatile image of every file; power cuts, torn writes, failing calls, lies
//! tally     what each class lost, for the docs
//! doors     clock and randomness from the seed
//! ```
//!
//! The oracle rests on one fact: there is one log, so what a restart finds must be *exactly* the model's state
//! after some prefix of the staged groups, and that prefix must reach as far as anything was promised.

pub mod campaign;
pub mod check;
pub mod damage;
pub mod disk;
pub mod doors;
pub mod history;
pub mod image;
pub mod model;
pub mod plan;
pub mod run;
pub mod shrink;
pub mod start;
pub mod tally;
pub mod workload;
