"""The Python client against a real server: the examples of its documentation, and its promises."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import millstream
from millstream import errors
from support.server import Server

JSON = "application/json"


@pytest.fixture
def client(shared_server: Server) -> Iterator[millstream.Client]:
    with millstream.connect(shared_server.url) as client:
        yield client


def test_the_documented_example(client: millstream.Client, path: str) -> None:
    orders = client.create(path, content_type=JSON)
    assert orders.created is True
    assert client.create(path, content_type=JSON).created is False
    orders.append({"id": 1})
    tail = orders.append_many([{"id": 2}, [3, 4], "text", None, 1.5])
    with orders.producer("importer") as producer:
        for number in range(2500):
            producer.append({"number": number})
    records = list(orders.read())
    assert [record.value for record in records[:6]] == [
        {"id": 1},
        {"id": 2},
        [3, 4],
        "text",
        None,
        1.5,
    ]
    assert [record.value["number"] for record in records[6:]] == list(range(2500))
    assert [record.value["number"] for record in orders.read(tail)] == list(range(2500))
    info = orders.info()
    assert (info.content_type, info.closed, info.tail) == (JSON, False, records[-1].offset)
    assert orders.close() == info.tail
    assert orders.info().closed
    orders.delete()
    with pytest.raises(errors.StreamNotFound):
        orders.info()


def test_every_byte_comes_back(client: millstream.Client, path: str) -> None:
    stream = client.create(path)
    assert stream.content_type == "application/octet-stream"
    data = bytes(range(256)) * 100
    stream.append(data)
    stream.append_many([b"\0", "ü", bytearray(b"z")])
    with stream.producer() as producer:
        producer.append_many([b"\xff\n"] * 300)
    expected = data + b"\0" + "ü".encode() + b"z" + b"\xff\n" * 300
    assert b"".join(record.data for record in stream.read()) == expected
    stream.close()
    assert b"".join(record.data for record in stream.follow()) == expected


@pytest.mark.parametrize("kind", [JSON, "application/octet-stream", "text/plain"])
@pytest.mark.parametrize("mode", ["auto", "sse", "long-poll"])
def test_a_follower_sees_everything_while_it_is_written(
    client: millstream.Client, path: str, kind: str, mode: Any
) -> None:
    stream = client.create(path, content_type=kind)
    as_json = kind == JSON
    found: list[Any] = []
    follower = stream.follow(mode=mode)
    thread = threading.Thread(target=lambda: found.extend(record.value for record in follower))
    thread.start()
    try:
        for number in range(200):
            stream.append(number if as_json else f"{number}\n")
        stream.append("last" if as_json else "last\n", close=True)
        thread.join(30)
        assert not thread.is_alive()
    finally:
        follower.close()
        thread.join(5)
    expected = [*range(200), "last"]
    if as_json:
        assert found == expected
    else:
        assert b"".join(found) == "".join(f"{value}\n" for value in expected).encode()


def test_close_ends_and_refuses(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    stream.append(1, close=True)
    with pytest.raises(errors.StreamClosed) as caught:
        stream.append(2)
    assert caught.value.status == 409
    assert [record.value for record in stream.follow()] == [1]


def test_refusals_have_their_exceptions(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    with pytest.raises(errors.StreamConflict):
        client.create(path, content_type="text/plain")
    with pytest.raises(errors.ContentTypeMismatch):
        client.stream(path, content_type="text/plain").append("x")
    with pytest.raises(errors.OffsetInvalid if client._operations.extended else errors.BadRequest):
        list(stream.read("no-offset"))
    stream.append(1, seq="b")
    with pytest.raises(errors.SequenceConflict):
        stream.append(2, seq="a")
    with pytest.raises(errors.StreamNotFound):
        client.stream(f"{path}/missing").append(b"x")
    with pytest.raises(errors.StreamNotFound):
        client.create(f"{path}/fork", forked_from=f"{path}/missing")


def test_initial_data_forks_and_expiry(client: millstream.Client, path: str) -> None:
    source = client.create(path, content_type=JSON, data=[1, 2], ttl_seconds=600)
    middle = source.info().tail
    source.append("later")
    assert source.info().ttl_seconds == 600
    fork = client.create(f"{path}/fork", forked_from=source, fork_offset=middle, data="own")
    assert [record.value for record in fork.read()] == [[1, 2], "own"]
    assert [record.value for record in source.read()] == [[1, 2], "later"]
    soon = client.create(f"{path}/x", expires_at=datetime(2099, 1, 1, tzinfo=UTC))
    assert (soon.info().expires_at or "").startswith("2099-01-01T00:00:00")


def test_an_older_session_of_a_producer_is_fenced_off(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    old = stream.producer("one")
    old.append("old 1")
    old.flush()
    with stream.producer("one") as new:
        new.append("new 1")
    old.append("old 2")
    with pytest.raises(errors.ProducerFenced):
        old.flush()
    old.abandon()
    assert [record.value for record in stream.read()] == ["old 1", "new 1"]


def test_a_producer_closes_its_stream_after_its_records(
    client: millstream.Client, path: str
) -> None:
    stream = client.create(path, content_type=JSON)
    with stream.producer() as producer:
        producer.append_many(range(500))
        final = producer.close_stream("bye")
    assert [record.value for record in stream.follow()] == [*range(500), "bye"]
    assert stream.info().tail == final
    other = client.create(f"{path}/2")
    with other.producer() as producer:
        producer.close_stream()
    assert other.info().closed


def test_a_replay_with_its_own_epoch_is_dropped(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    for _ in range(2):
        with stream.producer("batch", epoch=7, batch_records_max=10) as producer:
            producer.append_many(range(100))
    assert [record.value for record in stream.read()] == list(range(100))


def test_many_threads_share_a_client(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)

    def write(writer: int) -> None:
        for number in range(50):
            stream.append([writer, number])

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = [record.value for record in stream.read()]
    assert sorted(found) == [[writer, number] for writer in range(8) for number in range(50)]
    for writer in range(8):
        assert [n for w, n in found if w == writer] == list(range(50))


# ------------------------------------------------------------------------ Millstream's own


def test_listing(client: millstream.Client, path: str) -> None:
    names = [f"{path}/{letter}" for letter in "abc"]
    for name in names:
        client.create(name, content_type=JSON, data={"x": 1})
    found = list(client.list(f"{path}/"))
    assert [info.path for info in found] == names
    assert all(info.records == 1 and info.durability and info.incarnation for info in found)
    assert [info.path for info in client.list(f"{path}/", limit=2)] == names[:2]
    assert [info.path for info in client.list(f"{path}/", after=names[0])] == names[1:]


def test_conditional_append(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    tail = stream.append(1)
    tail = stream.append(2, if_match=tail)
    with pytest.raises(errors.PreconditionFailed) as caught:
        stream.append(3, if_match="0000000000000000_0000000000000000")
    assert caught.value.tail == tail
    assert [record.value for record in stream.read()] == [1, 2]


def test_the_last_records_then_live(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    stream.append_many(range(10))
    stream.append_many(["x", "y"])
    assert [record.value for record in stream.read(tail=3)] == [9, "x", "y"]
    stream.append("end", close=True)
    assert [record.value for record in stream.follow(tail=2)] == ["y", "end"]


def test_reading_from_a_time(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON, data="x")
    assert list(stream.read(since=datetime(2099, 1, 1, tzinfo=UTC))) == []
    assert [r.value for r in stream.read(since=datetime(2020, 1, 1, tzinfo=UTC))] == ["x"]


def test_durability_classes(client: millstream.Client, path: str) -> None:
    assert client.create(path, durability="memory").info().durability == "memory"
    with pytest.raises(errors.DurabilityUnavailable):
        client.create(f"{path}/x", durability="paper")


# ------------------------------------------------------------------------ asyncio


def test_the_async_client_does_the_same(shared_server: Server, path: str) -> None:
    async def scenario() -> None:
        async with millstream.aio.connect(shared_server.url) as client:
            stream = await client.create(path, content_type=JSON)

            async def follow() -> list[Any]:
                return [record.value async for record in stream.follow()]

            task = asyncio.create_task(follow())
            await stream.append("first")
            async with stream.producer("p") as producer:
                await producer.append_many(range(3000))
                await producer.close_stream("last")
            expected = ["first", *range(3000), "last"]
            assert await asyncio.wait_for(task, 30) == expected
            assert [record.value async for record in stream.read()] == expected
            assert (await stream.info()).closed
            with pytest.raises(errors.StreamClosed):
                await stream.append("late")
            other = client.stream(path)
            with pytest.raises(errors.StreamClosed):
                async with other.producer("q") as late:
                    await late.append("late")
            await stream.delete()
            with pytest.raises(errors.StreamNotFound):
                await stream.info()

    asyncio.run(scenario())


def test_an_async_follower_lets_go(shared_server: Server, path: str) -> None:
    async def scenario() -> None:
        async with millstream.aio.connect(shared_server.url) as client:
            stream = await client.create(path, content_type=JSON, data=1)
            async with stream.follow() as follower:
                assert (await anext(follower)).value == 1
            task = asyncio.create_task(anext(stream.follow("now")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())


# ------------------------------------------------------------------------ a server that dies


def test_followers_and_producers_survive_a_killed_server(server: Server, path: str) -> None:
    server.flags = ("--port", str(server.port))
    retry = millstream.Retry(attempts=100, delay_seconds=0.05, delay_seconds_max=0.2)
    lost: list[errors.MillstreamError] = []
    with millstream.connect(server.url, retry=retry) as client:
        stream = client.create(path, content_type=JSON)
        follower = stream.follow(on_reconnect=lambda error, _: lost.append(error))
        found: list[Any] = []
        connected = threading.Event()

        def read() -> None:
            for record in follower:
                found.append(record.value)
                connected.set()

        thread = threading.Thread(target=read)
        thread.start()
        try:
            with stream.producer("p", batch_records_max=10) as producer:
                for number in range(3000):
                    producer.append(number)
                    if number in (1000, 2000):
                        assert connected.wait(30)
                        server.kill()
                        server.restart()
                producer.flush(60)
            stream.close()
            thread.join(30)
            assert not thread.is_alive()
        finally:
            follower.close()
            thread.join(5)
        assert found == list(range(3000))
        assert [record.value for record in stream.read()] == list(range(3000))
    assert lost
