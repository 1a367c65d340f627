"""Streams as the target of a job: the option that creates them, and the writer, which is the connector's own.

Where it sits: below the jobs that write streams. A batch is one commit, to however many streams its rows go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.errors import StreamNotFound
from millstream.spark.jobs.job import flag

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millstream.client.sync.client import Client
    from millstream.spark.jobs.job import Job, Request

CREATE: Final = flag("create", "Create streams to write to that are missing.")
JSON: Final = "application/json"


def sink_options(
    job: Job, request: Request, *, stream: str | None, content_type: str = JSON
) -> dict[str, str]:
    """Options of the connector's sink; without `stream` each row names its own."""
    options = request.connection()
    if stream is not None:
        options["stream"] = stream
    if request.flag(job, CREATE.name):
        options |= {"createStreams": "true", "contentType": content_type}
    return options


def write(
    rows: DataFrame,
    job: Job,
    request: Request,
    *,
    stream: str | None = None,
    content_type: str = JSON,
) -> Any:
    """The writer of rows (`value`, or `stream` and `value`) to streams."""
    options = sink_options(job, request, stream=stream, content_type=content_type)
    return rows.writeStream.format("millstream").outputMode("append").options(**options)


def check_targets(client: Client, job: Job, request: Request, patience_seconds: float) -> None:
    """A target that is missing is told before anything is read for it."""
    from millstream.client.pipeline_write import content_type_of

    if request.options.get(CREATE.name) == "yes":
        return
    for name in job.targets(request):
        try:
            content_type_of(client, name, patience_seconds=patience_seconds)
        except StreamNotFound as error:
            raise error.reworded(hint="create it first, or add --create") from None
