"""The client's operations, written once: generators that ask for I/O instead of doing it.

Where it sits: the shells in `aio/` and `sync/` run these generators; they perform each effect with their
own sockets and sleeps and send the result back in. So retries, paging and error mapping exist
once, and the two shells stay thin.

Invariants:
- I-STEP-1  A request is repeated only if that cannot apply it twice: it is safe by nature (reads,
            create, delete, close), or it provably never arrived, or the server says it refused it.
- I-STEP-2  A request whose fate is unknown ends in `OutcomeUnknown`, never in silence.
- I-STEP-3  Every request that is repeated is repeated by `Operations.repeat`; a `Policy` says how long.
- I-STEP-4  A feature beyond the protocol is used only after the server showed that it knows it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from millstream import errors
from millstream.client import wire
from millstream.client.http import Request, Response, TransportFailure
from millstream.client.problem import error_from_response
from millstream.types import Batch, StreamInfo, is_json_type

if TYPE_CHECKING:
    from millstream.client.retry import Retry

T = TypeVar("T")
Allocate: TypeAlias = Callable[[int], bytearray]
"""Makes a buffer of so many bytes: a bytearray, or what else can be written to like one."""
LIST_PAGE_LIMIT: Final = 1000
ATTEMPT_SECONDS_MIN: Final = 0.1


class Cancelled(Exception):  # noqa: N818 - it reports no error
    """The performer was told to stop; not an error."""


@dataclass(frozen=True, slots=True)
class Call:
    """Send a request; the result is its `Response`, or `TransportFailure` is thrown in."""

    request: Request
    timeout_seconds: float
    allocate: Allocate | None = None
    """Makes the buffer that the body of a 200 is received into."""


@dataclass(frozen=True, slots=True)
class Open:
    """Like `Call`, but a 200 leaves its body open for `Receive` until `Hangup`."""

    request: Request
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Receive:
    """The next piece of the opened body; `b""` when it ended cleanly."""

    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Hangup:
    """Drop the opened connection, if there is one."""


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand a batch of records, or an entry of a listing, to the caller."""

    value: Batch | StreamInfo


Effect: TypeAlias = Call | Open | Receive | Hangup | Sleep | Emit
Steps: TypeAlias = Generator[Effect, Any, T]


@dataclass(frozen=True, slots=True)
class Policy:
    """When a request is sent again. It ends with the attempts or the patience, whichever is first."""

    safe: bool = True
    """It may be sent again although an earlier try may have been applied."""
    attempts: float = math.inf
    patience_seconds: float = math.inf
    pause_seconds_max: float = math.inf
    within_patience: bool = False
    """An attempt does not outlast the patience (by `ATTEMPT_SECONDS_MIN` at most)."""
    any_answer: bool = False
    """Every answer is success, also a refusal."""
    done_if_lost: tuple[int, ...] = ()
    """Statuses that mean success if an earlier try was lost on the way (a repeated DELETE finds nothing)."""
    again: Callable[[errors.MillstreamError], bool] | None = None
    """Which refusals are asked again; None: those of `may_repeat`."""


