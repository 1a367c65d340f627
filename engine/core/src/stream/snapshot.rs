//! A stream's state as bytes: the value of its catalog entry and the configuration of its create frame.
//!
//! ```text
//! version u8 (3) | id u64 | class u8 | life u8 | flags u8 | created u64 | first epoch u64 | fork count u32
//! start u64 | start records u64 | tail u64 | records u64 | last time u64 | applied u64 | control u64 | class since u64
//! path short | content type short | later epochs u32 x (u64, u64)
//! by flags: closed by (epoch, seq, short) | expiry | fork | stream seq short | producers u32 x (short, 4 x u64)
//!           damaged u32 x (start u64, end u64) | skipped numbers of producers u32 x (short, start u64, end u64)
//! extents u32 x extent       (only in the catalog; a create frame has none)
//! ```
//!
//! Of an `ephemeral` stream only what outlives the process is written: its identity, its configuration, and the
//! bytes that an earlier, stronger class or a fork has put into a checkpoint.

use std::sync::Arc;

use crate::codec::{Reader, put_short};
use crate::model::{Class, ContentType, Extent, FileRef, StreamId};
use crate::stream::damage;
use crate::stream::handle::Stream;
use crate::stream::hot::Hot;
use crate::stream::line::Line;
use crate::stream::producers::{ProducerState, Producers, Remembered};
use crate::stream::state::{ClosedBy, Expiry, Fork, Life, StreamState};

const VERSION: u8 = 3;
/// The version before: its `ephemeral` streams remember producers of bytes that were lost.
const VERSION_UNSETTLED: u8 = 2;
const CLOSED: u8 = 1;
const CLOSED_BY: u8 = 2;
const EXPIRY: u8 = 4;
const FORK: u8 = 8;
const STREAM_SEQ: u8 = 16;
const PRODUCERS: u8 = 32;
const DAMAGED: u8 = 64;
const SKIPPED: u8 = 128;
/// Of a fork: its offset was asked for; the way to its ancestors is written down (older directories have forks without).
const FORK_REQUESTED: u8 = 1;
const FORK_LINE: u8 = 2;

/// Encodes everything but the extents, which a checkpoint knows only after writing.
pub fn encode(path: &str, content_type: &ContentType, state: &StreamState, out: &mut Vec<u8>) {
    out.push(VERSION);
    put_u64(out, state.id.0);
    out.push(state.class as u8);
    out.push(state.life as u8);
    out.push(flags(state));
    put_u64(out, state.created_ms);
    put_u64(out, state.first_epoch);
    out.extend_from_slice(&state.fork_count.to_le_bytes());
    let (tail, records) = state.lasting_tail();
    for value in [
        state.start,
        state.start_records,
        tail,
        records,
        state.last_time_ms,
        state.applied_sequence,
        state.control_sequence,
        state.class_since,
    ] {
        put_u64(out, value);
    }
    put_short(out, path.as_bytes());
    put_short(out, content_type.text.as_bytes());
    let lasting = state
        .later_epochs
        .partition_point(|(_, start)| *start <= tail);
    put_count(out, lasting);
    for (epoch, start) in &state.later_epochs[..lasting] {
        put_u64(out, *epoch);
        put_u64(out, *start);
    }
    encode_optional(state, out);
}

fn flags(state: &StreamState) -> u8 {
    (if state.closed { CLOSED } else { 0 })
        | (if state.lasting_closed_by().is_some() {
            CLOSED_BY
        } else {
            0
        })
        | (if state.expiry.is_some() { EXPIRY } else { 0 })
        | (if state.fork.is_some() { FORK } else { 0 })
        | (if state.lasting_seq().is_some() {
            STREAM_SEQ
        } else {
            0
        })
        | (if state.producers().is_some() {
            PRODUCERS
        } else {
            0
        })
        | (if lasting_damage(state).is_empty() {
            0
        } else {
            DAMAGED
        })
        | (if skipped(state).next().is_some() {
            SKIPPED
        } else {
            0
        })
}

