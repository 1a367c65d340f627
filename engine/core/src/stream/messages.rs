//! Where the messages of one append end, fast: 64 bytes at a step, as bit masks.
//!
//! Says the same as [`super::json::message_ends`] for bytes that [`super::json::flatten_into`] wrote; for Arrow output,
//! where appends of many small messages pass at full rate. Pure: no I/O.
//!
//! How: one mask per block for quotes, backslashes, brackets and commas. What is inside a string follows from the
//! quotes by a running exclusive-or; brackets outside of strings move the depth; a comma at depth 0 ends a message.
//! Only brackets are looked at one by one, and commas where the depth is 0.

use crate::limits::MARK_STEP_BYTES;

const BLOCK: usize = 64;
const _: () = assert!((MARK_STEP_BYTES as usize).is_multiple_of(BLOCK));

/// One bit per byte of a block.
struct Masks {
    quotes: u64,
    backslashes: u64,
    opens: u64,
    closes: u64,
    commas: u64,
}

/// Appends the ends (exclusive, just behind the comma) of the messages in `wire` to `ends`.
/// Bytes of another origin give meaningless ends, but inside the slice and increasing.
pub fn message_ends_into(wire: &[u8], ends: &mut Vec<u32>) {
    Scanner::default().scan(wire, ends);
}

/// A place between two messages: so many end before it.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Point {
    pub messages: u32,
    pub end: u32,
}

/// Points of `wire` from its begin to its last message, a bounded way apart; a message that is longer than that has one on
/// either side.
pub fn points(wire: &[u8]) -> Vec<Point> {
    let mut points = vec![Point::default()];
    let (mut scanner, mut ends) = (Scanner::default(), Vec::new());
    let mut last = Point::default();
    // A part is a multiple of a block.
    for part in wire.chunks(MARK_STEP_BYTES as usize) {
        scanner.scan(part, &mut ends);
        for end in ends.drain(..) {
            let next = Point {
                messages: last.messages + 1,
                end,
            };
            let known = points.last().map_or(0, |point| point.end);
            if next.end - last.end >= MARK_STEP_BYTES && known < last.end {
                points.push(last);
            }
            last = next;
            if last.end - points.last().map_or(0, |point| point.end) >= MARK_STEP_BYTES {
                points.push(last);
            }
        }
    }
    if points.last() != Some(&last) {
        points.push(last);
    }
    points
}

#[derive(Default)]
struct Scanner {
    at: u32,
    /// All ones while a string goes on behind the block.
    in_string: u64,
    /// 1 if the next block's first byte is escaped.
    escaped: u64,
    depth: u32,
}

impl Scanner {
    /// Goes on with the next bytes: whole blocks, or the last ones.
    fn scan(&mut self, wire: &[u8], ends: &mut Vec<u32>) {
        let (blocks, rest) = wire.as_chunks::<BLOCK>();
        for block in blocks {
            self.step(block, ends);
        }
        if !rest.is_empty() {
            let mut block = [b' '; BLOCK];
            block[..rest.len()].copy_from_slice(rest);
            self.step(&block, ends);
        }
    }

    #[inline]
    fn step(&mut self, block: &[u8; BLOCK], ends: &mut Vec<u32>) {
        let masks = masks(block);
        let quotes = masks.quotes & !self.escapes(masks.backslashes);
        // Set from each opening quote up to, not including, its closing one.
        let strings = running_xor(quotes) ^ self.in_string;
        self.in_string = ((strings as i64) >> 63) as u64;
        let opens = masks.opens & !strings;
        let closes = masks.closes & !strings;
        let commas = masks.commas & !strings;
        self.walk(opens, closes, commas, ends);
        self.at += BLOCK as u32;
    }

