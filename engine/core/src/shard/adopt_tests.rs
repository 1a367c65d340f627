//! Commits on a real directory, without sockets: adopted and copied bytes, checkpoints, restarts, deletion, damage.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::*;
use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::limits::ADOPT_MIN_BYTES;
use crate::model::Class;
use crate::shard::stage::StageBuilder;
use crate::stream::offsets::GapReason;

fn config() -> Config {
    Config {
        listen: false,
        reactors: 1,
        stage_bytes_max: 64 << 20,
        ..Config::default()
    }
}

/// Runs `work` with an engine whose commit thread is running; ends as a killed process does.
fn with_engine<T>(directory: &TestDirectory, work: impl FnOnce(&Engine) -> T) -> T {
    let doors = Doors::real(directory.path()).expect("doors");
    let engine = Engine::open(config(), doors, &mut |_| {})
        .expect("opens")
        .engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}

/// What every stream should hold.
#[derive(Default)]
struct Model(BTreeMap<String, Vec<u8>>);

impl Model {
    fn create(&mut self, engine: &Engine, path: &str, kind: &str, class: Class) {
        let made = engine.local_create(path, kind, Some(class));
        assert!(made.expect("created"));
        self.0.insert(path.to_owned(), Vec::new());
    }

    fn append(&mut self, engine: &Engine, path: &str, value: &[u8]) {
        engine.local_append(path, value).expect("appended");
        self.add(path, value);
    }

    fn add(&mut self, path: &str, value: &[u8]) {
        let json = path.starts_with("json");
        let bytes = self.0.get_mut(path).expect("known");
        bytes.extend_from_slice(value);
        if json {
            bytes.push(b',');
        }
    }

    /// Stages and commits rows as one batch of a producer.
    fn commit(&mut self, engine: &Engine, epoch: u64, rows: &[(&str, Vec<u8>)]) -> Committed {
        let id = format!("stage-{epoch}");
        let staged = stage(engine, &id, rows);
        let committed = commit(engine, "spark:1", epoch, &[&staged]).expect("committed");
        assert!(!committed.duplicate);
        rows.iter().for_each(|(path, value)| self.add(path, value));
        committed
    }

    fn check(&self, engine: &Engine) {
        for (path, wanted) in &self.0 {
            let found = content(engine, path);
            assert!(
                found == *wanted,
                "{path}: {} bytes instead of {}",
                found.len(),
                wanted.len()
            );
        }
    }
}

fn stage(engine: &Engine, id: &str, rows: &[(&str, Vec<u8>)]) -> Arc<StageRecord> {
    let rows: Vec<(&str, &[u8])> = rows
        .iter()
        .map(|(path, value)| (*path, &value[..]))
        .collect();
    engine.local_stage(id, &rows).expect("staged").record
}

fn commit(
    engine: &Engine,
    producer: &str,
    epoch: u64,
    stages: &[&Arc<StageRecord>],
) -> Result<Committed, Refusal> {
    let asked = stages.iter().map(|record| CommitStage {
        id: &record.head.id,
        checksum: record.head.checksum,
    });
    engine.local_commit(&CommitRequest {
        producer,
        epoch,
        streams: Vec::new(),
        stages: asked.collect(),
    })
}

/// All stored bytes, read in small windows that end on record boundaries.
fn content(engine: &Engine, path: &str) -> Vec<u8> {
    let json = path.starts_with("json");
    let (mut bytes, mut offset) = (Vec::new(), "-1".to_owned());
    loop {
        let read = engine.local_read(path, &offset, 100_000).expect("read");
        // A weak stream may have lost something with each start; here it never has.
        let certain = read.gap.as_ref().is_some_and(|gap| gap.certain);
        assert!(!certain, "{path}: {:?}", read.gap);
        if json && read.body.len() > 2 {
            bytes.extend_from_slice(&read.body[1..read.body.len() - 1]);
            bytes.push(b',');
        } else if !json {
            bytes.extend_from_slice(&read.body);
        }
        offset = read.next.to_string();
        if read.up_to_date {
            return bytes;
        }
    }
}

fn value(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (seed * 31 + at * 7) as u8).collect()
}

fn json_row(number: usize, len: usize) -> Vec<u8> {
    format!("{{\"n\":{number},\"x\":\"{}\"}}", "y".repeat(len)).into_bytes()
}

/// `count` rows for each of the streams, in turn.
fn rows<'a>(paths: &[&'a str], count: usize, len: usize) -> Vec<(&'a str, Vec<u8>)> {
    let mut rows = Vec::new();
    for number in 0..count {
        for path in paths {
            let value = match path.starts_with("json") {
                true => json_row(number, len),
                false => value(number, len),
            };
            rows.push((*path, value));
        }
    }
    rows
}

