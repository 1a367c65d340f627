"""Job `land` in a real Spark: every reader sees each record once, also after kill -9 of the whole driver."""

from __future__ import annotations

import datetime
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as pq
import pytest

from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument, PipelineError
from millstream.spark.jobs import find
from millstream.spark.jobs.lake.iceberg import open_catalog
from millstream.spark.jobs.lake.layout import IDENTIFIER, Layout
from millstream.spark.jobs.run import driver
from support import land_faults
from support.land_faults import POINT, POINTS, land
from support.server import Server
from support.spark import Driver, DriverFailed

pytestmark = pytest.mark.long

TABLES = ("parquet", "delta", "iceberg")
BATCHES = 4
ROWS = 500
MIDNIGHT = datetime.datetime(2026, 11, 16, tzinfo=datetime.UTC)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Four files of records around midnight: a stream of four batches."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(BATCHES):
        pq.write_table(records(number * ROWS, ROWS), folder / f"{number}.parquet")
        os.utime(folder / f"{number}.parquet", (1_700_000_000 + number,) * 2)
    return str(folder)


def records(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    spread = [number * 7919 % ROWS - ROWS // 2 for number in numbers]
    times = [MIDNIGHT + datetime.timedelta(milliseconds=away) for away in spread]
    return pa.table(
        {
            "stream": [f"chat/{number % 3}" for number in numbers],
            "offset": pa.array(numbers, pa.int64()),
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
            "value": [f'{{"n":{number}}}'.encode() for number in numbers],
        }
    )


def plain_readers(spark: Any, root: Path, table: str) -> dict[str, pa.Table]:
    """The lake as every program sees it that can read this kind of table."""
    if table == "delta":
        return {"deltalake": pa.table(deltalake.DeltaTable(root).to_pyarrow_table())}
    if table == "iceberg":
        catalog = open_catalog(Layout(root, "iceberg"))
        found = {"pyiceberg": catalog.load_table(IDENTIFIER).scan().to_arrow()}
        catalog.close()
        return found
    return {
        "pyarrow": dataset.dataset(root, format="parquet", partitioning="hive").to_table(),
        "spark": spark.read.parquet(str(root)).toArrow(),
    }


def checksum(table: pa.Table) -> tuple[int, int]:
    """Count and content, whatever the order of rows and columns."""
    columns = [
        table.column(name).to_pylist() for name in ("stream", "offset", "timestamp", "value")
    ]
    rows = sorted(zip(*columns, strict=True), key=lambda row: row[:2])
    text = repr([(s, o, t.timestamp(), bytes(v)) for s, o, t, v in rows])
    return table.num_rows, zlib.crc32(text.encode())


def assert_complete(spark: Any, root: Path, table: str, expected: pa.Table | None = None) -> None:
    wanted = checksum(records(0, BATCHES * ROWS) if expected is None else expected)
    for reader, found in plain_readers(spark, root, table).items():
        assert checksum(found) == wanted, f"{reader} reads {found.num_rows} rows"
    assert not list((root / "_millstream" / "tmp").rglob("*.tmp"))


def forget_last_commit(checkpoint: Path) -> int:
    """As if the driver had died between the sink's commit and the checkpoint."""
    last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
    return last


@pytest.mark.parametrize("table", TABLES)
def test_every_reader_sees_each_record_once_and_a_replay_changes_nothing(
    spark: Any, source: str, tmp_path: Path, table: str
) -> None:
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    asked: dict[str, Any] = {
        "root": str(root),
        "checkpoint": str(checkpoint),
        "source": source,
        "table": table,
        "partition_by": "date,stream",
    }
    assert land(spark, tasks=2, **asked) == {"batches": BATCHES, "rows": BATCHES * ROWS}
    assert_complete(spark, root, table)
    before = sorted(path for path in root.rglob("*.parquet"))
    assert forget_last_commit(checkpoint) == BATCHES - 1
    assert land(spark, tasks=3, **asked) == {"batches": 1, "rows": ROWS}
    assert_complete(spark, root, table)
    assert sorted(path for path in root.rglob("*.parquet")) == before
    assert land(spark, tasks=3, **asked) == {"batches": 0, "rows": 0}
    if table == "delta":  # one commit made the table, each batch made one
        assert deltalake.DeltaTable(root).version() == BATCHES


@pytest.mark.timeout(1200)  # ten rounds of two starts of Spark
def test_kill_9_of_the_driver_changes_nothing_in_the_result(
    spark: Any,
    server: Server,
    client: Client,
    tmp_path: Path,
    new_driver: Callable[..., Driver],
    full: bool,
) -> None:
    for name in range(3):
        stream = client.create(f"chat/{name}", content_type="application/json")
        for first in range(0, 600, 50):
            stream.append_many([{"n": number} for number in range(first, first + 50)])
    reading = spark.read.format("millstream").option("url", server.url)
    appended = reading.option("subscribePattern", "chat/.*").load().toArrow()
    assert appended.num_rows == 1800
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED", random.randrange(1 << 32)))
    print(f"MILLSTREAM_TEST_SEED={seed}")
    chance = random.Random(seed)
    for number in range(10 if full else 1):
        table, point = chance.choice(TABLES), chance.choice(POINTS)
        batch = chance.randrange(BATCHES)
        print(f"round {number}: {table}, killed at {point} of batch {batch}")
        root = tmp_path / f"lake-{number}"
        asked: dict[str, Any] = {
            "root": str(root),
            "checkpoint": str(tmp_path / f"checkpoint-{number}"),
            "source": server.url,
            "table": table,
        }
        dying = new_driver(master="local[2]", env={POINT: f"{point},{batch}"})
        with pytest.raises(DriverFailed, match="ended with -9"):
            dying.call(land, tasks=2, **asked)
        assert not (tmp_path / f"checkpoint-{number}" / "commits" / str(batch)).exists()
        land(spark, tasks=3, **asked)
        assert_complete(spark, root, table, appended)


def test_a_rewound_checkpoint_is_refused_and_touches_nothing(
    spark: Any, source: str, tmp_path: Path
) -> None:
    root = tmp_path / "lake"
    asked: dict[str, Any] = {"root": str(root), "source": source, "table": "parquet", "tasks": 1}
    checkpoint = tmp_path / "checkpoint"
    land(spark, checkpoint=str(checkpoint), **asked)
    for number in range(1, BATCHES):
        for folder in ("commits", "offsets"):
            (checkpoint / folder / str(number)).unlink()
            (checkpoint / folder / f".{number}.crc").unlink(missing_ok=True)
    (query,) = (root / "_millstream" / "batches").iterdir()
    (query / "00000001.json").unlink()
    with pytest.raises(PipelineError, match="batch 1 comes after batch 3") as caught:
        land(spark, checkpoint=str(checkpoint), **asked)
    assert (caught.value.code, bool(caught.value.hint)) == ("batch_out_of_order", True)
    assert_complete(spark, root, "parquet")


def test_a_schema_that_cannot_be_partitioned_is_refused_at_the_start(
    spark: Any, source: str, tmp_path: Path
) -> None:
    records = land_faults.file_source(spark, source, 1).select("offset", "value")
    checkpoint = str(tmp_path / "checkpoint")
    asked = land_faults.request(str(tmp_path / "lake"), "parquet", checkpoint=checkpoint)
    query = driver.start(find("land"), asked, spark, source=records)
    with pytest.raises(
        InvalidArgument, match="partitioning by date needs a column `timestamp`"
    ) as e:
        driver.watch(query, lambda _: None)
    assert (e.value.code, bool(e.value.hint)) == ("invalid_argument", True)
    assert not (tmp_path / "lake").exists()


def test_a_lake_keeps_its_kind(spark: Any, source: str, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    checkpoint = str(tmp_path / "checkpoint")
    land(spark, root=str(root), checkpoint=checkpoint, source=source, table="delta", tasks=1)
    with pytest.raises(InvalidArgument, match="`table` `delta`, not `parquet`"):
        driver.check(find("land"), land_faults.request(str(root), "parquet", "date", checkpoint))
    with pytest.raises(InvalidArgument, match="kind `delta`, not `parquet`"):
        driver.check(find("land"), land_faults.request(str(root), "parquet"))
    with pytest.raises(InvalidArgument, match="land the same records a second time"):
        driver.check(find("land"), land_faults.request(str(root), "delta"))
    driver.check(find("land"), land_faults.request(str(root), "delta", "date", checkpoint))
