"""A lake as a Delta table: the driver commits metadata, nobody copies a record.

Where it sits: the last step of `publish` with `table=delta`; needs the extra `[delta]`.
Invariant I-LAK-10: a commit carries the transaction (query id, batch id); a batch whose number the
table has seen for this query is not entered again.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millstream.errors import PipelineError
from millstream.spark.jobs.lake.layout import Layout
from millstream.spark.jobs.lake.publish import check_columns, columns_of, not_taken, schema_of
from millstream.spark.jobs.lake.store import files_of, storage_options

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from millstream.spark.jobs.lake.publish import Manifest

BOUNDED: Final = frozenset({"stream", "offset", "timestamp"})
"""Columns that people ask for ranges of."""


class DeltaLake:
    """The Delta table at the root of the lake."""

    def __init__(self, layout: Layout, *, replaces: bool = False) -> None:
        self._layout = layout
        self._mode = "overwrite" if replaces else "append"

    def enter(self, manifest: Manifest) -> None:
        from deltalake.transaction import CommitProperties, Transaction

        table = self._table(manifest)
        seen = table.transaction_version(manifest.query_id)
        if seen is not None and seen >= manifest.batch_id:
            return
        table.create_write_transaction(
            actions=self._actions(manifest),
            mode=self._mode,
            schema=table.schema(),
            partition_by=list(self._layout.partition_by),
            commit_properties=CommitProperties(
                app_transactions=[Transaction(manifest.query_id, manifest.batch_id)],
                custom_metadata={
                    "millstream.query": manifest.query_id,
                    "millstream.batch": str(manifest.batch_id),
                },
            ),
        )

    def entered(self, query_id: str) -> int | None:
        table = self._there()
        version = None if table is None else table.transaction_version(query_id)
        return None if version is None else int(version)

    def check(self, schema: pa.Schema) -> None:
        wanted = self._wanted(schema)
        table = self._there()
        if table is None:
            return
        check_columns("Delta table", columns_of(table.schema().fields), columns_of(wanted.fields))
        columns = tuple(table.metadata().partition_columns)
        if columns != self._layout.partition_by:
            raise PipelineError(
                f"the Delta table is partitioned by {', '.join(columns) or 'nothing'}",
                code="lake_schema_differs",
                hint="partition the records alike, or land into another directory",
            )

    def _table(self, manifest: Manifest) -> Any:
        from deltalake import DeltaTable

        schema = schema_of(self._layout, manifest)
        assert schema is not None, "the files are in their place"
        self.check(schema)
        return self._there() or DeltaTable.create(
            self._layout.url,
            self._wanted(schema),
            mode="ignore",
            partition_by=list(self._layout.partition_by),
            storage_options=storage_options(self._layout),
        )

    def _there(self) -> Any:
        """The table, if there is one."""
        from deltalake import DeltaTable

        options = storage_options(self._layout)
        if not DeltaTable.is_deltatable(self._layout.url, options):
            return None
        return DeltaTable(self._layout.url, storage_options=options)

    def _wanted(self, schema: pa.Schema) -> Any:
        from deltalake.schema import Schema

        try:
            return Schema.from_arrow(self._schema(schema))
        except Exception as error:  # the class that it raises is `Exception` itself
            raise not_taken("Delta", error) from error

    def _schema(self, files: pa.Schema) -> pa.Schema:
        for name in self._layout.partition_by:
            files = files.append(pa.field(name, pa.date32() if name == "date" else pa.string()))
        return files

    def _actions(self, manifest: Manifest) -> list[Any]:
        from deltalake.transaction import AddAction

        now_ms = time.time_ns() // 1_000_000
        files = files_of(self._layout)
        return [
            AddAction(
                path=file.path,
                size=file.bytes,
                partition_values=dict(file.partition),
                modification_time=now_ms,
                data_change=True,
                stats=json.dumps(_statistics(files.footer(file.path), file.rows)),
            )
            for file in manifest.files
        ]


def _statistics(footer: pq.FileMetaData, rows: int) -> dict[str, Any]:
    """What a reader needs to pass over a file: least and greatest values, from the footer of the file."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path
        groups = [
            footer.row_group(n).column(index).statistics for n in range(footer.num_row_groups)
        ]
        if name not in BOUNDED or not all(s and s.has_min_max and s.has_null_count for s in groups):
            continue
        least[name] = _plain(min(s.min for s in groups), up=False)
        greatest[name] = _plain(max(s.max for s in groups), up=True)
        nulls[name] = sum(s.null_count for s in groups)
    return {"numRecords": rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}


def _plain(value: Any, *, up: bool) -> Any:
    """Delta writes times in whole milliseconds: the bounds are moved outwards."""
    if not isinstance(value, datetime):
        return value
    moved = value + timedelta(microseconds=-value.microsecond % 1000) if up else value
    return moved.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
