"""Clusters whose Python lacks Millstream: each documented way of bringing it along, on a standalone cluster.

The planner beside the driver and the executors run a bare interpreter (`support.bare_python`): everything that is installed
here except Millstream. The first test starts with the proof that it really is missing there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.client.sync.client import Client
from support.bare_python import MILLSTREAM, bare_python
from support.guides import python_of
from support.server import Server
from support.spark import Driver, available_now, environment
from support.spark_cluster import ConnectServer, StandaloneCluster

pytestmark = pytest.mark.long

ROWS = 500
STREAMS = "http://streams:4437"
"""The server that guides of clusters show."""
LOOPBACK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.cores.max": "2",
}
PACKAGE = Path(millstream.__file__).parent


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without Millstream."""
    python = bare_python(tmp_path_factory.mktemp("bare") / "venv", without=MILLSTREAM)
    looked = subprocess.run([python, "-c", "import millstream"], capture_output=True, text=True)
    assert "No module named 'millstream'" in looked.stderr
    return python


@pytest.fixture
def orders(client: Client) -> str:
    """A stream of `ROWS` records, appended 50 at a time, so that a read can be cut into tasks."""
    stream = client.create("orders", content_type="application/json")
    for first in range(0, ROWS, 50):
        stream.append_many([{"id": number} for number in range(first, first + 50)])
    client.create("copies", content_type="application/json")
    return "orders"


def options(url: str, stream: str) -> dict[str, str]:
    return {"url": url, "subscribe": stream, "minPartitions": "2", "startingOffsets": "earliest"}


def total(spark: Any, url: str, stream: str) -> list[int]:
    """Count and sum of the ids, computed from values that executors fetched."""
    frame = spark.read.format("millstream").options(**options(url, stream)).load()
    row = frame.selectExpr(
        "count(*) as n", "sum(get_json_object(cast(value as string), '$.id')) as s"
    ).collect()[0]
    return [row.n, int(row.s)]


def read_all(spark: Any, url: str, stream: str) -> list[int]:
    return total(spark, url, stream)


def run_guide(spark: Any, page: str, instead: dict[str, str]) -> None:
    """Every block of a page, as it is shown but for the addresses; it ships Millstream to the session."""
    found = {"spark": spark}
    for text in python_of(page, instead):
        exec(compile(text, f"{page}.md", "exec"), found)


def ship_and_use(spark: Any, url: str, stream: str, folder: str) -> dict[str, Any]:
    """Spark knows no Millstream; after what the guide shows it reads and writes, batches and streams."""
    from millstream.doctor.workers import ask_workers, judge

    findings = [finding.document() for finding in judge("here", ask_workers(spark))]
    try:
        total(spark, url, stream)
        before = ""
    except Exception as error:  # noqa: BLE001 - whatever Spark makes of it
        before = str(error)
    run_guide(spark, "spark-standalone", {STREAMS: url})
    seen = total(spark, url, stream)
    source = spark.readStream.format("millstream").options(**options(url, stream)).load()
    writer = source.select("value").writeStream.format("millstream")
    writer = writer.options(url=url, stream="copies", checkpointLocation=f"{folder}/checkpoint")
    available_now(writer)
    copied = total(spark, url, "copies")
    return {"doctor": findings, "before": before, "seen": seen, "copied": copied}


def python_everywhere(python: str) -> dict[str, str]:
    """One interpreter for the planner beside the driver and for the executors."""
    return {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}


EXPECTED = [ROWS, ROWS * (ROWS - 1) // 2]


def test_register_ships_the_code_by_value(
    standalone: StandaloneCluster,
    new_driver: Callable[..., Driver],
    bare: str,
    server: Server,
    orders: str,
    tmp_path: Path,
) -> None:
    driver = new_driver(master=standalone.master, conf=LOOPBACK, env=python_everywhere(bare))
    seen = driver.call(
        ship_and_use, deadline_s=240, url=server.url, stream=orders, folder=str(tmp_path)
    )
    assert "[DATA_SOURCE_NOT_FOUND]" in seen["before"]
    assert {finding["state"] for finding in seen["doctor"]} == {"warn"}
    assert all("but no millstream" in finding["message"] for finding in seen["doctor"])
    assert seen["seen"] == EXPECTED
    assert seen["copied"] == EXPECTED
    driver.close()


def test_a_packed_environment_by_archives(
    standalone: StandaloneCluster,
    new_driver: Callable[..., Driver],
    server: Server,
    orders: str,
    tmp_path: Path,
) -> None:
    packed = tmp_path / "environment.tar.gz"
    bare_python(tmp_path / "venv", without=MILLSTREAM)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, site / "millstream", ignore=ignored)
    shutil.copytree(PACKAGE.parent / "pyspark_millstream", site / "pyspark_millstream")
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(tmp_path / "venv", arcname=".")
    # Spark starts the same path beside the driver and on executors: so it is unpacked here, too.
    (tmp_path / "driver-0").mkdir()
    (tmp_path / "driver-0" / "environment").symlink_to(tmp_path / "venv")
    driver = new_driver(
        master=standalone.master,
        conf={**LOOPBACK, "spark.archives": f"{packed}#environment"},
        env=python_everywhere("./environment/bin/python"),
    )
    assert driver.call(read_all, url=server.url, stream=orders) == EXPECTED
    driver.close()


