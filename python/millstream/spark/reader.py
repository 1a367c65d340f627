"""A task: ranges of streams, fetched window by window and handed to Spark as Arrow. And the batch read.

Where it sits: `ReadTask` runs on executors for batch and streaming reads alike; `BatchReader` plans
on the driver. Both come from `source.py`.

Invariants:
- I-RDR-1  A task reads exactly its ranges, in order; what is missing in them is loss, by its policy.
- I-RDR-2  One window is fetched ahead in a thread; never more, so memory is two windows and what Spark holds.
- I-RDR-3  No record is touched by itself (JSON values that do not fit their schema excepted).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.client.pipeline_read import Next, Window
from millstream.client.sync.reads import PipelineReads
from millstream.errors import ProtocolError, ServerError
from millstream.spark import plan
from millstream.spark.columns import Layout, Shaper
from millstream.spark.errors import clear, clear_iteration
from millstream.spark.loss import Loss, Losses
from millstream.spark.places import Locator, Selection, look_up
from millstream.spark.plan import Place, Range

if TYPE_CHECKING:
    from millstream.spark.access import Access
    from millstream.spark.offsets import Bound

WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Large enough that a request costs little, small enough for the caches of a processor. Measured with 1 to 16 MiB."""
GONE_CODES: Final = frozenset({"stream_not_found", "stream_recreated", "stream_gone"})


