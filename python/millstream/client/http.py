"""HTTP/1.1 without I/O: requests to bytes, bytes to responses.

Where it sits: under the transports and the producers, which own the sockets.
Own code instead of a library because three things are needed that ready clients hide: pipelining,
the certainty whether a request left this machine, and a start-up time of a few milliseconds.

Invariants:
- I-HTTP-1  No header value leaves with a CR, LF or NUL in it.
- I-HTTP-2  A response ends cleanly only if its framing says so; a short body is `Truncated`.
- I-HTTP-3  Head and chunk-size lines are bounded; the parser never buffers more than it was fed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from millstream.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_SECONDS_MAX: Final = 5.0
RECEIVE_BYTES: Final = 256 * 1024
HEAD_BYTES_MAX: Final = 64 * 1024
CHUNK_LINE_BYTES_MAX: Final = 4 * 1024


class TransportFailure(Exception):  # noqa: N818 - named by what it reports
    """A request got no complete response. Internal: shells turn it into a `MillstreamError`."""

    def __init__(self, reason: str, *, sent: bool, timeout: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent
        """False: the server cannot have seen the whole request."""
        self.timeout = timeout


class MalformedResponse(Exception):  # noqa: N818 - as above
    """The peer does not speak HTTP/1.1."""


class Truncated(Exception):  # noqa: N818 - as above
    """The connection ended inside a response."""


def failure_reason(error: OSError) -> str:
    """What the system says went wrong, as the end of a sentence; TLS names itself."""
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    # By its name: `ssl` is not loaded for servers without TLS.
    return f"TLS: {reason}" if type(error).__module__ == "ssl" else reason


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def encode(self, common: bytes) -> bytes:
        """The bytes to send; `common` holds the rendered headers that every request carries."""
        parts = [f"{self.method} {self.target} HTTP/1.1\r\n".encode("ascii"), common]
        for name, value in self.headers:
            parts.append(encode_header(name, value))
        if self.body or self.method in ("POST", "PUT"):
            parts.append(b"Content-Length: %d\r\n" % len(self.body))
        parts.append(b"\r\n")
        parts.append(self.body)
        return b"".join(parts)


def encode_header(name: str, value: str) -> bytes:
    if any(character in value for character in "\r\n\0"):
        raise InvalidArgument(f"header `{name}` must not contain line breaks: {value!r}")
    try:
        return f"{name}: {value}\r\n".encode("latin-1")
    except UnicodeEncodeError:
        raise InvalidArgument(f"header `{name}` must be plain Latin text: {value!r}") from None


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes | bytearray = b""


@dataclass(frozen=True, slots=True)
class Head:
    """Start of a response. `keep` tells whether the connection may be used again after it."""

    status: int
    headers: Mapping[str, str]
    keep: bool


@dataclass(frozen=True, slots=True)
class Data:
    data: bytes


class End:
    """End of a response."""

    __slots__ = ()


END: Final = End()
_HEAD, _LENGTH, _CHUNK_SIZE, _CHUNK_DATA, _CHUNK_END, _TRAILER, _UNTIL_EOF, _FINISH = range(8)


@dataclass(slots=True)
class ResponseParser:
    """Incremental parser of the responses of one connection, in order.

    Call `expect(method)` once per request sent, `feed(data)` with what the socket gave (`b""` at
    its end), and `next()` until it returns None.
    """

    _buffer: bytearray = field(default_factory=bytearray)
    _expected: deque[str] = field(default_factory=deque)
    _state: int = _HEAD
    _remaining: int = 0
    _ended: bool = False

    def expect(self, method: str) -> None:
        self._expected.append(method)

    def feed(self, data: bytes) -> None:
        if data:
            self._buffer += data
        else:
            self._ended = True

    @property
    def ended(self) -> bool:
        """True after the end of the connection was fed."""
        return self._ended

    @property
    def clean(self) -> bool:
        """True if no response is outstanding and no stray byte came."""
        return self._state == _HEAD and not self._expected and not self._buffer

    def take_length(self, bytes_max: int) -> int | None:
        """How many bytes the body that begins now has, if its head said so; the caller then takes
        what came already with `take_into`, receives the rest by itself and calls `finish_length`."""
        if self._state != _LENGTH or self._remaining > bytes_max:
            return None
        return self._remaining

    def take_into(self, view: memoryview) -> int:
        count = min(len(view), len(self._buffer))
        view[:count] = self._buffer[:count]
        del self._buffer[:count]
        return count

    def finish_length(self) -> None:
        self._remaining = 0
        self._state = _HEAD

    def next(self) -> Head | Data | End | None:
        state = self._state
        if state == _HEAD:
            return self._parse_head()
        if state == _LENGTH:
            return self._take_length()
        if state == _UNTIL_EOF:
            return self._take_until_eof()
        if state == _FINISH:
            self._state = _HEAD
            return END
        return self._take_chunked()

    def _parse_head(self) -> Head | None:
        buffer = self._buffer
        if not self._expected:
            if buffer:
                raise MalformedResponse("the server sent bytes without a request")
            return None
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > HEAD_BYTES_MAX:
                raise MalformedResponse("response head is too large")
            self._check_more()
            return None
        if end > HEAD_BYTES_MAX:
            raise MalformedResponse("response head is too large")
        text = bytes(buffer[:end]).decode("latin-1")
        del buffer[: end + 4]
        head = parse_head(text)
        if 100 <= head.status < 200:
            return self._parse_head()
        self._choose_framing(self._expected.popleft(), head)
        if self._state == _UNTIL_EOF:
            return Head(head.status, head.headers, keep=False)
        return head

    def _choose_framing(self, method: str, head: Head) -> None:
        if method == "HEAD" or head.status in (204, 304):
            self._state = _FINISH
            return
        coding = head.headers.get("transfer-encoding")
        if coding is not None:
            if coding.strip().lower() != "chunked":
                raise MalformedResponse(f"unknown transfer coding {coding!r}")
            self._state = _CHUNK_SIZE
            return
        length = head.headers.get("content-length")
        if length is None:
            self._state = _UNTIL_EOF
            return
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise MalformedResponse(f"bad Content-Length {length!r}")
        self._remaining = int(length)
        self._state = _LENGTH if self._remaining else _FINISH

    def _take_length(self) -> Data | None:
        data = self._take(self._remaining)
        if data is None:
            return None
        self._remaining -= len(data.data)
        if self._remaining == 0:
            self._state = _FINISH
        return data

    def _take_until_eof(self) -> Data | End | None:
        if self._buffer:
            return self._take(len(self._buffer))
        if self._ended:
            self._state = _HEAD
            return END
        return None

    def _take_chunked(self) -> Data | End | None:
        while True:
            if self._state == _CHUNK_DATA:
                data = self._take(self._remaining)
                if data is None:
                    return None
                self._remaining -= len(data.data)
                if self._remaining == 0:
                    self._state = _CHUNK_END
                return data
            line = self._line()
            if line is None:
                return None
            if self._state == _CHUNK_END:
                if line:
                    raise MalformedResponse("chunk does not end where it says")
                self._state = _CHUNK_SIZE
            elif self._state == _CHUNK_SIZE:
                self._remaining = parse_chunk_size(line)
                self._state = _CHUNK_DATA if self._remaining else _TRAILER
            elif not line:
                self._state = _HEAD
                return END

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", 0, CHUNK_LINE_BYTES_MAX)
        if end < 0:
            if len(self._buffer) >= CHUNK_LINE_BYTES_MAX:
                raise MalformedResponse("chunk line is too long")
            self._check_more()
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _take(self, limit: int) -> Data | None:
        if not self._buffer:
            self._check_more()
            return None
        data = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return Data(data)

    def _check_more(self) -> None:
        """More bytes are needed; say so if none can come."""
        if self._ended:
            raise Truncated("the connection was closed in the middle of a response")


@dataclass(slots=True)
class ResponseAssembler:
    """Gives whole responses of pipelined requests, as far as they have arrived."""

    parser: ResponseParser
    _head: Head | None = None
    _parts: list[bytes] = field(default_factory=list)

    def next(self) -> tuple[Head, bytes] | None:
        while True:
            event = self.parser.next()
            if event is None:
                return None
            if isinstance(event, Head):
                self._head = event
            elif isinstance(event, Data):
                self._parts.append(event.data)
            else:
                assert self._head is not None
                complete = (self._head, b"".join(self._parts))
                self._head, self._parts = None, []
                return complete


def parse_head(text: str) -> Head:
    lines = text.split("\r\n")
    version, _, rest = lines[0].partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()):
        raise MalformedResponse(f"not an HTTP response: {lines[0][:80]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise MalformedResponse(f"bad header line {line[:80]!r}")
        name = name.lower()
        value = value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    connection = headers.get("connection", "").lower()
    keep = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
    return Head(int(code), headers, keep)


def parse_chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not 1 <= len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
        raise MalformedResponse(f"bad chunk size {line[:40]!r}")
    return int(digits, 16)
