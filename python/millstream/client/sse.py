"""Server-sent events without I/O: bytes to events.

Where it sits: fed by `follow.py` with the body of a live response.

    event: data\\n            kind (absent: `message`)
    data:[{"id":1}]\\n         one or more lines, joined by \\n; a space after the colon is dropped
    \\n                        ends the event
    : keep-alive\\n            a comment

Invariants:
- I-SSE-1  Only complete events come out; what a broken connection left half-sent is dropped.
- I-SSE-2  The result does not depend on how the bytes were cut into chunks (also inside CRLF).
- I-SSE-3  One event is at most `EVENT_BYTES_MAX` long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

EVENT_BYTES_MAX: Final = 256 * 1024 * 1024


class EventTooLarge(Exception):  # noqa: N818 - named by what it reports
    """An event exceeds the bound; the stream cannot be parsed further."""


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    data: bytes


@dataclass(slots=True)
class EventParser:
    """Incremental parser; `feed` returns the events that became complete."""

    _buffer: bytearray = field(default_factory=bytearray)
    _scanned: int = 0
    _kind: str = ""
    _lines: list[bytes] = field(default_factory=list)
    _size: int = 0
    _after_cr: bool = False

    def feed(self, data: bytes) -> list[Event]:
        if self._after_cr and data:
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        self._buffer += data
        events: list[Event] = []
        if b"\r" in data:
            self._feed_any_ending(events)
        else:
            self._feed_newlines(events)
        if self._size + len(self._buffer) > EVENT_BYTES_MAX:
            raise EventTooLarge(f"an event is larger than {EVENT_BYTES_MAX} bytes")
        return events

    def _feed_newlines(self, events: list[Event]) -> None:
        """The usual case: lines end with LF only."""
        end = self._buffer.rfind(b"\n", self._scanned)
        if end < 0:
            self._scanned = len(self._buffer)
            return
        complete = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._scanned = 0
        for line in complete.split(b"\n"):
            self._line(line, events)

    def _feed_any_ending(self, events: list[Event]) -> None:
        """Lines may end with CR, LF or CRLF; a CR at the very end may be half of a CRLF."""
        text = bytes(self._buffer)
        if text.endswith(b"\r"):
            self._after_cr = True
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = bytearray(lines.pop())
        self._scanned = 0
        for line in lines:
            self._line(line, events)

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._lines:
                events.append(Event(self._kind or "message", b"\n".join(self._lines)))
            self._lines = []
            self._kind = ""
            self._size = 0
            return
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._lines.append(value)
            self._size += len(value) + 1
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