def missing_stream(spark: Any, url: str, remote: str) -> str:
    run_guide(spark, "spark-connect", {STREAMS: url, "sc://spark-server:15002": remote})
    try:
        total(spark, url, "nothing")
    except Exception as error:  # noqa: BLE001 - whatever Connect makes of it
        return str(error)
    return ""


def test_a_connect_session_is_sent_the_code(
    connect_server: ConnectServer, new_driver: Callable[..., Driver], server: Server, orders: str
) -> None:
    """The server has Millstream, too; what is shipped wins, as the traceback of an error shows."""
    driver = new_driver(remote=connect_server.url)
    text = driver.call(missing_stream, url=server.url, remote=connect_server.url)
    assert "stream_not_found: stream `nothing` does not exist" in text
    assert "shipped:millstream/spark/" in text
    assert driver.call(read_all, url=server.url, stream=orders) == EXPECTED


def submit(
    job: str, cluster: StandaloneCluster, python: str, url: str, folder: Path, *flags: str
) -> str:
    """Run a job from the zip alone, with a Python that has no Millstream; returns what it said."""
    given = ["--master", cluster.master, "--url", url, "--python", python, *flags]
    conf = {**LOOPBACK, "spark.driver.memory": "512m", "spark.executor.memory": "512m"}
    for name, value in conf.items():
        given += ["--conf", f"{name}={value}"]
    command = [sys.executable, "-m", "millstream.cli", "pipeline", "submit", job, *given]
    done = subprocess.run(
        [*command, "--files", str(folder / "files")],
        env=environment(folder, {"SPARK_HOME": ""}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout  # spark-submit puts what a program says there


def test_submit_runs_a_job_from_the_zip(
    standalone: StandaloneCluster, bare: str, server: Server, orders: str, tmp_path: Path
) -> None:
    """Neither the driver's Python nor the executors' has Millstream: the zip is all there is."""
    lake = tmp_path / "lake"
    said = submit(
        "land", standalone, bare, server.url, tmp_path, "--from", orders, "--to", str(lake)
    )
    assert f"done: {ROWS} rows" in said
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(lake, format="parquet", partitioning="hive").to_table()
    ids = [json.loads(value)["id"] for value in table["value"].to_pylist()]
    assert sorted(ids) == list(range(ROWS))
    assert os.listdir(tmp_path / "files")


def test_submit_runs_jobs_with_state_from_the_zip(
    standalone: StandaloneCluster, bare: str, server: Server, client: Client, tmp_path: Path
) -> None:
    """Their processors run beside the driver and on executors, in Pythons that have no Millstream."""
    times = [100, 160, 10_000, 10_060, 10_120, 99_999]
    values = [{"user": user, "at": second * 1000} for second in times for user in ("a", "b", "c")]
    client.create("clicks", content_type="application/json").append_many(values)
    places = ["--from", "clicks", "--create", "--to"]
    flags = [*places, "stream:visits", "--checkpoint", str(tmp_path / "cp")]
    flags += ["--key", "user", "--gap", "5m", "--event-time", "at"]
    said = submit("sessionise", standalone, bare, server.url, tmp_path, *flags)
    assert re.search(r"state in RocksDB, \d+ shuffle partitions; the checkpoint keeps", said)
    assert "3 sessions stay open, 0 rows came late" in said
    counts = sorted(
        (visit.value["key"], visit.value["count"]) for visit in client.stream("visits").read()
    )
    assert counts == [(user, count) for user in "abc" for count in (2, 3)]
    flags = [*places, "stream:load", "--checkpoint", str(tmp_path / "cp2"), "--window", "1s"]
    said = submit("metrics", standalone, bare, server.url, tmp_path, *flags)
    assert "1 windows stay open" in said
