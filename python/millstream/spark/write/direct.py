"""Direct mode: a task appends its rows at once, under producer numbers that a replay finds again.

Where it sits: beside `staging.py`, chosen by `exactlyOnce=direct`; used by `writer.py` on executors.
It saves the commit, and pays for it: rows are visible before their batch is complete, and a replay is
recognised only if it has the same rows in the same partitions and order
(docs/concepts/exactly-once.md has the conditions).

Invariants:
- I-DIR-1  Requests are cut by record count alone, never by time, bytes or the size of Arrow batches, so a
           replay with the same rows repeats the same requests under the same numbers.
- I-DIR-2  A row of a JSON stream is checked to be one JSON text before it is joined with others.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from millstream.client import wire
from millstream.client.pipeline_write import append_numbered, content_type_of
from millstream.errors import JsonInvalid, StreamNotFound
from millstream.spark.write.options import STREAM, VALUE
from millstream.spark.write.staging import Rows, ensure_streams
from millstream.types import is_json_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from millstream.client.sync.client import Client
    from millstream.spark.write.options import WriteOptions


class DirectAppender:
    """Appends the rows of one task; `producer` is the same for every attempt of the task."""

    def __init__(
        self,
        client: Client,
        options: WriteOptions,
        rows: Rows,
        producer: tuple[str, int],
        patience_seconds: float,
    ) -> None:
        self._client = client
        self._options = options
        self._rows = rows
        self._producer, self._epoch = producer
        self._patience_seconds = patience_seconds
        self._open: list[pa.RecordBatch] = []
        self._sent = 0
        self._sequences: dict[str, int] = {}
        self.dropped = 0
        """Rows that were there before: of an earlier run, or of an earlier try of this one."""
        self._types: dict[str, str] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        chosen = self._rows.take(batch)
        if self._options.create_streams:
            news = self._rows.new_streams(chosen)
            ensure_streams(self._client, self._options, news, self._patience_seconds)
        self._open.append(chosen)
        limit = self._options.direct_records
        while sum(part.num_rows for part in self._open) >= limit:
            table = pa.Table.from_batches(self._open)
            self._send(table.slice(0, limit))
            self._open = table.slice(limit).to_batches()

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def finish(self) -> int:
        if any(part.num_rows for part in self._open):
            self._send(pa.Table.from_batches(self._open))
            self._open = []
        return self._sent

    def _send(self, table: pa.Table) -> None:
        """One request per stream (JSON) or per record (bytes), streams by their first appearance."""
        for name, part, positions in self._by_stream(table):
            content_type = self._content_type(name)
            texts = part.to_pylist()
            if is_json_type(content_type):
                bodies = [self._json_body(texts, positions)]
            else:
                bodies = [text.encode() if isinstance(text, str) else text for text in texts]
            for body in bodies:
                sequence = self._sequences.get(name, 0)
                producer = (self._producer, self._epoch, sequence)
                fresh = append_numbered(
                    self._client,
                    name,
                    content_type,
                    body,
                    producer,
                    patience_seconds=self._patience_seconds,
                )
                self.dropped += 0 if fresh else len(texts) // len(bodies)
                self._sequences[name] = sequence + 1
        self._sent += table.num_rows

    def _by_stream(
        self, table: pa.Table
    ) -> Iterator[tuple[str, pa.ChunkedArray, pa.Array | pa.ChunkedArray]]:
        everything = pa.array(range(table.num_rows), pa.int64())
        if self._options.stream:
            yield self._options.stream, table.column(VALUE), everything
            return
        for name in pc.unique(table.column(STREAM)).to_pylist():
            mask = pc.equal(table.column(STREAM), name)
            yield name, table.column(VALUE).filter(mask), pc.filter(everything, mask)

    def _content_type(self, name: str) -> str:
        known = self._types.get(name)
        if known is None:
            try:
                known = content_type_of(self._client, name, patience_seconds=self._patience_seconds)
            except StreamNotFound as error:
                hint = "create it first, or set the option `createStreams` to true"
                raise error.reworded(hint=hint) from None
            self._types[name] = known
        return known

    def _json_body(self, texts: list[bytes | str], positions: pa.Array | pa.ChunkedArray) -> bytes:
        for index, text in enumerate(texts):
            try:
                # Numbers stay texts: their size is the stream's business, not Python's.
                json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                row = self._rows.where(self._sent + positions[index].as_py())
                raise JsonInvalid(
                    f"{row} is not JSON: {error}",
                    status=400,
                    hint="a JSON stream takes one JSON text per row (use `to_json`)",
                ) from error
        return wire.join_json(
            text.encode() if isinstance(text, str) else bytes(text) for text in texts
        )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
