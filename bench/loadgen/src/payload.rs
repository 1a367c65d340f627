//! Tagged payloads: every append of a run is unique and can be told from its bytes alone.
//!
//! ```text
//! | connection, 6 hex | ':' | sequence, 12 hex | ':' | run, 8 hex | ':' | printable noise ... |
//! ```
//! The noise is taken from a fixed buffer at a place that depends on the tag, so the whole payload
//! can be rebuilt when reading back and compared byte by byte. All payloads of a run have one
//! length: a stream of concatenated payloads is cut without separators.

/// Bytes of the tag: the shortest payload possible.
pub const TAG_BYTES: usize = 6 + 1 + 12 + 1 + 8 + 1;
const NOISE_BYTES: usize = 64 * 1024;
/// The odd constant of splitmix64.
const WEYL: u64 = 0x9e37_79b9_7f4a_7c15;
const HEX: &[u8; 16] = b"0123456789abcdef";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    pub connection: u32,
    pub sequence: u64,
}

pub struct Payloads {
    run: u32,
    length: usize,
    noise: Vec<u8>,
}

impl Payloads {
    pub fn new(run: u32, length: usize) -> Result<Self, String> {
        if length < TAG_BYTES {
            return Err(format!(
                "a body needs at least {TAG_BYTES} bytes for its tag"
            ));
        }
        let noise = noise(0x6d69_6c6c, NOISE_BYTES + length);
        Ok(Self {
            run,
            length,
            noise: noise.iter().map(|byte| b' ' + 1 + byte % 94).collect(),
        })
    }

    pub fn length(&self) -> usize {
        self.length
    }

    pub fn append_to(&self, out: &mut Vec<u8>, tag: Tag) {
        let mut head = [b':'; TAG_BYTES];
        write_hex(&mut head[..6], u64::from(tag.connection));
        write_hex(&mut head[7..19], tag.sequence);
        write_hex(&mut head[20..28], u64::from(self.run));
        out.extend_from_slice(&head);
        let fill = self.length - TAG_BYTES;
        let place = (tag
            .sequence
            .wrapping_mul(61)
            .wrapping_add(u64::from(tag.connection) * 8191)) as usize;
        let place = place % NOISE_BYTES;
        out.extend_from_slice(&self.noise[place..place + fill]);
    }

    /// The tag of `bytes` if they are exactly a payload of this run.
    pub fn recognise(&self, bytes: &[u8], scratch: &mut Vec<u8>) -> Option<Tag> {
        if bytes.len() != self.length {
            return None;
        }
        let connection = u32::try_from(read_hex(&bytes[..6])?).ok()?;
        let tag = Tag {
            connection,
            sequence: read_hex(&bytes[7..19])?,
        };
        scratch.clear();
        self.append_to(scratch, tag);
        (scratch.as_slice() == bytes).then_some(tag)
    }
}

/// A checksum of one payload's bytes. Checksums are summed over a run: the order of payloads from
/// several connections in one stream is the server's choice, what they are is not.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = bytes.len() as u64;
    for word in bytes.chunks(8) {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        sum = (sum ^ u64::from_le_bytes(padded))
            .wrapping_mul(WEYL)
            .rotate_left(29);
    }
    sum ^ (sum >> 32)
}

/// Incompressible bytes that depend on `seed` alone (splitmix64).
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&mixed_bits(state).to_le_bytes());
        state = state.wrapping_add(WEYL);
    }
    bytes.truncate(length);
    bytes
}

/// The splitmix64 output for `state`: near numbers give bits without a relation.
pub fn mixed_bits(state: u64) -> u64 {
    let mut word = state.wrapping_add(WEYL);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

pub fn write_hex(out: &mut [u8], value: u64) {
    for (index, byte) in out.iter_mut().rev().enumerate() {
        *byte = HEX[((value >> (4 * index)) & 15) as usize];
    }
}

pub fn read_hex(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0u64, |value, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some((value << 4) | u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_recognised_only_whole() {
        let payloads = Payloads::new(7, 256).unwrap();
        let tag = Tag {
            connection: 255,
            sequence: 123_456_789,
        };
        let (mut bytes, mut scratch) = (Vec::new(), Vec::new());
        payloads.append_to(&mut bytes, tag);
        assert_eq!(bytes.len(), 256);
        assert!(bytes.iter().all(|byte| (b'!'..=b'~').contains(byte)));
        assert_eq!(payloads.recognise(&bytes, &mut scratch), Some(tag));
        for index in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[index] ^= 1;
            assert_ne!(
                payloads.recognise(&damaged, &mut scratch),
                Some(tag),
                "byte {index}"
            );
        }
        let other_run = Payloads::new(8, 256).unwrap();
        assert_eq!(other_run.recognise(&bytes, &mut scratch), None);
        assert!(Payloads::new(7, TAG_BYTES - 1).is_err());
    }

    #[test]
    fn a_checksum_depends_on_every_bit_and_on_the_length() {
        let bytes = noise(3, 61);
        let whole = checksum(&bytes);
        for index in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[index] ^= 1 << bit;
                assert_ne!(checksum(&damaged), whole, "byte {index} bit {bit}");
            }
        }
        assert_ne!(checksum(&bytes[..60]), whole);
        assert_ne!(checksum(&[]), checksum(&[0]));
    }
}
