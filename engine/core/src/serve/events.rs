//! Server-sent events as bytes: a data event with everything up to its window's end, then its control event.
//!
//! Rendered by pieces; nearly every event has one, a large record has many. `live` decides what is said to whom and asks
//! for pieces, `output` sends them. A piece depends on the event and its own place alone: readers at the same place share
//! it, and one that was forgotten is rendered again as it was.
//!
//! Invariants
//! - `I-LIVE-1` Every data event is followed by its control event: the last piece of the one begins the other.

use std::io;
use std::sync::Arc;

use crate::limits::SSE_PIECE_BYTES;
use crate::model::{Media, StreamId};
use crate::serve::budget::Keepers;
use crate::serve::respond;
use crate::shard::engine::Engine;
use crate::shard::plan::Window;
use crate::stream::handle::Stream;
use crate::stream::offsets::Gap;

/// Room for the head of a chunk: a length of up to eight digits and a line break.
const CHUNK_HEAD_BYTES: usize = 10;

/// What is said to a reader: the window's bytes if there are any, and about them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Event {
    pub window: Window,
    pub gap: Option<Gap>,
    pub cursor: u64,
    /// HTTP/1.0 has no chunks: the body ends with the connection.
    pub chunked: bool,
}

/// A part of an event as it goes over the wire.
pub struct Piece {
    pub stream: StreamId,
    pub event: Event,
    pub from: u64,
    pub to: u64,
    pub keepers: Keepers,
    buffer: Vec<u8>,
    start: usize,
}

