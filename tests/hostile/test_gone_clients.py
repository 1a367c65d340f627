"""Clients that ask for much and leave: nobody else waits for what nobody will read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest

from support.http import Api, request_bytes
from support.pipeline import ALL_COLUMNS, Pipeline
from support.server import Server

JSON = {"Content-Type": "application/json"}
RECORDS = b"[" + b",".join([b'{"a":1}'] * 1_000_000) + b"]"
GONE_COUNT = 200
SOON_S = 4.0  # each read takes a tenth of a second: together they take ten


@pytest.fixture
def large(start_server: Callable[..., Server]) -> tuple[Api, bytes]:
    """A server, and a request for a read of it that takes long."""
    api = Api(start_server(), deadline_s=60.0)
    assert api.put("large", headers=JSON).status == 201
    for _ in range(4):
        assert api.post("large", RECORDS, headers=JSON).status == 204
    asked = {
        "ranges": Pipeline(api).whole("large"),
        "columns": ALL_COLUMNS,
        "key_path": "a",
        "max_bytes": 64 << 20,
    }
    return api, request_bytes("POST", "/v1/read", None, json.dumps(asked).encode())


def test_reads_of_clients_that_have_left_are_not_performed(large: tuple[Api, bytes]) -> None:
    api, read = large
    began = time.monotonic()
    for _ in range(GONE_COUNT):
        with api.connect() as connection:
            connection.send(read)
    assert Pipeline(api).post("/v1/tails", {"streams": ["large"]}).status == 200
    assert time.monotonic() - began < SOON_S


def test_a_client_that_has_only_said_all_gets_its_read(large: tuple[Api, bytes]) -> None:
    api, read = large
    with api.connect() as connection:
        connection.send(read)
        connection.socket.shutdown(socket.SHUT_WR)
        answer = connection.read_response()
        assert answer.status == 200
        # It was asked whether it is still there.
        assert answer.interim in ([], [100])
        assert connection.is_closed_by_server()
