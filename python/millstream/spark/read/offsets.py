"""Where a query stands: places of streams, their JSON in the checkpoint, and offsets as people write them.

Where it sits: between the options and the checkpoint on one side and `/v1/tails` on the other. Pure.
The checkpoint holds, per stream, the place of the next record and the incarnation it belongs to:

    {"streams": {"orders": {"at": "0000001763000000_0000000000004096", "id": "…", "n": 23}}, "v": 1}

Invariants:
- I-OFS-1  Keys are sorted at every level: Spark compares offsets as text.
- I-OFS-2  A checkpoint of an unknown version or form is refused, never guessed at.
- I-OFS-3  Byte positions are taken from offsets only to weigh ranges, never to build an offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast

from millstream.errors import OptionInvalid, SchemaMismatch

VERSION: Final = 1
WIRE: Final = re.compile(r"\d{16}_\d{16}")


class Entry(TypedDict):
    """One stream in the checkpoint: a place, and the incarnation that it is a place of."""

    at: str
    id: str
    n: int


class Offset(TypedDict):
    streams: dict[str, Entry]
    v: int


def entry(at: str, incarnation: str, number: int) -> Entry:
    return {"at": at, "id": incarnation, "n": number}


def offset(streams: Mapping[str, Entry]) -> Offset:
    """The offset of these streams, keys in order."""
    return {"streams": {name: streams[name] for name in sorted(streams)}, "v": VERSION}


def checked(value: Any) -> Offset:
    """What Spark read from a checkpoint, if it is ours."""
    version = value.get("v") if isinstance(value, dict) else None
    if version != VERSION or not isinstance(value.get("streams"), dict):
        raise SchemaMismatch(
            f"the checkpoint does not hold a Millstream offset of version {VERSION} (found {version!r})",
            hint="it belongs to another source or a newer Millstream; use that, or a new checkpoint",
        )
    for name, found in value["streams"].items():
        if not (
            isinstance(found, dict)
            and isinstance(found.get("at"), str)
            and isinstance(found.get("id"), str)
            and isinstance(found.get("n"), int)
        ):
            raise SchemaMismatch(
                f"the checkpoint's entry of stream `{name}` is damaged: {found!r}",
                hint="restore the checkpoint, or begin a new one",
            )
    return cast("Offset", value)


def byte_position(at: str) -> int:
    """Bytes of the stream before this offset, as far as the offset tells; for weighing only."""
    _, _, position = at.partition("_")
    return int(position) if position.isascii() and position.isdigit() else 0


def epoch_of(at: str) -> str:
    return at.partition("_")[0]


# ---------------------------------------------------------------------------- what people write


@dataclass(frozen=True, slots=True)
class Position:
    """One way to say where: exactly one of the kinds that `/v1/tails` can look up."""

    kind: Literal["earliest", "latest", "number", "offset", "time_ms"]
    number: int = 0
    offset: str = ""


EARLIEST: Final = Position("earliest")
LATEST: Final = Position("latest")
Positions: TypeAlias = Mapping[str, Position]


@dataclass(frozen=True, slots=True)
class Bound:
    """Where each stream begins or ends: by name, else the same for all."""

    option: str
    everywhere: Position
    by_stream: tuple[tuple[str, Position], ...] = ()

    def of(self, name: str) -> Position:
        for stream, position in self.by_stream:
            if stream == name:
                return position
        return self.everywhere

    def check_names(self, names: Iterable[str]) -> None:
        known = set(names)
        for stream, _ in self.by_stream:
            if stream not in known:
                raise OptionInvalid(
                    f"option `{self.option}` names stream `{stream}`, which is not read",
                    hint="name it in `subscribe` too, or leave it out",
                )


def parse_bound(option: str, text: str, unnamed: Position) -> Bound:
    """`earliest`, `latest`, a number, an offset, or JSON by stream; `unnamed` is for streams left out."""
    text = text.strip()
    if not text:
        return Bound(option, unnamed)
    if not text.startswith("{"):
        return Bound(option, _position(option, text))
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _bad(option, text, f"not JSON: {error}") from None
    named: list[tuple[str, Position]] = []
    for stream, value in document.items():
        if isinstance(value, dict):
            if set(value) != {"0"}:
                raise _bad(option, text, f"a stream has only partition 0: {json.dumps(value)}")
            value = value["0"]
        named.append((stream, _position(option, value)))
    return Bound(option, unnamed, tuple(sorted(named, key=lambda pair: pair[0])))


def parse_time_bound(option: str, text: str) -> Bound:
    return Bound(option, Position("time_ms", number=parse_time_ms(option, text)))


def parse_time_ms(option: str, text: str) -> int:
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OptionInvalid(
            f"option `{option}` is `{text}`",
            hint="it is milliseconds since 1970, or ISO 8601 such as 2026-11-16T02:00:00Z",
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0, round(moment.timestamp() * 1000))


def _position(option: str, value: Any) -> Position:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise _bad(option, json.dumps(value), "neither a number nor a text")
    text = str(value).strip()
    lower = text.lower()
    if lower in ("earliest", "-2"):
        return EARLIEST
    if lower in ("latest", "-1"):
        return LATEST
    if WIRE.fullmatch(text):
        return Position("offset", offset=text)
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return Position("number", number=int(text))
    raise _bad(option, text, "neither a number, an offset, `earliest` nor `latest`")


def _bad(option: str, text: str, reason: str) -> OptionInvalid:
    return OptionInvalid(
        f"option `{option}` is `{text}`: {reason}",
        hint='write `earliest`, `latest`, a record number, an offset, or JSON like {"orders": 23}',
    )