impl Piece {
    /// Reads and renders the bytes between `from` and `to`, and the ends of the event if they are there. Short lines become
    /// many times longer: the piece ends before `to` where it has grown to its bound.
    pub fn render(
        engine: &Engine,
        stream: &Arc<Stream>,
        event: &Event,
        from: u64,
        mut to: u64,
    ) -> io::Result<Piece> {
        let mut buffer = Vec::with_capacity(256 + (to - from) as usize * 3 / 2);
        buffer.resize(CHUNK_HEAD_BYTES, 0);
        if to > from {
            // How a line goes on depends on the byte before.
            let seen = u64::from(from > event.window.start);
            let bytes = engine.read_range(stream, from - seen, to)?;
            let (before, bytes) = bytes.split_at(seen as usize);
            engine.metrics.read_bytes.add(bytes.len() as u64);
            let last = to == event.window.end;
            let media = stream.content_type.media;
            let put = put_data(&mut buffer, media, before.first().copied(), bytes, last);
            to = from + put as u64;
        }
        if to == event.window.end {
            put_control(&mut buffer, event);
        }
        let mut start = CHUNK_HEAD_BYTES;
        if event.chunked {
            let head = format!("{:x}\r\n", buffer.len() - CHUNK_HEAD_BYTES);
            start = CHUNK_HEAD_BYTES.saturating_sub(head.len());
            buffer[start..CHUNK_HEAD_BYTES].copy_from_slice(head.as_bytes());
            buffer.extend_from_slice(b"\r\n");
        }
        Ok(Piece {
            stream: stream.id,
            event: *event,
            from,
            to,
            keepers: Keepers::new(0),
            buffer,
            start,
        })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    pub fn memory(&self) -> u64 {
        self.buffer.capacity() as u64
    }
}

/// A part of a data event. `before` is the byte in front of it; without one the event begins here. Returns how many of the
/// bytes are in it.
fn put_data(
    out: &mut Vec<u8>,
    media: Media,
    before: Option<u8>,
    bytes: &[u8],
    last: bool,
) -> usize {
    let json = media == Media::Json;
    if before.is_none() {
        out.extend_from_slice(b"event: data\ndata:");
        out.extend(json.then_some(b'['));
    }
    let text = match media {
        // The comma behind the last message is stored, but not sent.
        Media::Json if last => bytes.strip_suffix(b",").unwrap_or(bytes),
        _ => bytes,
    };
    let put = match media {
        Media::Json => put_lines(out, before.or(Some(b'[')), text),
        Media::Text => put_lines(out, before, text),
        Media::Binary => put_base64(out, text),
    };
    if put < text.len() {
        return put;
    }
    if last {
        out.extend(json.then_some(b']'));
        out.extend_from_slice(b"\n\n");
    }
    bytes.len()
}

/// Clients drop one blank behind the colon, so a line that begins with one gets another.
fn put_line_start(out: &mut Vec<u8>, line: &[u8]) {
    if line.first() == Some(&b' ') {
        out.push(b' ');
    }
}

/// Text with every line break (CRLF, CR or LF) turned into the start of another `data:` line. Ends behind a line break
/// where that has become much; returns how many bytes are in it.
fn put_lines(out: &mut Vec<u8>, before: Option<u8>, bytes: &[u8]) -> usize {
    let mut text = bytes;
    if before == Some(b'\r') {
        // Its CR was the line break.
        text = text.strip_prefix(b"\n").unwrap_or(text);
    }
    if matches!(before, None | Some(b'\r' | b'\n')) {
        put_line_start(out, text);
    }
    while let Some(at) = memchr::memchr2(b'\n', b'\r', text) {
        out.extend_from_slice(&text[..at]);
        let crlf = text[at] == b'\r' && text.get(at + 1) == Some(&b'\n');
        text = &text[at + if crlf { 2 } else { 1 }..];
        out.extend_from_slice(b"\ndata:");
        if out.len() as u64 > SSE_PIECE_BYTES {
            return bytes.len() - text.len();
        }
        put_line_start(out, text);
    }
    out.extend_from_slice(text);
    bytes.len()
}

fn put_control(out: &mut Vec<u8>, event: &Event) {
    let window = &event.window;
    out.extend_from_slice(b"event: control\ndata:{\"streamNextOffset\":\"");
    window.next.write_to(out);
    out.push(b'"');
    if !window.closed {
        out.extend_from_slice(b",\"streamCursor\":\"");
        respond::put_number(out, event.cursor);
        out.push(b'"');
    }
    if let Some(gap) = event.gap {
        let fields = format!(
            ",\"streamGapFrom\":\"{}\",\"streamGapTo\":\"{}\",\"streamGapReason\":\"{}\",\"streamGapCertain\":{}",
            gap.from,
            gap.to,
            gap.reason.name(),
            gap.certain
        );
        out.extend_from_slice(fields.as_bytes());
    }
    if window.up_to_date {
        out.extend_from_slice(b",\"upToDate\":true");
    }
    if window.closed {
        out.extend_from_slice(b",\"streamClosed\":true");
    }
    out.extend_from_slice(b"}\n\n");
}

fn put_base64(out: &mut Vec<u8>, bytes: &[u8]) -> usize {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    out.reserve(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = u32::from(chunk[0]) << 16
            | u32::from(*chunk.get(1).unwrap_or(&0)) << 8
            | u32::from(*chunk.get(2).unwrap_or(&0));
        let symbol = |shift: u32| ALPHABET[(word >> shift & 63) as usize];
        out.push(symbol(18));
        out.push(symbol(12));
        out.push(if chunk.len() > 1 { symbol(6) } else { b'=' });
        out.push(if chunk.len() > 2 { symbol(0) } else { b'=' });
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(media: Media, bytes: &[u8]) -> String {
        let mut out = Vec::new();
        put_data(&mut out, media, None, bytes, true);
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn text_stays_inside_its_event() {
        assert_eq!(
            rendered(Media::Text, b"a\r\nb\rc\n\nevent: x"),
            "event: data\ndata:a\ndata:b\ndata:c\ndata:\ndata:event: x\n\n"
        );
        assert_eq!(
            rendered(Media::Text, b" a\n b"),
            "event: data\ndata:  a\ndata:  b\n\n"
        );
    }

    #[test]
    fn json_and_base64() {
        assert_eq!(
            rendered(Media::Json, b"{\"a\":1},2,"),
            "event: data\ndata:[{\"a\":1},2]\n\n"
        );
        for (bytes, text) in [
            (&b"a"[..], "YQ=="),
            (b"ab", "YWI="),
            (b"abc", "YWJj"),
            (b"\xff\xfe\xfd\xfc", "//79/A=="),
        ] {
            assert_eq!(
                rendered(Media::Binary, bytes),
                format!("event: data\ndata:{text}\n\n")
            );
        }
    }

    #[test]
    fn pieces_make_the_same_event() {
        let breaks = b" \r\n\n\r  a\r\r\n b\n \r\n";
        for (media, bytes) in [
            (Media::Text, &breaks[..]),
            (Media::Json, b"{\"a\":\r\n 1},\n\r\n [2],"),
            (Media::Binary, b"\xff\xfe\xfd\xfcabcdefgh"),
        ] {
            let whole = rendered(media, bytes);
            for size in (1..bytes.len()).filter(|size| media != Media::Binary || size % 3 == 0) {
                let mut out = Vec::new();
                for from in (0..bytes.len()).step_by(size) {
                    let to = (from + size).min(bytes.len());
                    let before = from.checked_sub(1).map(|at| bytes[at]);
                    let last = to == bytes.len();
                    put_data(&mut out, media, before, &bytes[from..to], last);
                }
                assert_eq!(String::from_utf8(out).expect("text"), whole, "by {size}");
            }
        }
    }
}
