//! Rows out of an Arrow IPC stream, without a copy and without trust.
//!
//! The generic reader panics on lengths that lie; here every length and offset is checked against the bytes that are
//! there, so that a malformed body is an error that says what is wrong. Only what a stage needs is understood: a column
//! `value` of binary or utf8, a column `stream` of utf8, both also in their large forms; no dictionaries, no compression.
//!
//! ```text
//! message: | 0xFFFFFFFF | metadata length u32 | metadata (flatbuffer) | body, as long as the metadata says |
//! stream:  schema message, record batch messages, then a message of length 0 or the end of the bytes
//! ```
//!
//! Invariant: no slice of the body is taken before its bounds are known to lie in it.

use arrow_ipc::{
    Endianness, Field, Message, MessageHeader, MetadataVersion, RecordBatch, Schema, Type,
    root_as_message,
};

const CONTINUATION: u32 = u32::MAX;
/// Longest metadata of one message.
const METADATA_MAX_BYTES: usize = 1 << 20;

/// What is wrong with a body.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(pub String);

fn malformed<T>(what: impl Into<String>) -> Result<T, Malformed> {
    Err(Malformed(what.into()))
}

/// One batch of rows.
pub struct Rows<'a> {
    pub count: usize,
    value: Column<'a>,
    stream: Option<Column<'a>>,
}

/// Where the columns of a stream are, and which form they have.
#[derive(Clone, Copy)]
struct Layout {
    columns: usize,
    value: Place,
    stream: Option<Place>,
}

#[derive(Clone, Copy)]
struct Place {
    number: usize,
    large: bool,
}

#[derive(Clone, Copy)]
struct Column<'a> {
    offsets: &'a [u8],
    data: &'a [u8],
    large: bool,
}

/// Reads messages one by one.
pub struct Reader<'a> {
    rest: &'a [u8],
    layout: Layout,
    /// Rows of the batches before.
    rows: u64,
}

impl<'a> Rows<'a> {
    pub fn value(&self, row: usize) -> Result<&'a [u8], Malformed> {
        self.value.get(row)
    }

    /// Name of the row's stream; `None` if there is no such column.
    pub fn stream(&self, row: usize) -> Result<Option<&'a [u8]>, Malformed> {
        self.stream.map(|column| column.get(row)).transpose()
    }
}

impl<'a> Column<'a> {
    fn offset(&self, number: usize) -> Option<usize> {
        if self.large {
            let bytes = self.offsets.get(number * 8..number * 8 + 8)?;
            usize::try_from(i64::from_le_bytes(bytes.try_into().ok()?)).ok()
        } else {
            let bytes = self.offsets.get(number * 4..number * 4 + 4)?;
            usize::try_from(i32::from_le_bytes(bytes.try_into().ok()?)).ok()
        }
    }

    fn get(&self, row: usize) -> Result<&'a [u8], Malformed> {
        let range = self.offset(row).zip(self.offset(row + 1));
        match range.and_then(|(from, to)| self.data.get(from..to)) {
            Some(bytes) => Ok(bytes),
            None => malformed("the offsets of a column lead outside its bytes"),
        }
    }
}

impl<'a> Reader<'a> {
    /// Reads the schema. `needs_stream`: the request does not name the stream itself.
    pub fn begin(body: &'a [u8], needs_stream: bool) -> Result<Reader<'a>, Malformed> {
        let mut rest = body;
        let Some((message, _)) = next_message(&mut rest)? else {
            return malformed("there is no schema");
        };
        let Some(schema) = message.header_as_schema() else {
            return malformed("the first message is not a schema");
        };
        let layout = layout_of(&schema, needs_stream)?;
        Ok(Reader {
            rest,
            layout,
            rows: 0,
        })
    }

    /// How many rows all batches have together, by what they say of themselves.
    pub fn count_rows(&self) -> Result<u64, Malformed> {
        let mut ahead = Reader { ..*self };
        while ahead.next_rows()?.is_some() {}
        Ok(ahead.rows)
    }

    /// The next batch; `None` at the end.
    pub fn next_rows(&mut self) -> Result<Option<Rows<'a>>, Malformed> {
        let Some((message, body)) = next_message(&mut self.rest)? else {
            return Ok(None);
        };
        match message.header_type() {
            MessageHeader::RecordBatch => {}
            MessageHeader::DictionaryBatch => {
                return malformed("dictionaries are not understood; send plain columns");
            }
            _ => return malformed("a message is neither a schema nor a record batch"),
        }
        let Some(batch) = message.header_as_record_batch() else {
            return malformed("a record batch has no content");
        };
        let rows = self.rows_of(&batch, body)?;
        self.rows += rows.count as u64;
        Ok(Some(rows))
    }

