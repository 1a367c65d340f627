"""A table in versions: each a directory of files that holds everything, complete from the moment it has its name.

    users/
      version=00000006/part-*.parquet      the state after batch 6
      version=00000007/part-*.parquet      the state after batch 7: readers take the last one
      _millstream/owner                    the query whose batches these are
      _millstream/tmp/...                  what is being written

Where it sits: below `materialise`. A version is decided by one rename, which the file system does whole or not at all.

Invariants:
- I-VER-2  A version that has its name is synced and is never changed: a batch that runs again finds it and leaves it alone.
- I-VER-3  Version n is made from the one before it and batch n, so that one is there until n is.
- I-VER-4  The versions of a table are the batches of one query.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path
from typing import Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.lake.layout import HIDDEN

PREFIX: Final = "version="
KEPT: Final = 10
"""Plain versions that stay for readers that have begun with them."""
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST)


class Versions:
    """The versions below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, version: int) -> Path:
        return self.root / f"{PREFIX}{version:08d}"

    def before(self, version: int) -> Path | None:
        """The newest one that is older."""
        older = [number for number in self.numbers() if number < version]
        return self.path(max(older)) if older else None

    def numbers(self) -> list[int]:
        names = [path.name.removeprefix(PREFIX) for path in self.root.glob(f"{PREFIX}*")]
        return sorted(int(name) for name in names if name.isdigit())

    def draft(self) -> Path:
        """A new place to write a version to; what other runs have left is removed."""
        shutil.rmtree(self.root / HIDDEN / "tmp", ignore_errors=True)
        return self.root / HIDDEN / "tmp" / uuid.uuid4().hex

    def publish(self, draft: Path, version: int) -> None:
        """The draft is the version from now on, unless another run of the batch was quicker."""
        from millstream.spark.jobs.lake.files import sync_directories

        for file in draft.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_directories({draft}, self.root)
        try:
            os.rename(draft, self.path(version))
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        sync_directories(set(), self.root)

    def prune(self) -> None:
        for number in self.numbers()[:-KEPT]:
            shutil.rmtree(self.path(number))

    def owner(self) -> str | None:
        try:
            return (self.root / HIDDEN / "owner").read_text().strip()
        except FileNotFoundError:
            return None

    def claim(self, query_id: str) -> None:
        """Make sure that the table is this query's."""
        place = self.root / HIDDEN / "owner"
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with place.open("x") as stream:
                stream.write(query_id + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except FileExistsError:
            self.check_owner(query_id)

    def check_owner(self, query_id: str | None) -> None:
        owner = self.owner()
        if owner is not None and owner != query_id:
            raise InvalidArgument(
                f"`{self.root}` was made with another checkpoint, of query {owner}",
                hint="use that checkpoint, or name another directory",
            )
