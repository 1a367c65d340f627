"""Job `metrics`: how many records and bytes each stream got in each window of time, and how large they are; to a stream or a lake.

    {"stream":"orders","timestamp":"2026-03-01T23:30:00.000000Z","seconds":60,"records":1200,"bytes":204000,
     "records_per_second":20.0,"bytes_per_second":3400.0,"min_size":12,"max_size":900,"mean_size":170.0}

Where it sits: found through `jobs`, run by `driver`. Tasks fold their records (`folded`, in Arrow), so that the state, which is kept
record by record in Python (`transformWithState`), gets one row for each stream and window of a batch of Arrow.

Invariants:
- I-MTR-1  Every record is counted once, in the window of the time at which the server accepted it: rows add up, and none is left out.
- I-MTR-2  A window is written when its stream has gone on to a later one, or when the watermark of all streams has passed it. What
           comes after that is a further row of the same window.
- I-MTR-3  What is done in executors travels by value: they need pyspark and pyarrow, and nothing of Millstream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.spark.jobs.job import JobOption, QueryJob, Request, check_no_loop
from millstream.spark.jobs.lake import target
from millstream.spark.jobs.shared import state, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

MICROSECONDS: Final = 1_000_000
SUMS: Final = "start BIGINT, records BIGINT, bytes BIGINT, smallest BIGINT, largest BIGINT"
"""Of a window. Times are microseconds since 1970: Python would give times of the session's zone."""


class Metrics(QueryJob):
    """Streams to what went through them."""

    name = "metrics"
    summary = "records, bytes and sizes of each stream in windows of time, in a stream or a lake"
    options = (
        JobOption("window", "How long a window is: 1m, 1h, ...", "1m", fixed=True),
        state.LATE,
        streams.CREATE,
        *target.OPTIONS,
    )
    stateful = True
    remembers = "windows"

    def check(self, request: Request, query_id: str | None) -> None:
        check_no_loop(self, request)
        state.some_seconds(self, request, "window")
        state.lateness(self, request)
        state.require_processors(self)
        target.check_either(self, request, query_id)

    def source(self, request: Request) -> dict[str, str]:  # noqa: ARG002
        return {"columns": "stream,timestamp,value"}

    def write(self, source: DataFrame, request: Request) -> Any:
        from pyspark.sql import functions as f

        seconds = state.some_seconds(self, request, "window")
        window = f.lit(seconds * MICROSECONDS)
        at = f.unix_micros("timestamp")
        records = source.select(
            "stream",
            (at - f.pmod(at, window)).alias("start"),
            f.octet_length("value").cast("bigint").alias("size"),
            at.alias("at"),
        )
        # Without the column of the watermark Spark has nothing to call a row late by: the windows decide (I-MTR-1).
        rows = (
            records.mapInArrow(folded(), f"stream STRING, {SUMS}, newest BIGINT")
            .withColumn("time", f.timestamp_micros("newest"))
            .withWatermark("time", state.lateness(self, request))
            .drop("time", "newest")
        )
        closed = rows.groupBy("stream").transformWithState(
            windows(seconds * MICROSECONDS), f"stream STRING, {SUMS}", "Append", "EventTime"
        )
        shown = closed.select(*columns(seconds))
        if request.target.path is not None:
            return target.write(shown, target.layout_of(self, request))
        return streams.write(
            shown.select(text(shown.columns)), self, request, stream=request.target.stream
        )


def columns(seconds: int) -> Iterator[Column]:
    """A row of the result, of a closed window."""
    from pyspark.sql import functions as f

    yield f.col("stream")
    yield f.timestamp_micros("start").alias("timestamp")
    yield f.lit(seconds).cast("bigint").alias("seconds")
    yield f.col("records")
    yield f.col("bytes")
    yield (f.col("records") / seconds).alias("records_per_second")
    yield (f.col("bytes") / seconds).alias("bytes_per_second")
    yield f.col("smallest").alias("min_size")
    yield f.col("largest").alias("max_size")
    yield (f.col("bytes") / f.col("records")).alias("mean_size")


def text(names: Iterable[str]) -> Column:
    """The record of a row."""
    from pyspark.sql import functions as f

    from millstream.spark.jobs.shared.letters import TEXT_OPTIONS

    return f.to_json(f.struct(*names), TEXT_OPTIONS).alias("value")


def folded() -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: records as sums of their stream and window. All that it uses is inside of it (I-MTR-3)."""

    def fold(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as arrow

        wanted = [*(("size", fold) for fold in ("count", "sum", "min", "max")), ("at", "max")]
        names = ["stream", "start", "records", "bytes", "smallest", "largest", "newest"]
        for batch in batches:
            table = arrow.Table.from_batches([batch])
            sums = table.group_by(["stream", "start"], use_threads=False).aggregate(wanted)
            order = ["stream", "start", *("_".join(each) for each in wanted)]
            yield from sums.select(order).rename_columns(names).to_batches()

    return fold


def windows(length: int) -> Any:
    """The processor of one stream. All that it uses is inside of this function, so that it travels by value (I-MTR-3)."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    def ends(start: int) -> int:
        """In milliseconds; a window is of whole seconds."""
        return (start + length) // 1000

    def row(stream: str, start: int, sums: Any) -> Row:
        records, size, smallest, largest = sums
        return Row(
            stream=stream,
            start=start,
            records=records,
            bytes=size,
            smallest=smallest,
            largest=largest,
        )

    class Windows(StatefulProcessor):
        """At most one window of a stream is open, the newest, and it has a timer."""

        def init(self, handle: Any) -> None:
            self._handle = handle
            self._open = handle.getValueState("window", SUMS)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
            before = self._open.get()
            found: dict[int, Any] = {} if before is None else {before[0]: tuple(before[1:])}
            for new in rows:
                sums = (new.records, new.bytes, new.smallest, new.largest)
                if new.start in found:
                    old = found[new.start]
                    sums = (
                        old[0] + sums[0],
                        old[1] + sums[1],
                        min(old[2], sums[2]),
                        max(old[3], sums[3]),
                    )
                found[new.start] = sums
            newest = max(found)
            for start in sorted(found):
                if start != newest:
                    yield row(key[0], start, found[start])
            self._open.update((newest, *found[newest]))
            if before is not None and before[0] != newest:
                self._handle.deleteTimer(ends(before[0]))
            if before is None or before[0] != newest:
                self._handle.registerTimer(ends(newest))

        def handleExpiredTimer(  # noqa: N802
            self,
            key: Any,
            timerValues: Any,  # noqa: ARG002, N803
            expiredTimerInfo: Any,  # noqa: ARG002, N803
        ) -> Iterator[Row]:
            start, *sums = self._open.get()
            self._open.clear()
            yield row(key[0], start, sums)

        def close(self) -> None:
            pass

    return Windows()
