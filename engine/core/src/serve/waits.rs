//! Requests, bodies and events that wait for the disk: handed to the threads of `shard/loads`, looked at again when those
//! ring. The connection keeps its place in the order of answers meanwhile, and costs nothing.

use std::sync::Arc;

use crate::io::wanted::{self, Wanted};
use crate::serve::conn::{Conn, Phase};
use crate::serve::reactor::Reactor;
use crate::stream::handle::Stream;

impl Reactor {
    /// Has something fetched for a connection. `false`: a new request finds too much wanted already.
    pub fn fetch_for(&self, conn: &mut Conn, wanted: Wanted, under_way: bool) -> bool {
        let waiter = Some((self.number, conn.token));
        let taken = self.engine.submit_load(wanted, waiter, under_way);
        conn.loading = taken;
        if !taken {
            self.engine.metrics.loads_refused.add(1);
        }
        taken
    }

    /// The same for an answer that is under way: `true` if the last look lacked something, which is fetched now.
    pub fn waits_for_disk(&self, conn: &mut Conn) -> bool {
        match wanted::take_noted() {
            Some(wanted) => self.fetch_for(conn, wanted, true),
            None => false,
        }
    }

    /// Has others look at files after a body broke off.
    pub fn body_failed(&self, stream: &Arc<Stream>, position: u64, why: &str) {
        self.engine.body_failed(stream, position, why);
        if let Some(wanted) = wanted::take_noted() {
            self.engine.submit_load(wanted, None, true);
        }
    }

    /// Looks again where what was wanted has been fetched.
    pub fn deliver_loaded(&mut self) {
        for loaded in self.engine.loads.take_loaded(self.number) {
            let Some(mut conn) = self.take(loaded.conn) else {
                continue;
            };
            if !std::mem::take(&mut conn.loading) {
                self.put_back(conn);
                continue;
            }
            let mut told = std::mem::take(&mut conn.absent);
            told.retain(|(key, _)| *key != loaded.key);
            told.push((loaded.key.clone(), loaded.told.clone()));
            wanted::tell(told);
            match conn.phase {
                Phase::Waiting(_) => self.resume(&mut conn),
                Phase::LongPoll(_) => self.finish_poll(&mut conn, true),
                _ => {
                    conn.deadline_ms = self.now_ms + self.engine.config.send_timeout_ms;
                    self.flush(&mut conn);
                    wanted::tell(Vec::new());
                    self.put_back_flushed(conn);
                    continue;
                }
            }
            let absent = wanted::take_absent();
            if conn.loading {
                conn.absent = absent;
            }
            self.put_back(conn);
        }
    }
}
