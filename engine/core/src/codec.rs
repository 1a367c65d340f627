//! Bytes <-> frames: the format of the log.
//!
//! A log file is a 64-byte header and then batches; a batch is one group commit: a header and its frames.
//! Everything is little endian. All checksums are CRC32C seeded with the file's generation, so that nothing an
//! earlier use of a recycled file left behind ever validates.
//!
//! ```text
//! file header   0 "MSWAL001"   8 u64 generation   16 u32 crc(8..16)   20.. zero up to 64
//!
//! batch header  0 u32 "MSB1"   4 u32 crc(8..64)   8 u64 generation   16 u64 batch number   24 u64 term
//!              32 u64 synced up to (sequence)    40 u64 first sequence   48 u32 frame bytes   52 u32 frames   56 u64 zero
//!
//! frame         0 u32 length    4 u32 crc(8..length)    8 u8 kind   9 u8 flags   10 u16 extra length   12 u32 records
//!              16 u64 sequence 24 u64 stream           32 u64 position           40 u64 time ms       48 u64 epoch
//!              56 extra, then payload
//!
//! extra of an append: [producer: u64 epoch, u64 seq, u16 length, id] [stream seq: u16 length, bytes], by flags
//! example: append of "hi" as record 1 of stream 7 at position 0:
//!   3a000000 crc 02 10 0000 01000000 | seq | 07.. | 00.. | time | epoch | 6869
//! ```
//!
//! Invariants
//! - `I-CODEC-1` A frame is changed after staging only by [`seal_batch`], which fills the checksums.
//! - `I-CODEC-2` Decoding never reads outside its slice and never panics, whatever the bytes are.

use crate::io::sabotage::{self, Sabotage};
use crate::model::StreamId;

pub mod adopt;
pub mod checksum;

pub const FILE_HEADER_BYTES: u64 = 64;
pub const BATCH_HEADER_BYTES: usize = 64;
pub const FRAME_HEADER_BYTES: usize = 56;
const FILE_MAGIC: &[u8; 8] = b"MSWAL001";
const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"MSB1");

/// The next frame belongs to the same group: recovery takes a group whole or not at all.
pub const FLAG_MORE: u8 = 1;
/// The stream is closed behind this frame's payload.
pub const FLAG_CLOSE: u8 = 2;
pub const FLAG_PRODUCER: u8 = 4;
pub const FLAG_STREAM_SEQ: u8 = 8;
/// Of every frame since accesses are told by `Touch` alone, in time that nobody can set. Without it, in logs of older
/// versions, appends told them too, by the wall clock.
pub const FLAG_TOUCHES: u8 = 16;

/// What a frame does. Each frame changes exactly one stream (or none: `Start`, `CleanStop`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameKind {
    /// A stream comes to be; extra = encoded configuration, payload = first content.
    Create = 1,
    /// Bytes, or nothing (with `FLAG_CLOSE`).
    Append = 2,
    /// Hidden but kept for its forks. Whichever of this and `Purge` removes a live stream says where that ended: position
    /// and epoch of the tail, payload = epoch of the newest record, and how many records there are.
    SoftDelete = 3,
    /// Gone with its bytes.
    Purge = 4,
    ForkAdded = 5,
    ForkReleased = 6,
    /// A sliding TTL was renewed; time = last access, by the steady clock of the process.
    Touch = 7,
    /// First frame of each start; payload = what the last run's end may have lost, and which boot this is.
    Start = 8,
    /// Last frame of a clean shutdown.
    CleanStop = 9,
    /// The class changes; extra = class, payload = since when, epoch = the epoch that begins here.
    Configure = 10,
    /// Bytes that lie in staged packs are appended; extra as of an append, payload = where they are ([`adopt`]).
    Adopt = 11,
}

impl FrameKind {
    fn from_u8(value: u8) -> Option<FrameKind> {
        use FrameKind::*;
        [
            Create,
            Append,
            SoftDelete,
            Purge,
            ForkAdded,
            ForkReleased,
            Touch,
            Start,
            CleanStop,
            Configure,
            Adopt,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == value)
    }
}

