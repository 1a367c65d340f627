//! Patterns of stream names: compiled once for all questions that have the same, and held without scratch space.
//!
//! A pattern may wait for a minute with a question, so that only its program stays in memory, and counts: what a
//! search needs beside it belongs to who searches and goes with the search. Matching is by a lazy automaton; where
//! that gives up (word boundaries next to letters that are not ASCII), by a slower machine over the same program.
//! There are patterns for which either takes milliseconds per name: a search ends when its turn does.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use regex_automata::hybrid::dfa::{self, DFA};
use regex_automata::nfa::thompson::pikevm::{self, PikeVM};
use regex_automata::nfa::thompson::{self, NFA, WhichCaptures};
use regex_automata::{Anchored, Input};
use regex_syntax::hir::literal::Extractor;

use crate::error::ErrorCode;
use crate::limits::{PATTERN_MAX_BYTES, PATTERN_PROGRAM_MAX_BYTES, TAILS_WAITING_MAX};
use crate::refusal::Refusal;
use crate::serve::pipeline::Held;
use crate::shard::engine::Undone;

/// What a name must match as a whole.
pub struct Pattern {
    /// Every matching name begins with this.
    pub prefix: String,
    program: NFA,
    automaton: DFA,
    _held: Held,
}

/// The patterns that some question holds.
#[derive(Default)]
pub struct Patterns {
    known: Mutex<HashMap<Box<str>, Weak<Pattern>>>,
}

impl Patterns {
    pub fn get(
        &self,
        text: &str,
        hold: impl FnOnce(usize) -> Held,
    ) -> Result<Arc<Pattern>, Refusal> {
        let found = self.known.lock().get(text).and_then(Weak::upgrade);
        if let Some(found) = found {
            return Ok(found);
        }
        let pattern = Arc::new(compile(text, hold)?);
        let mut known = self.known.lock();
        if known.len() >= TAILS_WAITING_MAX {
            known.retain(|_, pattern| pattern.strong_count() > 0);
        }
        known.insert(text.into(), Arc::downgrade(&pattern));
        Ok(pattern)
    }
}

fn compile(text: &str, hold: impl FnOnce(usize) -> Held) -> Result<Pattern, Refusal> {
    let invalid = |detail: String| Refusal::with(ErrorCode::PatternInvalid, detail);
    if text.len() > PATTERN_MAX_BYTES {
        return Err(invalid(format!(
            "A pattern has at most {PATTERN_MAX_BYTES} bytes."
        )));
    }
    // By itself first, so that the error speaks of what was sent.
    let hir = regex_syntax::parse(text).map_err(|error| invalid(error.to_string()))?;
    let program = thompson::Compiler::new()
        .configure(
            thompson::Config::new()
                .nfa_size_limit(Some(PATTERN_PROGRAM_MAX_BYTES))
                .which_captures(WhichCaptures::None),
        )
        .build(&format!("\\A(?:{text})\\z"))
        .map_err(|error| {
            invalid(match error.size_limit() {
                Some(limit) => format!("Compiled, the pattern has more than {limit} bytes."),
                None => error.to_string(),
            })
        })?;
    let automaton = dfa::Builder::new()
        .configure(
            dfa::Config::new()
                .unicode_word_boundary(true)
                .skip_cache_capacity_check(true),
        )
        .build_from_nfa(program.clone())
        .map_err(|error| invalid(error.to_string()))?;
    let prefixes = Extractor::new().extract(&hir);
    let prefix = prefixes.longest_common_prefix().unwrap_or(b"");
    let known = std::str::from_utf8(prefix).map_or_else(|error| error.valid_up_to(), str::len);
    Ok(Pattern {
        prefix: String::from_utf8_lossy(&prefix[..known]).into_owned(),
        _held: hold(program.memory_usage() + automaton.memory_usage() + text.len()),
        program,
        automaton,
    })
}

impl Pattern {
    /// Something that tells of names whether they match. It has memory of its own: it does not wait.
    pub fn matcher<'p>(&'p self, turn: &'p Turn<'p>) -> Matcher<'p> {
        Matcher {
            pattern: self,
            turn,
            cache: RefCell::new(None),
            slow: RefCell::new(None),
        }
    }
}

/// The time in which names may be compared for one question.
pub struct Turn<'e> {
    stopping: &'e AtomicBool,
    left: Cell<Duration>,
}

impl Turn<'_> {
    pub fn new(stopping: &AtomicBool, left: Duration) -> Turn<'_> {
        Turn {
            stopping,
            left: Cell::new(left),
        }
    }

    pub fn is_over(&self) -> bool {
        self.left.get().is_zero()
    }
}

