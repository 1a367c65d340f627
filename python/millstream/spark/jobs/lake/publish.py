"""The driver side of a lake: one batch becomes visible, exactly once, whatever dies in between.

Where it sits: called by `sink` when every task of a batch has written its files
(`files`); at the end it calls the table (`delta`, `iceberg`), if there is one.

A batch goes through five steps, always in this order:

    write    tasks write files under temporary names                  nothing visible
    decide   the manifest of the batch is created, atomically, with
             the list of its files and their form, which must be the
             lake's; it is never changed                              nothing visible
    place    each listed file is renamed to its final name            visible file by file
    enter    Delta or Iceberg: one commit of metadata, with
             query and batch                                          visible at once
    clean    temporary files of this batch and earlier ones go        no change

Then Spark notes in its checkpoint that the batch is done. If the driver dies before that, Spark runs
the same batch again with the same records, maybe cut into other tasks. `decide` finds the manifest
of the first run, if there is one: then that list of files counts, the new files are dropped, and
`place` and `enter` do what is left of them. So after `kill -9`

    before `decide`    the new run decides; the old files are removed by its `clean`
    in `place`         the new run renames the rest; what was renamed stays as it is
    before `enter`     the new run enters the same files
    before `clean`     every file is in place and entered; only the new files are dropped
    before Spark's     the same
    checkpoint

and in no case a published file is removed, replaced or doubled: a reader in the middle sees each
record of a complete batch once, and of the batch that is being placed some of its files or all.

Invariants:
- I-LAK-6  The manifest is created with `link`: of two drivers one decides, the other follows it.
- I-LAK-7  A manifest is durable before the first rename, and names only synced files.
- I-LAK-8  A batch that is older than the newest manifest of its query and has none itself is refused:
           nobody knows any more what it published.
- I-LAK-9  Manifests are bounded: `MANIFESTS_KEPT` of a query. Spark goes back by one batch.
- I-LAK-13 What does not fit the lake is refused before `decide`, and so as if it had never run: all files of a
           lake have the same columns and partitions.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.errors import PipelineError
from millstream.spark.jobs.lake.files import WrittenFile, sync_directories
from millstream.spark.jobs.lake.layout import HIDDEN, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION: Final = 1
MANIFESTS_KEPT: Final = 200
Columns = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one batch consists of."""

    query_id: str
    batch_id: int
    decided_ms: int
    table: str
    files: tuple[WrittenFile, ...]
    partition_by: tuple[str, ...]
    schema: pa.Schema | None = None
    """Of the files; None if this was written before manifests had it."""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def encode(self) -> bytes:
        document = {
            "v": VERSION,
            "query": self.query_id,
            "batch": self.batch_id,
            "decided_ms": self.decided_ms,
            "table": self.table,
            "partition_by": self.partition_by,
            "columns": {field.name: str(field.type) for field in self.schema or ()},
            "schema": self.schema and base64.b64encode(self.schema.serialize()).decode(),
            "rows": self.rows,
            "bytes": sum(file.bytes for file in self.files),
            "files": [{**asdict(file), "partition": dict(file.partition)} for file in self.files],
        }
        return json.dumps(document, ensure_ascii=False, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        try:
            document = json.loads(data)
            if document["v"] != VERSION:
                raise ValueError(f"version {document['v']}")
            files = tuple(
                WrittenFile(
                    temporary=str(entry["temporary"]),
                    path=str(entry["path"]),
                    partition=tuple(entry["partition"].items()),
                    rows=int(entry["rows"]),
                    bytes=int(entry["bytes"]),
                )
                for entry in document["files"]
            )
            return cls(
                query_id=str(document["query"]),
                batch_id=int(document["batch"]),
                decided_ms=int(document["decided_ms"]),
                table=str(document["table"]),
                files=files,
                partition_by=tuple(
                    document.get("partition_by", [name for name, _ in files[0].partition])
                ),
                schema=_schema(document.get("schema")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise PipelineError(
                f"`{path}` is not a manifest that this version can read: {error}",
                code="lake_damaged",
                hint="was it written by a newer Millstream, or changed by hand?",
            ) from error


def _schema(text: str | None) -> pa.Schema | None:
    return None if text is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


class Table(Protocol):
    """A table format on top of the files."""

    def check(self, schema: pa.Schema) -> None:
        """Refuse files that the table, if it is there, does not take."""

    def enter(self, manifest: Manifest) -> None:
        """Make the files part of the table, unless this batch of this query is part of it."""

    def entered(self, query_id: str) -> int | None:
        """The newest batch of a query that is part of the table."""


class Publisher:
    """Takes batches of one lake through `decide`, `place`, `enter` and `clean`."""

    def __init__(self, layout: Layout, table: Table | None) -> None:
        self._layout = layout
        self._table = table

    def publish(self, query_id: str, batch_id: int, files: Sequence[WrittenFile]) -> Manifest:
        manifest = self.decided(query_id, batch_id)
        if manifest is None:
            self.check_order(query_id, batch_id)
            manifest = self.decide(query_id, batch_id, files)
        self.place(manifest)
        self.enter(manifest)
        self.clean(manifest)
        return manifest

    def decided(self, query_id: str, batch_id: int) -> Manifest | None:
        """What an earlier run of this batch decided."""
        path = self._layout.manifest(query_id, batch_id)
        try:
            return Manifest.decode(path.read_bytes(), path)
        except FileNotFoundError:
            return None

    def check_order(self, query_id: str, batch_id: int) -> None:
        newest = max(self._batches(query_id), default=-1)
        if newest <= batch_id:
            return
        raise out_of_order(batch_id, newest)

    def manifest(
        self,
        query_id: str,
        batch_id: int,
        files: Sequence[WrittenFile],
        schema: pa.Schema | None = None,
    ) -> Manifest:
        """What is decided now about a batch."""
        return Manifest(
            query_id,
            batch_id,
            decided_ms=time.time_ns() // 1_000_000,
            table=self._layout.table,
            files=tuple(files),
            partition_by=self._layout.partition_by,
            schema=schema,
        )

    def decide(self, query_id: str, batch_id: int, files: Sequence[WrittenFile]) -> Manifest:
        """Create the manifest; if another driver was quicker, its decision counts."""
        self._check_written(files)
        schema = pq.read_schema(self._layout.root / files[0].temporary).remove_metadata()
        self._check_form(schema)
        manifest = self.manifest(query_id, batch_id, files, schema)
        path = self._layout.manifest(query_id, batch_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        with draft.open("xb") as stream:
            stream.write(manifest.encode())
            stream.flush()
            os.fsync(stream.fileno())
        try:
            self.link(draft, path)
        except FileExistsError:
            manifest = Manifest.decode(path.read_bytes(), path)
        finally:
            draft.unlink()
        sync_directories({path.parent}, self._layout.root)
        return manifest

    def place(self, manifest: Manifest) -> None:
        """Rename what is not yet in its place; the order is that of the tasks."""
        touched: set[Path] = set()
        for file in manifest.files:
            final = self._layout.root / file.path
            if self._is_placed(final, file):
                continue
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.rename(self._layout.root / file.temporary, final)
            except FileNotFoundError as error:
                raise _missing(manifest, file) from error
            touched.add(final.parent)
        if touched:
            sync_directories(touched, self._layout.root)

    def link(self, draft: Path, manifest: Path) -> None:
        os.link(draft, manifest)

    def rename(self, temporary: Path, final: Path) -> None:
        os.rename(temporary, final)

    def enter(self, manifest: Manifest) -> None:
        if self._table is not None and manifest.files:
            self._table.enter(manifest)

    def clean(self, manifest: Manifest) -> None:
        """Drop what lost: files of failed, slower or earlier attempts, and old manifests."""
        root = self._layout.temporary_root(manifest.query_id)
        for entry in _entries(root):
            if entry.name.isdigit() and int(entry.name) <= manifest.batch_id:
                shutil.rmtree(entry, ignore_errors=False)
        kept_from = manifest.batch_id - MANIFESTS_KEPT
        for batch_id in self._batches(manifest.query_id):
            if batch_id <= kept_from:
                self._layout.manifest(manifest.query_id, batch_id).unlink(missing_ok=True)

    def discard(self, query_id: str, batch_id: int, files: Sequence[WrittenFile]) -> None:
        """The batch failed: remove its temporary files, unless a decision names them."""
        if self.decided(query_id, batch_id) is None:
            for file in files:
                (self._layout.root / file.temporary).unlink(missing_ok=True)

    def _check_written(self, files: Sequence[WrittenFile]) -> None:
        """What the executors wrote must be what the driver sees."""
        for file in files:
            path = self._layout.root / file.temporary
            size = path.stat().st_size if path.exists() else None
            if size != file.bytes:
                raise not_written(str(path), size, file.bytes)

    def _check_form(self, schema: pa.Schema) -> None:
        """Files that look different would make the lake unreadable (I-LAK-13)."""
        landed = some_manifest(self._layout)
        if landed is not None:
            check_partitions(self._layout, landed)
            there = schema_of(self._layout, landed)
            if there is not None:
                check_columns("lake", columns_of(there), columns_of(schema))
        if self._table is not None:
            self._table.check(schema)

    def _is_placed(self, final: Path, file: WrittenFile) -> bool:
        try:
            return final.stat().st_size == file.bytes
        except FileNotFoundError:
            return False

    def _batches(self, query_id: str) -> list[int]:
        names = (entry.stem for entry in _entries(self._layout.batches(query_id)))
        return [int(name) for name in names if name.isdigit()]


def out_of_order(batch_id: int, newest: int) -> PipelineError:
    return PipelineError(
        f"batch {batch_id} comes after batch {newest} of the same query was landed",
        code="batch_out_of_order",
        hint="the checkpoint is older than the lake: put the newer checkpoint back, or land "
        "into another directory with a new checkpoint",
    )


def not_written(path: str, size: int | None, written: int) -> PipelineError:
    return PipelineError(
        f"an executor wrote `{path}`, but the driver does not see it"
        if size is None
        else f"`{path}` has {size} bytes, an executor wrote {written}",
        code="lake_not_shared",
        hint="the lake must be a place that the driver and all executors share",
    )


def some_manifest(layout: Layout) -> Manifest | None:
    """Any decision that was made in this lake; `None` if nothing was landed here."""
    for path in (layout.root / HIDDEN / "batches").glob("*/*.json"):
        return Manifest.decode(path.read_bytes(), path)
    return None


def newest_batches(layout: Layout) -> dict[str, int]:
    """The newest batch of each query that is published: not one of which files still wait for their names."""
    found: dict[str, int] = {}
    for directory in _entries(layout.root / HIDDEN / "batches"):
        numbers = [int(entry.stem) for entry in _entries(directory) if entry.stem.isdigit()]
        if not numbers:
            continue
        path = layout.manifest(directory.name, max(numbers))
        files = Manifest.decode(path.read_bytes(), path).files
        waits = any((layout.root / file.temporary).is_file() for file in files)
        found[directory.name] = max(numbers) - (1 if waits else 0)
    return found


def schema_of(layout: Layout, manifest: Manifest) -> pa.Schema | None:
    """The columns of the files of a batch; None if nobody knows them any more."""
    if manifest.schema is not None:
        return manifest.schema
    for file in manifest.files:
        for path in (layout.root / file.path, layout.root / file.temporary):
            if path.is_file():
                return pq.read_schema(path).remove_metadata()
    return None


def check_partitions(layout: Layout, manifest: Manifest) -> None:
    found, wanted = (",".join(by) or "none" for by in (manifest.partition_by, layout.partition_by))
    if found != wanted:
        raise PipelineError(
            f"`{layout.root}` is partitioned by {found}, and this run would partition by {wanted}",
            code="lake_schema_differs",
            hint=f"partition by {found}, or land into another directory with a new checkpoint",
        )


def check_columns(what: str, there: Columns, records: Columns) -> None:
    if there == records:
        return
    names = [", ".join(f"`{n}` {t}" for n, t in mine if (n, t) not in other) or "nothing else"
             for mine, other in ((there, records), (records, there))]  # fmt: skip
    raise PipelineError(
        f"the records do not fit the {what}: it has {names[0]}, they have {names[1]}",
        code="lake_schema_differs",
        hint="run with the options of the first run, or land into another directory with a new "
        "checkpoint",
    )


def not_taken(what: str, error: Exception) -> PipelineError:
    reason = (str(error).splitlines() or [""])[0]
    return PipelineError(
        f"{what} has no type for a column of the records: {reason}",
        code="lake_schema_differs",
        hint="leave the column out or convert it; `--table parquet` takes more types",
    )


def columns_of(schema: Any) -> Columns:
    """Names and types of a schema of Arrow or Delta, to be compared and told."""
    return [(field.name, str(field.type)) for field in schema]


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _missing(manifest: Manifest, file: WrittenFile) -> PipelineError:
    name = f"{manifest.batch_id:08d}.json"
    return PipelineError(
        f"file `{file.path}` of batch {manifest.batch_id} is gone: "
        "it was published and then removed by something else",
        code="lake_file_missing",
        hint="put it back; or, if all files of the batch are gone, remove its manifest "
        f"`_millstream/batches/{manifest.query_id}/{name}` and the batch is landed again",
    )
