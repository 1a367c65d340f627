"""Which pyspark and pyarrow the connector works with, and the one error for all others.

Where it sits: beside `java.py`; imports neither library, so that it can speak about a missing one.
Invariant I-VER-1: the bounds here are those of the extra `[spark]` in pyproject.toml (checked by a test).
"""

from __future__ import annotations

import re
from importlib import metadata, util
from typing import Final

from millstream.errors import SetupError

PYSPARK_AT_LEAST: Final = (4, 2)
PYSPARK_BELOW: Final = (5,)
PYARROW_AT_LEAST: Final = (18,)
PROTOBUF_AT_LEAST: Final = (6, 33)
PANDAS_AT_LEAST: Final = (2, 2)
PANDAS_BELOW: Final = (3,)
INSTALL_HINT: Final = "pip install 'millstream[spark]'"


def installed(package: str) -> str | None:
    """The version of an installed package, `None` if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    # A cluster may bring the library on its path, without the records of an installation.
    try:
        if util.find_spec(package) is None:
            return None
    except (ImportError, ValueError):
        return None
    module = __import__(package)
    return str(getattr(module, "__version__", "unknown"))


def numbers(version: str) -> tuple[int, ...]:
    """`4.3.0.dev1` -> (4, 3, 0): the leading numbers, for comparing."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def pyspark_fits(version: str) -> bool:
    return PYSPARK_AT_LEAST <= numbers(version) < PYSPARK_BELOW


def require_spark() -> None:
    """Raise `SetupError` unless this interpreter has a pyspark and a pyarrow that the connector works with."""
    spark = installed("pyspark")
    if spark is None:
        raise SetupError("pyspark is not installed", hint=INSTALL_HINT)
    if not pyspark_fits(spark):
        raise SetupError(
            f"pyspark {spark} does not fit: the connector needs 4.2 or newer, below 5",
            hint=INSTALL_HINT,
        )
    arrow = installed("pyarrow")
    if arrow is None:
        raise SetupError("pyarrow is not installed", hint=INSTALL_HINT)
    if numbers(arrow) < PYARROW_AT_LEAST:
        raise SetupError(
            f"pyarrow {arrow} does not fit: the connector needs {PYARROW_AT_LEAST[0]} or newer",
            hint=INSTALL_HINT,
        )
