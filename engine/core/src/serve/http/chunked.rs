//! Incremental decoder of a chunked request body.
//!
//! Where it sits: `serve/listener` feeds it whatever bytes arrived after a head whose framing is
//! `Chunked`, and keeps what it did not consume as the next request.
//!
//! Invariants:
//! - The result does not depend on how the bytes were split.
//! - A body beyond the maximum is refused when its size is declared, before its data arrives.
//! - Framing overhead is bounded, so that a body cannot run for ever without delivering data.
//! - Every CRLF is verified; trailers are checked and dropped; nothing is reserved on a promise.

use super::HttpError;

/// Longest chunk-size line, extension and line end included.
pub const CHUNK_LINE_MAX_BYTES: u64 = 256;
/// All trailer lines of one body together.
pub const TRAILERS_MAX_BYTES: u64 = 8 * 1024;
/// Framing bytes one body may use, on top of [`CHUNK_OVERHEAD_PER_BYTE`] for each body byte.
pub const CHUNK_OVERHEAD_BASE_BYTES: u64 = 16 * 1024;
/// Smallest possible chunk costs 5 framing bytes for one body byte; 16 leaves room for short
/// extensions and padded sizes.
pub const CHUNK_OVERHEAD_PER_BYTE: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkProgress {
    /// Bytes of the input that belong to this body. All of them unless `done`.
    pub consumed: usize,
    /// The body is complete; the unconsumed rest of the input is the next request.
    pub done: bool,
}

/// What the next byte must be. The two line feeds after a size and after a trailer lead to
/// different places, hence the separate states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size,
    Extension,
    SizeLineFeed,
    Data,
    DataCarriageReturn,
    DataLineFeed,
    TrailerStart,
    TrailerName,
    TrailerValue,
    TrailerLineFeed,
    EndLineFeed,
    Done,
    Failed(HttpError),
}

#[derive(Debug)]
pub struct ChunkDecoder {
    state: State,
    body_max_bytes: u64,
    /// Sum of the chunk sizes seen so far.
    declared_bytes: u64,
    /// The size being read, then what is left of its data.
    chunk_bytes: u64,
    size_digits: u8,
    line_bytes: u64,
    trailer_bytes: u64,
    overhead_bytes: u64,
}

impl ChunkDecoder {
    pub fn new(body_max_bytes: u64) -> Self {
        Self {
            state: State::Size,
            body_max_bytes,
            declared_bytes: 0,
            chunk_bytes: 0,
            size_digits: 0,
            line_bytes: 0,
            trailer_bytes: 0,
            overhead_bytes: 0,
        }
    }

    /// Appends the body bytes found in `input` to `out`. After an error, which repeats, `out` holds
    /// what came before it and the connection must close.
    pub fn decode(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<ChunkProgress, HttpError> {
        let mut consumed = 0;
        while let Some(rest) = input.get(consumed..).filter(|rest| !rest.is_empty()) {
            match self.state {
                State::Done => break,
                State::Failed(error) => return Err(error),
                State::Data => consumed += self.take_data(rest, out),
                _ => {
                    if let Err(error) = self.step(rest[0]) {
                        self.state = State::Failed(error);
                        return Err(error);
                    }
                    consumed += 1;
                }
            }
        }
        match self.state {
            State::Failed(error) => Err(error),
            state => Ok(ChunkProgress {
                consumed,
                done: state == State::Done,
            }),
        }
    }

    fn take_data(&mut self, rest: &[u8], out: &mut Vec<u8>) -> usize {
        let wanted = usize::try_from(self.chunk_bytes).unwrap_or(usize::MAX);
        let taken = wanted.min(rest.len());
        out.extend_from_slice(&rest[..taken]);
        self.chunk_bytes -= taken as u64;
        if self.chunk_bytes == 0 {
            self.state = State::DataCarriageReturn;
        }
        taken
    }

    /// One byte of framing.
    fn step(&mut self, byte: u8) -> Result<(), HttpError> {
        self.count_overhead()?;
        self.state = match (self.state, byte) {
            (State::Size, _) => return self.size_byte(byte),
            (State::Extension, b'\r') => State::SizeLineFeed,
            (State::Extension, _) if is_text(byte) => State::Extension,
            (State::SizeLineFeed, b'\n') => self.after_size(),
            (State::DataCarriageReturn, b'\r') => State::DataLineFeed,
            (State::DataLineFeed, b'\n') => State::Size,
            (State::TrailerStart, b'\r') => State::EndLineFeed,
            (State::TrailerStart, _) if is_token(byte) => State::TrailerName,
            (State::TrailerName, b':') => State::TrailerValue,
            (State::TrailerName, _) if is_token(byte) => State::TrailerName,
            (State::TrailerValue, b'\r') => State::TrailerLineFeed,
            (State::TrailerValue, _) if is_text(byte) => State::TrailerValue,
            (State::TrailerLineFeed, b'\n') => State::TrailerStart,
            (State::EndLineFeed, b'\n') => State::Done,
            (state, _) => return Err(malformed(state)),
        };
        Ok(())
    }

    fn count_overhead(&mut self) -> Result<(), HttpError> {
        self.overhead_bytes += 1;
        let allowed = CHUNK_OVERHEAD_BASE_BYTES
            .saturating_add(self.declared_bytes.saturating_mul(CHUNK_OVERHEAD_PER_BYTE));
        if self.overhead_bytes > allowed {
            return Err(HttpError::BadRequest("more chunk framing than body"));
        }
        match self.state {
            State::Size | State::Extension | State::SizeLineFeed => {
                self.line_bytes += 1;
                if self.line_bytes > CHUNK_LINE_MAX_BYTES {
                    return Err(HttpError::BadRequest("chunk size line is too long"));
                }
            }
            State::DataCarriageReturn | State::DataLineFeed => self.line_bytes = 0,
            _ => {
                self.trailer_bytes += 1;
                if self.trailer_bytes > TRAILERS_MAX_BYTES {
                    return Err(HttpError::BadRequest("trailers are too long"));
                }
            }
        }
        Ok(())
    }

    fn size_byte(&mut self, byte: u8) -> Result<(), HttpError> {
        if let Some(digit) = char::from(byte).to_digit(16) {
            // 16 digits fill a u64 exactly, so the shift below loses nothing.
            if self.size_digits == 16 {
                return Err(HttpError::BadRequest("chunk size has too many digits"));
            }
            self.size_digits += 1;
            self.chunk_bytes = self.chunk_bytes << 4 | u64::from(digit);
            return Ok(());
        }
        if self.size_digits == 0 || !matches!(byte, b'\r' | b';') {
            return Err(malformed(State::Size));
        }
        self.declared_bytes = self
            .declared_bytes
            .checked_add(self.chunk_bytes)
            .filter(|declared| *declared <= self.body_max_bytes)
            .ok_or(HttpError::BodyTooLarge)?;
        self.size_digits = 0;
        self.state = if byte == b';' {
            State::Extension
        } else {
            State::SizeLineFeed
        };
        Ok(())
    }

    fn after_size(&self) -> State {
        if self.chunk_bytes == 0 {
            State::TrailerStart
        } else {
            State::Data
        }
    }
}

#[cold]
fn malformed(state: State) -> HttpError {
    HttpError::BadRequest(match state {
        State::Size | State::Extension | State::SizeLineFeed => "malformed chunk size line",
        State::DataCarriageReturn | State::DataLineFeed => "chunk data is not followed by CRLF",
        _ => "malformed trailer",
    })
}

/// What may stand in an extension or a trailer value.
fn is_text(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
#[path = "chunked_tests.rs"]
mod tests;
