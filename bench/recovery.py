#!/usr/bin/env python3
"""Measures how long Millstream takes to be ready after kill -9.

    .venv/bin/python bench/recovery.py           # 1,000,000 records, 100,000 streams
    .venv/bin/python bench/recovery.py --quick   # a tenth of both

Three states of a data directory: a log of 1 GiB that no checkpoint has touched, many streams that
are only in the log, and the same streams after a checkpoint. Each is made once, killed, and copied
for every start, so that all repetitions recover the same bytes. Time is from exec to the line
`listening on`. After each start everything is read back: every acknowledged record once, in order,
with the checksum that was computed before it was sent. "cold" drops the page cache of the copy.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparison import cells, machine, report
from comparison.servers import BenchError, Server, fresh_directory
from durability import session

BOUND_SECONDS = 5.0
RECORD_BYTES = 1024
GIB = 1 << 30
LOAD_SECONDS = 600.0
CHECKPOINT_WAIT_SECONDS = 120.0
RETAINED = "millstream_wal_retained_bytes"
CHECKPOINTS = "millstream_checkpoints_total"
RECOVERY = re.compile(r"recover(ing|ed)\b", re.IGNORECASE)
NO_CHECKPOINT = ("--checkpoint-bytes", "32GiB")
SMALL_CHECKPOINT = ("--checkpoint-bytes", "1MiB")
TIDY_BYTES = 1 << 20
"""What may stay in the log of a server that has written its checkpoint."""


@dataclass(frozen=True)
class State:
    """One state of a data directory to recover from."""

    name: str
    title: str
    flags: tuple[str, ...]
    write: tuple[str, ...]
    """Arguments of the load generator that make it."""
    verify: tuple[str, ...]
    is_checkpointed: bool = False


def states(options: argparse.Namespace) -> list[State]:
    records = ("--count", str(options.records), "--body", str(RECORD_BYTES))
    streams = ("--count", str(options.streams))
    made = [
        State(
            name="log",
            title=f"log of {options.records:,} records of 1 KiB",
            flags=NO_CHECKPOINT,
            write=("fill", *records),
            verify=("fill-verify", *records),
        )
    ]
    for name, title, flags in (
        ("streams", "only in the log", NO_CHECKPOINT),
        ("catalog", "after a checkpoint", SMALL_CHECKPOINT),
    ):
        made.append(
            State(
                name=name,
                title=f"{options.streams:,} streams, {title}",
                flags=flags,
                write=("create", *streams),
                verify=("create-verify", *streams),
                is_checkpointed=name == "catalog",
            )
        )
    return [state for state in made if state.name in options.only]


def prepare(state: State, root: Path) -> tuple[Path, dict[str, Any]]:
    """Writes the state and kills the server; returns its directory and what was written."""
    data = fresh_directory(root, f"{state.name}-made")
    with Server(
        session.millstream(*state.flags), data, descriptor_limit=cells.CREATE_DESCRIPTORS
    ) as server:
        result = cells.load(server.url, state.write, LOAD_SECONDS)
        if not result["ok"]:
            raise BenchError(f"{state.title}: writing it failed: {result['complaints']}")
        counters = _checkpointed(server) if state.is_checkpointed else _counters(server)
        # At once: a server that is left alone for two seconds writes a checkpoint.
        server.kill()
    checkpoints, retained = counters[CHECKPOINTS], counters[RETAINED]
    if not state.is_checkpointed and checkpoints:
        raise BenchError(f"{state.title}: a checkpoint came before the kill")
    return data, {"write": result, "checkpoints": checkpoints, "log_bytes": retained}


def _counters(server: Server) -> dict[str, float]:
    found = server.metrics((CHECKPOINTS, RETAINED))
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise BenchError(f"the server exports no {', '.join(missing)}")
    return {name: value or 0.0 for name, value in found.items()}


def _checkpointed(server: Server) -> dict[str, float]:
    """Waits until the log is covered by a checkpoint. The server tells it only by its counters."""
    deadline = time.monotonic() + CHECKPOINT_WAIT_SECONDS
    while time.monotonic() < deadline:
        counters = _counters(server)
        if counters[CHECKPOINTS] and counters[RETAINED] < TIDY_BYTES:
            return counters
        time.sleep(0.05)
    raise BenchError(f"no checkpoint within {CHECKPOINT_WAIT_SECONDS:.0f} s")


def drop_cache(folder: Path) -> None:
    """Leaves no page of the folder's files in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def start(state: State, made: Path, root: Path, *, is_cold: bool, quiet: float) -> dict[str, Any]:
    """Starts on a copy of the state, measures, and reads everything back."""
    data = root / f"{state.name}-copy"
    shutil.copytree(made, data)
    os.sync()
    if is_cold:
        drop_cache(data)
    machine.wait_until_quiet(quiet)
    before = machine.usage(None)
    try:
        with Server(
            session.millstream(*state.flags), data, descriptor_limit=cells.CREATE_DESCRIPTORS
        ) as server:
            used = machine.between(before, machine.usage(server.group))
            record = {
                "cell": state.name,
                "title": state.title,
                "cache": "cold" if is_cold else "warm",
                "ready_seconds": round(server.ready_seconds, 3),
                "server_cpu_seconds": round(machine.group_cpu_seconds(server.group), 2),
                "rss_bytes": machine.group_rss_bytes(server.group),
                "machine": used,
                "progress": progress(server.lines),
            }
            record["verify"] = cells.load(server.url, state.verify, LOAD_SECONDS)
    finally:
        shutil.rmtree(data)
        data.with_name(data.name + ".log").unlink(missing_ok=True)
    return record


