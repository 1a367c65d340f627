//! Rows to Arrow IPC: column buffers that grow in place, and the messages around them.
//!
//! Only the metadata goes through a library. Column buffers are filled here and become pieces of the answer as they
//! are, so a value's bytes are copied once, from where they were read to the buffer that is sent.
//!
//! ```text
//! answer:   schema message | batch message | body | batch message | body | ... | end (ff ff ff ff 00 00 00 00)
//! message:  ff ff ff ff | length i32 | flatbuffer, padded so that 8 + length is a multiple of 64
//! body:     the buffers of each column in order, each padded to a multiple of 64
//!           utf8 and binary: validity (empty unless there are nulls), offsets i32, bytes; others: validity, values
//! ```
//!
//! Invariants
//! - `I-ARROW-1` All columns of a batch have the same number of rows.
//! - `I-ARROW-2` Offsets never pass `i32::MAX`: a batch is closed before that.

use std::sync::Arc;

use arrow_ipc::writer::{DictionaryTracker, IpcDataGenerator, IpcWriteOptions};
use arrow_ipc::{
    Buffer, FieldNode, MessageBuilder, MessageHeader, MetadataVersion, RecordBatchBuilder,
};
use arrow_schema::{DataType, Field, Schema, TimeUnit};
use flatbuffers::FlatBufferBuilder;

use crate::model::{IndexEntry, Offset};

/// Most rows of one batch.
pub const BATCH_ROWS_MAX: usize = 65_536;
/// Room for the values of a first batch.
const FIRST_VALUES_BYTES: usize = 1024 * 1024;
const ALIGNMENT: usize = 64;
const CONTINUATION: [u8; 4] = [0xff; 4];

/// The columns that a read may ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Column {
    Stream,
    Offset,
    Timestamp,
    Value,
    Position,
    Epoch,
    Key,
}

impl Column {
    pub const ALL: [Column; 7] = [
        Column::Stream,
        Column::Offset,
        Column::Timestamp,
        Column::Value,
        Column::Position,
        Column::Epoch,
        Column::Key,
    ];
    pub const DEFAULT: [Column; 4] = [
        Column::Stream,
        Column::Offset,
        Column::Timestamp,
        Column::Value,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Column::Stream => "stream",
            Column::Offset => "offset",
            Column::Timestamp => "timestamp",
            Column::Value => "value",
            Column::Position => "position",
            Column::Epoch => "epoch",
            Column::Key => "key",
        }
    }

    pub fn parse(name: &str) -> Option<Column> {
        Column::ALL.into_iter().find(|column| column.name() == name)
    }

    fn field(self) -> Field {
        let kind = match self {
            Column::Stream | Column::Position => DataType::Utf8,
            Column::Offset | Column::Epoch => DataType::Int64,
            Column::Timestamp => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
            Column::Value | Column::Key => DataType::Binary,
        };
        Field::new(self.name(), kind, self == Column::Key)
    }
}

/// A column of variable length under construction.
#[derive(Default)]
pub struct Texts {
    offsets: Vec<u8>,
    bytes: Vec<u8>,
}

impl Texts {
    fn reserve(&mut self, rows: usize, bytes: usize) {
        self.offsets.reserve((rows + 1) * 4 + ALIGNMENT);
        self.bytes.reserve(bytes + ALIGNMENT);
        if self.offsets.is_empty() {
            self.offsets.extend_from_slice(&0i32.to_le_bytes());
        }
    }

    #[inline]
    fn end(&mut self) {
        let end = self.bytes.len() as u32;
        self.offsets.extend_from_slice(&end.to_le_bytes());
    }

    #[inline]
    pub fn push(&mut self, value: &[u8]) {
        self.bytes.extend_from_slice(value);
        self.end();
    }

    fn push_repeated(&mut self, value: &[u8], rows: usize) {
        self.reserve(rows, value.len() * rows);
        let mut end = self.bytes.len();
        let full = end + value.len() * rows;
        if rows > 0 {
            self.bytes.extend_from_slice(value);
        }
        // What is there is doubled: names are short, and a copy of many bytes costs little more than one of few.
        while self.bytes.len() < full {
            let here = (self.bytes.len() - end).min(full - self.bytes.len());
            self.bytes.extend_from_within(end..end + here);
        }
        for slot in more(&mut self.offsets, rows * 4).chunks_exact_mut(4) {
            end += value.len();
            slot.copy_from_slice(&(end as u32).to_le_bytes());
        }
    }
}

