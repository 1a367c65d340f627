//! Endings without a log or a catalog: what is told, what is written, what is forgotten.

use super::*;

fn ending(name: &str, incarnation: u64, time_ms: u64) -> Ending {
    Ending {
        name: name.into(),
        incarnation: StreamId(incarnation),
        tail: Offset {
            epoch: incarnation + 1,
            position: 77,
        },
        records: 5,
        newest_epoch: incarnation,
        time_ms,
    }
}

#[test]
fn an_ending_is_told_by_incarnation_and_by_name_once_it_is_synced() {
    let endings = Endings::default();
    endings.note(10, ending("a", 1, 100));
    endings.note(20, ending("a", 2, 100));
    endings.note(15, ending("ab", 3, 100));
    let find = |name, id: Option<u64>, synced| {
        let found = endings.find(name, id.map(StreamId), synced, 100);
        found.map(|ending| ending.incarnation.0)
    };
    assert_eq!(find("a", None, 99), Some(2));
    assert_eq!(find("a", None, 19), Some(1), "the newer one is not synced");
    assert_eq!(find("a", Some(2), 19), None);
    assert_eq!(find("a", Some(1), 99), Some(1));
    assert_eq!(find("a", Some(3), 99), None);
    assert_eq!(find("ab", None, 99), Some(3));
    assert_eq!(find("b", None, 99), None);
}

#[test]
fn values_come_back_and_damaged_ones_do_not() {
    let whole = ending("chat/ä", 7, 1_763_000_000_000);
    let value = whole.encode();
    assert_eq!(Ending::decode(&value), Some(whole));
    for at in 0..value.len() {
        let mut bad = value.clone();
        bad[at] ^= 1;
        assert_eq!(Ending::decode(&bad), None, "byte {at}");
        assert_eq!(Ending::decode(&value[..at]), None, "cut at {at}");
    }
}

#[test]
fn what_the_catalog_lacks_is_written_once_and_only_if_synced() {
    let endings = Endings::default();
    endings.note(10, ending("a", 1, 100));
    endings.note(20, ending("b", 2, 100));
    let first = endings.unwritten(15, 100);
    assert_eq!((first.put.len(), first.forget_below), (1, 10));
    let again = endings.unwritten(15, 100);
    assert_eq!(again.put.len(), 1, "nobody said that it was written");
    endings.written(&first);
    let rest = endings.unwritten(99, 100);
    assert_eq!(rest.put.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [20]);
    endings.written(&rest);
    assert!(endings.unwritten(99, 100).put.is_empty());

    let recalled = Endings::default();
    let damaged = vec![(5, b"no ending".to_vec())];
    let rows = damaged.into_iter().chain(first.put).chain(rest.put);
    assert_eq!(recalled.recall(rows.collect()), 1);
    assert_eq!(recalled.all(), endings.all());
    recalled.note(20, ending("b", 2, 100));
    assert!(
        recalled.unwritten(99, 100).put.is_empty(),
        "replay sees some twice"
    );
}

#[test]
fn the_oldest_are_forgotten_by_number_size_and_age() {
    let endings = Endings::default();
    for number in 0..ENDINGS_MAX as u64 + 3 {
        endings.note(number, ending("a", number, 100));
    }
    assert_eq!(endings.all().len(), ENDINGS_MAX);
    assert_eq!(endings.find("a", Some(StreamId(2)), u64::MAX, 100), None);
    assert_eq!(endings.unwritten(u64::MAX, 100).forget_below, 3);
    let later_ms = 101 + ENDINGS_MAX_AGE_MS;
    assert!(endings.find("a", None, u64::MAX, later_ms - 1).is_some());
    assert_eq!(endings.find("a", None, u64::MAX, later_ms), None);
    let nothing = endings.unwritten(u64::MAX, later_ms);
    assert_eq!((nothing.put.len(), nothing.forget_below), (0, u64::MAX));

    let long = "n".repeat(1000);
    for number in 0..30_000 {
        endings.note(number, ending(&long, number, 100));
    }
    let bytes = endings.all().len() * (OVERHEAD_BYTES + long.len());
    assert!(bytes <= ENDINGS_MAX_BYTES && bytes > ENDINGS_MAX_BYTES - 2000);
}
