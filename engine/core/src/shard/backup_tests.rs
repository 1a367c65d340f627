//! Backups of an engine that goes on writing, restored and read; pins that keep files and let them go.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::{BackupError, BackupOptions, BackupProgress, BackupSummary, TELL_EVERY_US};
use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::log::format::{FORMAT, FORMAT_FILE};
use crate::model::Class;
use crate::serve::server::Server;
use crate::shard::backup::manifest::{MANIFEST_FILE, MARK_FILE};
use crate::shard::engine::Engine;

/// Checkpoints all the time if there is a thread that makes them, else only when asked for.
fn config(maintained: bool) -> Config {
    Config {
        listen: false,
        reactors: 1,
        wal_file_bytes: 0,
        append_max_bytes: 64 << 10,
        checkpoint_bytes: if maintained { 256 << 10 } else { 64 << 20 },
        ..Config::default()
    }
}

/// Runs `work` beside the commit thread and, if wanted, maintenance; ends with the clean mark.
fn with_engine<T>(directory: &Path, maintained: bool, work: impl FnOnce(&Engine) -> T) -> T {
    let doors = Doors::real(directory).expect("doors");
    let engine = Engine::open(config(maintained), doors, &mut |_| {})
        .expect("opens")
        .engine;
    let (committing, maintaining) = (Arc::clone(&engine), Arc::clone(&engine));
    let memory = engine.memory_without_clients();
    let commit = std::thread::spawn(move || committing.shard.run_commit_thread());
    let maintenance =
        maintained.then(|| std::thread::spawn(move || maintaining.run_maintenance(memory)));
    let result = work(&engine);
    engine.maintenance.stop();
    if let Some(thread) = maintenance {
        thread.join().expect("maintenance thread");
    }
    assert!(engine.write_clean_mark(std::time::Duration::from_secs(10)));
    engine.shard.stop_threads();
    commit.join().expect("commit thread");
    result
}

fn names(directory: &Path, below: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![directory.join(below)];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(next).expect("lists").map(Result::unwrap) {
            if entry.path().is_dir() {
                open.push(entry.path());
            } else {
                found.insert(entry.path().display().to_string());
            }
        }
    }
    found
}

fn create(engine: &Engine, path: &str) {
    let made = engine.local_create(path, "text/plain", None);
    assert!(made.expect("created"), "{path}");
}

fn append(engine: &Engine, path: &str, bytes: &[u8]) {
    engine.local_append(path, bytes).expect("appended");
}

fn content(engine: &Engine, path: &str) -> Vec<u8> {
    let (mut body, mut offset) = (Vec::new(), "-1".to_owned());
    loop {
        let read = engine.local_read(path, &offset, 1 << 20).expect("read");
        body.extend_from_slice(&read.body);
        offset = read.next.to_string();
        if read.up_to_date {
            return body;
        }
    }
}

/// What a restore leaves, without its checks: those are Python's.
pub(crate) fn restore(kept: &Path, to: &Path) {
    for file in names(kept, "") {
        let below = Path::new(&file).strip_prefix(kept).expect("below");
        if below != Path::new(MANIFEST_FILE) && below != Path::new(MARK_FILE) {
            let target = to.join(below);
            std::fs::create_dir_all(target.parent().expect("parent")).expect("made");
            std::fs::copy(&file, target).expect("copied");
        }
    }
    std::fs::write(to.join(FORMAT_FILE), FORMAT).expect("marked");
    let config = Config {
        data_dir: to.display().to_string(),
        listen: false,
        restored: true,
        ..Config::default()
    };
    let server = Server::open(config, &mut |_| {}).expect("opens");
    assert!(server.stop(Duration::from_secs(60)), "stops");
}

fn backup(engine: &Engine, to: &Path) -> Result<BackupSummary, BackupError> {
    engine.backup_to(to, &BackupOptions::default(), &mut |_| true)
}

#[test]
fn a_pin_keeps_files_until_the_last_one_is_gone() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), false, |engine| {
        engine.prepare_spares();
        create(engine, "big");
        append(engine, "big", &[b'x'; 40_000]);
        create(engine, "small");
        append(engine, "small", b"little");
        engine.checkpoint().expect("first");
        let files = ["segments", "packs"].map(|below| names(directory.path(), below));
        assert!(files.iter().all(|found| !found.is_empty()), "{files:?}");
        let pins = [engine.cold.pins.files.hold(), engine.cold.pins.files.hold()];
        for path in ["big", "small"] {
            assert!(engine.local_delete(path).expect("deleted"));
        }
        engine.checkpoint().expect("second");
        let [first, second] = pins;
        for pin in [first, second] {
            engine.free_unpinned();
            let now = ["segments", "packs"].map(|below| names(directory.path(), below));
            assert_eq!(now, files, "pinned");
            drop(pin);
        }
        engine.free_unpinned();
        let now = ["segments", "packs"].map(|below| names(directory.path(), below));
        assert_eq!(now, [BTreeSet::new(), BTreeSet::new()], "let go");
    });
}

