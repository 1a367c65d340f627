//! Tests of the JSON splitter: tables of single cases, properties against serde_json (whose raw
//! values keep the text and accept lone surrogate escapes and numbers of any size, as we do), and
//! bounded mutation runs.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::value::RawValue;

use super::*;

fn flatten(body: &[u8]) -> Result<(u32, Vec<u8>), JsonError> {
    let mut out = Vec::new();
    flatten_into(body, &mut out).map(|messages| (messages, out))
}

fn reason(body: &[u8]) -> (usize, &'static str) {
    let error = flatten(body).expect_err(&format!("{:?}", String::from_utf8_lossy(body)));
    (error.position, error.reason)
}

/// The messages of a body as serde_json sees them, or None if it refuses the body.
fn oracle(body: &[u8]) -> Option<Vec<String>> {
    let text = std::str::from_utf8(body).ok()?;
    let whole: &RawValue = serde_json::from_str(text).ok()?;
    if !whole.get().starts_with('[') {
        return Some(vec![whole.get().to_owned()]);
    }
    let elements: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    Some(
        elements
            .iter()
            .map(|element| element.get().to_owned())
            .collect(),
    )
}

fn split(wire: &[u8]) -> Vec<Vec<u8>> {
    let mut start = 0;
    let mut messages = Vec::new();
    for end in message_ends(wire) {
        assert!(start < end && end <= wire.len());
        assert_eq!(wire[end - 1], b',');
        messages.push(wire[start..end - 1].to_vec());
        start = end;
    }
    assert_eq!(start, wire.len(), "bytes after the last message");
    messages
}

/// Accept or refuse as the oracle does, same messages, same bound, same ends, nothing else touched.
fn agree(body: &[u8]) {
    let mut out = b"kept".to_vec();
    let shown = String::from_utf8_lossy(body);
    match (flatten_into(body, &mut out), oracle(body)) {
        (Ok(count), Some(expected)) => {
            assert_eq!(&out[..4], b"kept");
            let wire = &out[4..];
            assert!(wire.len() <= body.len() + 1, "{shown}");
            let found = split(wire);
            assert_eq!(count as usize, found.len(), "{shown}");
            assert_eq!(
                found,
                expected
                    .iter()
                    .map(|m| m.as_bytes().to_vec())
                    .collect::<Vec<_>>()
            );
        }
        (Err(error), None) => {
            assert!(error.position <= body.len());
            assert_eq!(out, b"kept");
        }
        (Err(error), Some(_)) if error.reason == "nested too deeply" => {}
        (ours, theirs) => panic!("{shown:?}: {ours:?}, but the oracle has {theirs:?}"),
    }
}

#[test]
fn single_values_are_one_message() {
    for body in [
        "1",
        "-0",
        "1.5e+10",
        "0.0",
        "true",
        "false",
        "null",
        r#""""#,
        "{}",
        r#"{"a":[1,{"b":2}]}"#,
    ] {
        assert_eq!(
            flatten(body.as_bytes()),
            Ok((1, format!("{body},").into_bytes()))
        );
        assert_eq!(
            flatten(format!(" \t\r\n{body}\n ").as_bytes()),
            Ok((1, format!("{body},").into_bytes()))
        );
    }
}

#[test]
fn arrays_are_flattened_one_level_and_keep_their_text() {
    let cases: [(&str, u32, &str); 7] = [
        ("[]", 0, ""),
        (" [ \n] ", 0, ""),
        ("[[]]", 1, "[],"),
        ("[1,2,3]", 3, "1,2,3,"),
        ("[ 1 ,{\"a\": [2]}]", 2, "1,{\"a\": [2]},"),
        ("[1, 2,3 ,\"x,y\",[ 4 ]]", 5, "1,2,3,\"x,y\",[ 4 ],"),
        (
            "[1e400,12345678901234567890123,{\"k\":1,\"k\":2}]",
            3,
            "1e400,12345678901234567890123,{\"k\":1,\"k\":2},",
        ),
    ];
    for (body, count, wire) in cases {
        assert_eq!(
            flatten(body.as_bytes()),
            Ok((count, wire.as_bytes().to_vec())),
            "{body}"
        );
    }
}

#[test]
fn output_is_appended_and_restored_on_error() {
    let mut out = b"before,".to_vec();
    assert_eq!(flatten_into(b"[1,2]", &mut out), Ok(2));
    assert_eq!(out, b"before,1,2,");
    assert!(flatten_into(b"[3, 4, 5] 6", &mut out).is_err());
    assert!(flatten_into(b"[3, 4, x]", &mut out).is_err());
    assert_eq!(out, b"before,1,2,");
}

