//! Which of many globs match a name: `*` is one segment, `**` is any number of them, also none; all else is literal.
//!
//! A glob is filed under the literal of it that the fewest others are filed under, and is looked at only for names that
//! have that literal. Comparing is a walk along the name's segments with a set of states in one word, so its cost is the
//! number of segments whatever the glob looks like. Invariants: a literal's number is in use exactly while a glob has it;
//! `place_of` is all zeros between two calls.

use std::sync::Arc;

use ahash::AHashMap;

/// One bit says how many parts of a glob are matched, from none to all.
pub const PARTS_MAX: usize = 127;

#[derive(Default)]
pub struct Globs {
    globs: Vec<Option<Glob>>,
    free: Vec<usize>,
    by_text: AHashMap<Arc<str>, usize>,
    literals: AHashMap<Box<str>, Literal>,
    free_numbers: Vec<usize>,
    /// By number of literal: the globs filed under it.
    filed: Vec<Vec<usize>>,
    /// Globs of wildcards alone.
    wild: Vec<usize>,
    /// By number of literal: where it is among the different segments of the name in question; 0 = it is not.
    place_of: Vec<usize>,
    /// Segments that were compared with a glob, ever: what the work is counted in.
    steps: u64,
}

struct Literal {
    number: usize,
    users: usize,
}

struct Glob {
    text: Arc<str>,
    filed: Filed,
    /// How many segments are not `**`.
    parts: usize,
    /// By part: the ones that are `*`; the ones before which any number of segments may stand (bit `parts`: at the end).
    any: u128,
    gaps: u128,
    /// Every literal by number, and the parts that are it.
    literals: Vec<(usize, u128)>,
}

enum Filed {
    /// Without a wildcard: the text is the name.
    Exact,
    Wild,
    Under(usize),
}

impl Globs {
    pub fn is_empty(&self) -> bool {
        self.by_text.is_empty()
    }

