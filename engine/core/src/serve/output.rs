//! Sending: buffers, bodies and events by pieces. Nothing here blocks; what does not fit waits for the socket, and what
//! is not in memory for the disk (`waits`), holding a position and, as far as there is room (`budget`), bytes.

use std::os::fd::RawFd;

use crate::io::{check_at_hand, wanted};
use crate::limits::{LOAD_AHEAD_BYTES, TIGHT_OUTPUT_BYTES};
use crate::serve::budget::Kept;
use crate::serve::conn::{Conn, Phase, Sending};
use crate::serve::reactor::Reactor;
use crate::serve::sys;
use crate::shard::engine::Engine;

/// Pieces, and bytes of one piece, sent to one connection before others get their turn.
const PIECES_PER_TURN: usize = 4;
const PIECE_MAX_BYTES: usize = 256 * 1024;
/// How long bytes that were in the page cache are taken to be there still.
const AT_HAND_MS: u64 = 100;
/// Times that one connection may go on with its pipelined requests before others get their turn.
const STEPS_PER_TURN: usize = 4;
/// When a client is looked at first whose socket is full: how much it has taken by then.
const FIRST_LOOK_MS: u64 = 250;
/// How long a client may still send, which is thrown away, when it has been sent its last byte.
const LINGER_MS: u64 = 5_000;

