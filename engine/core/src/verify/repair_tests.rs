//! Repair on real directories: what checks is kept, what does not is named and marked, and the next look is clean.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::*;
use crate::config::Config;
use crate::io::tests::{CrashDisk, TestDirectory};
use crate::io::{OpenMode, write_all_at};
use crate::shard::engine::Engine;
use crate::verify::tests::{append, check, files_below, fill, flip, open, with_engine};
use crate::verify::{Outcome, repair_directory, repair_stopped};

/// What a stream has, and which ranges of it are marked.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Content {
    bytes: Vec<u8>,
    damaged: Vec<(u64, u64)>,
    fork_count: u32,
}

fn contents(engine: &Engine) -> BTreeMap<String, Content> {
    let listed = engine
        .list("", "", 1000)
        .unwrap_or_else(|_| panic!("listed"));
    let paths = listed.streams.into_iter().map(|info| info.path.to_string());
    paths
        .map(|path| {
            let Ok(Some(stream)) = engine.directory.get(&path) else {
                panic!("{path} is listed and not there");
            };
            let (tail, damaged, fork_count) = {
                let state = stream.lock();
                let damaged = state.damaged.as_deref().cloned().unwrap_or_default();
                (state.tail, damaged, state.fork_count)
            };
            let mut bytes = vec![0; tail as usize];
            let mut position = 0;
            for (start, end) in damaged.iter().chain([&(tail, tail)]) {
                if position < *start {
                    let read = engine.read_range(&stream, position, *start).expect("read");
                    bytes[position as usize..*start as usize].copy_from_slice(&read);
                }
                position = *end;
            }
            let content = Content {
                bytes,
                damaged,
                fork_count,
            };
            (path, content)
        })
        .collect()
}

fn repair_it(root: &Path) -> (Outcome, Repaired) {
    let outcome = repair_directory(root, &mut |_, _| true).expect("repair runs");
    let after = outcome.after.as_ref().expect("a second look");
    assert!(after.is_clean(), "{:?}", after.findings);
    let repaired = outcome.repaired.clone().expect("repaired");
    assert!(root.join(&repaired.kept_in).join("catalog.redb").exists());
    (outcome, repaired)
}

/// Every stream as before, but for zeros in ranges that are marked.
fn same_but_for_marks(before: &BTreeMap<String, Content>, after: &BTreeMap<String, Content>) {
    for (path, was) in before {
        let is = after.get(path).unwrap_or_else(|| panic!("{path} is gone"));
        let mut expected = was.bytes.clone();
        for (start, end) in &is.damaged {
            expected[*start as usize..*end as usize].fill(0);
        }
        assert!(is.bytes == expected, "{path}: {:?}", is.damaged);
    }
}

fn filled(root: &Path) -> BTreeMap<String, Content> {
    with_engine(root, fill);
    with_engine(root, contents)
}

#[test]
fn a_clean_directory_is_not_repaired() {
    let directory = TestDirectory::new();
    filled(directory.path());
    let outcome = repair_directory(directory.path(), &mut |_, _| true).expect("runs");
    assert!(outcome.before.is_clean() && outcome.repaired.is_none() && outcome.after.is_none());
    assert!(
        fs::read_dir(directory.path())
            .expect("listed")
            .all(|entry| {
                !entry
                    .expect("entry")
                    .file_name()
                    .to_string_lossy()
                    .starts_with("repair-")
            })
    );
}

#[test]
fn damaged_bytes_of_a_segment_cost_exactly_their_append() {
    let directory = TestDirectory::new();
    let before = filled(directory.path());
    flip(&files_below(directory.path(), "seg")[0], 50_000);
    let (outcome, repaired) = repair_it(directory.path());
    assert_eq!(outcome.before.errors, 1);
    assert_eq!(repaired.given_up_count, 1);
    assert_eq!(repaired.given_up[0].stream.as_deref(), Some("big"));
    let after = with_engine(directory.path(), contents);
    assert_eq!(after["big"].damaged, [(40_000, 80_000)]);
    same_but_for_marks(&before, &after);
}

