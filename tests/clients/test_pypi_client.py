"""The published Python client `durable-streams`, unmodified, sync and async."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from durable_streams import (
    AsyncDurableStream,
    DurableStream,
    SeqConflictError,
    StreamExistsError,
    StreamNotFoundError,
    astream,
    stream,
)

from support.http import Api

READ_TIMEOUT_S = 20.0


def url_of(api: Api, path: str) -> str:
    return f"http://127.0.0.1:{api.server.port}/v1/stream/{path}"


def test_create_append_read_and_delete(shared: Api, path: str) -> None:
    url = url_of(shared, path)
    with DurableStream.create(url, content_type="text/plain", ttl_seconds=3600) as handle:
        handle.append(b"first ")
        middle = handle.head().offset
        handle.append("sécond".encode())
        head = handle.head()
        assert (head.exists, head.content_type) == (True, "text/plain")
        with stream(url, live=False) as response:
            assert response.read_text() == "first sécond"
        with stream(url, live=False, offset=middle) as response:
            assert response.read_text() == "sécond"
        handle.delete()
    with pytest.raises(StreamNotFoundError), stream(url, live=False):
        pass


def test_json_is_batched_by_threads_and_read_back(shared: Api, path: str) -> None:
    url = url_of(shared, path)
    with DurableStream.create(url, content_type="application/json") as handle:
        writers = [
            threading.Thread(
                target=lambda start=start: [handle.append({"n": start + n}) for n in range(25)]
            )
            for start in range(0, 200, 25)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(READ_TIMEOUT_S)
    with stream(url, live=False) as response:
        assert sorted(item["n"] for item in response.read_json()) == list(range(200))


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_following_sees_records_written_later(shared: Api, path: str, live: str) -> None:
    url = url_of(shared, path)
    handle = DurableStream.create(url, content_type="application/json")
    handle.append({"n": 0})
    seen = []
    with stream(url, offset="-1", live=live, timeout=READ_TIMEOUT_S) as response:
        for item in response.iter_json():
            seen.append(item["n"])
            if item["n"] == 9:
                break
            handle.append({"n": item["n"] + 1})
    handle.close()
    assert seen == list(range(10))


def test_refusals_arrive_as_the_clients_own_errors(shared: Api, path: str) -> None:
    url = url_of(shared, path)
    with pytest.raises(StreamNotFoundError):
        DurableStream.connect(url)
    with DurableStream.create(url, content_type="text/plain", batching=False) as handle:
        with pytest.raises(StreamExistsError):
            DurableStream.create(url, content_type="application/json")
        handle.append(b"a", seq="2")
        with pytest.raises(SeqConflictError):
            handle.append(b"b", seq="1")


def test_the_async_client_works_too(shared: Api, path: str) -> None:
    url = url_of(shared, path)

    async def walk() -> list[int]:
        handle = await AsyncDurableStream.create(url, content_type="application/json")
        await handle.append({"n": 0})
        seen: list[int] = []
        async with astream(url, offset="-1", live="sse", timeout=READ_TIMEOUT_S) as response:
            async for item in response.iter_json():
                seen.append(item["n"])
                if item["n"] == 5:
                    break
                await handle.append({"n": item["n"] + 1})
        await handle.aclose()
        return seen

    assert asyncio.run(asyncio.wait_for(walk(), READ_TIMEOUT_S)) == list(range(6))
    assert json.loads(shared.get(path).body) == [{"n": n} for n in range(6)]
