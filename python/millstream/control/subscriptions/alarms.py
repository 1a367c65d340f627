"""Timers of subscriptions: one heap, one sleeping task, at most one entry per subscription that counts.

Sits below `manager`. An alarm is only a hint to look: whoever is called checks what is really due and arms
again, so an alarm that became earlier or pointless costs one look. Invariant: the earliest armed time of
a subscription is never missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_SLEEP_S_MAX: Final = 1.0  # the wall clock may be set; never sleep long on it


class Alarms:
    def __init__(self, now_ms: Callable[[], int], ring: Callable[[str], Awaitable[None]]) -> None:
        self._now_ms = now_ms
        self._ring = ring
        self._heap: list[tuple[int, str]] = []
        self._armed: dict[str, int] = {}
        self._earlier = asyncio.Event()

    def arm(self, id: str, due_ms: int) -> None:  # noqa: A002
        if self._armed.get(id, due_ms + 1) <= due_ms:
            return
        self._armed[id] = due_ms
        heapq.heappush(self._heap, (due_ms, id))
        if self._heap[0] == (due_ms, id):
            self._earlier.set()

    async def run(self) -> None:
        while True:
            due = self._take_due()
            if due:
                await asyncio.gather(*(self._ring(name) for name in due))
                continue
            self._earlier.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._sleep_s()):
                    await self._earlier.wait()

    def _take_due(self) -> list[str]:
        """All that ring now; together, so that their events share a sync."""
        due: list[str] = []
        now = self._now_ms()
        while self._heap and self._heap[0][0] <= now:
            due_ms, id = heapq.heappop(self._heap)  # noqa: A001
            if self._armed.get(id) == due_ms:
                del self._armed[id]
                due.append(id)
        return due

    def _sleep_s(self) -> float | None:
        if not self._heap:
            return None
        return min(max(self._heap[0][0] - self._now_ms(), 0) / 1000 + 0.001, _SLEEP_S_MAX)
