#!/usr/bin/env python3
"""Measures what strong appends cost the weak ones beside them: open loop, latency from the schedule.

    .venv/bin/python bench/mixed.py            # 3 repetitions of 10 s per cell, 6 to 15 minutes
    .venv/bin/python bench/mixed.py --quick    # 1 repetition of 3 s

2,000 `memory` (or `disk`) appends per second alone, then with 5,000 `fsync` appends per second
beside them, with the disk as it is and with every sync of the log delayed to 200 ms. The arrivals
follow a schedule fixed in advance, and latency counts from the scheduled time, so a server that
stalls cannot slow the load down. Bounds: `memory` p99 rises at most by half; `disk` p99 stays
below the `fsync` p50 of the same run; no append of the schedule is declined, refused or lost.

Server and generator share the cores. Where the system allows it, the thread that sends the weak
appends runs at real-time priority, as if the load came from another machine; how late it sent
nevertheless is part of the latency and shown beside it. The strong ones come from an ordinary
thread: a second one with priority would hold both cores against the server, which no load from
another machine does. A thread with priority waits for no thread of the server; where it was late
nevertheless, mostly somebody else had the core (a neighbour of a shared machine), and a p99 tells of
that. So a run whose generator was late is repeated, at most twice, and the one that was
least late counts, whatever its latencies are; the record keeps all of them. Beside the strong load
the generator is a little later than alone, also on a quiet machine: two loads share two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparison import cells, machine, report
from comparison.servers import BenchError, Server, fresh_directory
from durability import session

WEAK_PER_SECOND, WEAK_CONNECTIONS = 2000, 16
# Waking up takes about as long as a weak append: the generator is awake when one is due.
WEAK_SPIN_US = 50
STRONG_PER_SECOND = 5000
# With 200 ms per sync up to 2,000 strong appends are under way. They are pipelined: no connection
# ever waits for an answer before it sends what is due.
STRONG_CONNECTIONS, PIPELINE = 64, 1024
STRONG = "fsync"
# A run is repeated if 1 % of its weak appends were sent later than this.
LATE_US_MOST, TRIES_MOST = 100, 3
RISE_MOST = 1.5
DELAYS_MS = (0, 200)
DELAY_VARIABLE = "MILLSTREAM_FAULT_SYNC_DELAY_MS"
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    weak: str
    is_mixed: bool
    delay_ms: int
    strong_connections: int = STRONG_CONNECTIONS

    @property
    def name(self) -> str:
        return f"{self.weak}_{'mixed' if self.is_mixed else 'alone'}_{self.delay_ms}"

    @property
    def load(self) -> str:
        weak = f"{self.weak}:{WEAK_PER_SECOND}:{WEAK_CONNECTIONS}:{WEAK_SPIN_US}"
        strong = f"{STRONG}:{STRONG_PER_SECOND}:{self.strong_connections}"
        return f"{weak},{strong}" if self.is_mixed else weak


def measure_one(cell: Cell, options: argparse.Namespace, root: Path) -> Record:
    record: Record = {
        "cell": cell.name,
        "weak": cell.weak,
        "mixed": cell.is_mixed,
        "delay_ms": cell.delay_ms,
        "realtime": options.realtime,
        "ok": False,
    }
    arguments = (
        *("mixed", "--load", cell.load, "--pipeline", str(PIPELINE)),
        *("--seconds", f"{options.seconds:g}", "--warmup", "1"),
        *("--realtime", "1" if options.realtime else "0"),
    )
    data = fresh_directory(root, cell.name)
    environment = {DELAY_VARIABLE: str(cell.delay_ms)} if cell.delay_ms else {}
    try:
        with Server(session.millstream(), data, environment=environment) as server:
            machine.wait_until_quiet(options.quiet_wait)
            before = machine.usage(server.group)
            record["result"] = cells.load(server.url, arguments, 120 + 3 * options.seconds)
            record["machine"] = machine.between(before, machine.usage(server.group))
            record["ok"] = record["result"]["ok"]
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        record["error"] = str(error)
    return record


def measure_undisturbed(cell: Cell, options: argparse.Namespace, root: Path) -> Record:
    """The run in which the generator was least late. One that failed counts at once."""
    tries: list[Record] = []
    while len(tries) < (1 if options.quick else TRIES_MOST):
        tries.append(measure_one(cell, options, root))
        if not tries[-1]["ok"] or lateness_us(tries[-1]) <= LATE_US_MOST:
            break
    chosen = min(tries, key=lambda one: lateness_us(one) if one["ok"] else 0)
    return {**chosen, "tries": [one for one in tries if one is not chosen]}


def lateness_us(record: Record) -> float:
    """How late the weak appends were sent, at p99."""
    return float(record["result"]["loads"][0]["lateness_us"]["p99"])


def may_run_first() -> bool:
    """Whether this process may have real-time threads."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def measure(run: session.Session, options: argparse.Namespace, root: Path) -> None:
    chosen = [
        Cell(weak, is_mixed, delay_ms, options.strong_connections)
        for delay_ms in DELAYS_MS
        for weak in options.weak
        for is_mixed in (False, True)
    ]
    priority = "real-time" if options.realtime else "ordinary"
    run.say(f"the weak appends are sent at {priority} priority")
    for repetition in range(options.repetitions):
        run.say(f"repetition {repetition + 1} of {options.repetitions}")
        # Alone and mixed follow each other, in turn first and second.
        order = chosen if repetition % 2 == 0 else chosen[::-1]
        for cell in order:
            record = measure_undisturbed(cell, options, root)
            record["repetition"] = repetition
            run.add(record)
            announce(run, record)


