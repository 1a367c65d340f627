"""The Spark processes of the tests themselves: each kind of session runs Python on its executors."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.spark import Driver, DriverFailed, available_now, session_processes
from support.spark_cluster import StandaloneCluster

pytestmark = pytest.mark.long


def where(spark: Any, rows: int) -> dict[str, Any]:
    """Runs in a driver: which hosts, processes and interpreters do the work, and a sum."""
    from pyspark.sql import functions

    def look(batches: Any) -> Any:
        import pandas

        for batch in batches:
            yield pandas.DataFrame(
                {"pid": [os.getppid()], "python": [platform.python_version()], "n": [len(batch)]}
            )

    frame = spark.range(rows).repartition(2).mapInPandas(look, "pid long, python string, n long")
    seen = frame.collect()
    return {
        "rows": sum(row.n for row in seen),
        "pythons": sorted({row.python for row in seen}),
        "processes": len({row.pid for row in seen}),
        "sum": spark.range(rows).agg(functions.sum("id")).collect()[0][0],
    }


def fail(spark: Any) -> None:
    raise ValueError("on purpose")


def check(seen: dict[str, Any]) -> None:
    assert seen["rows"] == 100
    assert seen["sum"] == 4950
    assert seen["pythons"] == [platform.python_version()]


def test_shared_session(spark: Any, tmp_path: Path) -> None:
    check(where(spark, 100))
    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    progress = available_now(writer)
    assert sum(batch["numInputRows"] for batch in progress) == 10


def test_a_failing_query_raises_its_own_error(spark: Any, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    broken = frame.selectExpr("assert_true(value < 0)")
    writer = broken.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    with pytest.raises(StreamingQueryException):
        available_now(writer)


def test_local_cluster(local_cluster: Driver) -> None:
    seen = local_cluster.call(where, rows=100)
    check(seen)
    assert seen["processes"] == 2


def test_an_error_in_a_driver_reaches_the_test(local_cluster: Driver) -> None:
    with pytest.raises(DriverFailed, match="ValueError: on purpose"):
        local_cluster.call(fail)
    check(local_cluster.call(where, rows=100))


def test_standalone(standalone: StandaloneCluster, standalone_driver: Driver) -> None:
    seen = standalone_driver.call(where, rows=100)
    check(seen)
    assert seen["processes"] == 2
    workers = {path.parent.name for path in standalone.folder.glob("worker-*/apps")}
    assert workers == {"worker-127.0.0.1", "worker-127.0.0.2"}


def test_connect(connect: Driver) -> None:
    check(connect.call(where, rows=100))


def test_a_killed_driver_leaves_nothing(new_driver: Callable[..., Driver]) -> None:
    driver = new_driver(master="local[1]")
    assert len(session_processes(driver.process.pid)) >= 2, "Python and its JVM"
    driver.kill()
    assert session_processes(driver.process.pid) == []
    assert driver.process.returncode == -9
