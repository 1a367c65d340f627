"""What counts as loss and what it does: deletion, re-creation, crashes of weak classes; without a JVM."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import millstream
from millstream.client.sync.client import Client
from millstream.spark.errors import ConnectorError
from millstream.spark.read.tail_follower import TailState
from support.disk import flip, log_files
from support.http import Api
from support.reading import HandQuery
from support.server import Server

JSON = "application/json"


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with millstream.connect(server.url) as connected:
        yield connected


def fill(client: Client, name: str, count: int, *, first: int = 0, **options: Any) -> None:
    stream = client.create(name, content_type=JSON, **options)
    for index in range(first, first + count):
        stream.append(index)


def query(server: Server, **options: Any) -> HandQuery:
    chosen = {"subscribePattern": ".*", "startingOffsets": "earliest", **options}
    return HandQuery(server.url, **chosen)


def rows_until(found: HandQuery, count: int) -> list[tuple[str, int, Any]]:
    rows: list[tuple[str, int, Any]] = []
    until = time.monotonic() + 15
    while len(rows) < count:
        rows += found.batch()
        assert time.monotonic() < until, rows
    return rows


def fails(found: HandQuery) -> str:
    """The error that polling ends in."""
    until = time.monotonic() + 15
    with pytest.raises(ConnectorError) as caught:
        while time.monotonic() < until:
            found.batch()
    return str(caught.value)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "millstream.spark"]


def test_a_stream_read_to_its_end_may_go_in_silence(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "gone", 3)
    fill(client, "stays", 1)
    with query(server) as found:
        assert len(rows_until(found, 4)) == 4
        client.stream("gone").delete()
        fill(client, "stays", 2, first=1)
        assert len(rows_until(found, 2)) == 2
        # The deletion may be heard of after the append; with the next batch it is certainly known.
        fill(client, "stays", 1, first=3)
        rows_until(found, 1)
        assert "gone" not in found.start["streams"]
    assert warnings(caplog) == []


def test_an_unread_stream_that_goes_is_loss(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "gone", 5)
    fill(client, "stays", 5)
    with query(server, maxOffsetsPerTrigger=4) as found:
        rows_until(found, 4)
        client.stream("gone").delete()
        text = fails(found)
        assert re.match(r"data_loss: stream `gone`: records \d to \d cannot be read", text)
        assert "Hint: " in text
        assert "`failOnDataLoss`" in text
        start = found.start
    with query(server, start=start, failOnDataLoss="false") as found:
        first = start["streams"]["stays"]["n"]
        assert [value for _, _, value in rows_until(found, 5 - first)] == list(range(first, 5))
        assert "gone" not in found.start["streams"]
    assert any("`gone`" in text and "reading goes on" in text for text in warnings(caplog))


@pytest.mark.parametrize("way", ["at once", "killed", "stopped"])
def test_a_stream_that_went_while_nobody_looked(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Read to its end it may go; with records behind the checkpoint it is loss, and the range is exact."""
    fill(client, "gone", 3)
    fill(client, "unread", 3)
    fill(client, "stays", 1)
    with query(server) as found:
        rows_until(found, 7)
        start = found.start
    client.stream("gone").delete()
    server.flags = ("--port", str(server.port))
    if way == "killed":
        server.crash_and_restart()
    elif way == "stopped":
        server.restart()
    fill(client, "stays", 1, first=1)
    with query(server, start=start) as found:
        assert rows_until(found, 1) == [("stays", 1, 1)]
        assert sorted(found.start["streams"]) == ["stays", "unread"]
        start = found.start
    assert warnings(caplog) == []
    for value in (3, 4):
        client.stream("unread").append(value)
    client.stream("unread").delete()
    with query(server, start=start) as found:
        text = fails(found)
        assert text.startswith("data_loss: stream `unread`: records 3 to 4 cannot be read"), text
    fill(client, "stays", 1, first=2)
    with query(server, start=start, failOnDataLoss="false") as found:
        assert rows_until(found, 1) == [("stays", 2, 2)]
        assert sorted(found.start["streams"]) == ["stays"]
    assert len(warnings(caplog)) == 1, "told once"


