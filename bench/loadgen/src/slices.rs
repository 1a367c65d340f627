//! Latency by time: the measuring window cut into slices, one histogram each.
//!
//! Answers are recorded in the order in which they arrive, so only the current slice needs a full
//! histogram; a finished slice keeps its non-empty buckets. The caller can tell, from the wall-clock
//! time of the start, which slices fell into something that happened on the server.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::histogram::Histogram;
use crate::json::Object;

/// Upper edge in nanoseconds and count of each non-empty bucket.
type Buckets = Vec<(u64, u64)>;

pub struct Slices {
    width: Duration,
    start: Instant,
    current: usize,
    open: Histogram,
    done: Vec<Buckets>,
}

impl Slices {
    pub fn new(width: Duration) -> Self {
        let start = Instant::now();
        Self {
            width,
            start,
            current: 0,
            open: Histogram::new(),
            done: Vec::new(),
        }
    }

    pub fn starts_at(&mut self, start: Instant) {
        self.start = start;
    }

    pub fn record(&mut self, now: Instant, nanoseconds: u64) {
        if self.width.is_zero() {
            return;
        }
        let index = ((now - self.start).as_nanos() / self.width.as_nanos()) as usize;
        while self.current < index {
            self.close();
        }
        self.open.record(nanoseconds);
    }

    fn close(&mut self) {
        self.done.push(self.open.buckets());
        if self.open.count() > 0 {
            self.open = Histogram::new();
        }
        self.current += 1;
    }

    pub fn merge(&mut self, mut other: Self) {
        self.start = other.start;
        other.close();
        for (index, buckets) in other.done.into_iter().enumerate() {
            if index == self.done.len() {
                self.done.push(Buckets::new());
            }
            self.done[index].extend(buckets);
        }
    }

    /// `{"width_ms":..,"started_unix_ms":..,"slices":[[[edge_us,count],...],...]}`, or null.
    pub fn to_json(&self) -> String {
        if self.width.is_zero() {
            return "null".to_owned();
        }
        let started = SystemTime::now()
            .checked_sub(self.start.elapsed())
            .unwrap_or(UNIX_EPOCH);
        let started = started
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis();
        let slices: Vec<String> = self.done.iter().map(|buckets| text_of(buckets)).collect();
        Object::new()
            .number("width_ms", self.width.as_secs_f64() * 1000.0)
            .integer("started_unix_ms", started as u64)
            .raw("slices", &format!("[{}]", slices.join(",")))
            .finish()
    }
}

fn text_of(buckets: &[(u64, u64)]) -> String {
    let pairs: Vec<String> = buckets
        .iter()
        .map(|(edge, count)| format!("[{:.1},{count}]", *edge as f64 / 1000.0))
        .collect();
    format!("[{}]", pairs.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_fall_into_the_slice_of_their_arrival() {
        let start = Instant::now();
        let mut one = Slices::new(Duration::from_millis(100));
        one.starts_at(start);
        for (millis, latency) in [(10, 1), (90, 1), (350, 7), (399, 9)] {
            one.record(start + Duration::from_millis(millis), latency);
        }
        let mut total = Slices::new(Duration::from_millis(100));
        total.merge(one);
        assert_eq!(
            total.done,
            vec![vec![(1, 2)], vec![], vec![], vec![(7, 1), (9, 1)]]
        );
        assert!(
            total
                .to_json()
                .contains("[[[0.0,2]],[],[],[[0.0,1],[0.0,1]]]")
        );
    }
}
