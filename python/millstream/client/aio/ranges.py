"""Reads ranges of streams as Arrow, window by window.

Where it sits: over `reads.py`; below `arrow.py` (`read_arrow`) and the tasks of the Spark connector. The rules are in
`client/ranges.py`. pyarrow is loaded when a read begins.

Invariants:
- I-RRD-1  Exactly the ranges are read, in order; what is missing in them goes to `losses`.
- I-RRD-2  One window is fetched ahead; never more, so memory is two windows and what the caller holds.
- I-RRD-3  A caller that stops early waits for no window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.client.aio.io import AsyncAhead
from millstream.client.ranges import GONE_CODES, Count, Losses, Range, as_json, rest, still_there
from millstream.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    import pyarrow as pa

    from millstream.client.aio.reads import AsyncPipelineReads
    from millstream.client.pipeline_read import Window
    from millstream.client.steps import Allocate

WINDOW_BYTES: Final = 8 * 1024 * 1024
"""Large enough that a request and a batch cost little, small enough for the caches of a processor. Measured with 2 to 16 MiB."""


@dataclass(frozen=True, slots=True)
class AsyncRangeReader:
    """Reads ranges with one choice of columns."""

    reads: AsyncPipelineReads
    losses: Losses
    columns: Sequence[str]
    key_path: str | None = None
    window_bytes: int = WINDOW_BYTES

    async def batches(self, ranges: Sequence[Range]) -> AsyncGenerator[pa.RecordBatch, None]:
        """The records of the ranges, as the batches of the server."""
        import pyarrow as pa

        count = Count(self.losses)
        ahead: AsyncAhead[tuple[list[Range], Window | None]] = AsyncAhead()
        try:
            async for window in self._windows(list(ranges), count, ahead, pa.allocate_buffer):
                with pa.ipc.open_stream(pa.py_buffer(window.data)) as stream:
                    for batch in stream:
                        count.rows += batch.num_rows
                        if batch.num_rows:
                            yield batch
            count.check()
        finally:
            self.reads.cancel()
            await ahead.close()

    async def _windows(
        self,
        ranges: list[Range],
        count: Count,
        ahead: AsyncAhead[tuple[list[Range], Window | None]],
        allocate: Allocate,
    ) -> AsyncIterator[Window]:
        count.expect(ranges)
        asked = ranges
        ahead.begin(self._fetch, asked, allocate)
        while True:
            ranges, window = await ahead.result()
            count.expect(ranges, instead_of=asked)
            if window is None:
                return
            count.gaps(ranges, window)
            if window.next is None:
                yield window
                return
            asked = rest(ranges, window.next)
            ahead.begin(self._fetch, asked, allocate)
            yield window

    async def _fetch(
        self, ranges: list[Range], allocate: Allocate
    ) -> tuple[list[Range], Window | None]:
        """The next window. Streams that are gone are told; if that is allowed, it is without them."""
        while ranges:
            try:
                window = await self.reads.read(
                    [as_json(item) for item in ranges],
                    columns=self.columns,
                    key_path=self.key_path,
                    max_bytes=self.window_bytes,
                    # Not cleared first, and pages that are in use already come again.
                    allocate=allocate,
                )
            except ServerError as error:
                if error.code not in GONE_CODES:
                    raise
                there = await self.reads.look_up({item.stream: [] for item in ranges})
                kept = still_there(ranges, there, self.losses)
                if len(kept) == len(ranges):
                    # Gone for the read, there for the question: asking again could go on for ever.
                    raise
                ranges = kept
            else:
                return ranges, window
        return ranges, None