def progress(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """What the server said about its recovery before it was ready."""
    return [(seconds, line) for seconds, line in lines if RECOVERY.match(line)]


def is_right(record: dict[str, Any]) -> bool:
    """Whether everything that was acknowledged before the kill is there, byte for byte."""
    written, verified = record["written"]["write"], record["verify"]
    if record["cell"] != "log":
        return bool(verified["ok"]) and verified["right"] == written["created"]
    found = verified["verify"]
    return (
        bool(verified["ok"])
        and found["acknowledged_present"] == written["acknowledged"]
        and found["checksum"] == written["checksum"]
    )


def measure(run: session.Session, options: argparse.Namespace, root: Path) -> None:
    for state in states(options):
        made, written = prepare(state, root)
        what = (
            f"{written['log_bytes'] / GIB:.2f} GiB of log, {written['checkpoints']:.0f} checkpoints"
        )
        run.say(f"{state.title}: {what}, killed")
        starts = [(number, False) for number in range(options.repetitions)]
        for number, is_cold in [*starts, (options.repetitions, True)]:
            record = start(state, made, root, is_cold=is_cold, quiet=options.quiet_wait)
            record |= {"repetition": number, "written": written}
            record["ok"] = is_right(record)
            run.add(record)
            announce(run, record)
        shutil.rmtree(made)


def announce(run: session.Session, record: dict[str, Any]) -> None:
    mark = "all read back" if record["ok"] else "VERIFICATION FAILED"
    run.say(
        f"  {record['cache']}: ready after {record['ready_seconds']:.2f} s (bound {BOUND_SECONDS:g} s), "
        f"{record['server_cpu_seconds']:.2f} s of processor, foreign {record['machine']['foreign_cores']:.2f} cores, "
        f"{record['rss_bytes'] / 1e6:.0f} MB, {mark}"
    )
    for seconds, line in record["progress"][-2:]:
        run.say(f"    after {seconds:.2f} s: {line}")


def judge(records: list[dict[str, Any]]) -> bool:
    """One state: the median of its warm starts below the bound; each start right, with progress."""
    warm = [record["ready_seconds"] for record in records if record["cache"] == "warm"]
    in_time = bool(warm) and median(warm) < BOUND_SECONDS
    # A start that has nothing to replay has nothing to report either.
    told = all(record["progress"] or record["cell"] == "catalog" for record in records)
    return in_time and told and all(record["ok"] for record in records)


def describe(document: session.Document) -> tuple[list[str], bool]:
    """The table, and whether all is well."""
    lines = [
        "| after kill -9 | log | ready, warm: median (range) | ready, cold | foreign cores, most | bound | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    fine = True
    records = document["records"]
    for name in dict.fromkeys(record["cell"] for record in records):
        own = [record for record in records if record["cell"] == name]
        warm = [one["ready_seconds"] for one in own if one["cache"] == "warm"]
        cold = [one["ready_seconds"] for one in own if one["cache"] == "cold"]
        foreign = max(one["machine"]["foreign_cores"] for one in own)
        log_bytes = own[0]["written"]["log_bytes"]
        passed = judge(own) and not (name == "log" and log_bytes < GIB and not document["quick"])
        fine &= passed
        lines.append(
            f"| {own[0]['title']} | {log_bytes / GIB:.2f} GiB | {report.spread(warm)} s "
            f"| {report.spread(cold)} s | {foreign:.2f} | < {BOUND_SECONDS:g} s "
            f"| {session.verdict(passed, final=not document['quick'])} |"
        )
    told: list[tuple[float, str]] = next(
        (one["progress"] for one in records if one["progress"]), []
    )
    if told:
        lines += ["", "Progress, as printed:", "", "```text"]
        lines += [line for _, line in told[-3:]]
        lines.append("```")
    return lines, fine


def main(arguments: list[str]) -> int:
    parser = session.parser(__doc__, repetitions=3)
    parser.add_argument("--records", type=int, help="records in the log (1,000,000)")
    parser.add_argument("--streams", type=int, help="streams (100,000)")
    parser.add_argument("--only", default="log,streams,catalog", help="states, by comma")
    options = session.finish(parser, arguments)
    options.only = options.only.split(",")
    if set(options.only) - {"log", "streams", "catalog"}:
        parser.error("--only: choose from log, streams, catalog")
    options.records = options.records or (100_000 if options.quick else 1_000_000)
    options.streams = options.streams or (10_000 if options.quick else 100_000)
    return session.run("recovery", options, arguments, measure, describe)


if __name__ == "__main__":
    session.main("recovery", main)
