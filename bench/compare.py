#!/usr/bin/env python3
"""Measures Millstream beside the npm reference server and the official Rust server.

    .venv/bin/python bench/compare.py            # full run: 5 repetitions of 10 s, about 45 minutes
    .venv/bin/python bench/compare.py --quick    # 1 repetition of 2 s
    .venv/bin/python bench/compare.py --bounded --baseline ../before    # beside another build of Millstream

Builds the load generator, installs the peers into `bench/.peers` at their fixed versions, runs all
cells with the servers interleaved, prints the bounds with pass or fail, and writes
`bench/results/<date>/`. Exit code 0: all bounds of a full run hold (or the run was a short one and
Millstream failed nothing); 1: a bound or a verification failed; 2: the benchmark could not run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparison import bounds, cells, machine, report
from comparison.servers import BENCH, KINDS, BenchError, Kind, millstream_of


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="2 s per cell, 1 repetition")
    parser.add_argument("--repetitions", type=int, help="repetitions per cell (5)")
    parser.add_argument("--seconds", type=float, help="measured seconds per cell (10)")
    parser.add_argument("--only", default=",".join(cells.GROUPS), help="groups of cells, by comma")
    parser.add_argument(
        "--bounded", action="store_true", help="only cells with a bound, only the servers it names"
    )
    parser.add_argument("--servers", default=",".join(KINDS), help="servers, by comma")
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="a built checkout of Millstream that this one must not be slower than",
    )
    parser.add_argument("--quiet-wait", type=float, help="seconds to wait for a quiet machine (15)")
    parser.add_argument("--output", type=Path, help="result folder (bench/results/<date>)")
    options = parser.parse_args(arguments)
    options.only = _choice(parser, "--only", options.only, cells.GROUPS)
    options.servers = _choice(parser, "--servers", options.servers, tuple(KINDS))
    if options.baseline is not None:
        if "millstream" not in options.servers:
            parser.error("--baseline is compared with millstream: name it in --servers")
        # In the middle: while the order rotates, each of the two comes first as often as the other.
        options.servers.insert((len(options.servers) + 1) // 2, bounds.BASELINE)
    defaults = (1, 2.0, 3.0) if options.quick else (5, 10.0, 15.0)
    for name, default in zip(("repetitions", "seconds", "quiet_wait"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.repetitions < 1 or options.seconds <= 0 or options.quiet_wait < 0:
        parser.error("--repetitions and --seconds must be above 0")
    return options


def _choice(
    parser: argparse.ArgumentParser, flag: str, text: str, known: tuple[str, ...]
) -> list[str]:
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        parser.error(f"{flag}: choose from {', '.join(known)}")
    return [name for name in known if name in chosen]


def announce(record: dict[str, Any]) -> None:
    """One line per run, as it ends."""
    label = f"  {record['cell']:<17} {record['server']:<11}"
    if "error" in record:
        print(f"{label} ERROR {record['error']}", flush=True)
        return
    cell = next((one for one in cells.CELLS if one.name == record["cell"]), None)
    if cell is not None:
        figure = f"{record['figure'] / cell.scale:12,.2f} {cell.unit:<5}"
        foreign = f"foreign {record['machine']['foreign_cores']:.2f}"
    elif record["cell"] == "idle":
        figure, foreign = f"{record['extra_rss_bytes'] / bounds.MEGABYTE:12,.2f} MB   ", ""
    else:
        figure = f"{record['result']['per_second']:12,.0f} /s   "
        foreign = f"restart {record['restart_seconds']:.2f} s"
    print(
        f"{label} {figure} {foreign}{'' if record['ok'] else '  VERIFICATION FAILED'}", flush=True
    )


def measure(options: argparse.Namespace, data_root: Path) -> list[dict[str, Any]]:
    """All runs: repetition by repetition, cell by cell, the servers in rotating order."""
    kinds = [KINDS[name] for name in options.servers]
    warmup = min(2.0, max(0.5, options.seconds / 5))
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any], repetition: int) -> None:
        record["repetition"] = repetition
        records.append(record)
        announce(record)

    for repetition in range(options.repetitions):
        print(f"repetition {repetition + 1} of {options.repetitions}", flush=True)
        turn = repetition % len(kinds)
        order: list[Kind] = kinds[turn:] + kinds[:turn]
        for cell in cells.CELLS:
            if cell.group not in options.only:
                continue
            baseline = options.baseline is not None
            chosen = [
                kind
                for kind in order
                if not options.bounded or bounds.names(cell.name, kind.name, baseline=baseline)
            ]
            for group in groups(chosen, in_turns=cell.fits_in_turns):
                for record in cells.run_cell(
                    cell, group, data_root, options.seconds, warmup, options.quiet_wait
                ):
                    keep(record, repetition)
        if "creates" in options.only:
            for kind in order:
                if kind.name in ("millstream", bounds.BASELINE):
                    creates = cells.run_creates(kind, data_root, options.quiet_wait)
                    keep(creates, repetition)
            for kind in order:
                keep(cells.run_idle(kind, data_root), repetition)
    return records


def groups(order: list[Kind], *, in_turns: bool) -> list[list[Kind]]:
    """Which servers run together: the two builds of Millstream if they can take turns, each other one alone."""
    builds = [kind for kind in order if kind.name in ("millstream", bounds.BASELINE)]
    if not in_turns or len(builds) < 2:
        return [[kind] for kind in order]
    return [builds, *([kind] for kind in order if kind not in builds)]


def result_folder(options: argparse.Namespace, started: datetime) -> Path:
    """A folder that does not exist yet: no run overwrites another."""
    if options.output is not None:
        return Path(options.output)
    name = started.strftime("%Y-%m-%d") + ("-quick" if options.quick else "")
    number, folder = 1, BENCH / "results" / name
    while folder.exists():
        number += 1
        folder = BENCH / "results" / f"{name}-{number}"
    return folder


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    started = datetime.now(UTC)
    folder = result_folder(options, started)
    if folder.exists():
        raise BenchError(f"{folder} exists already")
    if options.baseline is not None:
        KINDS[bounds.BASELINE] = millstream_of(options.baseline.resolve(), bounds.BASELINE)
    for name in options.servers:
        KINDS[name].install()
    cells.build_load_generator()
    data_root = BENCH / ".data"
    data_root.mkdir(exist_ok=True)
    try:
        records = measure(options, data_root)
    finally:
        shutil.rmtree(data_root)
    final = bounds.is_final(options.repetitions, options.seconds)
    verdicts = bounds.judge(records, cells.CELLS)
    described = {
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "repetitions": options.repetitions,
        "seconds": options.seconds,
        "only": options.only,
        "servers": options.servers,
        "quiet_wait": options.quiet_wait,
        "machine": machine.describe(BENCH),
    }
    report.write(folder, records, verdicts, described, final)
    print()
    print("\n".join(report.figures_table(records, options.servers)))
    print()
    print("\n".join(report.bounds_table(verdicts, final)))
    shown = folder.relative_to(BENCH.parent) if folder.is_relative_to(BENCH.parent) else folder
    print(f"\nwritten: {shown}")
    broken = any(run["server"] == "millstream" and not run["ok"] for run in records)
    missed = final and any(verdict.passed is False for verdict in verdicts)
    return 1 if broken or missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BenchError as error:
        print(f"compare: {error}", file=sys.stderr)
        sys.exit(2)
