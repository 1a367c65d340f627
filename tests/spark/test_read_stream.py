"""Streaming reads: triggers, limits, streams that come later, restarts, and what is in the checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.many_streams import append_many, create_many
from support.server import Server
from support.spark import available_now
from support.spark_reading import JSON, Query, filled, more, stream

DEADLINE_S = 60.0


def test_available_now_reads_all_and_goes_on_later(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    orders = filled(client, "orders", 100, per_append=10)
    query = Query(tmp_path)

    def frame() -> Any:
        return stream(spark, server.url, subscribe="orders", startingOffsets="earliest")

    query.run(frame())
    assert query.numbers(spark) == list(range(100))
    info = orders.info()
    assert query.offsets() == {
        "streams": {"orders": {"at": info.tail, "id": info.incarnation, "n": 100}},
        "v": 1,
    }
    more(orders, 50, first=100)
    query.run(frame())
    assert query.numbers(spark) == list(range(150))
    assert query.run(frame()) == []


def test_limits_are_shared_by_backlog(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    filled(client, "a", 120, per_append=30)
    filled(client, "b", 30)
    query = Query(tmp_path)
    frame = stream(
        spark, server.url, subscribe="a,b", startingOffsets="earliest", maxOffsetsPerTrigger=50
    )
    progress = query.run(frame)
    assert [item["numInputRows"] for item in progress] == [50] * 3
    first = offset_of(progress[0], "endOffset")["streams"]
    assert (first["a"]["n"], first["b"]["n"]) == (40, 10)
    assert query.numbers(spark) == [*range(120), *range(30)]


def test_both_limits_hold_together(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    filled(client, "a", 300)
    size = sum(len(json.dumps({"i": index}, separators=(",", ":"))) + 1 for index in range(300))
    query = Query(tmp_path)
    frame = stream(
        spark, server.url, subscribe="a", startingOffsets="earliest",
        maxOffsetsPerTrigger=250, maxBytesPerTrigger=size // 2,
    )  # fmt: skip
    counts = [item["numInputRows"] for item in query.run(frame)]
    assert sum(counts) == 300
    assert 2 <= len(counts) <= 3, counts
    assert max(counts) < 200, "the limit on bytes is the nearer one"


def test_ending_offsets_bound_available_now(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    filled(client, "a", 100, per_append=10)
    query = Query(tmp_path)
    frame = stream(
        spark, server.url, subscribe="a", startingOffsets={"a": 5}, endingOffsets={"a": 42},
        maxOffsetsPerTrigger=20,
    )  # fmt: skip
    progress = query.run(frame)
    assert [item["numInputRows"] for item in progress] == [20, 17]
    assert query.numbers(spark) == list(range(5, 42))


def test_streams_that_come_later_are_read_from_their_start(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    old = filled(client, "chat/1", 10)
    query = Query(tmp_path)

    def frame() -> Any:
        return stream(spark, server.url, subscribePattern="chat/.*", startingOffsets="latest")

    query.run(frame())
    assert not query.output.exists() or query.numbers(spark) == []
    more(old, 5, first=10)
    filled(client, "chat/2", 7)
    filled(client, "other", 3)
    client.create("chat/empty", content_type=JSON)
    query.run(frame())
    assert query.numbers(spark) == [*range(10, 15), *range(7)]
    assert sorted(query.offsets()["streams"]) == ["chat/1", "chat/2"]


def test_a_running_query_sees_news_at_once(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    live = filled(client, "live/1", 3)
    frame = stream(spark, server.url, subscribePattern="live/.*", startingOffsets="earliest")
    query = (
        frame.writeStream.format("memory").queryName("live")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    try:
        query.processAllAvailable()
        assert count(spark, "live") == 3
        more(live, 4, first=3)
        filled(client, "live/2", 5)
        wait_until(lambda: count(spark, "live") == 12)
        progress = query.lastProgress
        source = json.loads(progress.json)["sources"][0]
        assert "latestOffset" in source
    finally:
        query.stop()


def test_options_may_change_between_runs(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    """The checkpoint wins over starting offsets; limits, tasks and the choice of streams may change."""
    filled(client, "a", 30)
    query = Query(tmp_path)
    query.run(stream(spark, server.url, subscribe="a", startingOffsets="earliest"))
    filled(client, "b", 20)
    frame = stream(
        spark, server.url, subscribePattern="[ab]", startingOffsets="latest",
        maxOffsetsPerTrigger=15, minPartitions=3,
    )  # fmt: skip
    assert [item["numInputRows"] for item in query.run(frame)] == [15, 5]
    assert query.numbers(spark) == [*range(30), *range(20)]


def test_streams_that_went_between_two_runs(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    """Read to its end it is dropped in silence; with records that nobody read it is loss, by their numbers."""
    read = filled(client, "chat/read", 10)
    unread = filled(client, "chat/unread", 5)
    stays = filled(client, "chat/stays", 3)
    query = Query(tmp_path)

    def frame(**options: Any) -> Any:
        return stream(
            spark, server.url, subscribePattern="chat/.*", startingOffsets="earliest", **options
        )

    query.run(frame())
    read.delete()
    more(stays, 2, first=3)
    query.run(frame())
    assert sorted(query.offsets()["streams"]) == ["chat/stays", "chat/unread"]
    more(unread, 3, first=5)
    unread.delete()
    with pytest.raises(Exception, match="data_loss: stream `chat/unread`: records 5 to 7 cannot"):
        query.run(frame())
    more(stays, 1, first=5)
    query.run(frame(failOnDataLoss="false"))
    assert sorted(query.offsets()["streams"]) == ["chat/stays"]
    assert sorted(query.numbers(spark)) == sorted([*range(10), *range(5), *range(6)])


def test_a_batch_that_was_planned_is_read_again_as_it_was(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    """A crash between plan and commit: the same records again, whatever came since and changed."""
    a = filled(client, "a", 40, per_append=7)
    checkpoint = tmp_path / "checkpoint"
    seen: list[tuple[int, list[int]]] = []

    def look(part: Any, batch_id: int) -> None:
        seen.append((batch_id, sorted(row.offset for row in part.select("offset").collect())))

    def run(**options: Any) -> None:
        frame = stream(spark, server.url, subscribe="a", startingOffsets="earliest", **options)
        writer = frame.writeStream.foreachBatch(look)
        available_now(writer.option("checkpointLocation", str(checkpoint)))

    run(maxOffsetsPerTrigger=25)
    assert seen == [(0, list(range(25))), (1, list(range(25, 40)))]
    for file in (checkpoint / "commits" / "1", checkpoint / "commits" / ".1.crc"):
        file.unlink()
    more(a, 10, first=40)
    run(minPartitions=3)
    assert seen[2:] == [(1, list(range(25, 40))), (2, list(range(40, 50)))]


def test_a_first_batch_that_is_repeated_loses_nothing(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    """`latest` moves on while the query is down; what came behind its first start must be read."""
    a = filled(client, "a", 10)
    checkpoint = tmp_path / "checkpoint"
    seen: list[int] = []

    def look(part: Any, _: int) -> None:
        seen.extend(sorted(row.offset for row in part.select("offset").collect()))

    def run() -> None:
        writer = stream(spark, server.url, subscribe="a").writeStream.foreachBatch(look)
        available_now(writer.option("checkpointLocation", str(checkpoint)))

    run()
    assert seen == []
    for file in (checkpoint / "commits" / "0", checkpoint / "commits" / ".0.crc"):
        file.unlink()
    more(a, 5, first=10)
    run()
    assert seen == [10, 11, 12, 13, 14]


@pytest.mark.own_server  # removing that many takes longer than starting one
def test_ten_thousand_streams(spark: Any, server: Server, tmp_path: Path) -> None:
    """Few tasks for many active streams, and a checkpoint entry below 1 MB."""
    names = [f"chat/{index:05d}" for index in range(10_000)]
    create_many(server, names)
    seen: list[tuple[int, int]] = []

    def look(part: Any, _: int) -> None:
        seen.append((part.rdd.getNumPartitions(), part.count()))

    def run() -> None:
        frame = stream(spark, server.url, subscribePattern="chat/.*", startingOffsets="earliest")
        frame = frame.select("stream", "offset")
        writer = frame.writeStream.foreachBatch(look)
        available_now(writer.option("checkpointLocation", str(tmp_path / "checkpoint")))

    run()
    append_many(server, names[::20])
    run()
    assert [rows for _, rows in seen] == [10_000, 500]
    assert max(tasks for tasks, _ in seen) <= 2 * 2
    newest = Query(tmp_path).offsets()
    assert len(newest["streams"]) == 10_000
    assert len(json.dumps(newest)) < 1_000_000


def count(spark: Any, table: str) -> int:
    return int(spark.sql(f"SELECT count(*) AS n FROM {table}").collect()[0].n)


def wait_until(condition: Any) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.05)


def offset_of(progress: dict[str, Any], name: str) -> dict[str, Any]:
    found = progress["sources"][0][name]
    decoded: dict[str, Any] = json.loads(found) if isinstance(found, str) else found
    return decoded
