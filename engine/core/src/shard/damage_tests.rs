//! Damage on a real directory, without sockets: what is found, where it is recorded, and what readers get.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::log::index::{self, INDEX_ENTRY_BYTES};
use crate::model::IndexEntry;
use crate::shard::damage::Condition;
use crate::shard::engine::Engine;
use crate::shard::local::LocalRead;
use crate::stream::lifecycle::{CreateRequest, ForkRequest};
use crate::stream::offsets::GapReason;

/// Runs `work` with an engine whose commit thread is running.
fn with_engine<T>(directory: &TestDirectory, work: impl FnOnce(&Engine) -> T) -> T {
    let config = Config {
        listen: false,
        reactors: 1,
        scrub_bytes_per_second: 1 << 30,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let engine = Engine::open(config, doors, &mut |_| {})
        .expect("opens")
        .engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}

/// Scrubs until one pass is over.
fn scrub(engine: &Engine) {
    let before = engine.metrics.scrub_passes.get();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| engine.run_scrub());
        while engine.metrics.scrub_passes.get() == before {
            std::thread::yield_now();
        }
        engine.directory.damaged.stop();
        thread.join().expect("scrub thread");
    });
}

const APPENDS: usize = 40;
const APPEND_BYTES: usize = 2000;

fn append_of(number: usize) -> Vec<u8> {
    let mut bytes = format!("[{number}]").repeat(APPEND_BYTES).into_bytes();
    bytes.truncate(APPEND_BYTES);
    bytes
}

/// A stream with a segment, and one in a pack; both checkpointed.
fn prepare(directory: &TestDirectory) {
    with_engine(directory, |engine| {
        for path in ["large", "small"] {
            engine
                .local_create(path, "text/plain", None)
                .expect("created");
        }
        for number in 0..APPENDS {
            engine
                .local_append("large", &append_of(number))
                .expect("appended");
        }
        for number in 0..3 {
            engine
                .local_append("small", &append_of(number))
                .expect("appended");
        }
        engine.checkpoint().expect("checkpoint");
        engine.write_clean_mark(std::time::Duration::from_secs(5));
    });
}

