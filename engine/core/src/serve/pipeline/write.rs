//! Appends and creates with large bodies: looked through and stored by a worker, answered by the reactor as its own.

use crate::error::ErrorCode;
use crate::limits::HEAD_MAX_BYTES;
use crate::serve::append::append;
use crate::serve::create::create;
use crate::serve::http::{Method, Parsed, parse_head};
use crate::serve::route::{Route, route};
use crate::shard::create::Created;
use crate::shard::engine::{Engine, Undone};
use crate::shard::write::{Appended, WriteScratch};

pub enum Wrote {
    Appended(Appended),
    Created(Created),
}

/// Performs the write that the reactor has read the same head of.
pub fn run(engine: &Engine, head: &[u8], body: &[u8], received_ms: u64) -> Result<Wrote, Undone> {
    let changed = || Undone::refused(ErrorCode::Internal);
    let Ok(Parsed::Complete(head)) = parse_head(head, &mut 0, HEAD_MAX_BYTES) else {
        return Err(changed());
    };
    let Ok(Route::Stream(path)) = route(&head) else {
        return Err(changed());
    };
    let now_ms = engine.now_ms();
    if head.method == Method::Put {
        return create(engine, &head, &path, body, now_ms, received_ms).map(Wrote::Created);
    }
    let (mut wire, mut scratch) = (Vec::new(), WriteScratch::default());
    append(engine, &head, &path, body, now_ms, &mut wire, &mut scratch).map(Wrote::Appended)
}
