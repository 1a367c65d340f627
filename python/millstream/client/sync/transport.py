"""Blocking sockets: connections, the pool of idle ones, and the performer of effects.

Where it sits: below `sync/client.py` and `sync/producer.py`; drives the parser of `http.py`.

Invariants:
- I-TRS-1  A connection serves one request at a time here, and returns to the pool only when its
           last response ended cleanly.
- I-TRS-2  `TransportFailure.sent` is False only if the server cannot have the whole request:
           no connection, or the kernel refused some of its bytes.
- I-TRS-3  Each wait has a timeout; the pool keeps at most `IDLE_CONNECTIONS_MAX`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from millstream.client import steps
from millstream.client.http import (
    Data,
    End,
    Head,
    MalformedResponse,
    Request,
    Response,
    ResponseParser,
    TransportFailure,
    Truncated,
    encode_header,
)
from millstream.errors import ClientClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from millstream.client.wire import Endpoint

    Allocate: TypeAlias = Callable[[int], bytearray]
    """Makes a buffer of so many bytes: a bytearray, or what else can be written to like one."""

CONNECT_SECONDS_MAX: Final = 5.0
IDLE_CONNECTIONS_MAX: Final = 8
IDLE_SECONDS_MAX: Final = 20.0
"""Shorter than any server's keep-alive, so that a pooled connection is rarely closed under us."""
RECEIVE_BYTES: Final = 256 * 1024
EARLY_ANSWER_SECONDS: Final = 1.0


def common_headers(endpoint: Endpoint, extra: Mapping[str, str]) -> bytes:
    """The rendered headers that every request to this server carries."""
    lines = [encode_header("Host", endpoint.authority), encode_header("Accept", "*/*")]
    lines += [encode_header(name, value) for name, value in extra.items()]
    return b"".join(lines)


class Connection:
    """One connected socket with its parser."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        address = (endpoint.host, endpoint.port)
        try:
            plain = socket.create_connection(address, min(CONNECT_SECONDS_MAX, timeout_seconds))
        except TimeoutError:
            raise TransportFailure("connecting timed out", sent=False, timeout=True) from None
        except OSError as error:
            raise TransportFailure(_reason(error), sent=False) from error
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = _start_tls(plain, endpoint.host) if endpoint.tls else plain
        self.parser = ResponseParser()
        self.idle_since = 0.0

    def send(self, data: bytes, timeout_seconds: float) -> None:
        self.socket.settimeout(timeout_seconds)
        try:
            self.socket.sendall(data)
        except TimeoutError:
            raise TransportFailure("sending timed out", sent=False, timeout=True) from None
        except OSError as error:
            raise TransportFailure(_reason(error), sent=False) from error

    def receive(self, timeout_seconds: float) -> None:
        """Wait for bytes and feed them to the parser."""
        self.socket.settimeout(timeout_seconds)
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            reason = f"silent for {timeout_seconds:g} s"
            raise TransportFailure(reason, sent=True, timeout=True) from None
        except OSError as error:
            raise TransportFailure(_reason(error), sent=True) from error
        self.parser.feed(data)

    def next_event(self, timeout_seconds: float) -> Head | Data | End:
        while True:
            try:
                event = self.parser.next()
            except Truncated as error:
                raise TransportFailure(str(error), sent=True) from error
            except MalformedResponse as error:
                raise TransportFailure(f"not HTTP: {error}", sent=True) from error
            if event is not None:
                return event
            self.receive(timeout_seconds)

    def read_head(self, timeout_seconds: float) -> Head:
        event = self.next_event(timeout_seconds)
        assert isinstance(event, Head)
        return event

    def read_body(self, timeout_seconds: float) -> bytes:
        parts: list[bytes] = []
        while isinstance(event := self.next_event(timeout_seconds), Data):
            parts.append(event.data)
        return b"".join(parts)

    def read_body_once(
        self, timeout_seconds: float, bytes_max: int, allocate: Allocate
    ) -> bytes | bytearray:
        """The whole body; one of a known length is received straight into a buffer of that length."""
        length = self.parser.take_length(bytes_max)
        if length is None:
            return self.read_body(timeout_seconds)
        body = allocate(length)
        view = memoryview(body).cast("B")
        filled = self.parser.take_into(view)
        self.socket.settimeout(timeout_seconds)
        while filled < length:
            try:
                count = self.socket.recv_into(view[filled:])
            except TimeoutError:
                reason = f"silent for {timeout_seconds:g} s"
                raise TransportFailure(reason, sent=True, timeout=True) from None
            except OSError as error:
                raise TransportFailure(_reason(error), sent=True) from error
            if count == 0:
                raise TransportFailure(
                    "the connection was closed in the middle of a response", sent=True
                )
            filled += count
        self.parser.finish_length()
        return body

    def start(self, request: Request, common: bytes, timeout_seconds: float) -> Head:
        """Send a request and read the head of its response."""
        self.parser.expect(request.method)
        try:
            self.send(request.encode(common), timeout_seconds)
        except TransportFailure as failure:
            # A server may refuse a large body before it took all of it: the answer is there.
            with contextlib.suppress(TransportFailure):
                head = self.read_head(EARLY_ANSWER_SECONDS)
                return Head(head.status, head.headers, keep=False)
            raise failure
        return self.read_head(timeout_seconds)

    def usable(self) -> bool:
        """False if the server has closed it, or it has been idle for so long that it may have."""
        if time.monotonic() - self.idle_since > IDLE_SECONDS_MAX:
            return False
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def interrupt(self) -> None:
        """Wake a thread that is blocked on this socket."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _start_tls(plain: socket.socket, host: str) -> socket.socket:
    import ssl

    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except OSError as error:
        plain.close()
        raise TransportFailure(f"TLS: {_reason(error)}", sent=False) from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()


