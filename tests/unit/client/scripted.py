"""A real TCP server that does exactly what a test says, connection by connection.

For what a healthy server never does: break off, lie about lengths, refuse, answer late.
Invariants: every wait has a deadline; a handler that fails, or a connection that nobody made, fails
the test when the `with` block ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

DEADLINE_S = 10.0


@dataclass
class Seen:
    """One request as it came in."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(DEADLINE_S)
        self._buffer = b""
        self._method = ""

    def read(self) -> Seen:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        self._method = method
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", "0"))
        while len(self._buffer) < length:
            self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return Seen(method, target, headers, body)

    def _more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise AssertionError("the client closed the connection before its request was whole")
        self._buffer += data

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{n}: {v}" for n, v in (headers or {}).items())]
        if status != 204:
            lines.append(f"Content-Length: {len(body)}")
        self.send(
            "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if self._method == "HEAD" else body)
        )

    def problem(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        body = b'{"code":"%s","title":"t","detail":"told by the script"}' % code.encode()
        kind = {"Content-Type": "application/problem+json"}
        self.answer(status, body, {**kind, **(headers or {})})

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reset(self) -> None:
        """End with RST: whatever is in flight is lost."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def wait_closed(self) -> None:
        """Return when the client has let go of the connection."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65536):
                pass


Handler = Callable[[Peer], None]


class ScriptedServer:
    """Serves one connection after the other, each by its handler."""

    def __init__(self, *handlers: Handler) -> None:
        self._handlers = handlers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self._faults: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        try:
            for handler in self._handlers:
                connection, _ = self._listener.accept()
                with connection:
                    handler(Peer(connection))
        except BaseException as fault:  # noqa: BLE001 - reported by __exit__
            self._faults.append(fault)
        finally:
            self._listener.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.join(2 * DEADLINE_S)
        assert not self._thread.is_alive(), "the script did not come to its end"
        if self._faults and kind is None:
            raise AssertionError("the scripted server failed") from self._faults[0]


def refused_url() -> str:
    """A URL at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
