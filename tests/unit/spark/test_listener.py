"""The listener's exports: what Prometheus and a stream get, and that nothing is unbounded or fatal."""

from __future__ import annotations

import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import millstream
from millstream.errors import InvalidArgument
from millstream.spark import LagListener
from millstream.spark.observe import listener as module
from support.server import Server

DEADLINE_S = 20.0


def place(number: int) -> dict[str, Any]:
    return {"at": f"{1763000000000:016d}_{number * 10:016d}", "id": "1", "n": number}


def progress(query: str, batch: int, end: int, latest: int, name: str = "orders") -> Any:
    offset = {"streams": {"s": place(end)}, "v": 1}
    tail = {"streams": {"s": place(latest)}, "v": 1}
    document = {
        "id": query,
        "runId": "r",
        "name": name,
        "batchId": batch,
        "numInputRows": 10,
        "durationMs": {"triggerExecution": 500, "addBatch": 250},
        "sources": [{"endOffset": offset, "latestOffset": tail}],
        "sink": {"numOutputRows": 10},
    }
    return SimpleNamespace(progress=document)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def samples(text: str) -> dict[str, float]:
    """Parse the text format strictly enough to notice a broken line."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name not in found
            found[name] = float(value)
    return found


def scrape(listener: LagListener) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{listener.port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return samples(answer.read().decode())


def test_prometheus() -> None:
    listener = LagListener(port=0)
    try:
        listener.onQueryStarted(SimpleNamespace(id="q1", name="orders"))
        label = '{query="q1",name="orders"}'
        assert scrape(listener)["millstream_spark_query_active" + label] == 1
        listener.onQueryProgress(progress("q1", 0, 40, 100))
        listener.onQueryProgress(progress("q1", 1, 70, 100))
        until(lambda: scrape(listener).get("millstream_spark_batches_total" + label) == 2)
        seen = scrape(listener)
        assert seen["millstream_spark_lag_records" + label] == 30
        assert seen["millstream_spark_lag_bytes" + label] == 300
        assert seen["millstream_spark_lag_seconds" + label] == 1.5
        assert seen["millstream_spark_rows_total" + label] == 20
        phase = '{query="q1",name="orders",phase="addBatch"}'
        assert seen["millstream_spark_batch_seconds" + phase] == 0.25
        listener.onQueryTerminated(SimpleNamespace(id="q1"))
        until(lambda: scrape(listener)["millstream_spark_query_active" + label] == 0)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{listener.port}/", timeout=10)
    finally:
        listener.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", listener.port), 5)


def test_names_are_escaped(tmp_path: Path) -> None:
    listener = LagListener(textfile=tmp_path / "metrics.prom")
    listener.onQueryProgress(progress("q", 0, 1, 1, name='a"b\\c\nd'))
    listener.close()
    seen = samples((tmp_path / "metrics.prom").read_text())
    assert seen['millstream_spark_lag_records{query="q",name="a\\"b\\\\c\\nd"}'] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.prom"]


def test_the_end_of_a_query_is_no_error(server: Server) -> None:
    listener = LagListener(port=0, url=server.url, stream="metrics/ends")
    try:
        listener.onQueryProgress(progress("q1", 0, 40, 40))
        label = '{query="q1",name="orders"}'
        until(lambda: scrape(listener).get("millstream_spark_batches_total" + label) == 1)
        listener.onQueryTerminated(SimpleNamespace(id="q1"))
        until(lambda: scrape(listener)["millstream_spark_query_active" + label] == 0)
    finally:
        listener.close()
    assert samples(listener.text())["millstream_spark_export_errors_total"] == 0
    with millstream.connect(server.url) as client:
        assert len(list(client.stream("metrics/ends").read())) == 1


def test_a_stream_gets_a_record_per_batch_with_the_exact_age(server: Server) -> None:
    with millstream.connect(server.url) as client:
        stream = client.create("s", content_type="application/json")
        stream.append_many(list(range(100)))
        acknowledged = time.monotonic()
        identity = stream.info().incarnation
        until(lambda: time.monotonic() - acknowledged > 0.3)  # so that an age can be told from none
        listener = LagListener(url=server.url, stream="metrics/spark")
        for batch, end in enumerate((40, 100)):
            event = progress("q1", batch, end, 100)
            for offset in event.progress["sources"][0].values():
                offset["streams"]["s"]["id"] = identity
            listener.onQueryProgress(event)
        listener.close()
        records = [record.value for record in client.stream("metrics/spark").read()]
    assert [record["batch"] for record in records] == [0, 1]
    assert records[0]["rows"] == 10
    assert records[0]["seconds"] == {"triggerExecution": 0.5, "addBatch": 0.25}
    assert records[0]["lag"]["records"] == 60
    assert records[0]["lag"]["exact"] is True
    assert 0.3 <= records[0]["lag"]["seconds"] < DEADLINE_S
    assert records[1]["lag"] == {"records": 0, "bytes": 0, "seconds": 0.0, "exact": True}


def test_a_server_that_is_not_there_fails_no_query(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    listener = LagListener(port=0, url=f"http://127.0.0.1:{port}", stream="m")
    with caplog.at_level(logging.WARNING, "millstream.spark"):
        began = time.monotonic()
        listener.onQueryProgress(progress("q", 0, 0, 10))
        assert time.monotonic() - began < 0.5, "the query waited"
        until(lambda: scrape(listener)["millstream_spark_export_errors_total"] >= 2)
    label = '{query="q",name="orders"}'
    assert scrape(listener)["millstream_spark_lag_records" + label] == 10, "the estimate is there"
    assert any("cannot reach" in record.getMessage() for record in caplog.records)
    listener.close()


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES_MAX", 5)
    monkeypatch.setattr(module, "PENDING_MAX", 10)
    listener = LagListener(port=0)
    release = threading.Event()
    held = threading.Event()
    take = listener._take

    def slow(report: Any) -> Any:
        held.set()
        assert release.wait(DEADLINE_S)
        return take(report)

    monkeypatch.setattr(listener, "_take", slow)
    listener.onQueryProgress(progress("first", 0, 1, 2))
    assert held.wait(DEADLINE_S)
    for number in range(50):
        listener.onQueryProgress(progress(f"q{number}", 0, 1, 2))
    assert scrape(listener)["millstream_spark_export_dropped_total"] == 40
    release.set()
    listener.close()
    known = {line for line in listener.text().splitlines() if "spark_query_active{" in line}
    assert len(known) == 5
    assert any('query="q49"' in line for line in known), "the newest are kept"


def test_what_is_asked_for_must_make_sense() -> None:
    with pytest.raises(InvalidArgument, match="nowhere to report"):
        LagListener()
    with pytest.raises(InvalidArgument, match="`url`"):
        LagListener(stream="m")
