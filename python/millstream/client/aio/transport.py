"""Connections with their parser, the pool of idle ones, and the performer of effects.

Where it sits: over `io.py`, below `client.py`, `producer.py` and `reads.py`; drives the parser of `http.py`.

Invariants:
- I-TRN-1  A connection serves one request at a time here, and returns to the pool only when its
           last response ended cleanly.
- I-TRN-2  Each wait has a timeout; the pool keeps at most `IDLE_CONNECTIONS_MAX`.
- I-TRN-3  `cancel` ends what the performer waits for, wherever it is called.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from millstream.client import steps
from millstream.client.aio.io import AsyncChannel, AsyncEvent, AsyncLock, settle
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
    import ssl
    from collections.abc import AsyncGenerator, Mapping

    from millstream.client.wire import Endpoint
    from millstream.types import Batch, StreamInfo

T = TypeVar("T")
IDLE_CONNECTIONS_MAX: Final = 8
IDLE_SECONDS_MAX: Final = 20.0
"""Shorter than any server's keep-alive, so that a pooled connection is rarely closed under us."""
EARLY_ANSWER_SECONDS: Final = 1.0
ANSWER_BYTES_MAX: Final = 1024 * 1024 * 1024
"""The longest body that is received into one buffer of its length."""


class AsyncConnection:
    """One connection with the parser of its responses."""

    def __init__(self, channel: AsyncChannel) -> None:
        self.channel = channel
        self.parser = ResponseParser()
        self.idle_since = 0.0

    async def receive(self, timeout_seconds: float) -> None:
        """Wait for bytes and feed them to the parser."""
        self.parser.feed(await self.channel.receive(timeout_seconds))

    async def next_event(self, timeout_seconds: float) -> Head | Data | End:
        while True:
            try:
                event = self.parser.next()
            except Truncated as error:
                raise TransportFailure(str(error), sent=True) from error
            except MalformedResponse as error:
                raise TransportFailure(f"not HTTP: {error}", sent=True) from error
            if event is not None:
                return event
            await self.receive(timeout_seconds)

    async def read_head(self, timeout_seconds: float) -> Head:
        event = await self.next_event(timeout_seconds)
        assert isinstance(event, Head)
        return event

    async def read_body(self, timeout_seconds: float) -> bytes:
        parts: list[bytes] = []
        while isinstance(event := await self.next_event(timeout_seconds), Data):
            parts.append(event.data)
        return b"".join(parts)

    async def read_body_into(
        self, timeout_seconds: float, allocate: steps.Allocate
    ) -> bytes | bytearray:
        """The whole body; one of a known length is received straight into a buffer of that length."""
        length = self.parser.take_length(ANSWER_BYTES_MAX)
        if length is None:
            return await self.read_body(timeout_seconds)
        body = allocate(length)
        view = memoryview(body).cast("B")
        filled = self.parser.take_into(view)
        while filled < length:
            count = await self.channel.receive_into(view[filled:], timeout_seconds)
            if count == 0:
                raise TransportFailure(
                    "the connection was closed in the middle of a response", sent=True
                )
            filled += count
        self.parser.finish_length()
        return body

    async def start(self, request: Request, common: bytes, timeout_seconds: float) -> Head:
        """Send a request and read the head of its response."""
        self.parser.expect(request.method)
        try:
            await self.channel.send(request.encode(common), timeout_seconds, until_answered=True)
        except TransportFailure as failure:
            # A server may refuse a large body before it took all of it: the answer is there.
            with contextlib.suppress(TransportFailure):
                head = await self.read_head(EARLY_ANSWER_SECONDS)
                return Head(head.status, head.headers, keep=False)
            raise failure
        return await self.read_head(timeout_seconds)

    def usable(self) -> bool:
        """False if the server has closed it, or it has been idle for so long that it may have."""
        if time.monotonic() - self.idle_since > IDLE_SECONDS_MAX:
            return False
        return not self.channel.readable

    def close(self) -> None:
        self.channel.close()


