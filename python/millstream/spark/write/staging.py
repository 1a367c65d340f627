"""From the rows of one Spark task to stages on the server: the part of the writer that runs on executors.

Where it sits: below `writer.py`, above the client's pipeline calls. `Rows` checks Arrow batches and cuts
them by bytes, `Stager` encodes and uploads them while the task makes the next ones.

Invariants:
- I-STG-1  Rows keep their order: stage by stage, and inside a stage.
- I-STG-2  No Python loop over records; memory is bounded by two stage bodies and one Arrow batch.
- I-STG-3  A task that fails gives up what it staged; what it cannot give up expires on the server.
"""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.client.pipeline_write import Stage, StageRef, create_stream, stage, unstage_all
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    ProtocolError,
    StreamConflict,
    StreamNotFound,
)
from millstream.spark.write.options import STREAM, VALUE, WriteOptions, log_left

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from millstream.client.sync.client import Client

STAGE_ROWS_MAX: Final = 1_000_000
"""Rows that the server takes in one stage."""
_ROW: Final = re.compile(r"\brow (\d+)", re.IGNORECASE)


class Rows:
    """The rows of one task, checked: column `value`, and `stream` unless an option names the target."""

    def __init__(self, options: WriteOptions, partition: int) -> None:
        self._options = options
        self._partition = partition
        self._columns = [VALUE] if options.stream else [VALUE, STREAM]
        self._known: set[str] = set()
        self.seen = 0
        """Rows taken so far; the number of the next row within its partition."""

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that are sent, without nulls."""
        chosen = batch.select(self._columns)
        for name, column in zip(self._columns, chosen.columns, strict=True):
            if column.null_count:
                index = pc.index(pc.is_null(column), True).as_py()
                raise InvalidArgument(
                    f"`{name}` is null in {self.where(self.seen + index)}",
                    hint=f"filter such rows out first, for example by `.where('{name} is not null')`",
                )
        self.seen += chosen.num_rows
        return chosen

    def where(self, row: int) -> str:
        return f"row {row} of partition {self._partition}"

    def new_streams(self, batch: pa.RecordBatch) -> list[str]:
        """The targets in this batch that no earlier batch of the task had."""
        if self._options.stream:
            names = [self._options.stream]
        else:
            names = pc.unique(batch.column(STREAM)).to_pylist()
        news = [name for name in names if name not in self._known]
        self._known.update(news)
        return news


def pieces(batch: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch by halves until each piece is small enough, or a single row."""
    small = batch.nbytes <= bytes_max and batch.num_rows <= STAGE_ROWS_MAX
    if batch.num_rows <= 1 or small:
        if batch.num_rows:
            yield batch
        return
    half = batch.num_rows // 2
    yield from pieces(batch.slice(0, half), bytes_max)
    yield from pieces(batch.slice(half), bytes_max)


def encode(batches: list[pa.RecordBatch]) -> bytes:
    """One Arrow IPC stream of batches of the same schema."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def ensure_streams(
    client: Client, options: WriteOptions, names: Iterable[str], patience_seconds: float
) -> None:
    """Create the targets that are not there; other tasks may do so at the same time."""
    for name in names:
        try:
            create_stream(
                client,
                name,
                content_type=options.content_type_or_default,
                durability=options.durability,
                patience_seconds=patience_seconds,
            )
        except StreamConflict:
            # It exists. Only what the user named explicitly has to agree with it.
            if options.content_type is not None or options.durability is not None:
                raise


class Stager:
    """Uploads the rows of one task as stages named `{prefix}-{n}`; one upload is under way at a time."""

    def __init__(
        self,
        client: Client,
        options: WriteOptions,
        rows: Rows,
        prefix: str,
        patience_seconds: float,
    ) -> None:
        self._client = client
        self._options = options
        self._rows = rows
        self._prefix = prefix
        self._patience_seconds = patience_seconds
        self._uploader = ThreadPoolExecutor(1, thread_name_prefix="millstream-stage")
        self._under_way: Future[Stage] | None = None
        self._open: list[pa.RecordBatch] = []
        self._open_bytes = 0
        self._open_rows = 0
        self._open_first_row = 0
        self._started: list[str] = []
        self.stages: list[StageRef] = []
        self.streams: set[str] = set()
        self.rows = 0
        self.bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        first_row = self._rows.seen
        chosen = self._rows.take(batch)
        if self._options.create_streams:
            news = self._rows.new_streams(chosen)
            ensure_streams(self._client, self._options, news, self._patience_seconds)
        for piece in pieces(chosen, self._options.stage_bytes):
            if self._open and not self._fits(piece):
                self._send()
            if not self._open:
                self._open_first_row = first_row
            self._open.append(piece)
            self._open_bytes += piece.nbytes
            self._open_rows += piece.num_rows
            first_row += piece.num_rows

    def _fits(self, piece: pa.RecordBatch) -> bool:
        bytes_after: int = self._open_bytes + piece.nbytes
        rows_after: int = self._open_rows + piece.num_rows
        return bytes_after <= self._options.stage_bytes and rows_after <= STAGE_ROWS_MAX

    def finish(self) -> None:
        """Send the rest and wait for every answer."""
        if self._open:
            self._send()
        self._settle()
        self._uploader.shutdown()

    def discard(self) -> None:
        """Give up what was staged; an upload that is under way ends first."""
        if self._under_way is not None:
            self._under_way.exception()
        self._uploader.shutdown()
        log_left(unstage_all(self._client, self._started))

    def _send(self) -> None:
        body = encode(self._open)
        rows, first_row = self._open_rows, self._open_first_row
        self._open, self._open_bytes, self._open_rows = [], 0, 0
        self._settle()
        name = f"{self._prefix}-{len(self._started)}"
        self._started.append(name)
        self._under_way = self._uploader.submit(self._upload, name, body, first_row, rows)

    def _settle(self) -> None:
        if self._under_way is not None:
            pending, self._under_way = self._under_way, None
            done = pending.result()
            self.stages.append(done.ref)
            self.streams.update(done.streams)
            self.rows += done.rows
            self.bytes += done.bytes

    def _upload(self, name: str, body: bytes, first_row: int, rows: int) -> Stage:
        try:
            done = stage(
                self._client,
                name,
                body,
                stream=self._options.stream,
                patience_seconds=self._patience_seconds,
            )
        except MillstreamError as error:
            raise self._explain(error, first_row) from None
        if done.rows != rows:
            raise ProtocolError(f"{rows} rows were sent, and {done.rows} were staged")
        return done

    def _explain(self, error: MillstreamError, first_row: int) -> MillstreamError:
        """The server counts rows within a request; the user knows only rows of the partition."""
        message = _ROW.sub(
            lambda found: self._rows.where(first_row + int(found[1])), error.message, 1
        )
        hint = error.hint
        if error.code == "json_invalid":
            hint = (
                "a JSON stream takes one JSON text per row (use `to_json`); for other bytes create the "
                "stream with another content type"
            )
        elif error.code == "body_empty":
            hint = "a record has at least one byte; filter empty values out first"
        elif isinstance(error, StreamNotFound):
            hint = "create it first, or set the option `createStreams` to true"
        elif error.code == "stage_full":
            hint = "write less per batch (`maxBytesPerTrigger`), or raise the server's `stage_bytes_max`"
        return error.reworded(message=message, hint=hint)
