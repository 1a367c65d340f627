//! What a pattern costs, told from its text: `patterns` asks before it compiles.
//!
//! Time goes into three things: letters and classes, as often as they are repeated; classes of letters all over Unicode;
//! and, where case is ignored, looking up the case of every letter of a class, again for each class around it. The first
//! two are bounded by the lengths of a pattern and of its program, the third by nothing else than a refusal.

use std::convert::Infallible;
use std::time::Duration;

use regex_syntax::ast::{
    Ast, ClassSetBinaryOp, ClassSetItem, Flag, Flags, RepetitionKind, RepetitionRange, Visitor,
    parse::Parser, visit,
};

/// Measured: a letter or a range, and a class that is a table (`\w`, `\p{L}`), in microseconds.
const LETTER_US: u64 = 1;
const TABLE_US: u64 = 75;
/// What is repeated takes more when it is compared: all copies of it may have to be followed at once.
const REPEATED_US: u64 = 5;
/// Letters whose case is looked up in a microsecond.
const FOLDED_PER_US: u64 = 150;
/// Letters in `\w`, `\d` or `\s`, and in anything that may be everything.
const PERL_LETTERS: u64 = 150_000;
const ALL_LETTERS: u64 = 0x0011_0000;

/// What the text of a pattern tells of it.
#[derive(Debug)]
pub struct Cost {
    /// Letters whose case is looked up.
    pub folded: u64,
    /// How long it may take to compile and to compare with a name, about.
    pub time: Duration,
}

/// Refused with what is wrong with the text.
pub fn estimate(text: &str) -> Result<Cost, String> {
    let ast = Parser::new()
        .parse(text)
        .map_err(|error| error.to_string())?;
    let estimate = Estimate {
        ignores_case: false,
        copies: vec![1],
        around: 0,
        folded: 0,
        micros: 0,
    };
    Ok(match visit(&ast, estimate) {
        Ok(cost) => cost,
    })
}

struct Estimate {
    /// Somewhere up to here: where it ends does not matter.
    ignores_case: bool,
    /// How often what is being visited is in the program, by depth.
    copies: Vec<u64>,
    /// Classes and operations around what is being visited.
    around: u64,
    folded: u64,
    micros: u64,
}

impl Estimate {
    fn add(&mut self, micros: u64, letters: u64) {
        let copies = self.copies.last().copied().unwrap_or(1);
        self.micros = self.micros.saturating_add(micros.saturating_mul(copies));
        if self.ignores_case {
            self.folded += letters * self.around.max(1);
        }
    }

    fn heed(&mut self, flags: &Flags) {
        self.ignores_case |= flags.flag_state(Flag::CaseInsensitive) == Some(true);
    }
}

impl Visitor for Estimate {
    type Output = Cost;
    type Err = Infallible;

    fn finish(self) -> Result<Cost, Infallible> {
        let micros = self.micros.saturating_add(self.folded / FOLDED_PER_US);
        Ok(Cost {
            folded: self.folded,
            time: Duration::from_micros(micros),
        })
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), Infallible> {
        match ast {
            Ast::Flags(set) => self.heed(&set.flags),
            Ast::Group(group) => group.flags().into_iter().for_each(|flags| self.heed(flags)),
            Ast::Repetition(repetition) => {
                let count = match repetition.op.kind {
                    RepetitionKind::Range(
                        RepetitionRange::Exactly(count)
                        | RepetitionRange::AtLeast(count)
                        | RepetitionRange::Bounded(_, count),
                    ) => u64::from(count.max(1)),
                    _ => 1,
                };
                let copies = self.copies.last().copied().unwrap_or(1);
                self.copies.push(copies.saturating_mul(count));
                self.add(REPEATED_US, 0);
            }
            Ast::ClassBracketed(_) => self.around += 1,
            // By itself one of these is not folded, and one of those is.
            Ast::ClassPerl(_) => self.add(TABLE_US, 0),
            Ast::ClassUnicode(_) => self.add(TABLE_US, ALL_LETTERS),
            _ => self.add(LETTER_US, 0),
        }
        Ok(())
    }

    fn visit_post(&mut self, ast: &Ast) -> Result<(), Infallible> {
        match ast {
            Ast::Repetition(_) => self.copies.truncate(self.copies.len() - 1),
            Ast::ClassBracketed(_) => self.around -= 1,
            _ => {}
        }
        Ok(())
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), Infallible> {
        match item {
            ClassSetItem::Empty(_) | ClassSetItem::Union(_) => {}
            ClassSetItem::Literal(_) => self.add(LETTER_US, 1),
            ClassSetItem::Ascii(ascii) if !ascii.negated => self.add(LETTER_US, 128),
            ClassSetItem::Range(range) => {
                let letters = u64::from(u32::from(range.end.c).abs_diff(range.start.c.into()));
                self.add(LETTER_US, letters + 1);
            }
            ClassSetItem::Perl(perl) if !perl.negated => self.add(TABLE_US, PERL_LETTERS),
            ClassSetItem::Bracketed(class) => {
                // What it leaves out is folded by the class around it.
                self.add(LETTER_US, if class.negated { ALL_LETTERS } else { 0 });
                self.around += 1;
            }
            _ => self.add(TABLE_US, ALL_LETTERS),
        }
        Ok(())
    }

    fn visit_class_set_item_post(&mut self, item: &ClassSetItem) -> Result<(), Infallible> {
        self.around -= u64::from(matches!(item, ClassSetItem::Bracketed(_)));
        Ok(())
    }

    fn visit_class_set_binary_op_pre(&mut self, _: &ClassSetBinaryOp) -> Result<(), Infallible> {
        self.around += 1;
        Ok(())
    }

    fn visit_class_set_binary_op_post(&mut self, _: &ClassSetBinaryOp) -> Result<(), Infallible> {
        self.around -= 1;
        Ok(())
    }
}
