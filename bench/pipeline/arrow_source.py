"""The ceiling of the Python Data Source API: the connector's columns from local, pre-encoded Arrow files.

The same columns in batches of the same size as the server sends, read from the page cache: what is slower than
this is the server's and the connector's part, what is not is Spark's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

SCHEMA = "stream string, offset bigint, timestamp timestamp, value binary"


class ArrowFilePartition(InputPartition):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class ArrowFileReader(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def partitions(self) -> list[InputPartition]:
        return [ArrowFilePartition(str(path)) for path in sorted(Path(self.folder).glob("*.arrow"))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ArrowFilePartition)
        with open(partition.path, "rb") as file, pa.ipc.open_stream(file) as batches:
            yield from batches


class ArrowFileSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "arrowfile"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return ArrowFileReader(self.options["path"])
