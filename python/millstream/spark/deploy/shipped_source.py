"""The data source that carries its own code: what `register(spark, ship=True)` gives to Spark.

Where it sits: pickled by value, so it arrives in Python processes that have pyspark and pyarrow but no Millstream: the
planner beside the driver, a Connect server, executors. There the sources that travel with it are imported from memory, and
the real data source takes its place. Everything that Spark then passes on to further processes (readers, writers) carries
the sources again. Nothing is written to a disk.

Invariants:
- I-CAR-1  This module uses nothing of Millstream at import, and every function gets what it needs by argument or from
           modules that every Python has: only so it works where it is unpickled.
- I-CAR-2  Shipped code wins over an installed one that was not imported yet; what was imported already stays.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Importer:
    """Finds and loads modules from sources in memory; stands first in `sys.meta_path`."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        self.version, self.sources = json.loads(zlib.decompress(code))

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        from importlib.machinery import ModuleSpec

        if name not in self.sources:
            return None
        file, _ = self.sources[name]
        package = file.endswith("__init__.py")
        return ModuleSpec(name, self, origin=f"shipped:{file}", is_package=package)  # type: ignore[arg-type]

    def create_module(self, _: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        file, source = self.sources[name]
        exec(compile(source, f"shipped:{file}", "exec"), module.__dict__)  # noqa: S102 - our own sources
        if name == "millstream":
            module.__dict__["__version__"] = self.version
        if name.startswith("millstream.spark"):
            carry(module, self.code)

    def get_source(self, name: str) -> str | None:
        """For tracebacks."""
        return self.sources[name][1] if name in self.sources else None


def carry(module: ModuleType, code: bytes) -> None:
    """From now on objects that Spark sends to other processes take the sources with them."""
    import copyreg

    from pyspark.sql import datasource

    sent = (
        datasource.DataSource,
        datasource.DataSourceReader,
        datasource.DataSourceStreamReader,
        datasource.DataSourceWriter,
        datasource.DataSourceStreamWriter,
    )

    def reduce(item: Any) -> Any:
        from pyspark import cloudpickle

        parts = object.__reduce_ex__(item, 2)
        return restore, (code, cloudpickle.dumps(parts))  # type: ignore[no-untyped-call]

    for value in list(vars(module).values()):
        if (
            isinstance(value, type)
            and issubclass(value, sent)
            and value.__module__ == module.__name__
        ):
            copyreg.pickle(value, reduce)


def load(code: bytes) -> None:
    """Make the shipped sources importable in this process."""
    if "millstream" in sys.modules:
        return
    if any(getattr(finder, "code", None) == code for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Importer(code))


def restore(code: bytes, data: bytes) -> Any:
    """Rebuild an object from the first three parts of its reduction."""
    load(code)
    from pyspark import cloudpickle

    make, arguments, state = cloudpickle.loads(data)[:3]
    item = make(*arguments)
    if hasattr(item, "__setstate__"):
        item.__setstate__(state)
    elif state:
        item.__dict__.update(state)
    return item


def source_with(code: bytes) -> type[DataSource]:
    """A data source class that becomes Millstream's as soon as Spark makes an instance of it."""

    class Carrier(DataSource):
        def __new__(cls, options: Any) -> Any:
            load(code)
            from millstream.spark.source import MillstreamDataSource

            return MillstreamDataSource(options)

        @classmethod
        def name(cls) -> str:
            return "millstream"

    return Carrier
