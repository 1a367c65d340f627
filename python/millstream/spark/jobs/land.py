"""Job `land`: streams into a lake of Parquet files, or into a Delta or Iceberg table; exactly once.

Where it sits: found through `jobs`, run by `driver`; the work is done by the sink (`lake/sink`).
Invariant I-LAN-1: the lake holds each record once for every reader of the plain directory, after
whatever crash (the steps are in `lake/publish`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import QueryJob, Request
from millstream.spark.jobs.lake import target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Land(QueryJob):
    """Streams to a lake."""

    name = "land"
    summary = "streams to a directory of Parquet files, or a Delta or Iceberg table"
    options = target.OPTIONS

    def check(self, request: Request, query_id: str | None) -> None:
        if request.target.path is None:
            raise InvalidArgument(
                f"job `land` writes files, not `{request.target}`",
                hint="name a directory, or use job `copy` to write a stream",
            )
        target.check(self, request, query_id)

    def write(self, source: DataFrame, request: Request) -> Any:
        return target.write(source, target.layout_of(self, request))
