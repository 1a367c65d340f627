"""Places for calls that wait: each kind of them has a bounded number, so that short calls always find room.

Used by the handlers whose calls wait for something slow (the end of a backup, a checkpoint, a turn to change
subscriptions). Whatever their clients do, the lanes together hold fewer calls than one network thread forwards
(`PROXY_CONCURRENT_MAX` of the engine); the rest is for calls that wait for nothing. A call that finds no place is
refused at once. All of it runs on the control loop. `Crowd` bounds all calls together: a client that leaves frees its
slot in the engine, while its call goes on here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from millstream.control.http import ApiError, is_protocol, render_error
from millstream.control.limits import CONCURRENT_CALLS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from millstream._engine import Engine

WAIT_MS_MAX: Final = 20_000


class Lane:
    def __init__(self, engine: Engine, places: int, code: str = "server_busy") -> None:
        self._engine = engine
        self._places = places
        self._code = code
        self._taken = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One place until the block ends; a refusal if there is none."""
        if self._taken >= self._places:
            self._engine.count("control_crowded", 1)
            raise ApiError(
                503,
                self._code,
                f"{self._places} calls of this kind are waiting already",
                "try again shortly",
            )
        self._taken += 1
        self._engine.count("control_waiting", 1)
        try:
            yield
        finally:
            self._taken -= 1
            self._engine.count("control_waiting", -1)


class Crowd:
    """The application for so many calls at once; the next is refused in the form of its place."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._app = app
        self._engine = engine
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._calls >= CONCURRENT_CALLS_MAX:
            self._engine.count("control_crowded", 1)
            request = Request(scope)
            code = "UNAVAILABLE" if is_protocol(request) else "server_busy"
            detail = f"{CONCURRENT_CALLS_MAX} calls are being answered already"
            refusal = ApiError(503, code, detail, "try again shortly")
            await (await render_error(request, refusal))(scope, receive, send)
            return
        self._calls += 1
        self._engine.count("control_calls", 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._calls -= 1
            self._engine.count("control_calls", -1)


async def wait_as_asked(request: Request, lane: Lane, ended: asyncio.Event) -> None:
    """Waits as long as the request's `wait_ms` says; less if it has ended, or the client has left.

    Time being up is no fault: the answer says that it still runs.
    """
    wait_ms = _wait_ms(request.query_params.get("wait_ms"))
    if not wait_ms or ended.is_set():
        return
    with lane.place():
        loop = asyncio.get_running_loop()
        events = {loop.create_task(ended.wait()), loop.create_task(_left(request))}
        try:
            await asyncio.wait(events, timeout=wait_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()


async def _left(request: Request) -> bool:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return True


def _wait_ms(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()) or int(text[:9]) > WAIT_MS_MAX:
        raise ApiError(400, "bad_request", f"wait_ms must be an integer up to {WAIT_MS_MAX}")
    return int(text[:9])
