#!/usr/bin/env python3
"""Measures the append throughput of the durability classes side by side.

    .venv/bin/python bench/classes.py            # 5 repetitions of 5 s per cell, about 15 minutes
    .venv/bin/python bench/classes.py --quick    # 1 repetition of 2 s

Each repetition runs every load in every class, the order of classes rotating, each on a fresh
server; a ratio to `fsync` is taken within one repetition. Only 2xx answers count as throughput:
what the server declined with 503 is shown apart. After each run all streams are read back, and an
acknowledged append must be there once and in order.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparison import cells, machine, report
from comparison.servers import BenchError
from durability import session

CLASSES = ("ephemeral", "memory", "disk", "fsync")
REFERENCE = "fsync"
STREAMS = 64
BODY_BYTES = 256
Record = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How the load is put on."""

    connections: int
    pipeline: int

    @property
    def name(self) -> str:
        return f"c{self.connections}_p{self.pipeline}"

    @property
    def title(self) -> str:
        deep = f", pipelined {self.pipeline} deep" if self.pipeline > 1 else ""
        return f"{self.connections} connections{deep}"


SHAPES = (Shape(16, 1), Shape(16, 16), Shape(256, 1), Shape(256, 16))


def measure_one(shape: Shape, class_name: str, options: argparse.Namespace, root: Path) -> Record:
    record: Record = {
        "cell": shape.name,
        "title": shape.title,
        "durability": class_name,
        "ok": False,
    }
    arguments = {
        "durability": class_name,
        "connections": shape.connections,
        "pipeline": shape.pipeline,
        "streams": STREAMS,
        "body": BODY_BYTES,
        "seconds": options.seconds,
        "warmup": min(2.0, max(0.5, options.seconds / 5)),
        "busy": "allow",
    }
    flat = tuple(part for name, value in arguments.items() for part in (f"--{name}", f"{value}"))
    try:
        with cells.running(session.millstream(), root, f"{shape.name}-{class_name}") as server:
            machine.wait_until_quiet(options.quiet_wait)
            before = machine.usage(server.group)
            result = cells.load(server.url, ("append", *flat), 180 + 6 * options.seconds)
            record["machine"] = machine.between(before, machine.usage(server.group))
            record["rss_bytes"] = machine.group_rss_bytes(server.group)
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        return record | {"error": str(error)}
    del result["latency_slices"]
    return record | {"result": result, "ok": result["ok"]}


def measure(run: session.Session, options: argparse.Namespace, root: Path) -> None:
    for repetition in range(options.repetitions):
        run.say(f"repetition {repetition + 1} of {options.repetitions}")
        turn = repetition % len(options.classes)
        order = options.classes[turn:] + options.classes[:turn]
        for shape in SHAPES:
            for class_name in order:
                record = measure_one(shape, class_name, options, root)
                record["repetition"] = repetition
                run.add(record)
                announce(run, record)


def announce(run: session.Session, record: Record) -> None:
    label = f"  {record['title']:<36} {record['durability']:<10}"
    if "error" in record:
        run.say(f"{label} ERROR {record['error']}")
        return
    result, cores = record["result"], record["machine"]
    wrong = "" if record["ok"] else f"  FAILED {result['complaints']}"
    run.say(
        f"{label} {result['per_second']:12,.0f} appends/s, p99 {result['latency_us']['p99'] / 1e3:8.2f} ms, "
        f"{result['busy']:,} times 503, cores: server {cores['server_cores']:.2f}, "
        f"load {cores['load_cores']:.2f}, foreign {cores['foreign_cores']:.2f}{wrong}"
    )


def ratios(records: list[Record], cell: str, class_name: str) -> list[float]:
    """Throughput against the reference class, repetition by repetition."""
    reference = _rates(records, cell, REFERENCE)
    own = _rates(records, cell, class_name)
    return [own[one] / reference[one] for one in sorted(own.keys() & reference.keys())]


def _rates(records: list[Record], cell: str, class_name: str) -> dict[int, float]:
    """The rates of verified runs by repetition; a rate of zero is no reference."""
    return {
        record["repetition"]: record["result"]["per_second"]
        for record in records
        if record["cell"] == cell
        and record["durability"] == class_name
        and record["ok"]
        and record["result"]["per_second"] > 0
    }


def describe(document: session.Document) -> tuple[list[str], bool]:
    records: list[Record] = document["records"]
    classes = [name for name in CLASSES if any(one["durability"] == name for one in records)]
    shapes = dict.fromkeys((one["cell"], one["title"]) for one in records)
    rule = "|---|" + "---|" * len(classes)
    lines = [f"| thousand appends/s, median (range) | {' | '.join(classes)} |", rule]
    for cell, title in shapes:
        row = [_throughput(records, cell, name) for name in classes]
        lines.append(f"| {title} | {' | '.join(row)} |")
    lines += ["", f"| times `{REFERENCE}`, median (range) | {' | '.join(classes)} |", rule]
    for cell, title in shapes:
        row = [report.spread(ratios(records, cell, name)) for name in classes]
        lines.append(f"| {title} | {' | '.join(row)} |")
    failed = [one for one in records if not one["ok"]]
    lines += ["", f"{len(records)} runs, {len(failed)} failed; all acknowledged appends read back."]
    for one in failed:
        why = one.get("error") or "; ".join(one["result"]["complaints"]) or "verification failed"
        lines.append(f"- FAILED: {one['title']}, {one['durability']}: {why}")
    return lines, bool(records) and not failed


def _throughput(records: list[Record], cell: str, class_name: str) -> str:
    own = [one for one in records if one["cell"] == cell and one["durability"] == class_name]
    measured = [one["result"] for one in own if "result" in one]
    text = report.spread([one["per_second"] / 1e3 for one in measured], 1)
    declined = sum(one["busy"] for one in measured)
    return f"{text}, {declined:,} x 503" if declined else text


def main(arguments: list[str]) -> int:
    parser = session.parser(__doc__, repetitions=5)
    parser.add_argument("--seconds", type=float, help="measured seconds per cell (5, quick: 2)")
    parser.add_argument("--classes", default=",".join(CLASSES), help="classes, by comma")
    options = session.finish(parser, arguments)
    options.classes = options.classes.split(",")
    if set(options.classes) - set(CLASSES):
        parser.error(f"--classes: choose from {', '.join(CLASSES)}")
    options.seconds = options.seconds or (2.0 if options.quick else 5.0)
    return session.run("classes", options, arguments, measure, describe)


if __name__ == "__main__":
    session.main("classes", main)
