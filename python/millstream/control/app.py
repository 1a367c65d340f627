"""The control application: everything the server answers in Python, as one Starlette application.

Sits behind the engine's listener, which forwards `/-/...` (but health, readiness and metrics) and
`/v1/stream/__ds/...` over a private socket, once it has refused foreign origins and host names. Invariants: every
answer carries the security headers; calls that wait are bounded by kind and leave room for short ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from millstream import allowlists
from millstream.control import openapi
from millstream.control.backups_api import BackupRoutes
from millstream.control.http import (
    ApiError,
    JsonResponse,
    base_url,
    is_protocol,
    read_whole_body,
    render_error,
    render_failure,
)
from millstream.control.lanes import Crowd, Lane
from millstream.control.limits import WAITING_CALLS_MAX
from millstream.control.streams_api import StreamRoutes
from millstream.control.subscriptions.manager import SubscriptionManager
from millstream.control.subscriptions.routes import SubscriptionRoutes
from millstream.control.verify_api import VerifyRoutes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from millstream._engine import Engine

_LANDING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Millstream</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:3em auto;padding:0 1em}
code{background:#eee;padding:0 .25em}</style></head><body>
<h1>Millstream</h1>
<p>This is a durable stream server. There is no console yet; this is what it answers:</p>
<ul>
<li><code>/v1/stream/{path}</code> streams: PUT creates, POST appends, GET reads and follows</li>
<li><a href="/-/api/streams"><code>/-/api/streams</code></a> the list of streams</li>
<li><code>/v1/stream/__ds/subscriptions/{id}</code> subscriptions</li>
<li><a href="/-/health"><code>/-/health</code></a>, <a href="/-/ready"><code>/-/ready</code></a>,
<a href="/-/metrics"><code>/-/metrics</code></a> health, readiness, metrics</li>
<li><a href="/-/openapi.json"><code>/-/openapi.json</code></a> the control interface in full</li>
</ul></body></html>
"""


class AppSettings(Protocol):
    """The settings that the control application looks at."""

    @property
    def host(self) -> str: ...
    @property
    def public_url(self) -> str: ...
    @property
    def data_dir(self) -> str: ...
    @property
    def backup_dir(self) -> str: ...
    @property
    def webhook_allow(self) -> str: ...


def create_app(
    engine: Engine, settings: AppSettings, progress: Callable[[], None] = lambda: None
) -> ASGIApp:
    """The application for one engine; its state is loaded when the server starts it, and `progress` called at each step."""
    manager: SubscriptionManager | None = None
    streams = StreamRoutes(engine)
    waits = Lane(engine, WAITING_CALLS_MAX)
    backups = BackupRoutes(engine, settings, waits)
    verification = VerifyRoutes(engine, waits)
    allowed = allowlists.places(settings.webhook_allow)

    def base_url_of(request: Request) -> str:
        return base_url(request, settings.host, settings.public_url)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal manager
        manager = SubscriptionManager(engine, allowed, progress)
        await manager.start()
        app.router.routes.extend(SubscriptionRoutes(manager, base_url_of).routes())
        try:
            yield
        finally:
            streams.close()
            await backups.close()
            await verification.close()
            await manager.stop()

    app = Starlette(
        routes=[
            Route("/-/", _landing, methods=["GET"]),
            Route("/-/openapi.json", _openapi, methods=["GET"]),
            *streams.routes(),
            *backups.routes(),
            *verification.routes(),
        ],
        exception_handlers={HTTPException: render_error, Exception: render_failure},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return Guard(Crowd(app, engine))


async def _landing(request: Request) -> Response:
    """What is where."""
    del request
    return HTMLResponse(_LANDING)


async def _openapi(request: Request) -> Response:
    """This description."""
    return JsonResponse(openapi.document(request.app.routes))


class Guard:
    """Whole bodies within their bound, security headers on every answer, and an answer for who is cut off by a stop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        protocol = is_protocol(request)
        started = False

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["X-Content-Type-Options"] = "nosniff"
                headers.setdefault("Cache-Control", "no-store")
                if not protocol:  # CORS for the stream root is the listener's business
                    headers["Cross-Origin-Resource-Policy"] = "same-origin"
                    headers["Content-Security-Policy"] = (
                        "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
                    )
            await send(message)

        try:
            whole = await read_whole_body(receive)
        except ApiError as refusal:
            response = await render_error(request, refusal)
            await response(scope, receive, guarded_send)
            return
        if whole is None:
            return
        try:
            await self._app(scope, whole, guarded_send)
        except asyncio.CancelledError:
            if started:
                raise
            response = await render_error(request, _cut_off(request))
            await response(scope, receive, guarded_send)


def _cut_off(request: Request) -> ApiError:
    """A stop promises that nothing of what it refuses was done: true of what only asks."""
    code, hint = "shutting_down", "try again when the server is back"
    if request.method not in ("GET", "HEAD"):
        code, hint = "outcome_unknown", "look before you try again"
    if is_protocol(request):
        code = "UNAVAILABLE"
    return ApiError(503, code, "the server stopped while the request was in progress", hint)
