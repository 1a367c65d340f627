"""The planner of a streaming read over a real server, without a JVM: ends, limits, packing, rest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import millstream
from millstream.client.sync.client import Client
from millstream.spark.errors import ConnectorError
from millstream.spark.read.batch_reader import RangesPartition
from support.many_streams import append_many, create_many
from support.reading import SCHEMA, HandQuery, records, source
from support.server import Server

pytestmark = pytest.mark.one_server(emptied=True)

JSON = "application/json"


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with millstream.connect(server.url) as connected:
        yield connected


def fill(client: Client, name: str, count: int, *, first: int = 0, per_append: int = 1) -> None:
    stream = client.create(name, content_type=JSON)
    for begin in range(first, first + count, per_append):
        stream.append_many(range(begin, min(first + count, begin + per_append)))


def values(rows: list[tuple[str, int, Any]]) -> list[int]:
    return [value for _, _, value in rows]


def coming(query: HandQuery, count: int) -> list[int]:
    """The values of the next batches, until there are `count`: a batch may begin while the last ones arrive."""
    seen: list[int] = []
    until = time.monotonic() + 10
    while len(seen) < count:
        seen += values(query.batch())
        assert time.monotonic() < until, f"only {seen} came"
    return seen


def test_nothing_new_is_the_same_text(server: Server, client: Client) -> None:
    fill(client, "a", 3)
    with HandQuery(server.url, subscribe="a", startingOffsets="earliest") as query:
        assert values(query.batch()) == [0, 1, 2]
        text = json.dumps(query.start)
        for _ in range(5):
            assert json.dumps(query.latest()) == text
        assert query.batch() == []


def test_news_arrive_without_a_question_per_poll(server: Server, client: Client) -> None:
    fill(client, "a", 1)
    with HandQuery(server.url, subscribePattern="a|later", startingOffsets="earliest") as query:
        assert values(query.batch()) == [0]
        before = requests(server)
        for _ in range(200):
            query.latest()
        assert requests(server) - before <= 3
        fill(client, "later", 2)
        assert coming(query, 2) == [0, 1]


def requests(server: Server) -> int:
    """How many requests for tails the server has answered."""
    with server.connect() as connection:
        text = connection.request("GET", "/-/metrics").body.decode()
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in text.splitlines()
        if line.startswith("millstream_pipeline") and "request" in line
    )


def test_a_limit_on_records_cuts_inside_appends(server: Server, client: Client) -> None:
    fill(client, "a", 100, per_append=30)
    options = {"subscribe": "a", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 17}
    with HandQuery(server.url, **options) as query:
        sizes = []
        everything: list[int] = []
        while rows := query.batch():
            sizes.append(len(rows))
            everything += values(rows)
        assert sizes == [17] * 5 + [15]
        assert everything == list(range(100))


def test_spark_may_ask_for_everything(server: Server, client: Client) -> None:
    fill(client, "a", 100)
    options = {"subscribe": "a", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 17}
    with HandQuery(server.url, **options) as query:
        assert len(query.batch(ReadAllAvailable())) == 100


def test_a_limit_on_bytes_goes_on_even_if_an_append_is_larger(
    server: Server, client: Client
) -> None:
    fill(client, "a", 50, per_append=25)
    options = {"subscribe": "a", "startingOffsets": "earliest", "maxBytesPerTrigger": 10}
    with HandQuery(server.url, **options) as query:
        assert [len(query.batch()) for _ in range(3)] == [25, 25, 0]


def test_a_minimum_waits_for_its_delay_only(server: Server, client: Client) -> None:
    fill(client, "few", 3)
    options = {"subscribe": "few", "startingOffsets": "earliest", "minOffsetsPerTrigger": 10}
    with HandQuery(server.url, **options, maxTriggerDelay="1500ms") as query:
        began = time.monotonic()
        while not (rows := query.batch()):
            assert time.monotonic() - began < 10
            time.sleep(0.01)
        assert time.monotonic() - began >= 1.4
        assert len(rows) == 3
        fill(client, "few", 12, first=3)
        began = time.monotonic()
        while not (rows := query.batch()):
            assert time.monotonic() - began < 1.4, "enough is there: nothing to wait for"
            time.sleep(0.01)
        assert 10 <= len(rows) <= 12, "a batch may begin while the last ones arrive"


def test_the_same_batch_again_has_the_same_records(server: Server, client: Client) -> None:
    fill(client, "a", 1000, per_append=7)
    fill(client, "b", 10)
    with HandQuery(server.url, subscribe="a,b", startingOffsets="earliest") as query:
        start = query.start
        first = query.batch()
        end = query.start
    fill(client, "a", 500, first=1000)
    with HandQuery(server.url, start=start, subscribe="a,b", minPartitions=7) as again:
        repeated = again.between(start, end)
        assert again.tasks > 1
    assert repeated == first


def test_available_now_ends_where_it_began(server: Server, client: Client) -> None:
    fill(client, "a", 10)
    with HandQuery(server.url, subscribe="a", startingOffsets="earliest") as query:
        query.reader.prepareForTriggerAvailableNow()
        fill(client, "a", 10, first=10)
        assert values(query.batch()) == list(range(10))
        assert query.batch() == []


def test_latest_after_the_snapshot_of_available_now(server: Server, client: Client) -> None:
    """Spark may ask for the initial offset after the snapshot; nothing is read backwards."""
    fill(client, "a", 10)
    reader: Any = source(server.url, subscribe="a").streamReader(SCHEMA)
    reader.prepareForTriggerAvailableNow()
    fill(client, "a", 5, first=10)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    reader.stop()


def test_a_start_that_moves_is_logged_before_it_is_read_from(
    server: Server, client: Client
) -> None:
    """Spark asks for the start of batch 0 again when that batch is repeated after a crash."""
    fill(client, "a", 10)
    with HandQuery(server.url, subscribe="a", startingOffsets="latest") as query:
        fill(client, "a", 5, first=10)
        logged = query.latest()
        assert json.dumps(logged) == json.dumps(query.start), "batch 0 has nothing of it"
        assert logged["streams"]["a"]["n"] == 10
    with HandQuery(server.url, subscribe="a", startingOffsets="latest") as again:
        assert again.start["streams"]["a"]["n"] == 15, "the start has moved on"
        assert again.between(again.start, logged) == []
        again.start = logged
        assert values(again.batch()) == [10, 11, 12, 13, 14]


def test_only_what_begins_at_latest_waits_for_the_second_batch(
    server: Server, client: Client
) -> None:
    fill(client, "a", 10)
    fill(client, "b", 10)
    with HandQuery(server.url, subscribe="a,b", startingOffsets={"b": 4}) as query:
        fill(client, "a", 5, first=10)
        assert {(name, number) for name, number, _ in query.batch()} == {("b", n) for n in range(4, 10)}  # fmt: skip
        assert coming(query, 5) == [10, 11, 12, 13, 14]


def test_many_small_ranges_are_few_tasks(server: Server, client: Client) -> None:
    for index in range(60):
        fill(client, f"chat/{index:03d}", 2)
    with HandQuery(server.url, subscribePattern="chat/.*", startingOffsets="earliest") as query:
        rows = query.batch()
        assert len(rows) == 120
        assert query.tasks <= 2 * len(os.sched_getaffinity(0))


def test_an_empty_stream_makes_no_batch(server: Server, client: Client) -> None:
    fill(client, "a", 1)
    with HandQuery(server.url, subscribePattern=".*", startingOffsets="earliest") as query:
        query.batch()
        client.create("empty", content_type=JSON)
        fill(client, "probe", 1)
        until = time.monotonic() + 10
        while not (rows := query.batch()):
            assert time.monotonic() < until
        assert {name for name, _, _ in rows} == {"probe"}
        assert "empty" not in query.start["streams"]


@pytest.mark.own_server
def test_a_planner_of_ten_thousand_streams_rests(server: Server) -> None:
    """Polled as Spark polls it, every 11 ms and through JSON, it takes less than a tenth of a core."""
    names = [f"chat/{index:05d}" for index in range(10_000)]
    create_many(server, names)
    with HandQuery(server.url, subscribePattern="chat/.*", startingOffsets="earliest") as query:
        assert len(query.batch()) == 10_000
        assert len(json.dumps(query.start)) < 1_000_000
        query.latest()
        began, spent = time.monotonic(), time.process_time()
        while time.monotonic() - began < 5:
            assert query.latest() == query.start
            time.sleep(0.011)
        share = (time.process_time() - spent) / (time.monotonic() - began)
        assert share < 0.10, f"{share:.1%} of a core"
        append_many(server, names[:500])
        began = time.monotonic()
        rows: list[Any] = []
        while len(rows) < 500:
            rows += query.batch()
            assert time.monotonic() - began < 10
        assert query.tasks <= 2 * len(os.sched_getaffinity(0))
    create_many(server, [f"more/{index:05d}" for index in range(10_001)])
    with pytest.raises(ConnectorError, match=r"too_many_streams: .* 20,000 .*Hint: run several"):
        HandQuery(server.url, subscribePattern=".*")


@pytest.mark.own_server
def test_closed_streams_that_were_read_are_in_no_bound_and_never_read_again(server: Server) -> None:
    """More than 20,000 streams match, most of them closed and read; what is not is read, and nothing else."""
    asked = {"subscribePattern": ".*", "startingOffsets": "earliest"}
    create_many(server, [f"old/{index:05d}" for index in range(15_000)], closed=True)
    with HandQuery(server.url, **asked) as query:
        assert len(query.batch()) == 15_000
        read = query.start
    create_many(server, [f"new/{index:05d}" for index in range(5_500)])
    with HandQuery(server.url, start=read, **asked) as query:
        rows = query.batch()
        assert sorted(name for name, _, _ in rows) == [f"new/{index:05d}" for index in range(5_500)]
        assert query.batch() == []
        read = query.start
    assert len(json.dumps(read)) / 20_500 < 110, "bytes of an entry"
    with millstream.connect(server.url) as client:
        # Another stream of the name is another stream; a closed one that goes is no loss.
        for name in ("old/00003", "old/00004"):
            client.stream(name).delete()
        fill(client, "old/00003", 2)
    asked["failOnDataLoss"] = "false"
    with HandQuery(server.url, start=read, **asked) as query:
        query.reader.prepareForTriggerAvailableNow()
        end = query.latest(ReadAllAvailable())
        found = [(name, value) for name, _, value in query.between(read, end)]
        assert sorted(found) == [("old/00003", 0), ("old/00003", 1)]
        assert "old/00004" not in end["streams"]
    with HandQuery(server.url, start=end, **asked) as query:
        append_many(server, ["new/00001"])
        until = time.monotonic() + 10
        while not (rows := query.batch()):
            assert time.monotonic() < until
        assert [name for name, _, _ in rows] == ["new/00001"]
    # What is not read counts, closed or not.
    create_many(server, [f"unread/{index:05d}" for index in range(14_600)], closed=True)
    with HandQuery(server.url, start=end, **asked) as query:
        with pytest.raises(ConnectorError, match=r"too_many_streams: .* 20,000 open or unread"):
            query.batch()


@pytest.mark.own_server
def test_a_restart_in_the_middle_of_a_task_is_waited_for(server: Server, client: Client) -> None:
    fill(client, "a", 2000, per_append=100)
    options = {"subscribe": "a", "startingOffsets": "earliest"}
    with HandQuery(server.url, **options) as query:
        end = query.latest()
        (partition,) = query.reader.partitions(query.start, end)
        assert isinstance(partition, RangesPartition)
        task = replace(query.reader._plan.task, window_bytes=200)
        rows = task.run(partition.ranges)
        seen = records(next(rows))
        server.flags = ("--port", str(server.port))
        server.crash_and_restart()
        for part in rows:
            seen += records(part)
    assert values(seen) == list(range(2000))


@pytest.mark.own_server
def test_a_server_that_comes_back_is_waited_for(server: Server, client: Client) -> None:
    fill(client, "a", 5)
    port = server.port
    with HandQuery(server.url, subscribe="a", startingOffsets="earliest") as query:
        assert len(query.batch()) == 5
        server.stop()
        assert query.batch() == [], "the last known tails stand while it is away"
        server.flags = ("--port", str(port))
        server.restart()
        fill(client, "a", 5, first=5)
        until = time.monotonic() + 20
        rows: list[Any] = []
        while len(rows) < 5:
            assert time.monotonic() < until
            rows += query.batch()
        assert values(rows) == [5, 6, 7, 8, 9]


@pytest.mark.own_server
def test_a_server_that_stays_away_ends_the_query(server: Server, client: Client) -> None:
    fill(client, "a", 5)
    with HandQuery(server.url, subscribe="a", readTimeout="2s") as query:
        query.batch()
        server.stop()
        until = time.monotonic() + 20
        with pytest.raises(ConnectorError, match="unreachable: cannot reach"):
            while time.monotonic() < until:
                query.batch()


def test_bad_patterns_and_missing_streams(server: Server) -> None:
    with pytest.raises(ConnectorError, match=r"stream_not_found: streams? `nope` does not exist"):
        HandQuery(server.url, subscribe="nope")
    with pytest.raises(ConnectorError, match="subscribePattern"):
        HandQuery(server.url, subscribePattern="a(")
    with pytest.raises(ConnectorError, match=r"stream_not_found"):
        HandQuery(server.url, subscribe="nope", startingOffsets='{"b":1}')