fn file_with(directory: &Path, extension: &str) -> PathBuf {
    let mut found = Vec::new();
    let mut left = vec![directory.to_path_buf()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(next).expect("directory") {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|name| name == extension) {
                found.push(path);
            }
        }
    }
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn flip(path: &Path, position: u64) {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .expect("file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, position).expect("read");
    file.write_all_at(&[byte[0] ^ 0x10], position)
        .expect("written");
}

/// Every answer from the start to the tail.
fn read_all(engine: &Engine, path: &str, window: u64) -> Vec<LocalRead> {
    let mut offset = "-1".to_owned();
    let mut answers = Vec::new();
    loop {
        let answer = engine.local_read(path, &offset, window).expect("read");
        offset = answer.next.to_string();
        let done = answer.up_to_date;
        answers.push(answer);
        if done {
            return answers;
        }
    }
}

/// The stream's bytes as far as they came, and the gaps as positions.
fn seen(answers: &[LocalRead]) -> (Vec<u8>, Vec<(u64, u64)>) {
    let bytes = answers
        .iter()
        .flat_map(|answer| answer.body.clone())
        .collect();
    let gaps = answers
        .iter()
        .filter_map(|answer| answer.gap)
        .inspect(|gap| assert!(gap.certain && gap.reason == GapReason::Corruption))
        .map(|gap| (gap.from.position, gap.to.position))
        .collect();
    (bytes, gaps)
}

fn all_but(numbers: std::ops::Range<usize>, lost: &[usize]) -> Vec<u8> {
    numbers
        .filter(|number| !lost.contains(number))
        .flat_map(append_of)
        .collect()
}

fn edge(number: usize) -> u64 {
    (number * APPEND_BYTES) as u64
}

#[test]
fn a_read_that_meets_damage_reports_it_and_goes_on_behind_it() {
    let directory = TestDirectory::new();
    prepare(&directory);
    flip(&file_with(directory.path(), "seg"), edge(7) + 100);
    for turn in 0..3 {
        with_engine(&directory, |engine| {
            let expected = if turn == 0 {
                Condition::Ok
            } else {
                Condition::Degraded
            };
            assert_eq!(engine.condition(), expected, "turn {turn}");
            for window in [3000, 10_000, 1 << 20] {
                let (bytes, gaps) = seen(&read_all(engine, "large", window));
                assert!(bytes == all_but(0..APPENDS, &[7]), "window {window}");
                assert_eq!(gaps, [(edge(7), edge(8))]);
            }
            assert_eq!(engine.condition(), Condition::Degraded);
            assert_eq!(engine.metrics.damaged_ranges.get(), 1);
            assert!(seen(&read_all(engine, "small", 1 << 20)).1.is_empty());
            let failed = engine.metrics.read_errors.get() > 0;
            assert_eq!(failed, turn == 0, "what was found once is not found again");
            engine.checkpoint().expect("saved");
        });
    }
}

#[test]
fn the_scrub_finds_damage_that_nobody_reads() {
    let directory = TestDirectory::new();
    prepare(&directory);
    let segment = file_with(directory.path(), "seg");
    flip(&segment, edge(3));
    flip(&segment, edge(4) + 1);
    flip(&segment, edge(APPENDS) - 1);
    flip(&file_with(directory.path(), "pack"), 16 + 40 + 5);
    with_engine(&directory, |engine| {
        scrub(engine);
        assert!(engine.metrics.scrubbed_bytes.get() >= edge(APPENDS + 3));
        assert_eq!(
            engine.metrics.damaged_ranges.get(),
            3,
            "neighbours are one range"
        );
        let errors = engine.metrics.read_errors.get();
        let (bytes, gaps) = seen(&read_all(engine, "large", 1 << 20));
        assert!(bytes == all_but(0..APPENDS, &[3, 4, APPENDS - 1]));
        assert_eq!(
            gaps,
            [(edge(3), edge(5)), (edge(APPENDS - 1), edge(APPENDS))]
        );
        let (bytes, gaps) = seen(&read_all(engine, "small", 1 << 20));
        assert!(bytes == all_but(0..3, &[0]));
        assert_eq!(gaps, [(0, edge(1))]);
        assert_eq!(
            engine.metrics.read_errors.get(),
            errors,
            "all of it was known"
        );
        // What is written behind damage is read behind it.
        engine.local_append("large", b"more").expect("appended");
        let (bytes, _) = seen(&read_all(engine, "large", 1 << 20));
        assert!(bytes.ends_with(b"more"));
        assert!(engine.local_delete("large").expect("deleted"));
        engine.checkpoint().expect("forgotten");
        assert_eq!(
            engine.metrics.damaged_ranges.get(),
            1,
            "gone with its stream"
        );
    });
}

#[test]
fn a_missing_file_is_a_gap_of_its_extent() {
    let directory = TestDirectory::new();
    prepare(&directory);
    std::fs::remove_file(file_with(directory.path(), "seg")).expect("removed");
    with_engine(&directory, |engine| {
        let (bytes, gaps) = seen(&read_all(engine, "large", 1 << 20));
        assert!(bytes.is_empty());
        assert_eq!(gaps, [(0, edge(APPENDS))]);
        engine.local_append("large", b"more").expect("appended");
        engine.checkpoint().expect("a new segment");
    });
    with_engine(&directory, |engine| {
        scrub(engine);
        let (bytes, gaps) = seen(&read_all(engine, "large", 1 << 20));
        assert_eq!((bytes, gaps), (b"more".to_vec(), vec![(0, edge(APPENDS))]));
    });
}

#[test]
fn a_short_file_loses_only_what_it_lacks() {
    let directory = TestDirectory::new();
    prepare(&directory);
    let segment = OpenOptions::new()
        .write(true)
        .open(file_with(directory.path(), "seg"))
        .expect("segment");
    segment.set_len(edge(30) + 7).expect("cut");
    with_engine(&directory, |engine| {
        scrub(engine);
        let (bytes, gaps) = seen(&read_all(engine, "large", 1 << 20));
        assert!(bytes == all_but(0..30, &[]));
        assert_eq!(gaps, [(edge(30), edge(APPENDS))]);
    });
}

/// Changes one entry of an index and makes its own checksum fit again.
fn rewrite_entry(path: &Path, number: usize, change: impl FnOnce(&mut IndexEntry)) {
    let mut bytes = std::fs::read(path).expect("index");
    let place = number * INDEX_ENTRY_BYTES..(number + 1) * INDEX_ENTRY_BYTES;
    let mut entry = index::decode(&bytes[place.clone()]).expect("entry");
    change(&mut entry);
    let mut encoded = Vec::new();
    index::encode(&entry, &mut encoded);
    bytes[place].copy_from_slice(&encoded);
    std::fs::write(path, bytes).expect("written");
}

#[test]
fn an_index_out_of_order_takes_its_extent_with_it_and_a_wrong_one_its_appends() {
    type Change = fn(&mut IndexEntry);
    let cases: [(Change, (usize, usize)); 5] = [
        (|entry| entry.end -= 5000, (0, APPENDS)),
        (|entry| entry.end += 1 << 40, (0, APPENDS)),
        (|entry| entry.crc ^= 1, (10, 11)),
        (|entry| entry.time_ms += 1 << 40, (11, 12)),
        (|entry| entry.end -= 16, (10, 12)),
    ];
    for (case, (change, lost)) in cases.into_iter().enumerate() {
        let directory = TestDirectory::new();
        prepare(&directory);
        rewrite_entry(&file_with(directory.path(), "idx"), 10, change);
        with_engine(&directory, |engine| {
            scrub(engine);
            let (bytes, gaps) = seen(&read_all(engine, "large", 7000));
            assert_eq!(gaps, [(edge(lost.0), edge(lost.1))], "case {case}");
            assert!(bytes == all_but(0..APPENDS, &Vec::from_iter(lost.0..lost.1)));
        });
    }
}

#[test]
fn a_flipped_byte_in_an_index_is_found_by_a_reader() {
    let directory = TestDirectory::new();
    prepare(&directory);
    flip(&file_with(directory.path(), "idx"), 10 * 32 + 17);
    with_engine(&directory, |engine| {
        let (bytes, gaps) = seen(&read_all(engine, "large", 7000));
        assert_eq!(gaps, [(0, edge(APPENDS))]);
        assert!(bytes.is_empty());
    });
}

#[test]
fn an_offset_that_a_damaged_index_hides_leads_to_a_gap_and_not_to_a_refusal() {
    let directory = TestDirectory::new();
    prepare(&directory);
    let offset = with_engine(&directory, |engine| {
        let before = engine
            .local_read("large", "-1", edge(21))
            .expect("read")
            .next;
        engine.write_clean_mark(std::time::Duration::from_secs(5));
        before.to_string()
    });
    rewrite_entry(&file_with(directory.path(), "idx"), 20, |entry| {
        entry.end -= 16;
    });
    with_engine(&directory, |engine| {
        let answer = engine.local_read("large", &offset, 1 << 20).expect("a gap");
        let (bytes, gaps) = seen(&[answer]);
        assert_eq!(gaps, [(edge(21), edge(22))]);
        assert!(bytes == all_but(22..APPENDS, &[]));
        let made_up = format!("{}{:016}", &offset[..17], edge(30) + 1);
        assert!(engine.local_read("large", &made_up, 1 << 20).is_err());
    });
}

#[test]
fn a_fork_begins_at_a_boundary_also_where_its_sources_index_is_damaged() {
    let directory = TestDirectory::new();
    prepare(&directory);
    let offset = with_engine(&directory, |engine| {
        let source = engine.local_read("large", "-1", edge(20)).expect("read");
        let request = CreateRequest {
            fork: Some(ForkRequest {
                source_path: "large",
                offset: Some(source.next),
                sub_offset: 0,
            }),
            ..CreateRequest::default()
        };
        let created = engine.create("fork", &request, b"", engine.now_ms());
        assert!(created.is_ok(), "created");
        let offset = engine.local_tail("fork").expect("looked at");
        engine.local_append("fork", b"own").expect("appended");
        engine.write_clean_mark(std::time::Duration::from_secs(5));
        offset.expect("there").to_string()
    });
    rewrite_entry(&file_with(directory.path(), "idx"), 19, |entry| {
        entry.end -= 16;
    });
    with_engine(&directory, |engine| {
        let fork = engine.find("fork").ok().flatten().expect("there");
        assert!(engine.is_boundary(&fork, edge(20)).expect("looked at"));
        let (bytes, gaps) = seen(&[engine.local_read("fork", &offset, 1 << 20).expect("read")]);
        assert_eq!((&bytes[..], &gaps[..]), (&b"own"[..], &[][..]));
        assert_eq!(
            engine.metrics.damaged_ranges.get(),
            0,
            "nobody has looked at the source"
        );
    });
}

#[test]
fn a_failure_that_may_pass_is_no_damage() {
    let directory = TestDirectory::new();
    prepare(&directory);
    let segment = file_with(directory.path(), "seg");
    let aside = segment.with_extension("aside");
    // A link to itself cannot be opened, and the error is not one of a missing or broken file.
    std::fs::rename(&segment, &aside).expect("aside");
    std::os::unix::fs::symlink(&segment, &segment).expect("link");
    with_engine(&directory, |engine| {
        assert!(engine.local_read("large", "-1", 1 << 20).is_err());
        scrub(engine);
        assert_eq!(engine.metrics.damaged_ranges.get(), 0);
        assert!(engine.metrics.read_errors.get() > 0);
        std::fs::remove_file(&segment).expect("link removed");
        std::fs::rename(&aside, &segment).expect("back");
        let (bytes, gaps) = seen(&read_all(engine, "large", 1 << 20));
        assert!(gaps.is_empty() && bytes == all_but(0..APPENDS, &[]));
    });
}