fn packs(directory: &TestDirectory) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(directory.path().join("packs"))
        .expect("lists")
        .map(|entry| entry.expect("entry").path())
        .collect();
    found.sort();
    found
}

const PATHS: [&str; 3] = ["json", "bytes", "other"];

fn create_all(engine: &Engine, model: &mut Model) {
    model.create(engine, "json", "application/json", Class::Fsync);
    model.create(engine, "bytes", "application/octet-stream", Class::Fsync);
    model.create(engine, "other", "text/plain", Class::Memory);
}

#[test]
fn commits_of_every_size_survive_restarts_before_and_behind_checkpoints() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        model.append(engine, "bytes", b"before");
        model.commit(engine, 1, &rows(&PATHS, 3, 100));
        assert_eq!(engine.cold.adopted_sections(), 0, "small: in the log");
        engine.sweep_stages(engine.now_ms());
        assert!(
            packs(&directory).is_empty(),
            "the file of a copied stage goes"
        );
        model.commit(engine, 2, &rows(&PATHS, 200, 2_000));
        assert_eq!(engine.cold.adopted_sections(), 3);
        model.append(engine, "bytes", b"between");
        model.append(engine, "json", b"1");
        let big = rows(&["json", "bytes"], 3_000, 2_000);
        model.commit(engine, 3, &big);
        model.append(engine, "json", b"{\"behind\":true}");
        model.check(engine);
        assert!(
            engine.metrics.hot_bytes.get() < 3 << 20,
            "adopted bytes are not in memory: {}",
            engine.metrics.hot_bytes.get()
        );
    });
    with_engine(&directory, |engine| {
        assert_eq!(engine.cold.adopted_sections(), 5);
        model.check(engine);
        engine.checkpoint().expect("checkpoint");
        assert_eq!(engine.cold.adopted_sections(), 0);
        assert_eq!(engine.metrics.hot_bytes.get(), 0);
        model.check(engine);
        assert_eq!(
            packs(&directory).len(),
            2,
            "the stage with large sections, and what the checkpoint packed"
        );
        model.append(engine, "bytes", b"after");
        model.commit(engine, 4, &rows(&PATHS, 200, 2_000));
        model.check(engine);
    });
    for _ in 0..2 {
        with_engine(&directory, |engine| {
            model.check(engine);
            engine.checkpoint().expect("checkpoint");
            model.check(engine);
        });
    }
}

#[test]
fn a_repetition_is_told_by_any_stream_also_after_a_restart() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        model.create(engine, "gone", "text/plain", Class::Ephemeral);
        let staged = stage(engine, "first", &rows(&["bytes", "gone"], 2, 10));
        let committed = commit(engine, "p", 7, &[&staged]).expect("committed");
        assert_eq!(committed.streams.len(), 2);
        let again = commit(engine, "p", 7, &[&staged]).expect("told");
        assert!(again.duplicate && again.streams.is_empty());
        let refused = engine.local_drop_stage("first").expect_err("committed");
        assert_eq!(refused.code, ErrorCode::StageCommitted);
        let second = stage(engine, "second", &rows(&["other"], 2, 10));
        let fenced = CommitRequest {
            producer: "p",
            epoch: 6,
            streams: vec!["gone"],
            stages: vec![CommitStage {
                id: "second",
                checksum: second.head.checksum,
            }],
        };
        let refused = engine.local_commit(&fenced).err().expect("fenced");
        assert_eq!(refused.code, ErrorCode::ProducerFenced);
        let wrong = CommitRequest {
            epoch: 8,
            stages: vec![CommitStage {
                id: "second",
                checksum: 1,
            }],
            ..fenced
        };
        let refused = engine.local_commit(&wrong).err().expect("mismatch");
        assert_eq!(refused.code, ErrorCode::StageMismatch);
    });
    with_engine(&directory, |engine| {
        for streams in [vec!["bytes"], vec!["gone"]] {
            let repeated = CommitRequest {
                producer: "p",
                epoch: 7,
                streams,
                stages: vec![CommitStage {
                    id: "first",
                    checksum: 0,
                }],
            };
            assert!(engine.local_commit(&repeated).expect("told").duplicate);
        }
        let unknown = CommitRequest {
            producer: "p",
            epoch: 8,
            streams: vec!["bytes"],
            stages: vec![CommitStage {
                id: "never",
                checksum: 0,
            }],
        };
        let refused = engine.local_commit(&unknown).err().expect("gone");
        assert_eq!(refused.code, ErrorCode::StageGone);
        let used = engine.stages.find("first");
        assert!(
            matches!(used, Found::None),
            "a copied stage is not offered again"
        );
        let found = engine.stages.find("second");
        let Found::Waiting(second) = found else {
            panic!("the stage has survived");
        };
        assert!(commit(engine, "p", 8, &[&second]).is_ok());
        assert_eq!(content(engine, "other").len(), 20);
        assert_eq!(content(engine, "bytes").len(), 20);
    });
}

