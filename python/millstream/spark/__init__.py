"""The Spark connector: `format("millstream")` for batch and streaming, reading and writing.

Reading order: `options` (what can be asked for), `source` (what Spark calls), then by folder: `read` (what comes out
of streams), `json` (their values by a schema), `write` (rows into streams), `jobs` (what `millstream pipeline` runs).
Beside them `session` and `java` (starting Spark), `deploy` (clusters without Millstream), `observe` (lag). Spark finds it
through the module `pyspark_millstream`; nothing is registered.

Invariants:
- I-SPK-1  Pure Python over the client: it ships to executors, and never imports the native module.
- I-SPK-2  Importing this package imports neither pyspark nor pyarrow; names are loaded when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.spark.deploy.ship import build_zip, register
    from millstream.spark.errors import ConnectorError
    from millstream.spark.observe.lag import Lag, lag
    from millstream.spark.observe.listener import LagListener
    from millstream.spark.source import MillstreamDataSource

_HOMES = {
    "ConnectorError": "millstream.spark.errors",
    "Lag": "millstream.spark.observe.lag",
    "LagListener": "millstream.spark.observe.listener",
    "MillstreamDataSource": "millstream.spark.source",
    "build_zip": "millstream.spark.deploy.ship",
    "lag": "millstream.spark.observe.lag",
    "register": "millstream.spark.deploy.ship",
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
        from millstream.spark.deploy.required_versions import require_spark

        require_spark()  # a missing or older pyspark is told in our words
        raise
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
