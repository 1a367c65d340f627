"""The idempotent producer for blocking code: a worker thread around `ProducerCore`.

Where it sits: made by `Stream.producer`; owns one connection, on which it pipelines.

Invariants:
- I-PRS-1  The core is touched only under `_condition`; no I/O happens while it is held.
- I-PRS-2  `append` blocks while the buffer is full, so memory is bounded by the options.
- I-PRS-3  The worker ends by itself after `close`, whatever the server does.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from millstream import errors
from millstream.client.http import (
    Head,
    MalformedResponse,
    Request,
    Response,
    ResponseAssembler,
    TransportFailure,
    Truncated,
)
from millstream.client.sync.transport import Connection, common_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from millstream.client.producer import ProducerCore
    from millstream.client.wire import Endpoint

IDLE_WAIT_SECONDS: Final = 60.0


class Producer:
    """Appends records in order, each exactly once, over broken connections and restarts.

        with stream.producer("importer") as producer:
            for row in rows:
                producer.append(row)
        # here everything is acknowledged

    Safe to use from several threads.
    """

    def __init__(self, core: ProducerCore, headers: dict[str, str], timeout_seconds: float) -> None:
        self._core = core
        self._common = common_headers(core.endpoint, headers)
        self._timeout_seconds = timeout_seconds
        self._condition = threading.Condition()
        self._closing = False
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)

    @property
    def id(self) -> str:
        return self._core.producer_id

    @property
    def epoch(self) -> int:
        return self._core.epoch

    @property
    def acknowledged(self) -> int:
        """Records that the server has acknowledged to this producer."""
        return self._core.acknowledged_records

    @property
    def pending(self) -> int:
        """Records that were appended here and are not acknowledged yet."""
        with self._condition:
            return self._core.pending_records

    def append(self, value: Any) -> None:
        """Take one record; it is sent soon, together with others. Raises what failed earlier."""
        record = self._core.encode(value)
        with self._condition:
            self._check_open()
            while self._core.full:
                self._core.seal(time.monotonic())
                self._wake()
                self._condition.wait(1.0)
                self._check_open()
            news = self._core.add(record, time.monotonic())
            if self._thread is None:
                self._start()
        if news:
            self._wake()

    def append_many(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)

    def flush(self, timeout_seconds: float | None = None) -> str | None:
        """Wait until everything is acknowledged; returns the offset after the last record."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._condition:
            self._core.seal(time.monotonic())
            self._wake()
            while not self._core.idle and self._core.error is None:
                left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if left <= 0:
                    raise errors.RequestTimeout(
                        f"{self._core.pending_records} records were not acknowledged in time"
                    )
                self._condition.wait(left)
            if self._core.error is not None:
                raise self._core.error
            return self._core.acknowledged_offset

    def close_stream(self, value: Any = None) -> str | None:
        """Close the stream after everything that was appended, with `value` as its last record.

        Unlike `Stream.close` it cannot overtake this producer's records, and a last record and the
        closing are one step. Returns the final offset.
        """
        record = None if value is None else self._core.encode(value)
        with self._condition:
            self._check_open()
            self._core.end(record, time.monotonic())
            if self._thread is None:
                self._start()
        return self.flush()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Flush, then end the worker. Raises if something could not be delivered."""
        try:
            if not self._closing:
                self.flush(timeout_seconds)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the worker at once; records that are not acknowledged may or may not arrive."""
        with self._condition:
            if self._abandoned:
                return
            self._closing = True
            self._abandoned = True
            self._condition.notify_all()
            self._wake()
            thread = self._thread
        if thread is not None:
            thread.join(self._timeout_seconds)
        if thread is None or not thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (kind is not None and not issubclass(kind, Exception)) or (
            isinstance(error, errors.MillstreamError) and self._core.error is not None
        ):
            self.abandon()
        else:
            self.close()

    def _check_open(self) -> None:
        self._core.check()
        if self._closing:
            raise errors.ProducerClosed("the producer is closed")

    def _start(self) -> None:
        name = f"millstream-producer-{self._core.producer_id}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        # A full pipe means that the worker has wake-ups to take already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    # ------------------------------------------------------------------ the worker thread

    def _work(self) -> None:
        link = _Link(self._core.endpoint, self._timeout_seconds)
        try:
            while not self._finished():
                try:
                    self._turn(link)
                except TransportFailure as failure:
                    link.close()
                    with self._condition:
                        self._core.on_break(failure, time.monotonic(), self._core.endpoint.url)
                        self._condition.notify_all()
        except BaseException as error:
            # Nobody joins this thread for its result: the next call of the owner must raise it.
            with self._condition:
                self._core.fail(
                    errors.MillstreamError(f"the producer failed unexpectedly: {error!r}")
                )
                self._condition.notify_all()
            raise
        finally:
            link.close()

    def _finished(self) -> bool:
        with self._condition:
            return self._abandoned or self._core.error is not None

    def _turn(self, link: _Link) -> None:
        """Send what may be sent, then wait for an answer, a wake-up or a deadline."""
        now = time.monotonic()
        requests: list[Request] = []
        with self._condition:
            while (request := self._core.take(now)) is not None:
                requests.append(request)
            wake_at = self._core.wake_at()
            in_flight = self._core.in_flight
        if requests:
            link.send(requests, self._common, fresh=in_flight == len(requests))
        silence_at = link.heard_at + self._timeout_seconds if in_flight else None
        now = time.monotonic()
        deadlines = [moment for moment in (wake_at, silence_at) if moment is not None]
        deadline = min([now + IDLE_WAIT_SECONDS, *deadlines])
        if not self._wait(link, deadline - now):
            if silence_at is not None and time.monotonic() >= silence_at:
                reason = f"silent for {self._timeout_seconds:g} s"
                raise TransportFailure(reason, sent=True, timeout=True)
            return
        for head, body in link.receive():
            with self._condition:
                response = Response(head.status, head.headers, body)
                self._core.on_response(response, time.monotonic())
                self._condition.notify_all()
        if link.ended:
            link.close()
            with self._condition:
                outstanding = self._core.in_flight
            if outstanding:
                raise TransportFailure("the server ended the connection", sent=True)

    def _wait(self, link: _Link, seconds: float) -> bool:
        """True if the connection has something to read."""
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        number = link.fileno()
        if number is not None:
            poller.register(number, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(max(0.0, seconds) * 1000)}
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 65536)
        return number in ready


