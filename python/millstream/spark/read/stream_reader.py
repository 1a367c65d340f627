"""A streaming read: where it begins, how far each micro-batch goes, and its tasks.

Where it sits: made by `source.py`; the planning methods run in one process per query on the driver, `read`
on executors. Tails come from `tail_follower.py`, or from one snapshot for `Trigger.AvailableNow`.

    start (checkpoint) ──► check identity and epochs (loss) ──► tails, ends, limits ──► end
    (start, end) ──► ranges ──► cuts by bytes ──► tasks

Invariants:
- I-STR-1  An offset that was returned names exact places: the records between two of them never change.
- I-STR-2  The same start and the same tails give the same end; nothing new gives `start` itself.
- I-STR-3  A stream that was found by pattern after the query began is read from its first record.
- I-STR-4  A stream that begins at `latest` gives nothing to the first batch, which carries its start into the
           checkpoint: Spark logs only the ends of batches, and asks for the start of the first one anew. For the
           same reason nothing is in the first batch that has no start of its own.
- I-STR-5  At rest the planner waits for news instead of comparing offsets 90 times a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from millstream.client.pipeline_read import StreamTail
from millstream.client.ranges import Place
from millstream.client.sync.reads import PipelineReads
from millstream.spark.errors import clear, clear_iteration
from millstream.spark.read import offsets
from millstream.spark.read.batch_limits import Limits, admit
from millstream.spark.read.batch_reader import RangesPartition, ReadTask, Sizes, divide
from millstream.spark.read.offsets import Entry, Offset
from millstream.spark.read.resume import CheckpointEntries
from millstream.spark.read.selection import Locator, Selection
from millstream.spark.read.tail_follower import Follower, TailState
from millstream.spark.read.tasks import Range

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.client.sync.client import Client
    from millstream.spark.read.offsets import Bound

MEASURED_STREAMS_MIN: Final = 200
"""Fewer streams than this cost nothing worth waiting for."""
IDLE_FACTOR: Final = 60.0
IDLE_SECONDS_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What a streaming read was asked for; plain data."""

    task: ReadTask
    selection: Selection
    starts: Bound
    ends: Bound
    sizes: Sizes
    limits: Limits


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read as Spark calls it. Connections are opened when they are first needed: this
    object also travels to executors, for `read` alone."""

    def __init__(self, stream: StreamPlan) -> None:
        self._plan = stream
        self._client: Client | None = None
        self._follower: Follower | None = None
        self._frozen: TailState | None = None
        self._entries: CheckpointEntries | None = None
        self._seen = 0
        self._last: tuple[int, Offset, Offset] | None = None
        self._idle_seconds = 0.0
        self._unlogged: frozenset[str] = frozenset()
        self._initial: Offset | None = None
        """What was given as the start of the first batch, until that batch is behind."""
        self._waiting_since: float | None = None
        self._within_bound = False
        """What was there when this process began is within the bound; what comes later finds it at the next start."""

    # ------------------------------------------------------------------ asked by Spark

    @clear
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        plan = self._plan
        streams = self._state().streams
        if plan.selection.pattern is None:
            plan.starts.check_names(streams)
            plan.ends.check_names(streams)
        found = offsets.offset(self._starts(streams))
        plan.selection.check_bound(streams, found["streams"])
        self._unlogged = frozenset(n for n in streams if plan.starts.of(n).kind == "latest")
        self._initial = found
        return dict(found)

    @clear
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        limits = self._plan.limits
        if limits.max_records is not None:
            return ReadMaxRows(limits.max_records)
        if limits.max_bytes is not None:
            return ReadMaxBytes(limits.max_bytes)
        if limits.min_records is not None:
            return ReadMinRows(limits.min_records)
        return ReadAllAvailable()

    @clear
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        answer = self._plan.selection.ask(self._reads(), walk=True)
        self._frozen = TailState(1, self._plan.selection.all_there(answer))

    @clear
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        begin = offsets.checked(start)
        first = self._initial is not None and begin == self._initial
        if not first:
            # A repeated batch 0: the start was logged before.
            self._unlogged, self._initial = frozenset(), None
        state = self._state()
        end = self._end(begin, state, limit)
        if first:
            # This end is logged; from the next batch on, their start is in the checkpoint.
            self._unlogged, self._initial, self._last = frozenset(), None, None
        elif end is begin and self._frozen is None and self._idle_seconds:
            assert self._follower is not None
            state = self._follower.news(state.version, self._idle_seconds)
            end = self._end(begin, state, limit)
        return dict(end)

    @clear
    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        streams = self._state().streams
        return dict(offsets.offset({name: tail_entry(tail) for name, tail in streams.items()}))

    @clear
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        reads = self._reads()
        ranges = self._ranges(offsets.checked(start), offsets.checked(end))
        return list(divide(reads, ranges, self._plan.sizes))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangesPartition)
        return clear_iteration(self._plan.task.run(partition.ranges))

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the checkpoint alone says what was read."""

    def stop(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        if self._client is not None:
            self._client.close()

    def _starts(self, streams: Mapping[str, StreamTail]) -> dict[str, Entry]:
        """Where the options say that reading begins."""
        places = Locator(self._reads(), self._plan.task.losses).starts(self._plan.starts, streams)
        return {
            name: offsets.entry(place.offset, streams[name].incarnation, place.number)
            for name, place in places.items()
        }

    # ------------------------------------------------------------------ how far

    def _end(self, start: Offset, state: TailState, limit: ReadLimit) -> Offset:
        """The end of the next micro-batch; `start` itself if there is nothing to read."""
        last = self._last
        if last is not None and last[0] == state.version and last[1] == start:
            # Nothing moved since the last question. If that one had an end, Spark repeats it.
            return start if last[2] is last[1] else last[2]
        end = self._compute(start, state, limit)
        # While records wait for `minOffsetsPerTrigger`, the clock alone can change the answer.
        held = end is start and self._waiting_since is not None
        self._last = None if held else (state.version, start, end)
        self._measure(end)
        return end

    def _compute(self, start: Offset, state: TailState, limit: ReadLimit) -> Offset:
        tails = state.streams
        if not self._within_bound:
            self._plan.selection.check_bound(tails, start["streams"])
            self._within_bound = True
        begins, stay = self._checkpoint_entries().checked(start, state)
        ends = self._bounded(begins, tails)
        limits = self._limits_for(limit)
        moved = {
            name: end
            for name, end in ends.items()
            if end != begins.get(name) and name not in self._unlogged
            if self._initial is None or name in start["streams"]
        }
        if not moved:
            self._waiting_since = None
        if limits is not None and moved:
            if self._too_few(begins, moved):
                return start
            moved = admit(self._reads(), begins, moved, tails, limits)
        if not moved:
            return start
        self._waiting_since = None
        return offsets.offset({**stay, **moved})

    def _bounded(
        self, begins: Mapping[str, Entry], tails: Mapping[str, StreamTail]
    ) -> dict[str, Entry]:
        """Where each stream ends now, without limits: its tail, or the bound of the options."""
        bound = self._plan.ends
        if bound.everywhere.kind == "latest" and not bound.by_stream:
            return {
                name: begins[name] if _at_tail(begins.get(name), tail) else tail_entry(tail)
                for name, tail in tails.items()
                if name in begins
            }
        places = Locator(self._reads(), self._plan.task.losses).ends(bound, tails)
        ends: dict[str, Entry] = {}
        for name, place in places.items():
            begin = begins.get(name)
            if begin is None:
                continue
            ends[name] = (
                begin
                if place.number <= begin["n"]
                else offsets.entry(place.offset, tails[name].incarnation, place.number)
            )
        return ends

    def _limits_for(self, limit: ReadLimit) -> Limits | None:
        """Our two caps together; none when Spark wants everything."""
        if isinstance(limit, ReadAllAvailable):
            return None
        limits = self._plan.limits
        if isinstance(limit, ReadMaxRows):
            return replace(limits, max_records=limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            return replace(limits, max_bytes=limit.max_bytes)
        return limits

    def _too_few(self, begins: Mapping[str, Entry], moved: Mapping[str, Entry]) -> bool:
        """Whether `minOffsetsPerTrigger` says to wait. AvailableNow never waits."""
        wanted = self._plan.limits.min_records
        if wanted is None or self._frozen is not None:
            return False
        waiting = sum(end["n"] - begins[name]["n"] for name, end in moved.items())
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        waited_ms = (now - self._waiting_since) * 1000
        return waiting < wanted and waited_ms < self._plan.limits.max_delay_ms

    def _measure(self, end: Offset) -> None:
        """How long a poll without news may wait, from what encoding such an offset costs."""
        if len(end["streams"]) < MEASURED_STREAMS_MIN:
            self._idle_seconds = 0.0
            return
        began = time.perf_counter()
        json.dumps(end)
        spent = time.perf_counter() - began
        self._idle_seconds = min(IDLE_SECONDS_MAX, spent * IDLE_FACTOR)

    # ------------------------------------------------------------------ ranges of a batch

    def _ranges(self, start: Offset, end: Offset) -> list[Range]:
        """What lies between two offsets. Only they decide, so that a repeated batch is the same."""
        if self._initial is not None:
            start = self._with_others(start, end)
        begins = self._checkpoint_entries().begins(start, end)
        ranges = []
        for name, to in end["streams"].items():
            begin = begins[name]
            if begin["n"] >= to["n"]:
                # Nothing, or a first batch that is planned again from a start that has moved on.
                continue
            ranges.append(
                Range(name, to["id"], Place(begin["at"], begin["n"]), Place(to["at"], to["n"]))
            )
        return ranges

    def _with_others(self, start: Offset, end: Offset) -> Offset:
        """The start of a first batch that is repeated: it may have had streams that are not chosen now."""
        others = self._reads().look_up({n: [] for n in end["streams"] if n not in start["streams"]})
        known = {n: s for n, s in others.items() if s.incarnation == end["streams"][n]["id"]}
        return offsets.offset({**start["streams"], **self._starts(known)})

    # ------------------------------------------------------------------ connections

    def _reads(self) -> PipelineReads:
        if self._client is None:
            self._client = self._plan.task.access.connect_first()
        return PipelineReads(self._client, self._plan.task.access.patience_seconds)

    def _checkpoint_entries(self) -> CheckpointEntries:
        if self._entries is None:
            self._entries = CheckpointEntries(
                self._reads(), self._plan.task.losses, self._plan.selection
            )
        return self._entries

    def _state(self) -> TailState:
        """The tails as far as they are known, without waiting."""
        if self._frozen is not None:
            return self._frozen
        if self._follower is None:
            self._follower = Follower(self._plan.task.access, self._plan.selection)
            return self._follower.start()
        return self._follower.news(-1, 0.0)


def tail_entry(tail: StreamTail) -> Entry:
    return offsets.entry(tail.tail_offset, tail.incarnation, tail.tail_number)


def _at_tail(begin: Entry | None, tail: StreamTail) -> bool:
    """Whether there is nothing behind `begin`; also when the snapshot is older than it."""
    if begin is None or begin["id"] != tail.incarnation:
        return False
    return begin["n"] >= tail.tail_number