class AsyncPool:
    """Idle connections to one server, and how new ones are made."""

    def __init__(
        self, endpoint: Endpoint, headers: Mapping[str, str], context: ssl.SSLContext | None
    ) -> None:
        lines = [encode_header("Host", endpoint.authority), encode_header("Accept", "*/*")]
        lines += [encode_header(name, value) for name, value in headers.items()]
        self.common = b"".join(lines)
        """The rendered headers that every request carries."""
        self._endpoint = endpoint
        self._context = context
        self._lock = AsyncLock()
        self._idle: list[AsyncConnection] = []
        self._closed = False

    async def connect(self, timeout_seconds: float) -> AsyncConnection:
        """A new connection, which the pool does not know."""
        if self._endpoint.tls and self._context is None:
            import ssl

            self._context = ssl.create_default_context()
        context = self._context if self._endpoint.tls else None
        channel = await AsyncChannel.connect(self._endpoint, timeout_seconds, context)
        return AsyncConnection(channel)

    async def acquire(self, timeout_seconds: float) -> AsyncConnection:
        while True:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the client is closed", hint="connect again")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return await self.connect(timeout_seconds)
            if connection.usable():
                return connection
            connection.close()

    def release(self, connection: AsyncConnection, *, keep: bool) -> None:
        if keep and connection.parser.clean:
            connection.idle_since = time.monotonic()
            with self._lock:
                if not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                    self._idle.append(connection)
                    return
        connection.close()

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        await settle()


class AsyncPerformer:
    """Performs the effects of one generator at a time."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._busy: AsyncConnection | None = None
        self._cancelled = AsyncEvent()

    async def perform(self, effect: steps.Effect) -> Any:
        try:
            if isinstance(effect, steps.Call):
                return await self._exchange(effect)
            if isinstance(effect, steps.Open):
                return await self._open(effect)
            if isinstance(effect, steps.Receive):
                return await self._receive(effect.timeout_seconds)
            if isinstance(effect, steps.Hangup):
                return self.hangup()
            if isinstance(effect, steps.Sleep) and await self._cancelled.wait(effect.seconds):
                raise steps.Cancelled
        except TransportFailure:
            self.hangup()
            if self._cancelled.is_set():
                raise steps.Cancelled from None
            raise
        except BaseException:
            self.hangup()
            raise
        return None

    async def _exchange(self, effect: steps.Call) -> Response:
        connection, head = await self._start(effect.request, effect.timeout_seconds)
        body: bytes | bytearray
        if effect.allocate is None or head.status != 200:
            body = await connection.read_body(effect.timeout_seconds)
        else:
            body = await connection.read_body_into(effect.timeout_seconds, effect.allocate)
        return self._finish(connection, head, body)

    async def _open(self, effect: steps.Open) -> Response:
        connection, head = await self._start(effect.request, effect.timeout_seconds)
        if head.status == 200:
            return Response(head.status, head.headers)
        return self._finish(connection, head, await connection.read_body(effect.timeout_seconds))

    async def _start(
        self, request: Request, timeout_seconds: float
    ) -> tuple[AsyncConnection, Head]:
        if not self._cancelled.is_set():
            self._busy = await self._pool.acquire(timeout_seconds)
        # Asked again: whoever cancelled in the meantime found no connection to interrupt.
        if self._cancelled.is_set() or self._busy is None:
            raise steps.Cancelled
        connection = self._busy
        return connection, await connection.start(request, self._pool.common, timeout_seconds)

    def _finish(self, connection: AsyncConnection, head: Head, body: bytes | bytearray) -> Response:
        self._busy = None
        self._pool.release(connection, keep=head.keep)
        return Response(head.status, head.headers, body)

    async def _receive(self, timeout_seconds: float) -> bytes:
        assert self._busy is not None
        event = await self._busy.next_event(timeout_seconds)
        return event.data if isinstance(event, Data) else b""

    def hangup(self) -> None:
        connection, self._busy = self._busy, None
        if connection is not None:
            connection.close()

    def cancel(self) -> None:
        """End what is under way, here and for ever; what waits for it gets `Cancelled`."""
        self._cancelled.set()
        connection = self._busy
        if connection is not None:
            connection.channel.interrupt()


async def run(effects: steps.Steps[T], performer: AsyncPerformer) -> T:
    """Perform a generator to its end and return its result."""
    result: Any = None
    failure: TransportFailure | None = None
    try:
        while True:
            try:
                effect = effects.send(result) if failure is None else effects.throw(failure)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            result, failure = None, None
            try:
                result = await performer.perform(effect)
            except TransportFailure as error:
                failure = error
    finally:
        effects.close()


async def iterate(
    effects: steps.Steps[None], performer: AsyncPerformer
) -> AsyncGenerator[Batch | StreamInfo, None]:
    """Perform a generator and give out what it emits."""
    result: Any = None
    failure: TransportFailure | None = None
    try:
        while True:
            try:
                effect = effects.send(result) if failure is None else effects.throw(failure)
            except StopIteration:
                return
            result, failure = None, None
            if isinstance(effect, steps.Emit):
                yield effect.value
                continue
            try:
                result = await performer.perform(effect)
            except TransportFailure as error:
                failure = error
    finally:
        effects.close()
        performer.hangup()
