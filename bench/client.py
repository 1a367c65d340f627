#!/usr/bin/env python3
"""Measures reading with the Python client: `read` record by record against `read_arrow`.

    .venv/bin/python bench/client.py            # a million 200-byte records, 3 repetitions
    .venv/bin/python bench/client.py --quick    # 100,000, 1 repetition

One stream of JSON records, 100 per POST, read from start to tail in one process: `read` (decoded values), `read_arrow` (the
four default columns), both blocking and async, and `read(numbered=True)`. Interleaved; the best of each counts; every
run must see every record and every byte.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pyarrow.compute as pc

import millstream
from comparison import machine
from comparison.cells import running
from comparison.servers import BenchError
from durability import session
from pipeline.records import RECORD_BYTES, Records, Share, fill

RECORDS = 1_000_000
STREAM = "bench/client"
ARROW_LEAST = 3.0
TITLES = {
    "read": "`read`",
    "read_arrow": "`read_arrow`",
    "numbered": "`read(numbered=True)`",
    "async_read": "`read`, async",
    "async_read_arrow": "`read_arrow`, async",
}
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


def measure(run: session.Session, options: argparse.Namespace, root: Path) -> None:
    count = options.records
    with running(session.millstream(), root, "client") as server:
        fill(server.url, [Share(STREAM, 0, count)], Records(), 100)
        machine.wait_until_quiet(options.quiet_wait)
        for repetition in range(options.repetitions):
            for name, way in WAYS.items():
                started = time.perf_counter()
                seen = way(server.url)
                seconds = time.perf_counter() - started
                if seen != (count, count * RECORD_BYTES):
                    raise BenchError(f"{name} saw {seen} instead of {count} records")
                run.add({"way": name, "repetition": repetition, "rows": count, "seconds": seconds})
                run.say(f"  {name:<18} {count / seconds:12,.0f} records/s")


def report(document: dict[str, Any]) -> tuple[list[str], bool]:
    records = document["records"]
    best = {
        name: max(
            (one["rows"] / one["seconds"] for one in records if one["way"] == name), default=0
        )
        for name in TITLES
    }
    lines = ["| reading 200-byte records, best | records/s |", "|---|---|"]
    lines += [f"| {TITLES[name]} | {rate:,.0f} |" for name, rate in best.items() if rate]
    lines += ["", "| bound | wanted | measured | verdict |", "|---|---|---|---|"]
    final = not document["quick"] and document["complete"]
    fine = True
    for own, peer in (("read_arrow", "read"), ("async_read_arrow", "async_read")):
        passed = best[own] >= ARROW_LEAST * best[peer] if best[own] and best[peer] else None
        fine = fine and passed is not False
        measured = f"{best[own] / best[peer]:.1f}" if best[peer] else ""
        verdict = session.verdict(passed, final=final)
        lines.append(f"| {own}, times {peer} | ≥ {ARROW_LEAST:g} | {measured} | {verdict} |")
    return lines, fine


def main(arguments: list[str]) -> int:
    parser = session.parser(__doc__, repetitions=3)
    parser.add_argument("--records", type=int, help=f"records ({RECORDS:,}, quick: a tenth)")
    options = session.finish(parser, arguments)
    if options.records is None:
        options.records = RECORDS // 10 if options.quick else RECORDS
    return session.run("client", options, arguments, measure, report)


if __name__ == "__main__":
    session.main("client.py", main)
