//! The catalog on the real file system, on a disk that fails and loses power, and on one with flipped bits.

use super::*;
use crate::io::tests::{CrashDisk, TestDirectory};
use crate::io::write_all_at;

fn put(path: &str, id: u64, value: &str) -> Change {
    let (path, value) = (path.as_bytes().to_vec(), value.as_bytes().to_vec());
    Change::Put {
        path,
        id: StreamId(id),
        value,
    }
}

fn listed(catalog: &Catalog, prefix: &str, after: &str, limit: usize) -> Vec<String> {
    let mut paths = Vec::new();
    let visit = &mut |path: &[u8], _: &[u8]| {
        paths.push(String::from_utf8_lossy(path).into_owned());
        true
    };
    catalog
        .scan(prefix.as_bytes(), after.as_bytes(), limit, visit)
        .unwrap();
    paths
}

#[test]
fn what_is_committed_is_found_after_opening_again() {
    let directory = TestDirectory::new();
    {
        let catalog = Catalog::open(directory.disk()).unwrap();
        assert!(catalog.is_empty().unwrap());
        let changes = [put("b", 2, "two"), put("a", 1, "one")];
        catalog
            .commit(&changes, &[("sequence", b"77")], &[(0, 100), (1, 50)])
            .unwrap();
        catalog
            .commit(&[], &[("sequence", b"78")], &[(0, -40), (1, -60), (1, 10)])
            .unwrap();
    }
    let catalog = Catalog::open(directory.disk()).unwrap();
    assert_eq!(catalog.get(b"a").unwrap().as_deref(), Some(&b"one"[..]));
    assert_eq!(catalog.get(b"c").unwrap(), None);
    assert_eq!(
        catalog.path_of(StreamId(2)).unwrap().as_deref(),
        Some(&b"b"[..])
    );
    assert_eq!(catalog.path_of(StreamId(3)).unwrap(), None);
    assert_eq!(
        catalog.meta("sequence").unwrap().as_deref(),
        Some(&b"78"[..])
    );
    assert_eq!(catalog.meta("other").unwrap(), None);
    assert_eq!(
        catalog.packs().unwrap(),
        [(0, 60)],
        "a pack without live bytes has no row"
    );
    assert_eq!(catalog.len().unwrap(), 2);
}

#[test]
fn a_path_can_be_removed_and_taken_over_in_one_commit() {
    let directory = TestDirectory::new();
    let catalog = Catalog::open(directory.disk()).unwrap();
    catalog
        .commit(&[put("a", 1, "old"), put("b", 2, "old")], &[], &[])
        .unwrap();
    let remove = Change::Remove {
        path: b"a".to_vec(),
        id: StreamId(1),
    };
    let changes = [
        remove,
        put("a", 9, "new"),
        Change::RemoveId { id: StreamId(2) },
        put("b", 3, "new"),
    ];
    catalog.commit(&changes, &[], &[]).unwrap();
    assert_eq!(catalog.get(b"a").unwrap().as_deref(), Some(&b"new"[..]));
    assert_eq!(catalog.get(b"b").unwrap().as_deref(), Some(&b"new"[..]));
    let path_of = |id| catalog.path_of(StreamId(id)).unwrap();
    assert_eq!((path_of(1), path_of(2)), (None, None));
    assert_eq!(
        (path_of(9), path_of(3)),
        (Some(b"a".to_vec()), Some(b"b".to_vec()))
    );
    let remove = Change::Remove {
        path: b"a".to_vec(),
        id: StreamId(9),
    };
    catalog
        .commit(&[put("a", 9, "newer"), remove], &[], &[])
        .unwrap();
    assert_eq!((catalog.get(b"a").unwrap(), path_of(9)), (None, None));
}

