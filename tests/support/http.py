"""HTTP/1.1 down to the bytes, for tests that need to say exactly what goes over the socket.

`Connection` sends any bytes, well-formed or not, and reads answers one by one, so pipelining, chunking
and broken requests are plain to write. `Api` is the short form for the ordinary calls.

Invariants: every wait ends at a deadline with `Timeout`; an answer's body is read by its own framing
and nothing beyond it is consumed; a body that ends early raises `Truncated`, never passes as whole.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlencode

STREAM_ROOT = "/v1/stream/"
Headers = Mapping[str, str | bytes]


class Timeout(AssertionError):
    """The server did not answer in time."""


class Truncated(AssertionError):
    """The connection ended inside an answer."""


class Closed(Exception):
    """The connection ended cleanly between answers."""


@dataclass
class Response:
    """One answer. `headers` keeps order and repeats; names are lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    reason: str = ""
    interim: list[int] = field(default_factory=list)

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        assert value is not None, f"no header {name} in {self.status} {self.headers}"
        return value

    def get(self, name: str) -> str | None:
        return next((v for n, v in self.headers if n == name.lower()), None)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def offset(self) -> str:
        return self["stream-next-offset"]

    @property
    def code(self) -> str:
        """The stable code of a problem body, with the shape of the body checked."""
        assert self.get("content-type") == "application/problem+json", (self.status, self.headers)
        problem = self.json()
        assert {"code", "title", "detail"} <= problem.keys(), problem
        return str(problem["code"])


def request_bytes(
    method: str,
    target: str,
    headers: Headers | None = None,
    body: bytes | None = None,
    *,
    chunked: bool = False,
) -> bytes:
    """A well-formed request; with `chunked` the body goes in pieces of growing size."""
    given = {name.lower() for name in headers or {}}
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1")]
    if "host" not in given:
        lines.append(b"Host: 127.0.0.1")
    for name, value in (headers or {}).items():
        raw = value if isinstance(value, bytes) else value.encode("latin-1")
        lines.append(name.encode("latin-1") + b": " + raw)
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
    elif body is not None and "content-length" not in given:
        lines.append(f"Content-Length: {len(body)}".encode())
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    return head + (chunked_bytes(body or b"") if chunked else body or b"")


