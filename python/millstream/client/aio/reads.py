"""The reading calls of the pipeline over one client: `/v1/tails` and `/v1/read`.

Where it sits: over `client/pipeline_read.py`; below `ranges.py`, and used by the Spark connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from millstream.client.aio.transport import AsyncPerformer, run
from millstream.client.pipeline_read import (
    NAMES_PER_REQUEST,
    StreamTail,
    Tails,
    Window,
    tails_steps,
    window_steps,
)
from millstream.client.steps import Cancelled, Policy
from millstream.errors import ClientClosed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from millstream.client.aio.client import AsyncClient
    from millstream.client.steps import Allocate, Steps

T = TypeVar("T")


class AsyncPipelineReads:
    """Asks until it is answered: for `patience_seconds`, or as often as the client was told to.

    `cancel` ends what waits, wherever it is called.
    """

    def __init__(self, client: AsyncClient, patience_seconds: float | None = None) -> None:
        self._client = client
        if patience_seconds is None:
            self._policy = Policy(attempts=client._operations.retry.attempts)
        else:
            self._policy = Policy(patience_seconds=patience_seconds)
        self._stopped = False
        self._busy: set[AsyncPerformer] = set()

    async def tails(
        self,
        *,
        streams: Sequence[str | Mapping[str, Any]] | None = None,
        pattern: str | None = None,
        cursor: str | None = None,
        wait_ms: int = 0,
        after: str | None = None,
    ) -> Tails:
        """Where streams end; with `cursor` only what changed, waiting up to `wait_ms` for it; with `after` a page of a pattern."""
        operations = self._client._operations
        steps = tails_steps(
            operations,
            self._policy,
            streams=streams,
            pattern=pattern,
            cursor=cursor,
            wait_ms=wait_ms,
            after=after,
        )
        return await self._run(steps)

    async def read(
        self,
        ranges: Sequence[Mapping[str, Any]],
        *,
        columns: Sequence[str],
        key_path: str | None = None,
        max_bytes: int,
        allocate: Allocate = bytearray,
    ) -> Window:
        """One window of the ranges, in order; `allocate` makes the buffer that it is received into."""
        steps = window_steps(
            self._client._operations,
            self._policy,
            ranges,
            columns=columns,
            key_path=key_path,
            max_bytes=max_bytes,
            allocate=allocate,
        )
        return await self._run(steps)

    async def look_up(self, wanted: Mapping[str, list[dict[str, Any]]]) -> dict[str, StreamTail]:
        """Places of streams, by name. A stream that is gone is not in the answer."""
        found: dict[str, StreamTail] = {}
        names = list(wanted)
        for begin in range(0, len(names), NAMES_PER_REQUEST):
            part = names[begin : begin + NAMES_PER_REQUEST]
            answer = await self.tails(streams=[{"name": name, "at": wanted[name]} for name in part])
            found.update((stream.name, stream) for stream in answer.streams)
        return found

    def cancel(self) -> None:
        self._stopped = True
        for performer in tuple(self._busy):
            performer.cancel()

    async def _run(self, steps: Steps[T]) -> T:
        performer = AsyncPerformer(self._client._pool)
        self._busy.add(performer)
        try:
            if self._stopped:
                raise Cancelled
            return await run(steps, performer)
        except Cancelled:
            raise ClientClosed("the read was stopped") from None
        finally:
            self._busy.discard(performer)
