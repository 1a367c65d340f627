//! Verification on real directories: whole ones are clean, every flipped byte that a start or a reader would
//! stumble over is found, and the judgement on the log is recovery's.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::*;
use crate::config::Config;
use crate::io::tests::TestDirectory;

pub(super) fn open(root: &Path) -> Result<Arc<Engine>, EngineError> {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(root).expect("doors");
    Engine::open(config, doors, &mut |_| {}).map(|opened| opened.engine)
}

/// Runs `work` with an engine that commits, and ends it as a crash does.
pub(super) fn with_engine<T>(root: &Path, work: impl FnOnce(&Engine) -> T) -> T {
    let engine = open(root).expect("opens");
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let result = work(&engine);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
    result
}

pub(super) fn check(root: &Path) -> Report {
    verify_directory(root, &mut |_, _| true).expect("verification runs")
}

pub(super) fn append(engine: &Engine, path: &str, data: &[u8]) {
    engine
        .local_create(path, "text/plain", None)
        .expect("created");
    engine.local_append(path, data).expect("appended");
}

/// Small streams in a pack, one in a segment, and appends that only the log has.
pub(super) fn fill(engine: &Engine) {
    for number in 0..20 {
        append(
            engine,
            &format!("small/{number}"),
            format!("record {number};").as_bytes(),
        );
    }
    for number in 0..4u8 {
        append(engine, "big", &vec![number; 40_000]);
    }
    engine.checkpoint().expect("checkpoint");
    for number in 0..20 {
        append(engine, &format!("small/{number}"), b"only in the log;");
    }
    append(engine, "new", b"created behind the checkpoint");
}

pub(super) fn files_below(root: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).expect("listed") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            found.extend(files_below(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

pub(super) fn flip(path: &Path, byte: usize) {
    let mut content = fs::read(path).expect("read");
    content[byte] ^= 0x10;
    fs::write(path, content).expect("written");
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("directory");
    for entry in fs::read_dir(from).expect("listed") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("copied");
        }
    }
}

fn errors(report: &Report) -> Vec<&Finding> {
    let all = report.findings.iter();
    all.filter(|finding| finding.severity == Severity::Error)
        .collect()
}

#[test]
fn a_whole_directory_is_clean_and_stays_as_it_is() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), fill);
    let before: Vec<Vec<u8>> = ["redb", "wal", "seg", "idx", "pack"]
        .iter()
        .flat_map(|extension| files_below(directory.path(), extension))
        .map(|path| fs::read(path).expect("read"))
        .collect();
    let mut told = Vec::new();
    let report = verify_directory(directory.path(), &mut |done, total| {
        told.push((done, total));
        true
    })
    .expect("verification runs");
    assert_eq!(errors(&report), Vec::<&Finding>::new());
    assert_eq!((report.streams, report.packs), (21, 1));
    assert_eq!(report.appends, 24);
    assert!(report.frames >= 66, "{report:?}");
    assert!(
        told.len() >= 2
            && told
                .last()
                .is_some_and(|(done, total)| done == total && *total > 0)
    );
    let after: Vec<Vec<u8>> = ["redb", "wal", "seg", "idx", "pack"]
        .iter()
        .flat_map(|extension| files_below(directory.path(), extension))
        .map(|path| fs::read(path).expect("read"))
        .collect();
    assert!(before == after, "verification changed a file");
}

#[test]
fn a_listener_can_end_the_walk_and_a_lock_keeps_others_out() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), fill);
    assert!(verify_directory(directory.path(), &mut |_, _| false).is_err());
    let _held = DirectoryLock::acquire(directory.path()).expect("locked");
    let refused = verify_directory(directory.path(), &mut |_, _| true).expect_err("is in use");
    assert_eq!(refused.code, "directory_locked");
    let missing = verify_directory(&directory.path().join("nowhere"), &mut |_, _| true);
    assert!(missing.is_err() && !directory.path().join("nowhere").exists());
}