#[test]
fn scans_are_ordered_bounded_and_resumable() {
    let directory = TestDirectory::new();
    let catalog = Catalog::open(directory.disk()).unwrap();
    let paths = ["a", "b/1", "b/2", "b/3", "b0", "c", "\u{7f}"];
    let changes: Vec<Change> = (0..)
        .zip(paths)
        .map(|(id, path)| put(path, id, ""))
        .collect();
    catalog.commit(&changes, &[], &[]).unwrap();
    assert_eq!(listed(&catalog, "", "", usize::MAX), paths);
    assert_eq!(listed(&catalog, "b/", "", 100), ["b/1", "b/2", "b/3"]);
    assert_eq!(listed(&catalog, "b/", "b/1", 1), ["b/2"]);
    assert_eq!(
        listed(&catalog, "b/", "a", 100),
        ["b/1", "b/2", "b/3"],
        "after lies before the prefix"
    );
    assert_eq!(listed(&catalog, "b/", "b/3", 100), [""; 0]);
    assert_eq!(
        listed(&catalog, "b/", "c", 100),
        [""; 0],
        "after lies behind the prefix"
    );
    assert_eq!(
        listed(&catalog, "", "b/25", 2),
        ["b/3", "b0"],
        "after need not exist"
    );
    assert_eq!(listed(&catalog, "", "", 0), [""; 0]);
    let mut visited = 0;
    let stop = &mut |_: &[u8], _: &[u8]| {
        visited += 1;
        visited < 2
    };
    catalog.scan(b"", b"", 100, stop).unwrap();
    assert_eq!(visited, 2);
}

#[test]
fn impossible_pack_accounting_is_refused_with_the_whole_commit() {
    let directory = TestDirectory::new();
    let catalog = Catalog::open(directory.disk()).unwrap();
    catalog.commit(&[], &[], &[(3, 10)]).unwrap();
    let refused = catalog
        .commit(&[put("a", 1, "")], &[], &[(3, -11)])
        .unwrap_err();
    assert!(matches!(refused, CatalogError::Corrupt(_)), "{refused}");
    assert_eq!(
        (catalog.get(b"a").unwrap(), catalog.packs().unwrap()),
        (None, vec![(3, 10)])
    );
    catalog
        .commit(&[put("a", 1, "")], &[], &[(3, -10)])
        .unwrap();
    assert_eq!(catalog.packs().unwrap(), []);
}

/// Streams `0..200` with values of `round`, and what else belongs to the round.
fn commit_round(catalog: &Catalog, round: u64) -> Result<(), CatalogError> {
    let value = format!("{round:0100}");
    let changes: Vec<Change> = (0..200)
        .map(|id| put(&format!("stream/{id}"), id, &value))
        .collect();
    catalog.commit(
        &changes,
        &[("round", &round.to_le_bytes())],
        &[(round as u32, 5)],
    )
}

/// The round the catalog is at; everything in it must be of that round.
fn checked_round(catalog: &Catalog) -> u64 {
    let Some(round) = catalog.meta("round").unwrap() else {
        assert_eq!(
            (catalog.len().unwrap(), catalog.packs().unwrap().len()),
            (0, 0)
        );
        return 0;
    };
    let round = u64::from_le_bytes(round.try_into().unwrap());
    let value = format!("{round:0100}");
    let mut count = 0;
    catalog
        .scan(b"stream/", b"", usize::MAX, &mut |_, found| {
            assert_eq!(found, value.as_bytes(), "a commit was torn");
            count += 1;
            true
        })
        .unwrap();
    assert_eq!((count, catalog.packs().unwrap().len() as u64), (200, round));
    assert_eq!(
        catalog.path_of(StreamId(199)).unwrap().as_deref(),
        Some(&b"stream/199"[..])
    );
    round
}

#[test]
fn a_commit_is_whole_or_absent_wherever_the_disk_dies() {
    let mut step = 1;
    loop {
        let disk = CrashDisk::new();
        let catalog = Catalog::open(disk.clone()).unwrap();
        for round in 1..=3 {
            commit_round(&catalog, round).unwrap();
        }
        disk.fail_from(disk.operations() + step);
        let committed = commit_round(&catalog, 4);
        // The process dies with the disk: dropping the catalog must not tidy anything up.
        drop(catalog);
        disk.fail_from(0);
        disk.power_cut(step);
        let catalog = Catalog::open(disk.clone()).unwrap();
        let round = checked_round(&catalog);
        if committed.is_ok() {
            assert_eq!(round, 4, "an acknowledged commit is gone");
            assert!(step > 5, "the faults did not reach the commit");
            return;
        }
        assert!(
            matches!(committed, Err(CatalogError::Io(_))),
            "{committed:?}"
        );
        assert!(round == 3 || round == 4);
        commit_round(&catalog, round + 1).unwrap();
        drop(catalog);
        disk.power_cut(step);
        assert_eq!(checked_round(&Catalog::open(disk).unwrap()), round + 1);
        step += 1;
    }
}

