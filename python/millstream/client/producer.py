"""The idempotent producer without I/O: batching, sequence numbers, what to send, what to repeat.

Where it sits: the producers of `aio/` and `sync/` own a connection and a worker; they ask `take`
what to send and report each response or break to this core.

    append ─> open batch ─seal─> queue ─take─> in flight (pipelined) ─200─> acknowledged
                                   ^                 │
                                   └── broke, 503, gap behind a failed one ──┘

Invariants:
- I-PRO-1  A sequence number belongs to one batch for ever; a repeated batch has the same bytes.
- I-PRO-2  Batches are sent in order of their numbers; at most `in_flight_max` are unanswered.
- I-PRO-3  Until the first batch is acknowledged it travels alone: it claims the epoch.
- I-PRO-4  The epoch is raised by itself only while none of our batches can have been applied; later
           a newer epoch means that another producer took over, and this one fails.
- I-PRO-5  After a failure nothing is sent any more, and every further call raises.

The claim: without an explicit epoch a session takes the clock in microseconds. An earlier session
with the same id has a smaller one, so its numbers cannot be mistaken for ours and it is fenced off.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.client import wire
from millstream.client.problem import error_from_response, retry_after_seconds
from millstream.types import is_json_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.client.http import Request, Response, TransportFailure
    from millstream.client.retry import Retry
    from millstream.client.steps import Operations

EPOCH_CLAIMS_MAX: Final = 3
GAP_ANSWERS_MAX: Final = 3
IN_FLIGHT_BATCHES: Final = 16
IN_FLIGHT_APPENDS: Final = 256
INTEGER_MAX: Final = 2**53 - 1


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """How a producer batches.

    A batch is sent when it is full, when it is `linger_seconds` old (not under an epoch of the caller's
    own, where time decides nothing), or on `flush()`. Byte streams
    are not batched, because that would melt records together; their appends are pipelined.
    `in_flight_max` is how many requests may be unanswered: by default 16 batches, or 256 appends to
    a byte stream; `in_flight_bytes_max` bounds what they carry together.
    """

    batch_records_max: int = 1000
    batch_bytes_max: int = 1024 * 1024
    linger_seconds: float = 0.005
    in_flight_max: int | None = None
    in_flight_bytes_max: int = 4 * 1024 * 1024
    buffered_bytes_max: int = 16 * 1024 * 1024
    delivery_seconds_max: float = 120.0

    def __post_init__(self) -> None:
        for name in ("batch_records_max", "batch_bytes_max", "in_flight_max", "buffered_bytes_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.InvalidArgument(f"producer option `{name}` must be at least 1")

    def window(self, *, as_json: bool) -> int:
        if self.in_flight_max is not None:
            return self.in_flight_max
        return IN_FLIGHT_BATCHES if as_json else IN_FLIGHT_APPENDS


@dataclass(slots=True)
class SealedBatch:
    sequence: int
    body: bytes
    records: int
    sealed_at: float
    close: bool = False
    """True: this batch also closes the stream."""
    attempts: int = 0
    early_answers: int = 0
    lost: bool = False
    """True if some try got no answer, so that the server may have applied it."""


@dataclass(slots=True)
class ProducerCore:
    endpoint: wire.Endpoint
    path: str
    content_type: str
    producer_id: str
    epoch: int
    claim: bool
    """True: the epoch was chosen by us and may be raised at the start."""
    options: ProducerOptions
    retry: Retry
    acknowledged_records: int = 0
    acknowledged_offset: str | None = None
    error: errors.MillstreamError | None = None
    buffered_bytes: int = 0
    _as_json: bool = False
    _open: list[bytes] = field(default_factory=list)
    _open_bytes: int = 0
    _open_since: float = 0.0
    _next_sequence: int = 0
    _queue: deque[SealedBatch] = field(default_factory=deque)
    _flight: deque[SealedBatch] = field(default_factory=deque)
    _flight_bytes: int = 0
    _ended: bool = False
    _established: bool = False
    _claims: int = 0
    _failures: int = 0
    _not_before: float = 0.0

    def __post_init__(self) -> None:
        if not self.producer_id:
            raise errors.InvalidArgument("the producer id is empty")
        if not 0 <= self.epoch <= INTEGER_MAX:
            raise errors.InvalidArgument("the producer epoch must be between 0 and 2^53 - 1")
        self.set_content_type(self.content_type)

    def set_content_type(self, content_type: str) -> None:
        """Must be known before the first record is encoded."""
        self.content_type = content_type
        self._as_json = is_json_type(content_type)

    # ------------------------------------------------------------------ the caller's side

    def encode(self, value: Any) -> bytes:
        record = wire.encode_record(value, as_json=self._as_json)
        if not record:
            raise errors.InvalidArgument("an empty record cannot be appended")
        return record

    def add(self, record: bytes, now: float) -> bool:
        """Take a record; True if the worker has something new to look at."""
        self.check()
        first = not self._open
        if not self._as_json:
            self._seal_body(record, 1, now)
            return True
        # Whoever waits for room must not wait for a batch that waits to be full.
        bytes_max = min(self.options.batch_bytes_max, self.options.buffered_bytes_max)
        if self._open and self._open_bytes + len(record) > bytes_max:
            self.seal(now)
        if not self._open:
            self._open_since = now
        self._open.append(record)
        self._open_bytes += len(record) + 1
        self.buffered_bytes += len(record) + 1
        if len(self._open) >= self.options.batch_records_max or self._open_bytes >= bytes_max:
            self.seal(now)
            return True
        return first

    def check(self) -> None:
        if self.error is not None:
            raise errors.ProducerClosed(
                f"the producer has failed: {self.error}", hint=self.error.hint
            ) from self.error
        if self._ended:
            raise errors.ProducerClosed("the producer has closed the stream")

    @property
    def full(self) -> bool:
        return self.buffered_bytes >= self.options.buffered_bytes_max

    @property
    def idle(self) -> bool:
        """True if everything that was appended is acknowledged."""
        return not (self._open or self._queue or self._flight)

    @property
    def pending_records(self) -> int:
        sealed = sum(batch.records for batch in (*self._queue, *self._flight))
        return len(self._open) + sealed

    def seal(self, now: float) -> None:
        """Close the open batch, so that it is sent without waiting for more."""
        if self._open:
            records, self._open = self._open, []
            self.buffered_bytes -= self._open_bytes
            self._open_bytes = 0
            self._seal_body(wire.join_json(records), len(records), now)

    def end(self, record: bytes | None, now: float) -> None:
        """Close the stream in sequence, with a last record or without; it may be repeated."""
        self.check()
        self.seal(now)
        body = b"" if record is None else wire.join_json([record]) if self._as_json else record
        self._seal_body(body, 0 if record is None else 1, now)
        self._queue[-1].close = True
        self._ended = True

    def _seal_body(self, body: bytes, records: int, now: float) -> None:
        if self._next_sequence > INTEGER_MAX:
            raise errors.InvalidArgument("the producer has used up its sequence numbers")
        self._queue.append(SealedBatch(self._next_sequence, body, records, now))
        self._next_sequence += 1
        self.buffered_bytes += len(body)

    # ------------------------------------------------------------------ the worker's side

    @property
    def in_flight(self) -> int:
        return len(self._flight)

    def take(self, now: float) -> Request | None:
        """The next request to put on the connection, or None."""
        if self.error is not None:
            return None
        if self._open and now >= self._lingers_until():
            self.seal(now)
        if not self._queue or now < self._not_before:
            return None
        window = self.options.window(as_json=self._as_json) if self._established else 1
        full = self._flight_bytes >= self.options.in_flight_bytes_max
        if self._flight and (len(self._flight) >= window or full):
            return None
        batch = self._queue.popleft()
        batch.attempts += 1
        self._flight.append(batch)
        self._flight_bytes += len(batch.body)
        return self._request(batch)

    def _request(self, batch: SealedBatch) -> Request:
        options = wire.AppendOptions(
            producer=(self.producer_id, self.epoch, batch.sequence), close=batch.close
        )
        return wire.append_request(self.endpoint, self.path, self.content_type, batch.body, options)

    def _lingers_until(self) -> float:
        """When the open batch is sent as it is. Never by time under the caller's own epoch: a replay is dropped batch by
        batch, so the same records must make the same batches, however fast they come."""
        return self._open_since + self.options.linger_seconds if self.claim else math.inf

    def wake_at(self) -> float | None:
        """When `take` may have something although nothing happens until then."""
        times: list[float] = []
        if self._open and self.claim:
            times.append(self._lingers_until())
        if self._queue and not self._flight:
            times.append(self._not_before)
        return min(times) if times else None

    def overdue(self, now: float) -> bool:
        oldest = self._flight[0] if self._flight else self._queue[0] if self._queue else None
        return oldest is not None and now - oldest.sealed_at > self.options.delivery_seconds_max

    def on_response(self, response: Response, now: float) -> None:
        """The answer to the oldest request in flight."""
        batch = self._flight.popleft()
        self._flight_bytes -= len(batch.body)
        if self.error is not None:
            return
        if response.status in (200, 201, 204):
            self._acknowledge(batch, response)
            return
        error = error_from_response(self._request(batch), response, self.path)
        if isinstance(error, errors.ProducerFenced) and self._may_claim(batch, error):
            assert error.current_epoch is not None
            self.epoch = error.current_epoch + 1
            self._claims += 1
            self._queue.appendleft(batch)
        elif isinstance(error, errors.ProducerGap) and self._came_too_soon(batch):
            self._requeue([batch])
        elif error.retryable or isinstance(error, errors.OutcomeUnknown) or _is_internal(error):
            batch.lost = True
            self._requeue([batch])
            self._back_off(now, retry_after_seconds(response), error)
        else:
            self.fail(error)

    def _acknowledge(self, batch: SealedBatch, response: Response) -> None:
        self._established = True
        self._failures = 0
        self.buffered_bytes -= len(batch.body)
        self.acknowledged_records += batch.records
        offset = response.headers.get("stream-next-offset")
        if offset is not None:
            self.acknowledged_offset = offset

    def _may_claim(self, batch: SealedBatch, error: errors.ProducerFenced) -> bool:
        return (
            self.claim
            and not self._established
            and not batch.lost
            and self._claims < EPOCH_CLAIMS_MAX
            and error.current_epoch is not None
            and error.current_epoch < INTEGER_MAX
        )

    def _came_too_soon(self, batch: SealedBatch) -> bool:
        """True if a gap is only a matter of order: an earlier batch was refused for the moment, or
        was overtaken on the way. A server that keeps saying so has lost earlier batches."""
        if any(other.sequence < batch.sequence for other in (*self._queue, *self._flight)):
            return True
        batch.early_answers += 1
        return batch.early_answers < GAP_ANSWERS_MAX

    def _requeue(self, batches: list[SealedBatch]) -> None:
        """Put batches back in order of their numbers (I-PRO-2)."""
        self._queue = deque(sorted((*batches, *self._queue), key=lambda batch: batch.sequence))

    def on_break(self, failure: TransportFailure, now: float, where: str) -> None:
        """The connection is gone: everything in flight must be sent again."""
        flight, self._flight, self._flight_bytes = list(self._flight), deque(), 0
        for batch in flight:
            batch.lost = batch.lost or failure.sent
        self._requeue(flight)
        kind = errors.RequestTimeout if failure.timeout else errors.ConnectionFailed
        error = kind(
            f"cannot reach {where}: {failure.reason}",
            hint="is the server running? start one with `millstream serve`",
        )
        self._back_off(now, None, error)

    def _back_off(
        self, now: float, after_seconds: float | None, error: errors.MillstreamError
    ) -> None:
        self._failures += 1
        if self.overdue(now):
            self.fail(error)
        else:
            self._not_before = now + self.retry.wait_seconds(self._failures, after_seconds)

    def fail(self, error: errors.MillstreamError) -> None:
        if self.error is None:
            self.error = error


def make_core(
    operations: Operations,
    path: str,
    content_type: str,
    producer_id: str | None,
    epoch: int | None,
    options: Mapping[str, Any],
) -> ProducerCore:
    """The core of a new session; without an epoch of the caller's own it claims one."""
    try:
        chosen = ProducerOptions(**options)
    except TypeError as error:
        raise errors.InvalidArgument(f"unknown producer option: {error}") from None
    return ProducerCore(
        endpoint=operations.endpoint,
        path=path,
        content_type=content_type,
        producer_id=f"python-{uuid.uuid4().hex}" if producer_id is None else producer_id,
        epoch=choose_epoch() if epoch is None else epoch,
        claim=epoch is None,
        options=chosen,
        retry=operations.retry,
    )


def _is_internal(error: errors.MillstreamError) -> bool:
    return isinstance(error, errors.ServerError) and error.status >= 500 and error.status != 501


def choose_epoch() -> int:
    """The clock in microseconds: larger than that of any earlier session."""
    return min(time.time_ns() // 1000, INTEGER_MAX)