#[test]
fn a_pin_keeps_log_files_under_their_names_until_it_is_gone() {
    let directory = TestDirectory::new();
    with_engine(directory.path(), false, |engine| {
        create(engine, "s");
        // More than the first file holds, so that one is left behind.
        let fill = || {
            for _ in 0..200 {
                engine.prepare_spares();
                append(engine, "s", &[b'x'; 60_000]);
            }
        };
        fill();
        let before = names(directory.path(), "wal");
        let pins = [engine.cold.pins.log.hold(), engine.cold.pins.log.hold()];
        engine.checkpoint().expect("checkpoint");
        fill();
        engine.checkpoint().expect("checkpoint");
        for pin in pins {
            engine.free_unpinned();
            let now = names(directory.path(), "wal");
            assert!(now.is_superset(&before) && now != before, "pinned: {now:?}");
            drop(pin);
        }
        let pinned = names(directory.path(), "wal").len();
        engine.free_unpinned();
        let now = names(directory.path(), "wal");
        assert!(now.is_disjoint(&before), "let go: {now:?}, were {before:?}");
        assert!(now.len() < pinned);
        assert!(engine.shard.retained.lock().is_empty());
    });
}

#[test]
fn a_backup_under_load_restores_to_a_prefix_with_everything_acknowledged_before() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let (kept, to) = (place.path().join("backup"), place.path().join("restored"));
    let paths: Vec<String> = (0..6).map(|number| format!("s/{number}")).collect();
    let written = with_engine(directory.path(), true, |engine| {
        for path in &paths {
            create(engine, path);
        }
        create(engine, "gone");
        append(engine, "gone", &[b'g'; 40_000]);
        let (done, counts) = (
            AtomicBool::new(false),
            paths.iter().map(|_| AtomicU64::new(0)),
        );
        let counts: Vec<AtomicU64> = counts.collect();
        let acknowledged = std::thread::scope(|scope| {
            for (number, path) in paths.iter().enumerate() {
                let (done, count) = (&done, &counts[number]);
                // Half of them grow into segments, half stay in packs.
                let size = if number % 2 == 0 { 3000 } else { 30 };
                scope.spawn(move || {
                    let mut next = 0u64;
                    while !done.load(Ordering::Acquire) || next < 50 {
                        let text = format!("{next:0size$}\n");
                        append(engine, path, text.as_bytes());
                        next += 1;
                        count.store(next, Ordering::Release);
                    }
                });
            }
            while counts
                .iter()
                .any(|count| count.load(Ordering::Acquire) < 20)
            {
                std::thread::yield_now();
            }
            assert!(engine.local_delete("gone").expect("deleted"));
            let before: Vec<u64> = counts
                .iter()
                .map(|count| count.load(Ordering::Acquire))
                .collect();
            let summary = backup(engine, &kept);
            done.store(true, Ordering::Release);
            let summary = summary.expect("backup");
            assert_eq!(summary.streams, 6, "{summary:?}");
            before
        });
        let contents: Vec<Vec<u8>> = paths.iter().map(|path| content(engine, path)).collect();
        acknowledged.into_iter().zip(contents).collect::<Vec<_>>()
    });
    restore(&kept, &to);
    with_engine(&to, false, |engine| {
        assert_eq!(engine.local_tail("gone").expect("asked"), None);
        for (path, (before, original)) in paths.iter().zip(written) {
            let found = content(engine, path);
            assert!(original.starts_with(&found), "{path} is not a prefix");
            let records = found.iter().filter(|byte| **byte == b'\n').count() as u64;
            assert!(records >= before, "{path}: {records} of {before}");
        }
    });
}

