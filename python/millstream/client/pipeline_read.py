"""`/v1/tails` and `/v1/read`: where streams end, and ranges of many streams as Arrow.

Where it sits: beside `sync/client.py`, on its connections; used by the Spark connector. Arrow bytes are
handed out as they came: this module knows nothing of their form.

Invariants:
- I-PRD-1  Both calls change nothing, so they are repeated: until they are answered, refused for good, or
           `patience_seconds` have passed since the first failure.
- I-PRD-2  A window is received into one buffer of its size: its bytes are copied once.
- I-PRD-3  An answer that is not what the contract says is `ProtocolError`, never a guess.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from millstream import errors
from millstream.client.http import Head, Request, Response, TransportFailure
from millstream.client.problem import error_from_response
from millstream.client.steps import may_repeat

if TYPE_CHECKING:
    from millstream.client.sync.client import Client
    from millstream.client.sync.transport import Allocate, Connection

T = TypeVar("T")
Bytes: TypeAlias = bytes | bytearray
TAILS_PATH: Final = "/v1/tails"
READ_PATH: Final = "/v1/read"
WAIT_MS_MAX: Final = 60_000
WINDOW_BYTES_MAX: Final = 64 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 1024 * 1024 * 1024
JSON_HEADERS: Final = (("Content-Type", "application/json"),)


@dataclass(frozen=True, slots=True)
class PipelineGap:
    """A range that readers cannot get."""

    start: str
    end: str
    reason: str
    certain: bool


@dataclass(frozen=True, slots=True)
class FoundPlace:
    """The answer to one entry of `at`: a place, or why there is none."""

    offset: str
    number: int
    time_ms: int | None = None
    gap: PipelineGap | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StreamTail:
    """What `/v1/tails` says about one stream."""

    name: str
    incarnation: str
    durability: str
    closed: bool
    first_offset: str
    first_number: int
    tail_offset: str
    tail_number: int
    bytes: int
    time_ms: int | None
    epochs: int
    at: tuple[FoundPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Where a removed stream ended, as far as the server remembers it."""

    name: str
    incarnation: str
    tail_offset: str
    tail_number: int
    epoch: int
    """Epoch of the newest record; that of the tail may have begun behind it."""
    time_ms: int


