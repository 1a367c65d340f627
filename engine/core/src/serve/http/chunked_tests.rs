//! Tests of the chunked decoder: exact framing, early refusal, bounded overhead, and the same
//! result whatever the fragmentation.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

const BODY_MAX_BYTES: u64 = 1000;

type Outcome = Result<(Vec<u8>, ChunkProgress), HttpError>;

fn decode(input: &[u8]) -> Outcome {
    let mut out = Vec::new();
    ChunkDecoder::new(BODY_MAX_BYTES)
        .decode(input, &mut out)
        .map(|progress| (out, progress))
}

/// Feeds pieces of the given lengths, and checks what each call says about its own input.
fn decode_pieces(input: &[u8], pieces: &[usize]) -> Outcome {
    let mut decoder = ChunkDecoder::new(BODY_MAX_BYTES);
    let mut out = b"kept".to_vec();
    let mut consumed = 0;
    let mut pieces = pieces.iter().cycle();
    loop {
        let length = pieces.next().copied().unwrap_or(1).max(1);
        let piece = &input[consumed..(consumed + length).min(input.len())];
        let progress = decoder.decode(piece, &mut out)?;
        assert!(progress.consumed <= piece.len());
        assert!(progress.done || progress.consumed == piece.len());
        consumed += progress.consumed;
        if progress.done || consumed == input.len() {
            assert!(out.starts_with(b"kept"));
            let progress = ChunkProgress {
                consumed,
                done: progress.done,
            };
            return Ok((out.split_off(4), progress));
        }
    }
}

fn status(input: &[u8]) -> u16 {
    let error = decode(input).expect_err(&format!("{:?}", String::from_utf8_lossy(input)));
    error.status()
}

#[test]
fn whole_bodies_are_decoded() {
    for (input, body, rest) in [
        ("0\r\n\r\n", "", ""),
        ("5\r\nhello\r\n0\r\n\r\nGET /", "hello", "GET /"),
        (
            "5\r\nhello\r\nA\r\n, 23456789\r\n000\r\n\r\n",
            "hello, 23456789",
            "",
        ),
        (
            "2;a=b;c=\"d\"\r\n\r\n\r\n0;x\r\nEtag: y\r\nEmpty:\r\n\r\n0",
            "\r\n",
            "0",
        ),
        ("0000000000000001\r\nx\r\n0\r\n\r\n", "x", ""),
        ("a\r\n0123456789\r\n0\r\n\r\n\r\n", "0123456789", "\r\n"),
    ] {
        let (out, progress) = decode(input.as_bytes()).unwrap();
        assert_eq!(out, body.as_bytes(), "{input:?}");
        assert!(progress.done, "{input:?}");
        assert_eq!(&input[progress.consumed..], rest, "{input:?}");
    }
}

#[test]
fn unfinished_bodies_are_not_done() {
    let input = b"5;e\r\nhello\r\n0\r\nA: b\r\n\r\n";
    for end in 0..input.len() {
        let (out, progress) = decode(&input[..end]).unwrap();
        assert_eq!(
            progress,
            ChunkProgress {
                consumed: end,
                done: false
            }
        );
        assert!(b"hello".starts_with(&out[..]));
    }
    assert!(decode(input).unwrap().1.done);
}

#[test]
fn malformed_framing_is_refused() {
    for input in [
        "+5\r\nhello\r\n0\r\n\r\n",
        "-5\r\n",
        "0x5\r\nhello",
        " 5\r\nhello",
        "5 \r\nhello",
        "5\thello",
        "\r\nhello",
        ";x\r\n",
        "g\r\n",
        "5\nhello\n",
        "5\rhello",
        "5;a\nhello",
        "5;a\rb\r\n",
        "5;\0\r\n",
        "5\r\nhello\n0\r\n\r\n",
        "5\r\nhelloX\r\n0\r\n\r\n",
        "5\r\nhello\r0\r\n\r\n",
        "5\r\nhello\rX0\r\n\r\n",
        "5\r\nhello0\r\n\r\n",
        "00000000000000001\r\nx\r\n",
        "10000000000000000\r\n",
        "0\r\n\n",
        "0\r\n\rX",
        "0\r\nno colon\r\n\r\n",
        "0\r\n: empty name\r\n\r\n",
        "0\r\n folded: x\r\n\r\n",
        "0\r\nA : b\r\n\r\n",
        "0\r\nA: b\n\r\n",
        "0\r\nA: b\rX\r\n",
        "0\r\nA: b\r\n c\r\n\r\n",
        "0\r\nA: \0\r\n\r\n",
    ] {
        assert_eq!(status(input.as_bytes()), 400, "{input:?}");
    }
}

#[test]
fn too_large_is_refused_when_declared() {
    let exact = format!("3e8\r\n{}\r\n0\r\n\r\n", "x".repeat(1000));
    assert_eq!(decode(exact.as_bytes()).unwrap().0.len(), 1000);
    for input in [
        "3e9\r",
        "3e9;",
        "ffffffffffffffff\r",
        "5\r\nhello\r\n3e4\r",
        "5\r\nhello\r\nffffffffffffffff\r",
    ] {
        assert_eq!(
            decode(input.as_bytes()),
            Err(HttpError::BodyTooLarge),
            "{input:?}"
        );
    }
}