    /// Adds a glob, if it is not there yet. False: it has too many parts.
    pub fn add(&mut self, text: &str) -> bool {
        if self.by_text.contains_key(text) {
            return true;
        }
        let pieces: Vec<&str> = text.split('/').collect();
        if pieces.len() > PARTS_MAX {
            return false;
        }
        let mut glob = Glob {
            text: text.into(),
            filed: Filed::Wild,
            parts: 0,
            any: 0,
            gaps: 0,
            literals: Vec::new(),
        };
        for piece in pieces {
            let bit = 1 << glob.parts;
            match piece {
                "**" => {
                    glob.gaps |= bit;
                    continue;
                }
                "*" => glob.any |= bit,
                literal => {
                    let number = self.number(literal);
                    match glob.literals.iter_mut().find(|known| known.0 == number) {
                        Some(known) => known.1 |= bit,
                        None => glob.literals.push((number, bit)),
                    }
                }
            }
            glob.parts += 1;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.globs.push(None);
            self.globs.len() - 1
        });
        glob.filed = self.file(&glob, slot);
        self.by_text.insert(Arc::clone(&glob.text), slot);
        self.globs[slot] = Some(glob);
        true
    }

    pub fn remove(&mut self, text: &str) {
        let Some(slot) = self.by_text.remove(text) else {
            return;
        };
        self.free.push(slot);
        let Some(glob) = self.globs[slot].take() else {
            return;
        };
        match glob.filed {
            Filed::Exact => {}
            Filed::Wild => self.wild.retain(|filed| *filed != slot),
            Filed::Under(number) => self.filed[number].retain(|filed| *filed != slot),
        }
        for piece in text
            .split('/')
            .filter(|piece| !matches!(*piece, "*" | "**"))
        {
            let Some(literal) = self.literals.get_mut(piece) else {
                continue;
            };
            literal.users -= 1;
            if literal.users == 0 {
                self.free_numbers.push(literal.number);
                self.literals.remove(piece);
            }
        }
    }

    /// The globs that match `name`, in no order.
    pub fn find(&mut self, name: &str) -> Vec<Arc<str>> {
        let mut found = Vec::new();
        if let Some(glob) = self
            .by_text
            .get(name)
            .and_then(|slot| self.globs[*slot].as_ref())
            && matches!(glob.filed, Filed::Exact)
        {
            found.push(Arc::clone(&glob.text));
        }
        // The name as places of a table that has a row for each of its segments that a glob has, row 0 for all others.
        let mut numbers = Vec::new();
        let mut rows = Vec::new();
        for segment in name.split('/') {
            let mut row = 0;
            if let Some(literal) = self.literals.get(segment) {
                let place = &mut self.place_of[literal.number];
                if *place == 0 {
                    numbers.push(literal.number);
                    *place = numbers.len();
                }
                row = *place;
            }
            rows.push(row);
        }
        let mut table = vec![0; numbers.len() + 1];
        let candidates = numbers.iter().flat_map(|number| &self.filed[*number]);
        for slot in candidates.chain(&self.wild) {
            let Some(glob) = &self.globs[*slot] else {
                continue;
            };
            if glob.matches(&rows, &self.place_of, &mut table, &mut self.steps) {
                found.push(Arc::clone(&glob.text));
            }
        }
        for number in numbers {
            self.place_of[number] = 0;
        }
        found
    }

    fn number(&mut self, literal: &str) -> usize {
        if let Some(known) = self.literals.get_mut(literal) {
            known.users += 1;
            return known.number;
        }
        let number = self.free_numbers.pop().unwrap_or_else(|| {
            self.filed.push(Vec::new());
            self.place_of.push(0);
            self.filed.len() - 1
        });
        self.literals
            .insert(literal.into(), Literal { number, users: 1 });
        number
    }

    fn file(&mut self, glob: &Glob, slot: usize) -> Filed {
        if glob.any == 0 && glob.gaps == 0 {
            return Filed::Exact;
        }
        let numbers = glob.literals.iter().map(|(number, _)| *number);
        match numbers.min_by_key(|number| self.filed[*number].len()) {
            Some(number) => {
                self.filed[number].push(slot);
                Filed::Under(number)
            }
            None => {
                self.wild.push(slot);
                Filed::Wild
            }
        }
    }
}

impl Glob {
    fn matches(
        &self,
        rows: &[usize],
        place_of: &[usize],
        table: &mut [u128],
        steps: &mut u64,
    ) -> bool {
        *steps += 1;
        if rows.len() < self.parts || (rows.len() > self.parts && self.gaps == 0) {
            return false;
        }
        if self.literals.is_empty() {
            return true;
        }
        if self
            .literals
            .iter()
            .any(|(number, _)| place_of[*number] == 0)
        {
            return false;
        }
        table.fill(self.any);
        for (number, parts) in &self.literals {
            table[place_of[*number]] |= parts;
        }
        let mut states: u128 = 1;
        for row in rows {
            *steps += 1;
            states = ((states & table[*row]) << 1) | (states & self.gaps);
            if states == 0 {
                return false;
            }
        }
        states >> self.parts & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Globs, PARTS_MAX};

    fn matches(glob: &str, name: &str) -> bool {
        let mut globs = Globs::default();
        assert!(globs.add(glob));
        !globs.find(name).is_empty()
    }

    /// What a glob means, word for word.
    fn means(glob: &[&str], name: &[&str]) -> bool {
        match (glob.split_first(), name.split_first()) {
            (None, _) => name.is_empty(),
            (Some((&"**", rest)), _) => (0..=name.len()).any(|skip| means(rest, &name[skip..])),
            (Some((part, rest)), Some((segment, left))) => {
                (*part == "*" || part == segment) && means(rest, left)
            }
            (Some(_), None) => false,
        }
    }

    fn parts(text: &str) -> Vec<&str> {
        text.split('/').collect()
    }

