"""The Spark connector: `format("millstream")` for batch and streaming, reading and writing.

Reading order: `options` (what can be asked for), `source` (what Spark calls), `columns` and `offsets`
(the contracts), `plan` (tasks), `reader` (a task), `stream_reader` with `follow` and `loss` (a query),
`decode` (JSON values); beside them `session`, `java` and `versions` (starting Spark), `ship` (clusters without
Millstream), `progress` and `listener` (lag). Spark finds it through the module `pyspark_millstream`; nothing is registered.

Invariants:
- I-SPK-1  Pure Python over the client: it ships to executors, and never imports the native module.
- I-SPK-2  Importing this package imports neither pyspark nor pyarrow; names are loaded when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.spark.errors import ConnectorError
    from millstream.spark.listener import LagListener
    from millstream.spark.progress import Lag, lag
    from millstream.spark.ship import build_zip, register
    from millstream.spark.source import MillstreamDataSource

_HOMES = {
    "ConnectorError": "millstream.spark.errors",
    "Lag": "millstream.spark.progress",
    "LagListener": "millstream.spark.listener",
    "MillstreamDataSource": "millstream.spark.source",
    "build_zip": "millstream.spark.ship",
    "lag": "millstream.spark.progress",
    "register": "millstream.spark.ship",
}

__all__ = [
    "ConnectorError",
    "Lag",
    "LagListener",
    "MillstreamDataSource",
    "build_zip",
    "lag",
    "register",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'millstream.spark' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ImportError:
        from millstream.spark.versions import require_spark

        require_spark()  # a missing or older pyspark is told in our words
        raise
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
