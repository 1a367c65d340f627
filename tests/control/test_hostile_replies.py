"""Receivers whose replies never end hold up nobody: whatever they send, little of it is looked at."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from control.conftest import Subscriptions
from control.receiver import DONE, Receiver

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# What comes first, and what is then sent for ever.
REPLIES = {
    "informational": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "switching": (b"", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"),
    "blank-lines": (b"", b"\r\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a:b\r\n"),
    "chunk-extension": (CHUNKED + b"1;", b"a"),
    "tiny-chunks": (CHUNKED, b"1;a=b\r\nx\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"a:b\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
}
OF_EACH = 8
DEADLINE_S = 2.0


class Flood:
    """Answers each connection with its port's reply, as fast as it is taken."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.calls: dict[str, int] = dict.fromkeys(REPLIES, 0)
        self.urls: dict[str, str] = {}
        for name in REPLIES:
            listening = socket.create_server(("127.0.0.1", 0), backlog=256)
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, name)
            self.urls[name] = f"http://127.0.0.1:{listening.getsockname()[1]}/hook"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        going_on: dict[socket.socket, bytes] = {}
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.05):
                name, found = key.data, key.fileobj
                assert isinstance(found, socket.socket)
                if key.events & selectors.EVENT_READ:
                    called, _ = found.accept()
                    start, part = REPLIES[name]
                    called.sendall(start)
                    going_on[called] = part * (65536 // len(part))
                    called.setblocking(False)
                    self._selector.register(called, selectors.EVENT_WRITE, name)
                    self.calls[name] += 1
                    continue
                try:
                    sent = found.send(going_on[found])
                except OSError:
                    self._selector.unregister(found)
                    del going_on[found]
                    found.close()
                else:  # what was cut goes on where it was
                    cut = sent % len(REPLIES[name][1])
                    going_on[found] = going_on[found][cut:] + going_on[found][:cut]

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


@pytest.fixture
def flood() -> Iterator[Flood]:
    with contextlib.closing(Flood()) as receivers:
        yield receivers


def test_replies_without_an_end_delay_neither_other_webhooks_nor_calls(
    subscriptions: Subscriptions, start_receiver: Callable[..., Receiver], flood: Flood
) -> None:
    receiver = start_receiver(DONE)
    subscriptions.hook("healthy", receiver)
    subscriptions.create("events/a")
    for name, url in flood.urls.items():
        for number in range(OF_EACH):
            hook = {"url": url}
            response = subscriptions.put(
                f"{name}-{number}", type="webhook", pattern="flooded/*", webhook=hook
            )
            assert response.status == 201, response.body
    subscriptions.create("flooded/a", b"[1]")

    until = time.monotonic() + 20
    while min(flood.calls.values()) < OF_EACH:
        assert time.monotonic() < until, flood.calls
        tail = subscriptions.append("events/a")
        assert receiver.next(DEADLINE_S).pending == {"events/a": tail}
        began = time.monotonic()
        assert subscriptions.call("GET", "/-/api/streams").status == 200
        assert time.monotonic() - began < DEADLINE_S
