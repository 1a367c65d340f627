"""The change feed: one thread that asks the engine which streams changed and hands that to the loop.

Sits between the engine and `manager`. The thread waits in the engine with the interpreter lock released; the
engine coalesces, so its work grows with the number of changed streams, never with the number of appends. It also
says which patterns match a stream, here, so that the loop never compares.
What is taken waits here in two lines, and a round deals with a part of each: streams that many follow take long, and
those that few follow do not wait for them.
Invariants: a batch is handed over only after the one before was dealt with; no more is taken than may wait (then the
engine's bounded set is the queue); after an overflow, a failure or a start everything watched is listed again; a round
that began after a moment has seen every change acknowledged before that moment, or has it in a line.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from millstream._engine import EngineError
from millstream.control.limits import (
    FEED_BATCH_MAX,
    FEED_IDLE_TAKE_MS,
    FEED_LIGHT_LINKS,
    FEED_PACE_S,
    FEED_ROUND_LINKS,
    FEED_TAKE_MS,
    FEED_WAITING_MAX,
)
from millstream.control.subscriptions.machine import Change

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
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
        weigh: Callable[[str, Sequence[str]], int],
    ) -> None:
        """`weigh` says how many follow a stream that these patterns match; it is asked by the thread."""
        self._engine = engine
        self._deliver = deliver
        self._scope = scope
        self._weigh = weigh
        self._light: dict[str, Sequence[str]] = {}  # with the patterns that match them
        self._heavy: dict[str, Sequence[str]] = {}
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

    async def settle(
        self, enough: Callable[[], bool], concerns: Callable[[Collection[str]], bool]
    ) -> None:
        """Waits until `enough` holds or every change acknowledged before this call has been seen, but those in a line
        of which `concerns` says that none matters. It may be asked often, and only whether a stream is in it."""
        target = self._started + 1

        def over() -> bool:
            return enough() or (
                self._completed >= target
                and not (self._light and concerns(self._light))
                and not (self._heavy and concerns(self._heavy))
            )

        async with self._round_done:
            await self._round_done.wait_for(over)

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
            overflow = self._take()
            changed = bool(self._light or self._heavy)
            self._deal_with(self._light)
            self._deal_with(self._heavy)
            if overflow:
                log.warning("change feed: too many streams changed at once; listing them all")
                self._rescan()
        self._wait_for(lambda: self._complete(number))
        if changed:
            self._stopping.wait(FEED_PACE_S)

    def _take(self) -> bool:
        """Lines up what has changed; whether that was too much."""
        waiting = len(self._light) + len(self._heavy)
        if waiting >= FEED_WAITING_MAX:
            return False
        pause_ms = FEED_TAKE_MS if self.watching else FEED_IDLE_TAKE_MS
        dirty, overflow = self._engine.take_dirty(0 if waiting else pause_ms)
        for path, globs in dirty:
            heavy = path in self._heavy or self._weigh(path, globs) > FEED_LIGHT_LINKS
            (self._heavy if heavy else self._light)[path] = globs
        return overflow

    def _deal_with(self, line: dict[str, Sequence[str]]) -> None:
        links, batch = 0, []
        for path, globs in islice(line.items(), FEED_BATCH_MAX):
            batch.append((path, globs))
            links += 1 + self._weigh(path, globs)
            if links >= FEED_ROUND_LINKS:
                break
        if batch:
            self._hand_over([(path, self._engine.tail(path), globs) for path, globs in batch])
        for path, _ in batch:
            del line[path]

    def _rescan(self) -> None:
        """Reports every watched stream that exists, then every linked one that does not."""
        self._light, self._heavy = {}, {}
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
