"""Group commit for subscription events: decisions queue here, and wait here until they are synced.

Sits between `manager` and `journal`. Decisions are folded into memory when they are made and written in the
same order; whoever must not speak before they are synced awaits `synced`. A rewrite of the journal goes on in steps
beside that, so that it keeps nobody waiting (`snapshot`). Invariants: one write at a time;
everything queued while a write runs goes into the next one; a failed write fails everything that was queued,
because it was decided on state that the disk does not have.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from millstream.control.limits import JOURNAL_BATCH_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from concurrent.futures import Executor

    from millstream.control.subscriptions import events as e
    from millstream.control.subscriptions.journal import Journal
    from millstream.control.subscriptions.snapshot import Snapshot


class WriteFailed(Exception):  # noqa: N818
    """The events could not be synced; nothing that depends on them may be told to anyone."""


class Writer:
    def __init__(
        self,
        journal: Journal,
        executor: Executor,
        take_snapshot: Callable[[], Snapshot],
        recover: Callable[[BaseException], Awaitable[None]],
    ) -> None:
        self._journal = journal
        self._executor = executor
        self._take_snapshot = take_snapshot
        self._recover = recover
        self._queue: list[tuple[list[e.Event], asyncio.Future[None]]] = []
        self._batch: list[tuple[list[e.Event], asyncio.Future[None]]] = []  # being written
        self._wanted = asyncio.Event()
        self._last: asyncio.Future[None] | None = None
        self._snapshot: Snapshot | None = None  # of the rewrite that goes on
        self._steps: Iterator[list[e.Event]] = iter(())

    def put(self, events: list[e.Event]) -> None:
        """Queues one transaction that has already been folded into memory."""
        if not events:
            return
        self._last = asyncio.get_running_loop().create_future()
        self._last.add_done_callback(_observe)
        self._queue.append((events, self._last))
        if self._snapshot is not None:
            self._snapshot.note(events)
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
            while self._queue or self._snapshot is not None:
                try:
                    await self._write()
                    await self._go_on_rewriting()
                except Exception as error:  # noqa: BLE001 - whatever it was, memory and disk now differ
                    await self._fail(error)

    async def _write(self) -> None:
        self._batch, self._queue = self._queue[:JOURNAL_BATCH_MAX], self._queue[JOURNAL_BATCH_MAX:]
        if self._batch:
            transactions = [events for events, _ in self._batch]
            await self._on_disk(lambda: self._journal.append(transactions))
        self._told()

    async def _go_on_rewriting(self) -> None:
        if self._snapshot is None:
            if not self._journal.needs_rewrite():
                return
            # Memory already holds every queued event: the snapshot stands for all of them.
            self._snapshot = self._take_snapshot()
            self._steps = self._snapshot.steps()
            await self._on_disk(self._journal.begin_rewrite)
        step = next(self._steps, None)
        if step is not None:
            await self._on_disk(lambda: self._journal.extend_rewrite(step, ends=False))
            return
        # What is queued was either seen, or came behind what was seen and is among the events since then.
        since, self._snapshot = self._snapshot.since, None
        self._batch, self._queue = self._queue, []
        await self._on_disk(lambda: self._journal.extend_rewrite(since, ends=True))
        self._told()

    async def _on_disk(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _told(self) -> None:
        for _, future in self._batch:
            if not future.done():
                future.set_result(None)
        self._batch = []

    async def _fail(self, error: Exception) -> None:
        batch, self._batch, self._queue = self._batch + self._queue, [], []
        for _, future in batch:
            if not future.done():
                future.set_exception(WriteFailed(str(error)))
        self._last = None
        self._snapshot, self._steps = None, iter(())
        await self._recover(error)


def _observe(future: asyncio.Future[None]) -> None:
    """Marks a failure as seen: not everyone who queues events waits for them."""
    if not future.cancelled():
        future.exception()
