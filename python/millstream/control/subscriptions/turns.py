"""Whose turn it is to be posted to, so that receivers that never answer keep nothing from the others.

Sits below `sender`; records on wake streams need no turn. A turn lasts `TURN_S`: what is not answered by then goes on
aside, where there is room for `ASIDE_MAX`, or has failed. So turns come round whatever receivers do. First attempts and
retries have turns of their own: who keeps failing only meets others of his kind. A target (host and port) has at most
`DELIVERIES_PER_TARGET_MAX` requests at once, those aside included. All of it runs on the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, TypeVar

from millstream.control.limits import (
    ASIDE_MAX,
    DELIVERIES_MAX,
    DELIVERIES_PER_TARGET_MAX,
    RETRIES_MAX,
    TURN_S,
)
from millstream.control.subscriptions.delivery import DeliveryFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

T = TypeVar("T")


class _Kind:
    """First attempts, or retries."""

    def __init__(self, turns: int) -> None:
        self.turns = asyncio.Semaphore(turns)
        self.aside = 0


class Turn:
    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        self._aside = False

    async def post(self, work: Coroutine[None, None, T]) -> T:
        """Does the work; `DeliveryFailed` if the turn ends before it and there is no room aside."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                end = loop.call_later(TURN_S, self._step_aside, limit)
                try:
                    return await work
                finally:
                    end.cancel()
        except TimeoutError as error:
            text = f"no answer within {TURN_S:g} s, and too many others take longer"
            raise DeliveryFailed(text) from error

    def _step_aside(self, limit: asyncio.Timeout) -> None:
        if self._kind.aside >= ASIDE_MAX:
            limit.reschedule(asyncio.get_running_loop().time())
            return
        self._aside = True
        self._kind.aside += 1
        self._kind.turns.release()

    def end(self) -> None:
        if self._aside:
            self._kind.aside -= 1
        else:
            self._kind.turns.release()


class Turns:
    def __init__(self, count_waiting: Callable[[int], None]) -> None:
        self._count_waiting = count_waiting
        self._first, self._again = _Kind(DELIVERIES_MAX), _Kind(RETRIES_MAX)
        self._targets: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )

    @contextlib.asynccontextmanager
    async def turn(self, target: str | None, attempt: int) -> AsyncIterator[Turn]:
        """A turn for one request to a target; a send without one waits for nobody."""
        kind = self._again if attempt else self._first
        if target is None:
            yield Turn(kind)
            return
        one = self._targets.setdefault(target, asyncio.Semaphore(DELIVERIES_PER_TARGET_MAX))
        self._count_waiting(1)
        try:
            await one.acquire()
            try:
                await kind.turns.acquire()
            except BaseException:
                one.release()
                raise
        finally:
            self._count_waiting(-1)
        turn = Turn(kind)
        try:
            yield turn
        finally:
            turn.end()
            one.release()
