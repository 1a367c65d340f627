"""Millstream: durable streams over plain HTTP.

    import millstream

    with millstream.connect("http://127.0.0.1:4437") as client:
        orders = client.create("shop/orders", content_type="application/json")

        orders.append({"id": 1})                       # one record
        orders.append_many([{"id": 2}, {"id": 3}])     # all or none

        with orders.producer("importer") as producer:  # batches, pipelines, repeats safely
            for row in rows:
                producer.append(row)

        for record in orders.read():                   # from the start to the tail
            print(record.value, record.offset)

        orders.read_arrow().to_pandas()                # the same as Arrow: number, time, value

        for record in orders.follow(tail=10):          # the last ten, then live, for ever
            print(record.value)

        orders.set_durability("disk")                  # another promise from now on
        orders.info(); orders.close(); orders.delete()
        for info in client.list(prefix="shop/"):
            print(info.path, info.tail)

A range that is missing raises `GapError`; `gaps="record"` or `gaps=function` read on instead.
The same with `await` and `async for`: `millstream.aio.connect(url)`. Errors are in
`millstream.errors`, all below `MillstreamError`.

Invariant I-PKG-1: importing this package is cheap; names are loaded when they are first used, and
pyspark, web frameworks and terminal libraries never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream import aio, errors
    from millstream.client.producer import ProducerOptions
    from millstream.client.retry import Retry
    from millstream.client.sync.arrow import ArrowBatches
    from millstream.client.sync.client import Client, Follower, Stream, connect
    from millstream.client.sync.producer import Producer
    from millstream.errors import (
        GapError,
        MillstreamError,
        OutcomeUnknown,
        StreamClosed,
        StreamNotFound,
    )
    from millstream.types import Batch, Gap, Record, StreamInfo

    __version__: str

_HOMES = {
    "ArrowBatches": "millstream.client.sync.arrow",
    "Batch": "millstream.types",
    "Client": "millstream.client.sync.client",
    "Follower": "millstream.client.sync.client",
    "Gap": "millstream.types",
    "GapError": "millstream.errors",
    "MillstreamError": "millstream.errors",
    "OutcomeUnknown": "millstream.errors",
    "Producer": "millstream.client.sync.producer",
    "ProducerOptions": "millstream.client.producer",
    "Record": "millstream.types",
    "Retry": "millstream.client.retry",
    "Stream": "millstream.client.sync.client",
    "StreamClosed": "millstream.errors",
    "StreamInfo": "millstream.types",
    "StreamNotFound": "millstream.errors",
    "connect": "millstream.client.sync.client",
}
_MODULES = ("aio", "errors")

__all__ = [
    "ArrowBatches",
    "Batch",
    "Client",
    "Follower",
    "Gap",
    "GapError",
    "MillstreamError",
    "OutcomeUnknown",
    "Producer",
    "ProducerOptions",
    "Record",
    "Retry",
    "Stream",
    "StreamClosed",
    "StreamInfo",
    "StreamNotFound",
    "__version__",
    "aio",
    "connect",
    "errors",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    import importlib

    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"millstream.{name}")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("millstream")
    except metadata.PackageNotFoundError:
        return "0+source"
