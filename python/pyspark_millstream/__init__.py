"""How Spark finds Millstream: it imports every module named `pyspark_*` and takes its `DefaultSource`.

Where it sits: the door to `millstream.spark.source`.
Invariant I-DSC-1: importing this never raises, since Spark would then find no Python source at all. If
the connector cannot run here, using it says why.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DefaultSource"]

SPARK_MIN = (4, 2)


def _problem() -> str:
    """Why the connector cannot run here; empty if it can."""
    try:
        import pyspark
    except ImportError:
        return (
            "spark_not_supported: pyspark is not installed. Hint: pip install 'millstream[spark]'."
        )
    parts = pyspark.__version__.split(".")
    try:
        version = (int(parts[0]), int(parts[1]))
    except (ValueError, IndexError):
        version = SPARK_MIN
    if version < SPARK_MIN:
        return (
            f"spark_not_supported: Spark {pyspark.__version__} is too old for Millstream. "
            "Hint: install pyspark 4.2 or newer, on the cluster too."
        )
    try:
        import pyarrow  # noqa: F401 - only whether it is there
    except ImportError:
        return (
            "spark_not_supported: pyarrow is not installed. Hint: pip install 'millstream[spark]'."
        )
    return ""


def _broken(text: str) -> type[Any]:
    """A source whose use raises `text`."""
    base: type[Any] = object
    try:
        from pyspark.sql.datasource import DataSource

        base = DataSource
    except ImportError:
        pass

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(text)

    members = {"__init__": refuse, "name": classmethod(lambda _: "millstream")}
    return type("DefaultSource", (base,), {**members, "__module__": __name__})


def _find() -> type[Any]:
    text = _problem()
    if not text:
        try:
            from millstream.spark.source import MillstreamDataSource

            return MillstreamDataSource
        except Exception as error:  # noqa: BLE001 - whatever it is, Spark must find the other sources
            text = (
                f"spark_not_supported: the Millstream connector cannot be loaded: {error!r}. "
                "Hint: `millstream doctor` says what is missing."
            )
    return _broken(text)


DefaultSource = _find()
