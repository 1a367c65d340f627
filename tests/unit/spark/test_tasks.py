"""Sharing limits and dividing ranges into tasks: nothing lost, nothing twice, nothing starved."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from millstream.spark.read.tasks import (
    TASK_BYTES_MIN,
    Cut,
    Place,
    Range,
    apply_cuts,
    choose_cuts,
    share,
    task_count,
)

MIB = 1 << 20
RECORD_BYTES = 100


def place(number: int, per_append: int = 1) -> Place:
    """The place of a record in a stream of 100-byte records, `per_append` of them together."""
    append = number // per_append * per_append
    return Place(f"{1:016d}_{append * RECORD_BYTES:016d}", number)


def made(name: str, start: int, end: int, per_append: int = 1) -> Range:
    return Range(name, "1", place(start, per_append), place(end, per_append))


def at_or_after(cut: Cut, per_append: int = 1) -> Place | None:
    """What the server would answer to a look-up by byte."""
    if cut.byte is None:
        return None
    append = RECORD_BYTES * per_append
    return place(-(-cut.byte // append) * per_append, per_append)


def divided(ranges: list[Range], tasks: int, per_append: int = 1) -> list[list[Range]]:
    cuts = choose_cuts(ranges, tasks)
    return apply_cuts(ranges, cuts, [at_or_after(cut, per_append) for cut in cuts])


backlogs = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 10_000))


@given(backlogs, st.integers(1, 20_000))
def test_shares_add_up_and_follow_the_backlog(backlog: dict[str, int], limit: int) -> None:
    shares = share(backlog, limit)
    total = sum(backlog.values())
    assert sum(shares.values()) == min(limit, total)
    for name, size in backlog.items():
        assert 0 <= shares[name] <= size
        if total > limit:
            assert abs(shares[name] - size * limit / total) <= 1


def test_a_small_backlog_gets_its_turn() -> None:
    left = {"large": 1_000_000, "small": 3}
    turns = 0
    while left["small"]:
        for name, count in share(left, 1000).items():
            left[name] -= count
        turns += 1
        assert turns <= 1001, "starved"


def test_the_number_of_tasks_follows_bytes_and_cores() -> None:
    def count(total: int, minimum: int = 1) -> int:
        return task_count(total, cores=2, min_partitions=minimum, max_bytes_per_partition=128 * MIB)

    assert count(0) == 1
    assert count(1000) == 1
    assert count(TASK_BYTES_MIN + 1) == 2
    assert count(100 * MIB) == 4
    assert count(1024 * MIB) == 8
    assert count(1000, minimum=6) == 6


spans = st.tuples(st.integers(0, 5000), st.integers(1, 5000))


@given(st.lists(spans, min_size=1, max_size=40), st.integers(1, 12), st.sampled_from([1, 7, 100]))
def test_every_record_is_in_exactly_one_task(
    spans: list[tuple[int, int]], tasks: int, per_append: int
) -> None:
    ranges = [
        made(f"s{index:03d}", start, start + length, per_append)
        for index, (start, length) in enumerate(spans)
    ]
    result = divided(ranges, tasks, per_append)
    assert len(result) <= tasks
    assert all(result)
    pieces = [piece for task in result for piece in task]
    assert [piece.stream for piece in pieces] == sorted(piece.stream for piece in pieces)
    for item in ranges:
        mine = [piece for piece in pieces if piece.stream == item.stream]
        assert mine[0].start == item.start
        assert mine[-1].end == item.end
        for before, after in itertools.pairwise(mine):
            assert before.end == after.start
        assert all(piece.start.number < piece.end.number for piece in mine)


def test_tasks_are_of_equal_size() -> None:
    result = divided([made("a", 0, 100_000), made("b", 0, 300_000)], 8)
    sizes = [sum(piece.bytes for piece in task) for task in result]
    assert len(sizes) == 8
    assert max(sizes) < 1.2 * sum(sizes) / 8


def test_many_small_ranges_are_packed() -> None:
    ranges = [made(f"chat/{index:05d}", 0, 3) for index in range(10_000)]
    result = divided(ranges, 4)
    assert len(result) == 4
    assert [len(task) for task in result] == [2500] * 4


def test_one_large_append_is_not_cut() -> None:
    result = divided([made("a", 0, 1000, 1000), made("b", 0, 1000, 1000)], 4, 1000)
    assert [[(p.stream, p.start.number, p.end.number) for p in task] for task in result] == [
        [("a", 0, 1000)],
        [("b", 0, 1000)],
    ]


def test_a_plan_is_a_function_of_its_ranges() -> None:
    ranges = [made("a", 5, 77_777), made("b", 0, 12), made("c", 9, 40_000)]
    assert divided(ranges, 5) == divided(list(ranges), 5)
