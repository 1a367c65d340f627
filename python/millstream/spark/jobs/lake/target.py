"""A lake as the target of a job: its options, what is refused before a session is started, and the writer.

Where it sits: between the jobs that write files and the sink behind them (`sink`).
Invariant I-LAK-14: a directory keeps its kind of table and its partitions, and holds the records of one checkpoint unless the
run says that it is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, flag
from millstream.spark.jobs.lake.layout import (
    HIDDEN,
    IDENTIFIER,
    TABLES,
    Layout,
    partition_columns,
    root_of,
)
from millstream.spark.jobs.shared.table_versions import Versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from millstream.spark.jobs.job import Job, Request

PARTITIONINGS: Final = ("date", "stream", "date,stream", "none")
CATALOG: Final = "catalog"
CATALOG_TABLE: Final = "catalog-table"
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
    JobOption(CATALOG, "Iceberg catalog of your own, as pyiceberg knows it.", fixed=True),
    JobOption(CATALOG_TABLE, "The table in that catalog.", IDENTIFIER, fixed=True),
)
"""What a lake looks like."""
OPTIONS: Final = (*FORM, SHARED)


def layout_of(job: Job, request: Request) -> Layout:
    scheme, root = root_of(str(request.target.path))
    return Layout(
        root,
        request.option(job, "table"),
        partition_columns(request.option(job, "partition-by")),
        scheme,
        request.option(job, CATALOG),
        request.option(job, CATALOG_TABLE),
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
    check_place(layout)
    check_kind(layout)
    others = [name for name in queries_at(layout) if name != query_id]
    if others and not shared and not request.flag(job, SHARED.name):
        raise InvalidArgument(
            f"`{layout.url}` was filled with another checkpoint, of query {others[0]}; "
            "a new one would land the same records a second time",
            hint="use the checkpoint of the first run or another directory; or add "
            "`--shared` if these are other records",
        )


def write(rows: DataFrame, layout: Layout, options: Mapping[str, str] | None = None) -> Any:
    """The writer of rows into a lake; `options` are for the sink."""
    from millstream.spark.jobs.lake.sink import FORMAT, LakeSink

    rows.sparkSession.dataSource.register(LakeSink)
    writer = rows.writeStream.format(FORMAT).outputMode("append")
    return writer.options(**sink_options(layout), **(options or {}))


def write_batch(rows: DataFrame, layout: Layout) -> None:
    """Publish the rows of a batch, inside of a function of foreachBatch: as often as it runs, they are there once."""
    from millstream.spark.jobs.lake.sink import FORMAT, LakeSink

    rows.sparkSession.dataSource.register(LakeSink)
    rows.write.format(FORMAT).mode("append").options(**sink_options(layout)).save()


def sink_options(layout: Layout) -> dict[str, str]:
    return {
        "path": layout.url,
        "table": layout.table,
        "partitionBy": ",".join(layout.partition_by) or "none",
        "catalog": layout.catalog,
        "catalogTable": layout.identifier,
    }


def check_place(layout: Layout) -> None:
    """What can be where: an object store has no rename, and a catalog of one's own is of Iceberg."""
    if layout.table != "iceberg" and (layout.catalog or layout.identifier != IDENTIFIER):
        raise InvalidArgument(
            "--catalog is for Iceberg", hint="add --table iceberg, or leave it out"
        )
    if "." not in layout.identifier.strip("."):
        raise InvalidArgument(
            f"`{layout.identifier}` is not a table of a catalog", hint="write NAMESPACE.TABLE"
        )
    if not layout.scheme:
        if layout.root.exists() and not layout.root.is_dir():
            raise InvalidArgument(f"`{layout.root}` is not a directory", hint="name another one")
        if Versions(layout.root).owner() is not None:
            raise InvalidArgument(
                f"`{layout.root}` holds a table in versions, of job `materialise`",
                hint="name another directory",
            )
    elif layout.table == "parquet":
        raise InvalidArgument(
            "plain Parquet files on an object store cannot be published at once: it has no rename",
            hint="add `--table delta` or `--table iceberg`",
        )
    elif layout.table == "iceberg" and not layout.catalog:
        raise InvalidArgument(
            "an Iceberg table on an object store needs a catalog of your own",
            hint="name one that pyiceberg knows: --catalog NAME",
        )
    if layout.catalog:
        from millstream.spark.jobs.lake.iceberg import open_catalog
        from millstream.spark.jobs.lake.tables import check_installed

        check_installed(layout.table)
        open_catalog(layout).close()


def queries_at(layout: Layout) -> list[str]:
    """The queries that have landed in a directory."""
    if layout.scheme:
        from millstream.spark.jobs.lake import objects

        return objects.queries_at(layout)
    batches = layout.root / HIDDEN / "batches"
    return sorted(path.name for path in batches.iterdir()) if batches.is_dir() else []


def check_kind(layout: Layout) -> None:
    """A directory keeps its kind of table, and its partitions."""
    # It loads pyarrow, which a list of jobs does without.
    from millstream.spark.jobs.lake.publish import check_partitions, some_manifest

    found = table_at(layout)
    if found is not None and found != layout.table:
        raise InvalidArgument(
            f"`{layout.url}` holds a lake of kind `{found}`, not `{layout.table}`",
            hint=f"add `--table {found}`, or name another directory",
        )
    if layout.scheme:
        return  # its table knows its partitions
    landed = some_manifest(layout)
    if landed is not None:
        check_partitions(layout, landed)


def table_at(layout: Layout) -> str | None:
    """Which kind of lake a directory holds already; `None` if it holds none.

    A table that others made shows itself. One of ours may have died before its first entry: its manifest knows.
    """
    if layout.scheme:
        from millstream.spark.jobs.lake import objects

        return objects.table_at(layout)
    if (layout.root / "_delta_log").is_dir():
        return "delta"
    if (layout.root / "metadata").is_dir() and (layout.root / "catalog.db").is_file():
        return "iceberg"
    # It loads pyarrow, which a list of jobs does without.
    from millstream.spark.jobs.lake.publish import some_manifest

    manifest = some_manifest(layout)
    return None if manifest is None else manifest.table