#[test]
fn a_running_engine_verifies_clean_while_it_is_written_to() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), |engine| {
        fill(engine);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 0..300 {
                    append(engine, &format!("live/{}", number % 30), &[b'x'; 2000]);
                    if number % 40 == 0 {
                        engine.checkpoint().expect("checkpoint");
                    }
                }
            });
            let mut rounds = 0;
            while !writer.is_finished() || rounds == 0 {
                let report = verify_running(engine, &mut |_, _| true).expect("verification runs");
                assert_eq!(errors(&report), Vec::<&Finding>::new());
                rounds += 1;
            }
        });
        let report = verify_running(engine, &mut |_, _| true).expect("verification runs");
        assert_eq!(errors(&report), Vec::<&Finding>::new());
        assert_eq!(report.streams, 22 + 30);
    });
}

#[test]
fn a_running_engine_finds_what_is_damaged_under_it() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), |engine| {
        fill(engine);
        let segment = &files_below(directory.path(), "seg")[0];
        let file = fs::OpenOptions::new()
            .write(true)
            .open(segment)
            .expect("open");
        std::os::unix::fs::FileExt::write_all_at(&file, b"!", 50_000).expect("damaged");
        let report = verify_running(engine, &mut |_, _| true).expect("verification runs");
        let found = errors(&report);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].stream.as_deref(), Some("big"));
        assert_eq!(found[0].byte, Some(40_000));
    });
}

/// Whatever byte of the log is flipped, verification calls it an error exactly if a start refuses.
#[test]
fn the_judgement_on_the_log_is_the_one_of_a_start() {
    let directory = TestDirectory::new();
    let origin = directory.path().join("origin");
    with_engine(&origin, fill);
    with_engine(&origin, |engine| {
        append(engine, "second/run", b"of the server")
    });
    let logs = files_below(&origin, "wal");
    assert!(logs.len() >= 2);
    let mut refused = 0;
    for (number, log) in logs.iter().enumerate() {
        let content = fs::read(log).expect("read");
        let used = content.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
        for byte in (0..used).step_by((used / 11).max(1)) {
            let copy = directory.path().join(format!("copy-{number}-{byte}"));
            copy_tree(&origin, &copy);
            flip(&copy.join("wal").join(log.file_name().expect("name")), byte);
            let report = check(&copy);
            let opened = open(&copy);
            assert_eq!(
                opened.is_err(),
                !report.is_clean(),
                "{} byte {byte}: start {:?}, found {:?}",
                log.display(),
                opened.err(),
                report.findings
            );
            refused += usize::from(!report.is_clean());
            fs::remove_dir_all(&copy).expect("removed");
        }
    }
    assert!(refused > 5, "only {refused} flips were damage");
}

#[test]
fn every_flipped_byte_of_segments_and_packs_is_found() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), fill);
    assert!(check(directory.path()).is_clean());
    for extension in ["seg", "idx", "pack"] {
        let path = &files_below(directory.path(), extension)[0];
        let len = fs::metadata(path).expect("there").len() as usize;
        let mut unseen = 0;
        for byte in (0..len).step_by((len / 50).max(1)) {
            flip(path, byte);
            let report = check(directory.path());
            unseen += usize::from(report.is_clean());
            flip(path, byte);
        }
        // Padding between bytes and index means nothing to anybody.
        let harmless = if extension == "pack" { 5 } else { 0 };
        assert!(
            unseen <= harmless,
            "{extension}: {unseen} flips went unseen"
        );
    }
    assert!(check(directory.path()).is_clean());
}

#[test]
fn missing_short_and_foreign_files() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), fill);
    fs::write(directory.path().join("wal/readme.txt"), "foreign").expect("written");
    fs::write(directory.path().join("packs/ffffffff.pack"), "orphan").expect("written");
    let report = check(directory.path());
    assert!(
        report.is_clean() && report.notes == 2,
        "{:?}",
        report.findings
    );
    for extension in ["seg", "idx", "pack"] {
        let path = &files_below(directory.path(), extension)[0];
        let content = fs::read(path).expect("read");
        fs::remove_file(path).expect("removed");
        assert!(!check(directory.path()).is_clean(), "a missing {extension}");
        fs::write(path, &content[..content.len() - 8]).expect("written");
        assert!(!check(directory.path()).is_clean(), "a short {extension}");
        fs::write(path, &content).expect("written");
    }
    assert!(check(directory.path()).is_clean());
    fs::remove_file(directory.path().join("catalog.redb")).expect("removed");
    let report = check(directory.path());
    assert!(!report.is_clean() && report.beyond_repair);
}
