"""What a second run of `land` may change and what not: streams, options, zone, target; in a real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.dataset as dataset

from millstream.client._sync import Client
from millstream.spark.jobs import driver, find
from millstream.spark.jobs.job import Request, Target
from support.server import Server

JSON = "application/json"


def run(spark: Any, request: Request) -> int:
    """One run as the command does it; returns its rows."""
    job = find("land")
    driver.check(job, request)
    with driver.hold(request):
        return driver.watch(driver.start(job, request, spark), lambda _: None).rows


def landed(lake: Path) -> list[tuple[str, int]]:
    table = dataset.dataset(lake, format="parquet", partitioning="hive").to_table()
    return sorted(zip(*(table.column(n).to_pylist() for n in ("stream", "offset")), strict=True))


def test_streams_that_take_turns_are_landed_once(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        client.create(name, content_type=JSON).append_many([1, 2, 3])
    lake = tmp_path / "lake"
    rows = [
        run(spark, Request(server.url, (name,), Target.parse(str(lake))))
        for name in ("a", "b", "a")
    ]
    assert landed(lake) == [(name, number) for name in ("a", "b") for number in range(3)]
    assert rows == [3, 3, 0]
