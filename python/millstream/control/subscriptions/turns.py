"""Whose turn it is to be posted to, so that receivers that never answer keep nothing from the others.

Sits below `sender`; records on wake streams need no turn. A turn lasts `TURN_S`: what is not answered by then goes on
aside, where there is room for `ASIDE_MAX`, or has failed. So turns come round whatever receivers do. First attempts and
retries have turns of their own: who keeps failing only meets others of his kind. A target (host and port) has at most
`DELIVERIES_PER_TARGET_MAX` requests at once, those aside included. Who answered quickly the last time comes before
those who did not, but nobody waits for ever. All of it runs on the control loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import weakref
from typing import TYPE_CHECKING, Final, TypeVar

from millstream.control.limits import (
    ASIDE_MAX,
    DELIVERIES_MAX,
    DELIVERIES_PER_TARGET_MAX,
    RETRIES_MAX,
    SUBSCRIPTIONS_MAX,
    TURN_S,
)
from millstream.control.subscriptions.delivery import DeliveryFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

# Who took a whole turn the last time waits behind those who answer at once and come up to this much later: more than
# first attempts of all subscriptions take together, so that these come first, but not for ever.
HEAD_START_S: Final = 60.0


class Line:
    """Places, and who waits for one in the order of `due`: only a call to make, which a stop can leave unmade."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []

    def enter(self, due: float, go: Callable[[], None]) -> None:
        if self._free:
            self._free -= 1
            go()
        else:
            heapq.heappush(self._waiting, (due, next(self._numbers), go))

    def leave(self) -> None:
        if self._waiting:
            _, _, go = heapq.heappop(self._waiting)
            go()
        else:
            self._free += 1


class _Kind:
    """First attempts, or retries."""

    def __init__(self, turns: int) -> None:
        self.turns = Line(turns)
        self.aside = 0


class Turn:
    """A turn for one request to a target; without a target it is no turn, and nobody waits for it."""

    def __init__(self, kind: _Kind, target: Line | None, note: Callable[[float], None]) -> None:
        self._kind = kind
        self._target = target
        self._note = note
        self._aside = False

    async def post(self, work: Coroutine[None, None, T]) -> T:
        """Does the work; `DeliveryFailed` if the turn ends before it and there is no room aside."""
        loop = asyncio.get_running_loop()
        began, took = loop.time(), TURN_S
        try:
            async with asyncio.timeout(None) as limit:
                end = loop.call_later(TURN_S, self._step_aside, limit)
                try:
                    result = await work
                finally:
                    end.cancel()
            took = min(TURN_S, loop.time() - began)
            return result
        except TimeoutError as error:
            text = f"no answer within {TURN_S:g} s, and too many others take longer"
            raise DeliveryFailed(text) from error
        finally:
            self._note(took)

    def _step_aside(self, limit: asyncio.Timeout) -> None:
        if self._kind.aside >= ASIDE_MAX:
            limit.reschedule(asyncio.get_running_loop().time())
            return
        self._aside = True
        self._kind.aside += 1
        self._kind.turns.leave()

    def end(self) -> None:
        if self._target is None:
            return
        if self._aside:
            self._kind.aside -= 1
        else:
            self._kind.turns.leave()
        self._target.leave()


class Turns:
    def __init__(self, count_waiting: Callable[[int], None]) -> None:
        self._count_waiting = count_waiting
        self._first, self._again = _Kind(DELIVERIES_MAX), _Kind(RETRIES_MAX)
        self._targets: weakref.WeakValueDictionary[str, Line] = weakref.WeakValueDictionary()
        # By who it was for, the oldest first: how much of a turn the last attempt took. One that failed took all of it.
        self._took: dict[str, float] = {}

    def line_up(
        self, target: str | None, who: str, attempt: int, go: Callable[[Turn], None]
    ) -> None:
        """Has `go` called with a turn for one request to a target; a send without one waits for nobody."""
        kind = self._again if attempt else self._first
        one = None
        if target is not None:
            one = self._targets.setdefault(target, Line(DELIVERIES_PER_TARGET_MAX))
        turn = Turn(kind, one, lambda took: self._remember(who, took))
        if one is None:
            go(turn)
            return

        def begin() -> None:
            self._count_waiting(-1)
            go(turn)

        late = HEAD_START_S * self._took.get(who, TURN_S) / TURN_S
        due = asyncio.get_running_loop().time() + late
        self._count_waiting(1)
        one.enter(due, lambda: kind.turns.enter(due, begin))

    def _remember(self, who: str, took: float) -> None:
        self._took.pop(who, None)
        self._took[who] = took
        if len(self._took) > SUBSCRIPTIONS_MAX:  # of those that were deleted
            del self._took[next(iter(self._took))]
