//! Sending: buffers, bodies by pieces, shared frames. Nothing here blocks; what does not fit waits for the
//! socket, holding a position and not bytes.

use crate::report;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::serve::conn::{Conn, Phase, Sending};
use crate::serve::reactor::Reactor;
use crate::serve::sys;
use crate::shard::engine::Engine;

/// Pieces, and bytes of one piece, sent to one connection before others get their turn.
const PIECES_PER_TURN: usize = 4;
const PIECE_MAX_BYTES: usize = 256 * 1024;
/// Frames that one subscriber with a backlog gets before others get their turn.
const FRAMES_PER_TURN: usize = 8;

enum Sent {
    /// Everything there was has left.
    All,
    /// The socket is full, or the turn is over.
    Blocked,
    Dead,
}

impl Reactor {
    pub fn flush_all(&mut self) {
        let mut list = std::mem::take(&mut self.flush_list);
        for token in list.drain(..) {
            if let Some(mut conn) = self.take(token) {
                conn.in_flush_list = false;
                self.flush(&mut conn);
                self.put_back_flushed(conn);
            }
        }
        if self.flush_list.is_empty() {
            self.flush_list = list;
        }
    }

    /// After a flush only progress puts a connection on the list again, so that the round ends.
    pub fn put_back_flushed(&mut self, mut conn: Box<Conn>) {
        conn.in_flush_list = true;
        let token = conn.token;
        self.put_back(conn);
        if let Some(Some(conn)) = self.connections.get_mut((token & 0xffff_ffff) as usize)
            && conn.token == token
        {
            conn.in_flush_list = false;
        }
    }

    /// Sends what may leave now.
    pub fn flush(&mut self, conn: &mut Conn) {
        if conn.blocked || conn.dead {
            return;
        }
        let mut frames = 0;
        loop {
            match self.send_output(conn) {
                Sent::All => {}
                Sent::Blocked => return self.note_blocked(conn),
                Sent::Dead => {
                    conn.dead = true;
                    return;
                }
            }
            let next = match &conn.phase {
                Phase::Sending(_) if conn.gate_count() == 0 => self.send_body(conn),
                Phase::Handing(_) if conn.gate_count() == 0 => self.send_pieces(conn),
                Phase::Sse(_) => self.send_frame(conn, &mut frames),
                Phase::Closing if conn.output_is_done() => {
                    if !conn.write_shut {
                        conn.write_shut = true;
                        sys::shutdown_write(conn.descriptor());
                    }
                    conn.dead |= conn.input_ended;
                    return;
                }
                _ => return,
            };
            match next {
                Sent::All if conn.has_sendable() => {}
                Sent::All => match &conn.phase {
                    Phase::Sse(sse) if sse.frame.is_some() => {}
                    _ => return,
                },
                Sent::Blocked => return self.note_blocked(conn),
                Sent::Dead => {
                    conn.dead = true;
                    return;
                }
            }
        }
    }

    fn note_blocked(&mut self, conn: &mut Conn) {
        conn.blocked = true;
        conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
    }

    fn send_output(&self, conn: &mut Conn) -> Sent {
        let more = matches!(conn.phase, Phase::Sending(_) | Phase::Handing(_));
        while conn.has_sendable() {
            let bytes = &conn.output[conn.sent..conn.sendable()];
            match sys::send(conn.descriptor(), bytes, more) {
                Ok(count) => conn.advance(count),
                Err(error) if sys::would_block(&error) => return Sent::Blocked,
                Err(_) => return Sent::Dead,
            }
        }
        Sent::All
    }

    /// Moves a large body by pieces, each the way that copies least. A body that comes up short breaks the
    /// connection: it never ends cleanly.
    fn send_body(&mut self, conn: &mut Conn) -> Sent {
        let descriptor = conn.descriptor();
        for _ in 0..PIECES_PER_TURN {
            let Phase::Sending(sending) = &mut conn.phase else {
                return Sent::All;
            };
            if sending.position == sending.end {
                conn.output.extend(sending.suffix);
                return self.body_is_sent(conn);
            }
            let moved = move_piece(&self.engine, &mut self.piece, descriptor, sending);
            match moved {
                Ok((0, _)) => {
                    self.engine.metrics.read_errors.add(1);
                    report!("a body came up short at {}", sending.position);
                    self.engine.doubt_files(&sending.stream, sending.position);
                    return Sent::Dead;
                }
                Ok((sent, wanted)) => {
                    sending.position += sent as u64;
                    conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
                    if sent < wanted {
                        return Sent::Blocked;
                    }
                }
                Err(error) if sys::would_block(&error) => return Sent::Blocked,
                Err(error) => {
                    // A socket fails with codes of its own; what has none, or this one, is about the file.
                    if matches!(error.raw_os_error(), None | Some(libc::EIO)) {
                        self.engine.metrics.read_errors.add(1);
                        report!("a body could not be read: {error}");
                        self.engine.doubt_files(&sending.stream, sending.position);
                    }
                    return Sent::Dead;
                }
            }
        }
        // Others first; the socket is still writable, so the next round goes on here.
        Sent::Blocked
    }