/// A frame about to be staged, or one read back; borrows its variable parts.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    pub kind: FrameKind,
    pub flags: u8,
    pub records: u32,
    pub sequence: u64,
    pub stream: StreamId,
    pub position: u64,
    pub time_ms: u64,
    pub epoch: u64,
    pub extra: &'a [u8],
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    pub fn control(kind: FrameKind, stream: StreamId, time_ms: u64) -> Frame<'a> {
        Frame {
            kind,
            flags: 0,
            records: 0,
            sequence: 0,
            stream,
            position: 0,
            time_ms,
            epoch: 0,
            extra: &[],
            payload: &[],
        }
    }

    pub fn encoded_len(&self) -> usize {
        FRAME_HEADER_BYTES + self.extra.len() + self.payload.len()
    }

    /// Appends the frame to an open batch, checksum left zero until the batch is sealed.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let length = self.encoded_len() as u32;
        let mut head = [0u8; FRAME_HEADER_BYTES];
        head[0..4].copy_from_slice(&length.to_le_bytes());
        head[8] = self.kind as u8;
        head[9] = self.flags;
        head[10..12].copy_from_slice(&(self.extra.len() as u16).to_le_bytes());
        head[12..16].copy_from_slice(&self.records.to_le_bytes());
        head[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        head[24..32].copy_from_slice(&self.stream.0.to_le_bytes());
        head[32..40].copy_from_slice(&self.position.to_le_bytes());
        head[40..48].copy_from_slice(&self.time_ms.to_le_bytes());
        head[48..56].copy_from_slice(&self.epoch.to_le_bytes());
        out.reserve(length as usize);
        out.extend_from_slice(&head);
        out.extend_from_slice(self.extra);
        out.extend_from_slice(self.payload);
    }

    /// Reads the frame at the front of `bytes`; `None` if it is not whole or does not validate.
    pub fn decode(bytes: &'a [u8], generation: u64) -> Option<(Frame<'a>, usize)> {
        let length = u32_at(bytes, 0)? as usize;
        if length < FRAME_HEADER_BYTES || length > bytes.len() {
            return None;
        }
        let frame = &bytes[..length];
        if checksum(generation, &frame[8..]) != u32_at(frame, 4)?
            && !sabotage::is(Sabotage::DropChecksum)
        {
            return None;
        }
        let extra_len = u16_at(frame, 10)? as usize;
        let body = &frame[FRAME_HEADER_BYTES..];
        if extra_len > body.len() {
            return None;
        }
        let (extra, payload) = body.split_at(extra_len);
        let frame = Frame {
            kind: FrameKind::from_u8(frame[8])?,
            flags: frame[9],
            records: u32_at(frame, 12)?,
            sequence: u64_at(frame, 16)?,
            stream: StreamId(u64_at(frame, 24)?),
            position: u64_at(frame, 32)?,
            time_ms: u64_at(frame, 40)?,
            epoch: u64_at(frame, 48)?,
            extra,
            payload,
        };
        Some((frame, length))
    }
}

/// The producer tuple and `Stream-Seq` that commit with an append.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppendExtra<'a> {
    pub producer: Option<ProducerTag<'a>>,
    pub stream_seq: Option<&'a [u8]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerTag<'a> {
    pub id: &'a [u8],
    pub epoch: u64,
    pub seq: u64,
}

/// First byte of the id of a producer that commits stages. No header can carry it, so that the two kinds of
/// producers never meet, whatever their names are.
pub const COMMITTER_MARK: u8 = 0;

pub fn is_committer(id: &[u8]) -> bool {
    id.first() == Some(&COMMITTER_MARK)
}

impl<'a> AppendExtra<'a> {
    pub fn flags(&self) -> u8 {
        (if self.producer.is_some() {
            FLAG_PRODUCER
        } else {
            0
        }) | (if self.stream_seq.is_some() {
            FLAG_STREAM_SEQ
        } else {
            0
        })
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        if let Some(producer) = &self.producer {
            out.extend_from_slice(&producer.epoch.to_le_bytes());
            out.extend_from_slice(&producer.seq.to_le_bytes());
            put_short(out, producer.id);
        }
        if let Some(seq) = self.stream_seq {
            put_short(out, seq);
        }
    }