/// Whether each row has a value; kept only from the first row on that has none.
#[derive(Default)]
struct Validity {
    bits: Vec<u8>,
    rows: usize,
    nulls: usize,
}

impl Validity {
    fn push(&mut self, valid: bool) {
        if self.rows.is_multiple_of(8) {
            self.bits.push(0);
        }
        if valid && let Some(last) = self.bits.last_mut() {
            *last |= 1 << (self.rows % 8);
        }
        self.rows += 1;
        self.nulls += usize::from(!valid);
    }
}

/// Which columns are wanted: a flag each, so that the loop over rows asks no list.
#[derive(Clone, Copy)]
struct Has {
    stream: bool,
    offset: bool,
    timestamp: bool,
    value: bool,
    position: bool,
    epoch: bool,
    key: bool,
}

/// A batch under construction, and the pieces of those before it.
pub struct Encoder {
    columns: Vec<Column>,
    has: Has,
    pieces: Vec<Vec<u8>>,
    rows: usize,
    total_rows: u64,
    streams: Texts,
    numbers: Vec<u8>,
    times: Vec<u8>,
    values: Texts,
    positions: Texts,
    epochs: Vec<u8>,
    keys: Texts,
    validity: Validity,
    /// What the values of the next batch will take, about: as the last one.
    likely_bytes: usize,
    /// Bytes of closed batches, and of a row beside its texts.
    closed_bytes: usize,
    row_bytes: usize,
}

impl Encoder {
    pub fn new(columns: &[Column]) -> Encoder {
        let has = |column| columns.contains(&column);
        let mut encoder = Encoder {
            columns: columns.to_vec(),
            has: Has {
                stream: has(Column::Stream),
                offset: has(Column::Offset),
                timestamp: has(Column::Timestamp),
                value: has(Column::Value),
                position: has(Column::Position),
                epoch: has(Column::Epoch),
                key: has(Column::Key),
            },
            pieces: vec![schema_message(columns)],
            rows: 0,
            total_rows: 0,
            streams: Texts::default(),
            numbers: Vec::new(),
            times: Vec::new(),
            values: Texts::default(),
            positions: Texts::default(),
            epochs: Vec::new(),
            keys: Texts::default(),
            validity: Validity::default(),
            likely_bytes: FIRST_VALUES_BYTES,
            closed_bytes: 0,
            row_bytes: 8 * columns.len(),
        };
        encoder.reserve(0, 0);
        encoder
    }

    pub fn wants_key(&self) -> bool {
        self.has.key
    }

    pub fn rows(&self) -> u64 {
        self.total_rows
    }

    /// Rows that the open batch still takes.
    pub fn room(&self) -> usize {
        BATCH_ROWS_MAX - self.rows
    }

    /// Bytes that are encoded so far, padding and metadata aside.
    pub fn bytes(&self) -> usize {
        let texts = [&self.streams, &self.values, &self.positions, &self.keys];
        let open: usize = texts.iter().map(|text| text.bytes.len()).sum();
        self.closed_bytes + open + self.rows * self.row_bytes
    }

    /// Makes room for rows whose values have `bytes` bytes in all.
    pub fn reserve(&mut self, rows: usize, bytes: usize) {
        if self.has.stream {
            self.streams.reserve(rows, 0);
        }
        if self.has.value {
            self.values.reserve(rows, bytes);
        }
        if self.has.position {
            self.positions
                .reserve(rows, rows * crate::model::OFFSET_TEXT_BYTES);
        }
        if self.has.key {
            self.keys.reserve(rows, 0);
        }
        for (wanted, column) in [
            (self.has.offset, &mut self.numbers),
            (self.has.timestamp, &mut self.times),
            (self.has.epoch, &mut self.epochs),
        ] {
            if wanted {
                column.reserve(rows * 8 + ALIGNMENT);
            }
        }
    }

