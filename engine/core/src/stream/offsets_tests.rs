//! What offsets mean on streams that were lost in part, created again, damaged or forked.

use super::*;
use crate::model::StreamId;

const RANGE: u64 = EPOCHS_PER_DIRECTORY;

fn memory_stream() -> StreamState {
    let mut state = StreamState::new(StreamId(100), Class::Memory, 0);
    state.push_bytes(b"0123456789", 1);
    state.publish_applied();
    state
}

#[test]
fn the_newest_loss_of_each_class_is_never_forgotten() {
    let mut losses = Losses::default();
    for (reach, count) in [
        (Class::Fsync, 1),
        (Class::Disk, 2),
        (Class::Ephemeral, LOSSES_MAX),
    ] {
        for _ in 0..count {
            losses.add(Loss {
                epoch: losses.newest[0] + 1,
                reach,
                reason: GapReason::Crash,
            });
        }
    }
    assert_eq!(losses.events().len(), LOSSES_MAX);
    assert_eq!(losses.newest[Class::Fsync as usize], 1);
    assert_eq!(losses.newest[Class::Memory as usize], 3);
    assert!(Losses::decode(&losses.encode()) == Some(losses));
}

#[test]
fn a_crash_turns_a_lost_position_into_a_gap_and_never_reuses_it() {
    let state = memory_stream();
    let mut losses = Losses::default();
    losses.add(Loss {
        epoch: 200,
        reach: Class::Memory,
        reason: GapReason::Crash,
    });
    assert_eq!(
        visible_tail(&state, &losses),
        Offset {
            epoch: 200,
            position: 10
        }
    );
    let lost = resolve(
        &state,
        &losses,
        Offset {
            epoch: 100,
            position: 14,
        },
    )
    .expect("a gap, no error");
    assert_eq!(lost.position, 10);
    assert!(
        lost.gap
            .is_some_and(|gap| gap.certain && gap.reason == GapReason::Crash)
    );
    let kept = resolve(
        &state,
        &losses,
        Offset {
            epoch: 100,
            position: 4,
        },
    )
    .expect("still there");
    assert_eq!(
        kept,
        ReadStart {
            position: 4,
            gap: None
        }
    );
    assert_eq!(
        offset_behind_bytes(&state, &losses, 10),
        (
            Offset {
                epoch: 100,
                position: 10
            },
            true
        )
    );
    assert!(gap_at(&state, &losses, 10).is_some_and(|gap| gap.to.epoch == 200));
    let edge = resolve(
        &state,
        &losses,
        Offset {
            epoch: 100,
            position: 10,
        },
    )
    .expect("perhaps a gap");
    assert!(edge.gap.is_some_and(|gap| !gap.certain));
}

#[test]
fn damage_is_passed_with_a_gap_to_an_offset_that_has_none() {
    let mut state = memory_stream();
    let mut losses = Losses::default();
    losses.add(Loss {
        epoch: 200,
        reach: Class::Memory,
        reason: GapReason::Crash,
    });
    state.logged.later_epochs.push((200, 10));
    state.push_bytes(b"abcdef", 1);
    state.publish_applied();
    let at = |epoch, position| Offset { epoch, position };
    let start = |position| ReadStart {
        position,
        gap: None,
    };
    let skip = |position, asked, end| {
        let passed = behind_damage(&state, &losses, start(position), asked, end);
        let gap = passed.gap.expect("a gap");
        assert!(gap.certain && gap.reason == GapReason::Corruption);
        assert_eq!(passed.position, end);
        let resumed = resolve(&state, &losses, gap.to).expect("it was given");
        assert_eq!(resumed, start(end), "the end of a gap is no gap");
        (gap.from, gap.to)
    };
    // Inside an epoch, up to the next one, into it, and to the tail.
    assert_eq!(skip(0, None, 4), (at(100, 0), at(100, 4)));
    assert_eq!(
        skip(4, Some(at(100, 6)), 10),
        (at(100, 6), at(200, 10)),
        "what was asked for is where the gap begins"
    );
    assert_eq!(skip(4, None, 13), (at(100, 4), at(200, 13)));
    assert_eq!(skip(12, None, 16), (at(200, 12), at(200, 16)));
}

