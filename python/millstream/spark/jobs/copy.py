"""Job `copy`: the records of streams appended to one stream; exactly once.

Where it sits: found through `jobs`, run by `driver`; the work is done by the connector's own sink,
which stages on the executors and commits each batch at once.
Invariant I-COP-1: records of one stream stay in their order; streams are merged batch by batch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, Request, glob_pattern

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

YES_NO = ("yes", "no")


class Copy:
    """Streams to a stream."""

    name = "copy"
    summary = "streams to one stream: merge, replay, move to another content type"
    options = (
        JobOption("create", "Create the target stream if it is missing.", "no", YES_NO),
        JobOption("content-type", "Content type of a stream that is created.", "application/json"),
    )

    def check(self, request: Request, query_id: str | None) -> None:  # noqa: ARG002
        if request.target.stream is None:
            raise InvalidArgument(
                f"job `copy` writes a stream, not the directory `{request.target}`",
                hint="write --to stream:NAME, or use job `land` for files",
            )
        patterns = map(glob_pattern, request.streams)
        if any(re.fullmatch(pattern, request.target.stream) for pattern in patterns):
            raise InvalidArgument(
                f"stream `{request.target.stream}` would be copied to itself",
                hint="name a target that --from does not name",
            )

    def write(self, source: DataFrame, request: Request) -> Any:
        writer = (
            source.select("value")
            .writeStream.format("millstream")
            .outputMode("append")
            .options(**request.connection())
            .option("stream", str(request.target.stream))
        )
        if request.option(self, "create") == "yes":
            content_type = request.option(self, "content-type")
            writer = writer.option("createStreams", "true").option("contentType", content_type)
        return writer
