//! Turns: what is much at once is done for a few milliseconds of each round, and who is not done goes on in the next one.
//!
//! Lists, each first come, first served. `onward` has those who could go on at once and let others go first: pipelined
//! requests, large bodies to be looked through, answers and events of many pieces. It is two lists, which are served in
//! turn: whoever has cost much of late waits for others of that kind, and keeps nobody else waiting. `waiting` has those whose front request
//! waits for the log: after each of its steps they are looked at in their order, each that there is room for.
//!
//! Invariants
//! - `I-TURN-1` Who goes on is on the list once (`Conn::goes_on`), costs no system call there, and the reactor does not
//!   sleep meanwhile.
//! - `I-TURN-2` Nobody's body is looked through who then has to wait for room, except by a race with another thread.

use std::collections::VecDeque;

use crate::limits::{COSTLY_BODY_BYTES, LOG_PATIENCE_MS};
use crate::serve::conn::{Conn, Phase};
use crate::serve::reactor::Reactor;
use crate::shard::batch::NotStaged;

/// How long those who are many at once (pipelined requests, readers of one stream, timers) are served before everybody
/// else is looked after, and how many of them between looks at the clock.
const TURN_US: u64 = 5_000;
const SERVED_PER_LOOK: usize = 4;
/// Who takes longer, of late, lets others go first when the turn is over, even with a single small request; who takes as
/// long as this is heavy. Of one time so much counts: that this thread itself was held up makes nobody heavy.
const COSTLY_US: u64 = 60;
const HEAVY_US: u64 = 300;
const COST_MAX_US: u64 = 400;
/// Some wait for more than the log's steps: they are looked at this often in any case.
const LOOK_AGAIN_MS: u64 = 20;

#[derive(Default)]
pub struct Turns {
    began_us: u64,
    over: bool,
    /// When the last one was served.
    served_us: u64,
    /// The light and the heavy.
    onward: [VecDeque<u64>; 2],
    waiting: VecDeque<Waits>,
    /// How many of them want room.
    for_room: usize,
    /// Those of them who have not been looked at since the log's last step.
    unseen: VecDeque<Waits>,
    /// How far the log was when they were looked at, and when that was new and when they were.
    log_at: (u64, u64, u64),
    moved_ms: u64,
    looked_ms: u64,
}

/// A connection whose front request waits, and about how much room that takes in the log.
struct Waits {
    token: u64,
    bytes: usize,
}

impl Turns {
    pub fn anybody_goes_on(&self) -> bool {
        self.going_on() > 0 || !self.unseen.is_empty()
    }

    pub fn anybody_waits(&self) -> bool {
        !self.waiting.is_empty() || !self.unseen.is_empty()
    }

    /// How many have let others go first.
    pub fn going_on(&self) -> usize {
        self.onward.iter().map(VecDeque::len).sum()
    }
}

impl Reactor {
    pub fn begin_turn(&mut self, now_us: u64) {
        self.turns.began_us = now_us;
        self.turns.served_us = now_us;
        self.turns.over = false;
    }

    /// Something was done for a connection, or whatever the token names: remembers how long that took, a quarter of it anew
    /// each time.
    pub fn note_cost(&mut self, token: u64) {
        let now_us = self.engine.doors.clock.monotonic_us();
        let before_us = std::mem::replace(&mut self.turns.served_us, now_us);
        let cost_us = now_us.saturating_sub(before_us).min(COST_MAX_US);
        if let Some(Some(conn)) = self.connections.get_mut((token & 0xffff_ffff) as usize)
            && conn.token == token
        {
            let cost_us = (3 * conn.cost_us + cost_us).div_ceil(4);
            // That it let others go first took no time: what it takes is not known yet.
            conn.cost_us = if conn.goes_on {
                cost_us.max(conn.cost_us)
            } else {
                cost_us
            };
        }
    }

    pub fn is_costly(&self, conn: &Conn) -> bool {
        conn.cost_us > COSTLY_US
    }

    /// Whether those who have been served already let others go first. They differ a thousandfold in what they cost, so it
    /// is time that counts; a client that does not pipeline and whose requests are cheap is never asked.
    pub fn turn_is_over(&mut self, served: usize) -> bool {
        if !self.turns.over && served.is_multiple_of(SERVED_PER_LOOK) {
            let now_us = self.engine.doors.clock.monotonic_us();
            self.turns.over = now_us.saturating_sub(self.turns.began_us) > TURN_US;
        }
        self.turns.over
    }