/// The producers that went past numbers after a possible loss: few, so they stand apart from the rest.
fn skipped(state: &StreamState) -> impl Iterator<Item = (&[u8], (u64, u64))> {
    let producers = state.lasting_producers();
    producers
        .filter(|(_, known)| known.has_skipped())
        .map(|(id, known)| (id, known.skipped))
}

/// Damage goes with the bytes that have it: others will stand at their positions.
fn lasting_damage(state: &StreamState) -> Vec<damage::Range> {
    let known = state.damaged.as_deref().map_or(&[][..], Vec::as_slice);
    damage::below(known, state.lasting_tail().0).collect()
}

fn encode_optional(state: &StreamState, out: &mut Vec<u8>) {
    if let Some(by) = state.lasting_closed_by() {
        put_u64(out, by.epoch);
        put_u64(out, by.seq);
        put_short(out, &by.id);
    }
    if let Some(expiry) = &state.expiry {
        out.push(u8::from(expiry.inherited));
        put_u64(out, expiry.ttl_seconds.unwrap_or(u64::MAX));
        put_u64(out, expiry.expires_at_ms.unwrap_or(u64::MAX));
        put_u64(out, expiry.last_access_ms());
    }
    if let Some(fork) = &state.fork {
        put_u64(out, fork.source.0);
        put_u64(out, fork.anchor);
        out.push(FORK_LINE | (u8::from(fork.anchor_requested) * FORK_REQUESTED));
        put_u64(out, fork.sub_offset);
        put_short(out, fork.source_path.as_bytes());
        fork.line.encode(out);
    }
    if let Some(seq) = state.lasting_seq() {
        put_short(out, seq);
    }
    if state.producers().is_some() {
        put_count(out, state.lasting_producers().count());
        for (id, producer) in state.lasting_producers() {
            put_short(out, id);
            for value in [
                producer.epoch,
                producer.last_seq,
                producer.last_time_ms,
                producer.stream_epoch,
            ] {
                put_u64(out, value);
            }
        }
    }
    let damaged = lasting_damage(state);
    if !damaged.is_empty() {
        put_count(out, damaged.len());
        for (start, end) in damaged {
            put_u64(out, start);
            put_u64(out, end);
        }
    }
    let count = skipped(state).count();
    if count > 0 {
        put_count(out, count);
        for (id, (start, end)) in skipped(state) {
            put_short(out, id);
            put_u64(out, start);
            put_u64(out, end);
        }
    }
}

pub fn encode_extents(extents: &[Extent], out: &mut Vec<u8>) {
    put_count(out, extents.len());
    for extent in extents {
        let (kind, owner, number) = match extent.file {
            FileRef::Segment { owner, number } => (0u8, owner.0, number),
            FileRef::Pack { number } => (1u8, 0, number),
            // Not an extent that outlives the process: nothing decodes it, so that a mistake is loud.
            FileRef::Spill { number } => (2u8, 0, number),
        };
        out.push(kind);
        out.extend_from_slice(&number.to_le_bytes());
        out.extend_from_slice(&extent.index_count.to_le_bytes());
        for value in [
            owner,
            extent.start,
            extent.len,
            extent.file_position,
            extent.index_position,
            extent.base_records,
        ] {
            put_u64(out, value);
        }
    }
}

/// Ends a catalog value with a checksum: the store below does not check what it reads.
pub fn seal(value: &mut Vec<u8>) {
    let crc = crc32c::crc32c(value);
    value.extend_from_slice(&crc.to_le_bytes());
}

/// A catalog value without its checksum; `None` if it is damaged.
pub fn unseal(value: &[u8]) -> Option<&[u8]> {
    let (bytes, crc) = value.split_last_chunk::<4>()?;
    (crc32c::crc32c(bytes) == u32::from_le_bytes(*crc)).then_some(bytes)
}