#[test]
fn creation_may_die_at_any_operation() {
    creation_dies(true);
    creation_dies(false);
}

/// Either the machine or only the process dies; in both cases a later power cut takes nothing.
fn creation_dies(power_cut: bool) {
    let mut step = 1;
    loop {
        let disk = CrashDisk::new();
        disk.fail_from(step);
        let opened = Catalog::open(disk.clone()).map(drop).is_ok();
        disk.fail_from(0);
        if power_cut {
            disk.power_cut(step);
        }
        let catalog = Catalog::open(disk.clone()).unwrap();
        assert_eq!(checked_round(&catalog), 0);
        commit_round(&catalog, 1).unwrap();
        drop(catalog);
        disk.power_cut(step);
        assert_eq!(checked_round(&Catalog::open(disk).unwrap()), 1);
        if opened {
            assert!(step > 3, "the faults did not reach the creation");
            return;
        }
        step += 1;
    }
}

#[test]
fn after_a_failed_write_the_catalog_wants_to_be_opened_again() {
    let disk = CrashDisk::new();
    let catalog = Catalog::open(disk.clone()).unwrap();
    commit_round(&catalog, 1).unwrap();
    disk.fail_from(disk.operations() + 1);
    assert!(matches!(
        commit_round(&catalog, 2),
        Err(CatalogError::Io(_))
    ));
    disk.fail_from(0);
    assert!(matches!(
        commit_round(&catalog, 2),
        Err(CatalogError::Io(_))
    ));
    drop(catalog);
    let catalog = Catalog::open(disk).unwrap();
    assert_eq!(checked_round(&catalog), 1);
    commit_round(&catalog, 2).unwrap();
}

/// Damage is an error or goes unnoticed in a value; it never ends the thread.
#[test]
fn flipped_bits_are_errors_and_not_panics() {
    let mut corrupt = 0;
    for seed in 0..60u64 {
        let disk = CrashDisk::new();
        let catalog = Catalog::open(disk.clone()).unwrap();
        (1..=2).for_each(|round| commit_round(&catalog, round).unwrap());
        drop(catalog);
        let len = disk.file_len(CATALOG_FILE).unwrap() as u64;
        for flip in 0..64u64 {
            let at = (seed * 64 + flip).wrapping_mul(0x9e37_79b9_7f4a_7c15) % len.min(200_000);
            disk.flip_bit(CATALOG_FILE, at, (flip % 8) as u8);
        }
        let outcome = Catalog::open(disk).and_then(|catalog| {
            catalog.scan(b"", b"", usize::MAX, &mut |_, _| true)?;
            catalog.path_of(StreamId(5))?;
            catalog.packs()?;
            commit_round(&catalog, 3)
        });
        if let Err(error) = outcome {
            assert!(matches!(error, CatalogError::Corrupt(_)), "{error}");
            let text = error.to_string();
            for internal in [
                "internal error",
                "index out of",
                "assertion",
                "range end",
                "unwrap",
            ] {
                assert!(!text.contains(internal), "the store's own words: {text}");
            }
            corrupt += 1;
        }
    }
    assert!(corrupt > 0, "no flip was ever noticed");
}

#[test]
fn a_foreign_file_is_not_a_catalog() {
    let directory = TestDirectory::new();
    let disk = directory.disk();
    let file = disk.open(CATALOG_FILE, OpenMode::CreateNew).unwrap();
    let refused = Catalog::open(disk.clone())
        .err()
        .expect("an empty file was taken for a new one");
    assert!(matches!(refused, CatalogError::Corrupt(_)), "{refused}");
    write_all_at(&*file, &[b'x'; 10_000], 0).unwrap();
    let refused = Catalog::open(disk).err().expect("it was opened");
    assert!(matches!(refused, CatalogError::Corrupt(_)), "{refused}");
}

#[test]
#[should_panic(expected = "mistake of the visitor")]
fn a_panic_of_a_visitor_is_not_taken_for_damage() {
    let directory = TestDirectory::new();
    let catalog = Catalog::open(directory.disk()).unwrap();
    catalog.commit(&[put("a", 1, "")], &[], &[]).unwrap();
    let visit = &mut |_: &[u8], _: &[u8]| panic!("mistake of the visitor");
    assert!(catalog.scan(b"", b"", 1, visit).is_err(), "unreachable");
}
