"""Listing and changing streams: `GET /-/api/streams`, `GET` and `PATCH /-/api/streams/{path}`.

Sits above the engine handle. Invariants: pages are ordered by path; `next` is there exactly when something may
follow, also behind a page that is short or empty; reserved streams of the control plane are never shown; every call
has a place, as long as it works, whether its client is still there or not.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from starlette.routing import Route

from millstream._engine import EngineError
from millstream.control.http import ApiError, JsonResponse, read_json_object
from millstream.control.lanes import Lane
from millstream.control.limits import (
    CLASS_CHANGES_MAX,
    LIST_LIMIT_DEFAULT,
    LIST_LIMIT_MAX,
    LISTINGS_MAX,
    PATH_CHARS_MAX,
)
from millstream.settings import DURABILITY_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from millstream._engine import Engine, StreamEntry

T = TypeVar("T")

# What a refused change means to a client, by the engine's code.
_CHANGE_REFUSED: Final = {
    "stream_not_found": (404, "PUT /v1/stream/{path} creates it"),
    "stream_gone": (410, "the stream was deleted; only its forks still use its data"),
    "durability_unknown": (400, "one of " + ", ".join(DURABILITY_CLASSES)),
    "durability_unavailable": (501, "this server offers ephemeral, memory, disk and fsync"),
    "storage_full": (507, "free disk space; writes resume by themselves"),
    "outcome_unknown": (503, "look at the stream before you try again"),
}


class StreamRoutes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(2, "millstream-list")
        # A change may wait for a checkpoint; listings do not wait behind it.
        self._changes = ThreadPoolExecutor(2, "millstream-change")
        self._changing = Lane(engine, CLASS_CHANGES_MAX)
        self._listing = Lane(engine, LISTINGS_MAX)

    def routes(self) -> list[Route]:
        return [
            Route("/-/api/streams", self.list_streams, methods=["GET"]),
            Route("/-/api/streams/{path:path}", self.get_stream, methods=["GET"]),
            Route("/-/api/streams/{path:path}", self.change_stream, methods=["PATCH"]),
        ]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._changes.shutdown(wait=False, cancel_futures=True)

    async def list_streams(self, request: Request) -> Response:
        """Streams in order of path, a page at a time."""
        query = request.query_params
        prefix, after = query.get("prefix", ""), query.get("after", "")
        limit = _limit(query.get("limit"))
        if is_reserved(prefix) or max(len(prefix), len(after)) > PATH_CHARS_MAX:
            return JsonResponse({"streams": [], "next": None})
        with self._listing.place():
            return await self._in_pool(lambda: self._page(prefix, after, limit))

    def _page(self, prefix: str, after: str, limit: int) -> Response:
        """A page as it is sent: made whole on a thread, which keeps the loop free, and nothing but its bytes is kept."""
        shown, following = self._engine.list(prefix, after, limit)
        return JsonResponse({"streams": shown, "next": following})

    async def get_stream(self, request: Request) -> Response:
        """One stream."""
        path: str = request.path_params["path"]
        if not _may_be_shown(path):
            raise _missing(path)
        with self._listing.place():
            return JsonResponse(await self._in_pool(lambda: self._entry(path)))

    async def change_stream(self, request: Request) -> Response:
        """Changes the durability class. Answers when the change itself is durable."""
        path: str = request.path_params["path"]
        body = await read_json_object(request)
        unknown = sorted(set(body) - {"durability"})
        durability = body.get("durability")
        if unknown or not isinstance(durability, str):
            raise ApiError(
                400,
                "bad_request",
                f"unknown field {unknown[0]!r}" if unknown else "durability must be a text",
                'send {"durability": "CLASS"}, one of ' + ", ".join(DURABILITY_CLASSES),
            )
        if durability not in DURABILITY_CLASSES:
            raise _refused("durability_unknown", f"{durability!r} is not a class")
        if not _may_be_shown(path):
            raise _missing(path)

        def change() -> StreamEntry:
            self._engine.set_durability(path, durability)
            return self._entry(path)

        try:
            with self._changing.place():
                changed = await asyncio.get_running_loop().run_in_executor(self._changes, change)
        except EngineError as error:
            raise _refused(error.code, error.detail) from error
        return JsonResponse(changed)

    def _entry(self, path: str) -> StreamEntry:
        found = self._engine.list_one(path)
        if found is None:
            raise _missing(path)
        return found

    async def _in_pool(self, work: Callable[[], T]) -> T:
        try:
            working = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError as error:  # the pool is closed
            detail = "the server is shutting down"
            raise ApiError(503, "shutting_down", detail, "try again shortly") from error
        try:
            return await working
        except EngineError as error:
            known = error.code in ("shutting_down", "storage_full")
            code = error.code if known else "control_unavailable"
            raise ApiError(503, code, error.detail, "try again shortly") from error


def _refused(code: str, detail: str) -> ApiError:
    status, hint = _CHANGE_REFUSED.get(code, (503, "try again shortly"))
    return ApiError(status, code, detail, hint)


def _missing(path: str) -> ApiError:
    return ApiError(
        404,
        "stream_not_found",
        f"there is no stream {path!r}",
        "PUT /v1/stream/{path} creates it; GET /-/api/streams lists what is there",
    )


def _may_be_shown(path: str) -> bool:
    return not is_reserved(path) and len(path) <= PATH_CHARS_MAX


def is_reserved(path: str) -> bool:
    return path.partition("/")[0] == "__ds"


def _limit(text: str | None) -> int:
    if text is None:
        return LIST_LIMIT_DEFAULT
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= LIST_LIMIT_MAX:
        raise ApiError(
            400,
            "bad_request",
            f"limit must be an integer from 1 to {LIST_LIMIT_MAX}",
            "leave it out for the default, and use `after` for the next page",
        )
    return int(text)
