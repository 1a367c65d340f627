"""A body of known length is received by one call of the kernel where it waits by itself: what that call must not change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from millstream.client.http import TransportFailure
from millstream.client.sync import io

BODY = bytes(range(256)) * 1024
PIECE = len(BODY) // 4
PATIENCE_SECONDS = 30.0


@pytest.fixture(params=["kernel", "loop"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the kernel waits, as on Linux, or a loop, as elsewhere."""
    monkeypatch.setattr(io, "KERNEL_WAITS", request.param == "kernel")
    return str(request.param)


@pytest.fixture
def pair() -> Iterator[tuple[io.Channel, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with server:
        channel = io.Channel(client, tls=False)
        yield channel, server
        channel.close()


def receive(channel: io.Channel, view: memoryview, seconds: float = PATIENCE_SECONDS) -> int:
    filled = 0
    while filled < len(view) and (count := channel.receive_into(view[filled:], seconds)):
        filled += count
    return filled


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.usefixtures("waits")
def test_a_body_comes_whole_however_it_is_sent(pair: tuple[io.Channel, socket.socket]) -> None:
    channel, server = pair
    body = bytearray(len(BODY))

    def send() -> None:
        for begin in range(0, len(BODY), PIECE):
            server.sendall(BODY[begin : begin + PIECE])

    for _ in range(2):
        sending = beside(send)
        assert receive(channel, memoryview(body)) == len(BODY)
        sending.join(PATIENCE_SECONDS)
        assert body == BODY
    # What comes behind it is received as ever.
    server.sendall(b"next")
    assert channel.receive(PATIENCE_SECONDS) == b"next"


@pytest.mark.usefixtures("waits")
def test_silence_is_told_and_what_came_before_it_kept(
    pair: tuple[io.Channel, socket.socket],
) -> None:
    channel, server = pair
    view = memoryview(bytearray(len(BODY)))
    server.sendall(BODY[:PIECE])
    filled = 0
    with pytest.raises(TransportFailure, match=r"silent for 0\.2 s") as failed:
        while True:
            filled += channel.receive_into(view[filled:], 0.2)
    assert failed.value.timeout
    assert failed.value.sent
    assert view[:filled] == BODY[:PIECE]


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("ends", ["closed", "interrupted"])
def test_a_connection_that_ends_is_not_waited_for(
    pair: tuple[io.Channel, socket.socket], ends: str
) -> None:
    channel, server = pair
    server.sendall(BODY[:PIECE])
    view = memoryview(bytearray(len(BODY)))
    received: list[int] = []
    receiving = beside(lambda: received.append(receive(channel, view)))
    if ends == "closed":
        server.shutdown(socket.SHUT_WR)
    else:
        channel.interrupt()
    receiving.join(PATIENCE_SECONDS / 2)
    assert not receiving.is_alive()
    assert received[0] <= PIECE