/// Whether an encoded stream expires; looks at one byte.
pub fn has_expiry(value: &[u8]) -> bool {
    value.get(11).is_some_and(|flags| flags & EXPIRY != 0)
}

/// Whether an encoded stream has damaged ranges; looks at one byte.
pub fn has_damage(value: &[u8]) -> bool {
    value.get(11).is_some_and(|flags| flags & DAMAGED != 0)
}

/// Whether an encoded stream is soft-deleted and no fork needs it: its purge was lost with a crash.
pub fn is_unneeded(value: &[u8]) -> bool {
    value.get(10) == Some(&(Life::SoftDeleted as u8)) && value.get(28..32) == Some(&[0; 4])
}

/// Decodes a snapshot with or without extents. `None` means that the bytes are not one.
pub fn decode(bytes: &[u8], intern: &dyn Fn(&str) -> Arc<ContentType>) -> Option<Stream> {
    decode_with(bytes, intern, true)
}

/// The same without the producers, which may be most of it and are of no use to those who only read.
pub fn decode_to_read(bytes: &[u8], intern: &dyn Fn(&str) -> Arc<ContentType>) -> Option<Stream> {
    // What ends by itself is not only read.
    let whole = has_expiry(bytes);
    decode_with(bytes, intern, whole)
}

fn decode_with(
    bytes: &[u8],
    intern: &dyn Fn(&str) -> Arc<ContentType>,
    whole: bool,
) -> Option<Stream> {
    let mut reader = Reader::new(bytes);
    let version = reader.u8()?;
    if version != VERSION && version != VERSION_UNSETTLED {
        return None;
    }
    let id = StreamId(reader.u64()?);
    let class = Class::from_u8(reader.u8()?)?;
    let life = match reader.u8()? {
        0 => Life::Live,
        1 => Life::SoftDeleted,
        _ => return None,
    };
    let flags = reader.u8()?;
    let mut state = StreamState::new(id, class, reader.u64()?);
    let logged = &mut state.logged;
    logged.life = life;
    logged.closed = flags & CLOSED != 0;
    logged.first_epoch = reader.u64()?;
    logged.fork_count = reader.u32()?;
    logged.start = reader.u64()?;
    logged.start_records = reader.u64()?;
    logged.tail = reader.u64()?;
    logged.records = reader.u64()?;
    logged.last_time_ms = reader.u64()?;
    logged.applied_sequence = reader.u64()?;
    logged.control_sequence = reader.u64()?;
    logged.class_since = reader.u64()?;
    let path = std::str::from_utf8(reader.short()?).ok()?;
    let content_type = intern(std::str::from_utf8(reader.short()?).ok()?);
    for _ in 0..reader.u32()? {
        logged.later_epochs.push((reader.u64()?, reader.u64()?));
    }
    decode_optional(&mut reader, flags, whole, &mut state)?;
    if version == VERSION_UNSETTLED {
        forget_unsettled(&mut state);
    }
    if !reader.is_empty() {
        state.extents = Arc::new(decode_extents(&mut reader)?);
    }
    state.cold_records = state.records;
    state.hot = Hot::starting_at(state.tail);
    state.publish_applied();
    Some(Stream::new(id, path, content_type, state))
}

/// The version before told nothing of bytes that were in memory alone. Who sent some that may be lost is not believed, be
/// it that the stream has had another class since: he is taken at his word.
fn forget_unsettled(state: &mut StreamState) {
    let in_memory = state.is_volatile();
    let logged = &mut state.logged;
    if in_memory {
        logged.closed_by = None;
    }
    let (later, since) = (&logged.later_epochs, logged.class_since);
    if let Remembered::These(producers) = &mut logged.producers {
        producers.forget_appenders(|known| {
            let lost = |(epoch, _): &(u64, u64)| known.stream_epoch < *epoch && *epoch <= since;
            in_memory || later.iter().any(lost)
        });
    }
}

