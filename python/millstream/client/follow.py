"""Reading: to the tail once (`read_steps`), or on and on as records come (`Follow`).

Where it sits: beside `steps.py`, run by the same shells.

    catch up (plain GET, window by window) ── up to date ──> live (SSE, or long-poll)
         ^                                                        │
         └──────────── connection broke: wait, resume from the last offset

Invariants:
- I-FOL-1  A batch is delivered once, in order, and only with the offset after it: what a broken
           connection left incomplete is read again.
- I-FOL-2  `offset` is always the position after everything that was delivered.
- I-FOL-3  A gap, or a stream that was deleted and created again, is never passed over in silence.
- I-FOL-4  Every reconnect without progress waits; a server that ends connections at once cannot
           make the client spin.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from millstream import errors
from millstream.client import wire
from millstream.client.http import Request, Response, TransportFailure
from millstream.client.problem import error_from_response, retry_after_seconds
from millstream.client.sse import Event, EventParser, EventTooLarge
from millstream.client.steps import Call, Emit, Hangup, Open, Operations, Receive, Sleep, Steps
from millstream.types import Batch, Gap, GapPolicy, LiveMode, Record, is_text_type

OnReconnect: TypeAlias = Callable[[errors.MillstreamError, float], object]
OnResume: TypeAlias = Callable[[], object]
LIVE_SILENCE_SECONDS: Final = 90.0
"""A live response that is silent for longer is taken for dead; servers send at least each 30 s."""
SHORT_CONNECTION_SECONDS: Final = 1.0
SHORT_CONNECTIONS_MAX: Final = 3
logger = logging.getLogger("millstream.client")


class Reader:
    """State shared by both kinds of reading: position, type, identity and the gap rule."""

    def __init__(
        self, operations: Operations, path: str, start: wire.Start, gaps: GapPolicy
    ) -> None:
        self.operations = operations
        self.path = path
        self.start = start
        self.gaps = gaps
        self.offset: str | None = None
        self.content_type = ""
        self.incarnation: str | None = None

    def query(self) -> list[tuple[str, str]]:
        return self.start.query() if self.offset is None else [("offset", self.offset)]

    def page_request(self, extra: list[tuple[str, str]] | None = None) -> Request:
        query = self.query() + (extra or [])
        return Request("GET", wire.stream_target(self.operations.endpoint, self.path, query))

    def accept(self, response: Response) -> Batch:
        """Turn a read answer into a batch and move the position."""
        extended = "stream-incarnation" in response.headers
        if self.offset is None and self.start.extended and not extended:
            feature = "reading by `tail`" if self.start.tail is not None else "`since`"
            raise self.operations.not_extended(feature)
        page = wire.page_of(response, self.offset or self.start.offset)
        body = b"" if response.status == 204 else bytes(response.body)
        if response.status != 204 or not self.content_type:
            self.content_type = page.content_type
        records: tuple[Record, ...] = ()
        if body:
            records = wire.decode_body(body, self.content_type, page.offset)
        gap = self.check_identity(page.incarnation, page.gap, page.offset)
        return self.batch(records, page.offset, page.up_to_date, page.closed, gap)

    def check_identity(self, seen: str | None, gap: Gap | None, offset: str) -> Gap | None:
        known, self.incarnation = self.incarnation, seen or self.incarnation
        if gap is None and known is not None and seen is not None and seen != known:
            return Gap(self.offset or wire.START, offset, "recreated")
        return gap

    def batch(
        self,
        records: tuple[Record, ...],
        offset: str,
        up_to_date: bool,
        closed: bool,
        gap: Gap | None,
    ) -> Batch:
        if gap is not None:
            records = told_gap(self.path, gap, self.gaps) + records
        self.offset = offset
        return Batch(records, offset, up_to_date, closed, self.content_type, self.incarnation)


def told_gap(path: str, gap: Gap, gaps: GapPolicy) -> tuple[Record, ...]:
    """What `gaps=` says about a gap: raise, give a record that stands for it, or call and give nothing."""
    gap = replace(gap, stream=path)
    lost = "records are missing" if gap.certain else "records may be missing"
    sentence = (
        f"{lost} in stream `{path}` between {gap.from_offset} and {gap.to_offset} "
        f"(reason: {gap.reason})"
    )
    if gaps == "raise":
        raise errors.GapError(
            sentence,
            gap=gap,
            hint=f"read on from offset {gap.to_offset}, or choose what to do with `gaps=`",
        )
    if gaps == "record":
        logger.warning("%s", sentence)
        return (Record(None, b"", gap.from_offset, gap=gap),)
    gaps(gap)
    return ()


def read_steps(reader: Reader) -> Steps[None]:
    """Emit batches until the tail, as it is when it is reached."""
    operations = reader.operations
    while True:
        before = reader.offset
        response = yield from operations.call(reader.page_request(), reader.path, safe=True)
        batch = reader.accept(response)
        if batch.records:
            yield Emit(batch)
        if batch.up_to_date or batch.closed or (batch.offset == before and not batch.records):
            return


class Follow(Reader):
    """Reads to the tail and then stays; ends when a closed stream was read to its end."""

    def __init__(
        self,
        operations: Operations,
        path: str,
        start: wire.Start,
        gaps: GapPolicy,
        *,
        mode: LiveMode,
        on_reconnect: OnReconnect | None,
        on_resume: OnResume | None,
    ) -> None:
        super().__init__(operations, path, start, gaps)
        self.mode = mode
        self.on_reconnect = on_reconnect
        self.on_resume = on_resume
        self.cursor: str | None = None
        self.live = False
        self.finished = False
        self.failures = 0
        self.short_connections = 0
        self.heard = False
        """True once the server answered: from then on the follower never gives up on it."""

    def steps(self) -> Steps[None]:
        while not self.finished:
            try:
                if not self.live:
                    yield from self.catch_up()
                elif self.use_sse():
                    yield from self.listen()
                else:
                    yield from self.poll()
            except TransportFailure as failure:
                error = self.operations.failure_error(failure, may_be_applied=False)
                yield from self.recover(error, failure)
            except errors.ServerError as error:
                if not error.retryable and error.status < 500:
                    raise
                yield from self.recover(error, error)

    def use_sse(self) -> bool:
        if self.mode != "auto":
            return self.mode == "sse"
        # SSE folds CR and CRLF of text into LF; only long-poll gives text streams byte for byte.
        return not is_text_type(self.content_type) and (
            self.short_connections < SHORT_CONNECTIONS_MAX
        )

    def recover(self, error: errors.MillstreamError, cause: Exception) -> Steps[None]:
        """Wait before the next try; give up only on a server that never answered."""
        yield Hangup()
        self.failures += 1
        if not self.heard and self.failures >= self.operations.retry.attempts:
            raise error from cause
        after = error.retry_after_seconds if isinstance(error, errors.ServerError) else None
        wait = self.operations.retry.wait_seconds(self.failures, after)
        if self.heard and self.on_reconnect is not None:
            self.on_reconnect(error, wait)
        self.live = False
        yield Sleep(wait)

    def checked(self, request: Request, response: Response) -> Response:
        if response.status >= 300:
            raise error_from_response(request, response, self.path)
        self.heard = True
        self.failures = 0
        self.operations.learn(response)
        return response

    def catch_up(self) -> Steps[None]:
        request = self.page_request()
        response: Response = yield Call(request, self.operations.timeout_seconds)
        before = self.offset
        resumed = self.heard and self.failures > 0
        batch = self.accept(self.checked(request, response))
        if resumed and self.on_resume is not None:
            # Told after `accept`, so that a caller who was told of a gap knows it by now.
            self.on_resume()
        self.finished = batch.closed
        self.live = batch.up_to_date or (batch.offset == before and not batch.records)
        if batch.records or batch.closed:
            yield Emit(batch)

    def poll(self) -> Steps[None]:
        extra = [("live", "long-poll")] + ([("cursor", self.cursor)] if self.cursor else [])
        request = self.page_request(extra)
        started = time.monotonic()
        before = self.offset
        response: Response = yield Call(request, LIVE_SILENCE_SECONDS)
        self.cursor = response.headers.get("stream-cursor", self.cursor)
        batch = self.accept(self.checked(request, response))
        self.finished = batch.closed
        if batch.records or batch.closed:
            yield Emit(batch)
        elif batch.offset == before and time.monotonic() - started < SHORT_CONNECTION_SECONDS:
            # A server that answers "nothing" at once must not be asked in a tight loop (I-FOL-4).
            yield Sleep(self.operations.retry.wait_seconds(1, retry_after_seconds(response)))

    def listen(self) -> Steps[None]:
        extra = [("live", "sse")] + ([("cursor", self.cursor)] if self.cursor else [])
        request = self.page_request(extra)
        started = time.monotonic()
        before = self.offset
        response: Response = yield Open(request, self.operations.timeout_seconds)
        self.checked(request, response)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            raise errors.ProtocolError("the server did not answer a live request with SSE")
        yield from self.receive_events(response)
        yield Hangup()
        if self.finished:
            return
        if time.monotonic() - started < SHORT_CONNECTION_SECONDS:
            self.short_connections += 1
            if self.offset == before:
                yield Sleep(self.operations.retry.wait_seconds(self.short_connections))
        else:
            self.short_connections = 0

    def receive_events(self, response: Response) -> Steps[None]:
        encoded = response.headers.get("stream-sse-data-encoding", "").lower() == "base64"
        seen = response.headers.get("stream-incarnation")
        parser = EventParser()
        pending: list[bytes] = []
        while not self.finished:
            data: bytes = yield Receive(LIVE_SILENCE_SECONDS)
            if not data:
                return
            try:
                events = parser.feed(data)
            except EventTooLarge as error:
                raise errors.ProtocolError(str(error)) from error
            for event in events:
                if event.kind == "data":
                    pending.append(decode_base64(event.data) if encoded else event.data)
                elif event.kind == "control":
                    batch = self.accept_control(event, pending, seen)
                    pending = []
                    if batch.records or batch.closed:
                        yield Emit(batch)

    def accept_control(self, event: Event, pending: list[bytes], seen: str | None) -> Batch:
        control = parse_control(event.data)
        offset = control["streamNextOffset"]
        records: tuple[Record, ...] = ()
        if len(pending) == 1:
            records = wire.decode_body(pending[0], self.content_type, offset)
        elif pending:
            parts = [wire.decode_body(data, self.content_type, offset) for data in pending]
            flat = [record for part in parts for record in part]
            last = len(flat) - 1
            records = tuple(
                Record(record.value, record.data, offset, index == last)
                for index, record in enumerate(flat)
            )
        self.cursor = control.get("streamCursor", self.cursor)
        self.finished = control.get("streamClosed") is True
        gap = self.check_identity(seen, gap_of(control), offset)
        up_to_date = control.get("upToDate") is True
        return self.batch(records, offset, up_to_date, self.finished, gap)


def parse_control(data: bytes) -> dict[str, Any]:
    try:
        control = json.loads(data)
    except ValueError as error:
        raise errors.ProtocolError(
            f"the server sent a control event that is not JSON: {error}"
        ) from None
    if not isinstance(control, dict) or not isinstance(control.get("streamNextOffset"), str):
        raise errors.ProtocolError("the server sent a control event without streamNextOffset")
    return control


def gap_of(control: dict[str, Any]) -> Gap | None:
    if "streamGapFrom" not in control:
        return None
    return Gap(
        from_offset=str(control["streamGapFrom"]),
        to_offset=str(control.get("streamGapTo", control["streamNextOffset"])),
        reason=str(control.get("streamGapReason", "unknown")),
        certain=control.get("streamGapCertain", True) not in (False, 0, "0"),
    )


def decode_base64(data: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error as error:
        raise errors.ProtocolError(f"the server sent bad base64: {error}") from None