    #[test]
    fn a_table_of_cases() {
        for (glob, name, expected) in [
            ("a/*", "a/b", true),
            ("a/*", "a/b/c", false),
            ("a/*", "a/", true),
            ("a/**", "a", true),
            ("a/**", "a/b/c", true),
            ("**/c", "a/b/c", true),
            ("**/c", "c", true),
            ("a/**/c/*", "a/x/c/y/c/z", true),
            ("a/**/c/*", "a/x/c/y/z", false),
            ("*", "a", true),
            ("*", "a/b", false),
            ("a", "a", true),
            ("a", "b", false),
            ("a/b", "a/b", true),
            ("**", "a/b", true),
            ("*/**/*", "a", false),
            ("*/**/*", "a/b", true),
        ] {
            assert_eq!(matches(glob, name), expected, "{glob} {name}");
        }
    }

    #[test]
    fn as_many_parts_as_there_are_bits() {
        let long = vec!["a"; PARTS_MAX].join("/");
        assert!(matches(&long.replacen('a', "*", 1), &long));
        assert!(matches(&long.replacen('a', "**", 1), &long));
        assert!(!matches(&long.replacen('a', "*", 1), &format!("{long}/a")));
        assert!(!Globs::default().add(&format!("{long}/a")));
    }

    #[test]
    fn the_work_is_the_segments_of_the_name_for_each_glob_that_has_a_literal_of_it() {
        let name = vec!["a"; 510].join("/");
        let mut globs = Globs::default();
        for number in 0..2000 {
            globs.add(&format!("**/{}z{number}", "a/".repeat(62)));
        }
        assert!(globs.find(&name).is_empty());
        assert!(globs.steps < 2, "{}", globs.steps);
        for number in 0..100 {
            let parts = (0..63).map(|part| {
                if number >> (part % 7) & 1 == 1 {
                    "**"
                } else {
                    "a"
                }
            });
            globs.add(&parts.chain(["a"]).collect::<Vec<_>>().join("/"));
        }
        globs.find(&name);
        assert!(globs.steps <= 100 * 511 + 2, "{}", globs.steps);
    }

    #[test]
    fn what_is_removed_leaves_nothing_behind() {
        let mut globs = Globs::default();
        for round in 0..3 {
            let texts = ["a/*", "**", "*/b", "c/d"].map(|text| format!("{round}/{text}"));
            for text in &texts {
                globs.add(text);
                globs.add(text);
            }
            assert_eq!(globs.find(&format!("{round}/c/d")).len(), 2);
            for text in &texts {
                globs.remove(text);
            }
            assert!(globs.is_empty() && globs.literals.is_empty() && globs.wild.is_empty());
            assert!(globs.filed.iter().all(Vec::is_empty));
            assert_eq!((globs.globs.len(), globs.filed.len()), (4, 5));
        }
    }

    proptest! {
        #[test]
        fn exactly_the_globs_that_mean_the_name_are_found(
            texts in prop::collection::vec(
                prop::collection::vec(prop::sample::select(vec!["a", "b", "*x", "*", "**"]), 1..7),
                0..9,
            ),
            removed in prop::collection::vec(any::<bool>(), 9),
            name in prop::collection::vec(prop::sample::select(vec!["a", "b", "*x", "y"]), 1..7),
        ) {
            let texts: Vec<String> = texts.iter().map(|text| text.join("/")).collect();
            let name = name.join("/");
            let mut globs = Globs::default();
            for text in &texts {
                globs.add(text);
            }
            for (text, removed) in texts.iter().zip(&removed) {
                if *removed {
                    globs.remove(text);
                }
            }
            let gone: Vec<&String> =
                texts.iter().zip(&removed).filter(|row| *row.1).map(|row| row.0).collect();
            let mut expected: Vec<&str> = texts
                .iter()
                .filter(|text| !gone.contains(text) && means(&parts(text), &parts(&name)))
                .map(|text| &**text)
                .collect();
            expected.sort_unstable();
            expected.dedup();
            for _ in 0..2 {
                let found = globs.find(&name);
                let mut found: Vec<&str> = found.iter().map(|text| &**text).collect();
                found.sort_unstable();
                prop_assert_eq!(&found, &expected);
            }
        }
    }
}
