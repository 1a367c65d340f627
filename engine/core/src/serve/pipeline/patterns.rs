//! Patterns of stream names: compiled once for all questions that have the same, and held without scratch space.
//!
//! A pattern may wait for a minute with a question, so that only its program stays in memory, and counts: what a
//! search needs beside it belongs to who searches and goes with the search. Matching is by a lazy automaton; where
//! that gives up (word boundaries next to letters that are not ASCII), by a slower machine over the same program.
//!
//! There are patterns that take long to compile, and some for which either machine takes a tenth of a second per name:
//! - `I-PAT-1` What may take longer than the shortest turn is compiled in a longer one, never by a worker; what may take
//!   longer than anybody should wait is refused.
//! - `I-PAT-2` A search ends when its turn does, within a name. The slower machine cannot be cut: it begins only what
//!   fits into the turn.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use regex_automata::hybrid::dfa::{self, DFA};
use regex_automata::nfa::thompson::pikevm::{self, PikeVM};
use regex_automata::nfa::thompson::{self, NFA, WhichCaptures};
use regex_automata::{Anchored, Input};
use regex_syntax::hir::literal::Extractor;
use regex_syntax::hir::{Hir, Look};

use crate::error::ErrorCode;
use crate::limits::{
    PATTERN_FOLDED_MAX, PATTERN_MAX_BYTES, PATTERN_PROGRAM_MAX_BYTES, PATTERN_TURN,
    TAILS_WAITING_MAX,
};
use crate::refusal::Refusal;
use crate::serve::pipeline::{Held, check_waiting_room, pattern_cost};
use crate::shard::engine::Undone;

/// Bytes of a name between two looks at the clock, and what the slower machine takes per byte and state of a program.
const LOOK_BYTES: usize = 16;
const SLOW_STEP: Duration = Duration::from_nanos(10);

/// What a name must match as a whole.
pub struct Pattern {
    text: Box<str>,
    program: OnceLock<Program>,
    held: Held,
}

struct Program {
    /// Every matching name begins with this.
    prefix: String,
    states: NFA,
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
        let pattern = Arc::new(Pattern::new(text, hold)?);
        let mut known = self.known.lock();
        if known.len() >= TAILS_WAITING_MAX {
            known.retain(|_, pattern| pattern.strong_count() > 0);
        }
        known.insert(text.into(), Arc::downgrade(&pattern));
        Ok(pattern)
    }
}

fn invalid(detail: impl Into<String>) -> Refusal {
    Refusal::with(ErrorCode::PatternInvalid, detail.into())
}

impl Pattern {
    /// Compiles it if that is cheap.
    fn new(text: &str, hold: impl FnOnce(usize) -> Held) -> Result<Pattern, Refusal> {
        if text.len() > PATTERN_MAX_BYTES {
            return Err(invalid(format!(
                "A pattern has at most {PATTERN_MAX_BYTES} bytes."
            )));
        }
        let cost = pattern_cost::estimate(text).map_err(invalid)?;
        if cost.folded > PATTERN_FOLDED_MAX {
            return Err(invalid(
                "The pattern ignores case in too many large classes; ask with fewer or smaller ones, or without (?i).",
            ));
        }
        let pattern = Pattern {
            text: text.into(),
            program: OnceLock::new(),
            held: hold(size_of::<Pattern>() + text.len()),
        };
        if cost.time <= PATTERN_TURN {
            pattern.compile()?;
        }
        Ok(pattern)
    }

    fn compile(&self) -> Result<&Program, Refusal> {
        let hir = regex_syntax::parse(&self.text).map_err(|error| invalid(error.to_string()))?;
        let prefixes = Extractor::new().extract(&hir);
        let prefix = prefixes.longest_common_prefix().unwrap_or(b"");
        let known = std::str::from_utf8(prefix).map_or_else(|error| error.valid_up_to(), str::len);
        let whole = Hir::concat(vec![Hir::look(Look::Start), hir, Hir::look(Look::End)]);
        let states = thompson::Compiler::new()
            .configure(
                thompson::Config::new()
                    .nfa_size_limit(Some(PATTERN_PROGRAM_MAX_BYTES))
                    .which_captures(WhichCaptures::None),
            )
            .build_from_hir(&whole)
            .map_err(|error| match error.size_limit() {
                Some(limit) => invalid(format!(
                    "Compiled, the pattern has more than {limit} bytes."
                )),
                None => invalid(error.to_string()),
            })?;
        let automaton = dfa::Builder::new()
            .configure(
                dfa::Config::new()
                    .unicode_word_boundary(true)
                    .skip_cache_capacity_check(true),
            )
            .build_from_nfa(states.clone())
            .map_err(|error| invalid(error.to_string()))?;
        let bytes = states.memory_usage() + automaton.memory_usage();
        Ok(self.program.get_or_init(|| Program {
            prefix: String::from_utf8_lossy(&prefix[..known]).into_owned(),
            states,
            automaton,
            _held: Held::new(&self.held.metrics, bytes),
        }))
    }