    /// The same for one of many pieces; where others wait to go on, each has one piece at a time.
    pub fn others_come_first(&mut self, pieces: usize) -> bool {
        pieces > 0 && self.turns.going_on() > 0 || self.turn_is_over(0)
    }

    /// Has a connection go on in the next round, behind those who have waited for that longer.
    pub fn go_on_later(&mut self, conn: &mut Conn) {
        if !std::mem::replace(&mut conn.goes_on, true) {
            if conn.left != conn.blocked_at {
                conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
            }
            let heavy = conn.cost_us >= HEAVY_US;
            self.turns.onward[usize::from(heavy)].push_back(conn.token);
        }
    }

    /// Goes on with the first `count` of those who let others go first, for one turn: a light one, a heavy one, and so on.
    pub fn go_on(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        self.begin_turn(self.engine.doors.clock.monotonic_us());
        for served in 0..count {
            // Before one is taken: whoever came when it is over would lose its place.
            if self.turn_is_over(0) {
                return;
            }
            let (first, other) = (served % 2, (served + 1) % 2);
            let next = self.turns.onward[first].pop_front();
            let Some(token) = next.or_else(|| self.turns.onward[other].pop_front()) else {
                return;
            };
            if let Some(mut conn) = self.take(token) {
                conn.goes_on = false;
                self.flush(&mut conn);
                self.put_back_flushed(conn);
            }
            self.note_cost(token);
        }
    }

    /// Has the front request of a connection wait for the log. `bytes`: room that it wants there, about.
    pub fn wait_for_commit(&mut self, conn: &mut Conn, bytes: usize) {
        conn.phase = Phase::Waiting(None);
        let token = conn.token;
        self.turns.for_room += usize::from(bytes > 0);
        self.turns.waiting.push_back(Waits { token, bytes });
    }

    /// Whether a request lets those go first who wait for room already. A small one does not: there is room beside them.
    pub fn comes_behind(&self, conn: &mut Conn, bytes: usize) -> bool {
        let behind = bytes >= COSTLY_BODY_BYTES
            && conn.waiting_since_ms == 0
            && self.turns.for_room > 0
            && !self.stopping;
        if behind {
            conn.waiting_since_ms = self.now_ms;
        }
        behind
    }

    /// Looks again at those who wait for the log if it has moved, in their order, until the turn is over.
    pub fn look_again(&mut self) {
        if !self.turns.anybody_waits() {
            return;
        }
        self.note_log();
        let mut looked = 0;
        while let Some(waits) = self.turns.unseen.pop_front() {
            if !self.stopping && !self.log_is_stuck() && !self.has_room(waits.bytes) {
                self.turns.waiting.push_back(waits);
                continue;
            }
            self.turns.for_room -= usize::from(waits.bytes > 0);
            if let Some(mut conn) = self.take(waits.token) {
                self.resume(&mut conn);
                self.put_back(conn);
            }
            looked += 1;
            let costly = waits.bytes >= COSTLY_BODY_BYTES;
            if self.turn_is_over(if costly { 0 } else { looked }) {
                return;
            }
        }
    }

    /// After a step of the log everybody is looked at from the first on, also those who did not fit before.
    fn note_log(&mut self) {
        let shard = &self.engine.shard;
        let batch = shard.open().map_or(u64::MAX, |open| open.number);
        let log_at = (batch, shard.written(), shard.synced());
        let turns = &mut self.turns;
        let moved = log_at != std::mem::replace(&mut turns.log_at, log_at);
        if moved {
            turns.moved_ms = self.now_ms;
        }
        if moved || self.stopping || self.now_ms - turns.looked_ms >= LOOK_AGAIN_MS {
            turns.looked_ms = self.now_ms;
            turns.waiting.append(&mut turns.unseen);
            std::mem::swap(&mut turns.waiting, &mut turns.unseen);
        }
    }

    fn log_is_stuck(&self) -> bool {
        self.now_ms - self.turns.moved_ms > LOG_PATIENCE_MS
    }

    /// Whether the open batch may take about so many bytes more; without any, whoever waits does so for something else.
    fn has_room(&self, bytes: usize) -> bool {
        let open = (bytes > 0).then(|| self.engine.shard.open());
        !open.is_some_and(|open| {
            open.is_ok_and(|open| open.admit(bytes, false) == Err(NotStaged::Wait))
        })
    }

    /// Whether a request that has to wait has done so in vain: while others are stored there will be room for it, too.
    pub fn waits_in_vain(&self, conn: &mut Conn, bytes: usize) -> bool {
        self.waited_too_long(conn) && (self.log_is_stuck() || self.has_room(bytes))
    }
}