#[test]
fn errors_name_the_place_and_the_reason() {
    let cases: [(&[u8], usize, &str); 29] = [
        (b"", 0, "empty"),
        (b" \n\t ", 4, "empty"),
        (b"\xef\xbb\xbf1", 0, "byte order mark"),
        (b"\"\xff\"", 1, "not UTF-8"),
        (b"\"\xed\xa0\x80\"", 1, "not UTF-8"),
        (b"01", 0, "leading zero in a number"),
        (b"-01", 1, "leading zero in a number"),
        (b"+1", 0, "expected a value"),
        (b".5", 0, "expected a value"),
        (b"1.", 2, "digit missing in a number"),
        (b"1.e3", 2, "digit missing in a number"),
        (b"1e", 2, "digit missing in a number"),
        (b"1e+", 3, "digit missing in a number"),
        (b"-", 1, "digit missing in a number"),
        (b"nul", 0, "expected true, false or null"),
        (b"True", 0, "expected a value"),
        (b"1 2", 2, "text after the value"),
        (b"[1]]", 3, "text after the value"),
        (b"[1,]", 3, "expected a value"),
        (b"[,1]", 1, "expected a value"),
        (b"[1 2]", 3, "expected a comma or the end of the array"),
        (b"[[1}]", 3, "expected a comma or the end of the array"),
        (b"{\"a\":1]", 6, "expected a comma or the end of the object"),
        (b"{\"a\":1,}", 7, "expected a key"),
        (b"{\"a\" 1}", 5, "expected a colon"),
        (b"[1", 2, "unexpected end"),
        (b"\"\x1f\"", 1, "control character in a string"),
        (b"\"\\x\"", 1, "malformed escape"),
        (b"\"\\u12G4\"", 1, "malformed escape"),
    ];
    for (body, position, expected) in cases {
        assert_eq!(
            reason(body),
            (position, expected),
            "{:?}",
            String::from_utf8_lossy(body)
        );
    }
}

#[test]
fn every_prefix_of_a_document_is_refused() {
    let body = br#"{"a":[1.5e-3,true,null,"x\u00e9\n"],"b":{"c":{}}}"#;
    assert!(flatten(body).is_ok());
    for end in 0..body.len() {
        assert!(flatten(&body[..end]).is_err(), "{end}");
    }
}

