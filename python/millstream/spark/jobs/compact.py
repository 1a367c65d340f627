"""Job `compact`: the small files of a lake into large ones; no record changes.

Where it sits: a batch job, found through `jobs`; the rows are written by `lake/rewrite`, or by the library of a Delta table.

A table is compacted where it is, by one commit that takes the small files out and the large ones in: readers see either state. What
`land` has noted in the table of its batches stays, and so does every replaced file, for readers and versions that have it. A plain
lake has no commit: it is written anew into another directory, which has its name when it is complete.

Invariants:
- I-CPT-1  A commit that comes in between wins or waits, and so does this one: nothing of either is lost or doubled.
- I-CPT-2  Without the commit, or without the name, nothing has happened: a later run removes what was left.
- I-CPT-3  A plain lake is taken as of the end of a batch.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from millstream.errors import InvalidArgument, PipelineError
from millstream.spark.jobs.job import JobOption, Request, Target, flag
from millstream.spark.jobs.lake.layout import HIDDEN, Layout, local_root
from millstream.spark.jobs.run.batch import BatchJob, Report
from millstream.spark.jobs.run.lock import locked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from millstream.spark.jobs.lake.contents import Contents, LakeFile

ALL: Final = "all"
PREFIX: Final = "compact-"
LEFT_AFTER_SECONDS: Final = 86_400.0
"""What no run has touched for so long was left by one that died, wherever it ran."""


@dataclass(frozen=True, slots=True)
class CompactReport(Report):
    """What has become of the files."""

    lake: str
    table: str
    files_before: int
    files_after: int
    replaced: int
    written: int
    bytes_replaced: int
    bytes_written: int

    @property
    def ok(self) -> bool:
        return True

    def document(self) -> dict[str, Any]:
        return {"done": True, **asdict(self)}

    def lines(self) -> list[str]:
        if not self.replaced:
            return [f"nothing to compact: {self.files_before:,} files in `{self.lake}`"]
        before = f"{self.replaced:,} files ({self.bytes_replaced:,} bytes)"
        after = f"{self.written:,} files ({self.bytes_written:,} bytes)"
        return [
            f"{before} -> {after}",
            f"`{self.lake}` had {self.files_before:,} files and has {self.files_after:,}",
        ]


class Compact(BatchJob):
    """A lake with fewer files."""

    name = "compact"
    summary = "small files of a lake into large ones: a table in place, plain files elsewhere"
    reads_streams = False
    from_help = "The lake."
    to_help = "Directory of the new lake; for plain Parquet files only, and needed for them."
    to_required = False
    options: ClassVar[tuple[JobOption, ...]] = (
        flag(ALL, "Also the partition of today, which still grows."),
    )

    def target(self, streams: tuple[str, ...], text: str | None) -> Target:
        """A table is its own target."""
        if len(streams) != 1:
            raise InvalidArgument("job `compact` takes one lake", hint="run it for each of them")
        return Target.parse(streams[0] if text is None else text)

    def check(self, request: Request, query_id: str | None) -> None:  # noqa: ARG002
        from millstream.spark.jobs.lake.contents import lake_at

        layout = lake_at(request.streams[0])
        if request.source_options:
            raise InvalidArgument("job `compact` reads no stream", hint="leave --option out")
        if request.target.path is None:
            raise InvalidArgument(
                f"job `compact` writes files, not `{request.target}`", hint="name a directory"
            )
        to = local_root(request.target.path)
        if layout.table != "parquet":
            if to != layout.root:
                raise InvalidArgument(
                    f"`{layout.root}` is a table of kind `{layout.table}`, which is compacted where it is",
                    hint="leave --to out",
                )
            return
        if to == layout.root:
            raise InvalidArgument(
                f"`{layout.root}` is a plain lake: in place its readers would see records twice or never",
                hint="add --to with another directory",
            )
        if request.flag(self, ALL):
            raise InvalidArgument("a plain lake is written anew whole", hint="leave --all out")
        if to.is_relative_to(layout.root) or layout.root.is_relative_to(to):
            raise InvalidArgument(
                f"`{to}` and `{layout.root}` are inside of each other",
                hint="name another directory",
            )
        if to.exists():
            raise InvalidArgument(f"`{to}` exists already", hint="name a new directory")

    def run(self, session: SparkSession, request: Request) -> Report:
        from millstream.spark.jobs.lake.contents import lake_at

        layout = lake_at(request.streams[0])
        with locked(layout.root / HIDDEN / "compact", "lake"):
            if layout.table == "delta":
                return _delta(layout, everything=request.flag(self, ALL))
            if layout.table == "iceberg":
                return _iceberg(session, layout, everything=request.flag(self, ALL))
            return _plain(session, layout, local_root(str(request.target.path)))


# ---------------------------------------------------------------------------- which files


def is_closed(date: str | None, *, everything: bool) -> bool:
    """Whether a partition grows no more; one that is not of a day counts as closed."""
    return everything or date is None or date < datetime.now(UTC).date().isoformat()


def small_groups(
    partitions: dict[Any, list[LakeFile]], *, everything: bool
) -> list[list[LakeFile]]:
    """Files that are to be one file, partition by partition."""
    from millstream.spark.jobs.lake.contents import bins
    from millstream.spark.jobs.lake.rewrite import TARGET_BYTES

    groups = []
    for files in partitions.values():
        small = [
            file
            for file in files
            if file.bytes < TARGET_BYTES // 2 and is_closed(file.date, everything=everything)
        ]
        groups += [group for group in bins(small, TARGET_BYTES) if len(group) > 1]
    return groups


# ---------------------------------------------------------------------------- tables


def _delta(layout: Layout, *, everything: bool) -> Report:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    from millstream.spark.jobs.lake.rewrite import TARGET_BYTES

    table = DeltaTable(str(layout.root))
    before = len(table.file_uris())
    filters: list[tuple[str, str, Any]] | None = None
    if "date" in layout.partition_by and not everything:
        days = sorted({str(partition["date"]) for partition in table.partitions()})
        closed = [day for day in days if is_closed(day, everything=False)]
        if not closed:
            return CompactReport(str(layout.root), layout.table, before, before, 0, 0, 0, 0)
        filters = [("date", "in", closed)]
    try:
        done = table.optimize.compact(partition_filters=filters, target_size=TARGET_BYTES)
    except DeltaError as error:
        raise _lost(layout, error) from error
    replaced, written = (json.loads(done[name]) for name in ("filesRemoved", "filesAdded"))
    return CompactReport(
        str(layout.root),
        layout.table,
        before,
        len(DeltaTable(str(layout.root)).file_uris()),
        replaced["totalFiles"],
        written["totalFiles"],
        replaced["totalSize"],
        written["totalSize"],
    )


def _iceberg(session: SparkSession, layout: Layout, *, everything: bool) -> Report:
    from pyiceberg.exceptions import CommitFailedException, ValidationException

    from millstream.spark.jobs.lake.contents import contents_of
    from millstream.spark.jobs.lake.files import sync_directories
    from millstream.spark.jobs.lake.iceberg import data_files, open_catalog, relative, replace_files
    from millstream.spark.jobs.lake.rewrite import rewrite

    catalog = open_catalog(layout)
    try:
        entries = {relative(layout, entry.file_path): entry for entry in data_files(catalog)}
        _clean(layout, entries.keys())
        contents = contents_of(layout)
        _all_there(contents)
        by_partition: dict[Any, list[LakeFile]] = {}
        for file in contents.files:
            if file.path in entries:
                key = (entries[file.path].spec_id, repr(entries[file.path].partition))
                by_partition.setdefault(key, []).append(file)
        groups = small_groups(by_partition, everything=everything)
        if not groups:
            count = len(contents.files)
            return CompactReport(str(layout.root), layout.table, count, count, 0, 0, 0, 0)
        name = PREFIX + uuid.uuid4().hex
        written = rewrite(session, contents, groups, layout, name)
        for new in written:
            final = layout.root / new.path
            final.parent.mkdir(parents=True, exist_ok=True)
            os.rename(layout.root / new.temporary, final)
        sync_directories({(layout.root / new.path).parent for new in written}, layout.root)
        old = [file for group in groups for file in group]
        try:
            replace_files(
                layout, catalog, [entries[file.path] for file in old], [new.path for new in written]
            )
        except (CommitFailedException, ValidationException) as error:
            for new in written:
                (layout.root / new.path).unlink(missing_ok=True)
            raise _lost(layout, error) from error
        shutil.rmtree(layout.temporary_root(name), ignore_errors=True)
        after = len(data_files(catalog))
    finally:
        catalog.close()
    return CompactReport(
        str(layout.root),
        layout.table,
        len(entries),
        after,
        len(old),
        len(written),
        sum(file.bytes for file in old),
        sum(file.bytes for file in written),
    )


def _clean(layout: Layout, counted: Any) -> None:
    """What a run has left that died: its temporary files, and its files if the table does not count them."""
    for place in _left(layout.root / HIDDEN / "tmp", f"{PREFIX}*"):
        files = list((layout.root / "data").rglob(f"*-{place.name}.parquet"))
        if not any(file.relative_to(layout.root).as_posix() in counted for file in files):
            for file in files:
                file.unlink()
        shutil.rmtree(place)


def _left(directory: Path, pattern: str) -> list[Path]:
    before = time.time() - LEFT_AFTER_SECONDS
    return [path for path in directory.glob(pattern) if path.stat().st_mtime < before]


def _lost(layout: Layout, error: Exception) -> Exception:
    reason = (str(error).splitlines() or [""])[0]
    return PipelineError(
        f"`{layout.root}` has changed while it was compacted, and is as it was: {reason}",
        code="lake_changed",
        hint="run it again",
    )


# ---------------------------------------------------------------------------- plain files


def _plain(session: SparkSession, layout: Layout, to: Path) -> Report:
    from millstream.spark.jobs.lake.contents import contents_of
    from millstream.spark.jobs.lake.files import sync_directories
    from millstream.spark.jobs.lake.publish import Publisher
    from millstream.spark.jobs.lake.rewrite import rewrite

    finished = _finished(layout)
    contents = contents_of(layout)
    files = [file for file in contents.files if finished(file.path)]
    by_partition: dict[Any, list[LakeFile]] = {}
    for file in files:
        by_partition.setdefault(Path(file.path).parent, []).append(file)
    groups = _whole_groups(list(by_partition.values()))
    for left in _left(to.parent, f".{to.name}.{PREFIX}*.tmp"):
        shutil.rmtree(left)
    name = PREFIX + uuid.uuid4().hex
    draft = Layout(to.parent / f".{to.name}.{name}.tmp", layout.table, layout.partition_by)
    try:
        written = rewrite(session, contents, groups, draft, name)
        Publisher(draft, None).publish(name, 0, written)
        os.rename(draft.root, to)
    finally:
        shutil.rmtree(draft.root, ignore_errors=True)
    sync_directories(set(), to)
    return CompactReport(
        str(to),
        layout.table,
        len(files),
        len(written),
        len(files),
        len(written),
        sum(file.bytes for file in files),
        sum(file.bytes for file in written),
    )


def _whole_groups(partitions: Sequence[list[LakeFile]]) -> list[list[LakeFile]]:
    from millstream.spark.jobs.lake.contents import bins
    from millstream.spark.jobs.lake.rewrite import TARGET_BYTES

    return [group for files in partitions for group in bins(files, TARGET_BYTES)]


def _finished(layout: Layout) -> Any:
    """Tells of a file whether its batch is complete: one that is being published is left for the next time."""
    from millstream.spark.jobs.lake.publish import newest_batches

    newest = newest_batches(layout)

    def is_finished(path: str) -> bool:
        parts = Path(path).stem.split("-", 4)
        query = parts[4] if len(parts) == 5 and parts[1].isdigit() else None
        return query not in newest or int(parts[1]) <= newest[query]

    return is_finished


def _all_there(contents: Contents) -> None:
    if contents.missing:
        raise PipelineError(
            f"file `{contents.missing[0]}` of the table is missing",
            code="lake_file_missing",
            hint="job `audit` says which records it had; put it back first",
        )
