"""What threads do in their own way: connections, waiting, waking, work beside the caller.

Where it sits: below everything else in `sync/`, which is generated; this file and its twin `aio/io.py` are written by hand and
have the same names.

Invariants:
- I-TRS-1  `TransportFailure.sent` is False only if the server cannot have the whole request: no connection, or the
           kernel refused some of its bytes.
- I-TRS-2  Every wait has a timeout.
- I-TRS-3  Standard library of every platform: `poll` only where there is one, and no pipes, which Windows cannot wait for.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition, Event, Lock
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar

from millstream.client.http import (
    CONNECT_SECONDS_MAX,
    RECEIVE_BYTES,
    TransportFailure,
    failure_reason,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from millstream.client.wire import Endpoint

__all__ = [
    "Ahead",
    "ArrowExport",
    "Channel",
    "Condition",
    "Event",
    "Lock",
    "Waker",
    "Worker",
    "settle",
]

P = ParamSpec("P")
T = TypeVar("T")
WATCHED_BYTES_MIN: Final = 64 * 1024
"""From this size on a server may answer before it took all: less fits into the buffers of any kernel."""
WAITED_BYTES_MIN: Final = 64 * 1024
"""From this size on the kernel is asked for all of it at once."""
KERNEL_WAITS: Final = sys.platform == "linux"
"""Whether the kernel takes a time limit for one call (elsewhere it has other forms)."""
READ: Final = 1
WRITE: Final = 2


def _ready(seconds: float, *wanted: tuple[socket.socket, int]) -> dict[socket.socket, int]:
    """Which sockets are ready for what they are wanted for, within `seconds`. A broken one is ready for all."""
    seconds = max(0.0, seconds)
    poll = getattr(select, "poll", None)
    if poll is None:  # Windows, where `select` takes any socket
        reading = [one for one, events in wanted if events & READ]
        writing = [one for one, events in wanted if events & WRITE]
        readable, writable, broken = select.select(
            reading, writing, [one for one, _ in wanted], seconds
        )
        found = dict.fromkeys(broken, READ | WRITE)
        for ready, event in ((readable, READ), (writable, WRITE)):
            for one in ready:
                found[one] = found.get(one, 0) | event
        return found
    # Not a selector of the standard library: made for one wait, it takes four times as long.
    poller = poll()
    by_number = {one.fileno(): one for one, _ in wanted}
    for one, events in wanted:
        poller.register(
            one, select.POLLIN * (events & READ > 0) | select.POLLOUT * (events & WRITE > 0)
        )
    return {by_number[number]: _events(seen) for number, seen in poller.poll(seconds * 1000)}


def _events(seen: int) -> int:
    broken = seen & ~(select.POLLIN | select.POLLOUT)
    if broken:
        return READ | WRITE
    return READ * (seen & select.POLLIN > 0) | WRITE * (seen & select.POLLOUT > 0)


class Channel:
    """One connection, as bytes that come and go."""

    def __init__(self, connected: socket.socket, *, tls: bool) -> None:
        self.socket = connected
        self._tls = tls
        self._kernel_micros = 0

    @staticmethod
    def connect(
        endpoint: Endpoint, timeout_seconds: float, context: ssl.SSLContext | None
    ) -> Channel:
        address = (endpoint.host, endpoint.port)
        try:
            plain = socket.create_connection(address, min(CONNECT_SECONDS_MAX, timeout_seconds))
        except TimeoutError:
            raise TransportFailure("connecting timed out", sent=False, timeout=True) from None
        except OSError as error:
            raise TransportFailure(failure_reason(error), sent=False) from error
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            return Channel(plain, tls=False)
        try:
            return Channel(context.wrap_socket(plain, server_hostname=endpoint.host), tls=True)
        except OSError as error:
            plain.close()
            raise TransportFailure(failure_reason(error), sent=False) from error

    def send(self, data: bytes, timeout_seconds: float, *, until_answered: bool = False) -> None:
        """Hand bytes to the kernel. `until_answered`: an answer that comes before all are taken ends it."""
        self.socket.settimeout(timeout_seconds)
        try:
            # What TLS has to read may be its own business, so there an answer is looked for at the end only.
            if until_answered and len(data) >= WATCHED_BYTES_MIN and not self._tls:
                self._send_watching(data, timeout_seconds)
            else:
                self.socket.sendall(data)
        except TimeoutError:
            raise TransportFailure("sending timed out", sent=False, timeout=True) from None
        except OSError as error:
            raise TransportFailure(failure_reason(error), sent=False) from error

    def _send_watching(self, data: bytes, timeout_seconds: float) -> None:
        both = READ | WRITE
        until = time.monotonic() + timeout_seconds
        rest = memoryview(data)
        while rest:
            events = _ready(until - time.monotonic(), (self.socket, both)).get(self.socket, 0)
            if events & READ:
                raise TransportFailure("the server did not take the whole request", sent=False)
            if not events:
                raise TimeoutError
            rest = rest[self.socket.send(rest) :]

    def receive(self, timeout_seconds: float) -> bytes:
        """The bytes that are there, at least one; `b""` at the end of the connection."""
        self.socket.settimeout(timeout_seconds)
        try:
            data = self.socket.recv(RECEIVE_BYTES)
            # TLS may hold decrypted bytes that the descriptor does not show.
            while self._tls and (count := getattr(self.socket, "pending", int)()):
                data += self.socket.recv(count)
        except OSError as error:
            raise _receive_failure(error, timeout_seconds) from error
        return data

    def receive_into(self, view: memoryview, timeout_seconds: float) -> int:
        """Bytes into `view`: those that are there, or all of it where the kernel waits for them by itself."""
        try:
            if KERNEL_WAITS and not self._tls and len(view) >= WAITED_BYTES_MIN:
                return self._receive_all(view, timeout_seconds)
            self.socket.settimeout(timeout_seconds)
            return self.socket.recv_into(view)
        except OSError as error:
            raise _receive_failure(error, timeout_seconds) from error

    def _receive_all(self, view: memoryview, timeout_seconds: float) -> int:
        """In one call, where a loop would be woken for every few packets. It ends with what has come, at least one byte,
        when the time is over, the connection ends or a signal comes."""
        self.socket.settimeout(None)
        micros = max(1, int(timeout_seconds * 1_000_000))
        if micros != self._kernel_micros:
            limit = struct.pack("ll", *divmod(micros, 1_000_000))
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._kernel_micros = micros
        try:
            return self.socket.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError from None

    @property
    def readable(self) -> bool:
        """True if `receive` would not wait."""
        return bool(_ready(0, (self.socket, READ)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def interrupt(self) -> None:
        """End what waits on this connection, in any thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _receive_failure(error: OSError, timeout_seconds: float) -> TransportFailure:
    if isinstance(error, TimeoutError):
        return TransportFailure(f"silent for {timeout_seconds:g} s", sent=True, timeout=True)
    return TransportFailure(failure_reason(error), sent=True)