enum Sent {
    /// Everything there was has left.
    All,
    /// The socket is full.
    Blocked,
    /// Others first; the next round goes on here.
    Later,
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
        for _ in 0..STEPS_PER_TURN {
            match self.send_output(conn) {
                Sent::All => {}
                Sent::Blocked | Sent::Later => return self.note_blocked(conn),
                Sent::Dead => {
                    conn.dead = true;
                    return;
                }
            }
            if conn.loading || conn.goes_on {
                return;
            }
            let next = match &conn.phase {
                Phase::Request | Phase::Chunked(_) if conn.paused => {
                    if self.turn_is_over(1) {
                        break;
                    }
                    self.unpause(conn);
                    Sent::All
                }
                Phase::Sending(_) if conn.gate_count() == 0 => self.send_body(conn),
                Phase::Handing(_) if conn.gate_count() == 0 => self.send_pieces(conn),
                Phase::Sse(_) => self.send_events(conn),
                Phase::Closing if conn.output_is_done() => {
                    if !conn.write_shut {
                        conn.write_shut = true;
                        sys::shutdown_write(conn.descriptor());
                        conn.deadline_ms = self.now_ms + LINGER_MS;
                    }
                    conn.dead |= conn.input_ended;
                    return;
                }
                _ => return,
            };
            match next {
                Sent::All if conn.has_sendable() || matches!(conn.phase, Phase::Closing) => {}
                Sent::All => return,
                Sent::Blocked => return self.note_blocked(conn),
                Sent::Later => break,
                Sent::Dead => {
                    conn.dead = true;
                    return;
                }
            }
        }
        self.go_on_later(conn);
    }

    /// A client has so long for every byte: that its socket is looked at again gives it no more. What it has taken by now is
    /// asked a little later, since most sockets have room again before that.
    fn note_blocked(&mut self, conn: &mut Conn) {
        conn.blocked = true;
        if conn.left != conn.blocked_at {
            conn.blocked_at = conn.left;
            conn.taken = None;
            conn.deadline_ms = self.now_ms + FIRST_LOOK_MS;
        }
    }

    /// Whether the client has taken something since it was looked at last, or was never looked at. A slow one does so for
    /// minutes before the kernel has room for more.
    pub fn still_takes(&self, conn: &mut Conn) -> bool {
        let taken = conn.left - sys::unacknowledged(conn.descriptor()).min(conn.left);
        let before = conn.taken.replace(taken);
        before.is_none_or(|before| taken > before)
    }

    fn send_output(&self, conn: &mut Conn) -> Sent {
        let more = match &conn.phase {
            Phase::Sending(_) | Phase::Handing(_) => true,
            // The first event follows its head.
            Phase::Sse(sse) => !sse.started,
            _ => false,
        };
        while conn.has_sendable() {
            let bytes = &conn.output[conn.sent..conn.sendable()];
            match sys::send(conn.descriptor(), bytes, more) {
                Ok(count) => {
                    conn.advance(count);
                    conn.left += count as u64;
                }
                Err(error) if sys::would_block(&error) => return Sent::Blocked,
                Err(_) => return Sent::Dead,
            }
        }
        Sent::All
    }

    /// Offers an answer whose body was copied to the socket at once. What that does not take is not kept, but read
    /// again when it does.
    pub fn send_or_forget(&self, conn: &mut Conn, mut body: Sending) {
        if matches!(self.send_output(conn), Sent::Dead) {
            conn.dead = true;
        }
        let suffix = usize::from(body.suffix.is_some());
        let unsent = conn.unsent();
        if conn.dead || unsent <= TIGHT_OUTPUT_BYTES {
            return;
        }
        let length = usize::try_from(body.end - body.position).unwrap_or(usize::MAX);
        let forgotten = unsent.min(length.saturating_add(suffix));
        conn.output.truncate(conn.output.len() - forgotten);
        conn.advance(0);
        body.position = body.end - (forgotten - suffix) as u64;
        conn.phase = Phase::Sending(Box::new(body));
    }

    /// Moves a large body by pieces, each the way that copies least. A body that comes up short breaks the
    /// connection: it never ends cleanly.
    fn send_body(&mut self, conn: &mut Conn) -> Sent {
        let descriptor = conn.descriptor();
        for pieces in 0..PIECES_PER_TURN {
            let Phase::Sending(sending) = &mut conn.phase else {
                return Sent::All;
            };
            if sending.position == sending.end {
                conn.output.extend(sending.suffix);
                return self.body_is_sent(conn);
            }
            if self.others_come_first(pieces) {
                return Sent::Later;
            }
            drop(wanted::take_noted());
            let moved = move_piece(
                &self.engine,
                &mut self.piece,
                descriptor,
                sending,
                self.now_ms,
            );
            match moved {
                Ok((0, _)) => {
                    let why = "its bytes end there";
                    self.body_failed(&sending.stream, sending.position, why);
                    return Sent::Dead;
                }
                Ok((sent, wanted)) => {
                    sending.position += sent as u64;
                    conn.left += sent as u64;
                    conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
                    if sent < wanted {
                        return Sent::Blocked;
                    }
                }
                Err(_) if wanted::is_noted() => {
                    self.waits_for_disk(conn);
                    return Sent::All;
                }
                Err(error) if sys::would_block(&error) => return Sent::Blocked,
                Err(error) => {
                    // A socket fails with codes of its own; what has none, or this one, is about the file.
                    if matches!(error.raw_os_error(), None | Some(libc::EIO)) {
                        let why = error.to_string();
                        self.body_failed(&sending.stream, sending.position, &why);
                    }
                    return Sent::Dead;
                }
            }
        }
        Sent::Later
    }

    /// Sends an answer of the pipeline from the buffers that it was written into.
    fn send_pieces(&mut self, conn: &mut Conn) -> Sent {
        let descriptor = conn.descriptor();
        for pieces in 0..PIECES_PER_TURN {
            if self.others_come_first(pieces) {
                return Sent::Later;
            }
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
                    conn.left += sent as u64;
                    conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
                    if sent < count {
                        return Sent::Blocked;
                    }
                }
                Err(error) if sys::would_block(&error) => return Sent::Blocked,
                Err(_) => return Sent::Dead,
            }
        }
        Sent::Later
    }

    fn body_is_sent(&mut self, conn: &mut Conn) -> Sent {
        conn.phase = Phase::Request;
        self.after_answer(conn);
        Sent::All
    }

    /// Sends what there is for a live reader, event by event.
    fn send_events(&mut self, conn: &mut Conn) -> Sent {
        for pieces in 0..PIECES_PER_TURN {
            if self.others_come_first(pieces) {
                return Sent::Later;
            }
            let Some(piece) = self.next_piece(conn) else {
                if let Phase::Sse(sse) = &conn.phase {
                    conn.deadline_ms = self.sse_deadline(sse);
                }
                return if conn.dead { Sent::Dead } else { Sent::All };
            };
            let descriptor = conn.descriptor();
            let Phase::Sse(sse) = &mut conn.phase else {
                return Sent::All;
            };
            let Some(under_way) = &mut sse.under_way else {
                return Sent::All;
            };
            let rest = &piece.bytes()[under_way.sent..];
            let sent = match sys::send(descriptor, rest, false) {
                Ok(count) => count,
                Err(error) if sys::would_block(&error) => 0,
                Err(_) => return Sent::Dead,
            };
            conn.left += sent as u64;
            if sent < rest.len() {
                under_way.sent += sent;
                // Without room it is rendered again when the socket is writable.
                if self.room_for_bodies() {
                    under_way.kept = Some(Kept::new(piece, &self.engine.metrics));
                }
                return Sent::Blocked;
            }
            if sse.piece_is_sent() {
                self.end_sse(conn);
                return Sent::All;
            }
        }
        Sent::Later
    }
}

/// Sends one piece: shared memory as it is, file bytes by the kernel, the rest through one hot buffer.
/// Returns how many bytes left and how many were offered.
fn move_piece(
    engine: &Engine,
    buffer: &mut [u8],
    socket: RawFd,
    sending: &mut Sending,
    now_ms: u64,
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
    if let Some(piece) = engine.in_file(&sending.stream, sending.position)? {
        let there = left.min(usize::try_from(piece.len).unwrap_or(usize::MAX));
        let count = there.min(PIECE_MAX_BYTES);
        let (to, seen_ms) = sending.at_hand;
        if sending.position + count as u64 > to || now_ms - seen_ms > AT_HAND_MS {
            let ahead = there.min(LOAD_AHEAD_BYTES);
            check_at_hand(&*piece.file, piece.file_position, ahead)?;
            sending.at_hand = (sending.position + ahead as u64, now_ms);
        }
        if let Some(sent) = piece.file.send_to(socket, piece.file_position, count) {
            return Ok((sent?, count));
        }
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