#[test]
fn other_incarnations_and_made_up_offsets() {
    let state = memory_stream();
    let losses = Losses::default();
    let old = resolve(
        &state,
        &losses,
        Offset {
            epoch: 50,
            position: 3,
        },
    )
    .expect("recreated");
    assert!(
        old.position == 0
            && old
                .gap
                .is_some_and(|gap| gap.reason == GapReason::Recreated)
    );
    for bad in [
        Offset {
            epoch: 101,
            position: 0,
        },
        Offset {
            epoch: 100,
            position: 11,
        },
        Offset {
            epoch: 0,
            position: 3,
        },
    ] {
        assert!(resolve(&state, &losses, bad).is_err(), "{bad}");
    }
}

/// A fork of `source` at `anchor`, with `own` bytes.
fn fork_of(id: u64, source: &StreamState, losses: &Losses, anchor: u64, own: &[u8]) -> StreamState {
    let mut state = StreamState::new(StreamId(id), source.class, 0);
    inherit_epochs(&mut state, source, losses, anchor, None);
    (state.logged.start, state.logged.tail) = (anchor, anchor);
    state.hot = crate::stream::hot::Hot::starting_at(anchor);
    if !own.is_empty() {
        state.push_bytes(own, 1);
    }
    state.publish_applied();
    state
}

fn lost_at(epoch: u64) -> Loss {
    Loss {
        epoch,
        reach: Class::Memory,
        reason: GapReason::Crash,
    }
}

fn at(epoch: u64, position: u64) -> Offset {
    Offset { epoch, position }
}

#[test]
fn a_fork_is_where_its_source_was_until_it_has_bytes() {
    let losses = Losses::default();
    let source = memory_stream();
    let empty = fork_of(300, &source, &losses, 10, b"");
    assert_eq!(visible_tail(&empty, &losses), at(100, 10));
    assert_eq!(losses.tail_epoch(&empty), 300, "where the next byte lies");
    let of_empty = fork_of(400, &empty, &losses, 10, b"");
    assert_eq!(visible_tail(&of_empty, &losses), at(100, 10));
    let fork = fork_of(300, &source, &losses, 10, b"abc");
    assert_eq!(visible_tail(&fork, &losses), at(300, 13));
    for seam in [at(100, 10), at(300, 10)] {
        let start = resolve(&fork, &losses, seam).expect("the seam");
        assert_eq!((start.position, start.gap), (10, None));
    }
    assert_eq!(gap_at(&fork, &losses, 10), None);
    assert_eq!(loss_after(&fork, 0), u64::MAX, "reads go on across it");
    assert_eq!(epoch_end_after(&fork, 0), 10, "names do not");
    assert!(resolve(&fork, &losses, at(300, 9)).is_err());
}

#[test]
fn offsets_of_another_fork_lead_to_the_fork_point_or_to_the_start() {
    let losses = Losses::default();
    let source = memory_stream();
    let fork = fork_of(300, &source, &losses, 10, b"abc");
    let gap = |offset| {
        let start = resolve(&fork, &losses, offset).expect("a gap");
        let gap = start.gap.expect("a gap");
        assert!(gap.certain && gap.reason == GapReason::Recreated);
        assert_eq!(gap.to.position, start.position);
        let resumed = resolve(&fork, &losses, gap.to).expect("it was given");
        assert_eq!(resumed.gap, None, "the end of a gap is no gap");
        gap.to
    };
    assert_eq!(
        gap(at(100, 13)),
        at(300, 10),
        "of the source, or of a fork further on"
    );
    assert_eq!(gap(at(200, 13)), at(100, 0), "of an earlier fork");
}

