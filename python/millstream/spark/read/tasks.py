"""From ranges of streams to tasks: sharing a limit, choosing the number of tasks, cutting and packing.

Where it sits: called by the readers on the driver; the places of cuts are looked up by the caller.
Pure: the same ranges and numbers give the same tasks, also when a batch is planned again.

Invariants:
- I-PLN-1  Every record of every range is in exactly one task, and a task's ranges are in stream order.
- I-PLN-2  Shares never add up to more than the limit, and a stream with a backlog is never starved
           for ever: what is left over goes to the largest remainders.
- I-PLN-3  Small ranges of many streams share tasks; the number of tasks follows bytes, not streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from millstream.client import ranges
from millstream.client.ranges import Place
from millstream.spark.read.offsets import byte_position

TASK_BYTES_MIN: Final = 4 * 1024 * 1024
"""Below this a task of its own costs more than it saves: starting one takes about 27 ms."""
SNAP_SHARE: Final = 0.1
"""A cut nearer than this part of a task to the end of a range moves to that end."""
RANGE_OVERHEAD_BYTES: Final = 256
"""What one more range costs besides its bytes, so that thousands of tiny ones spread evenly."""


class Range(ranges.Range):
    """Records of one incarnation of one stream, with what reading them is about to cost."""

    __slots__ = ()

    @property
    def bytes(self) -> int:
        """About how many; two places inside one append are zero apart."""
        return max(0, byte_position(self.end.offset) - byte_position(self.start.offset))

    @property
    def weight(self) -> int:
        return self.bytes + RANGE_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Cut:
    """A range is to be cut at this byte position of its stream, or behind it (`byte` None)."""

    index: int
    byte: int | None


def share(backlog: Mapping[str, int], limit: int) -> dict[str, int]:
    """How much of `limit` each stream may use: in proportion to its backlog, exactly `limit` in total."""
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    shares: dict[str, int] = {}
    remainders: list[tuple[int, str]] = []
    for name, size in backlog.items():
        shares[name], remainder = divmod(size * limit, total)
        remainders.append((-remainder, name))
    left = limit - sum(shares.values())
    for _, name in sorted(remainders)[:left]:
        shares[name] += 1
    return shares


def task_count(
    total_bytes: int, *, cores: int, min_partitions: int, max_bytes_per_partition: int
) -> int:
    """As many tasks as the bytes need and the cores can use; never more than that without need."""
    needed = -(-total_bytes // max_bytes_per_partition)
    useful = min(2 * cores, -(-total_bytes // TASK_BYTES_MIN))
    return max(1, needed, useful, min_partitions)


def choose_cuts(ranges: Sequence[Range], tasks: int) -> list[Cut]:
    """Where to cut the ranges, laid end to end, into `tasks` parts of equal weight."""
    total = sum(item.weight for item in ranges)
    target = total / tasks
    cuts: list[Cut] = []
    index, before = 0, 0
    for task in range(1, tasks):
        at = task * target
        while index < len(ranges) and before + ranges[index].weight <= at:
            before += ranges[index].weight
            index += 1
        if index == len(ranges):
            break
        inside = at - before
        left = ranges[index].weight - inside
        if inside <= target * SNAP_SHARE:
            cut = Cut(index - 1, None)
        elif left <= target * SNAP_SHARE:
            cut = Cut(index, None)
        else:
            cut = Cut(index, byte_position(ranges[index].start.offset) + int(inside))
        if cut.index >= 0 and (not cuts or cuts[-1] != cut):
            cuts.append(cut)
    return cuts


def apply_cuts(
    ranges: Sequence[Range], cuts: Sequence[Cut], places: Sequence[Place | None]
) -> list[list[Range]]:
    """The tasks. `places[i]` is what was found for `cuts[i]`; None behind a range."""
    tasks: list[list[Range]] = [[]]
    position = 0
    for index, item in enumerate(ranges):
        rest = item
        while position < len(cuts) and cuts[position].index == index:
            place = places[position]
            position += 1
            if place is None:
                if rest.start != rest.end:
                    tasks[-1].append(rest)
                rest = replace(rest, start=rest.end)
            elif rest.start.number < place.number < rest.end.number:
                tasks[-1].append(replace(rest, end=place))
                rest = replace(rest, start=place)
            else:
                # One large append spans the cut; it cannot be divided here.
                continue
            if tasks[-1]:
                tasks.append([])
        if rest.start != rest.end:
            tasks[-1].append(rest)
    return [task for task in tasks if task]
