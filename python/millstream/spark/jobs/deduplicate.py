"""Job `deduplicate`: of records with the same key, the first within a time; to a stream or a lake.

Where it sits: found through `jobs`, run by `driver`; the key is found by the source (`keyPath`), the state is Spark's.
Invariant I-DDP-1: a record is left out only if its key came before within the time, or if it is late; both are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.spark.jobs.job import JobOption, QueryJob, Request, check_no_loop, seconds_of
from millstream.spark.jobs.lake import target
from millstream.spark.jobs.shared import state, streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = ("stream", "offset", "timestamp", "value")


class Deduplicate(QueryJob):
    """Streams to a stream or a lake, each key once within a time."""

    name = "deduplicate"
    summary = "records without repetitions of their key within a time, in a stream or a lake"
    options = (
        JobOption("key", "Field that names a record, names joined by dots.", fixed=True, required=True, is_field=True),
        JobOption("within", "How long a key is remembered: 10m, 1h, ...", fixed=True, required=True),
        state.EVENT_TIME,
        streams.CREATE,
        *target.OPTIONS,
    )  # fmt: skip
    stateful = True

    def check(self, request: Request, query_id: str | None) -> None:
        check_no_loop(self, request)
        state.some_seconds(self, request, "within")
        target.check_either(self, request, query_id)

    def source(self, request: Request) -> dict[str, str]:
        return {"columns": ",".join((*COLUMNS, "key")), "keyPath": request.option(self, "key")}

    def write(self, source: DataFrame, request: Request) -> Any:
        key = state.key(request.option(self, "key"))
        time = state.event_time(request.option(self, "event-time"))
        within = f"{seconds_of(request.option(self, 'within'))} seconds"
        rows = source.withColumns({"key": key, "event_time": time})
        kept = rows.withWatermark("event_time", within).dropDuplicatesWithinWatermark(["key"])
        if request.target.path is not None:
            return target.write(kept.select(*COLUMNS), target.layout_of(self, request))
        return streams.write(kept.select("value"), self, request, stream=request.target.stream)
