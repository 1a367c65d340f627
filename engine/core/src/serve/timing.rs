//! `Server-Timing`: where the time of a write went, on request (`Millstream-Timing: 1`).
//!
//! Replies are rendered before their commit, so the header goes in with a fixed shape and its figures are filled
//! in when the gate opens. Milliseconds with three decimals, five digits before the point.

use crate::model::{Gate, Stage};
use crate::shard::times::CommitTimes;

const HEADER: &[u8] =
    b"Server-Timing: queue;dur=00000.000, wal;dur=00000.000, fsync;dur=00000.000, \
replicate;dur=00000.000, total;dur=00000.000\r\n";
const FIGURE: &[u8] = b"00000.000";
const FIGURE_MAX_US: u64 = 99_999_999;

/// A header in a connection's output whose figures are not known yet.
pub struct TimingSlot {
    /// Where the header begins in the output.
    pub at: usize,
    pub gate: Gate,
    pub received_us: u64,
}

/// Puts the header behind the status line of the reply that begins at `start`. `None`: there is no such line.
pub fn insert(output: &mut Vec<u8>, start: usize) -> Option<usize> {
    let line_end = memchr::memmem::find(output.get(start..)?, b"\r\n")?;
    let at = start + line_end + 2;
    output.splice(at..at, HEADER.iter().copied());
    Some(at)
}

/// Fills the figures in, in the order of the header.
pub fn fill(output: &mut [u8], slot: &TimingSlot, times: &CommitTimes, now_us: u64) {
    let (queue, wal, fsync) = match slot.gate.stage {
        Stage::Applied => (0, 0, 0),
        Stage::Written => (
            times.write_began_us.saturating_sub(slot.received_us),
            times.write_us(),
            0,
        ),
        Stage::Synced => (
            times.write_began_us.saturating_sub(slot.received_us),
            times.write_us(),
            times.sync_us(),
        ),
    };
    let total = now_us.saturating_sub(slot.received_us);
    let Some(header) = output.get_mut(slot.at..slot.at + HEADER.len()) else {
        return;
    };
    let mut from = 0;
    for figure_us in [queue, wal, fsync, 0, total] {
        let Some(found) = memchr::memmem::find(&header[from..], b"dur=") else {
            return;
        };
        from += found + b"dur=".len();
        put_figure(&mut header[from..from + FIGURE.len()], figure_us);
    }
}

fn put_figure(slot: &mut [u8], value_us: u64) {
    let mut rest = value_us.min(FIGURE_MAX_US);
    for byte in slot.iter_mut().rev().filter(|byte| **byte != b'.') {
        *byte = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_land_in_their_places() {
        let mut output = b"earlier HTTP/1.1 204 No Content\r\nDate: x\r\n\r\n".to_vec();
        let at = insert(&mut output, 8).expect("a status line");
        let slot = TimingSlot {
            at,
            gate: Gate::synced(7),
            received_us: 1_000,
        };
        let times = CommitTimes {
            write_began_us: 1_500,
            write_ended_us: 1_620,
            sync_began_us: 1_650,
            sync_ended_us: 204_650,
        };
        fill(&mut output, &slot, &times, 205_000);
        let text = String::from_utf8(output).expect("text");
        assert!(text.starts_with(
            "earlier HTTP/1.1 204 No Content\r\nServer-Timing: queue;dur=00000.500, "
        ));
        assert!(text.contains("wal;dur=00000.120, fsync;dur=00203.000, replicate;dur=00000.000, total;dur=00204.000\r\nDate"));
    }

    #[test]
    fn what_waited_for_nothing_says_so() {
        let mut output = b"HTTP/1.1 204 No Content\r\n\r\n".to_vec();
        let at = insert(&mut output, 0).expect("a status line");
        let slot = TimingSlot {
            at,
            gate: Gate::OPEN,
            received_us: 10,
        };
        fill(&mut output, &slot, &CommitTimes::default(), 35);
        let text = String::from_utf8(output).expect("text");
        assert!(text.contains("fsync;dur=00000.000") && text.contains("total;dur=00000.025"));
    }
}