    /// What the values of a batch take, about. Memory that is asked for and not used is not free: others have written to it.
    pub fn likely_bytes(&self) -> usize {
        self.likely_bytes
    }

    /// Whether all columns come from the index and the bytes as they lie.
    pub fn is_plain(&self) -> bool {
        !self.has.position && !self.has.key
    }

    /// Bytes of one row beside its texts.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Appends of one record each, for plain columns: `bytes` begin at `from` as the first append does, and the last
    /// `comma` bytes of each are not part of its value. What they have in common with others follows by
    /// [`Encoder::run`].
    pub fn singles(
        &mut self,
        bytes: &[u8],
        from: u64,
        comma: usize,
        number: u64,
        entries: &[IndexEntry],
    ) {
        let rows = entries.len();
        let end_of = |entry: &IndexEntry| (entry.end - from) as usize;
        self.reserve(rows, entries.last().map_or(0, end_of));
        if self.has.value {
            let before = self.values.bytes.len();
            let mut start = 0;
            for entry in entries {
                let end = end_of(entry);
                self.values
                    .bytes
                    .extend_from_slice(&bytes[start..end - comma]);
                start = end;
            }
            let slots = more(&mut self.values.offsets, rows * 4);
            for (row, (slot, entry)) in slots.chunks_exact_mut(4).zip(entries).enumerate() {
                let end = before + end_of(entry) - comma * (row + 1);
                slot.copy_from_slice(&(end as u32).to_le_bytes());
            }
        }
        if self.has.offset {
            let slots = more(&mut self.numbers, rows * 8).chunks_exact_mut(8);
            for (row, slot) in slots.enumerate() {
                slot.copy_from_slice(&(number + row as u64).to_le_bytes());
            }
        }
        if self.has.timestamp {
            let slots = more(&mut self.times, rows * 8).chunks_exact_mut(8);
            for (slot, entry) in slots.zip(entries) {
                let time_us = (entry.time_ms as i64).saturating_mul(1000);
                slot.copy_from_slice(&time_us.to_le_bytes());
            }
        }
        self.rows += rows;
    }

    /// The value of the next row.
    #[inline]
    pub fn value(&mut self, value: &[u8]) {
        if self.has.value {
            self.values.push(value);
        }
    }

    /// The key of the next row: written by `write`, which says whether there is one.
    pub fn key(&mut self, write: impl FnOnce(&mut Vec<u8>) -> bool) {
        let found = write(&mut self.keys.bytes);
        self.keys.end();
        self.validity.push(found);
    }

    /// What the rows of one append have in common, for `rows` of them whose values (and keys) are there already.
    #[inline]
    pub fn append(&mut self, number: u64, time_ms: u64, begins: Offset, rows: usize) {
        if self.has.offset {
            for number in number..number + rows as u64 {
                self.numbers
                    .extend_from_slice(&(number as i64).to_le_bytes());
            }
        }
        if self.has.timestamp {
            let time_us = (time_ms as i64).saturating_mul(1000).to_le_bytes();
            for _ in 0..rows {
                self.times.extend_from_slice(&time_us);
            }
        }
        if self.has.position {
            for _ in 0..rows {
                begins.write_to(&mut self.positions.bytes);
                self.positions.end();
            }
        }
        self.rows += rows;
    }

    /// What many rows have in common; called for all rows of a stream and an epoch before the batch is closed.
    pub fn run(&mut self, stream: &str, epoch: u64, rows: usize) {
        if self.has.stream {
            self.streams.push_repeated(stream.as_bytes(), rows);
        }
        if self.has.epoch {
            for slot in more(&mut self.epochs, rows * 8).chunks_exact_mut(8) {
                slot.copy_from_slice(&(epoch as i64).to_le_bytes());
            }
        }
    }

