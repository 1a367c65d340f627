"""Job `materialise`: the latest state per key of a changelog, as a table in versions or as snapshots in a stream.

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
from millstream.spark.jobs.job import JobOption, QueryJob, Request, Target, check_no_loop
from millstream.spark.jobs.lake import target
from millstream.spark.jobs.lake.layout import Layout, local_root
from millstream.spark.jobs.shared import streams
from millstream.spark.jobs.shared.refusal import refused
from millstream.spark.jobs.shared.table_versions import Versions

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

KEY: Final = ("stream", "type", "key")
STATE: Final = (
    "stream STRING, type STRING, key STRING, value STRING, offset BIGINT, timestamp TIMESTAMP"
)
OPERATIONS: Final = ("insert", "update", "upsert", "delete")
QUERY: Final = "sql.streaming.queryId"


class Materialise(QueryJob):
    """A changelog to the latest state per key."""

    name = "materialise"
    summary = "a changelog to the latest state per key, as a table in versions"
    options = (
        JobOption("table", "What a directory becomes.", "parquet", ("parquet", "delta"), fixed=True),
        streams.CREATE,
    )  # fmt: skip

    def check(self, request: Request, query_id: str | None) -> None:
        if request.target.stream is not None:
            self._check_stream(request)
        root = self.root(request)
        if root.exists() and not root.is_dir():
            raise InvalidArgument(f"`{root}` is not a directory", hint="name another one")
        versions = Versions(root)
        if versions.owner() is None and target.table_at(Layout(root)) is not None:
            raise InvalidArgument(
                f"`{root}` holds a lake, not a table in versions", hint="name another directory"
            )
        versions.check_owner(query_id)

    def _check_stream(self, request: Request) -> None:
        check_no_loop(self, request)
        if len(request.streams) > 1 or "*" in request.streams[0]:
            raise InvalidArgument(
                "a stream of snapshots is of one changelog", hint="name one stream, or a directory"
            )
        if "table" in request.options:
            raise InvalidArgument("--table means nothing for a stream", hint="leave it out")

    def target(self, streams: tuple[str, ...], text: str | None) -> Target:
        """A place that cannot work is told before a checkpoint is asked for."""
        found = super().target(streams, text)
        if found.path is not None:
            _directory(found.path)
        return found

    def root(self, request: Request) -> Path:
        """Where the versions are; those behind a stream are in its checkpoint."""
        from millstream.spark.jobs.run import driver

        if request.target.path is not None:
            return _directory(request.target.path)
        checkpoint = driver.local_checkpoint(request)
        if checkpoint is None:
            raise InvalidArgument(
                "a stream of snapshots needs a checkpoint on a file system",
                hint="name a directory that driver and executors share",
            )
        return checkpoint.absolute() / "versions"

    def source(self, request: Request) -> dict[str, str]:  # noqa: ARG002
        return {"columns": "stream,offset,timestamp,value"}

    def write(self, source: DataFrame, request: Request) -> Any:
        if type(source.sparkSession).__module__.startswith("pyspark.sql.connect"):
            raise NotSupported(
                "job `materialise` does not run on a Connect server", hint="leave --remote out"
            )
        versions = Versions(self.root(request))

        def take(batch: DataFrame, number: int) -> None:
            query = str(batch.sparkSession.sparkContext.getLocalProperty(QUERY))
            versions.claim(query)
            if not versions.path(number).is_dir():
                make(batch, number, versions)
            self.publish(batch.sparkSession, versions, request, query, number)

        return source.writeStream.foreachBatch(take)

    def publish(
        self, session: SparkSession, versions: Versions, request: Request, query: str, number: int
    ) -> None:
        """What is left to do for a version that is there; it may come again."""
        if request.option(self, "table") == "delta":
            _enter_delta(versions, query, number)
            return
        if request.target.stream is not None:
            options = streams.sink_options(self, request, stream=request.target.stream)
            options |= {"producerId": query, "batchId": str(number)}
            rows = snapshot(session, read(session, versions.path(number)))
            rows.write.format("millstream").mode("append").options(**options).save()
        versions.prune()


def _directory(path: str) -> Path:
    return local_root(
        path, "versions of a table are directories, each made whole before it is seen"
    )


def make(batch: DataFrame, number: int, versions: Versions) -> None:
    """Version `number`, from the one before it and a batch."""
    session = batch.sparkSession
    # A session of the query alone. Spark's own default is a type that others read as nanoseconds.
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    changes = changes_of(batch).persist()
    try:
        changes.count()  # executors would read for the resets and for the state at once, and both be counted
        before = versions.before(number)
        state = state_after(None if before is None else read(session, before), changes)
        draft = versions.draft()
        state.write.option("compression", "zstd").parquet(f"file://{draft}")
    finally:
        changes.unpersist()
    versions.publish(draft, number)


def read(session: SparkSession, version: Path) -> DataFrame:
    return session.read.schema(STATE).parquet(f"file://{version}")


def changes_of(batch: DataFrame) -> DataFrame:
    """One row for each record; one that is not a change ends the query."""
    from pyspark.sql import functions as f

    # A variant, and not a schema: in a text a string would look like the number or object that it spells.
    record = f.try_parse_json(f.col("value").cast("string"))

    def part(path: str) -> Column:
        return f.try_variant_get(record, f"$.{path}", "string")

    operation, control = part("headers.operation"), part("headers.control")
    is_change = part("key").isNotNull() & operation.isin(*OPERATIONS)
    other = refused(
        "not_a_change",
        "is not a change of the state protocol",
        hint="a change has `key` and `headers.operation`, one of " + ", ".join(OPERATIONS),
    )
    kind = f.when(control.isNotNull(), control).when(is_change, operation)
    return batch.select(
        "stream",
        f.coalesce(part("type"), f.lit("")).alias("type"),
        part("key").alias("key"),
        f.to_json(f.try_variant_get(record, "$.value", "variant")).alias("value"),
        "offset",
        "timestamp",
        kind.otherwise(other).alias("kind"),
    )


def state_after(before: DataFrame | None, changes: DataFrame) -> DataFrame:
    """The state that was there, and what the changes make of it."""
    from pyspark.sql import functions as f

    def newest(order: Column) -> Column:
        return f.max_by(f.struct("value", "offset", "timestamp", "kind"), order).alias("last")

    # A stream that was made anew counts from 0 again: what came later is later all the same.
    rows = changes.where(f.col("kind").isin(*OPERATIONS)).withColumn("turn", f.lit(1))
    if before is not None:
        rows = before.withColumns({"kind": f.lit("upsert"), "turn": f.lit(0)}).unionByName(rows)
    resets = changes.where(f.col("kind") == "reset").groupBy("stream")
    ended = resets.agg(f.max("offset").alias("reset"))
    rows = rows.join(f.broadcast(ended), "stream", "left").where(
        f.col("reset").isNull() | ((f.col("turn") == 1) & (f.col("offset") > f.col("reset")))
    )
    last = rows.groupBy(*KEY).agg(newest(f.struct("turn", "offset")))
    kept = last.where(f.col("last.kind") != "delete")
    return kept.select(*KEY, "last.value", "last.offset", "last.timestamp")


def snapshot(session: SparkSession, state: DataFrame) -> DataFrame:
    """The state as changes that a reader of the stream takes in place of all that it has."""
    from pyspark.sql import functions as f

    around = [(0, "reset"), (1, "snapshot-start"), (3, "snapshot-end")]
    texts = [(turn, "", f'{{"headers":{{"control":"{name}"}}}}') for turn, name in around]
    controls = session.createDataFrame(texts, "turn INT, name STRING, value STRING")
    name = f.to_json(f.struct("type", "key"))
    change = f.concat(
        f.regexp_replace(name, r"\}$", ""),
        f.lit(',"value":'),
        f.coalesce("value", f.lit("null")),
        f.lit(',"headers":{"operation":"upsert"}}'),
    )
    rows = state.select(f.lit(2).alias("turn"), name.alias("name"), change.alias("value"))
    # One task: a stream has an order.
    ordered = controls.unionByName(rows).repartition(1).sortWithinPartitions("turn", "name")
    return ordered.select("value")


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
