"""The task side of a lake: rows in, Parquet files under temporary names out.

Where it sits: called by `sink` on the executors, once per task; what it returns travels to the
driver in the task's commit message, and `publish` publishes it.

Invariants:
- I-LAK-3  Nothing it writes is visible to a reader. A task that fails removes what it wrote.
- I-LAK-4  A file is synced before it is reported, so that a decision never names bytes that a power
           cut may take.
- I-LAK-5  Memory is bounded: rows wait in at most `BUFFER_BYTES`, files are open for at most
           `OPEN_FILES_MAX` partitions at a time; a partition that comes back gets another file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millstream.spark.jobs.lake.layout import Layout, Partition, TaskPlace
from millstream.spark.jobs.lake.store import files_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROW_GROUP_ROWS: Final = 131_072
ROW_GROUP_BYTES: Final = 32 << 20
BUFFER_BYTES: Final = 96 << 20
OPEN_FILES_MAX: Final = 64
FILE_BYTES_MAX: Final = 512 << 20
COMPRESSION: Final = "zstd"
PLAIN_COLUMNS: Final = frozenset({"value", "offset"})
"""Columns whose values hardly repeat: a dictionary of them would only cost time."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file that a task has written; paths are relative to the lake's root."""

    temporary: str
    path: str
    partition: Partition
    rows: int
    bytes: int


@dataclass(slots=True)
class _Open:
    """A file that is being written, and the rows that wait for its next row group."""

    temporary: str
    final: str
    partition: Partition
    stream: Any
    writer: Any
    rows: int = 0
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_rows: int = 0
    waiting_bytes: int = 0


def write_files(
    batches: Iterable[pa.RecordBatch], layout: Layout, place: TaskPlace
) -> list[WrittenFile]:
    """Write one task's rows; returns its files in the order in which they were begun."""
    task = TaskFiles(layout, place)
    try:
        for batch in batches:
            task.add(batch)
        return task.finish()
    except BaseException:
        task.discard()
        raise


class TaskFiles:
    """The files of one task while rows are added."""

    def __init__(self, layout: Layout, place: TaskPlace) -> None:
        self._layout = layout
        self._place = place
        self._files = files_of(layout)
        self._open: dict[Partition, _Open] = {}
        self._begun: list[str] = []
        self._done: dict[str, WrittenFile] = {}
        self._waiting_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        for partition, rows in split(_in_utc(batch), self._layout):
            file = self._open.get(partition) or self._begin(partition, rows.schema)
            # Files leave in the order of last use.
            self._open[partition] = self._open.pop(partition, file)
            file.waiting.append(rows)
            file.waiting_rows += rows.num_rows
            file.waiting_bytes += rows.nbytes
            self._waiting_bytes += rows.nbytes
            if file.waiting_rows >= ROW_GROUP_ROWS or file.waiting_bytes >= ROW_GROUP_BYTES:
                self._flush(file)
            if file.stream.tell() >= FILE_BYTES_MAX:
                self._end(file)
        while self._waiting_bytes > BUFFER_BYTES:
            self._flush(max(self._open.values(), key=lambda file: file.waiting_bytes))

    def _begin(self, partition: Partition, schema: pa.Schema) -> _Open:
        while len(self._open) >= OPEN_FILES_MAX:
            self._end(next(iter(self._open.values())))
        temporary, final = self._names(partition)
        self._begun.append(temporary)
        stream = self._files.create(temporary)
        names = [name for name in schema.names if name not in PLAIN_COLUMNS]
        writer = pq.ParquetWriter(
            stream,
            schema,
            compression=COMPRESSION,
            use_dictionary=names,
            write_statistics=[name for name in schema.names if name != "value"],
        )
        file = _Open(temporary, final, partition, stream, writer)
        self._open[partition] = file
        return file

    def _names(self, partition: Partition) -> tuple[str, str]:
        """Where a file is written, and where it is in the end; on an object store that is the same."""
        place, layout = self._place, self._layout
        name = place.object_name() if layout.scheme else place.final_name(len(self._begun))
        final = "/".join(filter(None, (layout.directory(partition), name)))
        if layout.scheme:
            return final, final
        directory = layout.temporary(place.query_id, place.batch_id).relative_to(layout.root)
        return (directory / place.temporary_name()).as_posix(), final

    def _flush(self, file: _Open) -> None:
        if file.waiting_rows == 0:
            return
        table = pa.Table.from_batches(file.waiting)
        file.writer.write_table(table, row_group_size=max(file.waiting_rows, 1))
        file.rows += file.waiting_rows
        self._waiting_bytes -= file.waiting_bytes
        file.waiting, file.waiting_rows, file.waiting_bytes = [], 0, 0

    def _end(self, file: _Open) -> None:
        self._flush(file)
        file.writer.close()
        size = self._files.seal(file.stream)
        del self._open[file.partition]
        self._done[file.temporary] = WrittenFile(
            file.temporary, file.final, file.partition, file.rows, size
        )

    def finish(self) -> list[WrittenFile]:
        for file in list(self._open.values()):
            self._end(file)
        if self._begun and not self._layout.scheme:
            directory = self._layout.temporary(self._place.query_id, self._place.batch_id)
            sync_directories({directory}, self._layout.root)
        return [self._done[name] for name in self._begun]

    def discard(self) -> None:
        for file in self._open.values():
            # The failure that led here is the one to tell, and a writer must not outlive its file.
            with suppress(OSError, pa.ArrowException):
                file.writer.close()
                file.stream.close()
        for path in self._begun:
            self._files.remove(path)


