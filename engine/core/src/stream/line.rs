//! A fork's way up its chain of sources, in steps that grow with the logarithm of the chain's length.
//!
//! Made once when a stream is forked (`shard::lineage`), stored with the fork, followed by every read of inherited bytes.
//!
//! A fork's *parent* is the stream that owns the byte before the fork point. Sources between the two, which were
//! forked further back or have no byte of their own below that point, own nothing that the fork can see. So along the
//! parents the starts only fall, and with them the record numbers and times at the starts: "the first that begins at or
//! before" can be searched for. For that each fork also knows one ancestor further up: the jump pointers of a
//! skew-binary list, a parent or the target of two equal jumps in a row.
//!
//! Invariants
//! - `I-LINE-1` Ids fall along parents and jumps: every walk ends.
//! - `I-LINE-2` What a fork inherits has times up to its `Mark::time_ms`; its own appends have that one or later ones.

use crate::codec::Reader;
use crate::model::StreamId;

/// Where a stream's own bytes begin: what a search asks about an ancestor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub id: StreamId,
    /// Parents above; 0 where a line begins.
    pub depth: u64,
    pub start: u64,
    pub start_records: u64,
    pub time_ms: u64,
}

/// What a fork knows about its ancestors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    pub parent: StreamId,
    pub depth: u64,
    pub time_ms: u64,
    pub jump: Mark,
}

impl Line {
    /// The line of a stream whose parent is `parent`, whose jump is `near`, whose jump is `far`. One that has none
    /// is its own jump.
    pub fn below(parent: Mark, near: Mark, far: Mark, time_ms: u64) -> Line {
        let equal = parent.depth.saturating_sub(near.depth) == near.depth.saturating_sub(far.depth);
        Line {
            parent: parent.id,
            depth: parent.depth.saturating_add(1),
            time_ms,
            jump: if equal { far } else { parent },
        }
    }

    /// The line of a fork that was stored without one: up its sources, one by one.
    pub fn unknown(source: StreamId, time_ms: u64) -> Line {
        Line {
            parent: source,
            depth: 0,
            time_ms,
            jump: Mark {
                id: source,
                depth: 0,
                start: 0,
                start_records: 0,
                time_ms: 0,
            },
        }
    }

    /// The next ancestor to look at, on the way to the first one that `owns`.
    pub fn next(&self, owns: impl Fn(&Mark) -> bool) -> StreamId {
        if owns(&self.jump) {
            self.parent
        } else {
            self.jump.id
        }
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        for value in [
            self.parent.0,
            self.depth,
            self.time_ms,
            self.jump.id.0,
            self.jump.depth,
            self.jump.start,
            self.jump.start_records,
            self.jump.time_ms,
        ] {
            out.extend_from_slice(&value.to_le_bytes());
        }
    }

    /// `None`: the bytes are no line of the stream `id`.
    pub fn decode(reader: &mut Reader<'_>, id: StreamId) -> Option<Line> {
        let line = Line {
            parent: StreamId(reader.u64()?),
            depth: reader.u64()?,
            time_ms: reader.u64()?,
            jump: Mark {
                id: StreamId(reader.u64()?),
                depth: reader.u64()?,
                start: reader.u64()?,
                start_records: reader.u64()?,
                time_ms: reader.u64()?,
            },
        };
        (line.parent.0 < id.0 && line.jump.id.0 < id.0).then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(depth: u64) -> Mark {
        Mark {
            id: StreamId(depth + 1),
            depth,
            start: depth * 10,
            start_records: depth,
            time_ms: depth,
        }
    }

    #[test]
    fn every_ancestor_is_few_steps_away() {
        const DEPTH: u64 = 20_000;
        let root = Line::unknown(StreamId(0), 0);
        let mut lines = vec![root];
        let jump_of = |lines: &[Line], at: Mark| match at.depth {
            0 => at,
            depth => lines[depth as usize].jump,
        };
        for depth in 1..=DEPTH {
            let parent = mark(depth - 1);
            let near = jump_of(&lines, parent);
            let far = jump_of(&lines, near);
            lines.push(Line::below(parent, near, far, depth));
        }
        let mut most = 0;
        for wanted in (0..=DEPTH).step_by(7) {
            let owns = |mark: &Mark| mark.start <= wanted * 10 + 5;
            let (mut at, mut steps) = (DEPTH, 0);
            while !owns(&mark(at)) {
                at = lines[at as usize].next(owns).0 - 1;
                steps += 1;
            }
            assert_eq!(at, wanted);
            most = most.max(steps);
        }
        assert!(most <= 3 * DEPTH.ilog2(), "{most} steps");
    }

    #[test]
    fn what_is_encoded_is_what_decodes() {
        let line = Line::below(mark(8), mark(7), mark(3), 99);
        let mut bytes = Vec::new();
        line.encode(&mut bytes);
        assert_eq!(
            Line::decode(&mut Reader::new(&bytes), StreamId(10)),
            Some(line)
        );
        let own = line.parent;
        assert_eq!(
            Line::decode(&mut Reader::new(&bytes), own),
            None,
            "a circle"
        );
    }
}