#[test]
fn a_damaged_index_entry_costs_the_two_appends_around_it() {
    let directory = TestDirectory::new();
    let before = filled(directory.path());
    // The second of four entries ends far beyond the segment.
    flip(&files_below(directory.path(), "idx")[0], 32 + 5);
    let (_, repaired) = repair_it(directory.path());
    let kept = directory.path().join(&repaired.kept_in);
    assert_eq!(
        files_below(&kept, "idx").len(),
        1,
        "the damaged index is kept aside"
    );
    let after = with_engine(directory.path(), contents);
    assert_eq!(after["big"].damaged, [(40_000, 120_000)]);
    same_but_for_marks(&before, &after);
    with_engine(directory.path(), |engine| {
        append(engine, "big", b"goes on");
        engine.checkpoint().expect("checkpoint");
    });
    assert!(check(directory.path()).is_clean());
}

#[test]
fn missing_and_short_files_cost_what_they_had() {
    for (extension, short) in [
        ("seg", true),
        ("idx", true),
        ("seg", false),
        ("idx", false),
        ("pack", false),
    ] {
        let directory = TestDirectory::new();
        let before = filled(directory.path());
        let path = &files_below(directory.path(), extension)[0];
        let content = fs::read(path).expect("read");
        if short {
            fs::write(path, &content[..content.len() - 10]).expect("cut");
        } else {
            fs::remove_file(path).expect("removed");
        }
        let (_, repaired) = repair_it(directory.path());
        let expected = if extension == "pack" { 20 } else { 1 };
        assert_eq!(
            repaired.given_up_count, expected,
            "{extension}: {repaired:?}"
        );
        let after = with_engine(directory.path(), contents);
        same_but_for_marks(&before, &after);
        if short {
            assert_eq!(after["big"].damaged, [(120_000, 160_000)], "{extension}");
        }
    }
}

#[test]
fn a_damaged_section_or_pack_header_costs_nothing() {
    for byte in [3, 16 + 2] {
        let directory = TestDirectory::new();
        let before = filled(directory.path());
        flip(&files_below(directory.path(), "pack")[0], byte);
        let (_, repaired) = repair_it(directory.path());
        assert_eq!(repaired.given_up_count, 0, "{repaired:?}");
        assert_eq!(with_engine(directory.path(), contents), before);
    }
}

/// Wherever the log is damaged: what is not in the hole is kept, and positions stay what they were.
#[test]
fn a_hole_in_the_log_costs_only_what_was_in_it() {
    let directory = TestDirectory::new();
    let origin = directory.path().join("origin");
    with_engine(&origin, |engine| {
        append(engine, "first", b"checkpointed;");
        engine.checkpoint().expect("checkpoint");
        for number in 0..30 {
            append(
                engine,
                &format!("s/{}", number % 3),
                format!("record {number:02};").as_bytes(),
            );
        }
    });
    let copy = directory.path().join("copy");
    let before = {
        copy_files(&origin, &copy);
        let before = with_engine(&copy, contents);
        fs::remove_dir_all(&copy).expect("removed");
        before
    };
    let log = files_below(&origin, "wal")
        .into_iter()
        .find(|path| {
            fs::read(path)
                .expect("read")
                .windows(9)
                .any(|found| found == b"record 15")
        })
        .expect("the log in use");
    let content = fs::read(&log).expect("read");
    let (mut marked, mut lost_streams) = (0, 0);
    for number in 0..30 {
        let wanted = format!("record {number:02};");
        let at = content
            .windows(10)
            .position(|found| found == wanted.as_bytes())
            .expect("there");
        copy_files(&origin, &copy);
        flip(
            &copy.join("wal").join(log.file_name().expect("name")),
            at + 3,
        );
        if check(&copy).is_clean() {
            assert!(number >= 28, "record {number} was proven to be synced");
        } else {
            assert!(open(&copy).is_err());
            let (_, repaired) = repair_it(&copy);
            assert!(repaired.given_up_count >= 1);
            let after = with_engine(&copy, contents);
            let path = format!("s/{}", number % 3);
            same_but_for_marks(&truncated(&before, &after), &after);
            marked += usize::from(
                after
                    .get(&path)
                    .is_some_and(|content| !content.damaged.is_empty()),
            );
            lost_streams += usize::from(!after.contains_key(&path));
        }
        fs::remove_dir_all(&copy).expect("removed");
    }
    assert!(marked >= 20, "{marked} holes were marked");
    assert_eq!(lost_streams, 0);
}

