"""The tails of the streams of a query, kept in memory by one background connection.

Where it sits: below `stream_reader.py`, in the planner process that Spark keeps per query. Spark asks for
the latest offset every few milliseconds, also at rest; the answer must cost no request.

Invariants:
- I-FLW-1  One thread and one request under way at a time; the request waits on the server for news.
- I-FLW-2  `state` is replaced as a whole, never changed in place: whoever holds one may read it at leisure.
- I-FLW-3  A stream that vanished stays in `gone` with the last tail that was seen.
- I-FLW-4  A server that stays unreachable beyond the client's patience is reported by `news`, once per
           question; until then the last known tails stand.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from millstream.client.pipeline_read import StreamTail, Tails
from millstream.client.sync.reads import PipelineReads
from millstream.errors import ClientClosed, MillstreamError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.client.sync.client import Client
    from millstream.spark.access import Access
    from millstream.spark.read.selection import Selection

WAIT_MS: Final = 25_000
"""How long the server may hold a question without news: below the silence that proxies tolerate."""
PAUSE_SECONDS: Final = 0.005
"""Least time between two questions, so that a busy server is asked at most 200 times a second."""


@dataclass(frozen=True, slots=True)
class TailState:
    """What is known now. `version` grows with each change."""

    version: int
    streams: Mapping[str, StreamTail]
    gone: Mapping[str, StreamTail] = field(default_factory=dict)


def advanced(state: TailState, answer: Tails) -> TailState:
    """The state after an answer; the same object if the answer says nothing new."""
    fresh = {stream.name: stream for stream in answer.streams}
    if answer.complete:
        streams: dict[str, StreamTail] = fresh
        vanished = [name for name in state.streams if name not in fresh]
    else:
        vanished = [name for name in answer.missing if name in state.streams]
        if not fresh and not vanished:
            return state
        streams = {**state.streams, **fresh}
        for name in vanished:
            if name not in fresh:
                del streams[name]
    if not vanished and streams == state.streams:
        return state
    gone = dict(state.gone)
    for name in vanished:
        gone[name] = state.streams[name]
    for name in fresh:
        gone.pop(name, None)
    return TailState(state.version + 1, streams, gone)


class Follower:
    """Follows tails from `start` to `stop`."""

    def __init__(self, access: Access, selection: Selection) -> None:
        self._access = access
        self._selection = selection
        self._changed = threading.Condition()
        self._state: TailState | None = None
        self._failure: MillstreamError | None = None
        self._stopped = False
        self._client: Client | None = None
        self._reads: PipelineReads | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> TailState:
        """The tails as they are now; from here on they are followed. May be called again."""
        if self._state is None:
            self._client = self._access.connect_first()
            self._reads = PipelineReads(self._client, self._access.patience_seconds)
            answer = self._selection.ask(self._reads, walk=True)
            streams = self._selection.all_there(answer)
            self._state = TailState(1, streams)
            self._thread = threading.Thread(
                target=self._follow, args=(answer.cursor,), name="millstream-tails", daemon=True
            )
            self._thread.start()
        return self._state

    def news(self, seen: int, seconds: float) -> TailState:
        """The state now; if it is still version `seen`, wait up to `seconds` for another one."""
        with self._changed:
            assert self._state is not None, "`start` comes first"
            until = time.monotonic() + seconds
            while self._state.version == seen and self._failure is None:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            return self._state

    def stop(self) -> None:
        self._stopped = True
        if self._reads is not None:
            self._reads.cancel()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._client is not None:
            self._client.close()

    def _follow(self, cursor: str) -> None:
        assert self._reads is not None
        while not self._stopped:
            began = time.monotonic()
            try:
                answer = self._selection.ask(self._reads, cursor, WAIT_MS, walk=True)
            except ClientClosed:
                return
            except MillstreamError as error:
                self._publish_failure(error)
                continue
            cursor = answer.cursor
            self._publish(answer)
            if time.monotonic() - began < PAUSE_SECONDS:
                time.sleep(PAUSE_SECONDS)

    def _publish(self, answer: Tails) -> None:
        assert self._state is not None
        state = advanced(self._state, answer)
        with self._changed:
            if self._failure is not None or state is not self._state:
                self._failure = None
                self._state = state
                self._changed.notify_all()

    def _publish_failure(self, error: MillstreamError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
            # The query fails on this; until Spark ends the process, do not ask in a tight loop.
            self._changed.wait(1.0)