    pub fn decode(flags: u8, extra: &'a [u8]) -> Option<AppendExtra<'a>> {
        let mut reader = Reader::new(extra);
        let producer = if flags & FLAG_PRODUCER != 0 {
            let (epoch, seq) = (reader.u64()?, reader.u64()?);
            Some(ProducerTag {
                id: reader.short()?,
                epoch,
                seq,
            })
        } else {
            None
        };
        let stream_seq = if flags & FLAG_STREAM_SEQ != 0 {
            Some(reader.short()?)
        } else {
            None
        };
        Some(AppendExtra {
            producer,
            stream_seq,
        })
    }
}

/// Header of one group commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    pub generation: u64,
    pub number: u64,
    pub term: u64,
    /// Every frame up to this sequence was synced before this batch was written.
    pub synced_up_to: u64,
    pub first_sequence: u64,
    pub frame_bytes: u32,
    pub frames: u32,
}

impl BatchHeader {
    pub fn decode(bytes: &[u8], generation: u64) -> Option<BatchHeader> {
        let bytes = bytes.get(..BATCH_HEADER_BYTES)?;
        let whole = checksum(generation, &bytes[8..]) == u32_at(bytes, 4)?
            || sabotage::is(Sabotage::DropChecksum);
        if u32_at(bytes, 0)? != BATCH_MAGIC || !whole {
            return None;
        }
        let header = BatchHeader {
            generation: u64_at(bytes, 8)?,
            number: u64_at(bytes, 16)?,
            term: u64_at(bytes, 24)?,
            synced_up_to: u64_at(bytes, 32)?,
            first_sequence: u64_at(bytes, 40)?,
            frame_bytes: u32_at(bytes, 48)?,
            frames: u32_at(bytes, 52)?,
        };
        let of_this_file =
            header.generation == generation || sabotage::is(Sabotage::ForgetGeneration);
        of_this_file.then_some(header)
    }
}

