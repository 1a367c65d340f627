"""A task: ranges of streams, fetched window by window and handed to Spark as Arrow. And the batch read.

Where it sits: `ReadTask` runs on executors for batch and streaming reads alike; `BatchReader` plans
on the driver. Both come from `source.py`.

Invariants:
- I-RDR-1  A task reads exactly its ranges, in order; what is missing in them is loss, by its policy
           (`client/ranges.py` has the rules, `read_arrow` reads by the same).
- I-RDR-2  No record is touched by itself (JSON values that do not fit their schema excepted).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.client.ranges import Place
from millstream.client.sync.ranges import WINDOW_BYTES, RangeReader
from millstream.client.sync.reads import PipelineReads
from millstream.spark.errors import clear, clear_iteration
from millstream.spark.read.columns import Layout, Shaper
from millstream.spark.read.data_loss import Losses
from millstream.spark.read.selection import Locator, Selection
from millstream.spark.read.tasks import Cut, Range, apply_cuts, choose_cuts, task_count

if TYPE_CHECKING:
    from millstream.spark.access import Access
    from millstream.spark.read.offsets import Bound


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
        shaper = Shaper(self.layout, self.schema, {item.stream for item in ranges})
        with self.access.connect() as client:
            reader = RangeReader(
                PipelineReads(client, self.access.patience_seconds),
                self.losses,
                shaper.wire,
                self.layout.key_path or None,
                self.window_bytes,
            )
            with closing(reader.batches(ranges)) as batches:
                for batch in batches:
                    yield shaper.shape(batch)


# ---------------------------------------------------------------------------- planning on the driver


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a read is divided into tasks."""

    min_partitions: int
    max_bytes_per_partition: int


def cores() -> int:
    """Cores of this machine that may be used. On a cluster `minPartitions` says how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows do not bind processes to cores


def divide(reads: PipelineReads, ranges: Sequence[Range], sizes: Sizes) -> list[RangesPartition]:
    """Tasks for the ranges; large ranges are cut at appends that the server names."""
    if not ranges:
        return []
    tasks = task_count(
        sum(item.bytes for item in ranges),
        cores=cores(),
        min_partitions=sizes.min_partitions,
        max_bytes_per_partition=sizes.max_bytes_per_partition,
    )
    cuts = choose_cuts(ranges, tasks)
    wanted: dict[str, list[dict[str, Any]]] = {}
    slots: list[tuple[str, int] | None] = []
    for cut in cuts:
        if cut.byte is None:
            slots.append(None)
            continue
        asked = wanted.setdefault(ranges[cut.index].stream, [])
        slots.append((ranges[cut.index].stream, len(asked)))
        asked.append({"byte": cut.byte})
    found = reads.look_up(wanted) if wanted else {}
    places: list[Place | None] = []
    usable: list[Cut] = []
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
    return [RangesPartition(task) for task in apply_cuts(ranges, usable, places)]


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
