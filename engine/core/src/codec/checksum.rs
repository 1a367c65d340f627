//! CRC32C of three short neighbours at once.
//!
//! A step of a checksum takes three cycles and waits for the step before it, but a processor begins one every cycle:
//! three pieces side by side cost little more than one. Pieces that are long enough to be divided are left to the
//! library, which does the same within one piece.

/// From this length on the library works on three parts of a piece.
const LONG_BYTES: usize = 768;

pub fn three(pieces: [&[u8]; 3]) -> [u32; 3] {
    #[cfg(target_arch = "x86_64")]
    if pieces.iter().all(|piece| piece.len() < LONG_BYTES)
        && std::arch::is_x86_feature_detected!("sse4.2")
    {
        // SAFETY: the processor has SSE 4.2, the only thing that the function asks for.
        return unsafe { sse::three(pieces) };
    }
    pieces.map(crc32c::crc32c)
}

#[cfg(target_arch = "x86_64")]
mod sse {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64};

    #[target_feature(enable = "sse4.2")]
    pub fn three([first, second, third]: [&[u8]; 3]) -> [u32; 3] {
        let common = first.len().min(second.len()).min(third.len()) & !7;
        // Written out: a closure in here is compiled without the feature, and called.
        let (ones, _) = first[..common].as_chunks::<8>();
        let (twos, _) = second[..common].as_chunks::<8>();
        let (threes, _) = third[..common].as_chunks::<8>();
        let [mut a, mut b, mut c] = [u64::from(u32::MAX); 3];
        for ((one, two), three) in ones.iter().zip(twos).zip(threes) {
            a = _mm_crc32_u64(a, u64::from_le_bytes(*one));
            b = _mm_crc32_u64(b, u64::from_le_bytes(*two));
            c = _mm_crc32_u64(c, u64::from_le_bytes(*three));
        }
        [
            finish(a, &first[common..]),
            finish(b, &second[common..]),
            finish(c, &third[common..]),
        ]
    }

    #[target_feature(enable = "sse4.2")]
    fn finish(mut crc: u64, rest: &[u8]) -> u32 {
        let (words, bytes) = rest.as_chunks::<8>();
        for word in words {
            crc = _mm_crc32_u64(crc, u64::from_le_bytes(*word));
        }
        let mut crc = crc as u32;
        let (halves, bytes) = bytes.as_chunks::<4>();
        for half in halves {
            crc = _mm_crc32_u32(crc, u32::from_le_bytes(*half));
        }
        for byte in bytes {
            crc = _mm_crc32_u8(crc, *byte);
        }
        !crc
    }
}

#[cfg(test)]
mod tests {
    use super::three;

    #[test]
    fn any_three_pieces_have_their_own_checksums() {
        let bytes: Vec<u8> = (0..2000u32)
            .map(|number| ((number * 37) >> 3) as u8)
            .collect();
        let lengths = [0, 1, 7, 8, 9, 16, 63, 200, 201, 207, 767, 768, 1500];
        for (first, second, third) in lengths
            .iter()
            .flat_map(|a| lengths.iter().map(move |b| (a, b)))
            .flat_map(|(a, b)| lengths.iter().map(move |c| (*a, *b, *c)))
        {
            let pieces = [
                &bytes[3..3 + first],
                &bytes[11..11 + second],
                &bytes[400..400 + third],
            ];
            assert_eq!(three(pieces), pieces.map(crc32c::crc32c));
        }
    }
}
