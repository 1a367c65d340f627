//! The value at a path of names in a JSON record: what the column `key` shows.
//!
//! Reads the record's text as it is stored, which was valid when it was taken in; names are compared as they read,
//! escapes resolved. The first of two equal names counts. Pure: no I/O.

use super::json::{self, Nesting};

/// Names joined by dots.
pub struct KeyPath {
    names: Vec<Box<[u8]>>,
}

impl KeyPath {
    /// `None`: a name is empty.
    pub fn parse(text: &str) -> Option<KeyPath> {
        let names: Vec<Box<[u8]>> = text
            .split('.')
            .map(|name| Box::from(name.as_bytes()))
            .collect();
        names
            .iter()
            .all(|name| !name.is_empty())
            .then_some(KeyPath { names })
    }

    /// Appends the value to `out`: a string without quotes and escapes, anything else as its text. `false`: there is
    /// none.
    pub fn extract(&self, record: &[u8], out: &mut Vec<u8>) -> bool {
        let mut at = json::skip_blanks(record, 0);
        for name in &self.names {
            match member(record, at, name) {
                Some(value) => at = value,
                None => return false,
            }
        }
        let Ok(end) = json::skip_value(record, at, &mut Nesting::default()) else {
            return false;
        };
        let text = &record[at..end];
        match text
            .strip_prefix(b"\"")
            .and_then(|text| text.strip_suffix(b"\""))
        {
            Some(inner) => unescape(inner, out),
            None => out.extend_from_slice(text),
        }
        true
    }
}

/// Where the value of a member of the object at `at` begins.
fn member(record: &[u8], at: usize, name: &[u8]) -> Option<usize> {
    if record.get(at) != Some(&b'{') {
        return None;
    }
    let mut at = json::skip_blanks(record, at + 1);
    loop {
        if record.get(at) != Some(&b'"') {
            return None;
        }
        let value = json::skip_key(record, at).ok()?;
        if is_name(record, at + 1, name) {
            return Some(value);
        }
        let end = json::skip_value(record, value, &mut Nesting::default()).ok()?;
        let comma = json::skip_blanks(record, end);
        if record.get(comma) != Some(&b',') {
            return None;
        }
        at = json::skip_blanks(record, comma + 1);
    }
}

/// Whether the string whose first byte is at `at` reads as `name`.
fn is_name(record: &[u8], at: usize, name: &[u8]) -> bool {
    let end = match json::skip_string(record, at) {
        Ok(end) => end - 1,
        Err(_) => return false,
    };
    let text = &record[at..end];
    if memchr::memchr(b'\\', text).is_none() {
        return text == name;
    }
    let mut plain = Vec::new();
    unescape(text, &mut plain);
    plain == name
}

/// Resolves the escapes of a string. Half of a surrogate pair becomes the replacement character: it has no UTF-8.
fn unescape(text: &[u8], out: &mut Vec<u8>) {
    let mut rest = text;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        out.extend_from_slice(&rest[..at]);
        let (kind, behind) = match rest[at + 1..].split_first() {
            Some(split) => split,
            None => return,
        };
        rest = behind;
        let plain = match kind {
            b'b' => 0x08,
            b'f' => 0x0c,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let (character, used) = unicode(rest);
                let mut bytes = [0; 4];
                out.extend_from_slice(character.encode_utf8(&mut bytes).as_bytes());
                rest = &rest[used.min(rest.len())..];
                continue;
            }
            other => *other,
        };
        out.push(plain);
    }
    out.extend_from_slice(rest);
}

/// The character of four hexadecimal digits, or of two such escapes, and how many bytes that took.
fn unicode(text: &[u8]) -> (char, usize) {
    let high = match hexadecimal(text) {
        Some(unit) => unit,
        None => return (char::REPLACEMENT_CHARACTER, 4),
    };
    let low = text
        .get(4..6)
        .filter(|escape| *escape == b"\\u")
        .and_then(|_| hexadecimal(&text[6..]));
    if let (0xd800..=0xdbff, Some(low @ 0xdc00..=0xdfff)) = (high, low) {
        let code = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
        return (
            char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER),
            10,
        );
    }
    (
        char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER),
        4,
    )
}

fn hexadecimal(text: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(text.get(..4)?).ok()?;
    u32::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(path: &str, record: &str) -> Option<String> {
        let mut out = Vec::new();
        let found = KeyPath::parse(path)?.extract(record.as_bytes(), &mut out);
        found.then(|| String::from_utf8(out).expect("UTF-8"))
    }

    #[test]
    fn values_as_they_read() {
        for (path, record, expected) in [
            ("id", r#"{"id":7}"#, Some("7")),
            (
                "id",
                r#" { "x" : [1,{"id":2}] , "id" : -1.50e2 }"#,
                Some("-1.50e2"),
            ),
            (
                "user.id",
                r#"{"user":{"name":"a","id":"x y"}}"#,
                Some("x y"),
            ),
            (
                "user",
                r#"{"user":{"a": [1, 2]}}"#,
                Some(r#"{"a": [1, 2]}"#),
            ),
            ("a", r#"{"a":null}"#, Some("null")),
            (
                "a",
                r#"{"a":"\"\\\/\b\f\n\r\t"}"#,
                Some("\"\\/\u{8}\u{c}\n\r\t"),
            ),
            (
                "a",
                r#"{"a":"\u00e4\ud83d\ude00\ud83dx"}"#,
                Some("ä😀\u{fffd}x"),
            ),
            ("ä", r#"{"\u00e4":"y"}"#, Some("y")),
            ("a", r#"{"a":1,"a":2}"#, Some("1")),
            ("a", r#"{"a":""}"#, Some("")),
            ("a", r#"{"b":1}"#, None),
            ("a", "{}", None),
            ("a.b", r#"{"a":[1]}"#, None),
            ("a", r#"[{"a":1}]"#, None),
            ("a", "3", None),
            ("a", "", None),
            ("a", r#"{"a":"#, None),
        ] {
            assert_eq!(key(path, record).as_deref(), expected, "{path} {record}");
        }
    }

    #[test]
    fn a_path_has_no_empty_name() {
        for bad in ["", ".", "a.", ".a", "a..b"] {
            assert!(KeyPath::parse(bad).is_none(), "{bad}");
        }
    }
}
