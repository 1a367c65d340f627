//! Tests of the small decoders.

use proptest::prelude::*;

use super::*;

#[test]
fn small_decoders() {
    assert!(matches!(
        percent_decode(b"/a+b"),
        Ok(Cow::Borrowed(b"/a+b"))
    ));
    assert_eq!(&*percent_decode(b"/%41%2f%fF%00+").unwrap(), b"/A/\xff\0+");
    for bad in [&b"%"[..], b"%4", b"a%zz", b"%+1", b"%%41", b"%4 "] {
        assert_eq!(percent_decode(bad).unwrap_err().status(), 400);
        assert_eq!(decode_query_component(bad), None);
    }
    assert_eq!(decode_query_component(b"a+b%2B"), Some(b"a b+".to_vec()));
    let pairs: Vec<_> = query_pairs(b"a=1&&b&=c&d=e=f&").collect();
    assert_eq!(
        pairs,
        [
            (&b"a"[..], &b"1"[..]),
            (b"b", b""),
            (b"", b"c"),
            (b"d", b"e=f")
        ]
    );
    assert_eq!(query_pairs(b"").count(), 0);
    assert_eq!(media_type(b" Text/Plain ; charset=utf-8"), b"Text/Plain");
    assert_eq!(media_type(b";x"), b"");
    assert!(is_true(b"true") && is_true(b"TrUe"));
    assert!(!is_true(b"") && !is_true(b"1") && !is_true(b"true ") && !is_true(b"truex"));
    assert_eq!(parse_decimal_u64(b"0"), Some(0));
    assert_eq!(parse_decimal_u64(b"18446744073709551615"), Some(u64::MAX));
    for bad in [
        &b""[..],
        b"+1",
        b"-1",
        b" 1",
        b"1 ",
        b"1e3",
        b"18446744073709551616",
        b"\xb2",
    ] {
        assert_eq!(parse_decimal_u64(bad), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_bytes_stay_in_bounds(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        if let Ok(decoded) = percent_decode(&bytes) {
            prop_assert!(decoded.len() <= bytes.len());
        }
        if let Some(decoded) = decode_query_component(&bytes) {
            prop_assert!(decoded.len() <= bytes.len());
        }
        let pairs: usize = query_pairs(&bytes).map(|(key, value)| key.len() + value.len()).sum();
        prop_assert!(pairs <= bytes.len());
        prop_assert!(media_type(&bytes).len() <= bytes.len());
    }

    #[test]
    fn percent_encoding_round_trips(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let encoded: String = bytes.iter().map(|byte| format!("%{byte:02X}")).collect();
        prop_assert_eq!(&*percent_decode(encoded.as_bytes()).unwrap(), &bytes[..]);
        prop_assert_eq!(decode_query_component(encoded.as_bytes()), Some(bytes));
    }

    #[test]
    fn decimals_agree_with_the_standard_library(text in "[0-9+ -]{0,21}") {
        let expected = text.parse::<u64>().ok().filter(|_| !text.starts_with('+'));
        prop_assert_eq!(parse_decimal_u64(text.as_bytes()), expected);
    }
}
