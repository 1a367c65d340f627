"""Bodies for the control plane that are made to be slow to parse: it is one thread, and others have calls there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest

from control.conftest import eventually
from support.http import Api, Response, request_bytes
from support.server import Server

JSON = {"Content-Type": "application/json"}
SUBSCRIPTION = "/v1/stream/__ds/subscriptions/s"
VALUES_MAX = 40_000
TOO_MANY = f"the body has more than {VALUES_MAX} values"
MANY_VALUES = b'{"x":[' + b",".join([b"[]"] * 345_000) + b"]}"
CROWD = 60
CROWD_S = 2.5  # of processor time; parsing them took more than twice that


def put(api: Api, body: bytes) -> Response:
    return api.call("PUT", SUBSCRIPTION, JSON, body)


def with_marks(count: int) -> bytes:
    """An object with so many commas and opening brackets."""
    return b'{"x":[' + b",".join([b"1"] * (count - 1)) + b"]}"


@pytest.mark.parametrize(
    "body",
    [
        MANY_VALUES,
        with_marks(VALUES_MAX + 1),
        b'{"x":{' + b",".join([b'"":""'] * 140_000) + b"}}",
        b'{"x":"' + b'\\"' * 100 + b'","y":[' + b"{}," * 200_000 + b"1]}",
        MANY_VALUES[: 500 << 10].decode().encode("utf-16"),
    ],
    ids=["arrays", "one", "fields", "quotes", "utf-16"],
)
def test_a_body_with_too_many_values_is_refused(shared: Api, body: bytes) -> None:
    answer = put(shared, body)
    assert answer.status == 400
    error = answer.json()["error"]
    assert (error["code"], error["message"]) == ("INVALID_REQUEST", TOO_MANY)


def test_a_refusal_elsewhere_says_what_helps(shared: Api, path: str) -> None:
    shared.put(path)
    answer = shared.call("PATCH", f"/-/api/streams/{path}", JSON, MANY_VALUES)
    assert (answer.status, answer.code) == (400, "bad_request")
    assert answer.json()["detail"] == TOO_MANY
    assert answer.json()["hint"] == "split the request into several"


@pytest.mark.parametrize(
    "body",
    [
        with_marks(VALUES_MAX),
        b'{"x":' + b"9" * 4000 + b"}",
        *(b'{"x":' + b"[" * depth + b"]" * depth + b"}" for depth in (900, 990, 1000, 39_000)),
        b'{"x":' * 39_000 + b"1" + b"}" * 39_000,
        b"[" * 39_000,
        b'{"' + b"," * (1 << 19),
        b'{"type":"' + b",[{" * 100_000 + b'"}',
    ],
    ids=["most", "digits", "900", "990", "1000", "39000", "objects", "open", "torn", "text"],
)
def test_what_is_small_enough_and_wrong_is_a_bad_request(shared: Api, body: bytes) -> None:
    answer = put(shared, body)
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["code"] == "INVALID_REQUEST"
    assert error["message"] != TOO_MANY


def test_the_largest_calls_are_taken_whatever_names_are_in_them(
    start_server: Callable[..., Server],
) -> None:
    api = Api(start_server(), deadline_s=30.0)
    assert api.put("wake", b"[]", "application/json").status == 201
    names = [f'{number:05}{",[{" * 8}"' for number in range(10_000)]
    config = {"type": "pull-wake", "wake_stream": "wake", "streams": names}
    created = put(api, json.dumps(config).encode())
    assert created.status == 201
    assert [link["path"] for link in created.json()["streams"]] == names
    offset = api.put(quote(names[0]), b"1", "text/plain").offset
    eventually(lambda: api.get("wake").body != b"[]", "the subscription is woken")
    claimed = api.call("POST", f"{SUBSCRIPTION}/claim", JSON, b'{"worker":"w"}').json()
    acks = [{"stream": names[0], "offset": offset}] * len(names)
    ack = {key: claimed[key] for key in ("wake_id", "generation")} | {"acks": acks}
    headers = {**JSON, "Authorization": f"Bearer {claimed['token']}"}
    answer = api.call("POST", f"{SUBSCRIPTION}/ack", headers, json.dumps(ack).encode())
    assert answer.status == 200, answer.body


def test_a_crowd_of_such_bodies_takes_little_of_the_one_thread(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(settings={"reactors": 1})
    api = Api(server, deadline_s=60.0)
    request = request_bytes("PUT", SUBSCRIPTION, JSON, MANY_VALUES)
    before_s = server.cpu_seconds()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(api.connect()) for _ in range(CROWD)]
        for connection in connections:
            connection.send(request)
        answers = [connection.read_response().status for connection in connections]
    took_s = server.cpu_seconds() - before_s
    assert took_s < CROWD_S
    assert set(answers) == {400}
