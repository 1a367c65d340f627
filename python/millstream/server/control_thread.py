"""The thread that runs the control application: uvicorn on a socket that is already listening.

Sits below `lifecycle`. Invariants: `start` returns only when the application has loaded its state, or raises; it waits for as
long as that goes on. `stop` returns within its timeout and never waits for clients; the thread is a daemon and cannot hold
up an exit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

import uvicorn

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

START_TIMEOUT_S: Final = 120.0
DRAIN_S: Final = 0.15

_uvicorn_log: Final = logging.getLogger("uvicorn.error")


class ControlFailed(Exception):  # noqa: N818
    """The control application did not start; the text says why."""


class Progress:
    """How far the application has come with loading: called at each step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> None:
        self.steps += 1


class ControlThread:
    def __init__(
        self, app: ASGIApp, listener: socket.socket, progress: Progress | None = None
    ) -> None:
        self._app = app
        self._progress = progress or Progress()
        self._listener = listener
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._on_end: list[Callable[[], None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="millstream-control", daemon=True)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._lifespan_watched,
                interface="asgi3",
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                # Seconds for requests in flight; the type says int, a fraction works as well.
                timeout_graceful_shutdown=DRAIN_S,  # type: ignore[arg-type]
            )
        )
        self.failure: str | None = None

    def start(self) -> None:
        self._thread.start()
        steps = 0
        while not self._ready.wait(START_TIMEOUT_S):
            if self._progress.steps == steps:
                raise ControlFailed(
                    f"the control plane got no further with loading for {START_TIMEOUT_S:g} s"
                )
            steps = self._progress.steps
        if self.failure is not None:
            raise ControlFailed(self.failure)

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        _uvicorn_log.setLevel(logging.CRITICAL)  # that requests are cut off is meant
        self._server.should_exit = True
        self._ended.wait(timeout_s)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Has `call` made when the thread ends, or now if it has."""
        self._on_end.append(call)
        if self._ended.is_set():
            call()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, and it ends the server
            self.failure = self.failure or f"the control plane failed: {error}"
        finally:
            if not self._stopping and self.failure is None:
                self.failure = "the control plane stopped unexpectedly"
            self._ended.set()
            self._ready.set()
            for call in list(self._on_end):
                call()

    async def _lifespan_watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on; learns from the lifespan messages whether the application has loaded."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def watched_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                message = {**message, "message": ""}  # the trace; `failure` has the sentence
            if message["type"] == "lifespan.startup.complete":
                _uvicorn_log.setLevel(logging.WARNING)
                self._ready.set()
            await send(message)

        # While it loads, a failure is told once, in one line, by whoever called `start`.
        _uvicorn_log.setLevel(logging.CRITICAL)
        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            self.failure = f"the control plane did not load: {error}"
            raise
