"""What `ephemeral` streams take in memory is bounded whatever their records are: index entries and streams count too."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable

import pytest

from support.classes import as_class
from support.http import Api, Connection, producer, request_bytes
from support.server import Server

MIB = 1 << 20
BUDGET = MIB
IN_MEMORY = "millstream_ephemeral_bytes"
KEPT = "millstream_ephemeral_kept_bytes"
SPILLED = "millstream_ephemeral_spilled_bytes_total"
BYTES = {"Content-Type": "application/octet-stream"}
# An index entry in memory, as the documents say.
ENTRY_BYTES = 32
DEPTH = 2_000


@pytest.fixture
def small(start_server: Callable[..., Server]) -> Server:
    return start_server(settings={"ephemeral_bytes_max": BUDGET})


def answers(connection: Connection, count: int) -> list[int]:
    """Status codes of pipelined requests."""
    return [connection.read_response().status for _ in range(count)]


def fill_by_the_byte(api: Api, name: str, count: int) -> bytes:
    """Appends single bytes, many at once; what was refused at the bound was not stored. Returns what was."""
    stored = bytearray()
    asked = [request_bytes("POST", Api.target(name), BYTES, bytes([n % 251])) for n in range(DEPTH)]
    burst = b"".join(asked)
    with socket.create_connection(("127.0.0.1", api.server.port), timeout=60) as connection:
        while len(stored) < count:
            connection.sendall(burst)
            answered = bytearray()
            while answered.count(b"HTTP/1.1 ") < DEPTH or not answered.endswith(
                (b"\r\n\r\n", b"}")
            ):
                piece = connection.recv(1 << 20)
                assert piece, "the server has hung up"
                answered += piece
            statuses = re.findall(rb"HTTP/1\.1 (\d+)", answered)
            assert set(statuses) <= {b"204", b"503"}, set(statuses)
            stored += bytes(n % 251 for n in range(DEPTH) if statuses[n] == b"204")
    return bytes(stored)


def test_the_index_of_tiny_appends_counts_and_leaves_memory(small: Server, path: str) -> None:
    api = Api(small, deadline_s=60)
    name = f"{path}/tiny"
    api.put(name, b"", "application/octet-stream", as_class("ephemeral"))
    stored = fill_by_the_byte(api, name, 30_000)
    warm = small.rss_bytes()
    counted = api.metric(IN_MEMORY)
    in_memory = len(stored) - api.metric(SPILLED)
    assert counted >= in_memory * (ENTRY_BYTES + 1), "the index is not counted"
    assert counted <= 2 * BUDGET
    stored += fill_by_the_byte(api, name, 370_000)
    # The index alone would be 12 MiB.
    assert small.rss_bytes() - warm < 8 * MIB
    assert api.metric(IN_MEMORY) <= 2 * BUDGET
    assert api.read_all(name) == stored
    records = api.call("GET", f"/-/api/streams?prefix={name}").json()["streams"][0]["records"]
    assert records == len(stored)
    assert api.get(name, tail=3).body == stored[-3:]


def test_streams_with_records_count_and_have_a_bound(small: Server, path: str) -> None:
    api = Api(small, deadline_s=60)
    headers = BYTES | as_class("ephemeral")
    with api.connect() as connection:

        def create(numbers: range, body: bytes) -> list[int]:
            asked = [
                request_bytes("PUT", Api.target(f"{path}/{number}"), headers, body)
                for number in numbers
            ]
            connection.send(b"".join(asked))
            return answers(connection, len(numbers))

        statuses = create(range(3_000), b"x")
        made = statuses.count(201)
        assert 300 < made < 3_000
        assert set(statuses) == {201, 503}
        assert BUDGET / 2 < api.metric(KEPT) < BUDGET
        assert api.metric(KEPT) / made > 500, "a stream takes more than this"
        # Those that have records take more, those that have none may be made.
        append = request_bytes("POST", Api.target(f"{path}/0"), BYTES, b"y")
        connection.send(append)
        assert answers(connection, 1) == [204]
        assert set(create(range(3_000, 3_100), b"")) == {201}
        refused = connection.request("POST", Api.target(f"{path}/3000"), BYTES, b"y")
        assert (refused.status, refused.code) == (503, "server_busy")
        assert "ephemeral_bytes_max" in refused.json()["detail"]
        assert refused.get("retry-after")
        for number in range(100):
            assert api.delete(f"{path}/{number}").status == 204
        again = connection.request("POST", Api.target(f"{path}/3000"), BYTES, b"y")
        assert again.status == 204, "a deleted stream makes room"


def test_producers_of_a_stream_count(small: Server, path: str) -> None:
    api = Api(small, deadline_s=60)
    name = f"{path}/producers"
    api.put(name, b"", "application/octet-stream", as_class("ephemeral"))
    with api.connect() as connection:
        for number in range(1_000):
            head = BYTES | producer(f"producer-{number}", 0, 0)
            connection.send(request_bytes("POST", Api.target(name), head, b"x"))
        assert set(answers(connection, 1_000)) == {200}
    assert api.metric(KEPT) > 1_000 * 64
    api.delete(name)
    assert api.metric(KEPT) == 0


def test_many_small_spills_of_a_stream_become_few(small: Server, path: str) -> None:
    """Extents are memory too: a stream that is spilled again and again does not collect them."""
    api = Api(small, deadline_s=60)
    trickle, flood = f"{path}/trickle", f"{path}/flood"
    for name in (trickle, flood):
        api.put(name, b"", "application/octet-stream", as_class("ephemeral"))
    sent = bytearray()
    with api.connect() as connection:
        for number in range(60):
            before = api.metric(SPILLED)
            piece = bytes([number]) * 10
            # The flood before may still be on its way to a file.
            until = time.monotonic() + api.deadline_s
            append = request_bytes("POST", Api.target(trickle), BYTES, piece)
            connection.send(append)
            while (status := connection.read_response().status) == 503:
                assert time.monotonic() < until, "the flood is never moved"
                connection.send(append)
            assert status == 204
            sent += piece
            while api.metric(SPILLED) == before:
                status = connection.request("POST", Api.target(flood), BYTES, bytes(600_000)).status
                assert status in (204, 503)
            assert api.delete(flood).status == 204
            api.put(flood, b"", "application/octet-stream", as_class("ephemeral"))
    assert api.delete(flood).status == 204
    # Streams that were deleted leave in their time; what stays is one stream with few extents.
    extent_bytes = 72
    api.wait_until_metric(KEPT, lambda kept: kept < 1_200 + 60 * extent_bytes / 2)
    assert api.read_all(trickle) == sent
    assert api.get(trickle, tail=2).body == sent[-20:]
