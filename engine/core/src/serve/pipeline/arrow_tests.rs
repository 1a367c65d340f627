//! What the encoder writes, read back by an Arrow implementation that knows nothing of it.

use super::*;
use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, TimestampMicrosecondType};
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::StreamReader;

fn decode(pieces: Vec<Vec<u8>>) -> Vec<RecordBatch> {
    let bytes = pieces.concat();
    let reader = StreamReader::try_new(std::io::Cursor::new(bytes), None).expect("schema");
    reader.map(|batch| batch.expect("batch")).collect()
}

#[test]
fn every_column_reads_back() {
    let mut encoder = Encoder::new(&Column::ALL);
    let begins = Offset {
        epoch: 17,
        position: 40,
    };
    encoder.reserve(3, 10);
    for (number, value) in [&b"one"[..], b"", b"three"].into_iter().enumerate() {
        encoder.value(value);
        encoder.key(|out| {
            out.extend_from_slice(value);
            number != 1
        });
    }
    encoder.append(5, 1_700_000_000_123, begins, 3);
    encoder.run("chat/ü", 17, 3);
    let batches = decode(encoder.finish());
    let [batch] = &batches[..] else {
        panic!("one batch")
    };
    let names: Vec<&str> = batch
        .schema_ref()
        .fields()
        .iter()
        .map(|field| field.name().as_str())
        .collect();
    assert_eq!(names, Column::ALL.map(Column::name));
    assert_eq!(batch.num_rows(), 3);
    let text = |column: usize, row: usize| {
        batch
            .column(column)
            .as_string::<i32>()
            .value(row)
            .to_owned()
    };
    assert_eq!(text(0, 2), "chat/ü");
    let numbers = batch.column(1).as_primitive::<Int64Type>();
    assert_eq!(numbers.values(), &[5, 6, 7]);
    let times = batch.column(2).as_primitive::<TimestampMicrosecondType>();
    assert_eq!(times.value(1), 1_700_000_000_123_000);
    let values = batch.column(3).as_binary::<i32>();
    assert_eq!(
        (values.value(0), values.value(1), values.value(2)),
        (&b"one"[..], &b""[..], &b"three"[..])
    );
    assert_eq!(text(4, 0), begins.to_string());
    assert_eq!(batch.column(5).as_primitive::<Int64Type>().value(2), 17);
    let keys = batch.column(6).as_binary::<i32>();
    assert_eq!(
        (keys.null_count(), keys.is_null(1), keys.value(2)),
        (1, true, &b"three"[..])
    );
}

#[test]
fn batches_follow_each_other_and_none_is_empty() {
    let mut encoder = Encoder::new(&Column::DEFAULT);
    for round in 0..3u64 {
        for row in 0..1000u64 {
            encoder.value(format!("{round}:{row}").as_bytes());
            encoder.append(round * 1000 + row, row, Offset::START, 1);
        }
        encoder.run("s", 1, 1000);
        encoder.close_batch();
        encoder.close_batch();
    }
    assert_eq!(encoder.rows(), 3000);
    let batches = decode(encoder.finish());
    assert_eq!(batches.len(), 3);
    let values = batches[2].column(3).as_binary::<i32>();
    assert_eq!(values.value(999), b"2:999");
    assert!(decode(Encoder::new(&[Column::Value]).finish()).is_empty());
}

#[test]
fn columns_come_in_the_order_they_are_asked_for() {
    let mut encoder = Encoder::new(&[Column::Value, Column::Offset]);
    encoder.value(b"x");
    encoder.append(9, 0, Offset::START, 1);
    encoder.run("s", 1, 1);
    let batches = decode(encoder.finish());
    assert_eq!(batches[0].num_columns(), 2);
    assert_eq!(batches[0].column(0).as_binary::<i32>().value(0), b"x");
    assert_eq!(batches[0].column(1).as_primitive::<Int64Type>().value(0), 9);
}
