//! Tests of the HTTP parser, case by case: request heads and the smuggling shapes that must be
//! refused.

use std::time::{Duration, Instant};

use super::*;

pub(super) const HEAD_MAX_BYTES: usize = 16 * 1024;

pub(super) fn parse(request: &[u8]) -> Result<Parsed<'_>, HttpError> {
    parse_head(request, &mut 0, HEAD_MAX_BYTES)
}

fn accept(request: &[u8]) -> Head<'_> {
    match parse(request) {
        Ok(Parsed::Complete(head)) => head,
        Ok(Parsed::Partial) => panic!("partial: {:?}", String::from_utf8_lossy(request)),
        Err(error) => panic!("{error:?}: {:?}", String::from_utf8_lossy(request)),
    }
}

fn refuse(request: &[u8]) -> HttpError {
    match parse(request) {
        Err(error) => error,
        Ok(_) => panic!("not refused: {:?}", String::from_utf8_lossy(request)),
    }
}

/// A POST with the given header lines after Host.
pub(super) fn post(lines: &str) -> Vec<u8> {
    format!("POST /s HTTP/1.1\r\nHost: h\r\n{lines}\r\n").into_bytes()
}

pub(super) fn target(target: &str) -> Vec<u8> {
    format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n").into_bytes()
}

#[test]
fn a_typical_append_is_read() {
    let request = b"POST /v1/stream/a%2Fb/c?x=1&y HTTP/1.1\r\nHost: example.test:4437\r\n\
        content-TYPE:  application/json; charset=utf-8 \t\r\nContent-Length: 5\r\n\
        X-Other:\r\nProducer-Id: \xff\xfe\r\n\r\nhello";
    let head = accept(request);
    assert_eq!(head.method, Method::Post);
    assert_eq!(head.method_name, b"POST");
    assert_eq!(head.path, b"/v1/stream/a%2Fb/c");
    assert_eq!(head.query, Some(&b"x=1&y"[..]));
    assert_eq!(head.minor_version, 1);
    assert_eq!(head.framing, Framing::Length(5));
    assert!(head.keep_alive && !head.expect_continue);
    assert_eq!(&request[head.head_len..], b"hello");
    assert_eq!(head.get(Known::Host), Some(&b"example.test:4437"[..]));
    assert_eq!(
        head.get(Known::ContentType),
        Some(&b"application/json; charset=utf-8"[..])
    );
    assert_eq!(head.get(Known::ProducerId), Some(&b"\xff\xfe"[..]));
    assert_eq!(head.get(Known::StreamSeq), None);
    let raw: Vec<_> = head.raw_headers().collect();
    assert_eq!(raw.len(), 5);
    assert_eq!(
        raw[1],
        (
            &b"content-TYPE"[..],
            &b"application/json; charset=utf-8"[..]
        )
    );
    assert_eq!(raw[3], (&b"X-Other"[..], &b""[..]));
}

#[test]
fn every_known_header_is_found_in_any_case() {
    for known in Known::ALL {
        let name = known.name();
        let mixed: String = name
            .chars()
            .enumerate()
            .map(|(at, letter)| {
                if at % 2 == 0 {
                    letter.to_ascii_uppercase()
                } else {
                    letter
                }
            })
            .collect();
        for spelling in [name.to_owned(), name.to_ascii_uppercase(), mixed] {
            assert_eq!(Known::of(spelling.as_bytes()), Some(*known));
            for at in 0..spelling.len() {
                let mut near = spelling.clone().into_bytes();
                near[at] = b'_';
                assert_eq!(Known::of(&near), None, "{spelling} {at}");
            }
        }
    }
    let unique: std::collections::HashSet<_> =
        Known::ALL.iter().map(|known| known.name()).collect();
    assert_eq!(unique.len(), Known::ALL.len());
}

#[test]
fn empty_values_are_present() {
    let request = post("Producer-Id:\r\nStream-Seq: \t \r\n");
    let head = accept(&request);
    assert_eq!(head.get(Known::ProducerId), Some(&b""[..]));
    assert_eq!(head.get(Known::StreamSeq), Some(&b""[..]));
}

