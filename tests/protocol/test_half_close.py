"""A client that has said all it will say still listens: everything that arrived is answered, then the connection ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import pytest

from support.http import Api, Connection, request_bytes
from support.server import Server

TEXT = {"Content-Type": "text/plain"}
HEALTH = request_bytes("GET", "/-/health")
PAIRS = 3000


def say(connection: Connection, data: bytes) -> None:
    """Sends it all, then half-closes."""
    connection.send(data)
    connection.socket.shutdown(socket.SHUT_WR)


def pair(path: str, number: int) -> bytes:
    append = request_bytes("POST", Api.target(path), TEXT, b"%d," % number)
    return append + request_bytes("GET", Api.target(path, tail=1))


def test_thousands_of_pipelined_requests_are_all_answered(shared: Api, path: str) -> None:
    shared.put(path)
    with shared.connect() as connection:
        connection.deadline_s = 30.0
        requests = b"".join(pair(path, number) for number in range(PAIRS))
        sending = threading.Thread(target=say, args=(connection, requests))
        sending.start()
        for number in range(PAIRS):
            assert connection.read_response().status == 204, number
            answer = connection.read_response()
            assert (answer.status, answer.body) == (200, b"%d," % number)
        assert connection.is_closed_by_server()
        sending.join()


def test_a_single_pair_is_answered_and_the_connection_ends(shared: Api, path: str) -> None:
    shared.put(path)
    for number in range(20):
        with shared.connect() as connection:
            say(connection, pair(path, number))
            assert connection.read_response().status == 204
            assert connection.read_response().body == b"%d," % number
            assert connection.is_closed_by_server()


def test_requests_that_wait_for_the_log_are_answered(start_server: Callable[..., Server]) -> None:
    api = Api(start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "200"}))
    assert api.put("slow").status == 201
    with api.connect() as connection:
        # The second pair is still in the socket when the first has to wait.
        connection.send(pair("slow", 0))
        api.wait_for_metric("millstream_appends_total", 1)
        say(connection, pair("slow", 1) + HEALTH)
        for number in range(2):
            assert connection.read_response().status == 204
            assert connection.read_response().body == b"%d," % number
        assert connection.read_response().status == 200
        assert connection.is_closed_by_server()


def test_a_body_under_way_is_sent_whole_and_what_follows_is_answered(
    shared: Api, path: str
) -> None:
    body = bytes(range(256)) * 8192
    shared.put(path, body, "application/octet-stream")
    with shared.connect() as connection:
        say(connection, request_bytes("GET", Api.target(path)) + HEALTH * 3)
        assert connection.read_response().body == body
        for _ in range(3):
            assert connection.read_response().status == 200
        assert connection.is_closed_by_server()


def test_requests_to_the_control_plane_are_answered(shared: Api) -> None:
    listing = request_bytes("GET", "/-/api/streams")
    with shared.connect() as connection:
        say(connection, listing + HEALTH + listing + HEALTH)
        for _ in range(4):
            assert connection.read_response().status == 200
        assert connection.is_closed_by_server()


def test_questions_to_the_pipeline_are_answered(shared: Api, path: str) -> None:
    shared.put(path)
    tails = request_bytes("POST", "/v1/tails", None, json.dumps({"streams": [path]}).encode())
    with shared.connect() as connection:
        say(connection, tails + HEALTH + tails + HEALTH)
        for _ in range(4):
            assert connection.read_response().status == 200
        assert connection.is_closed_by_server()


def test_a_question_that_waits_is_answered_with_what_there_is(shared: Api, path: str) -> None:
    shared.put(path)
    first = shared.call("POST", "/v1/tails", None, json.dumps({"streams": [path]}).encode())
    asked = {"streams": [path], "cursor": first.json()["cursor"], "wait_ms": 60_000}
    before = shared.metric("millstream_pipeline_waiting")
    with shared.connect() as connection:
        connection.send(request_bytes("POST", "/v1/tails", None, json.dumps(asked).encode()))
        shared.wait_for_metric("millstream_pipeline_waiting", before + 1)
        say(connection, HEALTH)
        assert connection.read_response().json()["streams"] == []
        assert connection.read_response().status == 200
        assert connection.is_closed_by_server()


def test_questions_behind_one_that_waits_do_not_wait_either(shared: Api, path: str) -> None:
    shared.put(path)
    first = shared.call("POST", "/v1/tails", None, json.dumps({"streams": [path]}).encode())
    asked = {"streams": [path], "cursor": first.json()["cursor"], "wait_ms": 60_000}
    question = request_bytes("POST", "/v1/tails", None, json.dumps(asked).encode())
    with shared.connect() as connection:
        say(connection, question * 20)
        for _ in range(20):
            assert connection.read_response().json()["streams"] == []
        assert connection.is_closed_by_server()


def test_a_long_poll_is_answered_with_what_there_is(api: Api, path: str) -> None:
    tail = api.put(path).offset
    poll = request_bytes("GET", Api.target(path, offset=tail, live="long-poll"))
    with api.connect() as connection:
        connection.send(poll)
        api.wait_for_metric("millstream_long_polls", 1)
        say(connection, poll + HEALTH)
        for _ in range(2):
            answer = connection.read_response()
            assert (answer.status, answer["stream-up-to-date"]) == (204, "true")
        assert connection.read_response().status == 200
        assert connection.is_closed_by_server()
    assert api.metric("millstream_long_polls") == 0


def test_an_event_stream_ends_behind_the_event_under_way(api: Api, path: str) -> None:
    api.put(path, b"first")
    events = request_bytes("GET", Api.target(path, offset="-1", live="sse"))
    with api.connect() as connection:
        say(connection, events + HEALTH)
        text = connection.read_response().body.decode()
        assert text.startswith("event: data\ndata:first\n\nevent: control\n")
        assert connection.read_response().status == 200
        assert connection.is_closed_by_server()
    assert api.metric("millstream_sse_subscribers") == 0


@pytest.mark.parametrize(
    "torn",
    [
        b"GET /-/hea",
        b"GET /-/health HTTP/1.1\r\nHost: x\r\n",
        b"POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\nhalf",
        b"POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
    ids=["line", "head", "body", "chunks"],
)
def test_a_torn_request_is_refused_at_once(shared: Api, path: str, torn: bytes) -> None:
    shared.put(path)
    torn = torn.replace(b"{}", Api.target(path).encode())
    for before in (b"", pair(path, 7)):
        with shared.connect() as connection:
            say(connection, before + torn)
            if before:
                assert connection.read_response().status == 204
                assert connection.read_response().body == b"7,"
            answer = connection.read_response()
            assert (answer.status, answer.code) == (400, "bad_request")
            assert connection.is_closed_by_server()
    assert shared.read_all(path) == b"7,"


def test_a_client_that_leaves_between_requests_is_let_go(api: Api) -> None:
    with api.connect() as connection:
        say(connection, b"")
        assert connection.is_closed_by_server()
        say_nothing = api.connect()
        assert say_nothing.request("GET", "/-/health").status == 200
        say(say_nothing, b"")
        assert say_nothing.is_closed_by_server()
