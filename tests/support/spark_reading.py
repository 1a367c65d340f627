"""Shared by the tests of reading: streams with known records, reads with options, micro-batches as lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millstream.client.sync.client import Client, Stream
from support.spark import available_now

JSON = "application/json"


def filled(client: Client, path: str, count: int, *, per_append: int = 1, first: int = 0) -> Stream:
    """A JSON stream with the records `{"i": first}`, ... in appends of `per_append`."""
    stream = client.create(path, content_type=JSON)
    more(stream, count, per_append=per_append, first=first)
    return stream


def more(stream: Stream, count: int, *, per_append: int = 1, first: int = 0) -> None:
    values = [{"i": index} for index in range(first, first + count)]
    for begin in range(0, count, per_append):
        stream.append_many(values[begin : begin + per_append])


def batch(spark: Any, url: str, **options: Any) -> Any:
    return spark.read.format("millstream").options(url=url, **as_text(options)).load()


def stream(spark: Any, url: str, **options: Any) -> Any:
    return spark.readStream.format("millstream").options(url=url, **as_text(options)).load()


def as_text(options: dict[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in options.items()
    }


def numbers(frame: Any) -> list[int]:
    """The field `i` of every record, in the order of stream and offset."""
    rows = frame.select("stream", "offset", "value").collect()
    return [
        json.loads(bytes(row.value))["i"]
        for row in sorted(rows, key=lambda row: (row.stream, row.offset))
    ]


class Query:
    """A streaming query run again and again over one checkpoint, its rows kept as Parquet."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.output = folder / "output"

    def run(self, frame: Any, **options: str) -> list[dict[str, Any]]:
        """Everything that is there now; returns the progress of the batches that read something."""
        writer = (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(self.checkpoint))
            .option("path", str(self.output))
            .options(**options)
        )
        progress = available_now(writer)
        return [item for item in progress if item["numInputRows"] > 0]

    def numbers(self, spark: Any) -> list[int]:
        return numbers(spark.read.parquet(str(self.output)))

    def offsets(self) -> dict[str, Any]:
        """The source's offset of the newest batch in the checkpoint."""
        newest = max(
            (file for file in (self.checkpoint / "offsets").iterdir() if file.name.isdigit()),
            key=lambda file: int(file.name),
        )
        found: dict[str, Any] = json.loads(newest.read_text().splitlines()[-1])
        return found