def announce(run: session.Session, record: Record) -> None:
    beside = f"with {STRONG}" if record["mixed"] else "alone"
    run.say(
        f"  {record['weak']} {beside}, sync delay {record['delay_ms']} ms, try {len(record['tries']) + 1}"
    )
    if "error" in record:
        run.say(f"    ERROR {record['error']}")
        return
    for load in record["result"]["loads"]:
        times = " ".join(
            f"{name} {load['latency_us'][name] / 1e3:.2f}" for name in ("p50", "p90", "p99", "max")
        )
        run.say(
            f"    {load['durability']:<7} {load['per_second']:8,.0f}/s of {load['rate']:,.0f}/s, ms: {times}; "
            f"503: {load['busy']}, other errors: {load['refused']}, unanswered: {load['unanswered']}, "
            f"generator late p99 {load['lateness_us']['p99'] / 1e3:.2f} ms"
        )
    if not record["ok"]:
        run.say("    FAILED its verification")


def is_kept(load: dict[str, Any]) -> bool:
    """The whole schedule was sent, accepted and answered."""
    return bool(
        load["counted"] == load["scheduled"]
        and not (load["busy"] or load["refused"] or load["unanswered"] or load["held_back"])
    )


def find(records: list[Record], weak: str, *, mixed: bool, delay_ms: int) -> dict[int, Record]:
    """The runs of a cell by repetition, as far as they could be measured."""
    wanted = (weak, mixed, delay_ms)
    return {
        one["repetition"]: one
        for one in records
        if (one["weak"], one["mixed"], one["delay_ms"]) == wanted and "result" in one
    }


def latency_ms(record: Record, class_name: str, percentile: str) -> float:
    loads = record["result"]["loads"]
    found = next(one for one in loads if one["durability"] == class_name)
    return float(found["latency_us"][percentile]) / 1e3


@dataclass(frozen=True)
class Verdict:
    text: str
    wanted: str
    ratios: tuple[float, ...]
    passed: bool | None


def judge(records: list[Record], weak: str, delay_ms: int) -> Verdict:
    """The bound of one weak class at one delay, on the median over the repetitions."""
    mixed = find(records, weak, mixed=True, delay_ms=delay_ms)
    alone = find(records, weak, mixed=False, delay_ms=delay_ms)
    used = [*mixed.values()]
    if weak == "memory":
        text = f"`memory` p99 with {STRONG} / alone"
        wanted, limit = f"≤ {RISE_MOST:g}", RISE_MOST
        both = sorted(mixed.keys() & alone.keys())
        found = [
            latency_ms(mixed[one], weak, "p99") / latency_ms(alone[one], weak, "p99")
            for one in both
        ]
        used += alone.values()
    else:
        text = f"`{weak}` p99 / `{STRONG}` p50 of the same run"
        wanted, limit = "< 1", 1.0
        found = [
            latency_ms(one, weak, "p99") / latency_ms(one, STRONG, "p50") for one in mixed.values()
        ]
    text += f", syncs delayed to {delay_ms} ms" if delay_ms else ""
    if not any(one["weak"] == weak and one["delay_ms"] == delay_ms for one in records):
        return Verdict(text, wanted, (), None)
    kept = all(one["ok"] and all(map(is_kept, one["result"]["loads"])) for one in used)
    met = bool(found) and (
        median(found) <= limit if wanted.startswith("≤") else median(found) < limit
    )
    return Verdict(text, wanted, tuple(found), kept and met)