/// The newest append of a stream has nothing behind it that shows the hole; the stream is shorter then.
fn truncated(
    before: &BTreeMap<String, Content>,
    after: &BTreeMap<String, Content>,
) -> BTreeMap<String, Content> {
    let mut expected = before.clone();
    for (path, content) in &mut expected {
        if let Some(found) = after.get(path) {
            assert!(
                found.bytes.len() + 10 >= content.bytes.len(),
                "{path} lost more than one append"
            );
            content.bytes.truncate(found.bytes.len());
        }
    }
    expected
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("directory");
    for entry in fs::read_dir(from).expect("listed") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_files(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("copied");
        }
    }
}

#[test]
fn lost_frames_begin_a_new_epoch_everywhere() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), |engine| {
        for number in 0..10 {
            append(engine, "s", format!("record {number:02};").as_bytes());
        }
    });
    let tail_before = with_engine(directory.path(), |engine| {
        engine.local_tail("s").expect("tail")
    });
    let log = files_below(directory.path(), "wal")
        .into_iter()
        .find(|path| {
            fs::read(path)
                .expect("read")
                .windows(9)
                .any(|found| found == b"record 05")
        })
        .expect("the log in use");
    let content = fs::read(&log).expect("read");
    let at = content
        .windows(9)
        .position(|found| found == b"record 05")
        .expect("there");
    flip(&log, at);
    repair_it(directory.path());
    let tail_after = with_engine(directory.path(), |engine| {
        engine.local_tail("s").expect("tail")
    });
    let (before, after) = (tail_before.expect("there"), tail_after.expect("there"));
    assert_eq!(before.position, after.position);
    assert!(after.epoch > before.epoch, "{before} {after}");
}

#[test]
fn an_entry_that_does_not_decode_is_given_up_and_kept_aside() {
    let directory = TestDirectory::new();
    let before = filled(directory.path());
    with_engine(directory.path(), |engine| {
        let catalog = engine.directory.catalog();
        let mut value = catalog.get(b"big").expect("read").expect("there");
        value[20] ^= 1;
        let Ok(Some(stream)) = engine.directory.get("big") else {
            panic!("big is there");
        };
        let change = crate::log::catalog::Change::Put {
            path: b"big".to_vec(),
            id: stream.id,
            value,
        };
        catalog.commit(&[change], &[], &[]).expect("damaged");
    });
    let (outcome, repaired) = repair_it(directory.path());
    assert!(
        outcome
            .before
            .findings
            .iter()
            .any(|finding| finding.stream.as_deref() == Some("big"))
    );
    assert!(
        repaired
            .given_up
            .iter()
            .any(|given| given.stream.as_deref() == Some("big"))
    );
    let kept = directory.path().join(&repaired.kept_in);
    assert_eq!(
        files_below(&kept, "seg").len(),
        1,
        "its bytes are kept aside"
    );
    let after = with_engine(directory.path(), contents);
    let mut expected = before;
    expected.remove("big");
    assert_eq!(after, expected);
}

#[test]
fn counts_are_counted_again() {
    let directory = TestDirectory::new();
    let before = filled(directory.path());
    with_engine(directory.path(), |engine| {
        let catalog = engine.directory.catalog();
        let packs = catalog.packs().expect("packs");
        catalog
            .commit(&[], &[], &[(packs[0].0, 64)])
            .expect("miscounted");
        for (path, content) in [("big", 7), ("small/3", 1)] {
            let Ok(Some(stream)) = engine.directory.get(path) else {
                panic!("{path} is there");
            };
            let mut state = stream.lock();
            state.recount_forks(content);
            engine.directory.mark_dirty(&stream, &mut state.dirty);
        }
        engine.checkpoint().expect("checkpoint");
    });
    let (outcome, repaired) = repair_it(directory.path());
    assert_eq!(outcome.before.errors, 3, "{:?}", outcome.before.findings);
    assert_eq!(repaired.given_up_count, 0);
    assert_eq!(with_engine(directory.path(), contents), before);
}