#[test]
fn methods_are_case_sensitive() {
    for (name, method) in [
        ("GET", Method::Get),
        ("HEAD", Method::Head),
        ("PUT", Method::Put),
        ("DELETE", Method::Delete),
        ("OPTIONS", Method::Options),
        ("PATCH", Method::Patch),
        ("get", Method::Other),
        ("PURGE", Method::Other),
    ] {
        let request = format!("{name} / HTTP/1.1\r\nHost: h\r\n\r\n");
        let head = accept(request.as_bytes());
        assert_eq!((head.method, head.method_name), (method, name.as_bytes()));
    }
}

#[test]
fn targets_are_reduced_to_a_path() {
    let cases: [(&str, &str, Option<&str>, &str); 7] = [
        ("/", "/", None, "h"),
        ("/a?", "/a", Some(""), "h"),
        ("//a/../b?c?d", "//a/../b", Some("c?d"), "h"),
        ("http://other:80/a?b", "/a", Some("b"), "other:80"),
        ("HTTPS://other", "/", None, "other"),
        ("http://other?q", "/", Some("q"), "other"),
        ("http://[::1]:1/", "/", None, "[::1]:1"),
    ];
    for (text, path, query, host) in cases {
        let request = target(text);
        let head = accept(&request);
        assert_eq!(head.path, path.as_bytes(), "{text}");
        assert_eq!(head.query, query.map(str::as_bytes), "{text}");
        assert_eq!(head.get(Known::Host), Some(host.as_bytes()), "{text}");
    }
    assert_eq!(accept(b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n").path, b"*");
    for text in [
        "*",
        "a",
        "host:80",
        "ftp://h/",
        "http://",
        "http:///a",
        "http://u@h/",
        "/a#b",
        "/a?b#c",
        "http://h#f",
        "/\u{fc}",
        "http:/a",
        "?q",
        "",
    ] {
        assert_eq!(refuse(&target(text)).status(), 400, "{text}");
    }
    assert_eq!(
        refuse(b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n").status(),
        400
    );
    let longest = format!("/{}", "a".repeat(TARGET_MAX_BYTES - 1));
    accept(&target(&longest));
    assert_eq!(
        refuse(&target(&format!("{longest}a"))),
        HttpError::UriTooLong
    );
}

#[test]
fn request_lines_and_versions() {
    for (line, status) in [
        ("GET / HTTP/2.0", 505),
        ("PRI * HTTP/2.0", 505),
        ("GET / HTTP/0.9", 505),
        ("GET / HTTP/1.2", 505),
        ("GET / HTTP/3", 505),
        ("GET /", 400),
        ("GET / http/1.1", 400),
        ("GET / HTTQ/1.1", 400),
        ("GET  / HTTP/1.1", 400),
        ("GET /  HTTP/1.1", 400),
        (" GET / HTTP/1.1", 400),
        ("GET / HTTP/1.1 ", 400),
        ("G(T / HTTP/1.1", 400),
        ("GET /a\tb HTTP/1.1", 400),
        ("GET /\0 HTTP/1.1", 400),
        ("\x16\x03\x01\x02", 400),
    ] {
        let request = format!("{line}\r\nHost: h\r\n\r\n");
        assert_eq!(refuse(request.as_bytes()).status(), status, "{line:?}");
    }
}

#[test]
fn one_leading_empty_line_is_tolerated() {
    let request = b"\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\nX";
    let head = accept(request);
    assert_eq!(&request[head.head_len..], b"X");
    assert_eq!(head.get(Known::Host), Some(&b"h"[..]));
    assert_eq!(head.raw_headers().count(), 1);
    for text in [
        "\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
        "\nGET / HTTP/1.1\r\n",
        "\r\n\r",
        "\rG",
    ] {
        assert_eq!(refuse(text.as_bytes()).status(), 400, "{text:?}");
    }
    for text in ["", "\r", "\r\n", "\r\nG"] {
        assert!(
            matches!(parse(text.as_bytes()), Ok(Parsed::Partial)),
            "{text:?}"
        );
    }
}

#[test]
fn framing_is_read_one_way_or_refused() {
    let cases: [(&str, Framing); 6] = [
        ("", Framing::None),
        ("Content-Length: 0\r\n", Framing::Length(0)),
        ("Content-Length: 00012\r\n", Framing::Length(12)),
        (
            "Content-Length: 18446744073709551615\r\n",
            Framing::Length(u64::MAX),
        ),
        ("Transfer-Encoding: chunked\r\n", Framing::Chunked),
        ("transfer-encoding:CHUNKED \r\n", Framing::Chunked),
    ];
    for (lines, framing) in cases {
        assert_eq!(accept(&post(lines)).framing, framing, "{lines:?}");
    }
    for (lines, status) in [
        ("Content-Length: +5\r\n", 400),
        ("Content-Length: -5\r\n", 400),
        ("Content-Length: 5 5\r\n", 400),
        ("Content-Length: 5, 5\r\n", 400),
        ("Content-Length: 0x5\r\n", 400),
        ("Content-Length: 5.0\r\n", 400),
        ("Content-Length:\r\n", 400),
        ("Content-Length: 18446744073709551616\r\n", 400),
        ("Content-Length: 99999999999999999999999999\r\n", 400),
        ("Content-Length: 5\r\nContent-Length: 5\r\n", 400),
        ("Content-Length: 5\r\nContent-Length: 6\r\n", 400),
        ("Content-Length:\r\nContent-Length: 6\r\n", 400),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
        ("Transfer-Encoding: gzip\r\nContent-Length: 5\r\n", 400),
        (
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            400,
        ),
        (
            "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
            400,
        ),
        ("Transfer-Encoding: chunked, gzip\r\n", 400),
        ("Transfer-Encoding: chunked, chunked\r\n", 400),
        ("Transfer-Encoding: chunked,\r\n", 400),
        ("Transfer-Encoding: ,chunked\r\n", 400),
        ("Transfer-Encoding: gzip, identity\r\n", 400),
        ("Transfer-Encoding:\r\n", 400),
        ("Transfer-Encoding: gzip, chunked\r\n", 501),
        ("Transfer-Encoding: gzip\r\n", 501),
        ("Transfer-Encoding: identity\r\n", 501),
        ("Transfer-Encoding: xchunked\r\n", 501),
        ("Transfer-Encoding: \"chunked\"\r\n", 501),
        ("Transfer-Encoding : chunked\r\n", 400),
        ("Transfer-Encoding\t: chunked\r\n", 400),
        (" Transfer-Encoding: chunked\r\n", 400),
        ("Transfer-Encoding:\r\n chunked\r\n", 400),
        ("X: a\r\n\tb\r\n", 400),
        ("X: a\rb\r\n", 400),
        ("X: a\nContent-Length: 5\r\n", 400),
        ("X: a \n", 400),
        ("X:\n", 400),
        ("X: a\0b\r\n", 400),
        ("X: a\x7fb\r\n", 400),
        ("X\0: a\r\n", 400),
        (": a\r\n", 400),
        ("no colon\r\n", 400),
    ] {
        assert_eq!(refuse(&post(lines)).status(), status, "{lines:?}");
    }
    let old = b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(refuse(old).status(), 400);
}

#[test]
fn bare_line_feeds_are_refused_anywhere() {
    let request = "GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n\r\n";
    accept(request.as_bytes());
    for (at, _) in request.match_indices("\r\n") {
        let mut broken = request.to_owned();
        broken.remove(at);
        assert_eq!(refuse(broken.as_bytes()).status(), 400, "{broken:?}");
        let mut scanned = 0;
        let seen = (1..=broken.len())
            .find_map(|end| parse_head(&broken.as_bytes()[..end], &mut scanned, 1000).err());
        assert_eq!(
            seen.map(HttpError::status),
            Some(400),
            "{broken:?} byte by byte"
        );
    }
}

#[test]
fn host_is_needed_once_and_sound() {
    assert_eq!(refuse(b"GET / HTTP/1.1\r\n\r\n").status(), 400);
    accept(b"GET / HTTP/1.0\r\n\r\n");
    accept(b"GET / HTTP/1.1\r\nHost:\r\n\r\n");
    for host in [
        "a\r\nHost: a",
        "a b",
        "a/b",
        "a,b",
        "u@h",
        "a\"b",
        "<a>",
        "a\\b",
        "\u{fc}",
    ] {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        assert_eq!(refuse(request.as_bytes()).status(), 400, "{host}");
    }
}

#[test]
fn headers_that_steer_storage_may_not_repeat() {
    for known in Known::ALL {
        let name = known.name();
        let steers = name.starts_with("stream-") || name.starts_with("producer-");
        let value = match known {
            Known::ContentLength => "1",
            Known::TransferEncoding => "chunked",
            Known::Expect => "100-continue",
            _ => "x",
        };
        let repeated = post(&format!(
            "{name}: {value}\r\n{}:\r\n",
            name.to_ascii_uppercase()
        ));
        let refused = parse(&repeated).is_err();
        let list = [
            Known::Connection,
            Known::ContentEncoding,
            Known::AcceptEncoding,
            Known::IfNoneMatch,
            Known::XForwardedHost,
            Known::XForwardedProto,
        ];
        assert_eq!(refused, !list.contains(known), "{name}");
        assert!(refused || !steers, "{name}");
    }
    let request = post("If-None-Match: \"a\"\r\nX: y\r\nIf-None-Match: \"b\", \"c\"\r\n");
    let head = accept(&request);
    assert_eq!(head.get(Known::IfNoneMatch), Some(&b"\"a\""[..]));
    assert_eq!(
        head.values(Known::IfNoneMatch).collect::<Vec<_>>(),
        [&b"\"a\""[..], b"\"b\", \"c\""]
    );
}

#[test]
fn connection_options_are_a_token_list() {
    for (version, lines, keep_alive) in [
        ("1.1", "", true),
        ("1.1", "Connection: close\r\n", false),
        ("1.1", "Connection: Upgrade, CLOSE \r\n", false),
        ("1.1", "Connection: upgrade\r\nConnection: close\r\n", false),
        ("1.1", "Connection: closed\r\n", true),
        ("1.0", "", false),
        ("1.0", "Connection: Keep-Alive\r\n", true),
        ("1.0", "Connection: keep-alive, close\r\n", false),
    ] {
        let request = format!("GET / HTTP/{version}\r\nHost: h\r\n{lines}\r\n");
        assert_eq!(
            accept(request.as_bytes()).keep_alive,
            keep_alive,
            "{version} {lines}"
        );
    }
}

#[test]
fn expectations() {
    let expects = |request: &[u8]| accept(request).expect_continue;
    assert!(expects(&post(
        "Expect: 100-Continue\r\nContent-Length: 5\r\n"
    )));
    assert!(expects(&post(
        "Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n"
    )));
    assert!(!expects(&post(
        "Expect: 100-continue\r\nContent-Length: 0\r\n"
    )));
    assert!(!expects(&post("Expect: 100-continue\r\n")));
    assert!(!expects(
        b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    ));
    assert_eq!(
        refuse(&post("Expect: 200-ok\r\nContent-Length: 5\r\n")).status(),
        417
    );
    assert_eq!(refuse(&post("Expect:\r\n")).status(), 417);
}

#[test]
fn heads_are_bounded_in_bytes_and_lines() {
    let lines = |count: usize| post(&"X: y\r\n".repeat(count));
    accept(&lines(HEADERS_MAX - 1));
    assert_eq!(refuse(&lines(HEADERS_MAX)), HttpError::HeadTooLarge);
    let request = post("X: y\r\n");
    let exact = request.len();
    assert!(matches!(
        parse_head(&request, &mut 0, exact),
        Ok(Parsed::Complete(_))
    ));
    assert!(matches!(
        parse_head(&request, &mut 0, exact - 1),
        Err(HttpError::HeadTooLarge)
    ));
    let endless_line = format!("GET /{}", "a".repeat(2000));
    assert!(matches!(
        parse_head(endless_line.as_bytes(), &mut 0, 1000),
        Err(HttpError::UriTooLong)
    ));
    let mut scanned = 0;
    for end in 1..exact - 1 {
        assert!(matches!(
            parse_head(&request[..end], &mut scanned, exact - 1),
            Ok(Parsed::Partial)
        ));
    }
    let full = parse_head(&request[..exact - 1], &mut scanned, exact - 1);
    assert!(matches!(full, Err(HttpError::HeadTooLarge)));
}

#[test]
fn a_head_sent_byte_by_byte_costs_linear_time() {
    let request = post(&format!("X: {}\r\n", "y".repeat(1_000_000)));
    let mut scanned = 0;
    let start = Instant::now();
    for end in 1..request.len() {
        let partial = parse_head(&request[..end], &mut scanned, 2_000_000);
        assert!(matches!(partial, Ok(Parsed::Partial)));
        assert_eq!(scanned, end);
    }
    let complete = parse_head(&request, &mut scanned, 2_000_000);
    assert!(matches!(complete, Ok(Parsed::Complete(head)) if head.head_len == request.len()));
    assert_eq!(scanned, 0);
    // A million full parses of up to a megabyte each would take minutes.
    assert!(start.elapsed() < Duration::from_secs(10));
}