#[test]
fn errors_repeat_and_an_end_is_final() {
    let mut decoder = ChunkDecoder::new(BODY_MAX_BYTES);
    let mut out = Vec::new();
    let error = decoder.decode(b"2\r\nabX", &mut out).unwrap_err();
    assert_eq!(decoder.decode(b"\r\n0\r\n\r\n", &mut out), Err(error));
    assert_eq!(decoder.decode(b"", &mut out), Err(error));
    assert_eq!(out, b"ab");
    let mut decoder = ChunkDecoder::new(BODY_MAX_BYTES);
    assert!(decoder.decode(b"0\r\n\r\n", &mut out).unwrap().done);
    let after = decoder.decode(b"5\r\nhello", &mut out).unwrap();
    assert_eq!(
        after,
        ChunkProgress {
            consumed: 0,
            done: true
        }
    );
    assert_eq!(out, b"ab");
}

#[test]
fn overhead_is_bounded() {
    let line = |length: usize| format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(length));
    let longest = CHUNK_LINE_MAX_BYTES as usize - 4;
    assert!(decode(line(longest).as_bytes()).unwrap().1.done);
    assert_eq!(status(line(longest + 1).as_bytes()), 400);
    assert_eq!(status(format!("0;{}", "e".repeat(300)).as_bytes()), 400);

    let trailers = |length: usize| format!("0\r\nA:{}\r\n\r\n", "b".repeat(length));
    let longest = TRAILERS_MAX_BYTES as usize - 6;
    assert!(decode(trailers(longest).as_bytes()).unwrap().1.done);
    assert_eq!(status(trailers(longest + 1).as_bytes()), 400);
    assert_eq!(
        status(format!("0\r\n{}", "A: b\r\n".repeat(2000)).as_bytes()),
        400
    );

    let chunks = |count: usize, extension: &str| {
        let mut decoder = ChunkDecoder::new(u64::MAX);
        let chunk = format!("1{extension}\r\nx\r\n");
        let mut out = Vec::new();
        (0..count).try_for_each(|_| decoder.decode(chunk.as_bytes(), &mut out).map(drop))
    };
    assert_eq!(chunks(100_000, ""), Ok(()));
    assert_eq!(chunks(100_000, ";short=ext"), Ok(()));
    assert_eq!(
        chunks(100_000, &format!(";{}", "e".repeat(200))).map_err(HttpError::status),
        Err(400)
    );
}

#[test]
fn nothing_is_reserved_on_a_promise() {
    let mut out = Vec::new();
    ChunkDecoder::new(u64::MAX)
        .decode(b"fffffffffffffff\r\nx", &mut out)
        .unwrap();
    assert!(out.capacity() < 100);
}

fn encode(chunks: &[Vec<u8>], extension: &str, trailers: &str) -> Vec<u8> {
    let mut encoded = Vec::new();
    for chunk in chunks.iter().filter(|chunk| !chunk.is_empty()) {
        encoded.extend_from_slice(format!("{:X}{extension}\r\n", chunk.len()).as_bytes());
        encoded.extend_from_slice(chunk);
        encoded.extend_from_slice(b"\r\n");
    }
    encoded.extend_from_slice(format!("0\r\n{trailers}\r\n").as_bytes());
    encoded
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_chunking_and_fragmentation_gives_the_body(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..10),
        extension in "(;[a-z]{0,5}(=[a-z]{1,5})?)?",
        trailers in "([A-Za-z-]{1,8}: ?[a-z]{0,8}\r\n){0,3}",
        rest in prop::collection::vec(any::<u8>(), 0..20),
        pieces in prop::collection::vec(1..30usize, 1..6),
    ) {
        let mut input = encode(&chunks, &extension, &trailers);
        let length = input.len();
        input.extend_from_slice(&rest);
        let expected = (chunks.concat(), ChunkProgress { consumed: length, done: true });
        prop_assert_eq!(decode(&input), Ok(expected.clone()));
        prop_assert_eq!(decode_pieces(&input, &pieces), Ok(expected));
    }

    #[test]
    fn any_bytes_give_the_same_outcome_in_pieces(
        input in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..80),
            "[0-3a;:\r\n x]{0,40}".prop_map(String::into_bytes),
            "(([1-3](;x)?\r\n[xy]{1,3}\r\n){0,3}0\r\n(a:b\r\n){0,2}\r\n?)".prop_map(String::into_bytes),
        ],
        pieces in prop::collection::vec(1..9usize, 1..6),
    ) {
        prop_assert_eq!(decode_pieces(&input, &pieces), decode(&input));
        prop_assert_eq!(decode_pieces(&input, &[1]), decode(&input));
    }
}

#[test]
fn two_seconds_of_mutated_bodies_never_panic() {
    let seed = encode(
        &[b"hello".to_vec(), vec![b'z'; 40], b"\r\n0\r\n\r\n".to_vec()],
        ";k=v",
        "Digest: abc\r\n",
    );
    const INTERESTING: &[u8] = b"\r\n;:+-0 9afAF\x00\xff\tgx";
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize >> 8
    };
    let start = Instant::now();
    let (mut rounds, mut done) = (0u64, 0u64);
    while start.elapsed() < Duration::from_secs(2) {
        let mut input = seed.clone();
        for _ in 0..random() % 3 {
            let at = random() % input.len();
            let byte = INTERESTING[random() % INTERESTING.len()];
            match random() % 3 {
                0 => input[at] = byte,
                1 => input.insert(at, byte),
                _ => drop(input.remove(at)),
            }
        }
        let outcome = decode_pieces(&input, &[random() % 20 + 1, random() % 5 + 1]);
        assert_eq!(outcome, decode(&input));
        rounds += 1;
        done += u64::from(outcome.is_ok_and(|(_, progress)| progress.done));
    }
    assert!(
        rounds > 1000 && done > rounds / 10 && done < rounds,
        "{done}/{rounds}"
    );
}
