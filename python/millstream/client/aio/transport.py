"""asyncio sockets: the same as `sync/transport.py` for `aio/client.py` and `aio/producer.py`.

Invariants:
- I-TRA-1  A connection serves one request at a time here, and returns to the pool only when its
           last response ended cleanly.
- I-TRA-2  `TransportFailure.sent` is False only if no connection was made: asyncio does not tell
           how much of a write reached the kernel, so anything later counts as sent.
- I-TRA-3  Each wait has a timeout; the pool keeps at most `IDLE_CONNECTIONS_MAX`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

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
)
from millstream.client.sync.transport import (
    CONNECT_SECONDS_MAX,
    IDLE_CONNECTIONS_MAX,
    IDLE_SECONDS_MAX,
    RECEIVE_BYTES,
    common_headers,
)
from millstream.errors import ClientClosed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.client.wire import Endpoint


class AsyncConnection:
    """One connected stream pair with its parser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.parser = ResponseParser()
        self.idle_since = 0.0

    @staticmethod
    async def connect(endpoint: Endpoint, timeout_seconds: float) -> AsyncConnection:
        context: Any = None
        if endpoint.tls:
            import ssl

            context = ssl.create_default_context()
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS_MAX, timeout_seconds)):
                reader, writer = await asyncio.open_connection(
                    endpoint.host, endpoint.port, ssl=context, limit=4 * RECEIVE_BYTES
                )
        except TimeoutError:
            raise TransportFailure("connecting timed out", sent=False, timeout=True) from None
        except OSError as error:
            raise TransportFailure(_reason(error), sent=False) from error
        return AsyncConnection(reader, writer)

    async def send(self, data: bytes, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                self.writer.write(data)
                await self.writer.drain()
        except TimeoutError:
            raise TransportFailure("sending timed out", sent=True, timeout=True) from None
        except OSError as error:
            raise TransportFailure(_reason(error), sent=True) from error

    async def receive(self, timeout_seconds: float) -> None:
        """Wait for bytes and feed them to the parser."""
        try:
            async with asyncio.timeout(timeout_seconds):
                data = await self.reader.read(RECEIVE_BYTES)
        except TimeoutError:
            reason = f"silent for {timeout_seconds:g} s"
            raise TransportFailure(reason, sent=True, timeout=True) from None
        except OSError as error:
            raise TransportFailure(_reason(error), sent=True) from error
        self.parser.feed(data)

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

    async def start(self, request: Request, common: bytes, timeout_seconds: float) -> Head:
        """Send a request and read the head of its response.

        Both run together: a server may refuse a large body before it took all of it, and then only
        its answer, not the write, tells why.
        """
        self.parser.expect(request.method)
        sending = asyncio.ensure_future(self.send(request.encode(common), timeout_seconds))
        try:
            head = await self.read_head(timeout_seconds)
            if not sending.done():
                return Head(head.status, head.headers, keep=False)
            return head
        finally:
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def usable(self) -> bool:
        """False if the server has closed it, or it has been idle for so long that it may have."""
        if time.monotonic() - self.idle_since > IDLE_SECONDS_MAX:
            return False
        return not (self.writer.is_closing() or self.reader.at_eof())

    def close(self) -> None:
        self.writer.transport.abort()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()


class AsyncPool:
    """Idle connections to one server; belongs to one event loop."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        self.endpoint = endpoint
        self.common = common_headers(endpoint, headers)
        self._idle: list[AsyncConnection] = []
        self._closed = False

    async def acquire(self, timeout_seconds: float) -> AsyncConnection:
        if self._closed:
            raise ClientClosed("the client is closed", hint="connect again")
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.close()
        return await AsyncConnection.connect(self.endpoint, timeout_seconds)

    def release(self, connection: AsyncConnection, *, keep: bool) -> None:
        room = not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX
        if keep and room and connection.parser.clean:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        # One turn of the loop lets the transports finish closing before the loop itself may end.
        await asyncio.sleep(0)


class AsyncPerformer:
    """Performs the effects of one generator with asyncio."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._busy: AsyncConnection | None = None

    async def perform(self, effect: steps.Effect) -> Any:
        try:
            if isinstance(effect, steps.Call):
                return await self._exchange(effect.request, effect.timeout_seconds, live=False)
            if isinstance(effect, steps.Open):
                return await self._exchange(effect.request, effect.timeout_seconds, live=True)
            if isinstance(effect, steps.Receive):
                return await self._receive(effect.timeout_seconds)
            if isinstance(effect, steps.Hangup):
                return self.hangup()
            if isinstance(effect, steps.Sleep):
                await asyncio.sleep(effect.seconds)
        except BaseException:
            self.hangup()
            raise
        return None

    async def _exchange(self, request: Request, timeout_seconds: float, *, live: bool) -> Response:
        connection = self._busy = await self._pool.acquire(timeout_seconds)
        head = await connection.start(request, self._pool.common, timeout_seconds)
        if live and head.status == 200:
            return Response(head.status, head.headers)
        body = await connection.read_body(timeout_seconds)
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