#[test]
fn lone_surrogate_escapes_are_kept() {
    let body = br#"["\ud800","\udc00\ud800"]"#;
    assert_eq!(
        flatten(body),
        Ok((2, br#""\ud800","\udc00\ud800","#.to_vec()))
    );
}

#[test]
fn special_bytes_are_found_at_every_distance() {
    for padding in 0..40 {
        let plain = "é".repeat(padding / 2) + &"x".repeat(padding % 2) + "\u{7f}~";
        assert!(flatten(format!("\"{plain}\"").as_bytes()).is_ok());
        let control = format!("\"{plain}\u{1f}{plain}\"");
        assert_eq!(
            reason(control.as_bytes()),
            (plain.len() + 1, "control character in a string")
        );
        let escaped = format!("[\"{plain}\\\"{plain}\",1]");
        assert_eq!(split(&flatten(escaped.as_bytes()).unwrap().1).len(), 2);
    }
}

#[test]
fn nesting_is_bounded_and_mixed_nesting_is_remembered() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert!(flatten(nested(DEPTH_MAX).as_bytes()).is_ok());
    assert_eq!(
        reason(nested(DEPTH_MAX + 1).as_bytes()),
        (DEPTH_MAX, "nested too deeply")
    );
    assert_eq!(
        reason("[".repeat(10_000_000).as_bytes()),
        (DEPTH_MAX, "nested too deeply")
    );
    let objects = |depth: usize| "{\"k\":".repeat(depth) + "0" + &"}".repeat(depth);
    assert!(flatten(objects(DEPTH_MAX).as_bytes()).is_ok());
    assert_eq!(
        reason(objects(DEPTH_MAX + 1).as_bytes()).1,
        "nested too deeply"
    );
    let mixed = "[{\"k\":".repeat(DEPTH_MAX / 2) + "[" + &"}]".repeat(DEPTH_MAX / 2);
    assert_eq!(reason(mixed.as_bytes()).1, "nested too deeply");
    let mixed = "[{\"k\":".repeat(DEPTH_MAX / 2) + "0" + &"}]".repeat(DEPTH_MAX / 2);
    assert!(flatten(mixed.as_bytes()).is_ok());
    let crossed = "[{\"k\":".repeat(100) + "0" + &"}]".repeat(99) + "]}";
    assert_eq!(
        reason(crossed.as_bytes()).1,
        "expected a comma or the end of the object"
    );
}

#[test]
fn many_small_messages_need_no_more_than_the_body() {
    for separator in [",", " , "] {
        let body = format!("[{}]", vec!["1"; 1_000_000].join(separator));
        let mut out = Vec::new();
        assert_eq!(flatten_into(body.as_bytes(), &mut out), Ok(1_000_000));
        assert_eq!(out.len(), 2_000_000);
        assert!(
            out.capacity() <= body.len(),
            "{} for {}",
            out.capacity(),
            body.len()
        );
        assert_eq!(message_ends(&out).count(), 1_000_000);
    }
}

#[test]
fn ends_of_foreign_bytes_stay_inside() {
    let cases: [(&[u8], &[usize]); 7] = [
        (b"", &[]),
        (b"1", &[]),
        (b"1,2", &[2]),
        (b"]},1,", &[3, 5]),
        (b"\"abc", &[]),
        (b"\"abc\\", &[]),
        (b"{,,", &[]),
    ];
    for (wire, ends) in cases {
        assert_eq!(message_ends(wire).collect::<Vec<_>>(), ends);
    }
}

/// JSON text with blanks, escapes, surrogates and odd numbers, built as text so that the oracle
/// sees exactly the same bytes.
fn json_text() -> impl Strategy<Value = String> {
    let blank = "[ \n\r\t]{0,2}";
    let number = "-?(0|[1-9][0-9]{0,20})(\\.[0-9]{1,5})?([eE][+-]?[0-9]{1,4})?";
    let string = r#""([ -!#-\[\]-~é€😀]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,24}""#;
    let leaf = prop_oneof![
        Just("true".to_owned()),
        Just("false".to_owned()),
        Just("null".to_owned()),
        number,
        string,
    ];
    leaf.prop_recursive(5, 40, 6, move |inner| {
        let item = (blank, inner, blank).prop_map(|(left, value, right)| left + &value + &right);
        let pair = (blank, string, blank, item.clone())
            .prop_map(|(left, key, right, value)| format!("{left}{key}{right}:{value}"));
        prop_oneof![
            prop::collection::vec(item, 0..6).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec(pair, 0..6).prop_map(|pairs| format!("{{{}}}", pairs.join(","))),
        ]
    })
}

fn mutated(text: Vec<u8>, edits: &[(usize, u8, u8)]) -> Vec<u8> {
    const INTERESTING: &[u8] = b"[]{},:\"\\ 01-+.eEtfnu\x00\x1f\x80\xff\xc3\xa9";
    let mut text = text;
    for (place, what, byte) in edits {
        let at = place % (text.len() + 1);
        let pick = INTERESTING[*byte as usize % INTERESTING.len()];
        match what % 5 {
            0 => text.insert(at, pick),
            1 if at < text.len() => text[at] = pick,
            2 if at < text.len() => drop(text.remove(at)),
            3 => text.truncate(at),
            _ if at < text.len() => text[at] = *byte,
            _ => text.push(pick),
        }
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn valid_json_is_split_like_the_oracle(text in json_text()) {
        prop_assert!(flatten(text.as_bytes()).is_ok());
        agree(text.as_bytes());
        agree(format!(" [{text} , {text},{text}]\n").as_bytes());
    }

    #[test]
    fn mutated_json_is_judged_like_the_oracle(
        text in json_text(),
        edits in prop::collection::vec(any::<(usize, u8, u8)>(), 1..4),
    ) {
        agree(&mutated(text.into_bytes(), &edits));
    }

    #[test]
    fn random_bytes_are_judged_like_the_oracle(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        agree(&bytes);
    }

    #[test]
    fn json_like_bytes_are_judged_like_the_oracle(text in r#"[\[\]{},:"\\ 019+.eu-]{0,16}"#) {
        agree(text.as_bytes());
    }

    #[test]
    fn ends_of_any_bytes_increase_and_stop_at_commas(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        let mut last = 0;
        for end in message_ends(&bytes) {
            prop_assert!(end > last && end <= bytes.len() && bytes[end - 1] == b',');
            last = end;
        }
    }
}

/// A small generator of our own, because proptest is too slow for a run bounded by time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn two_seconds_of_mutations_agree_with_the_oracle() {
    let seeds: [&[u8]; 4] = [
        br#"[{"a":"x\u00e9\\","b":[1,2.5e-3,{"c":null}]},"y, z",-0.0,[[],{}],true]"#,
        br#" { "key" : [ 1 , "two" , { "three" : [ ] } ] , "k2" : "\ud83d\ude00 \"q\"" } "#,
        "[\"grüße €\",\"😀\", 1e5 ,\tfalse\r\n]".as_bytes(),
        b"[[[[[[[[[[1,2],[3]]]]]]]]],1,2,3,4,5,6,7,8,9,0]",
    ];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let start = Instant::now();
    let mut rounds = 0u64;
    while start.elapsed() < Duration::from_secs(2) {
        for seed in seeds {
            let count = random.next() as usize % 4;
            let edits: Vec<(usize, u8, u8)> = (0..count)
                .map(|_| {
                    let bits = random.next();
                    (bits as usize >> 16, bits as u8, (bits >> 8) as u8)
                })
                .collect();
            agree(&mutated(seed.to_vec(), &edits));
            rounds += 1;
        }
    }
    assert!(rounds > 1000, "only {rounds} rounds");
}
