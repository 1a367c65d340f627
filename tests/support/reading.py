"""The connector's readers without Spark: a query driven by hand, as Spark's planner and executors drive it.

The reader is the real one over the real server; only the JVM between planner and executors is left out. What
depends on Spark itself (pickling, triggers, checkpoints on disk) is tested in tests/spark.
"""

from __future__ import annotations

import json
from typing import Any, Self

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import (
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.spark.read.stream_reader import StreamReader
from millstream.spark.source import MillstreamDataSource

SCHEMA = StructType(
    [
        StructField("stream", StringType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("value", BinaryType()),
    ]
)


def source(url: str, **options: Any) -> MillstreamDataSource:
    texts = {
        name.lower(): value if isinstance(value, str) else json.dumps(value)
        for name, value in options.items()
    }
    return MillstreamDataSource({"url": url, **texts})


class HandQuery:
    """A streaming query: `batch()` is one micro-batch, `start` what a checkpoint would hold."""

    def __init__(self, url: str, *, start: dict[str, Any] | None = None, **options: Any) -> None:
        reader = source(url, **options).streamReader(SCHEMA)
        assert isinstance(reader, StreamReader)
        self.reader = reader
        self.tasks = 0
        try:
            self.start = _through_json(reader.initialOffset()) if start is None else start
        except BaseException:
            reader.stop()
            raise

    def latest(self, limit: ReadLimit | None = None) -> dict[str, Any]:
        chosen = self.reader.getDefaultReadLimit() if limit is None else limit
        return _through_json(self.reader.latestOffset(self.start, chosen))

    def batch(self, limit: ReadLimit | None = None) -> list[tuple[str, int, Any]]:
        """The records of the next micro-batch as (stream, offset, value)."""
        end = self.latest(limit)
        if json.dumps(end) == json.dumps(self.start):
            return []
        rows = self.between(self.start, end)
        self.start = end
        return rows

    def between(self, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[str, int, Any]]:
        partitions = self.reader.partitions(start, end)
        self.tasks = len(partitions)
        rows: list[tuple[str, int, Any]] = []
        for partition in partitions:
            for part in self.reader.read(partition):
                rows += records(part)
        return rows

    def close(self) -> None:
        self.reader.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def records(part: pa.RecordBatch) -> list[tuple[str, int, Any]]:
    rows = part.to_pylist()
    return [(row["stream"], row["offset"], json.loads(row["value"])) for row in rows]


def _through_json(value: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(json.dumps(value))
    return decoded
