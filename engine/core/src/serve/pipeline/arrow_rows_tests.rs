//! Real streams are read; damaged ones are refused, never a panic.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BinaryArray, Int32Array, LargeBinaryArray, LargeStringArray, RecordBatch as Batch,
    StringArray,
};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{Field, Schema};
use proptest::prelude::*;

use super::*;

fn body(batches: &[Vec<(&str, ArrayRef)>]) -> Vec<u8> {
    let fields: Vec<Field> = batches[0]
        .iter()
        .map(|(name, array)| Field::new(*name, array.data_type().clone(), true))
        .collect();
    let schema = Arc::new(Schema::new(fields));
    let mut out = Vec::new();
    let mut writer = StreamWriter::try_new(&mut out, &schema).expect("begins");
    for columns in batches {
        let arrays = columns.iter().map(|(_, array)| Arc::clone(array)).collect();
        let batch = Batch::try_new(Arc::clone(&schema), arrays).expect("a batch");
        writer.write(&batch).expect("writes");
    }
    writer.finish().expect("ends");
    drop(writer);
    out
}

/// Stream and value.
type Row = (Vec<u8>, Vec<u8>);

fn read_all(body: &[u8], needs_stream: bool) -> Result<Vec<Row>, Malformed> {
    let mut reader = Reader::begin(body, needs_stream)?;
    let mut found = Vec::new();
    while let Some(rows) = reader.next_rows()? {
        for row in 0..rows.count {
            let stream = rows.stream(row)?.unwrap_or(b"").to_vec();
            found.push((stream, rows.value(row)?.to_vec()));
        }
    }
    Ok(found)
}

fn strings(values: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

fn two_batches() -> Vec<u8> {
    let binary = BinaryArray::from(vec![&b"x"[..], &b"yy"[..], &b"\xff\x00"[..]]);
    let more = BinaryArray::from(vec![&b"z"[..]]);
    body(&[
        vec![
            ("stream", strings(&["a", "a", "b"])),
            ("value", Arc::new(binary)),
        ],
        vec![("stream", strings(&["ü"])), ("value", Arc::new(more))],
    ])
}

#[test]
fn every_form_of_the_columns_is_read() {
    let rows = read_all(&two_batches(), true).expect("reads");
    let wanted: [(&str, &[u8]); 4] = [("a", b"x"), ("a", b"yy"), ("b", b"\xff\x00"), ("ü", b"z")];
    assert_eq!(rows.len(), wanted.len());
    for (row, (stream, value)) in rows.iter().zip(wanted) {
        assert_eq!((&row.0[..], &row.1[..]), (stream.as_bytes(), value));
    }
    let large: ArrayRef = Arc::new(LargeBinaryArray::from(vec![&b"big"[..]]));
    let names: ArrayRef = Arc::new(LargeStringArray::from(vec!["s"]));
    let rows = read_all(&body(&[vec![("value", large), ("stream", names)]]), true);
    assert_eq!(rows.expect("reads"), [(b"s".to_vec(), b"big".to_vec())]);
    let rows = read_all(&body(&[vec![("value", strings(&["", "q"]))]]), false);
    assert_eq!(rows.expect("reads").len(), 2);
    let sliced = StringArray::from(vec!["a", "b", "c"]).slice(1, 2);
    let rows = read_all(&body(&[vec![("value", Arc::new(sliced))]]), false);
    let values: Vec<Vec<u8>> = rows.expect("reads").into_iter().map(|row| row.1).collect();
    assert_eq!(values, [b"b".to_vec(), b"c".to_vec()]);
}

#[test]
fn what_a_stage_does_not_understand_is_refused_by_name() {
    let numbers: ArrayRef = Arc::new(Int32Array::from(vec![1]));
    let nulls: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None]));
    let one = || strings(&["x"]);
    let cases: [(Vec<u8>, bool, &str); 8] = [
        (
            body(&[vec![("value", numbers)]]),
            false,
            "is Int, not binary",
        ),
        (body(&[vec![("value", nulls)]]), false, "row 1 is null"),
        (
            body(&[vec![("value", one())]]),
            true,
            "no column \"stream\"",
        ),
        (
            body(&[vec![("stream", one())]]),
            true,
            "no column \"value\"",
        ),
        (
            body(&[vec![("value", one()), ("key", one())]]),
            false,
            "no column \"key\"",
        ),
        (
            body(&[vec![("value", one()), ("stream", one())]]),
            false,
            "exclude each other",
        ),
        (
            b"{\"json\": true}".to_vec(),
            false,
            "not an Arrow IPC stream",
        ),
        (Vec::new(), false, "no schema"),
    ];
    for (body, needs_stream, wanted) in cases {
        let Malformed(what) = read_all(&body, needs_stream).expect_err("is refused");
        assert!(what.contains(wanted), "{what:?} does not say {wanted:?}");
    }
}

#[test]
fn a_stream_cut_anywhere_is_whole_before_or_refused() {
    let whole = two_batches();
    for len in 0..whole.len() {
        if let Ok(rows) = read_all(&whole[..len], true) {
            assert!(rows.len() <= 4);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn no_damage_makes_it_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut damaged = two_batches();
        for (at, byte) in changes {
            let at = at.index(damaged.len());
            damaged[at] = byte;
        }
        let _ = read_all(&damaged, true);
    }
}
