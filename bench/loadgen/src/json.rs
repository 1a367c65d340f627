//! A minimal JSON writer: objects built field by field, in order.

use std::fmt::Write;

pub struct Object {
    text: String,
}

impl Object {
    pub fn new() -> Self {
        Self {
            text: String::from("{"),
        }
    }

    fn key(&mut self, name: &str) {
        if self.text.len() > 1 {
            self.text.push(',');
        }
        self.text.push_str(&quote(name));
        self.text.push(':');
    }

    pub fn integer(self, name: &str, value: u64) -> Self {
        self.raw(name, &value.to_string())
    }

    pub fn boolean(self, name: &str, value: bool) -> Self {
        self.raw(name, if value { "true" } else { "false" })
    }

    /// Three decimals; a value that is not finite becomes null, which no reader can mistake for a figure.
    pub fn number(self, name: &str, value: f64) -> Self {
        let text = if value.is_finite() {
            format!("{value:.3}")
        } else {
            "null".to_owned()
        };
        self.raw(name, &text)
    }

    pub fn text(self, name: &str, value: &str) -> Self {
        self.raw(name, &quote(value))
    }

    pub fn texts(self, name: &str, values: &[String]) -> Self {
        let quoted: Vec<String> = values.iter().map(|value| quote(value)).collect();
        self.raw(name, &format!("[{}]", quoted.join(",")))
    }

    /// `value` must already be JSON.
    pub fn raw(mut self, name: &str, value: &str) -> Self {
        self.key(name);
        self.text.push_str(value);
        self
    }

    pub fn finish(mut self) -> String {
        self.text.push('}');
        self.text
    }
}

fn quote(value: &str) -> String {
    let mut out = String::with_capacity(value.len() + 2);
    out.push('"');
    for character in value.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if u32::from(c) < 0x20 => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_escaped_and_ordered() {
        let text = Object::new()
            .text("a", "x\"\\\n")
            .integer("b", 7)
            .number("c", f64::NAN)
            .finish();
        assert_eq!(text, "{\"a\":\"x\\\"\\\\\\u000a\",\"b\":7,\"c\":null}");
    }
}