class RangesPartition(InputPartition):
    """The ranges of one task."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)

    def __reduce__(self) -> tuple[Callable[[bytes], RangesPartition], tuple[bytes]]:
        """Thousands of ranges travel as compressed text: as objects they would fill a megabyte."""
        flat = [
            (r.stream, r.incarnation, r.start.offset, r.start.number, r.end.offset, r.end.number)
            for r in self.ranges
        ]
        return _unpacked, (zlib.compress(json.dumps(flat).encode(), 1),)

    def __repr__(self) -> str:
        streams = len({item.stream for item in self.ranges})
        return f"RangesPartition({len(self.ranges)} ranges of {streams} streams)"


def _unpacked(data: bytes) -> RangesPartition:
    return RangesPartition(
        [
            Range(stream, incarnation, Place(at, number), Place(to, behind))
            for stream, incarnation, at, number, to, behind in json.loads(zlib.decompress(data))
        ]
    )


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Everything a task needs besides its ranges; plain data."""

    access: Access
    layout: Layout
    schema: pa.Schema
    losses: Losses
    window_bytes: int = WINDOW_BYTES

    def run(self, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        shaper = Shaper(self.layout, self.schema)
        with (
            self.access.connect() as client,
            ThreadPoolExecutor(1, thread_name_prefix="millstream-fetch") as ahead,
        ):
            reads = PipelineReads(client, self.access.patience_seconds)
            count = Count(self.losses)
            try:
                for window in self._windows(reads, ahead, list(ranges), count):
                    with pa.ipc.open_stream(pa.py_buffer(window.data)) as stream:
                        for batch in stream:
                            count.rows += batch.num_rows
                            if batch.num_rows:
                                yield shaper.shape(batch)
                count.check()
            finally:
                # Spark may stop early (LIMIT): the window that is under way must not be waited for.
                reads.cancel()

    def _windows(
        self,
        reads: PipelineReads,
        ahead: ThreadPoolExecutor,
        ranges: list[Range],
        count: Count,
    ) -> Iterator[Window]:
        fetch: Future[tuple[list[Range], Window | None]]
        fetch = ahead.submit(self._fetch, reads, ranges)
        asked = ranges
        count.expect(ranges)
        while True:
            ranges, window = fetch.result()
            count.expect(ranges, instead_of=asked)
            if window is None:
                return
            self._check_gaps(ranges, window, count)
            if window.next is None:
                yield window
                return
            asked = ranges = rest(ranges, window.next)
            fetch = ahead.submit(self._fetch, reads, ranges)
            yield window

    def _fetch(
        self, reads: PipelineReads, ranges: list[Range]
    ) -> tuple[list[Range], Window | None]:
        """The next window. Streams that are gone are loss; if that is allowed, without them."""
        while ranges:
            try:
                window = reads.read(
                    [as_json(item) for item in ranges],
                    columns=self.layout.wire,
                    key_path=self.layout.key_path or None,
                    max_bytes=self.window_bytes,
                    # Not cleared first, and pages that are in use already come again.
                    allocate=pa.allocate_buffer,
                )
            except ServerError as error:
                if error.code not in GONE_CODES:
                    raise
                ranges = self._still_there(reads, ranges, error)
            else:
                return ranges, window
        return ranges, None

    def _still_there(
        self, reads: PipelineReads, ranges: list[Range], error: ServerError
    ) -> list[Range]:
        there = look_up(reads, {item.stream: [] for item in ranges})
        kept: list[Range] = []
        for item in ranges:
            stream = there.get(item.stream)
            if stream is not None and stream.incarnation == item.incarnation:
                kept.append(item)
            elif stream is None:
                self.losses.unread(item.stream, item.start.number, item.end.number)
            else:
                self.losses.recreated(item.stream, item.start.number, item.end.number)
        if len(kept) == len(ranges):
            # Gone for the read, there for the question: asking again could go on for ever.
            raise error
        return kept

    def _check_gaps(self, ranges: Sequence[Range], window: Window, count: Count) -> None:
        for found in window.gaps:
            if not 0 <= found.index < len(ranges):
                raise ProtocolError("the server reports a gap in a range that was not asked for")
            stream = ranges[found.index].stream
            count.gap(stream, certain=found.gap.certain)
            self.losses.gap(stream, found.gap)


class Count:
    """Whether a task got as many records as its ranges have: a crash may have cut a range short
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

    def gap(self, stream: str, *, certain: bool) -> None:
        self._gaps[stream] = None
        self._explained = self._explained or certain

    def check(self) -> None:
        if self.rows > self._expected:
            raise ProtocolError(f"the server sent {self.rows} records for {self._expected}")
        if self.rows == self._expected or self._explained:
            return
        named = list(self._gaps or self._streams)
        self._losses.found(
            Loss(
                "`, `".join(named[:5]),
                f"{self._expected - self.rows} of the {self._expected} records that were planned",
                "they were there when the batch was planned, and are gone now",
            )
        )


def records(ranges: Sequence[Range]) -> int:
    return sum(item.end.number - item.start.number for item in ranges)


def rest(ranges: Sequence[Range], following: Next) -> list[Range]:
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


# ---------------------------------------------------------------------------- planning on the driver


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a read is divided into tasks."""

    min_partitions: int
    max_bytes_per_partition: int


def cores() -> int:
    """Cores of this machine that may be used. On a cluster `minPartitions` says how many there are."""
    return len(os.sched_getaffinity(0))


def divide(reads: PipelineReads, ranges: Sequence[Range], sizes: Sizes) -> list[RangesPartition]:
    """Tasks for the ranges; large ranges are cut at appends that the server names."""
    if not ranges:
        return []
    tasks = plan.task_count(
        sum(item.bytes for item in ranges),
        cores=cores(),
        min_partitions=sizes.min_partitions,
        max_bytes_per_partition=sizes.max_bytes_per_partition,
    )
    cuts = plan.choose_cuts(ranges, tasks)
    wanted: dict[str, list[dict[str, Any]]] = {}
    slots: list[tuple[str, int] | None] = []
    for cut in cuts:
        if cut.byte is None:
            slots.append(None)
            continue
        asked = wanted.setdefault(ranges[cut.index].stream, [])
        slots.append((ranges[cut.index].stream, len(asked)))
        asked.append({"byte": cut.byte})
    found = look_up(reads, wanted) if wanted else {}
    places: list[Place | None] = []
    usable: list[plan.Cut] = []
    for cut, slot in zip(cuts, slots, strict=True):
        if slot is None:
            usable.append(cut)
            places.append(None)
            continue
        stream = found.get(slot[0])
        # A stream that went away just now stays whole; its task reports the loss.
        if stream is not None and stream.incarnation == ranges[cut.index].incarnation:
            answer = stream.at[slot[1]]
            if answer.error is None:
                usable.append(cut)
                places.append(Place(answer.offset, answer.number))
    return [RangesPartition(task) for task in plan.apply_cuts(ranges, usable, places)]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch read was asked for; plain data."""

    task: ReadTask
    selection: Selection
    starts: Bound
    ends: Bound
    sizes: Sizes

    def ranges(self, reads: PipelineReads) -> list[Range]:
        streams = self.selection.all_there(self.selection.ask(reads))
        if self.selection.pattern is None:
            self.starts.check_names(streams)
            self.ends.check_names(streams)
        locator = Locator(reads, self.task.losses)
        starts = locator.starts(self.starts, streams)
        ends = locator.ends(self.ends, streams)
        return [
            Range(name, streams[name].incarnation, starts[name], ends[name])
            for name in sorted(streams)
            if starts[name].number < ends[name].number
        ]

    def partitions(self) -> list[InputPartition]:
        access = self.task.access
        with access.connect_first() as client:
            reads = PipelineReads(client, access.patience_seconds)
            return list(divide(reads, self.ranges(reads), self.sizes))


class BatchReader(DataSourceReader):
    """A batch read as Spark calls it."""

    def __init__(self, batch: BatchPlan) -> None:
        self._batch = batch

    @clear
    def partitions(self) -> list[InputPartition]:
        # Spark makes one task of an empty list; one without ranges says the same more clearly.
        return self._batch.partitions() or [RangesPartition(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangesPartition)
        return clear_iteration(self._batch.task.run(partition.ranges))
