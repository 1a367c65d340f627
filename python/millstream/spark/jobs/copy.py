"""Job `copy`: the records of streams appended to one stream; exactly once.

Where it sits: found through `jobs`, run by `driver`; the work is done by the connector's own sink,
which stages on the executors and commits each batch at once.
Invariant I-COP-1: records of one stream stay in their order; streams are merged batch by batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, QueryJob, Request, check_no_loop
from millstream.spark.jobs.shared.streams import CREATE, write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Copy(QueryJob):
    """Streams to a stream."""

    name = "copy"
    summary = "streams to one stream: merge, move to another content type"
    options: ClassVar[tuple[JobOption, ...]] = (
        CREATE,
        JobOption("content-type", "Content type of a stream that is created.", "application/json"),
    )

    def check(self, request: Request, query_id: str | None) -> None:  # noqa: ARG002
        if request.target.stream is None:
            raise InvalidArgument(
                f"job `{self.name}` writes a stream, not the directory `{request.target}`",
                hint="write --to stream:NAME, or use job `land` for files",
            )
        check_no_loop(self, request)

    def write(self, source: DataFrame, request: Request) -> Any:
        content_type = request.option(self, "content-type")
        rows = source.select("value")
        return write(rows, self, request, stream=request.target.stream, content_type=content_type)