    /// Every matching name begins with this, as far as is known yet.
    pub fn prefix(&self) -> &str {
        self.program.get().map_or("", |program| &program.prefix)
    }

    /// Something that tells of names whether they match. It has memory of its own: it does not wait.
    pub fn matcher<'p>(&'p self, turn: &'p Turn<'p>) -> Result<Matcher<'p>, Undone> {
        let program = match self.program.get() {
            Some(program) => program,
            None if turn.left.get() <= PATTERN_TURN => return Err(turn.end()),
            None => {
                check_waiting_room(&self.held.metrics, 0).map_err(Undone::refused)?;
                self.compile().map_err(Undone::refused)?
            }
        };
        Ok(Matcher {
            program,
            turn,
            cache: RefCell::new(None),
            slow: RefCell::new(None),
        })
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

    fn end(&self) -> Undone {
        self.left.set(Duration::ZERO);
        Undone::refused(invalid(
            "The pattern takes too long to compare with the names that there are; ask with a simpler one.",
        ))
    }

    /// Takes the time since then; refused when none is left, or the server stops.
    fn spend(&self, since: &mut Instant) -> Result<(), Undone> {
        let now = Instant::now();
        let left = self.left.get().saturating_sub(now - *since);
        self.left.set(left);
        *since = now;
        if self.stopping.load(Ordering::Acquire) {
            Err(Undone::refused(ErrorCode::ShuttingDown))
        } else if left.is_zero() {
            Err(self.end())
        } else {
            Ok(())
        }
    }
}

/// A pattern with what a search needs, which is made when there is something to search.
pub struct Matcher<'p> {
    program: &'p Program,
    turn: &'p Turn<'p>,
    cache: RefCell<Option<dfa::Cache>>,
    slow: RefCell<Option<(PikeVM, pikevm::Cache)>>,
}

impl Matcher<'_> {
    /// Every matching name begins with this.
    pub fn prefix(&self) -> &str {
        &self.program.prefix
    }

    /// Whether a name matches; refused when the turn is over, or the server stops.
    pub fn matches(&self, name: &str) -> Result<bool, Undone> {
        let mut since = Instant::now();
        let matches = match self.search(name, &mut since)? {
            Some(matches) => matches,
            None => self.matches_slowly(name)?,
        };
        self.turn.spend(&mut since)?;
        Ok(matches)
    }

    /// `None`: the automaton gives up.
    fn search(&self, name: &str, since: &mut Instant) -> Result<Option<bool>, Undone> {
        let automaton = &self.program.automaton;
        let mut cache = self.cache.borrow_mut();
        let cache = cache.get_or_insert_with(|| automaton.create_cache());
        let Ok(mut state) = automaton.start_state_forward(cache, &anchored(name)) else {
            return Ok(None);
        };
        for (index, byte) in name.bytes().enumerate() {
            if index % LOOK_BYTES == LOOK_BYTES - 1 {
                self.turn.spend(since)?;
            }
            match automaton.next_state(cache, state, byte) {
                Ok(next) if next.is_dead() => return Ok(Some(false)),
                Ok(next) if !next.is_quit() => state = next,
                _ => return Ok(None),
            }
        }
        // A program ends with the name, so that it has matched nowhere before.
        let last = automaton.next_eoi_state(cache, state);
        Ok(last.ok().map(|state| state.is_match()))
    }

    fn matches_slowly(&self, name: &str) -> Result<bool, Undone> {
        let states = &self.program.states;
        let steps = u32::try_from(states.states().len() * (name.len() + 1)).unwrap_or(u32::MAX);
        if SLOW_STEP * steps > self.turn.left.get() {
            return Err(self.turn.end());
        }
        let mut slow = self.slow.borrow_mut();
        if slow.is_none()
            && let Ok(machine) = PikeVM::new_from_nfa(states.clone())
        {
            let cache = machine.create_cache();
            *slow = Some((machine, cache));
        }
        let found = slow
            .as_mut()
            .map(|(machine, cache)| machine.is_match(cache, anchored(name)));
        Ok(found.unwrap_or(false))
    }
}

