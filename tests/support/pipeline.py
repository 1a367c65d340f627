"""The pipeline's reading paths as tests speak of them: `/v1/tails` and `/v1/read`, with nothing hidden.

Invariants: every Arrow answer is validated in full; windows are put together by what the server says in
`Millstream-Next` and by nothing else, and must come to an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from support.http import Api, Connection, Response

ARROW = "application/vnd.apache.arrow.stream"
ALL_COLUMNS = ["stream", "offset", "timestamp", "value", "position", "epoch", "key"]
WINDOWS_MAX = 5000
NEXT = re.compile(r"range=(\d+); offset=(\d{16}_\d{16}); number=(\d+)")

Range = dict[str, Any]
Place = dict[str, Any]


@dataclass(frozen=True)
class Window:
    """One answer of `/v1/read`."""

    table: pa.Table
    next: tuple[int, Place] | None
    gaps: list[dict[str, Any]]

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self.table.column(name).to_pylist()
        return values


class Pipeline:
    """Calls of one server."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def post(self, path: str, body: Any, *, chunked: bool = False) -> Response:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.api.call("POST", path, None, sent, chunked=chunked)

    def tails(self, **question: Any) -> dict[str, Any]:
        answer = self.post("/v1/tails", question)
        assert answer.status == 200, answer.body
        told: dict[str, Any] = answer.json()
        expected = {"cursor", "complete", "now_ms", "missing", "removed", "streams"}
        assert expected == told.keys() - {"next"}, told
        return told

    def tail(self, name: str, *at: dict[str, Any]) -> dict[str, Any]:
        """What is told about one stream that is there."""
        asked = {"name": name, "at": list(at)} if at else name
        (stream,) = self.tails(streams=[asked])["streams"]
        found: dict[str, Any] = stream
        return found

    def place(self, name: str, **wanted: Any) -> Place:
        (found,) = self.tail(name, wanted)["at"]
        return {"offset": found["offset"], "number": found["number"]}

    def whole(self, *names: str) -> list[Range]:
        """Ranges over everything that streams have now."""
        return [
            {
                "stream": stream["name"],
                "incarnation": stream["incarnation"],
                "from": stream["first"],
                "to": stream["tail"],
            }
            for stream in self.tails(streams=list(names))["streams"]
        ]

    def records(self, name: str, first: int, behind: int) -> Range:
        """The range of some record numbers."""
        return {
            "stream": name,
            "from": self.place(name, number=first),
            "to": self.place(name, number=behind),
        }

    def window(
        self, ranges: Sequence[Range], connection: Connection | None = None, **options: Any
    ) -> Window:
        asked = json.dumps({"ranges": list(ranges), **options}).encode()
        if connection is None:
            answer = self.post("/v1/read", asked)
        else:
            answer = connection.request("POST", "/v1/read", None, asked)
        assert answer.status == 200, answer.body
        assert answer["content-type"] == ARROW
        table = pa.ipc.open_stream(answer.body).read_all()
        table.validate(full=True)
        told = answer.get("millstream-next")
        following = None
        if told is not None:
            found = NEXT.fullmatch(told)
            assert found, told
            following = (int(found[1]), {"offset": found[2], "number": int(found[3])})
        gaps = json.loads(answer.get("millstream-gaps") or "[]")
        return Window(table, following, gaps)

    def windows(self, ranges: Sequence[Range], **options: Any) -> Iterable[Window]:
        """Every window up to the end; gaps speak of the ranges as they were given first."""
        left, passed = list(ranges), 0
        with self.api.connect() as connection:
            for _ in range(WINDOWS_MAX):
                window = self.window(left, connection, **options)
                gaps = [{**gap, "range": gap["range"] + passed} for gap in window.gaps]
                yield Window(window.table, window.next, gaps)
                if window.next is None:
                    return
                number, place = window.next
                left = [{**left[number], "from": place}, *left[number + 1 :]]
                passed += number
        raise AssertionError("the windows have no end")

    def read(self, ranges: Sequence[Range], **options: Any) -> Window:
        """All windows as one."""
        windows = list(self.windows(ranges, **options))
        table = pa.concat_tables([window.table for window in windows])
        return Window(table, None, [gap for window in windows for gap in window.gaps])