def describe(document: session.Document) -> tuple[list[str], bool]:
    records: list[Record] = document["records"]
    lines = [
        "| load | sync delay | class | appends/s | p50 ms | p90 ms | p99 ms | max ms | generator late p99 ms | foreign cores | 503 | other errors |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in dict.fromkeys(one["cell"] for one in records):
        lines += _rows([one for one in records if one["cell"] == cell and "result" in one])
    ordinary = any(not one["realtime"] for one in records)
    lines += ["", "The generator ran at ordinary priority."] if ordinary else []
    repeated = sum(len(one["tries"]) for one in records)
    lines += ["", f"{len(records)} runs count; {repeated} others were disturbed and repeated."]
    lines += ["", "| bound | wanted | measured: median (range) | verdict |", "|---|---|---|---|"]
    verdicts = [judge(records, weak, delay) for delay in DELAYS_MS for weak in ("memory", "disk")]
    for verdict in verdicts:
        word = session.verdict(verdict.passed, final=not document["quick"])
        lines.append(
            f"| {verdict.text} | {verdict.wanted} | {report.spread(verdict.ratios)} | {word} |"
        )
    failed = [one for one in records if not one["ok"]]
    for one in failed:
        lines.append(f"- FAILED: {one['cell']}: {one.get('error') or 'verification'}")
    missed = any(verdict.passed is False for verdict in verdicts)
    return lines, bool(records) and not failed and not (missed and not document["quick"])


def _rows(runs: list[Record]) -> list[str]:
    """One row per class of a cell: each percentile is the median over the repetitions."""
    rows = []
    for index, first in enumerate(runs[0]["result"]["loads"] if runs else []):
        loads = [run["result"]["loads"][index] for run in runs]
        middle = [
            f"{median([load['latency_us'][name] / 1e3 for load in loads]):.2f}"
            for name in ("p50", "p90", "p99", "max")
        ]
        foreign = median([run["machine"]["foreign_cores"] for run in runs])
        late = median([load["lateness_us"]["p99"] / 1e3 for load in loads])
        rate = median([load["per_second"] for load in loads])
        declined = sum(load["busy"] for load in loads)
        errors = sum(
            load["refused"] + load["unanswered"] + load["broken_connections"] for load in loads
        )
        weak = runs[0]["weak"]
        title = f"{weak} with {STRONG}" if runs[0]["mixed"] else f"{weak} alone"
        rows.append(
            f"| {title} | {runs[0]['delay_ms']} ms | {first['durability']} | {rate:,.0f} "
            f"| {' | '.join(middle)} | {late:.2f} | {foreign:.2f} | {declined} | {errors} |"
        )
    return rows


def main(arguments: list[str]) -> int:
    parser = session.parser(__doc__, repetitions=3)
    parser.add_argument("--seconds", type=float, help="measured seconds per cell (10, quick: 3)")
    parser.add_argument("--weak", default="memory,disk", help="weak classes, by comma")
    parser.add_argument(
        "--strong-connections", type=int, default=STRONG_CONNECTIONS, help="of the fsync load (64)"
    )
    options = session.finish(parser, arguments)
    options.realtime = may_run_first()
    options.weak = options.weak.split(",")
    if set(options.weak) - {"memory", "disk"}:
        parser.error("--weak: choose from memory, disk")
    options.seconds = options.seconds or (3.0 if options.quick else 10.0)
    return session.run("mixed", options, arguments, measure, describe)


if __name__ == "__main__":
    session.main("mixed", main)
