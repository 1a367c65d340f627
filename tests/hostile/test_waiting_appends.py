"""Appends that wait for room in the log cost little while they do, and come in their order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from support.http import Api, Connection, producer, request_bytes
from support.server import Server

CLIENTS = 120
# Just below what workers look through. A batch of the log takes eight of them.
ARRAY = b"[" + b",".join([b"0"] * 524_000) + b"]"
JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}


def complete_but_for_one_byte(
    api: Api, path: str, headers: dict[str, str], body: bytes
) -> Connection:
    assert api.put(path, b"", headers["Content-Type"]).status == 201
    connection = api.connect()
    connection.send(request_bytes("POST", Api.target(path), headers, body)[:-1])
    return connection


def test_an_array_that_waits_for_room_is_looked_through_once(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(settings={"reactors": 1})
    api = Api(server, deadline_s=60)

    def cpu_seconds(count: int, name: str) -> float:
        """What the server works for arrays that are there at once."""
        with ExitStack() as stack:
            clients = [
                stack.enter_context(complete_but_for_one_byte(api, f"{name}/{number}", JSON, ARRAY))
                for number in range(count)
            ]
            before = server.cpu_seconds()
            for client in clients:
                client.send(ARRAY[-1:])
            for client in clients:
                assert client.read_response().status == 204
            return server.cpu_seconds() - before

    few = sum(cpu_seconds(6, f"few/{number}") for number in range(4)) / 24
    assert cpu_seconds(CLIENTS, "many") / CLIENTS < 3 * few, "each was looked through many times"


@pytest.mark.parametrize("why", ["duplicate", "closed", "other type"])
def test_an_array_that_is_not_stored_is_not_looked_through(
    shared: Api, path: str, why: str
) -> None:
    server = shared.server
    assert isinstance(server, Server)
    headers = {"duplicate": producer("p", 0, 0)}.get(why, {})
    status = {"duplicate": 204, "closed": 409, "other type": 409}[why]

    def cpu_seconds(name: str, kind: str, body: bytes) -> float:
        stream = f"{path}/{name}"
        assert shared.put(stream, b"", kind).status == 201
        if why == "duplicate":
            assert shared.post(stream, body, kind, headers).status == 200
        if why == "closed":
            assert shared.close_stream(stream).status == 204
        sent = "text/plain" if why == "other type" else kind
        request = request_bytes("POST", Api.target(stream), {"Content-Type": sent, **headers}, body)
        with shared.connect() as connection:
            before = server.cpu_seconds()
            for _ in range(60):
                connection.send(request)
                assert connection.read_response().status == status
            return server.cpu_seconds() - before

    of_bytes = cpu_seconds("bytes", "application/octet-stream", b"x" * len(ARRAY))
    of_array = cpu_seconds("array", "application/json", ARRAY)
    assert of_array < 2 * of_bytes + 0.05


@pytest.mark.long
def test_who_waits_while_others_are_stored_is_stored_in_the_end(
    start_server: Callable[..., Server],
) -> None:
    # The last of them waits longer than one may wait for a log that stands still.
    server = start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "4000"})
    api = Api(server, deadline_s=120)
    assert api.put("s", b"", BYTES["Content-Type"]).status == 201
    body = b"x" * 1_048_000
    with ExitStack() as stack:
        clients = [stack.enter_context(api.connect()) for _ in range(100)]
        for client in clients:
            client.send(request_bytes("POST", Api.target("s"), BYTES, body))
        for client in clients:
            assert client.read_response().status == 204


def test_a_small_append_finds_room_beside_those_who_wait(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(
        settings={"reactors": 1}, environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "100"}
    )
    api = Api(server, deadline_s=60)
    api.put("small")
    body = b"x" * 1_048_000
    with ExitStack() as stack:
        clients = [
            stack.enter_context(complete_but_for_one_byte(api, f"s/{number}", BYTES, body))
            for number in range(60)
        ]
        small = stack.enter_context(api.connect())
        before = api.metric("millstream_appends_total")
        for client in clients:
            client.send(body[-1:])
        api.wait_until_metric("millstream_appends_total", lambda count: count > before)
        headers = {"Content-Type": "text/plain"}
        assert small.request("POST", Api.target("small"), headers, b"x").status == 204
        assert api.metric("millstream_appends_total") < before + len(clients)
        for client in clients:
            assert client.read_response().status == 204
