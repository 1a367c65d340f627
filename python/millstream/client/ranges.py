"""Ranges of streams: what a read asks for, what is left of it after a window, and whether all of it came.

Where it sits: without I/O, below `aio/ranges.py`, which reads them for `read_arrow` and for the tasks of the Spark connector.

Invariants:
- I-RNG-1  A window moves forward, or it is `ProtocolError`: a read ends.
- I-RNG-2  As many records come as were planned, or whoever reads is told what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from millstream.errors import ProtocolError

if TYPE_CHECKING:
    from millstream.client.pipeline_read import Next, StreamTail, Window
    from millstream.types import Gap

GONE_CODES: Final = frozenset({"stream_not_found", "stream_recreated", "stream_gone"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where an append begins (or the stream ends), and the number of the next record."""

    offset: str
    number: int


@dataclass(frozen=True, slots=True)
class Range:
    """Records of one incarnation of one stream, from a place up to another."""

    stream: str
    incarnation: str
    start: Place
    end: Place


R = TypeVar("R", bound=Range)


class Losses(Protocol):
    """What a reader does about records that it cannot get: it raises, or returns to go on without them."""

    def gap(self, stream: str, gap: Gap) -> None:
        """The server reports a gap."""

    def unread(self, stream: str, first: int, behind: int) -> None:
        """The stream is gone; records `first` up to `behind` were still to be read."""

    def recreated(self, stream: str, first: int, behind: int | None) -> None:
        """Another stream has the name now."""

    def short(self, streams: Sequence[str], missing: int, expected: int, *, told: bool) -> None:
        """Fewer records came than there were. `told`: gaps were reported, none of them for certain."""


def records(ranges: Sequence[Range]) -> int:
    return sum(item.end.number - item.start.number for item in ranges)


def rest(ranges: Sequence[R], following: Next) -> list[R]:
    """The ranges that the next window begins with."""
    if not 0 <= following.index < len(ranges):
        raise ProtocolError("the server goes on with a range that was not asked for")
    first = ranges[following.index]
    start = Place(following.offset, following.number)
    if following.index == 0 and start == first.start:
        raise ProtocolError("the server's windows do not move forward")
    return [replace(first, start=start), *ranges[following.index + 1 :]]


def as_json(item: Range) -> dict[str, Any]:
    return {
        "stream": item.stream,
        "incarnation": item.incarnation,
        "from": {"offset": item.start.offset, "number": item.start.number},
        "to": {"offset": item.end.offset, "number": item.end.number},
    }


def still_there(ranges: Sequence[R], there: Mapping[str, StreamTail], losses: Losses) -> list[R]:
    """The ranges whose streams are there; the others are told as lost."""
    kept: list[R] = []
    for item in ranges:
        stream = there.get(item.stream)
        if stream is not None and stream.incarnation == item.incarnation:
            kept.append(item)
        elif stream is None:
            losses.unread(item.stream, item.start.number, item.end.number)
        else:
            losses.recreated(item.stream, item.start.number, item.end.number)
    return kept


class Count:
    """Whether a read got as many records as its ranges have: a crash may have cut a range short
    without anybody being certain that it held records; the plan is."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._expected = 0
        self._streams: dict[str, None] = {}
        self._gaps: dict[str, None] = {}
        self._explained = False
        self.rows = 0

    def expect(self, ranges: Sequence[Range], *, instead_of: Sequence[Range] = ()) -> None:
        """Ranges to be read; streams that turned out to be gone are taken off again."""
        self._expected += records(ranges) - records(instead_of)
        if not instead_of:
            self._streams.update(dict.fromkeys(item.stream for item in ranges))

    def gaps(self, ranges: Sequence[Range], window: Window) -> None:
        """Tell the gaps of a window."""
        for found in window.gaps:
            if not 0 <= found.index < len(ranges):
                raise ProtocolError("the server reports a gap in a range that was not asked for")
            stream = ranges[found.index].stream
            self._gaps[stream] = None
            self._explained = self._explained or found.gap.certain
            self._losses.gap(stream, found.gap)

    def check(self) -> None:
        if self.rows > self._expected:
            raise ProtocolError(f"the server sent {self.rows} records for {self._expected}")
        if self.rows == self._expected or self._explained:
            return
        named = list(self._gaps or self._streams)
        missing = self._expected - self.rows
        self._losses.short(named, missing, self._expected, told=bool(self._gaps))
