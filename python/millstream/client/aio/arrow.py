"""`read_arrow`: records of one stream or of many as Arrow batches, and the same rows as `Record`.

Where it sits: made by `AsyncStream.read_arrow` and `AsyncClient.read_arrow`; over `ranges.py`, with the rules of `client/arrow.py`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from millstream.client import arrow
from millstream.client.aio.io import AsyncArrowExport
from millstream.client.aio.ranges import AsyncRangeReader
from millstream.client.aio.reads import AsyncPipelineReads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    import pyarrow as pa

    from millstream.client.aio.client import AsyncClient
    from millstream.types import GapPolicy, Record


class AsyncArrowBatches(AsyncArrowExport):
    """Arrow record batches, as they come. Read once: iterate, or take everything.

    `table = await stream.read_arrow().read_all()` is a `pyarrow.Table`; `await ....to_pandas()` a DataFrame.
    """

    def __init__(
        self,
        client: AsyncClient,
        selection: arrow.Selection,
        gaps: GapPolicy,
        columns: Sequence[arrow.Column],
    ) -> None:
        self.schema: pa.Schema = arrow.schema(columns)
        self.ends: dict[str, str] = {}
        """By stream, where this read ends: pass it as `offset` to go on there. Known with the first batch."""
        self._selection = selection
        self._missing = arrow.MissingRecords(gaps)
        self._wire_names = [arrow.WIRE_NAMES[name] for name in columns]
        self._reads = AsyncPipelineReads(client)
        self._batches: AsyncIterator[pa.RecordBatch] = self._iterate()

    async def _iterate(self) -> AsyncIterator[pa.RecordBatch]:
        pa = arrow.load_pyarrow()
        chosen, reads = self._selection, self._reads
        names = [] if chosen.path is None else [chosen.path]
        streams = chosen.streams(await reads.tails(streams=names, pattern=chosen.pattern))
        self.ends = {name: stream.tail_offset for name, stream in streams.items()}
        questions = chosen.questions(streams)
        found = await reads.look_up(questions)
        ranges = chosen.ranges(streams, found, self._missing)
        reader = AsyncRangeReader(reads, self._missing, self._wire_names)
        async with contextlib.aclosing(reader.batches(ranges)) as batches:
            async for batch in batches:
                columns = [batch.column(name) for name in self._wire_names]
                yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    async def read_all(self) -> pa.Table:
        """Everything that is left, as one table."""
        pa = arrow.load_pyarrow()
        return pa.Table.from_batches([batch async for batch in self], schema=self.schema)

    async def to_pandas(self, **options: Any) -> Any:
        """Everything that is left, as a DataFrame; options are those of `pyarrow.Table.to_pandas`."""
        table = await self.read_all()
        return table.to_pandas(**options)

    async def _records(self, *, as_json: bool) -> AsyncIterator[Record]:
        """The rows one by one; needs the columns of `arrow.RECORD_COLUMNS` and one stream."""
        rows = arrow.RecordRows(as_json=as_json)
        async for batch in self:
            for record in rows.feed(batch):
                yield record
        for offset in self.ends.values():
            for record in rows.finish(offset):
                yield record

    async def aclose(self) -> None:
        """Stop; an iteration that waits elsewhere ends with `ClientClosed`."""
        self._reads.cancel()

    def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        return self._batches

    async def __anext__(self) -> pa.RecordBatch:
        return await anext(self._batches)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        what = self._selection.path or f"pattern {self._selection.pattern!r}"
        return f"<millstream.AsyncArrowBatches {what}: {', '.join(self.schema.names)}>"
