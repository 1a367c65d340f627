"""Where the bytes of a lake are: a directory, or a prefix of a bucket. The one door to both for tasks and tables.

Where it sits: below `files` (tasks), `publish` and `objects` (driver) and the tables. Paths are relative to the root of the lake.

An object store is reached with the names that other tools use, from the environment of each process: `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, and
`AWS_VIRTUAL_HOSTED_STYLE_REQUEST` (without it, the bucket is in the path). What is not set is left to the library: profiles, roles.

Invariants:
- I-STO-1  No secret is in a plan, an option or a message: every process has its own environment.
- I-STO-2  A file that is sealed is durable; one that is not is not there, or has a name that nobody decides on.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from millstream.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from millstream.spark.jobs.lake.layout import Layout

_NAMES: Final = {
    "access_key": ("AWS_ACCESS_KEY_ID",),
    "secret_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint_override": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
_ICEBERG: Final = {
    "access_key": "s3.access-key-id",
    "secret_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
    "region": "s3.region",
    "endpoint_override": "s3.endpoint",
}
_HOSTED: Final = "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"


class Files(Protocol):
    """What is done with the files of a lake."""

    def create(self, path: str) -> Any:
        """A new file, open for writing."""

    def seal(self, stream: Any) -> int:
        """The file is whole: make it durable and close it; returns its size."""

    def size(self, path: str) -> int | None:
        """How many bytes a file has; None if it is not there."""

    def footer(self, path: str) -> pq.FileMetaData: ...

    def remove(self, path: str) -> None:
        """A file that is gone already is no failure."""


def files_of(layout: Layout) -> Files:
    return ObjectFiles(layout.root.as_posix()) if layout.scheme else LocalFiles(layout.root)


class LocalFiles:
    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str) -> Any:
        place = self._root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place.open("xb")

    def seal(self, stream: Any) -> int:
        stream.flush()
        os.fsync(stream.fileno())
        size = int(stream.tell())
        stream.close()
        return size

    def size(self, path: str) -> int | None:
        try:
            return (self._root / path).stat().st_size
        except FileNotFoundError:
            return None

    def footer(self, path: str) -> pq.FileMetaData:
        return pq.read_metadata(self._root / path)

    def remove(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)


class ObjectFiles:
    def __init__(self, root: str) -> None:
        self._root = root
        self._store = s3()

    def create(self, path: str) -> Any:
        return self._store.open_output_stream(f"{self._root}/{path}")

    def seal(self, stream: Any) -> int:
        size = int(stream.tell())
        stream.close()
        return size

    def size(self, path: str) -> int | None:
        info = self._store.get_file_info(f"{self._root}/{path}")
        return info.size if info.type == pafs.FileType.File else None

    def footer(self, path: str) -> pq.FileMetaData:
        return pq.read_metadata(f"{self._root}/{path}", filesystem=self._store)

    def remove(self, path: str) -> None:
        if self.size(path) is not None:
            self._store.delete_file(f"{self._root}/{path}")

    def names(self, directory: str) -> list[str]:
        """What is directly below a directory; nothing if there is none."""
        chosen = pafs.FileSelector(f"{self._root}/{directory}", allow_not_found=True)
        return sorted(info.base_name for info in self._store.get_file_info(chosen))


def s3() -> pafs.S3FileSystem:
    return _s3(tuple(sorted(_given().items())), _hosted())


@lru_cache(maxsize=4)
def _s3(given: tuple[tuple[str, str], ...], hosted: bool) -> pafs.S3FileSystem:
    return pafs.S3FileSystem(**dict(given), force_virtual_addressing=hosted)


def storage_options(layout: Layout) -> dict[str, str] | None:
    """For `deltalake`, which takes the names of the environment; only an endpoint without TLS has to be allowed."""
    if not layout.scheme:
        return None
    endpoint = _given().get("endpoint_override", "")
    options = {"AWS_ENDPOINT_URL": endpoint} if endpoint else {}
    return options | ({"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") else {})


def catalog_properties(layout: Layout) -> Mapping[str, str]:
    """For `pyiceberg`, where the catalog itself does not say them."""
    if not layout.scheme:
        return {}
    found = {_ICEBERG[name]: value for name, value in _given().items()}
    return found | ({"s3.force-virtual-addressing": "true"} if _hosted() else {})


def _given() -> dict[str, str]:
    found = {}
    for name, variables in _NAMES.items():
        values = [os.environ[variable] for variable in variables if os.environ.get(variable)]
        if values:
            found[name] = values[0]
    return found


def _hosted() -> bool:
    return os.environ.get(_HOSTED, "").lower() in ("1", "true")


@contextmanager
def reaching(layout: Layout) -> Iterator[None]:
    """What an object store refuses is one clear error."""
    try:
        yield
    except OSError as error:
        if not layout.scheme:
            raise
        raise PipelineError(
            f"`{layout.url}` cannot be used: {str(error).splitlines()[0]}",
            code="store_unreachable",
            hint="check the bucket, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and "
            "AWS_ENDPOINT_URL, for the driver and for the executors",
        ) from error
