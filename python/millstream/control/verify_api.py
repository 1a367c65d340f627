"""Verification over HTTP: `POST` starts one, `GET` tells how far it is or what it found, `DELETE` ends it.

Sits above the engine, which does the work in a thread of its own and calls back a few times per second. Invariants: one
verification at a time; the answer to `GET` is the newest one, until the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from starlette.routing import Route

from millstream._engine import EngineError
from millstream.control.background import call_on, now_ms
from millstream.control.http import ApiError, JsonResponse
from millstream.control.lanes import wait_as_asked

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from millstream._engine import Engine, VerifyReport
    from millstream.control.lanes import Lane

CLOSE_WAIT_S: Final = 0.25
_PATH: Final = "/-/api/verify"


@dataclass
class Verification:
    """One walk over everything. Written by its thread, read by the event loop."""

    started_ms: int
    state: Literal["running", "done", "failed", "cancelled"] = "running"
    bytes_done: int = 0
    bytes_total: int = 0
    ended_ms: int | None = None
    report: VerifyReport | None = None
    error: tuple[str, str] | None = None
    cancel_asked: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def on_progress(self, done: int, total: int) -> bool:
        self.bytes_done, self.bytes_total = done, total
        return not self.cancel_asked

    def end(self) -> None:
        self.ended_ms = now_ms()
        if self.report is not None:
            self.state = "done"
        else:
            self.state = "cancelled" if self.cancel_asked else "failed"
        self.ended.set()

    def document(self) -> dict[str, Any]:
        error = self.error
        return {
            "state": self.state,
            "bytes_done": self.bytes_done,
            "bytes_total": self.bytes_total,
            "started_at": self.started_ms,
            "ended_at": self.ended_ms,
            "report": self.report,
            "error": None if error is None else {"code": error[0], "detail": error[1]},
        }


_IDLE: Final[dict[str, Any]] = {
    "state": "idle",
    "bytes_done": 0,
    "bytes_total": 0,
    "started_at": None,
    "ended_at": None,
    "report": None,
    "error": None,
}


class VerifyRoutes:
    def __init__(self, engine: Engine, waits: Lane) -> None:
        self._engine = engine
        self._waits = waits
        self._newest: Verification | None = None
        self._closed = False

    def routes(self) -> list[Route]:
        return [
            Route(_PATH, self.start, methods=["POST"]),
            Route(_PATH, self.get, methods=["GET"]),
            Route(_PATH, self.cancel, methods=["DELETE"]),
        ]

    async def close(self) -> None:
        """Ends what runs; a read that hangs does not hold up the end of the server."""
        self._closed = True
        newest = self._newest
        if newest is not None and newest.state == "running":
            newest.cancel_asked = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(newest.ended.wait(), CLOSE_WAIT_S)

    async def start(self, request: Request) -> Response:
        """Begins to verify everything, while everything goes on."""
        del request
        if self._closed or (self._newest is not None and self._newest.state == "running"):
            raise ApiError(
                409,
                "verify_running",
                "a verification is running",
                f"wait for it: GET {_PATH} reports its progress, DELETE cancels it",
            )
        verification = Verification(now_ms())
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                verification.report = self._engine.verify(verification.on_progress)
            except EngineError as error:
                verification.error = (error.code, error.detail)
            except Exception as error:  # noqa: BLE001 - a thread has no caller; its document tells it
                verification.error = ("internal", repr(error))
            call_on(loop, verification.end)

        threading.Thread(target=work, name="millstream-verify").start()
        self._newest = verification
        return JsonResponse(verification.document(), 202, {"Location": _PATH})

    async def get(self, request: Request) -> Response:
        """How far the newest verification is, or what it found; `wait_ms` waits so long for its end."""
        newest = self._newest
        if newest is None:
            return JsonResponse(_IDLE)
        await wait_as_asked(request, self._waits, newest.ended)
        return JsonResponse(newest.document())

    async def cancel(self, request: Request) -> Response:
        """Cancels a running verification."""
        del request
        newest = self._newest
        if newest is None:
            return JsonResponse(_IDLE)
        newest.cancel_asked = True
        return JsonResponse(newest.document(), 202 if newest.state == "running" else 200)
