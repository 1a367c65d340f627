"""A reader of server-sent events over `support.http.Connection`.

Parses exactly what a browser would, and keeps the raw bytes for tests of the wire form. Invariant:
waiting for an event ends at the connection's deadline.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from support.http import Api, Connection, Response


@dataclass(frozen=True)
class Event:
    """One event: its type and its data lines joined by LF."""

    kind: str
    data: str

    def json(self) -> Any:
        return json.loads(self.data)

    def decoded(self) -> bytes:
        return base64.b64decode(self.data.replace("\n", ""), validate=True)


class EventStream:
    """A live SSE request. Iterate it, or take events one by one with `next`."""

    def __init__(self, connection: Connection, response: Response) -> None:
        self.connection = connection
        self.response = response
        self.raw = b""
        self._pieces = connection.body_pieces(response)
        self._pending = b""
        self._ended = False

    @classmethod
    def open(cls, api: Api, path: str, offset: str = "-1", **query: str | int) -> EventStream:
        connection = api.connect()
        target = api.target(path, offset=offset, live="sse", **query)
        connection.send(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        response = connection.read_head()
        assert response.status == 200, (response.status, connection.read_to_end())
        assert response["content-type"] == "text/event-stream"
        return cls(connection, response)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()

    def __iter__(self) -> Iterator[Event]:
        while (event := self._next_or_end()) is not None:
            yield event

    def next(self) -> Event:
        event = self._next_or_end()
        assert event is not None, f"the stream of events ended; so far {self.raw[-300:]!r}"
        return event

    def control(self) -> dict[str, Any]:
        """The next event, which must be a control event."""
        event = self.next()
        assert event.kind == "control", event
        fields = event.json()
        assert isinstance(fields, dict)
        return fields

    def until_end(self) -> list[Event]:
        return list(self)

    def until_up_to_date(self) -> list[Event]:
        events = []
        for event in self:
            events.append(event)
            if event.kind == "control" and event.json().get("upToDate"):
                return events
        raise AssertionError(f"ended before it was up to date: {events[-3:]}")

    def _next_or_end(self) -> Event | None:
        while True:
            while b"\n\n" not in self._pending:
                piece = next(self._pieces, None)
                if piece is None:
                    assert self._pending.strip() == b"", f"ended inside an event: {self._pending!r}"
                    return None
                self.raw += piece
                self._pending += piece
            block, _, self._pending = self._pending.partition(b"\n\n")
            event = parse_event(block)
            if event is not None:
                return event


def parse_event(block: bytes) -> Event | None:
    """One block of lines, as the HTML standard reads it; None for comments alone."""
    kind, data = "message", []
    for line in block.decode("utf-8", errors="replace").split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data.append(value)
    return Event(kind, "\n".join(data)) if data or kind != "message" else None