    /// Bytes that a backslash before them takes the meaning of.
    #[inline]
    fn escapes(&mut self, backslashes: u64) -> u64 {
        if backslashes == 0 {
            return std::mem::take(&mut self.escaped);
        }
        let mut escaped = self.escaped;
        let mut left = backslashes & !self.escaped;
        self.escaped = 0;
        while left != 0 {
            let at = left.trailing_zeros();
            if at == 63 {
                self.escaped = 1;
                break;
            }
            let next = 1u64 << (at + 1);
            escaped |= next;
            // A backslash that is escaped escapes nothing.
            left &= left - 1;
            left &= !next;
        }
        escaped
    }

    #[inline]
    fn walk(&mut self, opens: u64, closes: u64, commas: u64, ends: &mut Vec<u32>) {
        let mut brackets = opens | closes;
        let mut from = 0u64;
        loop {
            // Bits below the next bracket, from behind the last one.
            let (below, next) = if brackets == 0 {
                (u64::MAX, 64)
            } else {
                let next = brackets.trailing_zeros();
                ((1u64 << next) - 1, next)
            };
            if self.depth == 0 {
                let mut here = commas & below & !from;
                while here != 0 {
                    ends.push(self.at + here.trailing_zeros() + 1);
                    here &= here - 1;
                }
            }
            if next == 64 {
                return;
            }
            if opens >> next & 1 == 1 {
                self.depth += 1;
            } else {
                self.depth = self.depth.saturating_sub(1);
            }
            from = below;
            brackets &= brackets - 1;
        }
    }
}

/// Bit n is the exclusive-or of bits 0 to n.
#[inline]
fn running_xor(mut bits: u64) -> u64 {
    bits ^= bits << 1;
    bits ^= bits << 2;
    bits ^= bits << 4;
    bits ^= bits << 8;
    bits ^= bits << 16;
    bits ^ bits << 32
}

/// `{` and `[`, `}` and `]` differ in the bit 0x20 alone, which no other JSON byte outside of strings turns into one.
#[cfg(target_arch = "x86_64")]
#[inline]
fn masks(block: &[u8; BLOCK]) -> Masks {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_or_si128, _mm_set1_epi8,
    };
    let mut masks = Masks {
        quotes: 0,
        backslashes: 0,
        opens: 0,
        closes: 0,
        commas: 0,
    };
    for part in 0..BLOCK / 16 {
        // SAFETY: SSE2 is part of x86-64; the load reads 16 bytes at 16 * part, and 16 * 3 + 16 = 64 is the
        // length of the block. It needs no alignment.
        let found = unsafe {
            let bytes = _mm_loadu_si128(block.as_ptr().add(16 * part).cast::<__m128i>());
            let equal = |byte: u8| {
                let same = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8));
                _mm_movemask_epi8(same) as u32 as u64
            };
            let folded = _mm_or_si128(bytes, _mm_set1_epi8(0x20));
            let folded_equal = |byte: u8| {
                let same = _mm_cmpeq_epi8(folded, _mm_set1_epi8(byte as i8));
                _mm_movemask_epi8(same) as u32 as u64
            };
            [
                equal(b'"'),
                equal(b'\\'),
                folded_equal(b'{'),
                folded_equal(b'}'),
                equal(b','),
            ]
        };
        let shift = 16 * part;
        masks.quotes |= found[0] << shift;
        masks.backslashes |= found[1] << shift;
        masks.opens |= found[2] << shift;
        masks.closes |= found[3] << shift;
        masks.commas |= found[4] << shift;
    }
    masks
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn masks(block: &[u8; BLOCK]) -> Masks {
    masks_by_bytes(block)
}

