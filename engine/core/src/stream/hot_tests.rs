//! Parts in memory and in files read, run and follow each other as one range.

use super::*;

fn section(pack: u32, len: u64, index_count: u32) -> Adopted {
    Adopted {
        pack,
        file_position: 1000,
        len,
        records: u64::from(index_count),
        index_count,
        index_at: 5000,
        index_crc: 0,
    }
}

fn entry(end: u64) -> IndexEntry {
    IndexEntry {
        end,
        records: end,
        time_ms: 1,
        crc: 0,
    }
}

fn text(run: &Run<'_>) -> String {
    match &run.bytes {
        RunBytes::Memory(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        RunBytes::File(section) => format!("file {}", section.pack),
    }
}

#[test]
fn frozen_and_growing_bytes_read_as_one() {
    let mut hot = Hot::starting_at(100);
    let first = vec![1u8; FREEZE_MIN_BYTES + 5];
    hot.push(&first);
    assert!(hot.shared(100).is_none());
    hot.freeze();
    hot.push(b"tail");
    hot.freeze();
    let cut = 100 + first.len() as u64;
    assert_eq!(
        hot.shared(cut - 1).map(|part| part.bytes.len() - part.from),
        Some(1)
    );
    assert!(hot.shared(cut).is_none() && hot.shared(99).is_none());
    let mut buffer = [0u8; 8];
    assert_eq!(hot.copy(cut - 1, &mut buffer), 1);
    assert_eq!(hot.copy(cut + 1, &mut buffer), 3);
    assert_eq!(&buffer[..3], b"ail");
    assert_eq!(hot.pieces().concat().len() as u64, hot.len());
    let whole = hot.followed_by(&Hot::starting_at(hot.end()));
    assert_eq!(whole.pieces().concat(), hot.pieces().concat());
}

/// `abc`, 100 bytes in pack 7, `de`, 50 bytes in pack 8 and 30 in pack 9, `f`.
fn mixed() -> Hot {
    let mut hot = Hot::starting_at(10);
    hot.push(b"abc");
    hot.push_file(section(7, 100, 2));
    hot.push(b"de");
    hot.push_file(section(8, 50, 1));
    hot.push_file(section(9, 30, 1));
    hot.push(b"f");
    hot.index = [13, 60, 113, 115, 165, 195, 196].map(entry).to_vec();
    hot
}

#[test]
fn parts_in_files_are_found_and_are_not_memory() {
    let hot = mixed();
    assert_eq!((hot.len(), hot.end()), (186, 196));
    assert_eq!(
        hot.memory_len(),
        6 + 7 * ENTRY_MEMORY_BYTES + FIRST_MEMORY_BYTES
    );
    assert_eq!(hot.in_file(112).map(|part| part.start), Some(13));
    assert!(hot.in_file(113).is_none() && hot.in_file(12).is_none());
    assert_eq!(hot.in_file(165).map(|part| part.section.pack), Some(9));
    let mut buffer = [0u8; 8];
    assert_eq!(hot.copy(11, &mut buffer), 2);
    assert_eq!(hot.copy(13, &mut buffer), 0);
    assert_eq!(hot.copy(114, &mut buffer), 1);
    assert_eq!(hot.copy(195, &mut buffer), 1);
    assert_eq!(hot.file_parts().count(), 3);
    assert_eq!(hot.entries_between(13, 113).len(), 2);
}

#[test]
fn runs_keep_their_order_and_their_index() {
    let hot = mixed();
    let runs = hot.runs();
    let texts: Vec<String> = runs.iter().map(text).collect();
    assert_eq!(texts, ["abc", "file 7", "de", "file 8", "file 9", "f"]);
    let starts: Vec<u64> = runs.iter().map(|run| run.start).collect();
    assert_eq!(starts, [10, 13, 113, 115, 165, 195]);
    let counts: Vec<usize> = runs.iter().map(|run| run.index.len()).collect();
    assert_eq!(counts, [1, 2, 1, 1, 1, 1]);
}

#[test]
fn what_is_put_back_keeps_its_parts() {
    let older = mixed();
    let mut newer = Hot::starting_at(older.end());
    newer.push(b"g");
    newer.push_file(section(11, 4, 1));
    newer.push(b"h");
    newer.index = [197, 201, 202].map(entry).to_vec();
    let whole = older.followed_by(&newer);
    assert_eq!((whole.start, whole.end()), (10, 202));
    assert_eq!(
        whole.memory_len() + FIRST_MEMORY_BYTES,
        older.memory_len() + newer.memory_len()
    );
    let texts: Vec<String> = whole.runs().iter().map(text).collect();
    assert_eq!(
        texts,
        [
            "abc", "file 7", "de", "file 8", "file 9", "fg", "file 11", "h"
        ]
    );
    let mut plain = Hot::starting_at(older.end());
    plain.push(b"xyz");
    let whole = older.followed_by(&plain);
    let mut buffer = [0u8; 8];
    assert_eq!(whole.copy(195, &mut buffer), 4);
    assert_eq!(&buffer[..4], b"fxyz");
}
