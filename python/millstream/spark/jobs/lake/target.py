"""A lake as the target of a job: its options, what is refused before a session is started, and the writer.

Where it sits: between the jobs that write files and the sink behind them (`sink`).
Invariant I-LAK-14: a directory keeps its kind of table and its partitions, and holds the records of one checkpoint unless the
run says that it is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, flag
from millstream.spark.jobs.lake.layout import HIDDEN, TABLES, Layout, local_root, partition_columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from millstream.spark.jobs.job import Job, Request

PARTITIONINGS: Final = ("date", "stream", "date,stream", "none")
SHARED: Final = flag("shared", "Runs with other checkpoints write here too.")
FORM: Final = (
    JobOption("table", "What the directory becomes.", "parquet", TABLES, fixed=True),
    JobOption(
        "partition-by",
        "Directories by day of `timestamp` (UTC), by stream, or both.",
        "date",
        PARTITIONINGS,
        fixed=True,
    ),
)
"""What a lake looks like."""
OPTIONS: Final = (*FORM, SHARED)


def layout_of(job: Job, request: Request) -> Layout:
    return Layout(
        local_root(str(request.target.path)),
        request.option(job, "table"),
        partition_columns(request.option(job, "partition-by")),
    )


def check_either(job: Job, request: Request, query_id: str | None, *, shared: bool = False) -> None:
    """The same for jobs that write a lake or streams; options of a lake mean nothing for those."""
    if request.target.path is not None:
        check(job, request, query_id, shared=shared)
        return
    for option in OPTIONS:
        if option.name in request.options:
            raise InvalidArgument(
                f"--{option.name} means nothing for a stream",
                hint="leave it out, or name a directory as target",
            )


def check(job: Job, request: Request, query_id: str | None, *, shared: bool = False) -> None:
    layout = layout_of(job, request)
    if layout.root.exists() and not layout.root.is_dir():
        raise InvalidArgument(f"`{layout.root}` is not a directory", hint="name another one")
    check_kind(layout)
    others = [name for name in queries_at(layout) if name != query_id]
    if others and not shared and not request.flag(job, SHARED.name):
        raise InvalidArgument(
            f"`{layout.root}` was filled with another checkpoint, of query {others[0]}; "
            "a new one would land the same records a second time",
            hint="use the checkpoint of the first run or another directory; or add "
            "`--shared` if these are other records",
        )


def write(rows: DataFrame, layout: Layout, options: Mapping[str, str] | None = None) -> Any:
    """The writer of rows into a lake; `options` are for the sink."""
    from millstream.spark.jobs.lake.sink import FORMAT, LakeSink

    rows.sparkSession.dataSource.register(LakeSink)
    return (
        rows.writeStream.format(FORMAT)
        .outputMode("append")
        .options(**(options or {}))
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
