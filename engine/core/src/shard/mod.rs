//! The write side: one open batch, group commit, acknowledgements by commit number; and the operations that
//! `serve` and the Python handle call.

pub mod ack;
pub mod adopt;
pub mod backup;
pub mod batch;
pub mod changes;
pub mod class;
pub mod commit;
pub mod create;
pub mod damage;
pub mod delete;
mod ebb;
pub mod engine;
pub mod fault;
pub mod feed;
pub mod globs;
mod lineage;
pub mod list;
pub mod loads;
pub mod local;
pub mod maintain;
pub mod marks;
pub mod plan;
pub mod pull;
pub mod read;
pub mod scrub;
pub mod space;
pub mod spill;
pub mod stage;
mod staged;
pub mod stages;
pub mod tails;
pub mod threads;
pub mod times;
pub mod write;

#[cfg(test)]
mod watched_tests;