#[test]
fn a_repetition_is_told_by_a_part_of_the_streams_as_by_all() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        let paths: Vec<String> = (0..1000).map(|number| format!("s{number}")).collect();
        for path in &paths {
            model.create(engine, path, "text/plain", Class::Memory);
        }
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let staged: Vec<_> = (0..3)
            .map(|number| stage(engine, &format!("stage-{number}"), &rows(&paths, 1, 10)))
            .collect();
        let staged: Vec<_> = staged.iter().collect();
        commit(engine, "p", 7, &staged).expect("committed");
        for staged in &staged {
            match engine.stages.find(&staged.head.id) {
                Found::Committed(streams) => assert!(streams.len() <= 32, "{}", streams.len()),
                _ => panic!("it was committed"),
            }
        }
        for path in &paths[..900] {
            assert!(engine.local_delete(path).expect("deleted"));
        }
        assert!(commit(engine, "p", 7, &staged).expect("told").duplicate);
        assert!(
            commit(engine, "p", 7, &staged[2..])
                .expect("told")
                .duplicate
        );
        let code = |epoch, producer| {
            let refused = commit(engine, producer, epoch, &staged).err();
            refused.expect("refused").code
        };
        assert_eq!(code(6, "p"), ErrorCode::ProducerFenced);
        assert_eq!(code(8, "p"), ErrorCode::StageGone);
        assert_eq!(code(7, "q"), ErrorCode::StageGone);
    });
}

#[test]
fn all_streams_or_none() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        let staged = stage(engine, "one", &rows(&PATHS, 300, 1_000));
        assert!(engine.local_delete("other").expect("deleted"));
        let refused = commit(engine, "p", 1, &[&staged]).err().expect("refused");
        assert_eq!(refused.code, ErrorCode::StreamNotFound);
        assert!(
            refused.sentence().contains("other"),
            "{}",
            refused.sentence()
        );
        engine
            .local_create("other", "text/plain", None)
            .expect("created anew");
        let refused = commit(engine, "p", 1, &[&staged]).err().expect("refused");
        assert_eq!(refused.code, ErrorCode::StreamRecreated);
        assert!(content(engine, "json").is_empty() && content(engine, "bytes").is_empty());
        assert_eq!(engine.stages.waiting().0, 1, "the stage is given back");
        engine.local_drop_stage("one").expect("dropped");
        assert!(packs(&directory).is_empty());
    });
}

#[test]
fn deleted_streams_give_their_adopted_bytes_back() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        let size = ADOPT_MIN_BYTES as usize / 1_000 + 10;
        model.commit(engine, 1, &rows(&["json", "bytes"], size, 1_000));
        model.commit(engine, 2, &rows(&["bytes"], size, 1_000));
        assert!(engine.local_delete("bytes").expect("deleted"));
        model.0.remove("bytes");
        engine.checkpoint().expect("checkpoint");
        let left = packs(&directory);
        assert_eq!(left.len(), 1, "the second stage has gone with its stream");
        model.check(engine);
        assert!(engine.local_delete("json").expect("deleted"));
        engine.checkpoint().expect("checkpoint");
        assert!(packs(&directory).is_empty());
    });
    with_engine(&directory, |engine| {
        assert!(engine.local_tail("json").expect("answer").is_none());
    });
}

#[test]
fn large_sections_leave_a_mostly_dead_pack() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        let paths: Vec<String> = (0..5).map(|number| format!("s{number}")).collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        for path in &paths {
            model.create(engine, path, "application/octet-stream", Class::Fsync);
        }
        let size = ADOPT_MIN_BYTES as usize / 10_000 + 10;
        model.commit(engine, 1, &rows(&paths, size, 10_000));
        engine.checkpoint().expect("placed");
        let before = packs(&directory);
        assert_eq!(before.len(), 1);
        for path in &paths[1..] {
            assert!(engine.local_delete(path).expect("deleted"));
            model.0.remove(*path);
        }
        engine.checkpoint().expect("the catalog forgets them");
        engine.checkpoint().expect("the rest moves out");
        engine.checkpoint().expect("the pack goes");
        assert!(packs(&directory).is_empty());
        model.check(engine);
    });
    with_engine(&directory, |engine| model.check(engine));
}