#[test]
fn what_began_with_a_loss_is_not_inherited_by_name() {
    let mut losses = Losses::default();
    let mut source = memory_stream();
    losses.add(lost_at(200));
    source.logged.later_epochs.push((200, 10));
    source.push_bytes(b"0123456789", 1);
    source.publish_applied();
    let fork = fork_of(300, &source, &losses, 20, b"");
    assert_eq!(fork.later_epochs, [(300, 10)]);
    assert_eq!(visible_tail(&fork, &losses), at(300, 20));
    let start = resolve(&fork, &losses, at(200, 20)).expect("a gap");
    assert_eq!(start.gap.map(|gap| gap.reason), Some(GapReason::Recreated));
    // Before the loss it is all the same, and what the fork itself loses is a gap at the seam.
    let before = fork_of(300, &source, &losses, 10, b"");
    assert_eq!(visible_tail(&before, &losses), at(100, 10));
    losses.add(lost_at(400));
    let start = resolve(&before, &losses, at(100, 10)).expect("a gap");
    let gap = start.gap.expect("something may be lost");
    assert_eq!(
        (gap.from, gap.to, gap.certain),
        (at(100, 10), at(400, 10), false)
    );
}

#[test]
fn a_long_chain_knows_a_bounded_number_of_epochs() {
    let losses = Losses::default();
    let mut state = memory_stream();
    for level in 1..=100 {
        let (id, anchor) = (100 + level, state.tail);
        let name = visible_tail(&state, &losses);
        let empty = fork_of(id, &state, &losses, anchor, b"");
        assert_eq!(visible_tail(&empty, &losses), name);
        state = fork_of(id, &state, &losses, anchor, b"x");
        assert!(state.later_epochs.len() <= FORK_EPOCHS_MAX);
    }
    // The oldest known ancestor's epoch names all that it had.
    let start = resolve(&state, &losses, at(state.first_epoch, 10)).expect("inherited");
    assert_eq!((start.position, start.gap), (10, None));
}

#[test]
fn a_fork_of_an_older_directory_goes_on_as_it_was() {
    let losses = Losses::default();
    let mut old = StreamState::new(StreamId(300), Class::Memory, 0);
    (old.logged.first_epoch, old.logged.start, old.logged.tail) = (100, 10, 10);
    old.hot = crate::stream::hot::Hot::starting_at(10);
    old.push_bytes(b"abc", 1);
    old.publish_applied();
    assert_eq!(visible_tail(&old, &losses), at(100, 13));
    let start = resolve(&old, &losses, at(100, 10)).expect("there");
    assert_eq!((start.position, start.gap), (10, None));
}

#[test]
fn an_epoch_of_the_time_that_a_restore_lost_is_a_gap() {
    let mut losses = Losses::default();
    for (epoch, reach, reason) in [
        (50, Class::Ephemeral, GapReason::Crash),
        (150, Class::Memory, GapReason::Crash),
        (RANGE + 5, Class::Object, GapReason::Restore),
        (RANGE + 9, Class::Memory, GapReason::Crash),
    ] {
        losses.add(Loss {
            epoch,
            reach,
            reason,
        });
    }
    let ten_bytes = || {
        let mut state = StreamState::new(StreamId(100), Class::Fsync, 0);
        state.push_bytes(b"0123456789", 1);
        state.publish_applied();
        state
    };
    let (fsync, mut closed) = (ten_bytes(), ten_bytes());
    closed.logged.closed = true;
    let at = |epoch, position| Offset { epoch, position };
    for (state, behind) in [(&fsync, at(RANGE + 5, 10)), (&closed, at(100, 10))] {
        let start = at(100, 0);
        // Before what was backed up there was another life of the path: it is read from its start.
        for (position, to, certain) in [
            (0, start, false),
            (4, start, true),
            (10, behind, false),
            (14, behind, true),
        ] {
            let lost = resolve(state, &losses, at(RANGE - 1, position)).expect("a gap");
            let gap = lost.gap.expect("a gap");
            assert_eq!((lost.position, gap.to), (to.position, to));
            assert_eq!((gap.reason, gap.certain), (GapReason::Restore, certain));
        }
        assert!(has_epoch(state, &losses, 100) && !has_epoch(state, &losses, RANGE - 1));
        assert!(resolve(state, &losses, at(151, 3)).is_ok());
        // The path may have been made again as a fork of a stream that the backup knows: that has an older epoch.
        for epoch in [101, 149] {
            let lost = resolve(state, &losses, at(epoch, 3)).expect("a gap");
            let gap = lost.gap.expect("a gap");
            assert_eq!((gap.reason, gap.to), (GapReason::Restore, start));
        }
        // Of no range that there was, or of one that nobody has begun.
        for epoch in [RANGE, RANGE + 4, RANGE + 10, 2 * RANGE + 1] {
            let refusal = resolve(state, &losses, at(epoch, 10)).expect_err("made up");
            assert_eq!(refusal.code, ErrorCode::OffsetInvalid, "{epoch}");
        }
    }
    let mut later = StreamState::new(StreamId(RANGE + 7), Class::Fsync, 0);
    later.publish_applied();
    let other_life = resolve(&later, &losses, at(RANGE - 1, 4)).expect("a gap");
    assert!(
        other_life
            .gap
            .is_some_and(|gap| gap.reason == GapReason::Recreated)
    );
}

