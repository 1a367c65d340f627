"""Records as Arrow, without I/O: columns, where a read begins, what is missing, and rows as `Record`.

Where it sits: below `aio/arrow.py`; the ranges are read by `aio/ranges.py`. pyarrow is an optional package: it is loaded by the
first read, and what it lacks is told then.

Invariants:
- I-ARW-1  Columns have the names of `Record`: `number` and `time` are the server's `offset` and `timestamp`.
- I-ARW-2  A gap is never passed over in silence.
- I-ARW-3  A record leaves with the offset behind its append, so `final` is a safe place to resume.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from millstream import errors
from millstream.client import wire
from millstream.client.follow import told_gap
from millstream.client.ranges import Place, Range
from millstream.types import Gap, GapPolicy, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from millstream.client.pipeline_read import FoundPlace, StreamTail, Tails

Column: TypeAlias = Literal["stream", "number", "time", "value", "position", "epoch"]
WIRE_NAMES: Final[dict[str, str]] = {
    "stream": "stream",
    "number": "offset",
    "time": "timestamp",
    "value": "value",
    "position": "position",
    "epoch": "epoch",
}
"""Column here -> column of `/v1/read`. The first four are the default."""
DEFAULT: Final[tuple[Column, ...]] = ("stream", "number", "time", "value")
RECORD_COLUMNS: Final[tuple[Column, ...]] = ("number", "time", "value", "position")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def load_pyarrow() -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise errors.SetupError(
            f"reading Arrow needs the package pyarrow ({error})",
            hint="install it: pip install 'millstream[arrow]'",
        ) from None
    return pyarrow  # type: ignore[no-any-return]


def schema(columns: Sequence[Column]) -> Any:
    """The schema of every batch, also where there is none."""
    pa = load_pyarrow()
    types = {
        "stream": pa.string(),
        "number": pa.int64(),
        "time": pa.timestamp("us", tz="UTC"),
        "value": pa.binary(),
        "position": pa.string(),
        "epoch": pa.int64(),
    }
    unknown = [name for name in columns if name not in types]
    if unknown or not columns or len(set(columns)) != len(columns):
        raise errors.InvalidArgument(
            f"`columns` is {list(columns)!r}", hint="name each once, of " + ", ".join(types)
        )
    return pa.schema([pa.field(name, types[name], nullable=False) for name in columns])


# ---------------------------------------------------------------------------- where a read begins


class Selection:
    """One stream or the streams of a pattern, and the place in each where a read begins."""

    def __init__(self, path: str | None, pattern: str | None, start: wire.Start) -> None:
        self.path = path
        self.pattern = pattern
        self._start = start

    def streams(self, tails: Tails) -> dict[str, StreamTail]:
        if self.path is not None and tails.missing:
            raise errors.StreamNotFound(
                f"stream `{self.path}` does not exist",
                hint="create it with `client.create(...)`, or list what there is",
            )
        return {stream.name: stream for stream in tails.streams}

    def questions(self, streams: Mapping[str, StreamTail]) -> dict[str, list[dict[str, Any]]]:
        """What must be looked up: nothing where the beginning or the tail is meant."""
        found = {name: self._question(stream) for name, stream in streams.items()}
        return {name: [question] for name, question in found.items() if question is not None}

    def _question(self, stream: StreamTail) -> dict[str, Any] | None:
        start = self._start
        if start.since is not None:
            return {"time_ms": wire.time_ms(start.since)}
        if start.tail is not None:
            return {"number": max(stream.first_number, stream.tail_number - start.tail)}
        if start.offset in (None, wire.START, wire.NOW):
            return None
        return {"offset": start.offset}

    def ranges(
        self,
        streams: Mapping[str, StreamTail],
        found: Mapping[str, StreamTail],
        missing: MissingRecords,
    ) -> list[Range]:
        """What is to be read, up to the tails as they were; by name, so that a read can be repeated."""
        ranges = []
        for name, stream in sorted(streams.items()):
            end = Place(stream.tail_offset, stream.tail_number)
            start = Place(stream.first_offset, stream.first_number)
            if self._start.offset == wire.NOW:
                start = end
            elif (answer := found.get(name)) is not None and answer.at:
                if answer.incarnation != stream.incarnation:
                    missing.recreated(name, stream.first_number, None)
                start = _accepted(name, answer.at[0], missing)
            if start.number < end.number:
                ranges.append(Range(name, stream.incarnation, start, end))
        return ranges


def _accepted(name: str, place: FoundPlace, missing: MissingRecords) -> Place:
    if place.error is not None:
        raise errors.OffsetInvalid(
            f"stream `{name}` does not have this offset ({place.error})",
            status=400,
            hint="`-1` is the start, and `since` and `tail` always work",
        )
    if place.gap is not None:
        missing.gap(name, place.gap)
    return Place(place.offset, place.number)


class MissingRecords:
    """The rule of `gaps=` for whole ranges: raise, or call and go on."""

    def __init__(self, gaps: GapPolicy) -> None:
        if gaps == "record":
            raise errors.InvalidArgument(
                'Arrow has no place for gaps="record"', hint="pass a function instead"
            )
        self._gaps = gaps

    def gap(self, stream: str, gap: Gap) -> None:
        told_gap(stream, gap, self._gaps)

    def unread(self, stream: str, first: int, behind: int) -> None:
        raise errors.StreamNotFound(
            f"stream `{stream}` was deleted before its records {first} to {behind - 1} were read"
        )

    def recreated(self, stream: str, first: int, behind: int | None) -> None:
        del first, behind
        raise errors.StreamRecreated(
            f"stream `{stream}` was deleted and created again while it was read", hint="read again"
        )

    def short(self, streams: Sequence[str], missing: int, expected: int, *, told: bool) -> None:
        if not told:
            raise errors.GapError(
                f"{missing} of {expected} records in `{'`, `'.join(streams[:5])}` are gone since the read began",
                gap=Gap("", "", "unknown", stream=streams[0] if streams else ""),
                hint="read again",
            )


# ---------------------------------------------------------------------------- rows as records


class RecordRows:
    """Makes records of batches with `RECORD_COLUMNS`; those of the last append wait for its end (I-ARW-3)."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._position = ""
        self._rows: list[tuple[int, int, bytes]] = []

    def feed(self, batch: Any) -> list[Record]:
        numbers, times, values, positions = (
            batch.column("number").to_pylist(),
            batch.column("time").cast("int64").to_pylist(),
            batch.column("value").to_pylist(),
            batch.column("position").to_pylist(),
        )
        done: list[Record] = []
        for number, time_us, value, position in zip(numbers, times, values, positions, strict=True):
            if position != self._position:
                done += self.finish(position)
                self._position = position
            self._rows.append((number, time_us, value))
        return done

    def finish(self, offset: str) -> list[Record]:
        """The records that wait, which end at `offset`."""
        rows, self._rows = self._rows, []
        last = len(rows) - 1
        return [
            Record(
                value=json.loads(data) if self._as_json else data,
                data=data,
                offset=offset,
                final=index == last,
                number=number,
                time=_EPOCH + timedelta(microseconds=time_us),
            )
            for index, (number, time_us, data) in enumerate(rows)
        ]
