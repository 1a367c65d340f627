"""Where the files of a lake are and what they are called: paths only, no I/O.

Where it sits: below the task side (`files`), the driver side (`publish`) and the tables.

    lake/                                          the directory that readers are given
      date=2026-11-16/
        part-00000007-00002-000-<query>.parquet    batch 7, task 2, its first file of this partition
      _millstream/                                 readers skip names that begin with `_`
        batches/<query>/00000007.json              what batch 7 consists of: its manifest
        tmp/<query>/7/<unique>.parquet.tmp         what a task has written and nobody has decided on

Invariants:
- I-LAK-1  A name ends in `.parquet` only if a reader may count it: a reader that skips no directory
           (`**/*.parquet`) sees the same records as one that does.
- I-LAK-2  A final name holds query and batch: no two batches, of whatever query, share a name.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.errors import InvalidArgument

HIDDEN: Final = "_millstream"
TABLES: Final = ("parquet", "delta", "iceberg")
PARTITIONS: Final = ("date", "stream")
IDENTIFIER: Final = "millstream.records"
S3: Final = "s3"
NULL_PARTITION: Final = "__HIVE_DEFAULT_PARTITION__"
"""The name that Hive, Spark, pyarrow and DuckDB give to a partition without a value."""
_ESCAPED: Final = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")
"""What Spark escapes in names of partitions. It takes `%C3%BC` for two letters where others take it for one: so
nothing else is escaped, and all of them read the same."""
_QUERY: Final = re.compile(r"[0-9A-Za-z-]{1,64}")
_SCHEME: Final = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")

Partition = tuple[tuple[str, str | None], ...]
"""The values of the partition columns of one file, in the order of the columns."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one lake is laid out."""

    root: Path
    """A directory; with a scheme, bucket and prefix."""
    table: str = "parquet"
    partition_by: tuple[str, ...] = ("date",)
    scheme: str = ""
    """`s3`, or nothing for a directory."""
    catalog: str = ""
    """Of Iceberg: one of the user's own, by the name that it has for pyiceberg."""
    identifier: str = IDENTIFIER
    """Of Iceberg: the table in its catalog."""

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            raise InvalidArgument(
                f"there is no table format `{self.table}`", hint="choose " + ", ".join(TABLES)
            )
        unknown = [name for name in self.partition_by if name not in PARTITIONS]
        if unknown or len(set(self.partition_by)) != len(self.partition_by):
            raise InvalidArgument(
                f"a lake cannot be partitioned by `{','.join(self.partition_by)}`",
                hint="choose date, stream, date,stream or none",
            )

    @property
    def url(self) -> str:
        """How tables and people name the root."""
        return f"{self.scheme}://{self.root.as_posix()}" if self.scheme else str(self.root)

    @property
    def keeps_partition_columns(self) -> bool:
        """Iceberg takes the values from the files; the others from directory or log."""
        return self.table == "iceberg"

    def directory(self, partition: Partition) -> str:
        """Where files of this partition stand, relative to the root.

        A table knows the values from its log, so only a plain lake spells all of them in the path.
        """
        shown = partition
        if self.table != "parquet":
            shown = tuple(entry for entry in partition if entry[0] == "date")
        names = [f"{name}={_escaped(value)}" for name, value in shown]
        return "/".join((["data"] if self.table == "iceberg" else []) + names)

    def batches(self, query_id: str) -> Path:
        return self.root / HIDDEN / "batches" / query_id

    def manifest(self, query_id: str, batch_id: int) -> Path:
        return self.batches(query_id) / f"{batch_id:08d}.json"

    def temporary_root(self, query_id: str) -> Path:
        return self.root / HIDDEN / "tmp" / query_id

    def temporary(self, query_id: str, batch_id: int) -> Path:
        return self.temporary_root(query_id) / str(batch_id)


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Which task of which batch writes."""

    query_id: str
    batch_id: int
    task: int

    def __post_init__(self) -> None:
        if not _QUERY.fullmatch(self.query_id):
            raise InvalidArgument(f"`{self.query_id}` is not the id of a streaming query")

    def object_name(self) -> str:
        """A final name that no other attempt has, for stores without rename."""
        return (
            f"part-{self.batch_id:08d}-{self.task:05d}-{uuid.uuid4().hex}-{self.query_id}.parquet"
        )

    def final_name(self, sequence: int) -> str:
        return f"part-{self.batch_id:08d}-{self.task:05d}-{sequence:03d}-{self.query_id}.parquet"

    @staticmethod
    def temporary_name() -> str:
        """New for each file of each attempt: two attempts of one task never touch the same file."""
        return f"{uuid.uuid4().hex}.parquet.tmp"


def root_of(path: str) -> tuple[str, Path]:
    """The scheme (`s3`, or nothing for a directory), and the root of a lake."""
    scheme = _SCHEME.match(path)
    if scheme is None:
        return "", Path(path).expanduser().absolute()
    if scheme[1].lower() == S3:
        bucket, _, prefix = path[len("s3://") :].partition("/")
        if not bucket or not prefix.strip("/"):
            raise InvalidArgument(f"`{path}` has no prefix", hint="write s3://BUCKET/PREFIX")
        return S3, Path(bucket, prefix.strip("/"))
    if scheme[1].lower() != "file":
        raise InvalidArgument(
            f"a lake cannot be on `{scheme[1]}://`",
            hint="name a directory that the driver and all executors share, or s3://BUCKET/PREFIX",
        )
    return "", Path(path[len("file://") :]).absolute()


def local_root(path: str, why: str = "publishing needs a file system with rename") -> Path:
    """A directory; `why` is told to whoever names another place."""
    scheme, root = root_of(path)
    if scheme:
        raise InvalidArgument(
            f"`{path}` is not a directory: {why}",
            hint="name a directory that the driver and all executors share",
        )
    return root


def partition_columns(text: str) -> tuple[str, ...]:
    """`date,stream` -> the columns; `none` -> no columns."""
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    return () if names == ("none",) else names


def _escaped(value: str | None) -> str:
    if value is None or value == "":
        return NULL_PARTITION
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", value)
