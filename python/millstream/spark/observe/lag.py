"""How far a streaming query is behind its streams: `millstream.spark.lag(progress)`.

Where it sits: for programs and listeners in the driver. Takes what Spark reports about a batch (`query.lastProgress`, an item of
`query.recentProgress`, `event.progress` of a listener, or any of them as JSON), from classic and Connect sessions.

Invariants:
- I-LAG-1  Records and bytes come from the offsets of the progress alone; no request is made for them.
- I-LAG-2  Seconds are the age of the oldest unread record if a client is given, else how long the rest would take at
           the pace of this batch; `exact` says which, and `None` means that nobody can tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument
from millstream.spark.read.offsets import byte_position

if TYPE_CHECKING:
    from millstream.client.sync.client import Client

PATIENCE_SECONDS: Final = 5.0
STREAMS_ASKED_MAX: Final = 1000
"""At most so many streams are asked for the age of their oldest unread record, those furthest behind."""


@dataclass(frozen=True, slots=True)
class StreamLag:
    """One stream: what is behind the end of the batch."""

    records: int
    bytes: int
    """As far as offsets tell: an append that was read in part counts whole."""


@dataclass(frozen=True, slots=True)
class Lag:
    """A query: the sum of its streams."""

    records: int
    bytes: int
    seconds: float | None
    exact: bool = False
    streams: Mapping[str, StreamLag] = field(default_factory=dict)
    """Only streams that are behind."""


def lag(progress: Any, *, client: Client | None = None) -> Lag:
    """How far a query was behind the tails of its streams when it reported `progress`.

    With `client` (of the server that has the streams) the seconds are asked for and exact.
    """
    document = as_document(progress)
    places = [place for place in map(_places, document.get("sources") or ()) if place is not None]
    if not places:
        raise InvalidArgument(
            "the progress is not of a query that reads Millstream streams",
            hint='give `query.lastProgress` of a query over `readStream.format("millstream")`',
        )
    behind: dict[str, StreamLag] = {}
    unread: dict[str, int] = {}
    for end, latest in places:
        for name, tail in latest.items():
            found, number = _behind(end.get(name), tail)
            if found.records:
                behind[name] = found
                unread[name] = number
    records = sum(stream.records for stream in behind.values())
    total = sum(stream.bytes for stream in behind.values())
    if client is None or not records:
        return Lag(records, total, _time_for(records, document), not records, behind)
    furthest = sorted(unread, key=lambda name: behind[name].records, reverse=True)
    asked = {name: unread[name] for name in furthest[:STREAMS_ASKED_MAX]}
    return Lag(records, total, _oldest_age(client, asked), True, behind)


def as_document(progress: Any) -> Mapping[str, Any]:
    """Spark's report as a mapping; it comes as one (Spark 4), as JSON text, or as an object that has it."""
    if isinstance(progress, Mapping):
        return progress
    text = progress if isinstance(progress, str) else getattr(progress, "json", None)
    try:
        document = json.loads(text if isinstance(text, str) else "")
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InvalidArgument(
            f"`{type(progress).__name__}` is not the progress of a query",
            hint="give `query.lastProgress`, which is None before the first batch",
        )
    return document


def _places(source: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Places by stream at the end of the batch and at the tails; `None` if it is another source."""
    end, latest = _streams(source.get("endOffset")), _streams(source.get("latestOffset"))
    if latest is None:
        return None
    return end or {}, latest


def _streams(offset: Any) -> dict[str, Any] | None:
    """The streams of an offset of ours, which under Connect is JSON text."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return None
    streams = offset.get("streams") if isinstance(offset, Mapping) else None
    if not isinstance(streams, Mapping):
        return None
    whole = all(
        isinstance(place, Mapping)
        and isinstance(place.get("n"), int)
        and isinstance(place.get("at"), str)
        for place in streams.values()
    )
    return dict(streams) if whole else None


def _behind(end: Mapping[str, Any] | None, tail: Mapping[str, Any]) -> tuple[StreamLag, int]:
    """How far, and the number of the first unread record."""
    if end is None or end.get("id") != tail.get("id"):  # new, or another stream of that name
        return StreamLag(tail["n"], byte_position(tail["at"])), 0
    records = max(0, tail["n"] - end["n"])
    total = max(0, byte_position(tail["at"]) - byte_position(end["at"]))
    return StreamLag(records, total), end["n"]


def _time_for(records: int, document: Mapping[str, Any]) -> float | None:
    """Seconds that `records` take at the pace of this batch."""
    if not records:
        return 0.0
    rows = document.get("numInputRows")
    if not isinstance(rows, int):  # Connect does not say; what was written is the next best
        rows = (document.get("sink") or {}).get("numOutputRows")
    took_ms = (document.get("durationMs") or {}).get("triggerExecution")
    if (
        not isinstance(rows, int)
        or rows <= 0
        or not isinstance(took_ms, int | float)
        or took_ms <= 0
    ):
        return None
    return records * (took_ms / 1000) / rows


def _oldest_age(client: Client, unread: Mapping[str, int]) -> float | None:
    """Seconds since the oldest of the first unread records was accepted, by the server's clock."""
    from millstream.client.sync.reads import PipelineReads

    asked = [{"name": name, "at": [{"number": number}]} for name, number in unread.items()]
    answer = PipelineReads(client, PATIENCE_SECONDS).tails(streams=asked)
    times = [place.time_ms for stream in answer.streams for place in stream.at]
    known = [time_ms for time_ms in times if time_ms is not None]
    return max(0.0, (answer.now_ms - min(known)) / 1000) if known else None
