"""What a lake holds: its files as readers of its kind of table count them, and their rows in Spark.

Where it sits: below `audit` and `compact`. The driver lists; tasks open the files by themselves, as the tasks of the sink write
them: one way for all kinds of lake, and a file that cannot be read is told by its name.

Invariants:
- I-CON-1  The list is one state of the lake: of a table the newest version, of a plain lake what is there now.
- I-CON-2  No file is read on the driver, other than one footer for the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.errors import InvalidArgument, PipelineError
from millstream.spark.jobs.lake.layout import HIDDEN, NULL_PARTITION, Layout, local_root
from millstream.spark.jobs.lake.publish import schema_of, some_manifest
from millstream.spark.jobs.lake.tables import check_installed
from millstream.spark.jobs.lake.target import table_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

BROKEN: Final = "broken"
"""A column of the rows: the path of a file that cannot be read, in a row of its own."""
BIN_BYTES: Final = 128 << 20
"""Files of about so many bytes together are one task."""
BATCH_ROWS: Final = 16_384


@dataclass(frozen=True, slots=True)
class LakeFile:
    """One file that readers count."""

    path: str
    """Relative to the root."""
    bytes: int
    stream: str | None = None
    """Of all its rows, where the files do not say it themselves."""
    date: str | None = None
    """The day of its partition, if there is one."""


@dataclass(frozen=True, slots=True)
class Contents:
    layout: Layout
    files: tuple[LakeFile, ...]
    missing: tuple[str, ...]
    """Files that the table counts and that are not there."""
    columns: pa.Schema
    """Of the rows, partitions by stream included."""


def lake_at(path: str) -> Layout:
    """The lake in a directory, whatever its kind."""
    layout = Layout(local_root(path, "jobs `audit` and `compact` work on lakes in directories"))
    table = table_at(layout) if layout.root.is_dir() else None
    landed = some_manifest(layout)
    if table is None or landed is None:
        raise InvalidArgument(
            f"there is no lake at `{layout.root}`",
            hint="name a directory that job `land` has filled",
        )
    check_installed(table)
    return Layout(layout.root, table, landed.partition_by)


def contents_of(layout: Layout) -> Contents:
    listed = {"parquet": _plain, "delta": _delta, "iceberg": _iceberg}[layout.table](layout)
    there = [file for file in listed if (layout.root / file.path).is_file()]
    gone = tuple(sorted({file.path for file in listed} - {file.path for file in there}))
    return Contents(layout, tuple(there), gone, _columns(layout, there))


def rows(session: SparkSession, contents: Contents, wanted: Sequence[str]) -> DataFrame:
    """The rows of the lake, with the columns that are wanted; and a row with `BROKEN` for a file that cannot be read."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = pa.schema([contents.columns.field(name) for name in wanted])
    schema = schema.append(pa.field(BROKEN, pa.string()))
    reading = _Reading(str(contents.layout.root), schema)
    plan = [
        ([file.path for file in part], [file.stream for file in part])
        for part in bins(contents.files, BIN_BYTES)
    ]
    tasks = session.createDataFrame(plan, "paths array<string>, streams array<string>")
    spread = tasks.repartition(max(1, len(plan)))
    return spread.mapInArrow(reading, from_arrow_schema(schema))


def bins(files: Sequence[LakeFile], size: int) -> list[list[LakeFile]]:
    """Files in their order, cut where about `size` bytes are together."""
    found: list[list[LakeFile]] = []
    held = size
    for file in files:
        if held + file.bytes > size:
            found.append([])
            held = 0
        found[-1].append(file)
        held += file.bytes
    return found


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a task does with its files; plain data, it travels to executors."""

    root: str
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                for path, stream in zip(row["paths"], row["streams"], strict=True):
                    yield from self._file(path, stream)

    def _file(self, path: str, stream: str | None) -> Iterator[pa.RecordBatch]:
        names = [name for name in self.schema.names if name != BROKEN]
        try:
            for batch in file_rows(Path(self.root) / path, names, stream):
                columns = {name: batch.column(name) for name in names}
                yield self._shaped({**columns, BROKEN: pa.nulls(batch.num_rows, pa.string())})
        except (OSError, pa.ArrowException, KeyError):
            nothing = {field.name: pa.nulls(1, field.type) for field in self.schema}
            yield self._shaped({**nothing, BROKEN: pa.array([path])})

    def _shaped(self, columns: dict[str, Any]) -> pa.RecordBatch:
        arrays = [columns[field.name].cast(field.type) for field in self.schema]
        return pa.record_batch(arrays, schema=self.schema)


def file_rows(path: Path, names: Sequence[str], stream: str | None) -> Iterator[pa.RecordBatch]:
    """The rows of one file; `stream` is their stream where the file does not say it."""
    stored = [name for name in names if name != "stream" or stream is None]
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=stored):
            columns = {name: batch.column(name) for name in stored}
            if stream is not None:
                columns["stream"] = pa.repeat(stream, batch.num_rows)
            yield pa.record_batch([columns[name] for name in names], names=list(names))


def _columns(layout: Layout, files: list[LakeFile]) -> pa.Schema:
    landed = some_manifest(layout)
    schema = None if landed is None else schema_of(layout, landed)
    if schema is None and files:
        schema = pq.read_schema(layout.root / files[0].path).remove_metadata()
    if schema is None:
        raise PipelineError(
            f"nobody knows the columns of the lake at `{layout.root}`", code="lake_damaged"
        )
    if "stream" in layout.partition_by and "stream" not in schema.names:
        schema = schema.append(pa.field("stream", pa.string()))
    return schema


def _plain(layout: Layout) -> list[LakeFile]:
    found = []
    for path in sorted(layout.root.rglob("*.parquet")):
        relative = path.relative_to(layout.root)
        if relative.parts[0] == HIDDEN:
            continue
        values = dict(part.split("=", 1) for part in relative.parts[:-1] if "=" in part)
        stream = values.get("stream")
        found.append(
            LakeFile(
                relative.as_posix(),
                path.stat().st_size,
                None if stream in (None, NULL_PARTITION) else unquote(stream or ""),
                values.get("date"),
            )
        )
    return found


def _delta(layout: Layout) -> list[LakeFile]:
    from deltalake import DeltaTable

    table = DeltaTable(str(layout.root))
    found = []
    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        date = action.get("partition.date")
        found.append(
            LakeFile(
                _on_disk(layout, action["path"]),
                action["size_bytes"],
                action.get("partition.stream"),
                None if date is None else str(date),
            )
        )
    return sorted(found, key=lambda file: file.path)


def _on_disk(layout: Layout, path: str) -> str:
    """The log may spell a path as part of an address."""
    return path if (layout.root / path).is_file() else unquote(path)


def _iceberg(layout: Layout) -> list[LakeFile]:
    from millstream.spark.jobs.lake.iceberg import data_files, open_catalog, relative

    catalog = open_catalog(layout)
    try:
        entries = data_files(catalog)
    finally:
        catalog.close()
    found = []
    for entry in entries:
        path = relative(layout, entry.file_path)
        values = dict(part.split("=", 1) for part in path.split("/")[:-1] if "=" in part)
        found.append(LakeFile(path, entry.file_size_in_bytes, None, values.get("date")))
    return sorted(found, key=lambda file: file.path)
