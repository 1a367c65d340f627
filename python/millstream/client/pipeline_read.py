"""`/v1/tails` and `/v1/read` without I/O: where streams end, and ranges of many streams as Arrow.

Where it sits: run by `aio/reads.py` and `sync/reads.py`; the data are what `read_arrow` and the Spark connector work with.
Arrow bytes are handed out as they came: this module knows nothing of their form.

Invariants:
- I-PRR-1  Both calls change nothing, so they are repeated: until they are answered, refused for good, or
           the patience is over.
- I-PRR-2  A window is received into one buffer of its size.
- I-PRR-3  An answer that is not what the contract says is `ProtocolError`, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from millstream import errors
from millstream.client import wire
from millstream.client.http import Request, Response
from millstream.client.steps import Policy
from millstream.types import Gap, StreamInfo

if TYPE_CHECKING:
    from millstream.client.steps import Allocate, Operations, Steps

T = TypeVar("T")
Bytes: TypeAlias = bytes | bytearray
TAILS_PATH: Final = "/v1/tails"
READ_PATH: Final = "/v1/read"
WAIT_MS_MAX: Final = 60_000
NAMES_PER_REQUEST: Final = 5_000
WINDOW_BYTES_MAX: Final = 64 * 1024 * 1024
ABOUT_OFFSETS: Final = frozenset({"offset_invalid", "offset_beyond_tail", "bad_request"})
JSON_HEADERS: Final = (("Content-Type", "application/json"),)


@dataclass(frozen=True, slots=True)
class FoundPlace:
    """The answer to one entry of `at`: a place, or why there is none."""

    offset: str
    number: int
    time_ms: int | None = None
    gap: Gap | None = None
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
    next: str | None = None
    """Of a page: the name behind which the next one begins."""


@dataclass(frozen=True, slots=True)
class WindowGap:
    """A gap inside range number `index` of the request."""

    index: int
    gap: Gap


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


def tails_steps(
    operations: Operations,
    policy: Policy,
    *,
    streams: Sequence[str | Mapping[str, Any]] | None = None,
    pattern: str | None = None,
    cursor: str | None = None,
    wait_ms: int = 0,
    after: str | None = None,
) -> Steps[Tails]:
    """Where streams end; with `cursor` only what changed, waiting up to `wait_ms` for it; with `after` a page of a pattern."""
    body: dict[str, Any] = (
        {"pattern": pattern} if pattern is not None else {"streams": streams or []}
    )
    if after is not None:
        body["after"] = after
    if cursor is not None:
        body["cursor"] = cursor
        body["wait_ms"] = min(wait_ms, WAIT_MS_MAX)
    response = yield from _asked(operations, policy, TAILS_PATH, body, extra_seconds=wait_ms / 1000)
    return parse_tails(wire.json_object(response.body, TAILS_PATH))


def window_steps(
    operations: Operations,
    policy: Policy,
    ranges: Sequence[Mapping[str, Any]],
    *,
    columns: Sequence[str],
    key_path: str | None,
    max_bytes: int,
    allocate: Allocate,
) -> Steps[Window]:
    """One window of the ranges, in order; `allocate` makes the buffer that it is received into."""
    body: dict[str, Any] = {
        "ranges": list(ranges),
        "columns": list(columns),
        "max_bytes": min(max_bytes, WINDOW_BYTES_MAX),
    }
    if key_path:
        body["key_path"] = key_path
    response = yield from _asked(operations, policy, READ_PATH, body, allocate=allocate)
    return Window(
        data=response.body,
        gaps=parse_gaps(response.headers.get("millstream-gaps")),
        next=parse_next(response.headers.get("millstream-next")),
    )


def info_steps(operations: Operations, path: str) -> Steps[StreamInfo]:
    """What the server says about a stream, with its records and bytes if it can count them."""
    info = yield from operations.info(path)
    if info.incarnation is None:
        return info
    policy = Policy(attempts=operations.retry.attempts)
    try:
        tails = yield from tails_steps(operations, policy, streams=[path])
    except errors.NotSupported:
        return info
    for stream in tails.streams:
        if stream.incarnation == info.incarnation:
            count = stream.tail_number - stream.first_number
            return replace(info, records=count, bytes=stream.bytes)
    return info


def _asked(
    operations: Operations,
    policy: Policy,
    path: str,
    body: Mapping[str, Any],
    *,
    extra_seconds: float = 0.0,
    allocate: Allocate | None = None,
) -> Steps[Response]:
    data = json.dumps(body, separators=(",", ":")).encode()
    request = Request("POST", operations.endpoint.prefix + path, JSON_HEADERS, data)
    try:
        return (
            yield from operations.repeat(
                request, "", policy, extra_seconds=extra_seconds, allocate=allocate
            )
        )
    except errors.ServerError as error:
        if error.code == "not_found":
            raise operations.not_extended(f"`{path}`") from None
        raise


# ---------------------------------------------------------------------------- answers


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
            next=document.get("next"),
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
        said = f"{error['code']}: {error.get('detail') or ''}".rstrip(": ")
        if error["code"] not in ABOUT_OFFSETS:
            # Nothing about the offset: whoever took it for that would skip records that are there.
            raise errors.Unavailable(said, code=error["code"], status=503)
        return FoundPlace("", 0, error=said)
    gap = row.get("gap")
    return FoundPlace(
        offset=row["offset"],
        number=row["number"],
        time_ms=row.get("time_ms"),
        gap=_gap(gap) if gap else None,
    )


def _gap(row: Mapping[str, Any]) -> Gap:
    return Gap(row["from"], row["to"], row["reason"], row["certain"] not in (False, 0))


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
