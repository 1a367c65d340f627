"""How Spark finds Millstream: it imports every module named `pyspark_*` and takes its `DefaultSource`.

Where it sits: the door to `millstream.spark.source`.
Invariant I-DSC-1: importing this never raises, since Spark would then find no Python source at all. If
the connector cannot run here, using it says why.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DefaultSource"]


def _problem() -> str:
    """Why the connector cannot run here; empty if it can."""
    from millstream.errors import MillstreamError
    from millstream.spark.deploy.required_versions import require_spark
    from millstream.spark.errors import connector_error

    try:
        require_spark()
    except MillstreamError as error:
        return str(connector_error(error))
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
    try:
        text = _problem()
        if not text:
            from millstream.spark.source import MillstreamDataSource

            return MillstreamDataSource
    except Exception as error:  # noqa: BLE001 - whatever it is, Spark must find the other sources
        text = (
            f"setup_incomplete: the Millstream connector cannot be loaded: {error!r}. "
            "Hint: `millstream doctor` says what is missing."
        )
    return _broken(text)


DefaultSource = _find()
