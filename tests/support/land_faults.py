"""A lake sink whose driver dies by kill -9 at a chosen step of a chosen batch: everything at once, JVM and workers too.

Used by tests/spark/test_land.py inside a `support.spark.Driver`, which leads a session of processes of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.spark.jobs import find
from millstream.spark.jobs.job import Request, Target, read_streams
from millstream.spark.jobs.lake.files import WrittenFile
from millstream.spark.jobs.lake.publish import Manifest, Publisher
from millstream.spark.jobs.lake.sink import LakeSink
from millstream.spark.jobs.run import driver
from support.spark import session_processes

POINTS = ("written", "decided", "renamed", "placed", "entered", "cleaned")
ROWS_PER_BATCH = 500
POINT = "MILLSTREAM_TEST_DIE_AT"
"""Environment of the driver: `point,batch`."""


def die_with_everything() -> None:
    """Kill the leader first: nothing may end in an orderly way."""
    leader = os.getsid(0)
    others = [pid for pid in session_processes(leader) if pid not in (leader, os.getpid())]
    for pid in (leader, *others, os.getpid()):
        os.kill(pid, signal.SIGKILL)


class DyingPublisher(Publisher):
    """Dies right after one step."""

    def publish(self, query_id: str, batch_id: int, files: Sequence[WrittenFile]) -> Manifest:
        point, _, batch = os.environ[POINT].partition(",")
        self.point = point if int(batch) == batch_id else ""
        self._after("written")
        return super().publish(query_id, batch_id, files)

    def _after(self, step: str) -> None:
        if step == self.point:
            die_with_everything()

    def decide(self, query_id: str, batch_id: int, files: Sequence[WrittenFile]) -> Manifest:
        manifest = super().decide(query_id, batch_id, files)
        self._after("decided")
        return manifest

    def rename(self, temporary: Path, final: Path) -> None:
        super().rename(temporary, final)
        self._after("renamed")

    def place(self, manifest: Manifest) -> None:
        super().place(manifest)
        self._after("placed")

    def enter(self, manifest: Manifest) -> None:
        super().enter(manifest)
        self._after("entered")

    def clean(self, manifest: Manifest) -> None:
        super().clean(manifest)
        self._after("cleaned")


class DyingSink(LakeSink):
    publisher = DyingPublisher


def file_source(spark: Any, folder: str, tasks: int) -> Any:
    """A stream of records from Parquet files, one file a batch, cut into `tasks` tasks."""
    stream = spark.readStream.schema(
        "stream string, offset bigint, timestamp timestamp, value binary"
    )
    return stream.option("maxFilesPerTrigger", 1).parquet(folder).repartition(tasks)


def request(
    root: str,
    table: str,
    partition_by: str = "date",
    checkpoint: str | None = None,
    url: str = "http://127.0.0.1:1",
) -> Request:
    return Request(
        url=url,
        streams=("chat/*",),
        target=Target.parse(root),
        options={"table": table, "partition-by": partition_by},
        rows_per_batch=ROWS_PER_BATCH,
        checkpoint=checkpoint,
    )


def land(
    spark: Any,
    *,
    root: str,
    checkpoint: str,
    source: str,
    table: str,
    tasks: int,
    partition_by: str = "date",
) -> dict[str, int]:
    """Run `land` to the end of what is there; with `POINT` in the environment it dies on the way.

    `source` is a folder of files, or the URL of a server with streams below `chat/`.
    """
    job: Any = find("land")
    if source.startswith("http"):
        asked = request(root, table, partition_by, checkpoint, source)
        records = read_streams(spark, job, asked).repartition(tasks)
    else:
        asked = request(root, table, partition_by, checkpoint)
        records = file_source(spark, source, tasks)
    driver.check(job, asked)
    if POINT in os.environ:
        job = _Dying()
    query = driver.start(job, asked, spark, source=records)
    summary = driver.watch(query, lambda _: None)
    return {"batches": summary.batches, "rows": summary.rows}


class _Dying(type(find("land"))):  # type: ignore[misc] - the class of the job is what is meant
    def write(self, source: Any, request: Request) -> Any:
        writer = super().write(source, request)
        source.sparkSession.dataSource.register(DyingSink)
        return writer
