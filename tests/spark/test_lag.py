"""Lag and its listener over real queries, in a classic and in a Connect session."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.server import Server
from support.spark import Driver, available_now

pytestmark = pytest.mark.long

DEADLINE_S = 60.0


def follow(spark: Any, url: str, folder: str) -> dict[str, Any]:
    """Read 100 records, 40 at a time, with a listener; returns what lag and listener said."""
    from millstream.spark import LagListener, lag

    listener = LagListener(port=0, url=url, stream="metrics/spark")
    spark.streams.addListener(listener)
    try:
        source = (
            spark.readStream.format("millstream")
            .options(url=url, subscribe="orders", startingOffsets="earliest")
            .option("maxOffsetsPerTrigger", 40)
            .load()
        )
        writer = source.writeStream.format("noop").queryName("lagging")
        query = writer.option("checkpointLocation", folder).trigger(availableNow=True).start()
        assert query.awaitTermination(int(DEADLINE_S))
        reports = [p for p in query.recentProgress if "addBatch" in p["durationMs"]]
        found = [lag(report) for report in reports]
        until = time.monotonic() + DEADLINE_S
        while 'batches_total{query="' not in listener.text() or (
            " 3"
            not in next(line for line in listener.text().splitlines() if "batches_total{" in line)
        ):
            assert time.monotonic() < until, listener.text()
            time.sleep(0.05)
    finally:
        spark.streams.removeListener(listener)
        listener.close()
    return {
        "records": [one.records for one in found],
        "seconds": [one.seconds for one in found],
        "metrics": listener.text(),
    }


def check(seen: dict[str, Any], client: Client) -> None:
    assert seen["records"] == [60, 20, 0]
    assert all(seconds is not None and seconds >= 0 for seconds in seen["seconds"])
    assert seen["seconds"][-1] == 0
    lines = seen["metrics"].splitlines()
    rows = next(line for line in lines if line.startswith("millstream_spark_rows_total{"))
    assert rows.endswith(" 100")
    assert 'name="lagging"' in rows
    behind = next(line for line in lines if line.startswith("millstream_spark_lag_records{"))
    assert behind.endswith(" 0")
    told = [record.value for record in client.stream("metrics/spark").read()]
    assert [record["lag"]["records"] for record in told] == [60, 20, 0]
    assert [record["batch"] for record in told] == [0, 1, 2]
    assert all(record["lag"]["exact"] for record in told)
    assert told[0]["lag"]["seconds"] > 0


def fill(client: Client) -> None:
    stream = client.create("orders", content_type="application/json")
    stream.append_many([{"id": number} for number in range(100)])


def test_classic(spark: Any, server: Server, client: Client, tmp_path: Path) -> None:
    fill(client)
    check(follow(spark, server.url, str(tmp_path / "checkpoint")), client)


def test_connect(connect: Driver, server: Server, client: Client, tmp_path: Path) -> None:
    fill(client)
    seen = connect.call(follow, url=server.url, folder=str(tmp_path / "checkpoint"))
    check(seen, client)


def test_a_query_over_other_sources_has_no_lag(spark: Any, tmp_path: Path) -> None:
    from millstream.spark import LagListener

    listener = LagListener(textfile=tmp_path / "metrics.prom")
    spark.streams.addListener(listener)
    try:
        frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 7).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
        available_now(writer)
        until = time.monotonic() + DEADLINE_S
        while "rows_total{" not in listener.text():
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        spark.streams.removeListener(listener)
        listener.close()
    text = (tmp_path / "metrics.prom").read_text()
    assert "millstream_spark_rows_total{" in text
    assert "lag_records{" not in text
    assert "export_errors_total 0" in text