def test_records_that_came_with_the_end_of_a_running_query_are_loss(
    server: Server, client: Client
) -> None:
    """What was appended and deleted between two looks: the query never saw that tail."""
    fill(client, "gone", 3)
    with query(server) as found:
        rows_until(found, 3)
        seen = found.reader._state()
        client.stream("gone").append(3)
        client.stream("gone").delete()
        # As if both had come between two answers.
        gone = TailState(seen.version + 1, {}, dict(seen.streams))
        history = found.reader._checkpoint_entries()
        with pytest.raises(millstream.MillstreamError, match="`gone`: records 3 to 3 cannot"):
            history.checked(found.start, gone)


def test_a_stream_that_is_not_chosen_any_more_is_no_loss(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "a", 3)
    fill(client, "b", 3)
    with query(server) as found:
        rows_until(found, 6)
        start = found.start
    fill(client, "b", 1, first=3)
    with query(server, start=start, subscribePattern="b") as found:
        assert rows_until(found, 1) == [("b", 3, 3)]
        assert found.start["streams"]["a"] == start["streams"]["a"], "it keeps its place"
    assert warnings(caplog) == []


def test_a_weak_stream_that_was_cut_back_and_deleted_is_loss(
    server: Server, client: Client
) -> None:
    """As many records as were read, but others: the number alone does not tell."""
    fill(client, "short", 3, durability="ephemeral")
    with query(server) as found:
        rows_until(found, 3)
        start = found.start
    server.flags = ("--port", str(server.port))
    server.restart()
    fill(client, "short", 3, first=50, durability="ephemeral")
    client.stream("short").delete()
    with query(server, start=start) as found:
        text = fails(found)
        assert text.startswith("data_loss: stream `short`: the checkpoint is at record 3"), text
        assert "cut back" in text


def test_another_incarnation_is_loss(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "a", 3)
    with query(server, subscribePattern="a") as found:
        rows_until(found, 3)
        start = found.start
    client.stream("a").delete()
    fill(client, "a", 5, first=100)
    with query(server, start=start) as found:
        text = fails(found)
        assert text.startswith("data_loss: stream `a`: everything from record 3, where the stream")
    with query(server, start=start, failOnDataLoss="false") as found:
        assert [value for _, _, value in rows_until(found, 5)] == [100, 101, 102, 103, 104]
        assert len(warnings(caplog)) == 1, "told once"
        assert found.start["streams"]["a"]["id"] != start["streams"]["a"]["id"]
        assert found.batch() == []


def test_a_planned_batch_of_another_incarnation_is_loss_in_its_task(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "a", 3)
    fill(client, "b", 2)
    with query(server) as found:
        start, end = found.start, found.latest()
        partitions = found.reader.partitions(start, end)
        client.stream("a").delete()
        fill(client, "a", 9)
        with pytest.raises(ConnectorError, match="data_loss: stream `a`"):
            for partition in partitions:
                list(found.reader.read(partition))
    with query(server, start=start, failOnDataLoss="false") as found:
        rows = [
            row
            for partition in partitions
            for part in found.reader.read(partition)
            for row in part.to_pylist()
        ]
        assert {row["stream"] for row in rows} == {"b"}
    assert any("`a`" in text for text in warnings(caplog))


@pytest.fixture
def slow_disk(start_server: Callable[..., Server]) -> Server:
    """A server whose disk takes long to sync: what is acknowledged meanwhile is only in memory."""
    return start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "2000"})


def restart_without_tail(server: Server, first_lost: bytes) -> None:
    """kill -9, and the log is torn at a record that was never synced, as by a lost page cache."""
    server.kill()
    for file in log_files(server.data_dir):
        position = file.read_bytes().find(first_lost)
        if position >= 0:
            flip(file, position)
            break
    else:
        raise AssertionError("the log does not have the record")
    server.environment.clear()
    server.flags = ("--port", str(server.port))
    server.restart()


