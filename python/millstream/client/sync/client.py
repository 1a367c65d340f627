"""The blocking client: `Client`, `Stream` and the iterators they return.

Where it sits: made by `millstream.connect`. A thin shell: what happens is in `steps.py` and
`follow.py`; this file performs their effects with blocking sockets and gives them a face.
Invariant I-SYN-1: no rule of the protocol is written here.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from millstream import errors
from millstream.client import wire
from millstream.client.follow import Follow, Reader, read_steps
from millstream.client.http import TransportFailure
from millstream.client.producer import ProducerCore, ProducerOptions, choose_epoch
from millstream.client.retry import Retry
from millstream.client.steps import Emit, Operations, Steps
from millstream.client.sync.producer import Producer
from millstream.client.sync.transport import Cancelled, Performer, Pool
from millstream.settings import DEFAULT_URL
from millstream.types import Batch, Durability, GapPolicy, LiveMode, Record, StreamInfo

if TYPE_CHECKING:
    from datetime import datetime
    from types import TracebackType

T = TypeVar("T")
OnReconnect = Callable[[errors.MillstreamError, float], object]
OnResume = Callable[[], object]


def default_url() -> str:
    return os.environ.get("MILLSTREAM_URL") or DEFAULT_URL


def connect(
    url: str | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 30.0,
    retry: Retry | None = None,
) -> Client:
    """A client for the server at `url` (default: MILLSTREAM_URL, else http://127.0.0.1:4437).

    Nothing is sent yet. `timeout_seconds` is the longest silence of the server that is tolerated,
    `headers` go with every request.
    """
    return Client(url, headers=headers, timeout_seconds=timeout_seconds, retry=retry)


class Client:
    """A server. Safe to use from several threads; connections are kept and shared."""

    def __init__(
        self,
        url: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 30.0,
        retry: Retry | None = None,
    ) -> None:
        self._headers = dict(headers or {})
        self._operations = Operations(
            wire.parse_url(url or default_url()), retry or Retry(), timeout_seconds
        )
        self._pool = Pool(self._operations.endpoint, self._headers)

    @property
    def url(self) -> str:
        return self._operations.endpoint.url

    def stream(self, path: str, *, content_type: str | None = None) -> Stream:
        """A handle; nothing is sent, the stream need not exist."""
        return Stream(self, wire.check_path(path), content_type)

    def create(
        self,
        path: str,
        *,
        content_type: str | None = None,
        ttl_seconds: int | None = None,
        expires_at: datetime | str | None = None,
        durability: Durability | str | None = None,
        closed: bool = False,
        forked_from: str | Stream | None = None,
        fork_offset: str | None = None,
        fork_sub_offset: int | None = None,
        data: Any = None,
    ) -> Stream:
        """Create a stream, or take it as it is if it exists with the same configuration.

        `data` is a first record, written in the same step. A fork shares the records of its source
        up to `fork_offset` (default: its tail) and goes its own way from there.
        """
        path = wire.check_path(path)
        options = wire.CreateOptions(
            content_type=content_type,
            ttl_seconds=ttl_seconds,
            expires_at=expires_at,
            durability=durability,
            closed=closed,
            forked_from=forked_from.path if isinstance(forked_from, Stream) else forked_from,
            fork_offset=fork_offset,
            fork_sub_offset=fork_sub_offset,
        )
        info, created = run(self._operations.create(path, options, data), self._pool)
        stream = Stream(self, path, info.content_type)
        stream.created = created
        return stream

    def list(
        self, prefix: str = "", *, after: str = "", limit: int | None = None
    ) -> Iterator[StreamInfo]:
        """The streams whose path starts with `prefix`, ordered by path."""
        steps = self._operations.list_streams(prefix, after, limit)
        for value in iterate(steps, Performer(self._pool)):
            assert isinstance(value, StreamInfo)
            yield value

    def close(self) -> None:
        """Close the connections. The server's streams are not touched."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Client], tuple[Any, ...]]:
        """Clients travel to other processes as their configuration, without connections."""
        operations = self._operations
        return _rebuild, (self.url, self._headers, operations.timeout_seconds, operations.retry)

    def __repr__(self) -> str:
        return f"<millstream.Client {self.url}>"


def _rebuild(url: str, headers: dict[str, str], timeout_seconds: float, retry: Retry) -> Client:
    return Client(url, headers=headers, timeout_seconds=timeout_seconds, retry=retry)


class Stream:
    """A handle on one stream; cheap, and good for as long as its client."""

    def __init__(self, client: Client, path: str, content_type: str | None) -> None:
        self.client = client
        self.path = path
        self.created: bool | None = None
        """After `client.create`: True if that call made the stream, False if it existed."""
        self._content_type = content_type

    @property
    def content_type(self) -> str:
        """The stream's type; asked from the server once if it is not known yet."""
        if not self._content_type:
            self._content_type = self.info().content_type
        return self._content_type

    def info(self) -> StreamInfo:
        info = self._run(self._operations.info(self.path))
        self._content_type = info.content_type
        return info

    def append(
        self,
        value: Any,
        *,
        if_match: str | None = None,
        seq: str | None = None,
        close: bool = False,
    ) -> str:
        """Append one record and return the new tail.

        JSON streams take any JSON-able value (bytes: one JSON text); byte streams take bytes or
        str. `if_match` appends only if that offset is still the tail, `seq` only if it is greater
        than the last one; `close=True` makes this the last record. It is not repeated when its fate
        is unknown (`OutcomeUnknown`); use a producer for that.
        """
        options = wire.AppendOptions(if_match=if_match, seq=seq, close=close)
        return self._run(self._operations.append(self.path, self.content_type, value, options))

    def append_many(
        self,
        values: Iterable[Any],
        *,
        if_match: str | None = None,
        seq: str | None = None,
        close: bool = False,
    ) -> str:
        """Append several records. JSON streams take them all or none; byte streams one by one."""
        options = wire.AppendOptions(if_match=if_match, seq=seq, close=close)
        return self._run(
            self._operations.append_many(self.path, self.content_type, values, options)
        )

    def producer(
        self, producer_id: str | None = None, *, epoch: int | None = None, **options: Any
    ) -> Producer:
        """An idempotent producer: batches, pipelines, repeats safely.

        Give each running producer its own id; a new session with the same id fences off the old.
        `epoch` is for callers who number their sessions themselves and want a replay to be dropped: the same
        records, options and flushes make the same batches. Such a batch waits until it is full, or for `flush()`.
        Further options are those of `ProducerOptions`.
        """
        core = make_core(
            self._operations, self.path, self.content_type, producer_id, epoch, options
        )
        return Producer(core, self.client._headers, self._operations.timeout_seconds)

    def read(
        self,
        offset: str | None = None,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
    ) -> Iterator[Record]:
        """The records from `offset` (default: the start) to the tail.

        Instead of an offset: `since` (a time), or `tail` (the last N records). `gaps` says what to
        do where records are, or may be, missing: raise `GapError` ("raise"), go on with a record
        that has `.gap` set ("record"), or call a function with the `Gap` and go on.
        """
        for batch in self.read_batches(offset, since=since, tail=tail, gaps=gaps):
            yield from batch.records

    def read_batches(
        self,
        offset: str | None = None,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
    ) -> Iterator[Batch]:
        """Like `read`, by the answers of the server."""
        reader = Reader(self._operations, self.path, wire.Start(offset, since, tail), gaps)
        for value in iterate(read_steps(reader), Performer(self.client._pool)):
            assert isinstance(value, Batch)
            yield value

    def follow(
        self,
        offset: str | None = None,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
        mode: LiveMode = "auto",
        on_reconnect: OnReconnect | None = None,
        on_resume: OnResume | None = None,
    ) -> Follower[Record]:
        """The records from `offset` (default: the start) and every later one as it comes.

        Ends when the stream is closed and read to its end. Resumes by itself when the connection
        breaks (`on_reconnect(error, wait_seconds)` and `on_resume()` are told). `gaps` as for `read`.
        Break out of the loop, or call
        `.close()` from another thread, to stop.
        """
        follow = self._follow(wire.Start(offset, since, tail), gaps, mode, on_reconnect, on_resume)
        return Follower(follow, Performer(self.client._pool), _records)

    def follow_batches(
        self,
        offset: str | None = None,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
        mode: LiveMode = "auto",
        on_reconnect: OnReconnect | None = None,
        on_resume: OnResume | None = None,
    ) -> Follower[Batch]:
        """Like `follow`, by the answers of the server."""
        follow = self._follow(wire.Start(offset, since, tail), gaps, mode, on_reconnect, on_resume)
        return Follower(follow, Performer(self.client._pool), _batches)

    def close(self) -> str:
        """Close the stream for ever: readers see its end, nobody can append. Returns the tail."""
        return self._run(self._operations.close(self.path))

    def set_durability(self, durability: Durability | str) -> StreamInfo:
        """Give the stream another durability class; returns what the server says about it then.

        What was written keeps at least the promise it was written under. A stronger class holds for
        the old records too, as soon as this returns.
        """
        return self._run(self._operations.set_durability(self.path, durability))

    def delete(self) -> None:
        self._run(self._operations.delete(self.path))

    def _follow(
        self,
        start: wire.Start,
        gaps: GapPolicy,
        mode: LiveMode,
        on_reconnect: OnReconnect | None,
        on_resume: OnResume | None,
    ) -> Follow:
        return Follow(
            self._operations,
            self.path,
            start,
            gaps,
            mode=mode,
            on_reconnect=on_reconnect,
            on_resume=on_resume,
        )

    @property
    def _operations(self) -> Operations:
        return self.client._operations

    def _run(self, steps: Steps[T]) -> T:
        return run(steps, self.client._pool)

    def __repr__(self) -> str:
        return f"<millstream.Stream {self.path} at {self.client.url}>"


V = TypeVar("V", Record, Batch)


class Follower(Generic[V]):
    """An endless iterator over a stream. `offset` is the position after what was delivered."""

    def __init__(
        self, follow: Follow, performer: Performer, spread: Callable[[Batch], Iterable[V]]
    ) -> None:
        self._follow = follow
        self._performer = performer
        self._values: Iterator[V] = self._iterate(spread)

    @property
    def offset(self) -> str | None:
        """Where to resume after the batch that is being delivered; None before the first answer."""
        return self._follow.offset

    def _iterate(self, spread: Callable[[Batch], Iterable[V]]) -> Iterator[V]:
        with contextlib.suppress(Cancelled):
            for value in iterate(self._follow.steps(), self._performer):
                assert isinstance(value, Batch)
                yield from spread(value)

    def close(self) -> None:
        """Stop; an iteration that waits in another thread ends."""
        self._performer.cancel()

    def __iter__(self) -> Iterator[V]:
        return self._values

    def __next__(self) -> V:
        return next(self._values)

    def __enter__(self) -> Follower[V]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        self._performer.hangup()


def _records(batch: Batch) -> Iterable[Record]:
    return batch.records


def _batches(batch: Batch) -> Iterable[Batch]:
    return (batch,)


def make_core(
    operations: Operations,
    path: str,
    content_type: str,
    producer_id: str | None,
    epoch: int | None,
    options: Mapping[str, Any],
) -> ProducerCore:
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


def run(steps: Steps[T], pool: Pool) -> T:
    """Perform a generator to its end and return its result."""
    performer = Performer(pool)
    result: Any = None
    failure: TransportFailure | None = None
    try:
        while True:
            try:
                effect = steps.send(result) if failure is None else steps.throw(failure)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            result, failure = None, None
            try:
                result = performer.perform(effect)
            except TransportFailure as error:
                failure = error
    finally:
        steps.close()


def iterate(steps: Steps[None], performer: Performer) -> Iterator[Batch | StreamInfo]:
    """Perform a generator and give out what it emits."""
    result: Any = None
    failure: TransportFailure | None = None
    try:
        while True:
            try:
                effect = steps.send(result) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            result, failure = None, None
            if isinstance(effect, Emit):
                yield effect.value
                continue
            try:
                result = performer.perform(effect)
            except TransportFailure as error:
                failure = error
    finally:
        steps.close()
        performer.hangup()