#[test]
fn a_backup_holds_exactly_what_was_synced_when_the_catalog_was_copied() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let (kept, to) = (place.path().join("backup"), place.path().join("restored"));
    let tail = with_engine(directory.path(), true, |engine| {
        for path in ["old", "deleted"] {
            create(engine, path);
            append(engine, path, b"before.");
        }
        let mut seen = String::new();
        let options = BackupOptions::default();
        let made = engine.backup_to(&kept, &options, &mut |progress| {
            if seen != progress.phase {
                seen = progress.phase.to_owned();
                match progress.phase {
                    // Behind the checkpoint, before the catalog is read: only the log has these.
                    "catalog" => {
                        append(engine, "old", b"in the log.");
                        create(engine, "new");
                        append(engine, "new", b"as well");
                        assert!(engine.local_delete("deleted").expect("deleted"));
                    }
                    // Behind the commit number: not in the backup, whatever the files hold.
                    "log" | "packs" | "segments" => append(engine, "old", b"too late."),
                    _ => {}
                }
            }
            true
        });
        let made = made.expect("backup");
        assert!(made.commit_number >= made.checkpoint + 4, "{made:?}");
        engine.local_tail("old").expect("asked").expect("there")
    });
    restore(&kept, &to);
    with_engine(&to, false, |engine| {
        assert_eq!(content(engine, "old"), b"before.in the log.");
        assert_eq!(content(engine, "new"), b"as well");
        let now = engine.local_tail("old").expect("asked").expect("there");
        assert!(
            now.epoch > tail.epoch && now.position < tail.position,
            "a new epoch"
        );
        assert_eq!(engine.local_tail("deleted").expect("asked"), None);
    });
}

#[test]
fn a_stream_that_crosses_into_or_out_of_memory_while_the_catalog_is_copied_is_whole_in_the_backup()
{
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let (kept, to) = (place.path().join("backup"), place.path().join("restored"));
    with_engine(directory.path(), true, |engine| {
        for (path, class) in [("leaves", Class::Ephemeral), ("enters", Class::Fsync)] {
            let made = engine.local_create(path, "text/plain", Some(class));
            assert!(made.expect("created"));
            append(engine, path, b"before.");
        }
        let mut told = 0;
        let made = engine.backup_to(&kept, &BackupOptions::default(), &mut |progress| {
            told += u32::from(progress.phase == "catalog");
            match (progress.phase, told) {
                // Long enough for the next word to come from the middle of the copy.
                ("catalog", 1) => {
                    append(engine, "enters", b"more.");
                    std::thread::sleep(Duration::from_micros(2 * TELL_EVERY_US));
                }
                ("catalog", 2) => {
                    for (path, class) in [("leaves", Class::Fsync), ("enters", Class::Ephemeral)] {
                        engine.local_set_class(path, class).expect("another class");
                        append(engine, path, b"too late.");
                    }
                }
                _ => {}
            }
            true
        });
        made.expect("backup");
        assert!(told >= 2, "something happened in the middle");
    });
    restore(&kept, &to);
    with_engine(&to, false, |engine| {
        assert_eq!(content(engine, "enters"), b"before.more.");
        assert_eq!(content(engine, "leaves"), b"", "it was in memory alone");
    });
}

fn filled(directory: &TestDirectory, work: impl FnOnce(&Engine)) {
    with_engine(directory.path(), true, |engine| {
        create(engine, "big");
        (0..20).for_each(|_| append(engine, "big", &[b'b'; 50_000]));
        create(engine, "small");
        append(engine, "small", b"little");
        work(engine);
    });
}

#[test]
fn a_cancelled_backup_leaves_nothing_and_holds_nothing() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let to = place.path().join("backup");
    for phase in [
        "checkpoint",
        "catalog",
        "log",
        "packs",
        "segments",
        "finishing",
    ] {
        filled_once(&directory, phase);
        with_engine(directory.path(), true, |engine| {
            let mut seen = false;
            let options = BackupOptions::default();
            let result = engine.backup_to(&to, &options, &mut |progress: BackupProgress| {
                seen |= progress.phase == phase;
                progress.phase != phase
            });
            assert_eq!(result.expect_err("cancelled").code, "backup_cancelled");
            assert!(seen, "{phase} was never told");
            assert!(!to.exists(), "{phase}");
            assert!(!engine.cold.pins.files.held() && !engine.cold.pins.log.held());
        });
    }
}

fn filled_once(directory: &TestDirectory, phase: &str) {
    if phase == "checkpoint" {
        filled(directory, |_| {});
    }
}

#[test]
fn a_destination_that_exists_is_not_touched() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let inside = place.path().join("mine");
    std::fs::write(&inside, "kept").expect("written");
    filled(&directory, |engine| {
        assert!(backup(engine, place.path()).is_err());
    });
    assert_eq!(std::fs::read(&inside).expect("still there"), b"kept");
}

/// How a file is damaged; an empty result removes it.
type Hurt = fn(Vec<u8>) -> Vec<u8>;

