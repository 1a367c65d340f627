//! Command-line options: `--name value` pairs, each read once; an unknown name is an error.

use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

pub struct Options {
    values: BTreeMap<String, String>,
}

impl Options {
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut values = BTreeMap::new();
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let Some(name) = argument.strip_prefix("--") else {
                return Err(format!("unexpected argument {argument:?}"));
            };
            let value = arguments
                .next()
                .ok_or_else(|| format!("--{name} needs a value"))?;
            if values.insert(name.to_owned(), value).is_some() {
                return Err(format!("--{name} given twice"));
            }
        }
        Ok(Self { values })
    }

    pub fn take<T: FromStr>(&mut self, name: &str, default: T) -> Result<T, String> {
        match self.values.remove(name) {
            None => Ok(default),
            Some(text) => text
                .parse()
                .map_err(|_| format!("--{name}: bad value {text:?}")),
        }
    }

    /// A count that must be at least one.
    pub fn take_count(&mut self, name: &str, default: usize) -> Result<usize, String> {
        match self.take(name, default)? {
            0 => Err(format!("--{name} must be at least 1")),
            count => Ok(count),
        }
    }

    /// One of a few words; the first is the default.
    pub fn take_choice<const N: usize>(
        &mut self,
        name: &str,
        choices: [&'static str; N],
    ) -> Result<&'static str, String> {
        let Some(text) = self.values.remove(name) else {
            return Ok(choices[0]);
        };
        choices
            .into_iter()
            .find(|choice| *choice == text)
            .ok_or_else(|| format!("--{name} must be {}, not {text:?}", choices.join(" or ")))
    }

    /// Seconds, finite and not negative.
    pub fn take_seconds(&mut self, name: &str, default: f64) -> Result<f64, String> {
        let seconds: f64 = self.take(name, default)?;
        if seconds.is_finite() && (0.0..1e6).contains(&seconds) {
            Ok(seconds)
        } else {
            Err(format!("--{name} must be a number of seconds"))
        }
    }

    /// The server, as `http://host:port` or `host:port`.
    pub fn take_server(&mut self) -> Result<SocketAddr, String> {
        let text = self.values.remove("url").ok_or("--url is required")?;
        let host = text
            .strip_prefix("http://")
            .unwrap_or(&text)
            .trim_end_matches('/');
        let mut found = host
            .to_socket_addrs()
            .map_err(|error| format!("--url {text}: {error}"))?;
        found
            .next()
            .ok_or_else(|| format!("--url {text}: no address"))
    }

    /// Refuses whatever no mode has asked for.
    pub fn finish(self) -> Result<(), String> {
        match self.values.into_keys().next() {
            None => Ok(()),
            Some(name) => Err(format!("unknown option --{name}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Result<Options, String> {
        Options::parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn values_are_typed_and_leftovers_refused() {
        let mut found = options("--connections 64 --url http://127.0.0.1:80 --nonsense 1").unwrap();
        assert_eq!(found.take_count("connections", 1), Ok(64));
        assert_eq!(found.take_server().unwrap().port(), 80);
        assert_eq!(found.take("missing", 5u32), Ok(5));
        assert!(found.finish().is_err());
    }

    #[test]
    fn a_choice_is_one_of_the_words() {
        let choices = ["burst", "window"];
        let chosen = |text| options(text).unwrap().take_choice("refill", choices);
        assert_eq!(chosen(""), Ok("burst"));
        assert_eq!(chosen("--refill window"), Ok("window"));
        assert!(chosen("--refill both").is_err());
    }

    #[test]
    fn malformed_options_are_refused() {
        assert!(options("connections 64").is_err());
        assert!(options("--connections").is_err());
        assert!(options("--a 1 --a 2").is_err());
        assert!(
            options("--connections 0")
                .unwrap()
                .take_count("connections", 1)
                .is_err()
        );
        assert!(
            options("--seconds inf")
                .unwrap()
                .take_seconds("seconds", 1.0)
                .is_err()
        );
    }
}