    /// Closes the open batch, if it has rows.
    pub fn close_batch(&mut self) {
        if self.rows == 0 {
            return;
        }
        let rows = std::mem::take(&mut self.rows);
        self.total_rows += rows as u64;
        let validity = std::mem::take(&mut self.validity);
        let nulls = validity.nulls;
        self.likely_bytes = self.values.bytes.len() + self.values.bytes.len() / 16;
        let mut buffers: Vec<Vec<u8>> = Vec::with_capacity(3 * self.columns.len());
        for column in &self.columns {
            let texts = match column {
                Column::Stream => Some(&mut self.streams),
                Column::Value => Some(&mut self.values),
                Column::Position => Some(&mut self.positions),
                Column::Key => Some(&mut self.keys),
                _ => None,
            };
            let bitmap = if *column == Column::Key && nulls > 0 {
                validity.bits.clone()
            } else {
                Vec::new()
            };
            buffers.push(bitmap);
            match (texts, column) {
                (Some(texts), _) => {
                    buffers.push(std::mem::take(&mut texts.offsets));
                    buffers.push(std::mem::take(&mut texts.bytes));
                }
                (None, Column::Offset) => buffers.push(std::mem::take(&mut self.numbers)),
                (None, Column::Timestamp) => buffers.push(std::mem::take(&mut self.times)),
                (None, _) => buffers.push(std::mem::take(&mut self.epochs)),
            }
        }
        self.pieces
            .push(batch_message(&self.columns, rows, nulls, &mut buffers));
        self.closed_bytes += buffers.iter().map(Vec::len).sum::<usize>();
        self.pieces
            .extend(buffers.into_iter().filter(|buffer| !buffer.is_empty()));
        self.reserve(0, 0);
    }

    /// The pieces of the whole answer.
    pub fn finish(mut self) -> Vec<Vec<u8>> {
        self.close_batch();
        self.pieces.push(end_of_stream());
        self.pieces
    }
}

/// Room for `bytes` more at the end.
fn more(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    let from = buffer.len();
    buffer.resize(from + bytes, 0);
    &mut buffer[from..]
}

fn end_of_stream() -> Vec<u8> {
    let mut end = CONTINUATION.to_vec();
    end.extend_from_slice(&0i32.to_le_bytes());
    end
}

fn schema_message(columns: &[Column]) -> Vec<u8> {
    let fields: Vec<Arc<Field>> = columns
        .iter()
        .map(|column| Arc::new(column.field()))
        .collect();
    let schema = Schema::new(fields);
    let encoded = IpcDataGenerator::default().schema_to_bytes_with_dictionary_tracker(
        &schema,
        &mut DictionaryTracker::new(false),
        &IpcWriteOptions::default(),
    );
    framed(&encoded.ipc_message)
}

/// Pads the buffers and describes them.
fn batch_message(
    columns: &[Column],
    rows: usize,
    key_nulls: usize,
    buffers: &mut [Vec<u8>],
) -> Vec<u8> {
    let mut described = Vec::with_capacity(buffers.len());
    let mut body = 0i64;
    for buffer in buffers {
        described.push(Buffer::new(body, buffer.len() as i64));
        buffer.resize(buffer.len().next_multiple_of(ALIGNMENT), 0);
        body += buffer.len() as i64;
    }
    let nodes: Vec<FieldNode> = columns
        .iter()
        .map(|column| {
            let nulls = if *column == Column::Key { key_nulls } else { 0 };
            FieldNode::new(rows as i64, nulls as i64)
        })
        .collect();
    let mut builder = FlatBufferBuilder::new();
    let described = builder.create_vector(&described);
    let nodes = builder.create_vector(&nodes);
    let header = {
        let mut batch = RecordBatchBuilder::new(&mut builder);
        batch.add_length(rows as i64);
        batch.add_nodes(nodes);
        batch.add_buffers(described);
        batch.finish().as_union_value()
    };
    let message = {
        let mut message = MessageBuilder::new(&mut builder);
        message.add_version(MetadataVersion::V5);
        message.add_header_type(MessageHeader::RecordBatch);
        message.add_bodyLength(body);
        message.add_header(header);
        message.finish()
    };
    builder.finish(message, None);
    framed(builder.finished_data())
}

fn framed(message: &[u8]) -> Vec<u8> {
    let total = (8 + message.len()).next_multiple_of(ALIGNMENT);
    let mut out = Vec::with_capacity(total);
    out.extend_from_slice(&CONTINUATION);
    out.extend_from_slice(&((total - 8) as i32).to_le_bytes());
    out.extend_from_slice(message);
    out.resize(total, 0);
    out
}

#[cfg(test)]
#[path = "arrow_tests.rs"]
mod tests;
