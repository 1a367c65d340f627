"""Small files into large ones, on the executors: rows are read and written again as the sink writes them.

Where it sits: below job `compact`. What tasks write has temporary names; whoever calls decides what becomes of it.

Invariants:
- I-REW-1  A task reports as many rows as it has read, or it fails. A file that cannot be read fails it, too.
- I-REW-2  Nothing that is written is visible to a reader (I-LAK-3), and everything is synced (I-LAK-4).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.errors import PipelineError
from millstream.spark.errors import clear_iteration
from millstream.spark.jobs.lake.contents import Contents, LakeFile, file_rows
from millstream.spark.jobs.lake.files import WrittenFile, write_files
from millstream.spark.jobs.lake.layout import Layout, TaskPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

TARGET_BYTES: Final = 256 << 20
"""A file is about so large after it; one of half the size is large enough to be left alone."""


def rewrite(
    session: SparkSession,
    contents: Contents,
    groups: Sequence[Sequence[LakeFile]],
    into: Layout,
    name: str,
) -> list[WrittenFile]:
    """The rows of each group of files, written together below another root or the same; `name` is new for each call."""
    plan = [
        (number, [file.path for file in group], [file.stream for file in group])
        for number, group in enumerate(groups)
    ]
    tasks = session.createDataFrame(
        plan, "task int, paths array<string>, streams array<string>"
    ).repartition(max(1, len(plan)))
    work = _Rewriting(str(contents.layout.root), tuple(contents.columns.names), into, name)
    found = tasks.mapInArrow(work, "task int, files string").collect()
    return [
        WrittenFile(**{**file, "partition": tuple(map(tuple, file["partition"]))})
        for row in sorted(found, key=lambda row: row["task"])
        for file in json.loads(row["files"])
    ]


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """What a task does; plain data, it travels to executors."""

    root: str
    names: tuple[str, ...]
    into: Layout
    name: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return clear_iteration(self._run(batches))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                files = self._group(row["task"], row["paths"], row["streams"])
                text = json.dumps([asdict(file) for file in files])
                yield pa.record_batch(
                    {"task": pa.array([row["task"]], pa.int32()), "files": [text]}
                )

    def _group(
        self, task: int, paths: Sequence[str], streams: Sequence[str | None]
    ) -> list[WrittenFile]:
        read = 0

        def rows() -> Iterator[pa.RecordBatch]:
            nonlocal read
            for path, stream in zip(paths, streams, strict=True):
                for batch in file_rows(Path(self.root) / path, self.names, stream):
                    read += batch.num_rows
                    yield batch

        files = write_files(rows(), self.into, TaskPlace(self.name, 0, task))
        written = sum(file.rows for file in files)
        if read != written:
            raise PipelineError(f"{read} rows were read and {written} written", code="lake_damaged")
        return files
