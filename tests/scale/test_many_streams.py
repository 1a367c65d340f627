"""A hundred thousand streams and a thousand idle subscribers on one small server.

Creation goes over one pipelined connection while the server may hold 4,096 descriptors. Rates are
printed, because a shared machine cannot promise them; memory and the ability to come back are asserted.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from support.http import Api, request_bytes
from support.server import Server
from support.sse import EventStream

MIB = 1 << 20
STREAMS = 100_000
BATCH = 1000
SUBSCRIBERS = 1000
FILES_MAX = 4096


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process needs a descriptor for each subscriber."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * SUBSCRIBERS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def create_all(api: Api, count: int) -> float:
    """PUT with one record each, pipelined; returns the seconds it took."""
    text = {"Content-Type": "text/plain"}
    batches = [
        b"".join(
            request_bytes("PUT", Api.target(f"many/{n:06}"), text, b"record %06d" % n)
            for n in range(start, start + BATCH)
        )
        for start in range(0, count, BATCH)
    ]
    began = time.monotonic()
    with api.connect() as connection:
        for batch in batches:
            connection.send(batch)
            for _ in range(BATCH):
                status = connection.read_response().status
                assert status == 201, status
    return time.monotonic() - began


@contextlib.contextmanager
def awake(api: Api) -> Iterator[None]:
    """A log without appends for two seconds is checkpointed, in memory that would be taken for the subscribers'."""
    over = threading.Event()

    def append() -> None:
        while not over.wait(0.5):
            assert api.post("awake", b"x").status == 204

    assert api.put("awake").status == 201
    thread = threading.Thread(target=append)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert api.metric("millstream_checkpoints_total") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_thousand_streams_and_a_thousand_subscribers(
    start_server: Callable[..., Server], many_files: None
) -> None:
    server = start_server(files_max=FILES_MAX)
    api = Api(server, deadline_s=30.0)
    took = create_all(api, STREAMS)
    resident = server.rss_bytes()
    print(f"{STREAMS / took:,.0f} creates/s, {resident / MIB:.0f} MiB resident")
    assert resident < 200 * MIB
    assert server.open_files() < 512

    server.kill()
    server.restart(deadline_s=60.0)
    print(f"ready {server.start_seconds:.2f} s after kill -9")
    assert server.start_seconds < 15
    with awake(api):
        with api.connect() as connection:
            for number in range(0, STREAMS, 997):
                answer = connection.request("GET", Api.target(f"many/{number:06}"))
                assert (answer.status, answer.body) == (200, b"record %06d" % number)
            answer = connection.request("GET", Api.target(f"many/{STREAMS:06}"))
            assert answer.status == 404
        print(f"{server.rss_bytes() / MIB:.0f} MiB resident after the restart")
        assert server.rss_bytes() < 200 * MIB
        check_subscribers(server, api)


def check_subscribers(server: Server, api: Api) -> None:
    before = server.rss_bytes()
    readers = [EventStream.open(api, "many/000000", "now") for _ in range(SUBSCRIBERS)]
    for reader in readers:
        assert reader.control()["upToDate"] is True
    added = server.rss_bytes() - before
    print(f"{SUBSCRIBERS} subscribers add {added / MIB:.1f} MiB")
    assert added < 30 * MIB
    began = time.monotonic()
    assert api.post("many/000000", b"hello all").status == 204
    for reader in readers:
        assert reader.next().data == "hello all"
        reader.connection.close()
    print(f"one record reached all of them within {time.monotonic() - began:.3f} s")