/// Fills header and checksums of a batch whose first [`BATCH_HEADER_BYTES`] were left free.
pub fn seal_batch(batch: &mut [u8], header: &BatchHeader) {
    let mut at = BATCH_HEADER_BYTES;
    for _ in 0..header.frames {
        let length =
            u32::from_le_bytes([batch[at], batch[at + 1], batch[at + 2], batch[at + 3]]) as usize;
        let crc = checksum(header.generation, &batch[at + 8..at + length]);
        batch[at + 4..at + 8].copy_from_slice(&crc.to_le_bytes());
        at += length;
    }
    assert_eq!(at, batch.len(), "a batch is exactly its frames");
    batch[0..4].copy_from_slice(&BATCH_MAGIC.to_le_bytes());
    batch[8..16].copy_from_slice(&header.generation.to_le_bytes());
    batch[16..24].copy_from_slice(&header.number.to_le_bytes());
    batch[24..32].copy_from_slice(&header.term.to_le_bytes());
    batch[32..40].copy_from_slice(&header.synced_up_to.to_le_bytes());
    batch[40..48].copy_from_slice(&header.first_sequence.to_le_bytes());
    batch[48..52].copy_from_slice(&header.frame_bytes.to_le_bytes());
    batch[52..56].copy_from_slice(&header.frames.to_le_bytes());
    batch[56..64].fill(0);
    let crc = checksum(header.generation, &batch[8..BATCH_HEADER_BYTES]);
    batch[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// First bytes of every log file.
pub fn file_header(generation: u64) -> [u8; FILE_HEADER_BYTES as usize] {
    let mut bytes = [0u8; FILE_HEADER_BYTES as usize];
    bytes[0..8].copy_from_slice(FILE_MAGIC);
    bytes[8..16].copy_from_slice(&generation.to_le_bytes());
    let crc = checksum(generation, &bytes[8..16]);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Generation a file header names, if it is whole.
pub fn parse_file_header(bytes: &[u8]) -> Option<u64> {
    let generation = u64_at(bytes, 8)?;
    let valid =
        bytes.get(..8)? == FILE_MAGIC && checksum(generation, &bytes[8..16]) == u32_at(bytes, 16)?;
    valid.then_some(generation)
}

/// CRC32C that depends on the file's generation. The seed is a checksum itself: a plain number would cancel
/// against the same number at the front of a header, and a damaged generation would pass for another file's.
pub fn checksum(mut generation: u64, bytes: &[u8]) -> u32 {
    if sabotage::is(Sabotage::ForgetGeneration) {
        generation = 0;
    }
    let seed = crc32c::crc32c(&generation.to_le_bytes());
    crc32c::crc32c_append(seed, bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Writes a length-prefixed byte string of less than 64 KiB.
pub fn put_short(out: &mut Vec<u8>, bytes: &[u8]) {
    debug_assert!(bytes.len() <= u16::MAX as usize);
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Bounds-checked reader over encoded bytes.
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        if count > self.rest.len() {
            return None;
        }
        let (head, rest) = self.rest.split_at(count);
        self.rest = rest;
        Some(head)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.take(2)
            .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    pub fn u32(&mut self) -> Option<u32> {
        u32_at(self.take(4)?, 0)
    }

    pub fn u64(&mut self) -> Option<u64> {
        u64_at(self.take(8)?, 0)
    }

    pub fn short(&mut self) -> Option<&'a [u8]> {
        let length = self.u16()? as usize;
        self.take(length)
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_batch(generation: u64) -> Vec<u8> {
        let mut batch = vec![0u8; BATCH_HEADER_BYTES];
        let mut extra = Vec::new();
        let tag = AppendExtra {
            producer: Some(ProducerTag {
                id: b"p\xff",
                epoch: 1,
                seq: 2,
            }),
            stream_seq: Some(b"09"),
        };
        tag.encode(&mut extra);
        for sequence in 5..8 {
            let frame = Frame {
                flags: tag.flags(),
                extra: &extra,
                payload: b"hello",
                sequence,
                ..Frame::control(FrameKind::Append, StreamId(7), 9)
            };
            frame.encode(&mut batch);
        }
        let header = BatchHeader {
            generation,
            number: 3,
            term: 0,
            synced_up_to: 4,
            first_sequence: 5,
            frame_bytes: (batch.len() - BATCH_HEADER_BYTES) as u32,
            frames: 3,
        };
        seal_batch(&mut batch, &header);
        assert_eq!(BatchHeader::decode(&batch, generation), Some(header));
        batch
    }

    #[test]
    fn frames_round_trip_with_their_extra() {
        let batch = sample_batch(11);
        let (frame, length) = Frame::decode(&batch[BATCH_HEADER_BYTES..], 11).expect("first frame");
        assert_eq!(
            (frame.sequence, frame.stream, frame.payload),
            (5, StreamId(7), &b"hello"[..])
        );
        let extra = AppendExtra::decode(frame.flags, frame.extra).expect("extra");
        assert_eq!(extra.producer.map(|tag| tag.id), Some(&b"p\xff"[..]));
        assert_eq!(extra.stream_seq, Some(&b"09"[..]));
        assert!(Frame::decode(&batch[BATCH_HEADER_BYTES + length..], 11).is_some());
    }

    #[test]
    fn a_header_does_not_pass_for_one_of_another_generation() {
        let batch = sample_batch(11);
        for bit in 0..64 {
            let mut damaged = batch.clone();
            damaged[8 + bit / 8] ^= 1 << (bit % 8);
            let claimed = 11 ^ (1u64 << bit);
            assert!(
                BatchHeader::decode(&damaged, claimed).is_none(),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn another_generation_or_any_flipped_bit_does_not_validate() {
        let batch = sample_batch(11);
        assert!(BatchHeader::decode(&batch, 12).is_none());
        assert!(Frame::decode(&batch[BATCH_HEADER_BYTES..], 12).is_none());
        let first_frame = BATCH_HEADER_BYTES..BATCH_HEADER_BYTES + 80;
        for at in first_frame {
            for bit in 0..8 {
                let mut damaged = batch.clone();
                damaged[at] ^= 1 << bit;
                let decoded = Frame::decode(&damaged[BATCH_HEADER_BYTES..], 11);
                assert!(decoded.is_none(), "byte {at} bit {bit} went unnoticed");
            }
        }
    }
}
