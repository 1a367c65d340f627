"""The clients, `AsyncClient` and `AsyncStream`, and the iterators they return.

Where it sits: made by `millstream.aio.connect`. A thin shell: what happens is in `steps.py` and
`follow.py`; this file performs their effects and gives them a face.
Invariant I-SHL-1: no rule of the protocol is written here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from millstream.client import arrow, wire
from millstream.client.aio.arrow import AsyncArrowBatches
from millstream.client.aio.producer import AsyncProducer
from millstream.client.aio.transport import AsyncPerformer, AsyncPool, iterate, run
from millstream.client.follow import Follow, OnReconnect, OnResume, Reader, read_steps
from millstream.client.pipeline_read import info_steps
from millstream.client.producer import make_core
from millstream.client.retry import Retry
from millstream.client.steps import Cancelled, Operations, Steps
from millstream.types import (
    Batch,
    Durability,
    GapPolicy,
    LiveMode,
    Record,
    StreamInfo,
    is_json_type,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType

T = TypeVar("T")


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 30.0,
    retry: Retry | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> AsyncClient:
    """A client for the server at `url` (default: MILLSTREAM_URL, else http://127.0.0.1:4437).

    Nothing is sent yet. `token` goes with every request as `Authorization: Bearer` (default:
    MILLSTREAM_TOKEN; `""` for none), as do `headers`. `timeout_seconds` is the longest silence of the
    server that is tolerated. `ssl_context` is for https addresses whose certificate the system does
    not know.
    """
    return AsyncClient(
        url,
        token=token,
        headers=headers,
        timeout_seconds=timeout_seconds,
        retry=retry,
        ssl_context=ssl_context,
    )


class AsyncClient:
    """A server. Connections are kept and shared: by threads, or by the tasks of one event loop."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 30.0,
        retry: Retry | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._headers = wire.with_token(headers or {}, token)
        self._ssl_context = ssl_context
        self._operations = Operations(
            wire.parse_url(url or wire.default_url()), retry or Retry(), timeout_seconds
        )
        self._pool = AsyncPool(self._operations.endpoint, self._headers, ssl_context)

    @property
    def url(self) -> str:
        return self._operations.endpoint.url

    def stream(self, path: str, *, content_type: str | None = None) -> AsyncStream:
        """A handle; nothing is sent, the stream need not exist."""
        return AsyncStream(self, wire.check_path(path), content_type)

    async def create(
        self,
        path: str,
        *,
        content_type: str | None = None,
        ttl_seconds: int | None = None,
        expires_at: datetime | str | None = None,
        durability: Durability | str | None = None,
        closed: bool = False,
        forked_from: str | AsyncStream | None = None,
        fork_offset: str | None = None,
        fork_sub_offset: int | None = None,
        data: Any = None,
    ) -> AsyncStream:
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
            forked_from=forked_from.path if isinstance(forked_from, AsyncStream) else forked_from,
            fork_offset=fork_offset,
            fork_sub_offset=fork_sub_offset,
        )
        info, created = await self._run(self._operations.create(path, options, data))
        stream = AsyncStream(self, path, info.content_type)
        stream.created = created
        return stream

    async def list(
        self, prefix: str = "", *, after: str = "", limit: int | None = None
    ) -> AsyncIterator[StreamInfo]:
        """The streams whose path starts with `prefix`, ordered by path."""
        steps = self._operations.list_streams(prefix, after, limit)
        async for value in iterate(steps, AsyncPerformer(self._pool)):
            assert isinstance(value, StreamInfo)
            yield value

    def read_arrow(
        self,
        pattern: str,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
        columns: Sequence[arrow.Column] = arrow.DEFAULT,
    ) -> AsyncArrowBatches:
        """The records of every stream whose whole name matches `pattern`, as Arrow batches.

        Stream by stream, each from its start (or `since` a time, or the last `tail` of it) to the tail as
        it is when the read begins. Otherwise as `AsyncStream.read_arrow`.
        """
        selection = arrow.Selection(None, pattern, wire.Start(None, since, tail))
        return AsyncArrowBatches(self, selection, gaps, columns)

    async def _run(self, steps: Steps[T]) -> T:
        """Perform an operation; for what stands beside the client."""
        return await run(steps, AsyncPerformer(self._pool))

    async def close(self) -> None:
        """Close the connections. The server's streams are not touched."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __reduce__(self) -> tuple[Callable[..., AsyncClient], tuple[Any, ...]]:
        """Clients travel to other processes as their configuration, without connections."""
        operations = self._operations
        return _rebuild, (
            self.url,
            self._headers,
            operations.timeout_seconds,
            operations.retry,
            self._ssl_context,
        )

    def __repr__(self) -> str:
        return f"<millstream.AsyncClient {self.url}>"


def _rebuild(
    url: str,
    headers: dict[str, str],
    timeout_seconds: float,
    retry: Retry,
    ssl_context: ssl.SSLContext | None,
) -> AsyncClient:
    return AsyncClient(
        url,
        token="",  # it is in the headers
        headers=headers,
        timeout_seconds=timeout_seconds,
        retry=retry,
        ssl_context=ssl_context,
    )


class AsyncStream:
    """A handle on one stream; cheap, and good for as long as its client."""

    def __init__(self, client: AsyncClient, path: str, content_type: str | None) -> None:
        self.client = client
        self.path = path
        self.created: bool | None = None
        """After `client.create`: True if that call made the stream, False if it existed."""
        self._content_type = content_type

    @property
    async def content_type(self) -> str:
        """The stream's type; asked from the server once if it is not known yet."""
        if not self._content_type:
            head = await self.client._run(self._operations.info(self.path))
            self._content_type = head.content_type
        return self._content_type

    async def info(self) -> StreamInfo:
        """What the server says about the stream; a Millstream server also counts its records and bytes."""
        info = await self.client._run(info_steps(self._operations, self.path))
        self._content_type = info.content_type
        return info

    async def append(
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
        content_type = await self.content_type
        return await self.client._run(
            self._operations.append(self.path, content_type, value, options)
        )

    async def append_many(
        self,
        values: Iterable[Any],
        *,
        if_match: str | None = None,
        seq: str | None = None,
        close: bool = False,
    ) -> str:
        """Append several records. JSON streams take them all or none; byte streams one by one."""
        options = wire.AppendOptions(if_match=if_match, seq=seq, close=close)
        content_type = await self.content_type
        return await self.client._run(
            self._operations.append_many(self.path, content_type, values, options)
        )

    def producer(
        self, producer_id: str | None = None, *, epoch: int | None = None, **options: Any
    ) -> AsyncProducer:
        """An idempotent producer: batches, pipelines, repeats safely.

        Give each running producer its own id; a new session with the same id fences off the old.
        `epoch` is for callers who number their sessions themselves and want a replay to be dropped: the same
        records, options and flushes make the same batches. Such a batch waits until it is full, or for `flush()`.
        Further options are those of `ProducerOptions`.
        """
        core = make_core(
            self._operations, self.path, self._content_type or "", producer_id, epoch, options
        )
        return AsyncProducer(core, self, self.client._pool, self._operations.timeout_seconds)

    async def read(
        self,
        offset: str | None = None,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
        numbered: bool = False,
    ) -> AsyncIterator[Record]:
        """The records from `offset` (default: the start) to the tail.

        Instead of an offset: `since` (a time), or `tail` (the last N records). `gaps` says what to
        do where records are, or may be, missing: raise `GapError` ("raise"), go on with a record
        that has `.gap` set ("record"), or call a function with the `Gap` and go on.

        `numbered=True` reads as `read_arrow` does (a Millstream server, pyarrow): each record has its
        `number` and `time`, and in a byte stream each append is a record of its own.
        """
        if numbered:
            as_json = is_json_type(await self.content_type)
            rows = self.read_arrow(
                offset, since=since, tail=tail, gaps=gaps, columns=arrow.RECORD_COLUMNS
            )
            async for record in rows._records(as_json=as_json):
                yield record
            return
        async for batch in self.read_batches(offset, since=since, tail=tail, gaps=gaps):
            for record in batch.records:
                yield record

    async def read_batches(
        self,
        offset: str | None = None,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
    ) -> AsyncIterator[Batch]:
        """Like `read`, by the answers of the server."""
        reader = Reader(self._operations, self.path, wire.Start(offset, since, tail), gaps)
        async for value in iterate(read_steps(reader), AsyncPerformer(self.client._pool)):
            assert isinstance(value, Batch)
            yield value

    def read_arrow(
        self,
        offset: str | None = None,
        *,
        since: datetime | int | str | None = None,
        tail: int | None = None,
        gaps: GapPolicy = "raise",
        columns: Sequence[arrow.Column] = arrow.DEFAULT,
    ) -> AsyncArrowBatches:
        """The records as Arrow batches, with `stream`, `number`, `time` and `value` (bytes as they were sent).

        From `offset` (default: the start), `since` or `tail` as for `read`, to the tail as it is when the
        read begins. Much faster than `read` for small records; needs a Millstream server and pyarrow.
        `columns` chooses among these and `position` (the offset where the record's append begins) and
        `epoch`. `gaps` is "raise" or a function.
        """
        selection = arrow.Selection(self.path, None, wire.Start(offset, since, tail))
        return AsyncArrowBatches(self.client, selection, gaps, columns)

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
    ) -> AsyncFollower[Record]:
        """The records from `offset` (default: the start) and every later one as it comes.

        Ends when the stream is closed and read to its end. Resumes by itself when the connection
        breaks (`on_reconnect(error, wait_seconds)` and `on_resume()` are told). `gaps` as for `read`.
        Use `async with`, or call `aclose()`, to let go of the connection after leaving the loop
        early; `aclose()` also ends an iteration that waits elsewhere.
        """
        follow = self._follow(wire.Start(offset, since, tail), gaps, mode, on_reconnect, on_resume)
        return AsyncFollower(follow, AsyncPerformer(self.client._pool), _records)

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
    ) -> AsyncFollower[Batch]:
        """Like `follow`, by the answers of the server."""
        follow = self._follow(wire.Start(offset, since, tail), gaps, mode, on_reconnect, on_resume)
        return AsyncFollower(follow, AsyncPerformer(self.client._pool), _batches)

    async def close(self) -> str:
        """Close the stream for ever: readers see its end, nobody can append. Returns the tail."""
        return await self.client._run(self._operations.close(self.path))

    async def set_durability(self, durability: Durability | str) -> StreamInfo:
        """Give the stream another durability class; returns what the server says about it then.

        What was written keeps at least the promise it was written under. A stronger class holds for
        the old records too, as soon as this returns.
        """
        return await self.client._run(self._operations.set_durability(self.path, durability))

    async def delete(self) -> None:
        await self.client._run(self._operations.delete(self.path))

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

    def __repr__(self) -> str:
        return f"<millstream.AsyncStream {self.path} at {self.client.url}>"


