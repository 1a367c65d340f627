//! How fast ranges become Arrow, as figures: run by hand, alone, in release.
//!
//! `cargo test --release -p millstream-core read_speed -- --ignored --nocapture` prints bytes of values per second of
//! processor time of one thread, from files in the page cache and from memory.

use std::sync::Arc;

use super::*;
use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::model::Class;
use crate::shard::write::WriteScratch;
use crate::stream::append::AppendRequest;

const RECORD_BYTES: usize = 200;

fn record(number: usize) -> String {
    let mut text = format!(
        "{{\"id\":{number},\"user\":\"u{}\",\"text\":\"",
        number % 977
    );
    while text.len() < RECORD_BYTES - 2 {
        text.push(char::from(b'a' + (text.len() % 26) as u8));
    }
    text + "\"}"
}

fn fill(engine: &Arc<Engine>, path: &str, bytes: usize, per_append: usize, to_files: bool) {
    engine
        .local_create(path, "application/json", Some(Class::Fsync))
        .expect("created");
    let stream = engine.find(path).ok().flatten().expect("there");
    let request = AppendRequest {
        content_type: Some(b"application/json"),
        ..AppendRequest::default()
    };
    let mut scratch = WriteScratch::default();
    let mut wire = String::new();
    let mut unsaved = 0;
    for number in 0..bytes / RECORD_BYTES {
        wire += &record(number);
        wire.push(',');
        if (number + 1) % per_append > 0 {
            continue;
        }
        while engine
            .append(
                &stream,
                &request,
                wire.as_bytes(),
                Ok(per_append as u32),
                engine.now_ms(),
                &mut scratch,
            )
            .is_err()
        {
            engine.shard.commit(None);
            engine.prepare_spares();
        }
        unsaved += wire.len();
        wire.clear();
        if to_files && unsaved > 64 << 20 {
            engine.shard.commit(None);
            engine.checkpoint().expect("checkpoint");
            unsaved = 0;
        }
    }
    engine.shard.commit(None);
    if to_files {
        engine.checkpoint().expect("checkpoint");
    }
}

fn thread_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec that lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Reads everything window by window; returns bytes of values per second.
fn read_all(engine: &Arc<Engine>, path: &str, columns: &str) -> f64 {
    let stream = engine.find(path).ok().flatten().expect("there");
    let tail = engine.settled_tail(&stream).ok().flatten().expect("final");
    let to = format!(
        "{{\"offset\":\"{}\",\"number\":{}}}",
        tail.tail.offset, tail.tail.number
    );
    let mut from = "{\"offset\":\"-1\",\"number\":0}".to_owned();
    let began = thread_seconds();
    let mut rows = 0;
    loop {
        let body = format!(
            "{{\"ranges\":[{{\"stream\":\"{path}\",\"from\":{from},\"to\":{to}}}],\"columns\":{columns}}}"
        );
        let before = engine.metrics.pipeline_read_rows.get();
        let answer = run(engine, body.as_bytes(), &Asker::default())
            .ok()
            .expect("answer");
        rows += engine.metrics.pipeline_read_rows.get() - before;
        let Some((_, next)) = answer.headers.first() else {
            break;
        };
        let next = String::from_utf8(next.clone()).expect("text");
        let mut fields = next
            .split("; ")
            .map(|field| field.split_once('=').expect("pair").1);
        let (_, offset, number) = (fields.next(), fields.next(), fields.next());
        from = format!(
            "{{\"offset\":\"{}\",\"number\":{}}}",
            offset.expect("offset"),
            number.expect("number")
        );
    }
    assert_eq!(rows, tail.tail.number);
    tail.bytes as f64 / (thread_seconds() - began)
}

#[test]
#[ignore = "prints figures; run by hand in release"]
fn read_speed() {
    let directory = TestDirectory::new();
    let config = Config {
        listen: false,
        reactors: 1,
        scrub_bytes_per_second: 0,
        checkpoint_bytes: 256 << 20,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let engine = Engine::open(config, doors, &mut |_| {})
        .expect("opens")
        .engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let defaults = r#"["stream","offset","timestamp","value"]"#;
    let all = r#"["stream","offset","timestamp","value","position","epoch"]"#;
    for (name, per_append, to_files) in [
        ("files, 1 record per append", 1, true),
        ("files, 100 records per append", 100, true),
        ("memory, 1 record per append", 1, false),
    ] {
        let path = format!("speed/{per_append}/{to_files}");
        fill(&engine, &path, 256 << 20, per_append, to_files);
        for columns in [defaults, r#"["value"]"#, all] {
            let best = (0..3)
                .map(|_| read_all(&engine, &path, columns))
                .fold(0.0, f64::max);
            println!("{name}, {columns}: {:.2} GB/s", best / 1e9);
        }
    }
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
}
