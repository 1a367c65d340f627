"""The idempotent producer: a worker around `ProducerCore`.

Where it sits: made by `AsyncStream.producer`; owns one connection, on which it pipelines.

Invariants:
- I-PRD-1  The core is touched only under `_condition`; no I/O happens while it is held.
- I-PRD-2  `append` waits while the buffer is full, so memory is bounded by the options.
- I-PRD-3  The worker ends by itself after `close`, whatever the server does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Self

from millstream import errors
from millstream.client.aio.io import AsyncCondition, AsyncWaker, AsyncWorker
from millstream.client.http import (
    Head,
    MalformedResponse,
    Request,
    Response,
    ResponseAssembler,
    TransportFailure,
    Truncated,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from millstream.client.aio.client import AsyncStream
    from millstream.client.aio.io import AsyncChannel
    from millstream.client.aio.transport import AsyncConnection, AsyncPool
    from millstream.client.producer import ProducerCore

IDLE_WAIT_SECONDS: Final = 60.0


class AsyncProducer:
    """Appends records in order, each exactly once, over broken connections and restarts.

        async with stream.producer("importer") as producer:
            for row in rows:
                await producer.append(row)
        # here everything is acknowledged

    Threads, or the tasks of one event loop, may share it.
    """

    def __init__(
        self, core: ProducerCore, stream: AsyncStream, pool: AsyncPool, timeout_seconds: float
    ) -> None:
        self._core = core
        self._stream = stream
        self._timeout_seconds = timeout_seconds
        self._condition = AsyncCondition()
        self._closing = False
        self._abandoned = False
        self._waker: AsyncWaker | None = None
        self._worker: AsyncWorker | None = None
        self._link = AsyncLink(pool, timeout_seconds)

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

    def __repr__(self) -> str:
        counts = f"{self.acknowledged:,} acknowledged, {self.pending:,} pending"
        return f"<millstream.AsyncProducer {self.id} of {self._stream.path}: {counts}>"

    async def append(self, value: Any) -> None:
        """Take one record; it is sent soon, together with others. Raises what failed earlier."""
        if not self._core.content_type:
            await self._prepare()
        record = self._core.encode(value)
        with self._condition:
            self._check_open()
            while self._core.full:
                self._core.seal(time.monotonic())
                self._wake()
                await self._condition.wait(1.0)
                self._check_open()
            if self._core.add(record, time.monotonic()):
                self._wake()

    async def append_many(self, values: Iterable[Any]) -> None:
        for value in values:
            await self.append(value)

    async def flush(self, timeout_seconds: float | None = None) -> str | None:
        """Wait until everything is acknowledged; returns the offset after the last record."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._condition:
            self._core.seal(time.monotonic())
            if not self._core.idle:
                self._wake()
            while not self._core.idle and self._core.error is None:
                left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if left <= 0:
                    raise errors.RequestTimeout(
                        f"{self._core.pending_records} records were not acknowledged in time"
                    )
                if self._abandoned:
                    raise errors.ProducerClosed("the producer was abandoned")
                await self._condition.wait(left)
            if self._core.error is not None:
                raise self._core.error
            return self._core.acknowledged_offset

    async def close_stream(self, value: Any = None) -> str | None:
        """Close the stream after everything that was appended, with `value` as its last record.

        Unlike `AsyncStream.close` it cannot overtake this producer's records, and a last record and
        the closing are one step. Returns the final offset.
        """
        await self._prepare()
        record = None if value is None else self._core.encode(value)
        with self._condition:
            self._check_open()
            self._core.end(record, time.monotonic())
        return await self.flush()

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Flush, then end the worker. Raises if something could not be delivered."""
        try:
            if not self._closing:
                await self.flush(timeout_seconds)
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """End the worker at once; records that are not acknowledged may or may not arrive."""
        with self._condition:
            self._closing = self._abandoned = True
            self._condition.notify_all()
            worker, self._worker = self._worker, None
            waker, self._waker = self._waker, None
        if worker is None or waker is None:
            return
        waker.wake()
        if await worker.end(self._timeout_seconds):
            waker.close()

    async def __aenter__(self) -> Self:
        await self._prepare()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (kind is not None and not issubclass(kind, Exception)) or (
            isinstance(error, errors.MillstreamError) and self._core.error is not None
        ):
            await self.abandon()
        else:
            await self.close()

    async def _prepare(self) -> None:
        """What a record looks like on the wire depends on the stream's type."""
        if not self._core.content_type:
            self._core.set_content_type(await self._stream.content_type)

    def _check_open(self) -> None:
        self._core.check()
        if self._closing:
            raise errors.ProducerClosed("the producer is closed")

    def _wake(self) -> None:
        """Tell the worker that there is something for it; the first time, make it."""
        if self._abandoned:
            return
        if self._waker is None:
            self._waker = AsyncWaker()
            name = f"millstream-producer-{self._core.producer_id}"
            self._worker = AsyncWorker(self._work, name)
        else:
            self._waker.wake()

    # ------------------------------------------------------------------ the worker

    async def _work(self) -> None:
        waker = self._waker
        try:
            while waker is not None and not self._finished():
                try:
                    await self._turn(waker)
                except TransportFailure as failure:
                    self._link.close()
                    with self._condition:
                        self._core.on_break(failure, time.monotonic(), self._core.endpoint.url)
                        self._condition.notify_all()
        except Exception as error:
            # Nobody asks for the worker's result: the next call of the owner must raise it.
            with self._condition:
                self._core.fail(
                    errors.MillstreamError(f"the producer failed unexpectedly: {error!r}")
                )
                self._condition.notify_all()
            raise
        finally:
            self._link.close()

    def _finished(self) -> bool:
        with self._condition:
            return self._abandoned or self._core.error is not None

    async def _turn(self, waker: AsyncWaker) -> None:
        """Send what may be sent, then wait for an answer, a wake-up or a deadline."""
        now = time.monotonic()
        requests: list[Request] = []
        with self._condition:
            while (request := self._core.take(now)) is not None:
                requests.append(request)
            wake_at = self._core.wake_at()
            in_flight = self._core.in_flight
        link = self._link
        if requests:
            await link.send(requests, fresh=in_flight == len(requests))
        silence_at = link.heard_at + self._timeout_seconds if in_flight else None
        now = time.monotonic()
        deadlines = [moment for moment in (wake_at, silence_at) if moment is not None]
        deadline = min([now + IDLE_WAIT_SECONDS, *deadlines])
        if not await waker.wait(link.channel, deadline - now):
            if silence_at is not None and time.monotonic() >= silence_at:
                reason = f"silent for {self._timeout_seconds:g} s"
                raise TransportFailure(reason, sent=True, timeout=True)
            return
        await link.receive()
        for head, body in link.responses():
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