V = TypeVar("V", Record, Batch)


class AsyncFollower(Generic[V]):
    """An endless iterator over a stream. `offset` is the position after what was delivered."""

    def __init__(
        self, follow: Follow, performer: AsyncPerformer, spread: Callable[[Batch], Iterable[V]]
    ) -> None:
        self._follow = follow
        self._performer = performer
        self._values: AsyncIterator[V] = self._iterate(spread)

    @property
    def offset(self) -> str | None:
        """Where to resume after the batch that is being delivered; None before the first answer."""
        return self._follow.offset

    def __repr__(self) -> str:
        place = "nothing yet" if self.offset is None else f"at {self.offset}"
        return f"<millstream.AsyncFollower {self._follow.path}: {place}>"

    async def _iterate(self, spread: Callable[[Batch], Iterable[V]]) -> AsyncIterator[V]:
        with contextlib.suppress(Cancelled):
            async with contextlib.aclosing(
                iterate(self._follow.steps(), self._performer)
            ) as values:
                async for value in values:
                    assert isinstance(value, Batch)
                    for item in spread(value):
                        yield item

    async def aclose(self) -> None:
        """Stop and let go of the connection; an iteration that waits elsewhere ends."""
        self._performer.cancel()

    def __aiter__(self) -> AsyncIterator[V]:
        return self._values

    async def __anext__(self) -> V:
        return await anext(self._values)

    async def __aenter__(self) -> AsyncFollower[V]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
        self._performer.hangup()


def _records(batch: Batch) -> Iterable[Record]:
    return batch.records


def _batches(batch: Batch) -> Iterable[Batch]:
    return (batch,)