    fn rows_of(&self, batch: &RecordBatch<'a>, body: &'a [u8]) -> Result<Rows<'a>, Malformed> {
        if batch.compression().is_some() {
            return malformed("compressed batches are not understood; send them plain");
        }
        // Even a row of nothing has an offset, so the body bounds the number of rows.
        let count = usize::try_from(batch.length()).ok();
        let Some(count) = count.filter(|count| *count <= body.len()) else {
            return malformed("a record batch has an impossible number of rows");
        };
        let column = |place: Place| self.column(batch, body, place, count);
        Ok(Rows {
            count,
            value: column(self.layout.value)?,
            stream: self.layout.stream.map(column).transpose()?,
        })
    }

    fn column(
        &self,
        batch: &RecordBatch<'a>,
        body: &'a [u8],
        place: Place,
        count: usize,
    ) -> Result<Column<'a>, Malformed> {
        let (Some(nodes), Some(buffers)) = (batch.nodes(), batch.buffers()) else {
            return malformed("a record batch has no buffers");
        };
        if nodes.len() != self.layout.columns || buffers.len() != 3 * self.layout.columns {
            return malformed("a record batch does not have the buffers of its schema");
        }
        let node = nodes.get(place.number);
        if usize::try_from(node.length()).ok() != Some(count) {
            return malformed("a column does not have the rows of its batch");
        }
        let buffer = |number: usize| {
            let buffer = buffers.get(3 * place.number + number);
            let from = usize::try_from(buffer.offset()).ok()?;
            let len = usize::try_from(buffer.length()).ok()?;
            body.get(from..from.checked_add(len)?)
        };
        let (Some(validity), Some(offsets), Some(data)) = (buffer(0), buffer(1), buffer(2)) else {
            return malformed("a buffer lies outside the body of its message");
        };
        if node.null_count() != 0 {
            let row = self.rows + first_null(validity, count) as u64;
            return malformed(format!("row {row} is null"));
        }
        let width = if place.large { 8 } else { 4 };
        if count > 0 && offsets.len() / width <= count {
            return malformed("a column has fewer offsets than rows");
        }
        Ok(Column {
            offsets,
            data,
            large: place.large,
        })
    }
}

fn first_null(validity: &[u8], count: usize) -> usize {
    let is_null = |row: &usize| {
        let byte = validity.get(row / 8).copied().unwrap_or(0);
        byte & (1 << (row % 8)) == 0
    };
    (0..count).find(is_null).unwrap_or(0)
}

/// Takes one message and its body off the front; `None` at the end of the stream.
fn next_message<'a>(rest: &mut &'a [u8]) -> Result<Option<(Message<'a>, &'a [u8])>, Malformed> {
    if rest.is_empty() {
        return Ok(None);
    }
    let Some((prefix, behind)) = rest.split_first_chunk::<8>() else {
        return malformed("the stream ends inside a message");
    };
    let [a, b, c, d, e, f, g, h] = *prefix;
    if u32::from_le_bytes([a, b, c, d]) != CONTINUATION {
        return malformed("this is not an Arrow IPC stream");
    }
    let len = u32::from_le_bytes([e, f, g, h]) as usize;
    if len == 0 {
        *rest = &[];
        return Ok(None);
    }
    if len > METADATA_MAX_BYTES {
        return malformed("the metadata of a message is too long");
    }
    let Some((metadata, behind)) = behind.split_at_checked(len) else {
        return malformed("the stream ends inside a message");
    };
    let Ok(message) = root_as_message(metadata) else {
        return malformed("the metadata of a message does not decode");
    };
    if message.version() < MetadataVersion::V4 {
        return malformed("the metadata has an old version; at least V4 is needed");
    }
    let body_len = usize::try_from(message.bodyLength()).unwrap_or(usize::MAX);
    let Some((body, behind)) = behind.split_at_checked(body_len) else {
        return malformed("the stream ends inside the body of a message");
    };
    *rest = behind;
    Ok(Some((message, body)))
}

fn layout_of(schema: &Schema<'_>, needs_stream: bool) -> Result<Layout, Malformed> {
    if schema.endianness() != Endianness::Little {
        return malformed("big-endian columns are not understood");
    }
    let Some(fields) = schema.fields() else {
        return malformed("the schema has no columns");
    };
    let (mut value, mut stream) = (None, None);
    for (number, field) in fields.iter().enumerate() {
        let name = field.name().unwrap_or("");
        let slot = match name {
            "value" => &mut value,
            "stream" => &mut stream,
            _ => return malformed(format!("a stage has no column {name:?}")),
        };
        let large = form_of(&field, name)?;
        if slot.replace(Place { number, large }).is_some() {
            return malformed(format!("there are two columns {name:?}"));
        }
    }
    let Some(value) = value else {
        return malformed("there is no column \"value\"");
    };
    if stream.is_none() && needs_stream {
        return malformed("there is no column \"stream\" and no ?stream=NAME");
    }
    if stream.is_some() && !needs_stream {
        return malformed("?stream=NAME and a column \"stream\" exclude each other");
    }
    Ok(Layout {
        columns: fields.len(),
        value,
        stream,
    })
}

/// Whether a column has offsets of 64 bits.
fn form_of(field: &Field<'_>, name: &str) -> Result<bool, Malformed> {
    if field.dictionary().is_some() {
        return malformed(format!(
            "column {name:?} is a dictionary; send a plain column"
        ));
    }
    match (field.type_type(), name) {
        (Type::Utf8, _) | (Type::Binary, "value") => Ok(false),
        (Type::LargeUtf8, _) | (Type::LargeBinary, "value") => Ok(true),
        (other, _) => {
            let kind = other.variant_name().unwrap_or("of an unknown type");
            let wanted = match name {
                "value" => "binary or utf8",
                _ => "utf8",
            };
            malformed(format!("column {name:?} is {kind}, not {wanted}"))
        }
    }
}

#[cfg(test)]
#[path = "arrow_rows_tests.rs"]
mod tests;
