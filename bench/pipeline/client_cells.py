"""The cell of the Python client: `read` record by record against `read_arrow`, in this process."""

from __future__ import annotations

import argparse
import asyncio
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

import millstream
from comparison import machine
from comparison.cells import running
from comparison.servers import BenchError
from durability import session
from pipeline.records import RECORD_BYTES, Records, Share, fill

RECORDS = 1_000_000
STREAM = "bench/client"
Seen = tuple[int, int]


def read(url: str) -> Seen:
    with millstream.connect(url) as client:
        return _sum(len(record.data) for record in client.stream(STREAM).read())


def numbered(url: str) -> Seen:
    with millstream.connect(url) as client:
        return _sum(len(record.data) for record in client.stream(STREAM).read(numbered=True))


def read_arrow(url: str) -> Seen:
    with millstream.connect(url) as client:
        return _add(_size(batch) for batch in client.stream(STREAM).read_arrow())


def async_read(url: str) -> Seen:
    async def body() -> Seen:
        async with millstream.aio.connect(url) as client:
            return _sum([len(record.data) async for record in client.stream(STREAM).read()])

    return asyncio.run(body())


def async_read_arrow(url: str) -> Seen:
    async def body() -> Seen:
        async with millstream.aio.connect(url) as client:
            return _add([_size(batch) async for batch in client.stream(STREAM).read_arrow()])

    return asyncio.run(body())


def _sum(lengths: Any) -> Seen:
    rows = size = 0
    for length in lengths:
        rows += 1
        size += length
    return rows, size


def _size(batch: Any) -> Seen:
    return batch.num_rows, pc.sum(pc.binary_length(batch.column("value"))).as_py()


def _add(parts: Any) -> Seen:
    rows = size = 0
    for own_rows, own_size in parts:
        rows += own_rows
        size += own_size
    return rows, size


WAYS: dict[str, Callable[[str], Seen]] = {
    "read": read,
    "read_arrow": read_arrow,
    "numbered": numbered,
    "async_read": async_read,
    "async_read_arrow": async_read_arrow,
}


def _check_bytes(url: str, count: int) -> None:
    """Both ways give the records that were sent, before any of them is measured."""
    sent = sum(zlib.crc32(record) for record in Records().range(0, count))
    with millstream.connect(url) as client:
        stream = client.stream(STREAM)
        found = sum(zlib.crc32(record.data) for record in stream.read())
        arrow = sum(
            zlib.crc32(value)
            for batch in stream.read_arrow()
            for value in batch.column("value").to_pylist()
        )
    if not sent == found == arrow:
        raise BenchError(f"sent {sent}, read {found}, read_arrow {arrow}")


def measure_client(
    run: session.Session, options: argparse.Namespace, root: Path, count: int
) -> None:
    with running(session.millstream(), root, "client") as server:
        fill(server.url, [Share(STREAM, 0, count)], Records(), 100)
        _check_bytes(server.url, count)
        machine.wait_until_quiet(options.quiet_wait)
        for _ in range(options.repetitions):
            for name, way in WAYS.items():
                started = time.perf_counter()
                seen = way(server.url)
                seconds = time.perf_counter() - started
                if seen != (count, count * RECORD_BYTES):
                    raise BenchError(f"{name} saw {seen} instead of {count} records")
                run.add({"cell": "client", "way": name, "rows": count, "seconds": seconds})
                run.say(f"  {name:<18} {count / seconds:12,.0f} records/s")
