"""The addresses of webhook receivers' names: so many lookups at once, in turns.

Sits below `sender`; `delivery` asks it. The machine's resolver cannot be cancelled: a lookup that nobody waits for any
more goes on in its thread, and counts until that ends. So that names that are never answered do not take every turn,
some are kept from names that nobody knows, and more from those that were slow the last time. Those of one kind have
their turns in order. All of it but the asking runs on the control loop.
Invariant: who waits for a turn or an answer is told within `RESOLVE_TIMEOUT_S`, in whatever state the resolver is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import deque
from typing import TYPE_CHECKING

from millstream.control.background import aside
from millstream.control.limits import (
    LOOKUPS_KEPT,
    LOOKUPS_MAX,
    RESOLVE_TIMEOUT_S,
    SUBSCRIPTIONS_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Lookups:
    def __init__(self, count_running: Callable[[int], None]) -> None:
        self._count_running = count_running
        self._running = 0
        # By rank: names that were answered in time, those that nobody knows, those that were not.
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = (deque(), deque(), deque())
        # By name, the oldest first: the rank that its last lookup has earned it.
        self._ranks: dict[str, int] = {}

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a name; `OSError` if there are none in time."""
        if _is_address(host):
            return [host]
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                await self._turn(self._waiting[self._ranks.get(host, 1)])
                return await self._look_up(host, port)
        except TimeoutError as error:
            detail = f"{host!r} was not looked up within {RESOLVE_TIMEOUT_S:g} s"
            raise OSError(detail) from error

    async def _turn(self, line: deque[asyncio.Future[None]]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                line.remove(turn)
            if not turn.cancelled():  # it came in the same moment
                self._end()
            raise

    async def _look_up(self, host: str, port: int) -> list[str]:
        try:
            looking = aside(lambda: _addresses(host, port), "millstream-resolve")
        except RuntimeError as error:  # no thread is to be had
            self._end()
            raise OSError(str(error)) from error
        looking.add_done_callback(lambda _: self._end())
        try:
            return await asyncio.shield(looking)
        finally:
            self._ranks.pop(host, None)
            self._ranks[host] = 0 if looking.done() else 2
            if len(self._ranks) > SUBSCRIPTIONS_MAX:  # of those that were deleted
                del self._ranks[next(iter(self._ranks))]

    def _begin(self) -> None:
        for rank, line in enumerate(self._waiting):
            while line and self._running < LOOKUPS_MAX - rank * LOOKUPS_KEPT:
                turn = line.popleft()
                if not turn.done():
                    self._running += 1
                    self._count_running(1)
                    turn.set_result(None)

    def _end(self) -> None:
        self._running -= 1
        self._count_running(-1)
        self._begin()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(host: str, port: int) -> list[str]:
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} cannot be resolved: {error}") from error
    return list(dict.fromkeys(str(row[4][0]) for row in rows))
