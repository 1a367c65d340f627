"""The Durable Streams protocol without I/O: calls to requests, responses to values.

Where it sits: between the operations (`steps`, `follow`, `producer`) and HTTP (`http`). Both
clients, sync and async, use exactly this code.

Invariants:
- I-WIRE-1  Header and query names of the protocol are written here and nowhere else.
- I-WIRE-2  A JSON record is always sent inside an array, so that a record which is itself an array
            stays one record (the server flattens exactly one level).
- I-WIRE-3  The text of a JSON record comes back as it was sent, not re-serialised.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from millstream.client.http import Request, Response
from millstream.errors import InvalidArgument, ProtocolError
from millstream.settings import DEFAULT_URL
from millstream.types import Gap, Record, StreamInfo, is_json_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

STREAM_ROOT: Final = "/v1/stream/"
LIST_PATH: Final = "/-/api/streams"
START: Final = "-1"
NOW: Final = "now"
TOKEN_CHARACTERS_MAX: Final = 16 * 1024
# What RFC 3986 allows raw in a path; servers that key on the raw path see it as typed.
_PATH_SAFE: Final = "/!$&'()*+,;=:@~-._"
_JSON_SPACE: Final = " \t\r\n"
_decode_json = json.JSONDecoder().raw_decode
_encode_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=True
).encode


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is: taken apart once from its URL."""

    url: str
    tls: bool
    host: str
    port: int
    prefix: str
    """Path below which the server is mounted, without a trailing slash; usually empty."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host if self.port == default else f"{host}:{self.port}"


def default_url() -> str:
    return os.environ.get("MILLSTREAM_URL") or DEFAULT_URL


def check_token(token: str, where: str) -> str:
    """A token that a header can carry; the text of a refusal never shows it."""
    if (
        not token
        or len(token) > TOKEN_CHARACTERS_MAX
        or not token.isascii()
        or not token.isprintable()
    ):
        raise InvalidArgument(
            f"{where} does not hold a token",
            hint=f"one line of at most {TOKEN_CHARACTERS_MAX} printable characters",
        )
    return token


def with_token(headers: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The headers with the token of the caller, else of MILLSTREAM_TOKEN unless they authorize already."""
    where = "`token`"
    if token is None and not any(name.lower() == "authorization" for name in headers):
        token, where = os.environ.get("MILLSTREAM_TOKEN", "").strip(), "MILLSTREAM_TOKEN"
    if not token:
        return dict(headers)
    kept = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    return {**kept, "Authorization": f"Bearer {check_token(token, where)}"}


def parse_url(url: str) -> Endpoint:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"bad server URL `{url}`: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"bad server URL `{url}`", hint="write it like http://127.0.0.1:4437")
    if parts.query or parts.fragment or parts.username is not None:
        raise InvalidArgument(f"server URL `{url}` must be only scheme, host, port and path")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/")
    if prefix.endswith("/v1/stream"):
        prefix = prefix.removesuffix("/v1/stream")
    return Endpoint(
        url=f"{parts.scheme}://{parts.netloc}{prefix}",
        tls=tls,
        host=parts.hostname,
        port=port if port is not None else (443 if tls else 80),
        prefix=quote(prefix, safe=_PATH_SAFE + "%"),
    )


def check_path(path: str) -> str:
    """Normalise and check a stream path: `/chat/1` and `chat/1` are the same stream."""
    path = path.removeprefix("/")
    if not path:
        raise InvalidArgument("the stream path is empty", hint="name it like `shop/orders`")
    if "\0" in path:
        raise InvalidArgument("the stream path must not contain a NUL character")
    if any(segment in (".", "..") for segment in path.split("/")):
        raise InvalidArgument(f"stream path `{path}` must not contain `.` or `..` segments")
    return path


def stream_target(endpoint: Endpoint, path: str, query: Sequence[tuple[str, str]] = ()) -> str:
    target = endpoint.prefix + STREAM_ROOT + quote(path, safe=_PATH_SAFE)
    return target + encode_query(query)


def encode_query(query: Sequence[tuple[str, str]]) -> str:
    if not query:
        return ""
    return "?" + "&".join(f"{name}={quote(value, safe='-._~')}" for name, value in query)


# ---------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class CreateOptions:
    content_type: str | None = None
    ttl_seconds: int | None = None
    expires_at: datetime | str | None = None
    durability: str | None = None
    closed: bool = False
    forked_from: str | None = None
    fork_offset: str | None = None
    fork_sub_offset: int | None = None
    body: bytes = b""