class Pool:
    """Idle connections to one server; safe to use from several threads."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        self.endpoint = endpoint
        self.common = common_headers(endpoint, headers)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def acquire(self, timeout_seconds: float) -> Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the client is closed", hint="connect again")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return Connection(self.endpoint, timeout_seconds)
            if connection.usable():
                return connection
            connection.close()

    def release(self, connection: Connection, *, keep: bool) -> None:
        if keep and connection.parser.clean:
            connection.idle_since = time.monotonic()
            with self._lock:
                if not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                    self._idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class Cancelled(Exception):  # noqa: N818 - it reports no error
    """The performer was told to stop; not an error."""


class Performer:
    """Performs the effects of one generator; `cancel` may come from any thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._busy: Connection | None = None
        self._live = False
        self._cancelled = threading.Event()

    def perform(self, effect: steps.Effect) -> Any:
        if self._cancelled.is_set():
            raise Cancelled
        try:
            if isinstance(effect, steps.Call):
                return self._exchange(effect.request, effect.timeout_seconds, live=False)
            if isinstance(effect, steps.Open):
                return self._exchange(effect.request, effect.timeout_seconds, live=True)
            if isinstance(effect, steps.Receive):
                return self._receive(effect.timeout_seconds)
            if isinstance(effect, steps.Hangup):
                return self.hangup()
            if isinstance(effect, steps.Sleep) and self._cancelled.wait(effect.seconds):
                raise Cancelled
        except TransportFailure:
            self.hangup()
            if self._cancelled.is_set():
                raise Cancelled from None
            raise
        except BaseException:
            self.hangup()
            raise
        return None

    def _exchange(self, request: Request, timeout_seconds: float, *, live: bool) -> Response:
        connection = self._busy = self._pool.acquire(timeout_seconds)
        head = connection.start(request, self._pool.common, timeout_seconds)
        if live and head.status == 200:
            self._live = True
            return Response(head.status, head.headers)
        body = connection.read_body(timeout_seconds)
        self._busy = None
        self._pool.release(connection, keep=head.keep)
        return Response(head.status, head.headers, body)

    def _receive(self, timeout_seconds: float) -> bytes:
        assert self._busy is not None
        assert self._live
        event = self._busy.next_event(timeout_seconds)
        return event.data if isinstance(event, Data) else b""

    def hangup(self) -> None:
        connection, self._busy, self._live = self._busy, None, False
        if connection is not None:
            connection.close()

    def cancel(self) -> None:
        self._cancelled.set()
        connection = self._busy
        if connection is not None:
            connection.interrupt()
