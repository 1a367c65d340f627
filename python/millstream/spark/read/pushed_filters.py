"""Conditions that choose what is read: on `stream`, `offset` and `timestamp`, with `filterPushdown=true`.

Where it sits: the batch reader that `source.py` returns for that option alone, because Spark refuses every reader
that takes filters unless its own setting allows it.

Invariants:
- I-FLT-1  Every condition stays with Spark, which applies it to each row: here it only saves reading.
- I-FLT-2  What is left out cannot fulfil the conditions: bounds are rounded outwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource as ds

from millstream.client.ranges import Place
from millstream.client.sync.reads import PipelineReads
from millstream.spark.errors import clear
from millstream.spark.read.batch_reader import BatchPlan, BatchReader, RangesPartition, divide
from millstream.spark.read.tasks import Range

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter, InputPartition

STREAM_COLUMNS = ("stream", "topic")


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What can fulfil the conditions: names, record numbers from `low` to below `high`, times likewise."""

    names: frozenset[str] | None = None
    prefix: str = ""
    low: int | None = None
    high: int | None = None
    low_ms: int | None = None
    high_ms: int | None = None

    def allows(self, name: str) -> bool:
        return name.startswith(self.prefix) and (self.names is None or name in self.names)

    def with_filter(self, found: Filter) -> Narrowed:
        column = getattr(found, "attribute", ("",))
        if len(column) != 1:
            return self
        if column[0] in STREAM_COLUMNS:
            return self._with_stream(found)
        if column[0] in ("offset", "timestamp"):
            return self._with_interval(found, is_time=column[0] == "timestamp")
        return self

    def _with_stream(self, found: Filter) -> Narrowed:
        if isinstance(found, (ds.EqualTo, ds.EqualNullSafe)) and isinstance(found.value, str):
            return self._only({found.value})
        if isinstance(found, ds.In):
            return self._only({value for value in found.value if isinstance(value, str)})
        if isinstance(found, ds.StringStartsWith) and found.value.startswith(self.prefix):
            return replace(self, prefix=found.value)
        return self

    def _only(self, names: set[str]) -> Narrowed:
        kept = names if self.names is None else names & self.names
        return replace(self, names=frozenset(kept))

    def _with_interval(self, found: Filter, *, is_time: bool) -> Narrowed:
        value: Any = getattr(found, "value", None)
        if isinstance(found, ds.In):
            values = [_point(item, is_time=is_time) for item in found.value]
            known = [item for item in values if item is not None]
            if len(known) != len(values) or not known:
                return self
            low, high = min(known), max(known)
            return self._between(low, high, is_time=is_time)
        point = _point(value, is_time=is_time)
        if point is None:
            return self
        if isinstance(found, (ds.EqualTo, ds.EqualNullSafe)):
            return self._between(point, point, is_time=is_time)
        # A record number is whole: one that must be below 25 is at most 24. Times are rounded outwards.
        if isinstance(found, (ds.GreaterThan, ds.GreaterThanOrEqual)):
            strict = isinstance(found, ds.GreaterThan) and not is_time
            return self._between(math.floor(point) + 1 if strict else point, None, is_time=is_time)
        if isinstance(found, (ds.LessThan, ds.LessThanOrEqual)):
            strict = isinstance(found, ds.LessThan) and not is_time
            return self._between(None, math.ceil(point) - 1 if strict else point, is_time=is_time)
        return self

    def _between(self, low: float | None, high: float | None, *, is_time: bool) -> Narrowed:
        first = None if low is None else max(0, math.floor(low) if is_time else math.ceil(low))
        behind = None if high is None else max(0, math.floor(high) + 1)
        if is_time:
            return replace(
                self, low_ms=_tighter(self.low_ms, first, max), high_ms=_tighter(self.high_ms, behind, min)
            )  # fmt: skip
        return replace(
            self, low=_tighter(self.low, first, max), high=_tighter(self.high, behind, min)
        )


def _tighter(old: int | None, new: int | None, choose: Any) -> int | None:
    if old is None or new is None:
        return new if old is None else old
    return int(choose(old, new))


def _point(value: Any, *, is_time: bool) -> float | None:
    """A number, or a time in milliseconds."""
    if is_time:
        if not isinstance(value, datetime):
            return None
        moment = value if value.tzinfo is not None else value.astimezone(UTC)
        return moment.timestamp() * 1000
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def narrow(reads: PipelineReads, ranges: Iterable[Range], to: Narrowed) -> list[Range]:
    """The ranges without what cannot fulfil the conditions."""
    kept = [item for item in ranges if to.allows(item.stream)]
    questions: list[dict[str, Any]] = []
    for kind, value in (("number", to.low), ("time_ms", to.low_ms), ("number", to.high), ("time_ms", to.high_ms)):  # fmt: skip
        questions += [] if value is None else [{kind: value}]
    if not questions or not kept:
        return kept
    found = reads.look_up({item.stream: questions for item in kept})
    return [
        narrowed
        for item in kept
        if (narrowed := _clipped(item, found.get(item.stream), to)) is not None
    ]


def _clipped(item: Range, stream: Any, to: Narrowed) -> Range | None:
    if stream is None or stream.incarnation != item.incarnation:
        return item
    starts = (to.low is not None) + (to.low_ms is not None)
    start, end = item.start, item.end
    for index, answer in enumerate(stream.at):
        if answer.error is not None or answer.gap is not None:
            continue
        place = Place(answer.offset, answer.number)
        if index < starts:
            start = place if place.number > start.number else start
        elif place.number < end.number:
            end = place
    return replace(item, start=start, end=end) if start.number < end.number else None


class FilteringReader(BatchReader):
    """A batch read that looks at Spark's conditions first."""

    def __init__(self, batch: BatchPlan) -> None:
        super().__init__(batch)
        self._narrowed = Narrowed()

    @clear
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        for found in filters:
            self._narrowed = self._narrowed.with_filter(found)
        return filters

    @clear
    def partitions(self) -> list[InputPartition]:
        access = self._batch.task.access
        with access.connect_first() as client:
            reads = PipelineReads(client, access.patience_seconds)
            ranges = narrow(reads, self._batch.ranges(reads), self._narrowed)
            return list(divide(reads, ranges, self._batch.sizes)) or [RangesPartition(())]
