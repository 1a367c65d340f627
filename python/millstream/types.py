"""The values that the client hands out: records, batches, gaps and descriptions of streams.

Where it sits: beside `errors`; used by `client/`, `cli/` and everything above. Plain data, no I/O.
Invariant I-TYP-1: an offset is an opaque text; it is compared with others, never computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from html import escape
from typing import Any, Final, Literal, TypeAlias

Durability: TypeAlias = Literal["ephemeral", "memory", "disk", "fsync", "quorum", "object"]
SHOWN_RECORDS_MAX: Final = 20
SHOWN_CHARACTERS_MAX: Final = 200
RECORD_HEAD: Final = ("number", "time", "offset", "value")
LiveMode: TypeAlias = Literal["auto", "sse", "long-poll"]


@dataclass(frozen=True, slots=True)
class Gap:
    """A range that readers cannot get, with the server's reason."""

    from_offset: str
    to_offset: str
    reason: str
    certain: bool = True
    """False: the server lost its memory of the range and cannot tell whether it held records."""
    stream: str = field(default="", compare=False)
    """Path of the stream, for whoever reads several."""


GapPolicy: TypeAlias = Literal["raise", "record"] | Callable[[Gap], object]
"""What to do at a gap: raise `GapError`, deliver a record whose `.gap` is set, or call back."""


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """One record of a stream.

    JSON streams: `value` is the decoded value and `data` its text as it was sent. Byte streams have
    no record boundaries on the wire: a record is whatever bytes one answer carried, and `value` is
    the same as `data`.
    """

    value: Any
    data: bytes
    offset: str
    """Position after the batch that this record came in."""
    final: bool = True
    """True on the last record of its batch: from here `offset` is a safe place to resume."""
    gap: Gap | None = None
    """Set on the stand-in record that `gaps="record"` delivers; it carries no data."""
    number: int | None = None
    """How many records of the stream come before it; with `read(numbered=True)`."""
    time: datetime | None = None
    """When the server accepted it; with `read(numbered=True)`."""

    @property
    def text(self) -> str:
        """The data as UTF-8 text; bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")

    def __repr__(self) -> str:
        """What is known, short enough for a notebook; `data` would say the same as `value` again."""
        value = None if self.value is None and not self.data else _short(repr(self.value))
        known = [("value", value)] + [
            (name, repr(getattr(self, name)))
            for name in ("offset", "final", "gap", "number", "time")
            if getattr(self, name) is not None
        ]
        return f"Record({', '.join(f'{name}={text}' for name, text in known if text is not None)})"

    def _repr_html_(self) -> str:
        return html_table([html_row(self)], RECORD_HEAD)


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """The records that came in one answer. `offset` is where to go on after them."""

    records: tuple[Record, ...]
    offset: str
    up_to_date: bool
    closed: bool
    content_type: str
    incarnation: str | None = None

    def __repr__(self) -> str:
        shown = [repr(record) for record in self.records[:SHOWN_RECORDS_MAX]]
        more = len(self.records) - len(shown)
        parts = ", ".join([*shown, f"and {more:,} more"] if more else shown)
        rest = [
            f"{name}={getattr(self, name)!r}"
            for name in ("offset", "up_to_date", "closed", "content_type", "incarnation")
            if getattr(self, name) is not None
        ]
        return f"Batch(records=({parts}), {', '.join(rest)})"

    def _repr_html_(self) -> str:
        shown = [html_row(record) for record in self.records[:SHOWN_RECORDS_MAX]]
        more = len(self.records) - len(shown)
        note = f"<p>and {more:,} more; offset {escape(self.offset)}</p>" if more else ""
        return html_table(shown, RECORD_HEAD) + note


@dataclass(frozen=True, slots=True, repr=False)
class StreamInfo:
    """What the server says about a stream. `None`: the server did not say."""

    path: str
    content_type: str
    tail: str
    closed: bool = False
    durability: str | None = None
    incarnation: str | None = None
    ttl_seconds: int | None = None
    expires_at: str | None = None
    records: int | None = None
    bytes: int | None = None
    created_at_ms: int | None = None
    forked_from: str | None = None

    @property
    def is_json(self) -> bool:
        return is_json_type(self.content_type)

    def __repr__(self) -> str:
        """Only what the server said."""
        known = ", ".join(f"{name}={value!r}" for name, value in self._known())
        return f"StreamInfo({known})"

    def _repr_html_(self) -> str:
        return html_table([(name, str(value)) for name, value in self._known()], ("", ""))

    def _known(self) -> list[tuple[str, object]]:
        values = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return [(name, value) for name, value in values if value is not None]


def media_type(content_type: str) -> str:
    """`Application/JSON; charset=utf-8` -> `application/json`."""
    return content_type.partition(";")[0].strip().lower()


def is_json_type(content_type: str) -> bool:
    return media_type(content_type) == "application/json"


def is_text_type(content_type: str) -> bool:
    return media_type(content_type).startswith("text/")


# ---------------------------------------------------------------------------- for notebooks


def html_row(record: Record) -> tuple[str, ...]:
    text = f"gap: {record.gap.reason}" if record.gap is not None else record.text
    number = "" if record.number is None else f"{record.number:,}"
    time = "" if record.time is None else record.time.isoformat()
    return number, time, record.offset, _short(text)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "…"


def html_table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...]) -> str:
    """A small table; everything in it comes from outside and is escaped."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