def chunked_bytes(body: bytes) -> bytes:
    pieces, start, size = [], 0, 1
    while start < len(body):
        piece = body[start : start + size]
        pieces.append(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        start, size = start + len(piece), size * 3
    return b"".join(pieces) + b"0\r\n\r\n"


class Connection:
    """One TCP connection. The deadline applies to each call anew."""

    def __init__(self, host: str, port: int, *, deadline_s: float = 10.0) -> None:
        self.deadline_s = deadline_s
        self.socket = socket.create_connection((host, port), timeout=deadline_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def __del__(self) -> None:
        # A test that fails midway must not bury its own message under warnings about its sockets.
        if hasattr(self, "socket"):
            self.socket.close()

    def abort(self) -> None:
        """Close with a reset instead of an orderly end."""
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()

    # --- sending ------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self.socket.settimeout(self.deadline_s)
        try:
            self.socket.sendall(data)
        except TimeoutError:
            raise Timeout(f"the server took no bytes for {self.deadline_s} s") from None

    def send_what_it_takes(self, data: bytes) -> None:
        """Send, not minding that the server may answer and close before it has read everything."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send(data)

    def request(
        self,
        method: str,
        target: str,
        headers: Headers | None = None,
        body: bytes | None = None,
        *,
        chunked: bool = False,
    ) -> Response:
        self.send(request_bytes(method, target, headers, body, chunked=chunked))
        return self.read_response(head_only=method == "HEAD")

    # --- receiving ----------------------------------------------------------------------------

    def _fill(self, until: float) -> bool:
        """Receive something; False at the end of the connection."""
        if self._ended:
            return False
        left = until - time.monotonic()
        if left <= 0:
            raise Timeout(f"nothing for {self.deadline_s} s; so far {bytes(self._buffer[-200:])!r}")
        self.socket.settimeout(left)
        try:
            data = self.socket.recv(1 << 18)
        except TimeoutError:
            raise Timeout(
                f"nothing for {left:.1f} s; so far {bytes(self._buffer[-200:])!r}"
            ) from None
        except ConnectionResetError:
            data = b""
        self._ended = not data
        self._buffer += data
        return bool(data)

    def _take(self, count: int, until: float) -> bytes:
        while len(self._buffer) < count:
            if not self._fill(until):
                raise Truncated(f"{len(self._buffer)} of {count} bytes")
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _take_line(self, until: float) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if not self._fill(until):
                raise Truncated(f"inside a line: {bytes(self._buffer[:200])!r}")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def read_head(self) -> Response:
        """Status line and headers; interim answers (1xx) are noted and passed over."""
        until = time.monotonic() + self.deadline_s
        interim: list[int] = []
        while True:
            while not self._buffer:
                if not self._fill(until):
                    raise Closed
            status_line = self._take_line(until).decode("latin-1")
            version, _, rest = status_line.partition(" ")
            code, _, reason = rest.partition(" ")
            assert version == "HTTP/1.1", status_line
            headers = []
            while line := self._take_line(until):
                name, _, value = line.decode("latin-1").partition(":")
                headers.append((name.lower(), value.strip()))
            if not 100 <= int(code) < 200:
                return Response(int(code), headers, reason=reason, interim=interim)
            interim.append(int(code))

    def read_response(self, *, head_only: bool = False) -> Response:
        response = self.read_head()
        until = time.monotonic() + self.deadline_s
        if not head_only and response.status not in (204, 304):
            response.body = b"".join(self.body_pieces(response, until))
        return response

    def body_pieces(self, response: Response, whole_by: float | None = None) -> Iterator[bytes]:
        """The body as it arrives, by the framing that the head announced.

        Each piece has the connection's deadline; `whole_by` bounds the body as a whole instead.
        """

        def by() -> float:
            return whole_by if whole_by is not None else time.monotonic() + self.deadline_s

        if (response.get("transfer-encoding") or "").lower() == "chunked":
            while True:
                until = by()
                size = int(self._take_line(until).partition(b";")[0], 16)
                piece = self._take(size, until)
                assert self._take_line(until) == b"", "a chunk must end with CRLF"
                if size == 0:
                    return
                yield piece
        elif (length := response.get("content-length")) is not None:
            left = int(length)
            while left:
                until = by()
                if not self._buffer and not self._fill(until):
                    raise Truncated(f"{left} bytes of the body missing")
                piece = self._take(min(left, len(self._buffer)), until)
                left -= len(piece)
                yield piece
        else:
            while self._buffer or self._fill(by()):
                yield self._take(len(self._buffer), 0.0)

    def take_what_is_there(self) -> Iterator[bytes]:
        """Bytes that have arrived, without waiting for more."""
        yield self._take(len(self._buffer), 0.0)
        while select.select([self.socket], [], [], 0)[0] and (data := self.socket.recv(1 << 20)):
            yield data

    def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        until = time.monotonic() + self.deadline_s
        while self._fill(until):
            pass
        data = bytes(self._buffer)
        self._buffer.clear()
        return data

    def is_closed_by_server(self) -> bool:
        """Waits for the end of the connection; anything else that arrives is a failure."""
        data = self.read_to_end()
        assert data == b"", f"unexpected bytes before the end: {data[:200]!r}"
        return True


class HasPort(Protocol):
    @property
    def port(self) -> int: ...


class Api:
    """The protocol's calls, one fresh connection each."""

    def __init__(self, server: HasPort, *, deadline_s: float = 10.0) -> None:
        self.server = server
        self.deadline_s = deadline_s

    def connect(self) -> Connection:
        return Connection("127.0.0.1", self.server.port, deadline_s=self.deadline_s)

    def call(
        self,
        method: str,
        target: str,
        headers: Headers | None = None,
        body: bytes | None = None,
        *,
        chunked: bool = False,
    ) -> Response:
        with self.connect() as connection:
            return connection.request(method, target, headers, body, chunked=chunked)

    @staticmethod
    def target(path: str, **query: str | int | None) -> str:
        given = {name: value for name, value in query.items() if value is not None}
        return STREAM_ROOT + path + (f"?{urlencode(given)}" if given else "")

    def put(
        self,
        path: str,
        body: bytes = b"",
        content_type: str | None = "text/plain",
        headers: Headers | None = None,
    ) -> Response:
        typed: dict[str, str | bytes] = {"Content-Type": content_type} if content_type else {}
        return self.call("PUT", self.target(path), {**typed, **(headers or {})}, body)

    def post(
        self,
        path: str,
        body: bytes = b"",
        content_type: str | None = "text/plain",
        headers: Headers | None = None,
    ) -> Response:
        typed: dict[str, str | bytes] = {"Content-Type": content_type} if content_type else {}
        return self.call("POST", self.target(path), {**typed, **(headers or {})}, body)

    def get(self, path: str, headers: Headers | None = None, **query: str | int | None) -> Response:
        return self.call("GET", self.target(path, **query), headers)

    def head(self, path: str) -> Response:
        return self.call("HEAD", self.target(path))

    def delete(self, path: str) -> Response:
        return self.call("DELETE", self.target(path))

    def close_stream(self, path: str) -> Response:
        return self.post(path, b"", None, {"Stream-Closed": "true"})

    def metric(self, name: str) -> int:
        text = self.call("GET", "/-/metrics").text
        found = next((line for line in text.splitlines() if line.startswith(f"{name} ")), None)
        assert found is not None, f"no metric {name} in:\n{text[:2000]}"
        return int(float(found.split()[1]))

    def wait_for_metric(self, name: str, wanted: int) -> None:
        """Until a gauge shows that the server has come to some state, within the deadline."""
        self.wait_until_metric(name, lambda seen: seen == wanted)

    def wait_until_metric(self, name: str, fits: Callable[[int], bool]) -> None:
        until = time.monotonic() + self.deadline_s
        while not fits(seen := self.metric(name)):
            if time.monotonic() > until:
                raise Timeout(f"{name} is {seen} after {self.deadline_s} s")
            time.sleep(0.01)

    def read_all(self, path: str, offset: str = "-1") -> bytes:
        """Every byte to the tail, following the offsets; for streams that are not JSON."""
        body = b""
        for _ in range(10_000):
            response = self.get(path, offset=offset)
            assert response.status == 200, (response.status, response.body)
            body += response.body
            offset = response.offset
            if response.get("stream-up-to-date") == "true":
                return body
        raise AssertionError("the tail was never reached")


def producer(name: str, epoch: int, seq: int) -> dict[str, str]:
    return {"Producer-Id": name, "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}
