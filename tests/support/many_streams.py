"""Thousands of streams in a second: creates and appends, pipelined over one connection."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import millstream
from support.server import Server

DEADLINE_S = 60.0
TOGETHER = 100


def create_many(server: Server, names: Sequence[str], *, closed: bool = False) -> None:
    """JSON streams with the one record `{"i": 0}`."""
    _send(server, "PUT", names, b'[{"i":0}]', 201, "Stream-Closed: true\r\n" if closed else "")


def append_many(server: Server, names: Sequence[str]) -> None:
    """One more record, `{"i": 1}`, to each."""
    _send(server, "POST", names, b'[{"i":1}]', 204)


def delete_all(server: Server) -> None:
    with millstream.connect(server.url) as client:
        for found in list(client.list()):
            client.stream(found.path).delete()


def _send(
    server: Server, method: str, names: Sequence[str], body: bytes, status: int, header: str = ""
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as connection:
        for begin in range(0, len(names), TOGETHER):
            part = names[begin : begin + TOGETHER]
            connection.sendall(b"".join(_request(method, name, body, header) for name in part))
            received = b""
            while received.count(b"HTTP/1.1 ") < len(part) or not received.endswith(b"\r\n\r\n"):
                data = connection.recv(1 << 16)
                assert data, "the server hung up"
                received += data
            assert received.count(b"HTTP/1.1 %d" % status) == len(part), received[:500]


def _request(method: str, name: str, body: bytes, header: str) -> bytes:
    head = f"{method} /v1/stream/{name} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return (head + header).encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
