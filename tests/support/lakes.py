"""Lakes as `land` writes them, made of streams without a query; and what the readers of each kind of lake see in them."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa

from millstream.client.sync.client import Client
from millstream.spark.jobs.lake.files import write_files
from millstream.spark.jobs.lake.iceberg import IDENTIFIER, open_catalog
from millstream.spark.jobs.lake.layout import Layout, TaskPlace
from millstream.spark.jobs.lake.publish import Publisher
from millstream.spark.jobs.lake.tables import table_of
from support.spark_jobs import rows

TABLES = ("parquet", "delta", "iceberg")
KOLKATA = "Asia/Kolkata"


class Lake:
    """A lake that is filled batch by batch; each batch is of one task."""

    def __init__(self, root: Path, table: str = "parquet", partition_by: str = "date") -> None:
        by = tuple(name for name in partition_by.split(",") if name != "none")
        self.layout = Layout(root, table, by)
        self.root = root
        self.query = str(uuid.uuid4())
        self._batch = 0

    def land(self, client: Client, *streams: str, first: int = 0, upto: int | None = None) -> None:
        """One batch: records `first` to `upto` of each stream."""
        self.add([read(client, name, first, upto) for name in streams])

    def add(self, batches: list[pa.RecordBatch]) -> None:
        files = write_files(batches, self.layout, TaskPlace(self.query, self._batch, 0))
        publisher = Publisher(self.layout, table_of(self.layout))
        publisher.publish(self.query, self._batch, files)
        self._batch += 1

    def files(self) -> list[Path]:
        return sorted(
            path for path in self.root.rglob("*.parquet") if "_millstream" not in path.parts
        )


def read(client: Client, name: str, first: int = 0, upto: int | None = None) -> pa.RecordBatch:
    """The records of a stream as Spark would hand them over, in a zone other than UTC."""
    with client.stream(name).read_arrow(columns=["number", "time", "value"]) as batches:
        found = pa.Table.from_batches(list(batches)).slice(
            first, None if upto is None else upto - first
        )
    table = pa.table(
        {
            "stream": pa.repeat(name, found.num_rows),
            "offset": found["number"].cast(pa.int64()),
            "timestamp": found["time"].cast(pa.timestamp("us", KOLKATA)),
            "value": found["value"].cast(pa.binary()),
        }
    )
    return table.combine_chunks().to_batches()[0]


def seen(root: Path, table: str) -> list[tuple[Any, ...]]:
    """What a reader of this kind of lake finds."""
    if table == "delta":
        found = pa.table(deltalake.DeltaTable(root).to_pyarrow_table()).to_pylist()
    elif table == "iceberg":
        catalog = open_catalog(Layout(root, "iceberg"))
        found = catalog.load_table(IDENTIFIER).scan().to_arrow().to_pylist()
        catalog.close()
    else:
        found = rows(root)
    names = ("stream", "offset", "timestamp", "value")
    return sorted(tuple(row[name] for name in names) for row in found)