fn anchored(name: &str) -> Input<'_> {
    Input::new(name).anchored(Anchored::Yes).earliest(true)
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
            let matcher = pattern.matcher(&turn).ok().expect("a matcher");
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
        assert_eq!(one.prefix(), "a/");
        drop((one, other));
        assert_eq!(metrics.pipeline_waiting_bytes.get(), 0);
        for number in 0..3 * TAILS_WAITING_MAX {
            pattern(&patterns, &metrics, &number.to_string());
        }
        assert!(patterns.known.lock().len() <= TAILS_WAITING_MAX);
    }

    /// Whether a single name is compared within a turn of that length.
    fn is_compared(pattern: &Pattern, name: &str, left: Duration) -> bool {
        let stopping = AtomicBool::new(false);
        let turn = Turn::new(&stopping, left);
        let compared = pattern
            .matcher(&turn)
            .is_ok_and(|matcher| matcher.matches(name).is_ok());
        assert_ne!(compared, turn.is_over());
        compared
    }

    #[test]
    fn a_turn_ends_within_a_name() {
        let (patterns, metrics) = (Patterns::default(), Arc::default());
        let stopping = AtomicBool::new(false);
        let plain = "a".repeat(1000);
        let accented = format!("{plain}ä");
        // Either takes milliseconds for one name, by the automaton and by the slower machine.
        for (text, name) in [("(?:a?){1500}z", &plain), (r"(?:a?){1500}\bz", &accented)] {
            let pattern = pattern(&patterns, &metrics, text);
            assert!(
                is_compared(&pattern, name, Duration::from_secs(60)),
                "{text}"
            );
            let turn = Turn::new(&stopping, PATTERN_TURN / 5);
            let matcher = pattern.matcher(&turn).ok().expect("a matcher");
            let searched = matcher.search(name, &mut Instant::now());
            assert!(searched.is_err() && turn.is_over(), "{text}");
            let turn = Turn::new(&stopping, PATTERN_TURN / 5);
            let matcher = pattern.matcher(&turn).ok().expect("a matcher");
            assert!(
                matcher.matches_slowly(name).is_err() && turn.is_over(),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_not_known_to_be_cheap_is_compiled_in_a_longer_turn() {
        let (patterns, metrics) = (Patterns::default(), Arc::default());
        for text in ["(?:a?){6000}", r"(?i)[\W][\W]", r"(?:\w\d){40}"] {
            let pattern = pattern(&patterns, &metrics, text);
            assert!(pattern.program.get().is_none(), "{text}");
            assert!(!is_compared(&pattern, "a", PATTERN_TURN), "{text}");
            assert!(pattern.program.get().is_none(), "{text}");
            assert!(
                is_compared(&pattern, "a", Duration::from_secs(60)),
                "{text}"
            );
            // From then on it is as any other.
            let stopping = AtomicBool::new(false);
            let turn = Turn::new(&stopping, PATTERN_TURN);
            assert!(pattern.matcher(&turn).is_ok(), "{text}");
        }
        for text in ["(shop|chat)/.*", r"\w+/[0-9]{4}-\d\d", r"(?i)[\w.-]+/[^/]+"] {
            let pattern = pattern(&patterns, &metrics, text);
            assert!(pattern.program.get().is_some(), "{text}");
        }
    }

    #[test]
    fn what_takes_too_long_to_compile_is_refused() {
        let (patterns, metrics) = (Patterns::default(), Arc::<Metrics>::default());
        let nested = format!(
            "(?i){}{}",
            "[x".repeat(8),
            r"[!-\x{10ffff}]".to_owned() + &"]".repeat(8)
        );
        for text in [
            r"(?i)[!-\x{10ffff}]{2}".repeat(8),
            r"(?:(?i)\p{Any})".repeat(8),
            r"(?i:[\W&&\W&&\W])".repeat(2),
            "(?i)[[^a]]".repeat(8),
            nested,
        ] {
            let refused = patterns.get(&text, |bytes| Held::new(&metrics, bytes));
            let code = refused.err().map(|refusal| refusal.code);
            assert_eq!(code, Some(ErrorCode::PatternInvalid), "{text}");
            let cased = text.replace("(?i)", "").replace("?i:", "?:");
            pattern(&patterns, &metrics, &cased);
        }
    }
}