def split(batch: pa.RecordBatch, layout: Layout) -> Iterator[tuple[Partition, pa.RecordBatch]]:
    """The rows of each partition, in their order; partitions in the order of their first row."""
    columns = [partition_values(batch, name) for name in layout.partition_by]
    kept = batch
    if not layout.keeps_partition_columns:
        dropped = [name for name in layout.partition_by if name in batch.schema.names]
        kept = batch.drop_columns(dropped) if dropped else batch
    if not columns:
        yield (), kept
        return
    keys = [str(index) for index in range(len(columns))]
    groups = pa.table(columns, names=keys).append_column("row", pa.array(range(batch.num_rows)))
    found = groups.group_by(keys, use_threads=False).aggregate([("row", "min")])
    for row in found.sort_by("row_min").to_pylist():
        values = [row[key] for key in keys]
        partition = tuple(zip(layout.partition_by, map(_text, values), strict=True))
        if found.num_rows == 1:
            yield partition, kept
            return
        mask = None
        for column, value in zip(columns, values, strict=True):
            same = pc.is_null(column) if value is None else pc.equal(column, value)
            mask = same if mask is None else pc.and_(mask, same)
        yield partition, kept.filter(pc.fill_null(mask, False))


def partition_values(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The partition of each row: a day in UTC, or a text."""
    if name == "date":
        return pc.cast(pc.cast(batch.column("timestamp"), pa.timestamp("us", "UTC")), pa.date32())
    return pc.cast(batch.column(name), pa.string())


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Spark hands out timestamps in the session's zone; the instants are the same in UTC."""
    wanted = pa.schema([field.with_type(_utc(field.type)) for field in batch.schema])
    return batch if wanted.equals(batch.schema) else batch.cast(wanted)


def _utc(kind: pa.DataType) -> pa.DataType:
    """A type with the zone of every timestamp in it replaced, at whatever depth."""
    if pa.types.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_utc(field.type)) for field in kind])
    if pa.types.is_map(kind):
        items = kind.item_field.with_type(_utc(kind.item_type))
        return pa.map_(kind.key_field.with_type(_utc(kind.key_type)), items, kind.keys_sorted)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_utc(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_utc(kind.value_type)))
    return kind


def sync_directories(directories: set[Path], root: Path) -> None:
    """Make names durable, not only bytes: those in the directories, and theirs up to the root's."""
    chain = {root, root.parent}
    for directory in directories:
        while directory not in chain:
            chain.add(directory)
            directory = directory.parent
    for directory in sorted(chain, reverse=True):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
