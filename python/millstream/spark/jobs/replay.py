"""Job `replay`: a range of streams, by offset or time, appended to a stream byte for byte.

Where it sits: it is `copy` with bounds; the source keeps them.
Invariant I-RPL-1: a replay is of one range: another one needs another checkpoint, so that none is half of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.copy import Copy
from millstream.spark.jobs.job import JobOption, Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.client.pipeline_read import StreamTail

OFFSETS: Final = 'A record number, an offset of the server, or JSON by stream: {"orders":23}.'
TIMES: Final = "Milliseconds, or ISO 8601 with a zone; the time when records were accepted."
SOURCE_OPTIONS: Final = {
    "start-offset": "startingOffsets",
    "start-time": "startingTimestamp",
    "end-offset": "endingOffsets",
    "end-time": "endingTimestamp",
}


class Replay(Copy):
    """A range of streams to a stream."""

    name = "replay"
    summary = "a range of streams, by offset or time, to one stream"
    options = (
        JobOption("start-offset", f"Where to begin. {OFFSETS}", fixed=True),
        JobOption("start-time", f"When to begin. {TIMES}", fixed=True),
        JobOption("end-offset", f"Where to end, not included. {OFFSETS}", fixed=True),
        JobOption("end-time", f"When to end, not included. {TIMES}", fixed=True),
        *Copy.options,
    )

    def check(self, request: Request, query_id: str | None) -> None:
        from millstream.spark.read.offsets import LATEST, parse_bound, parse_time_bound

        super().check(request, query_id)
        given = self.source(request)
        if not given:
            raise InvalidArgument(
                "a replay needs a bound", hint="name one, or use job `copy` for whole streams"
            )
        for end in ("start", "end"):
            if {f"{end}-offset", f"{end}-time"} <= request.options.keys():
                raise InvalidArgument(
                    f"both --{end}-offset and --{end}-time are given", hint="give one of them"
                )
        for name, option in SOURCE_OPTIONS.items():
            if option not in given:
                continue
            if name.endswith("time"):
                parse_time_bound(option, given[option])
            else:
                parse_bound(option, given[option], LATEST)

    def check_tails(self, request: Request, tails: Mapping[str, StreamTail]) -> None:
        """The source would say the same later, in words of its own options."""
        from millstream.spark.read.offsets import LATEST, parse_bound

        begin = parse_bound("startingOffsets", request.option(self, "start-offset"), LATEST)
        for name, stream in tails.items():
            position = begin.of(name)
            if position.kind == "number" and position.number > stream.tail_number:
                raise InvalidArgument(
                    f"--start-offset is record {position.number:,}, but stream `{name}` has "
                    f"{stream.tail_number:,}",
                    hint="name an earlier record, or use job `copy` for what comes next",
                )

    def source(self, request: Request) -> dict[str, str]:
        given = {name: request.option(self, name) for name in SOURCE_OPTIONS}
        return {SOURCE_OPTIONS[name]: value for name, value in given.items() if value}