#[test]
fn a_restore_is_told_also_where_a_later_start_has_begun_another_epoch() {
    let mut losses = Losses::default();
    for (epoch, reach, reason) in [
        (RANGE + 5, Class::Object, GapReason::Restore),
        (RANGE + 6, Class::Ephemeral, GapReason::Crash),
        (RANGE + 7, Class::Ephemeral, GapReason::Crash),
    ] {
        losses.add(Loss {
            epoch,
            reach,
            reason,
        });
    }
    let mut state = StreamState::new(StreamId(100), Class::Ephemeral, 0);
    state.publish_applied();
    let reason = |epoch| {
        let start = resolve(&state, &losses, Offset { epoch, position: 4 });
        start.expect("a gap").gap.expect("a gap").reason
    };
    assert_eq!(reason(100), GapReason::Restore);
    assert_eq!(reason(RANGE + 5), GapReason::Crash);
    assert_eq!(
        gap_at(&state, &losses, 0).map(|gap| gap.reason),
        Some(GapReason::Restore)
    );
}

#[test]
fn of_several_losses_at_one_place_the_gap_leads_to_the_bytes_behind_the_last() {
    for last in [GapReason::Crash, GapReason::Restore] {
        let mut state = memory_stream();
        let mut losses = Losses::default();
        for (epoch, reason) in [
            (200, GapReason::Crash),
            (300, last),
            (400, GapReason::Crash),
        ] {
            losses.add(Loss {
                epoch,
                reach: Class::Memory,
                reason,
            });
        }
        let asked = Offset {
            epoch: 100,
            position: 10,
        };
        // What was written in the first two is lost, but their names are known; the third has none yet, and then has.
        state.logged.later_epochs.push((200, 10));
        state.logged.later_epochs.push((300, 10));
        for _ in 0..2 {
            let start = resolve(&state, &losses, asked).expect("a place");
            let gap = start.gap.expect("a gap");
            assert_eq!(
                (start.position, gap.to.position, gap.to.epoch),
                (10, 10, 400)
            );
            assert_eq!(gap.reason, last);
            assert_eq!(gap_at(&state, &losses, 10).map(|gap| gap.to), Some(gap.to));
            assert_eq!(
                resolve(&state, &losses, gap.to).expect("a place"),
                ReadStart::at(10)
            );
            let lost = Offset {
                epoch: 250,
                ..asked
            };
            losses.add(Loss {
                epoch: 250,
                reach: Class::Memory,
                reason: GapReason::Crash,
            });
            let start = resolve(&state, &losses, lost).expect("a place");
            assert_eq!(start.gap.expect("a gap").to, gap.to);
            state.logged.later_epochs.push((400, 10));
            state.push_bytes(b"new", 1);
            state.publish_applied();
        }
    }
}
