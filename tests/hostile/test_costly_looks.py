"""Looks at streams and subscriptions have a price and places, whoever asks and leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import millstream
from support.http import Api, request_bytes
from support.server import Server

GONE = 9_000
LOOKS_MAX = 2 * (4_000 + 100)  # the engine's: those that are new, and those in the catalog
PLACES = 32
CALLS = 50
CALLS_MAX = 1024
AT_ONCE = 8
SLOW_MS = 30_000
TEXT = {"Content-Type": "text/plain"}
ONE = "/-/api/streams/new"
VIEW = "/v1/stream/__ds/subscriptions/s"


def pipelined(api: Api, requests: Iterator[bytes], status: int) -> None:
    with api.connect() as connection:
        batch = list(requests)
        for start in range(0, len(batch), 500):
            some = batch[start : start + 500]
            connection.send(b"".join(some))
            assert {connection.read_response().status for _ in some} == {status}


def test_no_look_walks_the_streams_that_forks_keep(start_server: Callable[..., Server]) -> None:
    """They were deleted, and are there for their forks alone."""
    server = start_server()
    api = Api(server, deadline_s=60.0)
    sources = [f"a/{number:05}" for number in range(GONE)]

    def forks() -> Iterator[bytes]:
        for number, source in enumerate(sources):
            headers = {"Stream-Forked-From": Api.target(source)}
            yield request_bytes("PUT", Api.target(f"b/{number:05}"), headers)

    pipelined(api, (request_bytes("PUT", Api.target(s), TEXT, b"x") for s in sources), 201)
    pipelined(api, forks(), 201)
    pipelined(api, (request_bytes("DELETE", Api.target(s)) for s in sources), 204)
    for name in ("a/last", "zz"):
        assert api.put(name).status == 201

    def looks(target: str, status: int) -> int:
        before = api.metric("millstream_list_looks_total")
        assert api.call("GET", f"/-/api/streams{target}").status == status
        return api.metric("millstream_list_looks_total") - before

    assert looks("/a/", 404) <= 1
    assert looks(f"/{sources[0]}", 404) <= 1
    assert looks("/zz", 200) <= 1
    assert looks("?limit=1", 200) <= LOOKS_MAX
    assert looks("?prefix=a&limit=1", 200) <= LOOKS_MAX
    page = api.call("GET", "/-/api/streams?prefix=a/&limit=1").json()
    assert (page["streams"], page["next"] < "a/last") == ([], True)
    with millstream.connect(server.url) as client:
        assert [info.path for info in client.list("a/")] == ["a/last"]
        assert [info.path for info in client.list("a/", limit=1)] == ["a/last"]
        assert [info.path for info in client.list(limit=2)] == ["a/last", "b/00000"]
        assert sum(1 for _ in client.list()) == GONE + 2


def taken_up(api: Api) -> int:
    """Calls that the control plane has begun and not ended, and those that it has refused."""
    return api.metric("millstream_control_calls") + api.metric("millstream_control_crowded_total")


def call_and_leave(api: Api, target: str, count: int) -> None:
    """All are taken up before their clients leave, and go on behind their backs."""
    for start in range(0, count, AT_ONCE):
        some = min(AT_ONCE, count - start)
        wanted = taken_up(api) + some
        with ExitStack() as stack:
            for _ in range(some):
                stack.enter_context(api.connect()).send(request_bytes("GET", target))
            until = time.monotonic() + api.deadline_s
            while (seen := taken_up(api)) < wanted:
                assert time.monotonic() < until, f"{seen} of {wanted}"
                time.sleep(0.01)


@contextmanager
def behind_a_slow_disk(start_server: Callable[..., Server]) -> Iterator[Api]:
    """A subscription is being written, and what comes behind it waits for the next sync."""
    server = start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": str(SLOW_MS)})
    api = Api(server, deadline_s=60.0)
    config = {"type": "webhook", "streams": ["s"], "webhook": {"url": "https://hook.example/"}}
    json_type = {"Content-Type": "application/json"}
    try:
        with api.connect() as connection:
            connection.send(request_bytes("PUT", VIEW, json_type, json.dumps(config).encode()))
            api.wait_until_metric("millstream_control_waiting", lambda count: count == 1)
            yield api
    finally:
        server.kill()


def test_looks_at_one_stream_have_places(start_server: Callable[..., Server]) -> None:
    with behind_a_slow_disk(start_server) as api, api.connect() as creating:
        cached = api.metric("millstream_streams_cached")
        creating.send(request_bytes("PUT", Api.target("new"), TEXT))
        api.wait_until_metric("millstream_streams_cached", lambda count: count > cached)
        call_and_leave(api, ONE, CALLS)
        api.wait_for_metric("millstream_control_crowded_total", CALLS - PLACES)
        api.wait_for_metric("millstream_control_calls", PLACES + 1)
        assert api.metric("millstream_control_waiting") == PLACES + 1
        refused = api.call("GET", ONE)
        assert (refused.status, refused.code) == (503, "server_busy")
        assert api.call("GET", "/v1/stream/__ds/jwks.json").status == 200


def test_who_is_too_much_is_refused_in_our_words(start_server: Callable[..., Server]) -> None:
    with behind_a_slow_disk(start_server) as api:
        call_and_leave(api, VIEW, CALLS_MAX)
        api.wait_for_metric("millstream_control_calls", CALLS_MAX)
        for _ in range(3):
            refused = api.call("GET", "/-/api/streams")
            assert (refused.status, refused.code) == (503, "server_busy")
            assert refused["x-content-type-options"] == "nosniff"
            refused = api.call("GET", VIEW)
            assert (refused.status, refused.json()["error"]["code"]) == (503, "UNAVAILABLE")
        assert api.metric("millstream_control_crowded_total") > 6
