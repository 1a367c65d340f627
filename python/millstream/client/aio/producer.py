"""The idempotent producer for asyncio: a worker task around `ProducerCore`.

Where it sits: made by `AsyncStream.producer`; owns one connection, on which it pipelines.

Invariants:
- I-PRA-1  `append` waits while the buffer is full, so memory is bounded by the options.
- I-PRA-2  The worker ends by itself after `close`, whatever the server does.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

from millstream import errors
from millstream.client.aio.transport import AsyncConnection
from millstream.client.http import (
    MalformedResponse,
    Request,
    Response,
    ResponseAssembler,
    TransportFailure,
    Truncated,
)
from millstream.client.sync.producer import IDLE_WAIT_SECONDS
from millstream.client.sync.transport import RECEIVE_BYTES, common_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import TracebackType

    from millstream.client.producer import ProducerCore


class AsyncProducer:
    """Appends records in order, each exactly once, over broken connections and restarts.

    async with stream.producer("importer") as producer:
        for row in rows:
            await producer.append(row)
    """

    def __init__(
        self,
        core: ProducerCore,
        headers: dict[str, str],
        timeout_seconds: float,
        content_type: Callable[[], Awaitable[str]],
    ) -> None:
        """`content_type` is asked before the first record if the core does not know it yet."""
        self._core = core
        self._content_type = content_type
        self._common = common_headers(core.endpoint, headers)
        self._timeout_seconds = timeout_seconds
        self._closed = False
        self._wake = asyncio.Event()
        self._progress = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._connection: AsyncConnection | None = None
        self._reading: asyncio.Task[bytes] | None = None
        self._heard_at = 0.0

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
        return self._core.pending_records

    async def append(self, value: Any) -> None:
        """Take one record; it is sent soon, together with others. Raises what failed earlier."""
        await self._prepare()
        record = self._core.encode(value)
        self._check_open()
        while self._core.full:
            self._core.seal(time.monotonic())
            self._wake.set()
            async with self._progress:
                await self._progress.wait()
            self._check_open()
        news = self._core.add(record, time.monotonic())
        self._start()
        if news:
            self._wake.set()

    async def append_many(self, values: Iterable[Any]) -> None:
        for value in values:
            await self.append(value)

    async def flush(self, timeout_seconds: float | None = None) -> str | None:
        """Wait until everything is acknowledged; returns the offset after the last record."""
        self._core.seal(time.monotonic())
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_seconds), self._progress:
                await self._progress.wait_for(
                    lambda: self._core.idle or self._core.error is not None
                )
        except TimeoutError:
            raise errors.RequestTimeout(
                f"{self._core.pending_records} records were not acknowledged in time"
            ) from None
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
        self._check_open()
        self._core.end(record, time.monotonic())
        self._start()
        return await self.flush()

    async def _prepare(self) -> None:
        if not self._core.content_type:
            self._core.set_content_type(await self._content_type())

    def _start(self) -> None:
        if self._task is None:
            name = f"millstream-producer-{self._core.producer_id}"
            self._task = asyncio.create_task(self._work(), name=name)

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Flush, then end the worker. Raises if something could not be delivered."""
        try:
            if not self._closed:
                await self.flush(timeout_seconds)
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """End the worker at once; records that are not acknowledged may or may not arrive."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Self:
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

    def _check_open(self) -> None:
        self._core.check()
        if self._closed:
            raise errors.ProducerClosed("the producer is closed")

    # ------------------------------------------------------------------ the worker task

    async def _work(self) -> None:
        try:
            while self._core.error is None:
                try:
                    await self._turn()
                except TransportFailure as failure:
                    await self._drop()
                    self._core.on_break(failure, time.monotonic(), self._core.endpoint.url)
                    await self._announce()
        except Exception as error:
            self._core.fail(errors.MillstreamError(f"the producer failed unexpectedly: {error!r}"))
            await self._announce()
            raise
        finally:
            await self._drop()

    async def _turn(self) -> None:
        """Send what may be sent, then wait for an answer, a wake-up or a deadline."""
        self._wake.clear()
        now = time.monotonic()
        requests: list[Request] = []
        while (request := self._core.take(now)) is not None:
            requests.append(request)
        if requests:
            await self._send(requests)
        now = time.monotonic()
        silence_at = self._heard_at + self._timeout_seconds if self._core.in_flight else None
        deadlines = [moment for moment in (self._core.wake_at(), silence_at) if moment is not None]
        deadline = min([now + IDLE_WAIT_SECONDS, *deadlines])
        if await self._wait(max(0.0, deadline - now)):
            await self._receive()
        elif silence_at is not None and time.monotonic() >= silence_at:
            reason = f"silent for {self._timeout_seconds:g} s"
            raise TransportFailure(reason, sent=True, timeout=True)

    async def _send(self, requests: list[Request]) -> None:
        if self._connection is None:
            self._connection = await AsyncConnection.connect(
                self._core.endpoint, self._timeout_seconds
            )
            self._responses = ResponseAssembler(self._connection.parser)
        if self._core.in_flight == len(requests):
            self._heard_at = time.monotonic()
        for request in requests:
            self._connection.parser.expect(request.method)
        data = b"".join(request.encode(self._common) for request in requests)
        await self._connection.send(data, self._timeout_seconds)

    async def _wait(self, seconds: float) -> bool:
        """True if the connection has given something to read."""
        if self._connection is not None and self._reading is None:
            self._reading = asyncio.create_task(self._connection.reader.read(RECEIVE_BYTES))
        woken = asyncio.create_task(self._wake.wait())
        tasks: set[asyncio.Task[Any]] = {woken}
        if self._reading is not None:
            tasks.add(self._reading)
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        return self._reading is not None and self._reading.done()

    async def _receive(self) -> None:
        assert self._reading is not None
        assert self._connection is not None
        reading, self._reading = self._reading, None
        keep = True
        try:
            self._connection.parser.feed(reading.result())
            self._heard_at = time.monotonic()
            while (complete := self._responses.next()) is not None:
                head, body = complete
                keep = keep and head.keep
                self._core.on_response(Response(head.status, head.headers, body), time.monotonic())
        except OSError as error:
            raise TransportFailure(str(error).lower(), sent=True) from error
        except Truncated as error:
            raise TransportFailure(str(error), sent=True) from error
        except MalformedResponse as error:
            raise TransportFailure(f"not HTTP: {error}", sent=True) from error
        finally:
            await self._announce()
        if not keep or self._connection.parser.ended:
            await self._drop()
            if self._core.in_flight:
                raise TransportFailure("the server ended the connection", sent=True)

    async def _announce(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    async def _drop(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