class Waker:
    """Lets other threads wake one that waits for a connection."""

    def __init__(self) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)

    def wake(self) -> None:
        # Full means that there are wake-ups to take already.
        with contextlib.suppress(BlockingIOError):
            self._bell.send(b"\0")

    def wait(self, channel: Channel | None, seconds: float) -> bool:
        """Until somebody wakes it, or the channel has something to read: then True."""
        wanted = [self._ear] if channel is None else [self._ear, channel.socket]
        ready = _ready(seconds, *((one, READ) for one in wanted))
        if self._ear in ready:
            with contextlib.suppress(BlockingIOError):
                self._ear.recv(65536)
        return channel is not None and channel.socket in ready

    def close(self) -> None:
        self._ear.close()
        self._bell.close()


class Worker:
    """Work that goes on beside the caller: here a thread."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> bool:
        """Wait for its end, which it was told of; False if it still goes on after `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class Ahead(Generic[T]):
    """One call that goes on while its caller does something else: here in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millstream-ahead")
        self._future: Future[T] | None = None

    def begin(self, call: Callable[P, T], *args: P.args, **kw: P.kwargs) -> None:
        self._future = self._thread.submit(call, *args, **kw)

    def result(self) -> T:
        assert self._future is not None
        future, self._future = self._future, None
        return future.result()

    def close(self) -> None:
        """Wait for the end of what goes on; its outcome is nobody's business."""
        self._thread.shutdown()


class ArrowExport:
    """Lets pyarrow, polars and DuckDB take an iterator of batches as it is."""

    schema: Any

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        from millstream.client.arrow import load_pyarrow

        reader = load_pyarrow().RecordBatchReader.from_batches(self.schema, iter(self))  # type: ignore[call-overload]
        return reader.__arrow_c_stream__(requested_schema)


def settle() -> None:
    """Nothing: sockets are closed when they are closed."""