/// A pattern with what a search needs, which is made when there is something to search.
pub struct Matcher<'p> {
    pattern: &'p Pattern,
    turn: &'p Turn<'p>,
    cache: RefCell<Option<dfa::Cache>>,
    slow: RefCell<Option<(PikeVM, pikevm::Cache)>>,
}

impl Matcher<'_> {
    /// Every matching name begins with this.
    pub fn prefix(&self) -> &str {
        &self.pattern.prefix
    }

    /// Whether a name matches; refused when the turn is over, or the server stops.
    pub fn matches(&self, name: &str) -> Result<bool, Undone> {
        if self.turn.stopping.load(Ordering::Acquire) {
            return Err(Undone::refused(ErrorCode::ShuttingDown));
        }
        if self.turn.is_over() {
            return Err(Undone::refused(Refusal::with(
                ErrorCode::PatternInvalid,
                "The pattern takes too long to compare with the names that there are; ask with a simpler one.",
            )));
        }
        let began = Instant::now();
        let matches = self.search(name);
        let left = self.turn.left.get();
        self.turn.left.set(left.saturating_sub(began.elapsed()));
        Ok(matches)
    }

    fn search(&self, name: &str) -> bool {
        let input = Input::new(name).anchored(Anchored::Yes).earliest(true);
        let automaton = &self.pattern.automaton;
        let mut cache = self.cache.borrow_mut();
        let cache = cache.get_or_insert_with(|| automaton.create_cache());
        match automaton.try_search_fwd(cache, &input) {
            Ok(found) => found.is_some(),
            Err(_) => self.matches_slowly(input),
        }
    }

    fn matches_slowly(&self, input: Input<'_>) -> bool {
        let mut slow = self.slow.borrow_mut();
        if slow.is_none()
            && let Ok(machine) = PikeVM::new_from_nfa(self.pattern.program.clone())
        {
            let cache = machine.create_cache();
            *slow = Some((machine, cache));
        }
        let found = slow
            .as_mut()
            .map(|(machine, cache)| machine.is_match(cache, input));
        found.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    fn pattern(patterns: &Patterns, metrics: &Arc<Metrics>, text: &str) -> Arc<Pattern> {
        let hold = |bytes| Held::new(metrics, bytes);
        let found = patterns.get(text, hold);
        found
            .map_err(|refusal| refusal.sentence().to_owned())
            .expect("a pattern")
    }

    #[test]
    fn whole_names_match_whatever_machine_is_needed() {
        let (patterns, metrics) = (Patterns::default(), Arc::default());
        let cases: [(&str, &str, bool); 9] = [
            ("a|ab", "ab", true),
            ("a|ab", "abc", false),
            ("orders/.*", "orders/7", true),
            ("orders/.*", "my/orders/7", false),
            (r"\bstraße\b/\w+", "straße/ä", true),
            (r"\bstraße\b/\w+", "straße/", false),
            (r".*\bx\b.*", "ä x ö", true),
            (r".*\bx\b.*", "äxö", false),
            ("", "", true),
        ];
        for (text, name, expected) in cases {
            let pattern = pattern(&patterns, &metrics, text);
            let stopping = AtomicBool::new(false);
            let turn = Turn::new(&stopping, Duration::from_secs(60));
            let matcher = pattern.matcher(&turn);
            for _ in 0..2 {
                assert_eq!(matcher.matches(name).ok(), Some(expected), "{text} {name}");
            }
            stopping.store(true, Ordering::Release);
            assert!(matcher.matches(name).is_err(), "a stop ends the search");
        }
    }

    #[test]
    fn equal_patterns_are_one_and_are_counted_while_they_are_held() {
        let (patterns, metrics) = (Patterns::default(), Arc::<Metrics>::default());
        let one = pattern(&patterns, &metrics, r"a/\w{10}");
        let held = metrics.pipeline_waiting_bytes.get();
        assert!(held > 100_000, "{held}");
        let other = pattern(&patterns, &metrics, r"a/\w{10}");
        assert!(Arc::ptr_eq(&one, &other));
        assert_eq!(metrics.pipeline_waiting_bytes.get(), held);
        assert_eq!(one.prefix, "a/");
        drop((one, other));
        assert_eq!(metrics.pipeline_waiting_bytes.get(), 0);
        for number in 0..3 * TAILS_WAITING_MAX {
            pattern(&patterns, &metrics, &number.to_string());
        }
        assert!(patterns.known.lock().len() <= TAILS_WAITING_MAX);
    }
}
