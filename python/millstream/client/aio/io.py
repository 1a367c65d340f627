"""What asyncio does in its own way: connections, waiting, waking, work beside the caller.

Where it sits: below everything else in `aio/`. `sync/io.py` has the same names, without `Async`, for threads; all other
files of `sync/` are made from their twins here by `tools/unasync.py`.

Invariants:
- I-TRA-1  `TransportFailure.sent` is False only if no connection was made: asyncio does not tell how much of a write
           reached the kernel, so anything later counts as sent.
- I-TRA-2  Every wait has a timeout; what is received ahead of its reader is bounded by `HELD_BYTES_MAX`.
- I-TRA-3  Nothing here locks: between two awaits nothing else runs, and an object belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, cast

from millstream.client.http import (
    CONNECT_SECONDS_MAX,
    RECEIVE_BYTES,
    TransportFailure,
    failure_reason,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from millstream.client.wire import Endpoint

P = ParamSpec("P")
T = TypeVar("T")
HELD_BYTES_MAX: Final = 4 * RECEIVE_BYTES
AsyncLock = contextlib.nullcontext


class _Moment:
    """Something that one task waits for."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] | None = None

    def come(self) -> None:
        if self.future is not None:
            _settle(self.future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _first_of(seconds: float, *moments: _Moment) -> None:
    """Return when one of the moments has come, or after `seconds`."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    for moment in moments:
        moment.future = future
    timer = loop.call_later(max(0.0, seconds), _settle, future)
    try:
        await future
    finally:
        timer.cancel()
        for moment in moments:
            moment.future = None


class AsyncEvent:
    """Like `threading.Event`, for one task that waits."""

    def __init__(self) -> None:
        self._moment = _Moment()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._moment.come()

    async def wait(self, seconds: float) -> bool:
        if not self._set:
            await _first_of(seconds, self._moment)
        return self._set


class AsyncCondition:
    """Like `threading.Condition`, without its lock (I-TRA-3)."""

    def __init__(self) -> None:
        self._moments: set[_Moment] = set()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    async def wait(self, seconds: float) -> None:
        moment = _Moment()
        self._moments.add(moment)
        try:
            await _first_of(seconds, moment)
        finally:
            self._moments.discard(moment)

    def notify_all(self) -> None:
        for moment in self._moments:
            moment.come()


class AsyncChannel(asyncio.Protocol):
    """One connection, as bytes that come and go."""

    def __init__(self) -> None:
        self._received: deque[bytes] = deque()
        self._held = 0
        self._reading = True
        self._writable = True
        self._ended = False
        self._failure: OSError | None = None
        self.change = _Moment()

    @staticmethod
    async def connect(
        endpoint: Endpoint, timeout_seconds: float, context: ssl.SSLContext | None
    ) -> AsyncChannel:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS_MAX, timeout_seconds)):
                _, channel = await loop.create_connection(
                    AsyncChannel, endpoint.host, endpoint.port, ssl=context
                )
        except TimeoutError:
            raise TransportFailure("connecting timed out", sent=False, timeout=True) from None
        except OSError as error:
            raise TransportFailure(failure_reason(error), sent=False) from error
        return channel

    async def send(
        self, data: bytes, timeout_seconds: float, *, until_answered: bool = False
    ) -> None:
        """Hand bytes to the kernel. `until_answered`: an answer that comes before all are taken ends it."""
        self._transport.write(data)
        until = time.monotonic() + timeout_seconds
        while not self._writable and not self._ended:
            if until_answered and self._received:
                raise TransportFailure("the server did not take the whole request", sent=True)
            left = until - time.monotonic()
            if left <= 0:
                raise TransportFailure("sending timed out", sent=True, timeout=True)
            await _first_of(left, self.change)
        if self._failure is not None:
            raise TransportFailure(failure_reason(self._failure), sent=True) from self._failure

    async def receive(self, timeout_seconds: float) -> bytes:
        """The bytes that are there, at least one; `b""` at the end of the connection."""
        await self._arrival(timeout_seconds)
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        self._received.clear()
        self._took(len(data))
        return data

    async def receive_into(self, view: memoryview, timeout_seconds: float) -> int:
        await self._arrival(timeout_seconds)
        if not self._received:
            return 0
        data = self._received.popleft()
        count = min(len(data), len(view))
        view[:count] = data[:count]
        if count < len(data):
            self._received.appendleft(data[count:])
        self._took(count)
        return count

    async def _arrival(self, timeout_seconds: float) -> None:
        """Return when there are bytes, or the connection has ended."""
        if not self.readable:
            await _first_of(timeout_seconds, self.change)
        if self._received:
            return
        if self._failure is not None:
            raise TransportFailure(failure_reason(self._failure), sent=True) from self._failure
        if not self._ended:
            reason = f"silent for {timeout_seconds:g} s"
            raise TransportFailure(reason, sent=True, timeout=True)

    def _took(self, count: int) -> None:
        self._held -= count
        if not self._reading and self._held < HELD_BYTES_MAX:
            self._reading = True
            self._transport.resume_reading()

    @property
    def readable(self) -> bool:
        """True if `receive` would not wait."""
        return bool(self._received) or self._ended

    def close(self) -> None:
        self._transport.abort()

    def interrupt(self) -> None:
        """End what waits on this connection."""
        self._transport.abort()

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._held += len(data)
        if self._reading and self._held >= HELD_BYTES_MAX:
            self._reading = False
            self._transport.pause_reading()
        self.change.come()

    def eof_received(self) -> None:
        self._ended = True
        self.change.come()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._failure = exc if isinstance(exc, OSError) else self._failure
        self.change.come()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self.change.come()


class AsyncWaker:
    """Lets others wake one task that waits for a connection."""

    def __init__(self) -> None:
        self._moment = _Moment()
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        self._moment.come()

    async def wait(self, channel: AsyncChannel | None, seconds: float) -> bool:
        """Until somebody wakes it, or the channel has something to read: then True."""
        ready = channel is not None and channel.readable
        if not self._woken and not ready:
            others = () if channel is None else (channel.change,)
            await _first_of(seconds, self._moment, *others)
        self._woken = False
        return channel is not None and channel.readable

    def close(self) -> None:
        pass


class AsyncWorker:
    """Work that goes on beside the caller: here a task."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._task = asyncio.create_task(work(), name=name)

    async def end(self, seconds: float) -> bool:  # noqa: ARG002 - a task ends at once
        """End it; False if it still goes on after `seconds`."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return True


class AsyncAhead(Generic[T]):
    """One call that goes on while its caller does something else: here as a task."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    def begin(
        self, call: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kw: P.kwargs
    ) -> None:
        self._task = asyncio.create_task(call(*args, **kw))

    async def result(self) -> T:
        assert self._task is not None
        task, self._task = self._task, None
        return await task

    async def close(self) -> None:
        """Wait for the end of what goes on; its outcome is nobody's business."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class AsyncArrowExport:
    """Other libraries take Arrow from blocking iterators only: here `read_all` first."""


async def settle() -> None:
    """One turn of the loop, in which closed connections finish closing before the loop itself may end."""
    await asyncio.sleep(0)
