"""The Python client and durability classes: choosing, changing, and being told of a loss as one likes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import millstream
from millstream import errors
from millstream.types import Gap, Record
from support.classes import CLASSES, SURVIVES_KILL, WEAK
from support.server import Server

pytestmark = pytest.mark.one_server

JSON = "application/json"
DEADLINE_S = 30.0
QUICK = millstream.Retry(attempts=100, delay_seconds=0.05, delay_seconds_max=0.2)


@pytest.fixture
def client(shared_server: Server) -> Iterator[millstream.Client]:
    with millstream.connect(shared_server.url) as client:
        yield client


# --- choosing and changing --------------------------------------------------------------------


def test_a_class_is_chosen_seen_and_changed(client: millstream.Client, path: str) -> None:
    for name in CLASSES:
        stream = client.create(f"{path}/{name}", content_type=JSON, durability=name)
        stream.append({"n": 1})
        assert stream.info().durability == name
        with pytest.raises(errors.StreamConflict):
            client.create(f"{path}/{name}", durability="fsync" if name == "disk" else "disk")
        for other in CLASSES:
            changed = stream.set_durability(other)
            assert (changed.path, changed.durability, changed.records) == (stream.path, other, 1)
            assert stream.info().durability == other
            assert client.create(stream.path, content_type=JSON, durability=other).created is False
        assert [record.value for record in stream.read()] == [{"n": 1}]
    listed = {info.path: info.durability for info in client.list(f"{path}/")}
    assert listed == {f"{path}/{name}": CLASSES[-1] for name in CLASSES}


def test_a_change_from_async_code(shared_server: Server, path: str) -> None:
    async def scenario() -> None:
        async with millstream.aio.connect(shared_server.url) as client:
            stream = await client.create(path, content_type=JSON, durability="ephemeral")
            await stream.append(1)
            assert (await stream.set_durability("disk")).durability == "disk"
            assert (await stream.info()).durability == "disk"
            with pytest.raises(errors.DurabilityUnavailable):
                await stream.set_durability("object")
            assert [record.value async for record in stream.read()] == [1]

    asyncio.run(scenario())


def test_a_change_reaches_a_stream_of_any_name(client: millstream.Client, path: str) -> None:
    stream = client.create(f"{path}/ü b?c#d%/e", durability="disk")
    assert stream.set_durability("memory").durability == "memory"
    assert stream.info().durability == "memory"


def test_a_change_that_cannot_be_made_says_why(client: millstream.Client, path: str) -> None:
    with pytest.raises(errors.StreamNotFound):
        client.stream(path).set_durability("disk")
    stream = client.create(path)
    with pytest.raises(errors.DurabilityUnavailable, match="cluster") as unavailable:
        stream.set_durability("quorum")
    assert (unavailable.value.status, unavailable.value.code) == (501, "durability_unavailable")
    with pytest.raises(errors.DurabilityUnavailable) as unknown:
        stream.set_durability("forever")
    assert (unknown.value.status, unknown.value.code) == (400, "durability_unknown")
    assert stream.info().durability == "fsync"


# --- a loss -----------------------------------------------------------------------------------


@pytest.fixture
def steady(server: Server) -> Server:
    """A server that comes back on the port it had, so that clients find it again."""
    server.flags = ("--port", str(server.port))
    return server


def lose(server: Server, name: str, path: str) -> tuple[str, str]:
    """A stream with [1, 2], a crash, then [3]; returns the tails of before and after the crash."""
    with millstream.connect(server.url) as client:
        stream = client.create(path, content_type=JSON, durability=name, data=1)
        tail = stream.append(2)
        server.crash_and_restart()
        begin = stream.info().tail
        stream.append(3)
    return tail, begin


@pytest.mark.parametrize("name", WEAK)
def test_the_caller_chooses_what_a_gap_is(steady: Server, path: str, name: str) -> None:
    tail, begin = lose(steady, name, path)
    # `memory` may have lost something or not; the server knows by the position that is left.
    expected = Gap(tail, begin, "crash", certain=begin.split("_")[1] < tail.split("_")[1])
    assert expected.certain or name == "memory"
    with millstream.connect(steady.url) as client:
        stream = client.stream(path)
        ways: dict[str, Callable[..., Iterator[Record]]] = {
            "read": lambda **more: stream.read(tail, **more),
            "sse": lambda **more: iter(stream.follow(tail, mode="sse", **more)),
            "long-poll": lambda **more: iter(stream.follow(tail, mode="long-poll", **more)),
        }
        for way, start in ways.items():
            with pytest.raises(errors.GapError, match="crash") as caught:
                next(start())
            assert caught.value.gap == expected, way
            told: list[Gap] = []
            assert next(start(gaps=told.append)).value == 3
            assert told == [expected], way
            records = start(gaps="record")
            stand_in, record = next(records), next(records)
            assert (stand_in.gap, stand_in.data, record.value) == (expected, b"", 3), way
        # What the exception says works: from the end of the gap there is none.
        assert [record.value for record in stream.read(expected.to_offset)] == [3]


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_reader_that_was_connected_is_told_once(
    steady: Server, path: str, name: str, mode: Any
) -> None:
    found: queue.Queue[Record] = queue.Queue()
    with millstream.connect(steady.url, retry=QUICK) as client:
        stream = client.create(path, content_type=JSON, durability=name)
        follower = stream.follow(mode=mode, gaps="record")

        def run() -> None:
            for record in follower:
                found.put(record)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            stream.append(1)
            assert found.get(timeout=DEADLINE_S).value == 1
            tail = stream.append(2)
            assert found.get(timeout=DEADLINE_S).value == 2
            steady.crash_and_restart()
            for value in (3, 4):
                stream.append(value)
            record = found.get(timeout=DEADLINE_S)
            if name in SURVIVES_KILL:
                assert record.gap is None
            else:
                assert record.gap is not None
                assert (record.gap.from_offset, record.gap.reason) == (tail, "crash")
                record = found.get(timeout=DEADLINE_S)
            assert (record.value, record.gap) == (3, None)
            assert found.get(timeout=DEADLINE_S).value == 4
            stream.close()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
            assert found.empty()
        finally:
            follower.close()
            thread.join(DEADLINE_S)


def test_async_reading_takes_the_same_choices(steady: Server, path: str) -> None:
    tail, begin = lose(steady, "ephemeral", path)
    expected = Gap(tail, begin, "crash", certain=True)

    async def scenario() -> None:
        async with millstream.aio.connect(steady.url) as client:
            stream = client.stream(path)
            with pytest.raises(errors.GapError) as caught:
                async for _ in stream.read(tail):
                    raise AssertionError("a record came before the gap")
            assert caught.value.gap == expected
            told: list[Gap] = []
            assert [record.value async for record in stream.read(tail, gaps=told.append)] == [3]
            assert told == [expected]
            async with stream.follow(tail, gaps="record") as follower:
                stand_in, record = await anext(follower), await anext(follower)
                assert (stand_in.gap, record.value) == (expected, 3)

    asyncio.run(scenario())


def test_a_producer_of_a_weak_stream_lives_through_a_crash(steady: Server, path: str) -> None:
    """What it sends after the crash is taken, although the server forgot its numbers."""
    with millstream.connect(steady.url, retry=QUICK) as client:
        stream = client.create(path, content_type=JSON, durability="ephemeral")
        with stream.producer("p") as producer:
            for number in range(50):
                producer.append(number)
            producer.flush()
            steady.crash_and_restart()
            for number in range(50, 100):
                producer.append(number)
            producer.flush()
        values = [record.value for record in stream.read(gaps=lambda _: None)]
        assert values == list(range(50, 100))
