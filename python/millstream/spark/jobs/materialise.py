"""Job `materialise`: the latest state per key of a changelog, as a table in versions.

Where it sits: found through `jobs`, run by `driver`. Records are changes of the state protocol of Durable Streams:

    {"type": "user", "key": "7", "value": {...}, "headers": {"operation": "insert" | "update" | "upsert" | "delete"}}
    {"headers": {"control": "reset" | "snapshot-start" | "snapshot-end"}}

Invariants:
- I-MAT-1  Version n is the fold of all changes up to batch n: made from version n - 1 and the changes of batch n, nothing else.
- I-MAT-2  Of one stream the last change of a key counts, and a reset ends everything before it. Streams do not mix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument, NotSupported
from millstream.spark.jobs.job import Job, JobOption, Request
from millstream.spark.jobs.lake.layout import Layout, local_root
from millstream.spark.jobs.refusal import refused
from millstream.spark.jobs.versions import Versions

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

CHANGE: Final = (
    "type STRING, key STRING, value STRING, headers STRUCT<operation: STRING, control: STRING>"
)
KEY: Final = ("stream", "type", "key")
STATE: Final = (
    "stream STRING, type STRING, key STRING, value STRING, offset BIGINT, timestamp TIMESTAMP"
)
OPERATIONS: Final = ("insert", "update", "upsert", "delete")
QUERY: Final = "sql.streaming.queryId"


class Materialise(Job):
    """A changelog to the latest state per key."""

    name = "materialise"
    summary = "a changelog to the latest state per key, as a table in versions"
    options = (
        JobOption("table", "What the directory becomes.", "parquet", ("parquet", "delta"), fixed=True),
    )  # fmt: skip

    def check(self, request: Request, query_id: str | None) -> None:
        if request.target.path is None:
            raise InvalidArgument(
                f"job `materialise` writes a table, not `{request.target}`", hint="name a directory"
            )
        root = local_root(request.target.path)
        if root.exists() and not root.is_dir():
            raise InvalidArgument(f"`{root}` is not a directory", hint="name another one")
        Versions(root).check_owner(query_id)

    def source(self, request: Request) -> dict[str, str]:  # noqa: ARG002
        return {
            "columns": "stream,offset,timestamp,value",
            "valueFormat": "json",
            "valueSchema": CHANGE,
            "mode": "PERMISSIVE",
        }

    def write(self, source: DataFrame, request: Request) -> Any:
        if type(source.sparkSession).__module__.startswith("pyspark.sql.connect"):
            raise NotSupported(
                "job `materialise` does not run on a Connect server", hint="leave --remote out"
            )
        versions = Versions(local_root(str(request.target.path)))
        table = request.option(self, "table")
        return source.writeStream.foreachBatch(
            lambda batch, number: next_version(batch, number, versions, table)
        )


def next_version(batch: DataFrame, number: int, versions: Versions, table: str) -> None:
    """Make version `number`, unless it is there; the table format comes last and may come again."""
    session = batch.sparkSession
    query = str(session.sparkContext.getLocalProperty(QUERY))
    versions.claim(query)
    if not versions.path(number).is_dir():
        # A session of the query alone. Spark's own default is a type that others read as nanoseconds.
        session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        changes = changes_of(batch).persist()
        try:
            state = state_after(session, versions.before(number), changes)
            draft = versions.draft()
            state.write.option("compression", "zstd").parquet(f"file://{draft}")
        finally:
            changes.unpersist()
        versions.publish(draft, number)
    if table == "delta":
        _enter_delta(versions, query, number)
    else:
        versions.prune()


def changes_of(batch: DataFrame) -> DataFrame:
    """One row for each record; one that is not a change ends the query."""
    from pyspark.sql import functions as f

    operation, control = (f.col(f"value.headers.{name}") for name in ("operation", "control"))
    is_change = f.col("value.key").isNotNull() & operation.isin(*OPERATIONS)
    other = refused(
        "not_a_change",
        "is not a change of the state protocol",
        hint="a change has `key` and `headers.operation`, one of " + ", ".join(OPERATIONS),
    )
    kind = f.when(control.isNotNull(), control).when(is_change, operation)
    return batch.select(
        "stream",
        f.coalesce("value.type", f.lit("")).alias("type"),
        "value.key",
        "value.value",
        "offset",
        "timestamp",
        kind.otherwise(other).alias("kind"),
    )


def state_after(session: SparkSession, before: Path | None, changes: DataFrame) -> DataFrame:
    """The state that was there, and what the changes make of it."""
    from pyspark.sql import functions as f

    def newest(order: Column) -> Column:
        return f.max_by(f.struct("value", "offset", "timestamp", "kind"), order).alias("last")

    # A stream that was made anew counts from 0 again: what came later is later all the same.
    rows = changes.where(f.col("kind").isin(*OPERATIONS)).withColumn("turn", f.lit(1))
    if before is not None:
        old = session.read.schema(STATE).parquet(f"file://{before}")
        rows = old.withColumns({"kind": f.lit("upsert"), "turn": f.lit(0)}).unionByName(rows)
    resets = changes.where(f.col("kind") == "reset").groupBy("stream")
    ended = resets.agg(f.max("offset").alias("reset"))
    rows = rows.join(f.broadcast(ended), "stream", "left").where(
        f.col("reset").isNull() | ((f.col("turn") == 1) & (f.col("offset") > f.col("reset")))
    )
    last = rows.groupBy(*KEY).agg(newest(f.struct("turn", "offset")))
    kept = last.where(f.col("last.kind") != "delete")
    return kept.select(*KEY, "last.value", "last.offset", "last.timestamp")


def _enter_delta(versions: Versions, query: str, number: int) -> None:
    """The files of the version are the table; those of the version before are no longer part of it."""
    import time

    import pyarrow.parquet as pq

    from millstream.spark.jobs.lake.delta import DeltaLake
    from millstream.spark.jobs.lake.files import WrittenFile
    from millstream.spark.jobs.lake.publish import Manifest

    paths = sorted(versions.path(number).glob("*.parquet"))
    names = [(path, path.relative_to(versions.root).as_posix()) for path in paths]
    files = tuple(
        WrittenFile(name, name, (), pq.read_metadata(path).num_rows, path.stat().st_size)
        for path, name in names
    )
    manifest = Manifest(query, number, time.time_ns() // 1_000_000, "delta", files, ())
    DeltaLake(Layout(versions.root, "delta", ()), replaces=True).enter(manifest)
