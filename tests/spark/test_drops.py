"""Rows that the server drops as a repetition: rightly with a warning, wrongly with an error that says what to do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.fault_proxy import FaultProxy, drop
from support.server import Server
from support.spark import available_now

DEADLINE_S = 20.0
ROWS = 20


@pytest.fixture
def warnings(spark_folder: Path, spark: Any) -> Callable[[int], list[str]]:
    """What the writer has warned about since the test began; Spark passes it on to the log of the JVM."""
    log = spark_folder / "jvm.log"
    begin = log.stat().st_size

    def read(least: int) -> list[str]:
        until = time.monotonic() + DEADLINE_S
        while True:
            lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
            found = [line for line in lines if " were dropped: " in line]
            if len(found) >= least:
                return found
            assert time.monotonic() < until, f"{least} warnings expected: {lines}"
            time.sleep(0.02)

    return read


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server)
    yield proxy
    proxy.close()


def save(frame: Any, url: str, **options: Any) -> None:
    writer = frame.selectExpr("CAST(value AS STRING) AS value").write.format("millstream")
    writer.mode("append").options(**{"url": url, "stream": "s", **options}).save()


def for_each_batch(spark: Any, checkpoint: Path, function: Callable[[Any, int], None]) -> None:
    """A streaming query of one batch."""
    writer = numbers(spark, checkpoint).writeStream.foreachBatch(function)
    available_now(writer.option("checkpointLocation", str(checkpoint)))


def run(spark: Any, url: str, checkpoint: Path, **options: Any) -> list[int]:
    """A streaming write of one batch; returns the ids of the batches that ran."""
    writer = numbers(spark, checkpoint).writeStream
    writer = writer.format("millstream").options(**{"url": url, "stream": "s", **options})
    ran = available_now(writer.option("checkpointLocation", str(checkpoint)))
    return [progress["batchId"] for progress in ran]


def numbers(spark: Any, checkpoint: Path) -> Any:
    """A source that gives one batch, the same one again after a crash, and then no other."""
    folder = checkpoint.parent / "numbers"
    if not folder.exists():
        folder.mkdir()
        (folder / "all.txt").write_text("".join(f"{number}\n" for number in range(ROWS)))
    return spark.readStream.text(str(folder))


def count(client: Client, stream: str = "s") -> int:
    return len(list(client.stream(stream).read()))


def forget(checkpoint: Path) -> None:
    """What a driver leaves that died between its commit and its own note of it."""
    for entry in ("0", ".0.crc"):
        (checkpoint / "commits" / entry).unlink(missing_ok=True)


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        action()
    return str(caught.value)


@pytest.fixture(autouse=True)
def target(client: Client) -> None:
    client.create("s", content_type="application/json")


def test_dropped_rows_are_a_warning(
    spark: Any, client: Client, server: Server, warnings: Callable[[int], list[str]]
) -> None:
    frame = spark.range(7).selectExpr("id AS value")
    for _ in range(2):
        save(frame, server.url, producerId="job", batchId=3)
    assert count(client) == 7
    [line] = warnings(1)
    for part in ("7 rows", "batch 3", "`spark:job`", "`s`"):
        assert part in line, line


def test_a_commit_whose_answer_was_lost_dropped_nothing(
    spark: Any, client: Client, proxy: FaultProxy, warnings: Callable[[int], list[str]]
) -> None:
    proxy.at("POST", "/v1/commit", drop, moment="after")
    frame = spark.range(7).selectExpr("id AS value")
    save(frame, proxy.url, producerId="job", batchId=0)
    answers = [json.loads(call.answer) for call in proxy.seen("POST", "/v1/commit") if call.status]
    assert [answer["duplicate"] for answer in answers][-1] is True
    save(frame, proxy.url, producerId="job", batchId=0)
    assert count(client) == 7
    assert len(warnings(1)) == 1


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_producer_id_belongs_to_one_query(
    spark: Any,
    client: Client,
    server: Server,
    tmp_path: Path,
    warnings: Callable[[int], list[str]],
    mode: str,
) -> None:
    options = {"producerId": "a/ü ..", "exactlyOnce": mode}
    if mode == "direct":
        options["directPartitions"] = "1"
    run(spark, server.url, tmp_path / "one", **options)
    assert count(client) == ROWS
    text = refusal(lambda: run(spark, server.url, tmp_path / "two", **options))
    assert "producer_fenced: `producerId` `a/ü ..` belongs to another query" in text
    assert "producerGeneration" in text
    assert count(client) == ROWS
    # The query that has it goes on; raised on purpose, the other one has it, and the first one has lost it.
    forget(tmp_path / "one")
    assert run(spark, server.url, tmp_path / "one", **options) == [0]
    assert count(client) == ROWS
    [line] = warnings(1)
    assert f"{ROWS} rows of batch 0 for `s`" in line
    run(spark, server.url, tmp_path / "two", producerGeneration=1, **options)
    assert count(client) == 2 * ROWS
    forget(tmp_path / "one")
    text = refusal(lambda: run(spark, server.url, tmp_path / "one", **options))
    assert "producer_fenced: " in text
    assert count(client) == 2 * ROWS


def test_for_each_batch_of_another_query_is_refused(
    spark: Any, client: Client, server: Server, tmp_path: Path, warnings: Callable[[int], list[str]]
) -> None:
    def write(frame: Any, batch_id: int) -> None:
        save(frame, server.url, producerId="job", batchId=batch_id)

    for_each_batch(spark, tmp_path / "one", write)
    text = refusal(lambda: for_each_batch(spark, tmp_path / "two", write))
    assert "producer_fenced: `producerId` `job` belongs to another query" in text
    # The same query may run a batch again.
    forget(tmp_path / "one")
    for_each_batch(spark, tmp_path / "one", write)
    assert count(client) == ROWS
    assert len(warnings(1)) == 1


def test_two_writes_of_a_batch_to_a_stream_are_an_error(
    spark: Any, client: Client, server: Server, tmp_path: Path
) -> None:
    client.create("t", content_type="application/json")

    def twice(frame: Any, batch_id: int) -> None:
        for even in (0, 1):
            half = frame.where(f"value % 2 = {even}")
            save(half, server.url, producerId="job", batchId=batch_id)

    for _ in range(2):  # the query that is started again fails again: nothing is dropped on the way
        text = refusal(lambda: for_each_batch(spark, tmp_path / "one", twice))
        assert (
            "option_invalid: batch 0 was written to `s` before in this call of foreachBatch" in text
        )
        assert f"{ROWS // 2} rows" in text
        assert "`producerId` of its own" in text
        assert count(client) == ROWS // 2

    def apart(frame: Any, batch_id: int) -> None:
        for even, producer in ((0, "job"), (1, "odd")):
            half = frame.where(f"value % 2 = {even}")
            save(half, server.url, producerId=producer, batchId=batch_id)
        save(frame, server.url, producerId="job", batchId=batch_id, stream="t")

    for_each_batch(spark, tmp_path / "one", apart)
    assert sorted(int(record.text) for record in client.stream("s").read()) == list(range(ROWS))
    assert count(client, "t") == ROWS