#[test]
fn damage_in_adopted_bytes_is_a_gap_before_and_behind_the_checkpoint() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        model.commit(engine, 1, &rows(&["bytes"], 1_000, 10_000));
        let [file] = &packs(&directory)[..] else {
            panic!("one pack");
        };
        let damaged = std::fs::OpenOptions::new().write(true).open(file);
        damaged
            .expect("opens")
            .write_all_at(b"damage", 5_000_000)
            .expect("writes");
    });
    for _ in 0..2 {
        with_engine(&directory, |engine| {
            let whole = &model.0["bytes"];
            let (mut position, mut gaps, mut offset) = (0, 0, "-1".to_owned());
            loop {
                let read = engine.local_read("bytes", &offset, 100_000).expect("read");
                if let Some(gap) = &read.gap {
                    assert_eq!(gap.reason, GapReason::Corruption);
                    gaps += 1;
                    position += 10_000;
                }
                assert!(whole[position..].starts_with(&read.body), "at {position}");
                position += read.body.len();
                offset = read.next.to_string();
                if read.up_to_date {
                    break;
                }
            }
            assert_eq!((position, gaps), (whole.len(), 1));
            engine.checkpoint().expect("checkpoint");
        });
    }
}

#[test]
fn a_missing_adopted_file_stops_the_start_as_a_damaged_log_does() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        model.commit(engine, 1, &rows(&["bytes"], 1_000, 1_000));
    });
    for file in packs(&directory) {
        std::fs::remove_file(file).expect("removed");
    }
    let doors = Doors::real(directory.path()).expect("doors");
    let error = Engine::open(config(), doors, &mut |_| {}).err();
    let error = error.expect("does not open");
    assert_eq!(error.code, "log_damaged");
    assert!(error.detail.contains(".pack"), "{}", error.detail);
}

#[test]
fn the_budget_is_kept_and_expiry_gives_it_back() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        let big = rows(&["bytes"], 3_000, 10_000);
        stage(engine, "a", &big);
        stage(engine, "b", &big);
        let borrowed: Vec<(&str, &[u8])> = big
            .iter()
            .map(|(path, value)| (*path, &value[..]))
            .collect();
        let refused = engine.local_stage("c", &borrowed).err().expect("refused");
        assert_eq!(refused.code, ErrorCode::StageFull);
        assert_eq!(engine.stages.waiting().0, 2);
        engine.sweep_stages(engine.now_ms() + 3_000_000);
        assert_eq!(packs(&directory).len(), 2);
        engine.sweep_stages(engine.now_ms() + 3_601_000);
        assert!(packs(&directory).is_empty());
        assert_eq!(engine.stages.waiting(), (0, 0));
        assert_eq!(engine.metrics.stages_expired.get(), 2);
        stage(engine, "c", &big);
        engine.checkpoint().expect("checkpoint");
        assert_eq!(packs(&directory).len(), 1, "a waiting stage is not garbage");
    });
}

#[test]
fn a_stop_ends_stages_and_commits_and_leaves_nothing_of_them() {
    let directory = TestDirectory::new();
    let mut model = Model::default();
    with_engine(&directory, |engine| {
        create_all(engine, &mut model);
        // Few bytes are copied, many are read in place.
        let small = stage(engine, "small", &rows(&["bytes"], 10, 10));
        let large = stage(engine, "large", &rows(&["bytes"], 1_000, 1_000));
        let before = packs(&directory).len();
        let shuts_down = |code: ErrorCode| assert_eq!(code, ErrorCode::ShuttingDown);
        let mut builder = StageBuilder::new(engine, 2, 2).ok().expect("room");
        let target = builder.target("bytes").ok().expect("there");
        builder.push(target, b"x").ok().expect("taken");
        engine.stopping.store(true, Ordering::Release);
        match builder.push(target, b"y") {
            Err(Undone::Refused { refusal, .. }) => shuts_down(refusal.code),
            _ => panic!("a row was taken"),
        }
        match builder.finish("late", 0, 1) {
            Err(Undone::Refused { refusal, .. }) => shuts_down(refusal.code),
            _ => panic!("a stage was written"),
        }
        for staged in [&small, &large] {
            let refused = commit(engine, "spark:1", 1, &[staged]).err();
            shuts_down(refused.expect("refused").code);
        }
        assert_eq!(packs(&directory).len(), before);
        model.check(engine);
    });
    with_engine(&directory, |engine| {
        assert_eq!(
            engine.stages.waiting().0,
            2,
            "what was staged waits for the next start"
        );
        model.check(engine);
    });
}