def create_request(endpoint: Endpoint, path: str, options: CreateOptions) -> Request:
    if options.ttl_seconds is not None and options.expires_at is not None:
        raise InvalidArgument("give either `ttl_seconds` or `expires_at`, not both")
    if options.ttl_seconds is not None and options.ttl_seconds < 0:
        raise InvalidArgument("`ttl_seconds` must not be negative")
    headers: list[tuple[str, str]] = []
    if options.content_type is not None:
        headers.append(("Content-Type", options.content_type))
    if options.ttl_seconds is not None:
        headers.append(("Stream-TTL", str(options.ttl_seconds)))
    if options.expires_at is not None:
        headers.append(("Stream-Expires-At", time_text(options.expires_at)))
    if options.durability is not None:
        headers.append(("Stream-Durability", options.durability))
    if options.closed:
        headers.append(("Stream-Closed", "true"))
    if options.forked_from is not None:
        source = stream_target(endpoint, check_path(options.forked_from))
        headers.append(("Stream-Forked-From", source))
    if options.fork_offset is not None:
        headers.append(("Stream-Fork-Offset", options.fork_offset))
    if options.fork_sub_offset is not None:
        headers.append(("Stream-Fork-Sub-Offset", str(options.fork_sub_offset)))
    return Request("PUT", stream_target(endpoint, path), tuple(headers), options.body)


@dataclass(frozen=True, slots=True)
class AppendOptions:
    if_match: str | None = None
    seq: str | None = None
    close: bool = False
    producer: tuple[str, int, int] | None = None
    """Producer id, epoch, sequence number."""


def append_request(
    endpoint: Endpoint, path: str, content_type: str, body: bytes, options: AppendOptions
) -> Request:
    headers: list[tuple[str, str]] = []
    if body:
        headers.append(("Content-Type", content_type))
    if options.if_match is not None:
        headers.append(("If-Match", f'"{options.if_match}"'))
    if options.seq is not None:
        headers.append(("Stream-Seq", options.seq))
    if options.close:
        headers.append(("Stream-Closed", "true"))
    if options.producer is not None:
        producer_id, epoch, sequence = options.producer
        headers.append(("Producer-Id", producer_id))
        headers.append(("Producer-Epoch", str(epoch)))
        headers.append(("Producer-Seq", str(sequence)))
    return Request("POST", stream_target(endpoint, path), tuple(headers), body)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a read begins; exactly one of the three, or nothing for the start of the stream."""

    offset: str | None = None
    since: datetime | int | str | None = None
    tail: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.offset, self.since, self.tail) if value is not None]
        if len(given) > 1:
            raise InvalidArgument("give only one of `offset`, `since` and `tail`")
        if self.offset == "":
            raise InvalidArgument("`offset` is empty", hint="use `-1` for the start")
        if self.tail is not None and self.tail < 0:
            raise InvalidArgument("`tail` must not be negative")

    @property
    def extended(self) -> bool:
        """True if the protocol alone cannot express it: the server must be Millstream."""
        return self.since is not None or self.tail is not None

    def query(self) -> list[tuple[str, str]]:
        if self.since is not None:
            return [("since", time_text(self.since))]
        if self.tail is not None:
            return [("tail", str(self.tail))]
        return [("offset", self.offset or START)]


def time_text(value: datetime | int | str) -> str:
    """RFC 3339 for a datetime (a naive one is local time); numbers and texts as they are."""
    if isinstance(value, datetime):
        value = value.astimezone() if value.tzinfo is None else value
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return str(value)


def time_ms(value: datetime | int | str) -> int:
    """The same as milliseconds since 1970."""
    if isinstance(value, str):
        try:
            value = int(value) if value.lstrip("-").isdigit() else datetime.fromisoformat(value)
        except ValueError:
            raise InvalidArgument(
                f"`{value}` is not a time", hint="write it like 2026-01-31T12:00:00Z"
            ) from None
    return math.floor(value.timestamp() * 1000) if isinstance(value, datetime) else value


# ---------------------------------------------------------------------------- records


def encode_record(value: Any, *, as_json: bool) -> bytes:
    """One record as the stream stores it. Bytes given to a JSON stream must be one JSON text."""
    if not as_json:
        if isinstance(value, str):
            return value.encode("utf-8")
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise InvalidArgument(
            f"a byte stream takes bytes or str, not {type(value).__name__}",
            hint='create the stream with content_type="application/json" to append JSON values',
        )
    if isinstance(value, bytes | bytearray | memoryview):
        return _checked_json(bytes(value))
    try:
        return _encode_json(value).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"not a JSON value: {error}") from error


def _checked_json(text: bytes) -> bytes:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not a JSON text: {error}") from error
    return text.strip()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def join_json(records: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(records) + b"]"


def decode_body(body: bytes, content_type: str, offset: str) -> tuple[Record, ...]:
    """The records of one answer; all carry the offset after the answer."""
    if not is_json_type(content_type):
        return (Record(body, body, offset),) if body else ()
    try:
        pairs = split_json_array(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server sent a JSON stream that is not JSON: {error}") from error
    last = len(pairs) - 1
    return tuple(
        Record(value, text.encode("utf-8"), offset, index == last)
        for index, (value, text) in enumerate(pairs)
    )


def split_json_array(text: str) -> list[tuple[Any, str]]:
    """The elements of a JSON array as (value, original text)."""
    position = _skip_space(text, 0)
    if text[position : position + 1] != "[":
        raise ValueError("expected a JSON array")
    position = _skip_space(text, position + 1)
    pairs: list[tuple[Any, str]] = []
    if text[position : position + 1] == "]":
        return _finish_array(text, position, pairs)
    while True:
        value, end = _decode_json(text, position)
        pairs.append((value, text[position:end]))
        position = _skip_space(text, end)
        mark = text[position : position + 1]
        if mark == "]":
            return _finish_array(text, position, pairs)
        if mark != ",":
            raise ValueError(f"expected `,` or `]` at character {position}")
        position = _skip_space(text, position + 1)


def _finish_array(text: str, position: int, pairs: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    if _skip_space(text, position + 1) != len(text):
        raise ValueError("text after the JSON array")
    return pairs


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _JSON_SPACE:
        position += 1
    return position


# ---------------------------------------------------------------------------- responses


def json_object(body: bytes | bytearray, where: str) -> dict[str, Any]:
    """An answer that must be a JSON object; `where` names the question."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{where} was answered by something that is not JSON") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"{where} was answered by something that is not a JSON object")
    return document


