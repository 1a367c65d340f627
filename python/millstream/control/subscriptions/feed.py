"""The change feed: one thread that asks the engine which streams changed and hands that to the loop.

Sits between the engine and `manager`. The thread waits in the engine with the interpreter lock released; the
engine coalesces, so its work grows with the number of changed streams, never with the number of appends. It also
says which patterns match a stream, here, so that the loop never compares.
Invariants: a batch is handed over only after the one before was dealt with (the engine's bounded set is
the queue); after an overflow, a failure or a start everything watched is listed again; a round that
began after a moment has seen every change acknowledged before that moment.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from millstream._engine import EngineError
from millstream.control.limits import FEED_BATCH_MAX, FEED_IDLE_TAKE_MS, FEED_PACE_S, FEED_TAKE_MS
from millstream.control.subscriptions.machine import Change

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from typing import Any

    from millstream._engine import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scope:
    """What a full listing has to cover: prefixes of patterns, and the streams already linked."""

    prefixes: list[str]
    linked: list[str]


class _Stopped(Exception):  # noqa: N818
    pass


class Feed:
    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Change]], Awaitable[None]],
        scope: Callable[[], Scope],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._rescan_wanted = threading.Event()
        self._rescan_wanted.set()
        self._thread = threading.Thread(target=self._run, name="millstream-feed", daemon=True)
        self._round_done = asyncio.Condition()
        self._started = 0
        self._completed = 0
        self.watching = False

    def start(self) -> None:
        self._thread.start()

    def request_rescan(self) -> None:
        self._rescan_wanted.set()

    def stop(self) -> None:
        self._stopping.set()

    async def settle(self, enough: Callable[[], bool]) -> None:
        """Waits until `enough` holds or every change acknowledged before this call has been seen."""
        target = self._started + 1
        async with self._round_done:
            await self._round_done.wait_for(lambda: enough() or self._completed >= target)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._round()
            except _Stopped:
                return
            except EngineError as error:
                if self._stopping.is_set():
                    return
                self._again_soon("change feed: %s; listing again in 1 s", error)
            except Exception as error:  # noqa: BLE001 - a feed that dies silently stops all wakes
                self._again_soon("change feed: listing again in 1 s after %r", error, trace=True)

    def _again_soon(self, message: str, error: Exception, trace: bool = False) -> None:
        log.error(message, error, exc_info=error if trace else None)
        self._rescan_wanted.set()
        self._stopping.wait(1.0)

    def _round(self) -> None:
        self._started += 1
        number = self._started
        changed = False
        if self._rescan_wanted.is_set():
            self._rescan_wanted.clear()
            self._rescan()
        else:
            dirty, overflow = self._engine.take_dirty(
                FEED_TAKE_MS if self.watching else FEED_IDLE_TAKE_MS
            )
            changed = bool(dirty)
            for batch in _batches(dirty):
                self._hand_over([(path, self._engine.tail(path), globs) for path, globs in batch])
            if overflow:
                log.warning("change feed: too many streams changed at once; listing them all")
                self._rescan()
        self._wait_for(lambda: self._complete(number))
        if changed:
            self._stopping.wait(FEED_PACE_S)

    def _rescan(self) -> None:
        """Reports every watched stream that exists, then every linked one that does not."""
        scope = self._wait_for(self._ask_scope)
        missing = dict.fromkeys(scope.linked)
        for prefix in scope.prefixes:
            after: str | None = ""
            while after is not None:
                page, after = self._engine.list(prefix, after, FEED_BATCH_MAX)
                paths = [entry["path"] for entry in page]
                changes: list[Change] = []
                for entry, globs in zip(page, self._engine.globs_of(paths), strict=True):
                    missing.pop(entry["path"], None)
                    if globs is not None:
                        changes.append((entry["path"], entry["tail"], globs))
                self._hand_over(changes)
        for batch in _batches(list(missing)):
            found = zip(batch, self._engine.globs_of(batch), strict=True)
            self._hand_over([(path, self._engine.tail(path), globs or []) for path, globs in found])

    async def _ask_scope(self) -> Scope:
        return self._scope()

    async def _complete(self, number: int) -> None:
        async with self._round_done:
            self._completed = number
            self._round_done.notify_all()

    def _hand_over(self, changes: list[Change]) -> None:
        self._wait_for(lambda: self._delivered(changes))

    async def _delivered(self, changes: list[Change]) -> None:
        await self._deliver(changes)
        async with self._round_done:
            self._round_done.notify_all()

    def _wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` on the loop and waits for it, but no longer than the feed lives."""
        done: Future[T] = Future()

        def begin() -> None:
            if not self._stopping.is_set():
                self._loop.create_task(work()).add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                done.cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError as error:  # the loop has ended
            raise _Stopped from error
        while not self._stopping.is_set():
            try:
                return done.result(timeout=0.1)
            except CancelledError as error:
                raise _Stopped from error
            except TimeoutError:
                if done.done():  # the work itself timed out
                    raise
        raise _Stopped


def _batches(items: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), FEED_BATCH_MAX):
        yield items[start : start + FEED_BATCH_MAX]