class _Link:
    """The worker's connection: pipelined requests out, whole responses in."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._connection: Connection | None = None
        self._responses: ResponseAssembler | None = None
        self.heard_at = 0.0
        self.ended = False

    def fileno(self) -> int | None:
        return None if self._connection is None else self._connection.socket.fileno()

    def send(self, requests: list[Request], common: bytes, *, fresh: bool) -> None:
        """`fresh`: nothing was in flight before, so the silence is counted from now."""
        if self._connection is None:
            self._connection = Connection(self._endpoint, self._timeout_seconds)
            self._responses = ResponseAssembler(self._connection.parser)
            self.ended = False
        if fresh:
            self.heard_at = time.monotonic()
        for request in requests:
            self._connection.parser.expect(request.method)
        data = b"".join(request.encode(common) for request in requests)
        try:
            self._connection.send(data, self._timeout_seconds)
        except TransportFailure as failure:
            # The first of several requests may have left in full.
            raise TransportFailure(failure.reason, sent=True, timeout=failure.timeout) from failure

    def receive(self) -> Iterator[tuple[Head, bytes]]:
        assert self._connection is not None
        assert self._responses is not None
        self._connection.receive(self._timeout_seconds)
        # TLS may hold decrypted bytes that the descriptor does not show.
        while getattr(self._connection.socket, "pending", int)():
            self._connection.receive(self._timeout_seconds)
        self.heard_at = time.monotonic()
        try:
            while (response := self._responses.next()) is not None:
                if not response[0].keep:
                    self.ended = True
                yield response
        except Truncated as error:
            raise TransportFailure(str(error), sent=True) from error
        except MalformedResponse as error:
            raise TransportFailure(f"not HTTP: {error}", sent=True) from error
        self.ended = self.ended or self._connection.parser.ended

    def close(self) -> None:
        connection, self._connection, self._responses = self._connection, None, None
        if connection is not None:
            connection.close()
