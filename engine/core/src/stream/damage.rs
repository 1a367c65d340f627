//! Damaged ranges of a stream: which of its bytes cannot be read back, as positions.
//!
//! Pure arithmetic over the list that a stream's state and its catalog entry carry; what makes a range damaged is
//! decided above. Positions outlive the files: a range stays damaged wherever its bytes are moved to.
//!
//! Invariants
//! - `I-DAMAGE-1` Ranges are sorted, disjoint, not empty, and never touch: whoever passes one stands on readable
//!   bytes or at the end.
//! - `I-DAMAGE-2` Ranges begin and end where an append does, so both ends are offsets that a reader may have.

use crate::model::Extent;

/// First position, and the first one behind it.
pub type Range = (u64, u64);

/// Adds a range and melts it with those it overlaps or touches. Returns whether that made a difference.
pub fn insert(ranges: &mut Vec<Range>, start: u64, end: u64) -> bool {
    if end <= start {
        return false;
    }
    let from = ranges.partition_point(|range| range.1 < start);
    let upto = ranges.partition_point(|range| range.0 <= end);
    if let [(known_start, known_end)] = ranges[from..upto]
        && known_start <= start
        && end <= known_end
    {
        return false;
    }
    let melted = ranges[from..upto].iter().fold((start, end), |sum, range| {
        (sum.0.min(range.0), sum.1.max(range.1))
    });
    ranges.splice(from..upto, [melted]);
    true
}

/// Keeps the list within its bound: the two ranges with the least between them become one, bytes between included.
pub fn bound(ranges: &mut Vec<Range>, count_max: usize) {
    while ranges.len() > count_max.max(1) {
        let nearest = (1..ranges.len())
            .min_by_key(|at| ranges[*at].0 - ranges[*at - 1].1)
            .unwrap_or(1);
        ranges[nearest - 1].1 = ranges[nearest].1;
        ranges.remove(nearest);
    }
}

/// The range that the byte at `position` is in.
pub fn at(ranges: &[Range], position: u64) -> Option<Range> {
    let number = ranges.partition_point(|range| range.1 <= position);
    ranges
        .get(number)
        .copied()
        .filter(|range| range.0 <= position)
}

/// Where the next range begins, at `position` or behind it.
pub fn next_start(ranges: &[Range], position: u64) -> Option<u64> {
    let number = ranges.partition_point(|range| range.0 < position);
    ranges.get(number).map(|range| range.0)
}

/// Whether a range begins or ends here: then an append does, too.
pub fn is_edge(ranges: &[Range], position: u64) -> bool {
    ranges
        .iter()
        .any(|range| range.0 == position || range.1 == position)
}

/// Whether nothing of an extent can be read, so that its files need not even be there.
pub fn covers(ranges: &[Range], extent: &Extent) -> bool {
    at(ranges, extent.start).is_some_and(|range| extent.end() <= range.1)
}

/// The ranges as far as they lie below `end`: of a tail that does not last, damage does not last either.
pub fn below(ranges: &[Range], end: u64) -> impl Iterator<Item = Range> + '_ {
    ranges
        .iter()
        .take_while(move |range| range.0 < end)
        .map(move |range| (range.0, range.1.min(end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::FileRef;
    use proptest::prelude::*;

    #[test]
    fn ranges_melt_and_stay_sorted() {
        let mut ranges = Vec::new();
        assert!(insert(&mut ranges, 10, 20));
        assert!(insert(&mut ranges, 40, 50));
        assert!(!insert(&mut ranges, 12, 20), "known already");
        assert!(!insert(&mut ranges, 7, 7), "nothing");
        assert!(insert(&mut ranges, 20, 25), "touching ranges are one");
        assert_eq!(ranges, [(10, 25), (40, 50)]);
        assert!(insert(&mut ranges, 24, 45));
        assert_eq!(ranges, [(10, 50)]);
        assert!(insert(&mut ranges, 0, 5));
        assert_eq!(ranges, [(0, 5), (10, 50)]);
    }

    #[test]
    fn positions_inside_at_and_beside() {
        let ranges = [(10, 20), (30, 40)];
        assert_eq!(at(&ranges, 9), None);
        assert_eq!(at(&ranges, 10), Some((10, 20)));
        assert_eq!(at(&ranges, 19), Some((10, 20)));
        assert_eq!(at(&ranges, 20), None);
        assert_eq!(next_start(&ranges, 10), Some(10));
        assert_eq!(next_start(&ranges, 11), Some(30));
        assert_eq!(next_start(&ranges, 31), None);
        assert!(is_edge(&ranges, 20) && is_edge(&ranges, 30) && !is_edge(&ranges, 15));
        assert_eq!(below(&ranges, 35).collect::<Vec<_>>(), [(10, 20), (30, 35)]);
        assert_eq!(below(&ranges, 10).count(), 0);
    }

    #[test]
    fn too_many_ranges_melt_where_least_is_lost() {
        let mut ranges = vec![(0, 10), (20, 30), (32, 40), (90, 95)];
        bound(&mut ranges, 4);
        assert_eq!(ranges.len(), 4);
        bound(&mut ranges, 2);
        assert_eq!(ranges, [(0, 40), (90, 95)]);
    }

    #[test]
    fn an_extent_is_covered_only_as_a_whole() {
        let extent = |start, len| Extent {
            start,
            len,
            file: FileRef::Pack { number: 0 },
            file_position: 0,
            index_position: 0,
            index_count: 1,
            base_records: 0,
        };
        let ranges = [(10, 20)];
        assert!(covers(&ranges, &extent(10, 10)) && covers(&ranges, &extent(12, 3)));
        assert!(!covers(&ranges, &extent(9, 5)) && !covers(&ranges, &extent(15, 6)));
    }

    proptest! {
        /// Against a list of booleans, one per byte.
        #[test]
        fn a_bitmap_says_the_same(parts in prop::collection::vec((0u64..60, 0u64..12), 0..30)) {
            let mut ranges = Vec::new();
            let mut bits = [false; 80];
            for (start, len) in parts {
                let fresh = (start..start + len).any(|position| !bits[position as usize]);
                prop_assert_eq!(insert(&mut ranges, start, start + len), fresh);
                (start..start + len).for_each(|position| bits[position as usize] = true);
                prop_assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
                prop_assert!(ranges.iter().all(|range| range.0 < range.1));
            }
            for position in 0..79u64 {
                prop_assert_eq!(at(&ranges, position).is_some(), bits[position as usize]);
                let next = (position..79).find(|next| {
                    bits[*next as usize] && (*next == 0 || !bits[*next as usize - 1])
                });
                prop_assert_eq!(next_start(&ranges, position), next);
            }
        }
    }
}