#[test]
fn a_catalog_that_cannot_be_opened_is_left_alone() {
    let directory = TestDirectory::new();
    filled(directory.path());
    let path = directory.path().join("catalog.redb");
    let mut content = fs::read(&path).expect("read");
    content[..4096].fill(0xee);
    fs::write(&path, &content).expect("written");
    let outcome = repair_directory(directory.path(), &mut |_, _| true).expect("runs");
    assert!(outcome.before.beyond_repair && outcome.repaired.is_none());
    assert!(
        outcome
            .before
            .findings
            .iter()
            .any(|finding| finding.what.contains("restore"))
    );
    assert!(fs::read(&path).expect("still there") == content);
}

/// A disk in memory with the files of a directory, all of it synced.
fn in_memory(files: &[(String, Vec<u8>)]) -> Arc<CrashDisk> {
    let disk = CrashDisk::new();
    let mut directories = vec![String::new()];
    for (path, content) in files {
        if let Some((parent, _)) = path.rsplit_once('/') {
            disk.create_dir_all(parent).expect("directory");
            let upper = parent.rsplit_once('/').map(|(upper, _)| upper.to_owned());
            directories.extend(upper.into_iter().chain([parent.to_owned()]));
        }
        let file = disk.open(path, OpenMode::CreateNew).expect("new");
        write_all_at(&*file, content, 0).expect("written");
        file.sync_all().expect("synced");
    }
    for directory in &directories {
        disk.sync_dir(directory).expect("synced");
    }
    disk
}

fn doors_on(disk: &Arc<CrashDisk>) -> Doors {
    Doors {
        disk: Arc::clone(disk) as Arc<dyn Disk>,
        ..Doors::real(std::env::temp_dir()).expect("doors")
    }
}

fn contents_on(disk: &Arc<CrashDisk>) -> BTreeMap<String, Content> {
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let opened = Engine::open(config, doors_on(disk), &mut |_| {}).expect("opens");
    contents(&opened.engine)
}

/// Wherever a repair dies, with the power too: the next one comes to the same.
#[test]
fn a_repair_that_dies_can_be_run_again() {
    let directory = TestDirectory::new();
    let root = directory.path();
    filled(root);
    flip(&files_below(root, "seg")[0], 50_000);
    flip(&files_below(root, "idx")[0], 70);
    flip(&files_below(root, "pack")[0], 18);
    let log = files_below(root, "wal")
        .into_iter()
        .find(|path| {
            fs::read(path)
                .expect("read")
                .windows(8)
                .any(|found| found == b"only in ")
        })
        .expect("the log in use");
    let content = fs::read(&log).expect("read");
    let at = content
        .windows(8)
        .position(|found| found == b"only in ")
        .expect("there");
    flip(&log, at);
    let files: Vec<(String, Vec<u8>)> = ["redb", "wal", "seg", "idx", "pack"]
        .iter()
        .flat_map(|extension| files_below(root, extension))
        .chain([root.join("format")])
        .map(|path| {
            let name = path
                .strip_prefix(root)
                .expect("inside")
                .to_string_lossy()
                .into_owned();
            (name, fs::read(path).expect("read"))
        })
        .collect();

    let whole = in_memory(&files);
    let before = whole.operations();
    let outcome = repair_stopped(&doors_on(&whole), &mut |_, _| true).expect("repair runs");
    assert!(outcome.after.is_some_and(|after| after.is_clean()));
    let operations = whole.operations() - before;
    let expected = contents_on(&whole);
    assert!(
        expected["big"].damaged == [(40_000, 160_000)],
        "{:?}",
        expected["big"].damaged
    );

    let step = (operations / 8).max(1) as usize;
    let last = operations.saturating_sub(5);
    for operation in (1..last).step_by(step).chain(last..=operations) {
        let disk = in_memory(&files);
        disk.fail_from(before + operation);
        let died = repair_stopped(&doors_on(&disk), &mut |_, _| true);
        assert!(
            died.is_err(),
            "operation {operation} of {operations} failed unnoticed"
        );
        disk.power_cut(operation);
        disk.fail_from(0);
        let again = repair_stopped(&doors_on(&disk), &mut |_, _| true);
        let again = again.unwrap_or_else(|error| panic!("after {operation}: {error}"));
        let clean = again.after.as_ref().unwrap_or(&again.before);
        assert!(clean.is_clean(), "after {operation}: {:?}", clean.findings);
        assert!(contents_on(&disk) == expected, "after {operation}");
    }
}