@dataclass(frozen=True, slots=True)
class Page:
    """What one read answer says besides its records."""

    content_type: str
    offset: str
    up_to_date: bool
    closed: bool
    cursor: str | None
    incarnation: str | None
    gap: Gap | None


def page_of(response: Response, requested: str | None) -> Page:
    headers = response.headers
    offset = headers.get("stream-next-offset") or requested
    if not offset or offset in (START, NOW):
        raise ProtocolError(
            "the server sent no Stream-Next-Offset",
            hint="is this the URL of a Durable Streams server?",
        )
    return Page(
        content_type=headers.get("content-type", "application/octet-stream"),
        offset=offset,
        up_to_date=is_true(headers, "stream-up-to-date"),
        closed=is_true(headers, "stream-closed"),
        cursor=headers.get("stream-cursor"),
        incarnation=headers.get("stream-incarnation"),
        gap=parse_gap(headers.get("stream-gap")),
    )


def is_true(headers: Mapping[str, str], name: str) -> bool:
    return headers.get(name, "").lower() == "true"


def parse_gap(value: str | None) -> Gap | None:
    """`from=<offset>; to=<offset>; reason=crash; certain=0` -> Gap."""
    if value is None:
        return None
    fields: dict[str, str] = {}
    for part in value.split(";"):
        name, _, text = part.strip().partition("=")
        fields[name] = text
    if "from" not in fields or "to" not in fields:
        raise ProtocolError(f"the server sent an invalid Stream-Gap: {value!r}")
    return Gap(
        from_offset=fields["from"],
        to_offset=fields["to"],
        reason=fields.get("reason", "unknown"),
        certain=fields.get("certain", "1") != "0",
    )


def info_from_head(path: str, response: Response) -> StreamInfo:
    headers = response.headers
    ttl = headers.get("stream-ttl", "")
    return StreamInfo(
        path=path,
        content_type=headers.get("content-type", "application/octet-stream"),
        tail=headers.get("stream-next-offset", ""),
        closed=is_true(headers, "stream-closed"),
        durability=headers.get("stream-durability"),
        incarnation=headers.get("stream-incarnation"),
        ttl_seconds=int(ttl) if ttl.isascii() and ttl.isdigit() else None,
        expires_at=headers.get("stream-expires-at"),
    )


def change_request(endpoint: Endpoint, path: str, durability: str) -> Request:
    target = endpoint.prefix + LIST_PATH + "/" + quote(path, safe=_PATH_SAFE)
    body = _encode_json({"durability": durability}).encode("utf-8")
    return Request("PATCH", target, (("Content-Type", "application/json"),), body)


def parse_entry(response: Response) -> StreamInfo:
    """One stream as the server's listing describes it."""
    try:
        return _info_from_listing(json.loads(response.body))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"the server sent an unknown description of a stream: {error!r}"
        ) from error


def list_request(endpoint: Endpoint, prefix: str, after: str, limit: int) -> Request:
    query = [("prefix", prefix), ("limit", str(limit))]
    if after:
        query.append(("after", after))
    return Request("GET", endpoint.prefix + LIST_PATH + encode_query(query))


def parse_listing(response: Response) -> tuple[list[StreamInfo], str | None]:
    try:
        document = json.loads(response.body)
        rows = [_info_from_listing(entry) for entry in document["streams"]]
        after = document.get("next")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"the server sent an invalid listing: {error!r}") from error
    return rows, after if isinstance(after, str) and after else None


def _info_from_listing(entry: Mapping[str, Any]) -> StreamInfo:
    created = entry.get("created_at")
    expires = entry.get("expires_at")
    finite = isinstance(created, int | float) and math.isfinite(created)
    return StreamInfo(
        path=str(entry["path"]),
        content_type=str(entry["content_type"]),
        tail=str(entry["tail"]),
        closed=bool(entry.get("closed", False)),
        durability=entry.get("durability"),
        incarnation=None if entry.get("incarnation") is None else str(entry["incarnation"]),
        ttl_seconds=entry.get("ttl_seconds"),
        expires_at=None if expires is None else str(expires),
        records=entry.get("records"),
        bytes=entry.get("bytes"),
        created_at_ms=int(created) if finite and created is not None else None,
        forked_from=entry.get("forked_from"),
    )