class Operations:
    """What a client can do with one server; holds no connection."""

    def __init__(self, endpoint: wire.Endpoint, retry: Retry, timeout_seconds: float) -> None:
        self.endpoint = endpoint
        self.retry = retry
        self.timeout_seconds = timeout_seconds
        self.extended: bool | None = None
        """Whether the server knows Millstream's extensions; None until it was seen."""

    # ------------------------------------------------------------------ one request

    def call(
        self, request: Request, path: str, *, safe: bool, done_if_lost: tuple[int, ...] = ()
    ) -> Steps[Response]:
        """One request, repeated as the client was told to."""
        policy = Policy(safe=safe, attempts=self.retry.attempts, done_if_lost=done_if_lost)
        return self.repeat(request, path, policy)

    def repeat(
        self,
        request: Request,
        path: str,
        policy: Policy,
        *,
        extra_seconds: float = 0.0,
        allocate: Allocate | None = None,
    ) -> Steps[Response]:
        """One request until it is answered. `extra_seconds`: how long the server was asked to wait."""
        until = time.monotonic() + policy.patience_seconds
        attempt = 0
        lost = False
        while True:
            attempt += 1
            timeout_seconds = self.timeout_seconds + extra_seconds
            if policy.within_patience:
                # A pause may have lasted longer than was asked for, on a busy machine beyond the end.
                left = max(ATTEMPT_SECONDS_MIN, until - time.monotonic())
                timeout_seconds = min(timeout_seconds, left)
            error: errors.MillstreamError
            cause: TransportFailure | None = None
            try:
                response: Response = yield Call(request, timeout_seconds, allocate)
            except TransportFailure as failure:
                cause = failure
                lost = lost or failure.sent
                again = policy.safe or not failure.sent
                error = self.failure_error(failure, may_be_applied=lost and not policy.safe)
            else:
                done = response.status < 300 or (lost and response.status in policy.done_if_lost)
                if done or policy.any_answer:
                    self.learn(response)
                    return response
                error = error_from_response(request, response, path)
                again = (
                    may_repeat(error, safe=policy.safe)
                    if policy.again is None
                    else policy.again(error)
                )
            pause = self.retry.wait_seconds(attempt, _retry_after(error))
            pause = min(pause, policy.pause_seconds_max)
            if not again or attempt >= policy.attempts or time.monotonic() + pause > until:
                raise error from cause
            yield Sleep(pause)

    def learn(self, response: Response) -> None:
        if "stream-incarnation" in response.headers:
            self.extended = True

    def failure_error(
        self, failure: TransportFailure, *, may_be_applied: bool
    ) -> errors.MillstreamError:
        if may_be_applied:
            return errors.OutcomeUnknown(
                f"no answer to an append ({failure.reason}): it may or may not be in the stream",
                hint="read the tail before trying again, or use a producer, which retries safely",
            )
        where = self.endpoint.url
        if failure.timeout:
            return errors.RequestTimeout(
                f"no answer from {where} in time: {failure.reason}",
                hint="is the server overloaded, or the URL another service?",
            )
        return errors.ConnectionFailed(
            f"cannot reach {where}: {failure.reason}",
            hint="is the server running? start one with `millstream serve`, "
            "or name it with `--url` or MILLSTREAM_URL",
        )

    # ------------------------------------------------------------------ streams

    def create(
        self, path: str, options: wire.CreateOptions, data: Any
    ) -> Steps[tuple[StreamInfo, bool]]:
        """Create a stream if it does not exist; True if this call created it."""
        if data is not None:
            content_type = options.content_type
            if content_type is None and options.forked_from is not None:
                source = yield from self.info(wire.check_path(options.forked_from))
                content_type = source.content_type
            as_json = is_json_type(content_type or "")
            body = wire.encode_record(data, as_json=as_json)
            options = replace(options, body=wire.join_json([body]) if as_json else body)
        request = wire.create_request(self.endpoint, path, options)
        response = yield from self.call(request, path, safe=True)
        info = wire.info_from_head(path, response)
        if options.durability is not None and info.durability != options.durability:
            raise errors.NotSupported(
                f"the server did not confirm durability `{options.durability}` for `{path}`",
                hint="only a Millstream server has durability classes",
            )
        return info, response.status == 201

    def info(self, path: str) -> Steps[StreamInfo]:
        request = Request("HEAD", wire.stream_target(self.endpoint, path))
        response = yield from self.call(request, path, safe=True)
        if self.extended is None:
            self.extended = False
        return wire.info_from_head(path, response)

    def set_durability(self, path: str, durability: str) -> Steps[StreamInfo]:
        """Change the class; to the class that a stream has, it does nothing, so it may be repeated."""
        yield from self.require_extended(path, "changing the durability of a stream")
        request = wire.change_request(self.endpoint, path, durability)
        response = yield from self.call(request, path, safe=True)
        return wire.parse_entry(response)

    def delete(self, path: str) -> Steps[None]:
        request = Request("DELETE", wire.stream_target(self.endpoint, path))
        yield from self.call(request, path, safe=True, done_if_lost=(404, 410))

    def close(self, path: str) -> Steps[str]:
        """Close without data: idempotent by the protocol, so it may be repeated."""
        options = wire.AppendOptions(close=True)
        request = wire.append_request(self.endpoint, path, "", b"", options)
        response = yield from self.call(request, path, safe=True)
        return response.headers.get("stream-next-offset", "")

    def append(
        self, path: str, content_type: str, value: Any, options: wire.AppendOptions
    ) -> Steps[str]:
        as_json = is_json_type(content_type)
        body = wire.encode_record(value, as_json=as_json)
        if not body:
            raise errors.InvalidArgument("an empty record cannot be appended")
        if as_json:
            body = wire.join_json([body])
        return (yield from self.append_body(path, content_type, body, options))

    def append_many(
        self, path: str, content_type: str, values: Iterable[Any], options: wire.AppendOptions
    ) -> Steps[str]:
        """JSON: one atomic request. Bytes: one request per record, so that each stays a record."""
        as_json = is_json_type(content_type)
        records = [wire.encode_record(value, as_json=as_json) for value in values]
        if not records or not all(records):
            raise errors.InvalidArgument("there is no record to append, or one of them is empty")
        if as_json:
            body = wire.join_json(records)
            return (yield from self.append_body(path, content_type, body, options))
        if options.seq is not None and len(records) > 1:
            raise errors.InvalidArgument("`seq` fits one append; several byte records are several")
        offset = ""
        last = len(records) - 1
        for index, record in enumerate(records):
            one = replace(
                options,
                if_match=(offset if index else options.if_match) if options.if_match else None,
                close=options.close and index == last,
            )
            offset = yield from self.append_body(path, content_type, record, one)
        return offset

    def append_body(
        self, path: str, content_type: str, body: bytes, options: wire.AppendOptions
    ) -> Steps[str]:
        if options.if_match is not None:
            yield from self.require_extended(path, "a conditional append (`if_match`)")
        request = wire.append_request(self.endpoint, path, content_type, body, options)
        response = yield from self.call(request, path, safe=False)
        return response.headers.get("stream-next-offset", "")

    def list_streams(self, prefix: str, after: str, limit: int | None) -> Steps[None]:
        left = limit
        while left is None or left > 0:
            page_limit = LIST_PAGE_LIMIT if left is None else min(left, LIST_PAGE_LIMIT)
            request = wire.list_request(self.endpoint, prefix, after, page_limit)
            try:
                response = yield from self.call(request, "", safe=True)
            except errors.ServerError as error:
                if error.status in (404, 405):
                    raise self.not_extended("listing streams") from error
                raise
            rows, following = wire.parse_listing(response)
            for row in rows:
                yield Emit(row)
            if following is None:
                return
            if following <= after:
                raise errors.ProtocolError("the server's listing does not move forward")
            after = following
            left = None if left is None else left - len(rows)

    # ------------------------------------------------------------------ extensions

    def require_extended(self, path: str, feature: str) -> Steps[None]:
        """Ask the server once whether it is Millstream: another one would ignore the feature."""
        if self.extended is None:
            yield from self.info(path)
        if not self.extended:
            raise self.not_extended(feature)

    def not_extended(self, feature: str) -> errors.NotSupported:
        return errors.NotSupported(
            f"the server at {self.endpoint.url} does not offer {feature}",
            hint="it is an extension of Millstream",
        )


def may_repeat(error: errors.MillstreamError, *, safe: bool) -> bool:
    """Whether a refused request may be sent again (I-STEP-1)."""
    if safe:
        status = error.status if isinstance(error, errors.ServerError) else 0
        return error.retryable or (status >= 500 and status not in (501, 505))
    return error.retryable and error.code in errors.REFUSED_UNAPPLIED_CODES and _promised(error)


def _promised(error: errors.MillstreamError) -> bool:
    """A bare 503 may come from a proxy after the server applied the request; a problem code, or
    429, is the server's own word."""
    if not isinstance(error, errors.ServerError):
        return False
    return error.status == 429 or error.title is not None


def _retry_after(error: errors.MillstreamError) -> float | None:
    return error.retry_after_seconds if isinstance(error, errors.ServerError) else None