#[cfg(any(test, not(target_arch = "x86_64")))]
fn masks_by_bytes(block: &[u8; BLOCK]) -> Masks {
    let of = |wanted: &dyn Fn(u8) -> bool| {
        let bits = block.iter().enumerate();
        bits.fold(0u64, |mask, (bit, byte)| {
            mask | u64::from(wanted(*byte)) << bit
        })
    };
    Masks {
        quotes: of(&|byte| byte == b'"'),
        backslashes: of(&|byte| byte == b'\\'),
        opens: of(&|byte| byte | 0x20 == b'{'),
        closes: of(&|byte| byte | 0x20 == b'}'),
        commas: of(&|byte| byte == b','),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::json;
    use proptest::prelude::*;

    fn fast(wire: &[u8]) -> Vec<usize> {
        let mut ends = Vec::new();
        message_ends_into(wire, &mut ends);
        ends.into_iter().map(|end| end as usize).collect()
    }

    fn check(body: &[u8]) {
        let mut wire = Vec::new();
        let count = json::flatten_into(body, &mut wire).expect("valid");
        let slow: Vec<usize> = json::message_ends(&wire).collect();
        assert_eq!(slow.len(), count as usize);
        assert_eq!(fast(&wire), slow, "{}", String::from_utf8_lossy(&wire));
    }

    #[test]
    fn strings_escapes_and_brackets_at_every_place_of_a_block() {
        for pad in 0..140 {
            let blanks = " ".repeat(pad);
            for message in [
                r#"{"a":"x,y]}","b":[1,{"c":2}]}"#,
                r#""\\\\\",,{[""#,
                r#""\\""#,
                r#"["\"",",","\\"]"#,
                "-1.5e3",
                "null",
                "[[[[]]]]",
                r#""ünï,cödé""#,
            ] {
                check(format!("[\"{blanks}\",{message},{message},[{blanks}1]]").as_bytes());
            }
        }
    }

    #[test]
    fn nothing_and_what_is_no_json() {
        assert!(fast(b"").is_empty());
        assert!(fast(b"1").is_empty());
        let noise: Vec<u8> = (0..4096u32)
            .map(|n| (n.wrapping_mul(167) >> 3) as u8)
            .collect();
        let ends = fast(&noise);
        assert!(ends.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(ends.last().is_none_or(|end| *end <= noise.len()));
    }

    #[test]
    fn points_are_ends_and_not_far_apart() {
        let long = "x".repeat(3 * MARK_STEP_BYTES as usize);
        let mut messages: Vec<String> = (0..60_000).map(|n| format!("{{\"n\":{n}}}")).collect();
        messages.insert(30_000, format!("\"{long}\""));
        messages.push(format!("[\"{long}\"]"));
        let mut wire = Vec::new();
        let body = format!("[{}]", messages.join(","));
        json::flatten_into(body.as_bytes(), &mut wire).expect("valid");
        let mut ends = vec![0];
        message_ends_into(&wire, &mut ends);
        let points = points(&wire);
        assert!(
            points
                .iter()
                .all(|point| ends[point.messages as usize] == point.end)
        );
        assert_eq!(
            points.last().map(|point| point.end as usize),
            Some(wire.len())
        );
        for pair in points.windows(2) {
            let far = pair[1].end - pair[0].end > 2 * MARK_STEP_BYTES;
            assert!(!far || pair[1].messages - pair[0].messages == 1, "{pair:?}");
        }
    }

    fn value() -> impl Strategy<Value = serde_json::Value> {
        let text = "[ -~\\n\\\\\",\\[\\]{}äé☃]{0,40}";
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            text.prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 24, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                prop::collection::vec((text, inner), 0..6)
                    .prop_map(|pairs| { serde_json::Value::Object(pairs.into_iter().collect()) }),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_slow_splitter_says_the_same(values in prop::collection::vec(value(), 1..20)) {
            let body = serde_json::to_vec(&values).expect("json");
            check(&body);
        }

        #[test]
        fn masks_are_what_the_bytes_say(block in prop::collection::vec(any::<u8>(), BLOCK)) {
            let block: [u8; BLOCK] = block.try_into().expect("64");
            let (one, other) = (masks(&block), masks_by_bytes(&block));
            prop_assert_eq!(
                (one.quotes, one.backslashes, one.opens, one.closes, one.commas),
                (other.quotes, other.backslashes, other.opens, other.closes, other.commas)
            );
        }
    }
}
