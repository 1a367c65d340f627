//! Properties of the HTTP parser: fragmentation does not matter, nothing panics, nothing that was
//! accepted is ambiguous.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::tests::{HEAD_MAX_BYTES, parse, post, target};
use super::*;

fn typical_requests() -> [Vec<u8>; 4] {
    [
        post("Content-Type: application/json\r\nContent-Length: 3\r\nStream-Seq: 7\r\nX: y\r\n"),
        post(
            "Transfer-Encoding: chunked\r\nProducer-Id: p\r\nProducer-Epoch: 1\r\nProducer-Seq: 2\r\n",
        ),
        target("http://other:80/v1/stream/a?offset=-1&live=sse"),
        b"\r\nPUT /v1/stream/x HTTP/1.0\r\nConnection: keep-alive\r\nStream-TTL: 60\r\n\r\nrest"
            .to_vec(),
    ]
}

/// Everything a head says, without the borrow, to compare two parses.
fn summary(head: &Head<'_>) -> String {
    let slots: Vec<_> = Known::ALL.iter().map(|known| head.get(*known)).collect();
    let raw: Vec<_> = head.raw_headers().collect();
    format!(
        "{:?} {:?} {:?} {:?} {} {} {} {slots:?} {raw:?}",
        head.method,
        head.path,
        head.query,
        head.framing,
        head.keep_alive,
        head.expect_continue,
        head.head_len
    )
}

fn mutate(request: &mut Vec<u8>, edits: &[(usize, u8, u8)]) {
    const INTERESTING: &[u8] = b"\r\n\t :,;?#%*/+-09azAZ\x00\x7f\x80\xff";
    for (place, what, byte) in edits {
        let at = place % (request.len() + 1);
        let pick = INTERESTING[*byte as usize % INTERESTING.len()];
        match what % 5 {
            0 => request.insert(at, pick),
            1 if at < request.len() => request[at] = pick,
            2 if at < request.len() => drop(request.remove(at)),
            3 => request.truncate(at),
            _ if at < request.len() => request[at] = *byte,
            _ => request.push(pick),
        }
    }
}

/// Whole or in pieces, with the same outcome; and nothing that was accepted is ambiguous.
fn check_head(request: &[u8], pieces: &[usize]) {
    let whole = parse(request);
    if let Ok(Parsed::Complete(head)) = &whole {
        let text = &request[..head.head_len];
        assert!(text.ends_with(b"\r\n\r\n"));
        let feeds = text.iter().filter(|byte| **byte == b'\n').count();
        let crlfs = text.windows(2).filter(|pair| pair == b"\r\n").count();
        let returns = text.iter().filter(|byte| **byte == b'\r').count();
        assert!(feeds == crlfs && returns == crlfs);
        let lead = if text.starts_with(b"\r\n") { 1 } else { 0 };
        assert_eq!(head.raw_headers().count() + 2 + lead, feeds);
        for known in Known::ALL {
            if *known != Known::Host {
                assert_eq!(head.get(*known), head.values(*known).next());
            }
        }
    }
    let mut scanned = 0;
    let mut end = 0;
    let mut pieces = pieces.iter().cycle();
    let split = loop {
        end = (end + pieces.next().copied().unwrap_or(1).max(1)).min(request.len());
        match parse_head(&request[..end], &mut scanned, HEAD_MAX_BYTES) {
            Ok(Parsed::Partial) if end < request.len() => assert_eq!(scanned, end),
            outcome => break outcome,
        }
    };
    match (whole, split) {
        (Ok(Parsed::Complete(one)), Ok(Parsed::Complete(two))) => {
            assert_eq!(summary(&one), summary(&two));
        }
        (Ok(Parsed::Partial), Ok(Parsed::Partial)) | (Err(_), Err(_)) => {}
        // In pieces a malformed head may be refused as late as its end.
        (Err(_), Ok(Parsed::Partial)) => {
            let after_lead = request.strip_prefix(b"\r\n").unwrap_or(request);
            assert!(!after_lead.windows(4).any(|window| window == b"\r\n\r\n"));
        }
        _ => panic!(
            "fragmentation matters: {:?}",
            String::from_utf8_lossy(request)
        ),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_fragmentation_gives_the_same_head(
        which in 0..4usize,
        pieces in prop::collection::vec(1..40usize, 1..8),
        edits in prop::collection::vec(any::<(usize, u8, u8)>(), 0..3),
    ) {
        let mut request = typical_requests()[which].clone();
        mutate(&mut request, &edits);
        check_head(&request, &pieces);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check_head(&bytes, &[1]);
    }
}

#[test]
fn two_seconds_of_mutated_heads_never_panic() {
    // A small generator of our own, because proptest is too slow for a run bounded by time.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let seeds = typical_requests();
    let start = Instant::now();
    let (mut rounds, mut accepted) = (0u64, 0u64);
    while start.elapsed() < Duration::from_secs(2) {
        let mut request = seeds[random() as usize % seeds.len()].clone();
        let edits: Vec<_> = (0..random() % 3)
            .map(|_| random())
            .map(|bits| (bits as usize >> 16, bits as u8, (bits >> 8) as u8))
            .collect();
        mutate(&mut request, &edits);
        check_head(
            &request,
            &[random() as usize % 50 + 1, random() as usize % 9 + 1],
        );
        rounds += 1;
        accepted += u64::from(matches!(parse(&request), Ok(Parsed::Complete(_))));
    }
    assert!(
        rounds > 1000 && accepted > rounds / 10 && accepted < rounds,
        "{accepted}/{rounds}"
    );
}
