//! Lines for the operator, on standard error. A closed standard error must not stop the server: a line that
//! nobody can read is dropped.

use std::fmt::Arguments;
use std::io::Write;

pub fn line(text: Arguments<'_>) {
    let written = writeln!(std::io::stderr().lock(), "millstream: {text}");
    // Nobody listens; there is nowhere else to say so.
    drop(written);
}

/// Like `eprintln!`, with the program's name in front and without its panic.
#[macro_export]
macro_rules! report {
    ($($part:tt)*) => { $crate::report::line(format_args!($($part)*)) };
}
