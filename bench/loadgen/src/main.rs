//! The load generator: drives a Durable Streams server over HTTP/1.1 and verifies what it wrote.
//!
//! One mode per file; each prints one JSON object on standard output. Exit code 0: measured and
//! verified; 1: the server failed the verification or a request; 2: the generator could not run.

mod append;
mod appender;
mod catchup;
mod create;
mod fill;
mod histogram;
mod http;
mod json;
mod mixed;
mod options;
mod payload;
mod slices;
mod sse;
mod subscriber;
mod sys;
mod targets;
mod verify;
mod wire;

use std::process::ExitCode;

const USAGE: &str = "usage: loadgen append|mixed|fill|fill-verify|catchup|sse|idle|create|create-verify --url http://HOST:PORT [--option value ...]";

fn main() -> ExitCode {
    match run() {
        Ok((json, ok)) => {
            println!("{json}");
            if ok {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(1)
            }
        }
        Err(error) => {
            eprintln!("loadgen: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(String, bool), String> {
    sys::raise_descriptor_limit().map_err(|error| format!("descriptor limit: {error}"))?;
    let mut arguments = std::env::args().skip(1);
    let mode = arguments.next().ok_or(USAGE)?;
    let options = options::Options::parse(arguments)?;
    match mode.as_str() {
        "append" => append::run(options),
        "mixed" => mixed::run(options),
        "fill" => fill::run(options),
        "fill-verify" => fill::verify(options),
        "catchup" => catchup::run(options),
        "sse" => sse::run(options),
        "idle" => sse::run_idle(options),
        "create" => create::run(options),
        "create-verify" => create::verify(options),
        _ => Err(format!("unknown mode {mode:?}\n{USAGE}")),
    }
}
