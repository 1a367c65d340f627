"""Group commit for subscription events: decisions queue here, and wait here until they are synced.

Sits between `manager` and `journal`. Decisions are folded into memory when they are made and written in the
same order; whoever must not speak before they are synced awaits `synced`. Invariants: one write at a time;
everything queued while a write runs goes into the next one; a failed write fails everything that was queued,
because it was decided on state that the disk does not have.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from millstream.control.limits import JOURNAL_BATCH_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from millstream.control.subscriptions import events as e
    from millstream.control.subscriptions.journal import Journal


class WriteFailed(Exception):  # noqa: N818
    """The events could not be synced; nothing that depends on them may be told to anyone."""


class Writer:
    def __init__(
        self,
        journal: Journal,
        executor: Executor,
        dump: Callable[[], list[e.Event]],
        recover: Callable[[BaseException], Awaitable[None]],
    ) -> None:
        self._journal = journal
        self._executor = executor
        self._dump = dump
        self._recover = recover
        self._queue: list[tuple[list[e.Event], asyncio.Future[None]]] = []
        self._wanted = asyncio.Event()
        self._last: asyncio.Future[None] | None = None

    def put(self, events: list[e.Event]) -> None:
        """Queues one transaction that has already been folded into memory."""
        if not events:
            return
        self._last = asyncio.get_running_loop().create_future()
        self._last.add_done_callback(_observe)
        self._queue.append((events, self._last))
        self._wanted.set()

    async def synced(self) -> None:
        """Returns when everything queued so far is on disk."""
        if self._last is not None and not self._last.done():
            await asyncio.shield(self._last)
        elif self._last is not None:
            self._last.result()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._queue:
                await self._write()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        if self._journal.needs_rewrite():
            # Memory already holds every queued event, so the new history stands for all of them.
            batch, self._queue = self._queue, []
            work = loop.run_in_executor(self._executor, self._journal.rewrite, self._dump())
        else:
            batch, self._queue = self._queue[:JOURNAL_BATCH_MAX], self._queue[JOURNAL_BATCH_MAX:]
            work = loop.run_in_executor(
                self._executor, self._journal.append, [events for events, _ in batch]
            )
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever it was, memory and disk now differ
            batch, self._queue = batch + self._queue, []
            for _, future in batch:
                if not future.done():
                    future.set_exception(WriteFailed(str(error)))
            self._last = None
            await self._recover(error)
        else:
            for _, future in batch:
                if not future.done():
                    future.set_result(None)


def _observe(future: asyncio.Future[None]) -> None:
    """Marks a failure as seen: not everyone who queues events waits for them."""
    if not future.cancelled():
        future.exception()
