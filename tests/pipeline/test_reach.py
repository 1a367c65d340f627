"""First contact of the client: any answer is enough, and nobody waits longer than was said."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

import millstream
from millstream.client.http import TransportFailure
from millstream.client.reach import reach, reach_steps
from millstream.client.steps import Call, Sleep
from millstream.errors import ConnectionFailed, RequestTimeout
from support.server import Server

DEADLINE_S = 30.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """An address at which connections are made, but nobody answers by itself."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        yield listening


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_is_reached_at_once(server: Server) -> None:
    with millstream.connect(server.url) as client:
        reach(client, DEADLINE_S)


def test_a_refusal_is_an_answer(server: Server) -> None:
    with millstream.connect(f"{server.url}/-/nothing") as client:
        reach(client, DEADLINE_S)


def test_where_nobody_listens_it_ends_when_the_patience_does(listener: socket.socket) -> None:
    url = url_of(listener)
    listener.close()
    with millstream.connect(url) as client:
        began = time.monotonic()
        with pytest.raises(ConnectionFailed, match="cannot reach"):
            reach(client, 0.5)
        assert time.monotonic() - began < DEADLINE_S / 3


def test_a_pause_that_lasts_too_long_leaves_time_for_an_attempt() -> None:
    """On a busy machine a sleep ends late, here behind the end of the patience."""
    with millstream.connect("http://127.0.0.1:9") as client:
        steps = reach_steps(client._operations, 0.2)
        next(steps)
        pause = steps.throw(TransportFailure("refused", sent=False))
        assert isinstance(pause, Sleep)
        time.sleep(0.25)
        last = steps.send(None)
        assert isinstance(last, Call)
        assert last.timeout_seconds > 0
        with pytest.raises(ConnectionFailed, match="cannot reach"):
            steps.throw(TransportFailure("refused", sent=False))


def test_silence_ends_when_the_patience_does(listener: socket.socket) -> None:
    """The client's own limit is 30 s for each answer."""
    with millstream.connect(url_of(listener)) as client:
        began = time.monotonic()
        with pytest.raises(RequestTimeout):
            reach(client, 0.5)
        assert time.monotonic() - began < DEADLINE_S / 3


def test_a_server_that_comes_up_late_isreach_steps(listener: socket.socket) -> None:
    """The first connections break, as at a server that is just starting."""
    seen = []

    def serve() -> None:
        for number in range(3):
            connection, _ = listener.accept()
            with connection:
                seen.append(number)
                if number == 2:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 503 Starting\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with millstream.connect(url_of(listener)) as client:
            reach(client, DEADLINE_S)
    finally:
        thread.join(DEADLINE_S)
    assert seen == [0, 1, 2]
