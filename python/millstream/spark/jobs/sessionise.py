"""Job `sessionise`: records of one key without a pause longer than a gap, as one record for each session; to a stream.

    {"key":"u7","start":"2026-03-01T23:30:00.000000Z","end":"2026-03-01T23:41:10.500000Z","count":3,
     "first":{"stream":"clicks","offset":17},"last":{"stream":"clicks","offset":42}}

Where it sits: found through `jobs`, run by `driver`; the key is found by the source (`keyPath`), the state is Spark's (`transformWithState`).

Invariants:
- I-SSN-1  Two records of a key are in one session if and only if no pause between them is longer than the gap, whatever their order.
- I-SSN-2  A session is written once, when the watermark has reached its end plus the gap: what could still join it would be late.
- I-SSN-3  What is done in executors travels by value: they need pyspark, and nothing of Millstream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, QueryJob, Request, check_no_loop
from millstream.spark.jobs.shared import state, streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import Column, DataFrame

COLUMNS: Final = ("stream", "offset", "timestamp", "value", "key")
SESSION: Final = (
    "`start` BIGINT, `end` BIGINT, count BIGINT, "
    "first STRUCT<stream: STRING, offset: BIGINT>, last STRUCT<stream: STRING, offset: BIGINT>"
)
"""Times are microseconds since 1970: Python would give times of the session's zone."""
MICROSECONDS: Final = 1_000_000


class Sessionise(QueryJob):
    """Streams to a stream of sessions."""

    name = "sessionise"
    summary = "sessions: records with the same key and no pause longer than a gap, in a stream"
    options = (
        JobOption("key", "Field that says whose a record is, names joined by dots.", fixed=True, required=True, is_field=True),
        JobOption("gap", "Longest pause inside a session: 30m, 1h, ...", fixed=True, required=True),
        state.EVENT_TIME,
        state.LATE,
        streams.CREATE,
    )  # fmt: skip
    stateful = True
    remembers = "sessions"

    def check(self, request: Request, query_id: str | None) -> None:  # noqa: ARG002
        if request.target.stream is None:
            raise InvalidArgument(
                f"job `{self.name}` writes a stream, not the directory `{request.target}`",
                hint="write --to stream:NAME; job `land` makes files of it",
            )
        check_no_loop(self, request)
        state.some_seconds(self, request, "gap")
        state.lateness(self, request)
        state.require_processors(self)

    def source(self, request: Request) -> dict[str, str]:
        return {"columns": ",".join(COLUMNS), "keyPath": request.option(self, "key")}

    def write(self, source: DataFrame, request: Request) -> Any:
        from pyspark.sql import functions as f

        key = state.key(request.option(self, "key"))
        time = state.event_time(request.option(self, state.EVENT_TIME.name))
        gap = state.some_seconds(self, request, "gap") * MICROSECONDS
        rows = (
            source.select(key.alias("key"), "stream", "offset", time.alias("time"))
            .withWatermark("time", state.lateness(self, request))
            .withColumn("at", f.unix_micros("time"))
        )
        closed = rows.groupBy("key").transformWithState(
            sessions(gap), f"key STRING, {SESSION}", "Append", "EventTime"
        )
        return streams.write(
            closed.select(text().alias("value")), self, request, stream=request.target.stream
        )


def text() -> Column:
    """The record of a closed session."""
    from pyspark.sql import functions as f

    from millstream.spark.jobs.shared.letters import TEXT_OPTIONS

    times = [f.timestamp_micros(name).alias(name) for name in ("start", "end")]
    return f.to_json(f.struct("key", *times, "count", "first", "last"), TEXT_OPTIONS)


def sessions(gap: int) -> Any:
    """The processor of one key. All that it uses is inside of this function, so that it travels by value (I-SSN-3)."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    rows_at_once = 4096  # of one key, before they are joined: so memory has a bound

    def joined(found: Iterable[Any]) -> list[Any]:
        """Sessions (start, end, count, first, last) in order, those without a long pause between them as one."""
        result: list[Any] = []
        for one in sorted(found):
            if not result or one[0] - result[-1][1] > gap:
                result.append(one)
                continue
            # Of several records at one time the places decide: the result is the same in every order.
            start, first = min((result[-1][0], result[-1][3]), (one[0], one[3]))
            end, last = max((result[-1][1], result[-1][4]), (one[1], one[4]))
            result[-1] = (start, end, result[-1][2] + one[2], first, last)
        return result

    def closes(session: Any) -> int:
        """From this watermark on (in milliseconds) what could join it is late."""
        return -(-(int(session[1]) + gap) // 1000)

    class Sessions(StatefulProcessor):
        """A key has one timer, for the session that closes first: it follows from the sessions that are open."""

        def init(self, handle: Any) -> None:
            place = "STRUCT<stream: STRING, offset: BIGINT>"
            kept = f"`end` BIGINT, count BIGINT, first {place}, last {place}"
            self._handle = handle
            self._open = handle.getMapState("sessions", "start BIGINT", kept)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
            before = self._sessions()
            found, bound = list(before), len(before) + rows_at_once
            for row in rows:
                place = (row.stream, row.offset)
                found.append((row.at, row.at, 1, place, place))
                if len(found) > bound:
                    found = joined(found)
                    bound = len(found) + rows_at_once
            after = joined(found)
            starts = {one[0] for one in after}
            for one in before:
                if one[0] not in starts:
                    self._open.removeKey((one[0],))
            for one in after:
                if one not in before:
                    self._open.updateValue((one[0],), one[1:])
            timers = [min(map(closes, some), default=None) for some in (before, after)]
            if timers[0] != timers[1]:
                if timers[0] is not None:
                    self._handle.deleteTimer(timers[0])
                self._handle.registerTimer(timers[1])
            yield from ()  # what is closed is known when the batch is through: timers come last

        def handleExpiredTimer(  # noqa: N802
            self,
            key: Any,
            timerValues: Any,  # noqa: N803
            expiredTimerInfo: Any,  # noqa: ARG002, N803
        ) -> Iterator[Row]:
            watermark = timerValues.getCurrentWatermarkInMs()
            left = []
            for one in self._sessions():
                if closes(one) > watermark:
                    left.append(closes(one))
                    continue
                self._open.removeKey((one[0],))
                start, end, count, first, last = one
                yield Row(
                    key=key[0],
                    start=start,
                    end=end,
                    count=count,
                    first=Row(stream=first[0], offset=first[1]),
                    last=Row(stream=last[0], offset=last[1]),
                )
            if left:
                self._handle.registerTimer(min(left))  # Spark removes the one that has expired

        def close(self) -> None:
            pass

        def _sessions(self) -> list[Any]:
            return [
                (start, end, count, tuple(first), tuple(last))
                for (start,), (end, count, first, last) in self._open.iterator()
            ]

    return Sessions()
