//! A latency histogram with logarithmic buckets: fixed size, mergeable, at most 0.8 % relative error.
//!
//! Values are nanoseconds. Values below 128 have a bucket each; above, every power of two is cut
//! into 128 equal buckets. A percentile reports the upper edge of its bucket, never more than the
//! true maximum, so a figure is never better than what was measured.

use crate::json::Object;

const SUB_BITS: u32 = 7;
const SUB_COUNT: u64 = 1 << SUB_BITS;
const BUCKETS: usize = ((64 - SUB_BITS as usize) + 1) * SUB_COUNT as usize;

pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
    max: u64,
}

impl Histogram {
    pub fn new() -> Self {
        Self {
            counts: vec![0; BUCKETS],
            total: 0,
            sum: 0,
            max: 0,
        }
    }

    pub fn record(&mut self, nanoseconds: u64) {
        self.counts[bucket_of(nanoseconds)] += 1;
        self.total += 1;
        self.sum += u128::from(nanoseconds);
        self.max = self.max.max(nanoseconds);
    }

    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    pub fn count(&self) -> u64 {
        self.total
    }

    /// The upper edge of the bucket in which the value of rank `ten_thousandths / 10000` lies.
    pub fn quantile(&self, ten_thousandths: u64) -> u64 {
        if self.total == 0 {
            return 0;
        }
        let rank = (u128::from(self.total) * u128::from(ten_thousandths)).div_ceil(10_000) as u64;
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank.max(1) {
                return upper_edge(index).min(self.max);
            }
        }
        self.max
    }

    /// Upper edge and count of each non-empty bucket, rising.
    pub fn buckets(&self) -> Vec<(u64, u64)> {
        let filled = self
            .counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0);
        filled
            .map(|(index, count)| (upper_edge(index).min(self.max), *count))
            .collect()
    }

    /// `{"count":..,"p50":..,...}` in microseconds.
    pub fn to_json(&self) -> String {
        let micros = |nanoseconds: u64| nanoseconds as f64 / 1000.0;
        let mean = if self.total == 0 {
            0.0
        } else {
            self.sum as f64 / self.total as f64 / 1000.0
        };
        Object::new()
            .integer("count", self.total)
            .number("mean", mean)
            .number("p50", micros(self.quantile(5000)))
            .number("p90", micros(self.quantile(9000)))
            .number("p99", micros(self.quantile(9900)))
            .number("p99_9", micros(self.quantile(9990)))
            .number("max", micros(self.max))
            .finish()
    }
}

fn bucket_of(value: u64) -> usize {
    if value < SUB_COUNT {
        return value as usize;
    }
    let shift = 63 - value.leading_zeros() - SUB_BITS;
    let octave = u64::from(shift) + 1;
    (octave * SUB_COUNT + ((value >> shift) - SUB_COUNT)) as usize
}

fn upper_edge(index: usize) -> u64 {
    let index = index as u64;
    if index < SUB_COUNT {
        return index;
    }
    let shift = index / SUB_COUNT - 1;
    let low = (SUB_COUNT + index % SUB_COUNT) << shift;
    low + ((1u64 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_monotonic_and_tight() {
        let mut previous = 0;
        for value in (0..1_000_000u64)
            .step_by(37)
            .chain([u64::MAX / 2, u64::MAX])
        {
            let bucket = bucket_of(value);
            assert!(bucket >= previous && bucket < BUCKETS);
            previous = bucket;
            let edge = upper_edge(bucket);
            assert!(edge >= value, "edge {edge} below value {value}");
            assert!(
                edge - value <= value / 128,
                "edge {edge} too far above {value}"
            );
        }
    }

    #[test]
    fn quantiles_of_a_known_distribution() {
        let (mut low, mut high) = (Histogram::new(), Histogram::new());
        (1..=5000u64).for_each(|i| low.record(i * 1000));
        (5001..=10_000u64).for_each(|i| high.record(i * 1000));
        low.merge(&high);
        for (quantile, expected) in [(5000, 5_000_000), (9900, 9_900_000), (9990, 9_990_000)] {
            let found = low.quantile(quantile);
            assert!(
                found >= expected && found - expected <= expected / 100,
                "{found}"
            );
        }
        assert_eq!(low.quantile(10_000), 10_000_000);
        assert_eq!(low.count(), 10_000);
    }
}