class AsyncLink:
    """The worker's connection: pipelined requests out, whole responses in."""

    def __init__(self, pool: AsyncPool, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._connection: AsyncConnection | None = None
        self._responses: ResponseAssembler | None = None
        self.heard_at = 0.0
        self.ended = False

    @property
    def channel(self) -> AsyncChannel | None:
        return None if self._connection is None else self._connection.channel

    async def send(self, requests: list[Request], *, fresh: bool) -> None:
        """`fresh`: nothing was in flight before, so the silence is counted from now."""
        if self._connection is None:
            self._connection = await self._pool.connect(self._timeout_seconds)
            self._responses = ResponseAssembler(self._connection.parser)
            self.ended = False
        if fresh:
            self.heard_at = time.monotonic()
        for request in requests:
            self._connection.parser.expect(request.method)
        data = b"".join(request.encode(self._pool.common) for request in requests)
        try:
            await self._connection.channel.send(data, self._timeout_seconds)
        except TransportFailure as failure:
            # The first of several requests may have left in full.
            raise TransportFailure(failure.reason, sent=True, timeout=failure.timeout) from failure

    async def receive(self) -> None:
        assert self._connection is not None
        await self._connection.receive(self._timeout_seconds)
        self.heard_at = time.monotonic()

    def responses(self) -> Iterator[tuple[Head, bytes]]:
        """The responses that are complete."""
        assert self._connection is not None
        assert self._responses is not None
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