@dataclass(frozen=True, slots=True)
class Tails:
    cursor: str
    complete: bool
    now_ms: int
    streams: tuple[StreamTail, ...]
    missing: tuple[str, ...]
    removed: tuple[StreamEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowGap:
    """A gap inside range number `index` of the request."""

    index: int
    gap: PipelineGap


@dataclass(frozen=True, slots=True)
class Next:
    """Where the next window begins: range number `index`, from this place."""

    index: int
    offset: str
    number: int


@dataclass(frozen=True, slots=True)
class Window:
    """One answer of `/v1/read`: an Arrow IPC stream, and what is left."""

    data: Bytes
    gaps: tuple[WindowGap, ...]
    next: Next | None


class PipelineReads:
    """The reading calls of the pipeline over one client. `cancel` ends waits from another thread."""

    def __init__(self, client: Client, patience_seconds: float) -> None:
        self._client = client
        self._patience_seconds = patience_seconds
        self._cancelled = threading.Event()
        self._busy: Connection | None = None

    def tails(
        self,
        *,
        streams: Sequence[str | Mapping[str, Any]] | None = None,
        pattern: str | None = None,
        cursor: str | None = None,
        wait_ms: int = 0,
    ) -> Tails:
        """Where streams end; with `cursor` only what changed, waiting up to `wait_ms` for it."""
        body: dict[str, Any] = (
            {"pattern": pattern} if pattern is not None else {"streams": streams or []}
        )
        if cursor is not None:
            body["cursor"] = cursor
            body["wait_ms"] = min(wait_ms, WAIT_MS_MAX)
        _, answer = self._call(TAILS_PATH, body, wait_ms / 1000)
        return parse_tails(json_body(answer))

    def read(
        self,
        ranges: Sequence[Mapping[str, Any]],
        *,
        columns: Sequence[str],
        key_path: str | None = None,
        max_bytes: int,
        allocate: Allocate = bytearray,
    ) -> Window:
        """One window of the ranges, in order; `allocate` makes the buffer that it is received into."""
        body: dict[str, Any] = {
            "ranges": list(ranges),
            "columns": list(columns),
            "max_bytes": min(max_bytes, WINDOW_BYTES_MAX),
        }
        if key_path:
            body["key_path"] = key_path
        headers, answer = self._call(READ_PATH, body, 0.0, allocate)
        return Window(
            data=answer,
            gaps=parse_gaps(headers.get("millstream-gaps")),
            next=parse_next(headers.get("millstream-next")),
        )

    def cancel(self) -> None:
        self._cancelled.set()
        connection = self._busy
        if connection is not None:
            connection.interrupt()

    # ------------------------------------------------------------------ one request

    def _call(
        self,
        path: str,
        body: Mapping[str, Any],
        extra_seconds: float,
        allocate: Allocate = bytearray,
    ) -> tuple[Mapping[str, str], Bytes]:
        operations = self._client._operations
        data = json.dumps(body, separators=(",", ":")).encode()
        request = Request("POST", operations.endpoint.prefix + path, JSON_HEADERS, data)
        timeout_seconds = operations.timeout_seconds + extra_seconds
        attempt = 0
        failing_since: float | None = None
        while True:
            attempt += 1
            began = time.monotonic()
            try:
                head, answer = self._exchange(request, timeout_seconds, allocate)
            except TransportFailure as failure:
                error: errors.MillstreamError = operations.failure_error(
                    failure, may_be_applied=False
                )
            else:
                if head.status == 200:
                    return head.headers, answer
                refusal = Response(head.status, head.headers, bytes(answer))
                error = error_from_response(request, refusal, "")
                if error.code == "not_found":
                    raise operations.not_extended(f"`{path}`")
                if not may_repeat(error, safe=True):
                    raise error
            if self._cancelled.is_set():
                raise errors.ClientClosed("the read was stopped")
            failing_since = began if failing_since is None else failing_since
            after = error.retry_after_seconds if isinstance(error, errors.ServerError) else None
            wait = operations.retry.wait_seconds(attempt, after)
            if time.monotonic() + wait - failing_since > self._patience_seconds:
                raise error
            if self._cancelled.wait(wait):
                raise errors.ClientClosed("the read was stopped")

    def _exchange(
        self, request: Request, timeout_seconds: float, allocate: Allocate
    ) -> tuple[Head, Bytes]:
        pool = self._client._pool
        connection = self._busy = pool.acquire(timeout_seconds)
        keep = False
        try:
            head = connection.start(request, pool.common, timeout_seconds)
            body = connection.read_body_once(timeout_seconds, ANSWER_BYTES_MAX, allocate)
            keep = head.keep
            return head, body
        finally:
            self._busy = None
            pool.release(connection, keep=keep)


# ---------------------------------------------------------------------------- answers


def json_body(data: Bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise errors.ProtocolError(f"the server's answer is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise errors.ProtocolError("the server's answer is not a JSON object")
    return document


def parsed(what: str, function: Callable[[], T]) -> T:
    """What a careless access to an answer must become when the answer is not as agreed."""
    try:
        return function()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.ProtocolError(
            f"the server's {what} is not in the expected form: {error!r}",
            hint="is it a Millstream server of this version?",
        ) from None


def parse_tails(document: Mapping[str, Any]) -> Tails:
    return parsed(
        "answer to /v1/tails",
        lambda: Tails(
            cursor=str(document["cursor"]),
            complete=bool(document["complete"]),
            now_ms=int(document["now_ms"]),
            streams=tuple(_stream(row) for row in document["streams"]),
            missing=tuple(str(name) for name in document.get("missing", ())),
            removed=tuple(_end(row) for row in document.get("removed", ())),
        ),
    )


def _stream(row: Mapping[str, Any]) -> StreamTail:
    first, tail = row["first"], row["tail"]
    return StreamTail(
        name=row["name"],
        incarnation=row["incarnation"],
        durability=row["class"],
        closed=row["closed"],
        first_offset=first["offset"],
        first_number=first["number"],
        tail_offset=tail["offset"],
        tail_number=tail["number"],
        bytes=row["bytes"],
        time_ms=row.get("time_ms"),
        epochs=row["epochs"],
        at=tuple(_found(found) for found in row.get("at") or ()),
    )


def _end(row: Mapping[str, Any]) -> StreamEnd:
    tail = row["tail"]
    return StreamEnd(
        name=row["name"],
        incarnation=row["incarnation"],
        tail_offset=tail["offset"],
        tail_number=tail["number"],
        epoch=row["epoch"],
        time_ms=row["time_ms"],
    )


def _found(row: Mapping[str, Any]) -> FoundPlace:
    if (error := row.get("error")) is not None:
        return FoundPlace("", 0, error=f"{error['code']}: {error.get('detail') or ''}".rstrip(": "))
    gap = row.get("gap")
    return FoundPlace(
        offset=row["offset"],
        number=row["number"],
        time_ms=row.get("time_ms"),
        gap=_gap(gap) if gap else None,
    )


def _gap(row: Mapping[str, Any]) -> PipelineGap:
    return PipelineGap(row["from"], row["to"], row["reason"], row["certain"] not in (False, 0))


def parse_gaps(header: str | None) -> tuple[WindowGap, ...]:
    if not header:
        return ()
    return parsed(
        "header Millstream-Gaps",
        lambda: tuple(WindowGap(int(row["range"]), _gap(row)) for row in json.loads(header)),
    )


def parse_next(header: str | None) -> Next | None:
    if not header:
        return None

    def fields() -> Next:
        pairs = dict(part.strip().split("=", 1) for part in header.split(";"))
        return Next(int(pairs["range"]), pairs["offset"], int(pairs["number"]))

    return parsed("header Millstream-Next", fields)
