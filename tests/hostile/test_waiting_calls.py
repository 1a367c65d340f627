"""Calls that wait leave room for calls that do not."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.http import Api, Connection, request_bytes
from support.server import Server

CALLS = 300
WAITING_MAX = 64
LARGE_MAX = 64
LARGE_BYTES = 64 << 10
WAIT_MS = 20_000
DEADLINE_S = 8.0  # well below the wait: what is answered by then has not waited for its end


@pytest.fixture
def slow_backup(start_server: Callable[..., Server], tmp_path: Path) -> Iterator[tuple[Api, str]]:
    """A server with a backup that takes minutes, and the address at which one can wait for it."""
    server = start_server(settings={"reactors": 1})
    api = Api(server)
    assert api.put("large", b"x" * (4 << 20)).status == 201
    asked = json.dumps({"to": str(tmp_path / "backup"), "rate_mib_per_second": 0.01}).encode()
    started = api.call("POST", "/-/api/backups", {"Content-Type": "application/json"}, asked)
    assert started.status == 202, started.body
    yield api, started["location"]
    api.call("DELETE", started["location"])


def answered(connections: list[Connection]) -> list[Connection]:
    """Those with bytes to read."""
    ready = []
    for connection in connections:
        connection.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if connection.socket.recv(1, socket.MSG_PEEK):
                ready.append(connection)
        connection.socket.settimeout(DEADLINE_S)
    return ready


def eventually(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def test_waiting_calls_do_not_take_the_slots_of_short_ones(slow_backup: tuple[Api, str]) -> None:
    api, place = slow_backup
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(api.connect()) for _ in range(CALLS)]
        for connection in waiting:
            connection.send(request_bytes("GET", f"{place}?wait_ms={WAIT_MS}"))
        eventually(
            lambda: api.metric("millstream_control_requests_total") >= 256, "the calls arrived"
        )
        eventually(
            lambda: api.call("GET", "/-/api/streams").status == 200, "a short call is answered"
        )
        eventually(
            lambda: len(answered(waiting)) == CALLS - WAITING_MAX, "what is too much is refused"
        )
        for connection in answered(waiting):
            answer = connection.read_response()
            # The second: so many at once that they were not even passed on.
            assert answer.status == 503
            assert answer.code in ("server_busy", "control_unavailable")
            assert int(answer["retry-after"]) >= 1
        assert api.metric("millstream_control_waiting") == WAITING_MAX
        assert api.metric("millstream_control_crowded_total") > 0
        assert api.call("GET", place).json()["state"] == "running"
        for connection in waiting:
            connection.abort()
    # Who has gone waits no more, and makes room at once.
    eventually(lambda: api.metric("millstream_control_waiting") == 0, "places are given back")
    answer = api.call("GET", f"{place}?wait_ms=1")
    assert (answer.status, answer.json()["state"]) == (200, "running")


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at-once"])
def test_who_closes_its_connection_is_not_waited_for(
    slow_backup: tuple[Api, str], at_once: bool
) -> None:
    api, place = slow_backup
    requests = api.metric("millstream_control_requests_total")
    connections = [api.connect() for _ in range(WAITING_MAX)]
    for connection in connections:
        connection.send(request_bytes("GET", f"{place}?wait_ms={WAIT_MS}"))
        if at_once:
            connection.close()
    if not at_once:
        api.wait_for_metric("millstream_control_waiting", WAITING_MAX)
        for connection in connections:
            connection.close()
    api.wait_for_metric("millstream_control_requests_total", requests + WAITING_MAX)
    eventually(lambda: api.metric("millstream_connections") == 1, "the connections are closed")
    eventually(lambda: api.metric("millstream_control_waiting") == 0, "places are given back")


def test_who_has_only_said_all_is_answered(slow_backup: tuple[Api, str]) -> None:
    api, place = slow_backup
    with api.connect() as connection:
        connection.send(request_bytes("GET", f"{place}?wait_ms={WAIT_MS}"))
        api.wait_for_metric("millstream_control_waiting", 1)
        connection.socket.shutdown(socket.SHUT_WR)
        eventually(lambda: answered([connection]) != [], "it is asked whether it is still there")
        assert api.metric("millstream_control_waiting") == 1
        api.call("DELETE", place)
        answer = connection.read_response()
        assert (answer.status, answer.interim) == (200, [100])
        assert answer.json()["state"] == "cancelled"
        assert connection.is_closed_by_server()


def test_large_bodies_leave_places_to_short_calls(slow_backup: tuple[Api, str]) -> None:
    api, place = slow_backup
    target = "/v1/stream/__ds/subscriptions/s"
    large = b" " * (LARGE_BYTES + 1)
    with contextlib.ExitStack() as stack:
        for _ in range(LARGE_MAX):
            connection = stack.enter_context(api.connect())
            connection.send(request_bytes("GET", f"{place}?wait_ms={WAIT_MS}", None, large))
        api.wait_for_metric("millstream_control_waiting", LARGE_MAX)
        refused = api.call("PUT", target, None, large)
        assert (refused.status, refused.code) == (503, "control_unavailable")
        assert "large bodies" in refused.json()["detail"]
        assert int(refused["retry-after"]) >= 1
        # Others are answered: this one is wrong, but small enough.
        assert api.call("PUT", target, None, large[1:]).status == 400
        assert api.call("GET", "/-/api/streams").status == 200
    eventually(lambda: api.call("PUT", target, None, large).status == 400, "there is room again")
