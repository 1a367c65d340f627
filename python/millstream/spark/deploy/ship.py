"""Millstream for clusters whose Python lacks it: a zip of pure Python, and registration that sends the code along.

Where it sits: called in the driver, by programs (`register`) and by `millstream pipeline submit` (`build_zip`).

The Python processes that must have the connector are the driver's planner (a process beside the driver's JVM, which does
*not* see `--py-files`) and the executors. Three ways get it there; docs/guides/spark-standalone.md has them side by side.

Invariants:
- I-SHIP-1  What is shipped is `PARTS`: pure Python that needs pyspark and pyarrow, nothing native, no server.
- I-SHIP-2  The same sources give the same zip, byte for byte.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS: Final = (
    "millstream/__init__.py",
    "millstream/aio.py",
    "millstream/errors.py",
    "millstream/settings.py",
    "millstream/types.py",
    "millstream/client",
    "millstream/spark",
    "pyspark_millstream",
)
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


def build_zip(path: Path) -> Path:
    """Write the zip for `--py-files` and `PYTHONPATH`; replaces what is there. Returns its path."""
    import millstream

    version = millstream.__version__
    folder = f"millstream-{version}.dist-info"
    described = f"Metadata-Version: 2.1\nName: millstream\nVersion: {version}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name, source in [*sources(), (f"{folder}/METADATA", described.encode())]:
                entry = zipfile.ZipInfo(name, _LONG_AGO)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, source)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    return path


def sources() -> Iterator[tuple[str, bytes]]:
    """Every file that is shipped, by its name from the root of the path, in order."""
    import millstream

    assert millstream.__file__ is not None
    root = Path(millstream.__file__).parent.parent
    if root.is_file():  # this package itself came in a zip
        yield from _from_zip(root)
        return
    for part in PARTS:
        place = root / part
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        for file in files:
            yield file.relative_to(root).as_posix(), file.read_bytes()


def _from_zip(archive: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for name in sorted(opened.namelist()):
            if name.endswith(".py") and name.startswith(PARTS):
                yield name, opened.read(name)


def register(spark: Any, *, ship: bool = False) -> None:
    """Make `format("millstream")` known to a session, classic or Connect.

    Where Millstream is installed beside the driver and on the executors this is not needed: Spark finds it by itself. With
    `ship=True` the code goes with the queries, to a planner and to executors that lack it; they need pyspark and pyarrow.
    """
    from millstream.spark.deploy.required_versions import require_spark

    require_spark()
    from millstream.spark.source import MillstreamDataSource

    if not ship:
        spark.dataSource.register(MillstreamDataSource)
        return
    from pyspark import cloudpickle

    from millstream.spark.deploy import shipped_source

    module = sys.modules[shipped_source.__name__]
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        spark.dataSource.register(shipped_source.source_with(_code()))
    finally:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _code() -> bytes:
    """The sources for `shipped_source`: version, then file and text of each module."""
    import millstream

    modules = {}
    for name, source in sources():
        if name.startswith("millstream/"):
            dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            modules[dotted] = (name, source.decode())
    return zlib.compress(json.dumps([millstream.__version__, modules]).encode(), 9)
