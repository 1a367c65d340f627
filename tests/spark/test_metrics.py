"""Job `metrics` in a real Spark: windows that add up to what the server counts, also in streams that are behind others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.dataset as dataset
import pytest

from millstream.client.sync.client import Client
from millstream.client.sync.reads import PipelineReads
from millstream.errors import MillstreamError
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from support.server import Server
from support.spark_jobs import (
    JSON,
    checksum,
    failing_commit,
    forget_last_batch,
    next_second,
    records,
    run,
)

WINDOW_S = 1
Sums = dict[tuple[str, int], tuple[int, int, int, int]]
"""Stream and window -> records, bytes, smallest, largest."""


def fold(client: Client, streams: Iterable[str]) -> Sums:
    """Every record, in the window of its time."""
    found: Sums = {}
    for stream in streams:
        with client.stream(stream).read_arrow(columns=["time", "value"]) as batches:
            for batch in batches:
                for row in batch.to_pylist():
                    at, size = int(row["time"].timestamp() * 1000), len(row["value"])
                    name = (stream, at // 1000 // WINDOW_S * WINDOW_S)
                    before = found.get(name, (0, 0, size, size))
                    found[name] = added(before, (1, size, size, size))
    return found


def added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int, int, int]:
    return (one[0] + other[0], one[1] + other[1], min(one[2], other[2]), max(one[3], other[3]))


def row_of(name: tuple[str, int], sums: tuple[int, int, int, int]) -> dict[str, Any]:
    number, size, smallest, largest = sums
    return {
        "stream": name[0],
        "timestamp": datetime.fromtimestamp(name[1], UTC),
        "seconds": WINDOW_S,
        "records": number,
        "bytes": size,
        "records_per_second": number / WINDOW_S,
        "bytes_per_second": size / WINDOW_S,
        "min_size": smallest,
        "max_size": largest,
        "mean_size": size / number,
    }


def sums_of(rows: Iterable[dict[str, Any]]) -> Sums:
    """Rows of one window added up."""
    found: Sums = {}
    for row in rows:
        start = row["timestamp"]
        at = datetime.fromisoformat(start) if isinstance(start, str) else start
        name = (row["stream"], int(at.timestamp()))
        sums = (row["records"], row["bytes"], row["min_size"], row["max_size"])
        assert row == {**row_of(name, sums), "timestamp": start}
        found[name] = added(found[name], sums) if name in found else sums
    return found


def still_open(spark: Any, checkpoint: Path) -> list[dict[str, Any]]:
    """The windows in the state."""
    options = {"path": str(checkpoint), "stateVarName": "window"}
    state = spark.read.format("statestore").options(**options).load()
    rows = state.select("key.stream", "value.*").collect()
    return [
        row_of((row.stream, row.start // 1_000_000), (row.records, row.bytes, row.smallest, row.largest))
        for row in rows
    ]  # fmt: skip


def test_rows_add_up_to_what_the_server_counts_also_for_a_stream_that_is_behind(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    texts = [b'{"n":%d,"text":"%b"}' % (n, b"x" * (n * 7 % 90)) for n in range(80)]
    client.create("old/json", content_type=JSON).append_many(texts)
    binary = client.create("old/bytes", content_type="application/octet-stream")
    for n in range(20):
        binary.append(b"y" * (n * 31 % 400 + 1))
    new = client.create("new", content_type=JSON)
    for _ in range(2):
        next_second(client)
        new.append_many(texts[:40])
    asked: dict[str, Any] = {"window": "1s", "late": "0s", "checkpoint": tmp_path / "cp"}
    asked |= {"create": True, "max_rows": 60}
    streams = ["old/json", "old/bytes", "new"]
    with failing_commit(server, 2, "after") as url:
        run(spark, "metrics", streams, "stream:out", url=url, readTimeout="1s", **asked)
    for again in (False, True):
        query = jobs.metrics(spark, streams, "stream:out", url=server.url, **asked)
        found = driver.watch(query, lambda _: None, remembers=jobs.metrics.remembers)
        rows = [json.loads(text) for text in records(client, "out")]
        left = still_open(spark, tmp_path / "cp")
        wanted = fold(client, streams)
        assert sums_of([*rows, *left]) == wanted
        assert again or found.state == driver.State(len(left), 0, "windows")
        assert [row["stream"] for row in left] == ["new"], "the others are behind the watermark"
        for tail in PipelineReads(client).tails(streams=streams).streams:
            mine = [row for row in (*rows, *left) if row["stream"] == tail.name]
            assert sum(row["records"] for row in mine) == tail.tail_number
            is_json = client.stream(tail.name).content_type == JSON
            between = tail.tail_number if is_json else 0  # a comma behind each record
            assert sum(row["bytes"] for row in mine) + between == tail.bytes
        forget_last_batch(tmp_path / "cp")


def test_each_closed_window_is_one_row_of_a_lake(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    streams = [client.create(name, content_type=JSON) for name in ("a", "b/ü")]
    asked = {"url": server.url, "window": "1s", "partition_by": "stream", "max_rows": 100}
    for part in range(3):
        if part:
            next_second(client)
        for stream in streams[: 2 if part < 2 else 1]:
            stream.append_many([{"part": part, "n": n} for n in range(20)])
        if part == 1:
            run(spark, "metrics", ["a", "b/*"], tmp_path / "lake", **asked)
    run(spark, "metrics", ["a", "b/*"], tmp_path / "lake", **asked)
    everything = fold(client, ["a", "b/ü"])
    newest = {
        stream: max(at for name, at in everything if name == stream) for stream in ("a", "b/ü")
    }
    closed = [row_of(name, sums) for name, sums in everything.items() if name[1] < newest[name[0]]]

    def lines(rows: list[dict[str, Any]]) -> list[bytes]:
        return sorted(json.dumps(row, sort_keys=True, default=str).encode() for row in rows)

    def found() -> list[dict[str, Any]]:
        table = dataset.dataset(tmp_path / "lake", format="parquet", partitioning="hive").to_table()
        return list(table.to_pylist())

    assert len(closed) >= 3
    assert checksum(lines(found())) == checksum(lines(closed))
    assert run(spark, "metrics", ["a", "b/*"], tmp_path / "lake", **asked) == 0
    assert checksum(lines(found())) == checksum(lines(closed))


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("stream:t", {"window": "soon"}, "`soon` is not a duration"),
        ("stream:t", {"window": "0m"}, "`window` is 0"),
        ("stream:t", {"late": "x"}, "`x` is not a duration"),
        ("stream:t", {"table": "delta"}, "--table means nothing for a stream"),
        ("stream:t", {"event-time": "at"}, "has no option `event-time`"),
        ("stream:s", {}, "read and written by the same job"),
    ],
)
def test_what_cannot_work_is_refused_before_spark_starts(
    to: str, options: dict[str, str], said: str
) -> None:
    request = Request("u", ("s",), Target.parse(to), options, checkpoint="c")
    with pytest.raises(MillstreamError, match=said):
        driver.check(jobs.metrics, request)
