"""Job `land`: streams into a lake of Parquet files, or into a Delta or Iceberg table; exactly once.

Where it sits: found through `jobs`, run by `driver`; the work is done by the sink (`lake/sink`).
Invariant I-LAN-1: the lake holds each record once for every reader of the plain directory, after
whatever crash (the steps are in `lake/publish`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, Request
from millstream.spark.jobs.lake.layout import HIDDEN, TABLES, Layout, local_root, partition_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITIONINGS: Final = ("date", "stream", "date,stream", "none")


class Land:
    """Streams to a lake."""

    name = "land"
    summary = "streams to a directory of Parquet files, or a Delta or Iceberg table"
    options = (
        JobOption("table", "What the directory becomes.", "parquet", TABLES, fixed=True),
        JobOption(
            "partition-by",
            "Directories by day of `timestamp` (UTC), by stream, or both.",
            "date",
            PARTITIONINGS,
            fixed=True,
        ),
        JobOption("shared", "Runs with other checkpoints land here too.", "no", ("yes", "no")),
    )

    def check(self, request: Request, query_id: str | None) -> None:
        if request.target.path is None:
            raise InvalidArgument(
                f"job `land` writes files, not `{request.target}`",
                hint="name a directory, or use job `copy` to write a stream",
            )
        layout = self.layout(request)
        if layout.root.exists() and not layout.root.is_dir():
            raise InvalidArgument(f"`{layout.root}` is not a directory", hint="name another one")
        check_kind(layout)
        others = [name for name in queries_at(layout) if name != query_id]
        if others and request.option(self, "shared") == "no":
            raise InvalidArgument(
                f"`{layout.root}` was filled with another checkpoint, of query {others[0]}; "
                "a new one would land the same records a second time",
                hint="use the checkpoint of the first run or another directory; or add "
                "`--shared yes` if these are other streams",
            )

    def layout(self, request: Request) -> Layout:
        return Layout(
            local_root(str(request.target.path)),
            request.option(self, "table"),
            partition_columns(request.option(self, "partition-by")),
        )

    def write(self, source: DataFrame, request: Request) -> Any:
        from millstream.spark.jobs.lake.sink import FORMAT, LakeSink

        source.sparkSession.dataSource.register(LakeSink)
        layout = self.layout(request)
        return (
            source.writeStream.format(FORMAT)
            .outputMode("append")
            .option("path", str(layout.root))
            .option("table", layout.table)
            .option("partitionBy", ",".join(layout.partition_by) or "none")
        )


def queries_at(layout: Layout) -> list[str]:
    """The queries that have landed in a directory."""
    batches = layout.root / HIDDEN / "batches"
    return sorted(path.name for path in batches.iterdir()) if batches.is_dir() else []


def check_kind(layout: Layout) -> None:
    """A directory keeps its kind of table, and its partitions."""
    # It loads pyarrow, which a list of jobs does without.
    from millstream.spark.jobs.lake.publish import check_partitions, some_manifest

    found = table_at(layout)
    if found is not None and found != layout.table:
        raise InvalidArgument(
            f"`{layout.root}` holds a lake of kind `{found}`, not `{layout.table}`",
            hint=f"add `--table {found}`, or name another directory",
        )
    landed = some_manifest(layout)
    if landed is not None:
        check_partitions(layout, landed)


def table_at(layout: Layout) -> str | None:
    """Which kind of lake a directory holds already; `None` if it holds none.

    A table that others made shows itself. One of ours may have died before its first entry: its manifest knows.
    """
    if (layout.root / "_delta_log").is_dir():
        return "delta"
    if (layout.root / "metadata").is_dir() and (layout.root / "catalog.db").is_file():
        return "iceberg"
    # It loads pyarrow, which a list of jobs does without.
    from millstream.spark.jobs.lake.publish import some_manifest

    manifest = some_manifest(layout)
    return None if manifest is None else manifest.table
