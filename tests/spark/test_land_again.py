"""What a second run of `land` may change and what not: streams, options, zone, target; in a real Spark."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.dataset as dataset
import pytest

from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument, PipelineError
from millstream.spark.jobs import find
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.lake.files import write_files
from millstream.spark.jobs.lake.iceberg import open_catalog
from millstream.spark.jobs.lake.layout import IDENTIFIER, Layout, TaskPlace
from millstream.spark.jobs.lake.publish import Publisher
from millstream.spark.jobs.run import driver
from support.server import Server

JSON = "application/json"
TYPED = {
    "valueFormat": "json",
    "valueSchema": "at TIMESTAMP, more ARRAY<STRUCT<at: TIMESTAMP>>",
}


def run(spark: Any, request: Request) -> int:
    """One run as the command does it; returns its rows."""
    job = find("land")
    driver.check(job, request)
    with driver.hold(job, request):
        return driver.watch(job.begin(request, spark, None), lambda _: None).rows


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

    # What the runs have noted is checked before a session is asked for.
    checkpoint = str(lake / "_millstream" / "checkpoint")
    copy = Request(server.url, ("a",), Target.parse("stream:c"), checkpoint=checkpoint)
    with pytest.raises(InvalidArgument, match="with job `land`, not `copy`"):
        driver.check(find("copy"), copy)
    other = replace(copy, target=Target.parse(str(tmp_path / "other")))
    with pytest.raises(InvalidArgument, match=r"/lake`, not `.*/other`"):
        driver.check(find("land"), other)


def table_at(lake: Path, table: str) -> pa.Table:
    if table == "delta":
        return pa.table(deltalake.DeltaTable(lake).to_pyarrow_table())
    catalog = open_catalog(Layout(lake, table))
    found = catalog.load_table(IDENTIFIER).scan().to_arrow()
    catalog.close()
    return found


@pytest.fixture
def session_zone(spark: Any) -> Iterator[Callable[[str], None]]:
    """Puts the session into a zone; after the test it is where it was."""
    name = "spark.sql.session.timeZone"
    before = spark.conf.get(name)
    yield lambda zone: spark.conf.set(name, zone)
    spark.conf.set(name, before)


@pytest.mark.parametrize("table", ["delta", "iceberg"])
def test_times_inside_values_in_changing_zones_and_a_refused_run_in_between(
    spark: Any,
    server: Server,
    client: Client,
    tmp_path: Path,
    session_zone: Callable[[str], None],
    table: str,
) -> None:
    stream = client.create("s", content_type=JSON)
    lake, moment = tmp_path / "lake", datetime.datetime(2026, 3, 1, 23, 30, tzinfo=datetime.UTC)
    asked = Request(server.url, ("s",), Target.parse(str(lake)), {"table": table}, TYPED)
    others = replace(
        asked,
        options={"table": table, "shared": "yes"},
        source_options={},
        checkpoint=str(tmp_path / "other"),
    )
    for count, zone in enumerate(("Asia/Kolkata", "America/New_York"), 1):
        session_zone(zone)
        stream.append({"at": moment.isoformat(), "more": [{"at": moment.isoformat()}]})
        assert run(spark, asked) == 1
        values = table_at(lake, table).column("value").to_pylist()
        assert [(value["at"], value["more"][0]["at"]) for value in values] == [
            (moment,) * 2
        ] * count
        if count == 1:
            with pytest.raises(PipelineError, match="do not fit the lake: it has `value` struct"):
                run(spark, others)


def test_names_of_streams_read_the_same_in_spark_pyarrow_and_duckdb(
    spark: Any, tmp_path: Path
) -> None:
    names = ["a b", "a#b", "ümlaut", "日本", "50%", "chat/1", "x+y", "a=b", "a:b?"]
    now = pa.array([datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)] * len(names))
    numbers = pa.array(range(len(names)))
    rows = pa.record_batch({"stream": names, "offset": numbers, "timestamp": now})
    layout = Layout(tmp_path, partition_by=("stream",))
    files = write_files([rows], layout, TaskPlace("q", 0, 0))
    Publisher(layout, None).publish("q", 0, files)
    assert sorted(landed(tmp_path)) == sorted(zip(names, range(len(names)), strict=True))
    read = spark.read.parquet(str(tmp_path)).select("stream", "offset").collect()
    assert sorted((row.stream, row.offset) for row in read) == landed(tmp_path)
    found = duckdb.read_parquet(f"{tmp_path}/**/*.parquet", hive_partitioning=True)
    assert sorted(found.project('stream, "offset"').fetchall()) == landed(tmp_path)
