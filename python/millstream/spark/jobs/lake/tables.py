"""Which table formats a lake can have, and whether this machine has what they need.

Where it sits: between the sink and the tables, so that neither a plain lake nor the publisher loads
a library that it does not use.
"""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING, Final

from millstream.errors import SetupError

if TYPE_CHECKING:
    from millstream.spark.jobs.lake.layout import Layout
    from millstream.spark.jobs.lake.publish import Publisher, Table

PACKAGES: Final = {"parquet": (), "delta": ("deltalake",), "iceberg": ("pyiceberg", "sqlalchemy")}


def check_installed(table: str) -> None:
    """Only the driver needs these packages: the executors write Parquet."""
    missing = [name for name in PACKAGES[table] if util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"table format `{table}` needs the package `{missing[0]}` on the driver",
            hint=f"pip install 'millstream[{table}]'",
        )


def publisher_of(layout: Layout) -> type[Publisher]:
    """What publishes batches here."""
    if layout.scheme:
        from millstream.spark.jobs.lake.objects import ObjectPublisher

        return ObjectPublisher
    from millstream.spark.jobs.lake.publish import Publisher

    return Publisher


def table_of(layout: Layout) -> Table | None:
    if layout.table == "delta":
        from millstream.spark.jobs.lake.delta import DeltaLake

        return DeltaLake(layout)
    if layout.table == "iceberg":
        from millstream.spark.jobs.lake.iceberg import IcebergLake

        return IcebergLake(layout)
    return None
