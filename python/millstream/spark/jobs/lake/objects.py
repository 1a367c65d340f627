"""The driver side of a lake on an object store: a batch becomes visible by the commit of its table, and by nothing else.

Where it sits: beside `publish`, which does the same where files can be renamed; chosen by `sink`.

An object store has no rename, so tasks write files under their final names, new for each attempt. Nobody sees them: readers of
Delta and Iceberg open what the table lists. The commit that lists them carries query and batch, so it is the decision, too:

    write    tasks write files under names of their own               nothing visible
    enter    one commit of metadata, with query and batch             visible at once

A run that repeats the batch finds its number in the table and removes what it has just written itself. Files of runs that died before
`enter` stay until the table is vacuumed: nobody can tell whether a commit that was sent and not answered is still under way.

Invariants:
- I-OBJ-1  No name is written twice, so no file that a table lists is ever replaced.
- I-OBJ-2  After a commit was tried, none of its files is removed.
- I-OBJ-3  A batch that is older than the newest of its query in the table is refused: Spark goes back by one at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.spark.jobs.lake.layout import HIDDEN, Layout
from millstream.spark.jobs.lake.publish import (
    Manifest,
    Publisher,
    Table,
    not_written,
    out_of_order,
)
from millstream.spark.jobs.lake.store import ObjectFiles, reaching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.spark.jobs.lake.files import WrittenFile

QUERIES: Final = f"{HIDDEN}/queries"


class ObjectPublisher(Publisher):
    """Takes batches of one lake on an object store to its table."""

    def __init__(self, layout: Layout, table: Table | None) -> None:
        super().__init__(layout, table)
        self._files = ObjectFiles(layout.root.as_posix())

    def publish(self, query_id: str, batch_id: int, files: Sequence[WrittenFile]) -> Manifest:
        assert self._table is not None, "plain files are refused on an object store"
        manifest = self.manifest(query_id, batch_id, files)
        with reaching(self._layout):
            newest = self._table.entered(query_id)
            if newest is not None and newest > batch_id:
                raise out_of_order(batch_id, newest)
            if newest == batch_id:
                for file in files:
                    self._files.remove(file.path)
                return manifest
            return self._enter(manifest)

    def _enter(self, manifest: Manifest) -> Manifest:
        from dataclasses import replace

        for file in manifest.files:
            size = self._files.size(file.path)
            if size != file.bytes:
                raise not_written(f"{self._layout.url}/{file.path}", size, file.bytes)
        schema = self._files.footer(manifest.files[0].path).schema.to_arrow_schema()
        manifest = replace(manifest, schema=schema.remove_metadata())
        assert self._table is not None
        self._table.check(manifest.schema)
        self._claim(manifest.query_id)
        self.enter(manifest)
        return manifest

    def discard(self, query_id: str, batch_id: int, files: Sequence[WrittenFile]) -> None:
        """Spark says so also after a commit whose answer was lost (I-OBJ-2)."""

    def _claim(self, query_id: str) -> None:
        """Leave a mark of the query, for `queries_at`."""
        mark = f"{QUERIES}/{query_id}"
        if self._files.size(mark) is None:
            self._files.seal(self._files.create(mark))


def queries_at(layout: Layout) -> list[str]:
    """The queries that have landed here."""
    with reaching(layout):
        return ObjectFiles(layout.root.as_posix()).names(QUERIES)


def table_at(layout: Layout) -> str | None:
    """Which kind of table is here; None if there is none."""
    with reaching(layout):
        names = ObjectFiles(layout.root.as_posix()).names("")
    return "delta" if "_delta_log" in names else "iceberg" if "metadata" in names else None