fn decode_optional(
    reader: &mut Reader<'_>,
    flags: u8,
    whole: bool,
    state: &mut StreamState,
) -> Option<()> {
    if flags & CLOSED_BY != 0 {
        let (epoch, seq) = (reader.u64()?, reader.u64()?);
        state.logged.closed_by = Some(Box::new(ClosedBy {
            id: reader.short()?.into(),
            epoch,
            seq,
        }));
    }
    if flags & EXPIRY != 0 {
        let inherited = reader.u8()? != 0;
        let (ttl, at, access) = (reader.u64()?, reader.u64()?, reader.u64()?);
        state.logged.expiry = Some(Box::new(Expiry {
            ttl_seconds: (ttl != u64::MAX).then_some(ttl),
            expires_at_ms: (at != u64::MAX).then_some(at),
            inherited,
            logged_access_ms: access,
            steady_access_ms: 0,
        }));
    }
    if flags & FORK != 0 {
        let source = StreamId(reader.u64()?);
        let anchor = reader.u64()?;
        let told = reader.u8()?;
        let sub_offset = reader.u64()?;
        let source_path = std::str::from_utf8(reader.short()?).ok()?.into();
        let line = if told & FORK_LINE != 0 {
            Line::decode(reader, state.id)?
        } else {
            Line::unknown(source, state.created_ms)
        };
        state.logged.fork = Some(Box::new(Fork {
            source,
            source_path,
            anchor,
            anchor_requested: told & FORK_REQUESTED != 0,
            sub_offset,
            line,
        }));
    }
    if flags & STREAM_SEQ != 0 {
        state.logged.stream_seq = Some(reader.short()?.into());
    }
    if flags & PRODUCERS != 0 && !whole {
        for _ in 0..reader.u32()? {
            reader.short()?;
            reader.take(4 * size_of::<u64>())?;
        }
        state.logged.producers = Remembered::LeftOut;
    } else if flags & PRODUCERS != 0 {
        let mut producers = Producers::default();
        for _ in 0..reader.u32()? {
            let id = reader.short()?;
            let (epoch, last_seq) = (reader.u64()?, reader.u64()?);
            let (last_time_ms, stream_epoch) = (reader.u64()?, reader.u64()?);
            producers.remember(
                id,
                ProducerState {
                    epoch,
                    last_seq,
                    last_time_ms,
                    stream_epoch,
                    skipped: (0, 0),
                },
            );
        }
        state.logged.producers = Remembered::These(Box::new(producers));
    }
    if flags & DAMAGED != 0 {
        let mut damaged = Vec::new();
        for _ in 0..reader.u32()? {
            damaged.push((reader.u64()?, reader.u64()?));
        }
        state.damaged = Some(Box::new(damaged));
    }
    if flags & SKIPPED != 0 {
        for _ in 0..reader.u32()? {
            let id = reader.short()?;
            let skipped = (reader.u64()?, reader.u64()?);
            if whole {
                state.logged.producers.all_mut().set_skipped(id, skipped);
            }
        }
    }
    Some(())
}

fn decode_extents(reader: &mut Reader<'_>) -> Option<Vec<Extent>> {
    let count = reader.u32()?;
    let mut extents = Vec::new();
    for _ in 0..count {
        let kind = reader.u8()?;
        let number = reader.u32()?;
        let index_count = reader.u32()?;
        let owner = StreamId(reader.u64()?);
        let file = match kind {
            0 => FileRef::Segment { owner, number },
            1 => FileRef::Pack { number },
            _ => return None,
        };
        extents.push(Extent {
            start: reader.u64()?,
            len: reader.u64()?,
            file,
            file_position: reader.u64()?,
            index_position: reader.u64()?,
            index_count,
            base_records: reader.u64()?,
        });
    }
    Some(extents)
}

fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&(count as u32).to_le_bytes());
}