    /// Sends an answer of the pipeline from the buffers that it was written into.
    fn send_pieces(&mut self, conn: &mut Conn) -> Sent {
        let descriptor = conn.descriptor();
        for _ in 0..PIECES_PER_TURN {
            let Phase::Handing(handing) = &mut conn.phase else {
                return Sent::All;
            };
            while handing
                .pieces
                .pop_front_if(|piece| piece.len() == handing.sent)
                .is_some()
            {
                handing.sent = 0;
            }
            let Some(piece) = handing.pieces.front() else {
                return self.body_is_sent(conn);
            };
            let count = (piece.len() - handing.sent).min(PIECE_MAX_BYTES);
            let bytes = &piece[handing.sent..handing.sent + count];
            let more = handing.pieces.len() > 1 || handing.sent + count < piece.len();
            match sys::send(descriptor, bytes, more) {
                Ok(sent) => {
                    handing.sent += sent;
                    conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
                    if sent < count {
                        return Sent::Blocked;
                    }
                }
                Err(error) if sys::would_block(&error) => return Sent::Blocked,
                Err(_) => return Sent::Dead,
            }
        }
        // Others first; the socket is still writable, so the next round goes on here.
        Sent::Blocked
    }

    fn body_is_sent(&mut self, conn: &mut Conn) -> Sent {
        conn.phase = Phase::Request;
        self.after_answer(conn);
        Sent::All
    }

    fn send_frame(&mut self, conn: &mut Conn, frames: &mut usize) -> Sent {
        loop {
            let Phase::Sse(sse) = &mut conn.phase else {
                return Sent::All;
            };
            if let Some((bytes, sent)) = sse.frame.take() {
                match sys::send(conn.descriptor(), &bytes[sent..], false) {
                    Ok(count) if sent + count < bytes.len() => {
                        self.keep_frame(conn, bytes, sent + count);
                        return Sent::Blocked;
                    }
                    Ok(_) => {}
                    Err(error) if sys::would_block(&error) => {
                        self.keep_frame(conn, bytes, sent);
                        return Sent::Blocked;
                    }
                    Err(_) => return Sent::Dead,
                }
            }
            if *frames >= FRAMES_PER_TURN {
                // Others first; the socket is still writable, so the next round goes on here.
                return Sent::Blocked;
            }
            *frames += 1;
            self.pump_sse(conn);
            if conn.dead {
                return Sent::Dead;
            }
            let Phase::Sse(sse) = &conn.phase else {
                return Sent::All;
            };
            conn.deadline_ms = self.sse_deadline(sse, false);
            if sse.frame.is_none() {
                return Sent::All;
            }
        }
    }

    fn keep_frame(&mut self, conn: &mut Conn, bytes: Arc<Vec<u8>>, sent: usize) {
        if let Phase::Sse(sse) = &mut conn.phase {
            sse.frame = Some((bytes, sent));
        }
    }
}

/// Sends one piece: shared memory as it is, file bytes by the kernel, the rest through one hot buffer.
/// Returns how many bytes left and how many were offered.
fn move_piece(
    engine: &Engine,
    buffer: &mut [u8],
    socket: RawFd,
    sending: &Sending,
) -> std::io::Result<(usize, usize)> {
    let left = usize::try_from(sending.end - sending.position).unwrap_or(usize::MAX);
    let more = sending.suffix.is_some();
    if let Some((shared, belongs)) = engine.shared(&sending.stream, sending.position)? {
        let count = (shared.bytes.len() - shared.from)
            .min(left)
            .min(PIECE_MAX_BYTES)
            .min(usize::try_from(belongs).unwrap_or(usize::MAX));
        let sent = sys::send(
            socket,
            &shared.bytes[shared.from..shared.from + count],
            more || count < left,
        )?;
        return Ok((sent, count));
    }
    if let Some(piece) = engine.in_file(&sending.stream, sending.position)?
        && let Some(file) = piece.file.raw_fd()
    {
        let count = left
            .min(usize::try_from(piece.len).unwrap_or(usize::MAX))
            .min(PIECE_MAX_BYTES);
        let sent = sys::send_file(socket, file, piece.file_position, count)?;
        return Ok((sent, count));
    }
    let room = buffer.len().min(left);
    let count = engine.fill(&sending.stream, sending.position, &mut buffer[..room])?;
    let sent = if count == 0 {
        0
    } else {
        sys::send(socket, &buffer[..count], more || count < left)?
    };
    Ok((sent, count))
}
