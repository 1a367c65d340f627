"""Readers that wait at the tail while the stream is appended to, closed or deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from support.http import Api, Connection, request_bytes
from support.server import Server
from support.sse import EventStream

pytestmark = pytest.mark.one_server

# Long polls outlast every test, so that only a wake-up can end one.
LONG_MS = 20_000
SERVER_SETTINGS = {"long_poll_timeout_ms": LONG_MS}
AT_ONCE_S = 2.0


def waiting_poll(api: Api, path: str, offset: str) -> Connection:
    """A long poll that the server has certainly parked."""
    parked = api.metric("millstream_long_polls")
    connection = api.connect()
    connection.send(request_bytes("GET", api.target(path, offset=offset, live="long-poll")))
    api.wait_for_metric("millstream_long_polls", parked + 1)
    return connection


def test_append_wakes_every_waiting_poll(api: Api, path: str) -> None:
    tail = api.put(path).offset
    polls = [waiting_poll(api, path, tail) for _ in range(20)]
    began = time.monotonic()
    api.post(path, b"news")
    for poll in polls:
        answer = poll.read_response()
        assert (answer.status, answer.body) == (200, b"news")
        assert answer["stream-up-to-date"] == "true"
        poll.close()
    assert time.monotonic() - began < AT_ONCE_S


def test_delete_ends_a_waiting_poll_with_404(api: Api, path: str) -> None:
    poll = waiting_poll(api, path, api.put(path).offset)
    began = time.monotonic()
    assert api.delete(path).status == 204
    answer = poll.read_response()
    assert (answer.status, answer.code) == (404, "stream_not_found")
    assert time.monotonic() - began < AT_ONCE_S
    poll.close()


def test_soft_delete_ends_a_waiting_poll(api: Api, path: str) -> None:
    tail = api.put(path, b"x").offset
    api.put(f"{path}/fork", b"", None, {"Stream-Forked-From": api.target(path)})
    poll = waiting_poll(api, path, tail)
    assert api.delete(path).status == 204
    assert poll.read_response().status in (404, 410)
    poll.close()


def test_delete_ends_a_live_sse_reader(api: Api, path: str) -> None:
    api.put(path, b"x")
    with EventStream.open(api, path) as events:
        assert events.until_up_to_date()
        began = time.monotonic()
        assert api.delete(path).status == 204
        assert [event.kind for event in events.until_end()] in ([], ["control"])
        assert time.monotonic() - began < AT_ONCE_S


def test_expiry_ends_waiting_readers(api: Api, path: str) -> None:
    tail = api.put(path, headers={"Stream-TTL": "1"}).offset
    poll = waiting_poll(api, path, tail)
    with EventStream.open(api, path, tail) as events:
        events.control()
        events.until_end()
    assert poll.read_response().status == 404
    poll.close()


def test_a_poll_is_told_of_an_expired_fork_what_a_read_is_told(
    start_server: Callable[..., Server],
) -> None:
    """The poll looks when the expiry is final, often before the fork is purged: nobody forked it, so it is not kept."""
    server = start_server(settings={"long_poll_timeout_ms": LONG_MS, "sweep_interval_ms": 5})
    api = Api(server, deadline_s=30)
    api.put("source", b"x")
    headers = {"Stream-Forked-From": api.target("source"), "Stream-TTL": "1"}
    told = []
    with ExitStack() as stack:
        polls = {f"fork-{number}": stack.enter_context(api.connect()) for number in range(8)}
        for fork, poll in polls.items():
            tail = api.put(fork, b"", None, headers).offset
            poll.send(request_bytes("GET", api.target(fork, offset=tail, live="long-poll")))
        for fork, poll in polls.items():
            answer = poll.read_response()
            read = api.get(fork)
            told.append((answer.status, answer.code, read.status, read.code))
    assert set(told) == {(404, "stream_not_found") * 2}


def test_close_ends_a_waiting_poll_with_the_end_of_the_stream(api: Api, path: str) -> None:
    tail = api.put(path).offset
    poll = waiting_poll(api, path, tail)
    began = time.monotonic()
    assert api.close_stream(path).status == 204
    answer = poll.read_response()
    assert (answer.status, answer["stream-closed"], answer.offset) == (204, "true", tail)
    assert time.monotonic() - began < AT_ONCE_S
    poll.close()


def test_append_and_close_gives_a_waiting_poll_the_data(api: Api, path: str) -> None:
    poll = waiting_poll(api, path, api.put(path).offset)
    api.post(path, b"last", headers={"Stream-Closed": "true"})
    answer = poll.read_response()
    assert (answer.status, answer.body, answer["stream-closed"]) == (200, b"last", "true")
    poll.close()


def test_append_and_close_gives_a_live_sse_reader_data_then_end(api: Api, path: str) -> None:
    api.put(path)
    with EventStream.open(api, path) as events:
        events.control()
        api.post(path, b"last", headers={"Stream-Closed": "true"})
        data, control = events.until_end()
        assert (data.kind, data.data) == ("data", "last")
        assert control.json()["streamClosed"] is True
        assert "streamCursor" not in control.json()


def test_delete_and_create_again_never_shows_old_readers_new_data(api: Api, path: str) -> None:
    tail = api.put(path).offset
    poll = waiting_poll(api, path, tail)
    with api.connect() as connection:
        connection.send(
            request_bytes("DELETE", api.target(path))
            + request_bytes("PUT", api.target(path), {"Content-Type": "text/plain"}, b"other life")
        )
        assert connection.read_response().status == 204
        assert connection.read_response().status == 201
    assert poll.read_response().status == 404
    poll.close()


def test_a_poll_whose_client_went_away_costs_nothing(api: Api, path: str) -> None:
    tail = api.put(path).offset
    for _ in range(50):
        waiting = api.connect()
        waiting.send(request_bytes("GET", api.target(path, offset=tail, live="long-poll")))
        waiting.abort()
    api.wait_for_metric("millstream_long_polls", 0)
    assert api.post(path, b"x").status == 204
    assert api.get(path, offset=tail, live="long-poll").body == b"x"


def test_a_large_body_waits_for_its_reader_and_for_nothing_else(shared: Api, path: str) -> None:
    """A socket that is full is gone on with as soon as it is not: a timer for each of its fillings would take a minute."""
    piece = bytes(range(256)) * (1 << 12)
    shared.put(path)
    for _ in range(64):
        assert shared.post(path, piece).status == 204
    began = time.monotonic()
    assert shared.read_all(path) == piece * 64
    assert time.monotonic() - began < 20