fn flip(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    bytes[at] ^= 1;
    bytes
}

fn flip_middle(bytes: Vec<u8>) -> Vec<u8> {
    let middle = bytes.len() / 2;
    flip(bytes, middle)
}

fn halve(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() / 2);
    bytes
}

fn hurt_one(directory: &Path, below: &str, ending: &str, hurt: Hurt) {
    let path = names(directory, below)
        .into_iter()
        .find(|name| name.ends_with(ending))
        .expect("a file");
    let bytes = hurt(std::fs::read(&path).expect("read"));
    if bytes.is_empty() {
        std::fs::remove_file(&path).expect("removed");
    } else {
        std::fs::write(&path, bytes).expect("written");
    }
}

/// A backup of a whole engine succeeds; after the damage it fails, or copies it if that is allowed.
fn refused_and_allowed(below: &str, ending: &str, stream: &str, hurt: Hurt) {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    let (first, second) = (place.path().join("first"), place.path().join("second"));
    filled(&directory, |engine| {
        let whole = backup(engine, &first).expect("whole");
        assert_eq!((whole.damaged, whole.streams), (0, 2));
        hurt_one(directory.path(), below, ending, hurt);
        let refused = backup(engine, &second).expect_err("damaged");
        assert_eq!(refused.code, "backup_damaged", "{refused}");
        assert!(refused.detail.contains(&format!("{stream:?}")), "{refused}");
        assert!(refused.detail.contains(below) && !second.exists());
        let options = BackupOptions {
            allow_damage: true,
            ..BackupOptions::default()
        };
        let made = engine.backup_to(&second, &options, &mut |_| true);
        let made = made.expect("allowed");
        assert!(made.damaged > 0 && !made.damage.is_empty(), "{ending}");
    });
    // The other stream is whole in the copy.
    let to = place.path().join("restored");
    restore(&second, &to);
    with_engine(&to, false, |engine| {
        if stream == "big" {
            assert_eq!(content(engine, "small"), b"little");
        } else {
            assert_eq!(content(engine, "big"), [b'b'; 1_000_000]);
        }
    });
}

#[test]
fn damage_in_segments_fails_the_backup_unless_it_is_allowed() {
    for ending in [".seg", ".idx"] {
        refused_and_allowed("segments", ending, "big", flip_middle);
        refused_and_allowed("segments", ending, "big", halve);
        refused_and_allowed("segments", ending, "big", |_| Vec::new());
    }
}

#[test]
fn damage_in_packs_fails_the_backup_unless_it_is_allowed() {
    // A section begins at byte 16 with a header of 40; the bytes of the stream follow.
    refused_and_allowed("packs", ".pack", "small", |bytes| flip(bytes, 58));
    refused_and_allowed("packs", ".pack", "small", |bytes| flip(flip(bytes, 20), 58));
    refused_and_allowed("packs", ".pack", "small", |bytes| bytes[..58].to_vec());
    refused_and_allowed("packs", ".pack", "small", |_| Vec::new());
}

#[test]
fn damage_that_costs_nobody_anything_or_is_known_does_not_fail_a_backup() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    filled(&directory, |engine| {
        backup(engine, &place.path().join("first")).expect("whole");
        hurt_one(directory.path(), "packs", ".pack", |bytes| flip(bytes, 20));
        let made = backup(engine, &place.path().join("second"));
        assert_eq!(made.expect("a header that nobody reads").damaged, 0);
        hurt_one(directory.path(), "segments", ".seg", flip_middle);
        assert!(backup(engine, &place.path().join("third")).is_err());
        let stream = engine.find("big").ok().flatten().expect("there");
        {
            let mut state = stream.lock();
            state.damaged = Some(Box::new(vec![(450_000, 600_000)]));
            engine.directory.mark_dirty(&stream, &mut state.dirty);
        }
        append(engine, "big", b"so that there is something to write");
        let made = backup(engine, &place.path().join("third"));
        assert_eq!(made.expect("known").damaged, 0);
    });
}

#[test]
fn a_rate_is_kept() {
    let (directory, place) = (TestDirectory::new(), TestDirectory::new());
    filled(&directory, |engine| {
        let options = BackupOptions {
            rate_bytes_per_second: 4_000_000,
            ..BackupOptions::default()
        };
        let began = std::time::Instant::now();
        let made = engine.backup_to(&place.path().join("backup"), &options, &mut |_| true);
        made.expect("backup");
        // 1,000,000 bytes of segments at 4,000,000 per second.
        assert!(began.elapsed().as_millis() >= 250);
    });
}