def test_a_checkpoint_beyond_what_a_crash_left_is_loss(
    slow_disk: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Class memory: records that were acknowledged and read are gone after kill -9."""
    server = slow_disk
    with millstream.connect(server.url) as client:
        weak = client.create("weak", content_type=JSON, durability="memory")
        strong = client.create("strong", content_type=JSON)
        weak.append(0)
        strong.append(0)
        holding = threading.Thread(target=_append_and_be_cut_off, args=(server.url,))
        with query(server) as found:
            rows_until(found, 2)
            before = appends(server)
            holding.start()
            wait_until(lambda: appends(server) > before)
            for index in range(1, 10):
                weak.append(f"weak-{index}")
            rows_until(found, 9)
            start = found.start
    restart_without_tail(server, b"weak-6")
    holding.join(30)
    assert start["streams"]["weak"]["n"] == 10
    with millstream.connect(server.url) as client:
        info = client.stream("weak").info()
        kept = sum(1 for _ in client.stream("weak").read(gaps="record") if _.gap is None)
        assert kept == 6
        fill(client, "weak", 3, first=500, durability="memory")
    assert info.tail > start["streams"]["weak"]["at"]
    with query(server, start=start) as found:
        text = fails(found)
        assert text.startswith("data_loss: stream `weak`")
        assert "record 10" in text
        assert "class memory" in text
    with query(server, start=start, failOnDataLoss="false") as found:
        rows = [row for row in rows_until(found, 3) if row[0] == "weak"]
        assert [value for _, _, value in rows] == [500, 501, 502]
        assert [number for _, number, _ in rows] == [kept, kept + 1, kept + 2]
    assert any("`weak`" in text for text in warnings(caplog))


def _append_and_be_cut_off(url: str) -> None:
    with contextlib.suppress(millstream.MillstreamError), millstream.connect(url) as client:
        client.stream("strong").append(1)


def appends(server: Server) -> int:
    """Appends that have reached the log; the answer of a strong one still waits for the disk."""
    return Api(server).metric("millstream_appends_total")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_lost_records_of_an_ephemeral_stream_are_loss(server: Server, client: Client) -> None:
    fill(client, "short", 10, durability="ephemeral")
    with query(server) as found:
        rows_until(found, 10)
        start = found.start
    server.flags = ("--port", str(server.port))
    server.restart()
    fill(client, "short", 2, first=50, durability="ephemeral")
    with query(server, start=start) as found:
        assert fails(found).startswith("data_loss: stream `short`")
    with query(server, start=start, failOnDataLoss="false") as found:
        assert [value for _, _, value in rows_until(found, 2)] == [50, 51]


def test_a_crash_that_lost_nothing_is_a_warning(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "weak", 3, durability="memory")
    fill(client, "strong", 1)  # its sync carries the others to the disk
    with query(server) as found:
        rows_until(found, 4)
        start = found.start
    server.flags = ("--port", str(server.port))
    server.crash_and_restart()
    fill(client, "weak", 2, first=3, durability="memory")
    with query(server, start=start) as found:
        assert [value for _, _, value in rows_until(found, 2)] == [3, 4]
    assert len([text for text in warnings(caplog) if "may be missing" in text]) == 1


def test_a_crash_while_the_query_runs(server: Server, client: Client) -> None:
    fill(client, "short", 5, durability="ephemeral")
    with query(server) as found:
        rows_until(found, 5)
        server.flags = ("--port", str(server.port))
        server.restart()
        fill(client, "short", 3, first=70, durability="ephemeral")
        assert fails(found).startswith("data_loss: stream `short`")


def test_damage_inside_a_range_is_loss_in_its_task(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch was planned; then the crash takes its records. Its task must notice."""
    fill(client, "short", 5, durability="ephemeral")
    fill(client, "strong", 2)
    with query(server) as found:
        start, end = found.start, found.latest()
        partitions = found.reader.partitions(start, end)
    server.flags = ("--port", str(server.port))
    server.restart()
    with query(server, start=start) as found:
        with pytest.raises(ConnectorError, match="data_loss: stream `short`"):
            for partition in partitions:
                list(found.reader.read(partition))
    with query(server, start=start, failOnDataLoss="false") as found:
        rows = [
            row
            for partition in partitions
            for part in found.reader.read(partition)
            for row in part.to_pylist()
        ]
        assert {row["stream"] for row in rows} == {"strong"}
    assert any("`short`" in text for text in warnings(caplog))
