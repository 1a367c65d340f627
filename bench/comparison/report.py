"""The written result of a run: REPORT.md for people, results.json for programs, PROVENANCE.md for doubt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from comparison import checkpoints, machine
from comparison.bounds import MEGABYTE, Verdict
from comparison.cells import CELLS, TURNS, Cell
from comparison.servers import KINDS, ROOT, commit, run_checked

if TYPE_CHECKING:
    from pathlib import Path

Records = Sequence[dict[str, Any]]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (lowest to highest)`, or a dash."""
    if not values:
        return "-"
    middle = f"{median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def verdict_word(verdict: Verdict, final: bool) -> str:
    if verdict.passed is None:
        return "not measured"
    word = "pass" if verdict.passed else "FAIL"
    return word if final else f"{word} (indicative)"


def bounds_table(verdicts: Sequence[Verdict], final: bool) -> list[str]:
    lines = ["| bound | wanted | measured: median (range) | verdict |", "|---|---|---|---|"]
    for verdict in verdicts:
        note = f"; {verdict.note}" if verdict.note else ""
        word = verdict_word(verdict, final)
        lines.append(
            f"| {verdict.text} | {verdict.wanted} | {spread(verdict.values)}{note} | {word} |"
        )
    return lines


def _cell_values(records: Records, cell: Cell, server: str) -> str:
    runs = [run for run in records if run["cell"] == cell.name and run["server"] == server]
    values = [run["figure"] / cell.scale for run in runs if run.get("figure") is not None]
    failed = sum(not run["ok"] for run in runs)
    mark = f" [{failed} of {len(runs)} failed]" if failed else ""
    return spread(values) + mark


def figures_table(records: Records, servers: Sequence[str]) -> list[str]:
    lines = [f"| cell | unit | {' | '.join(servers)} |", f"|---|---|{'---|' * len(servers)}"]
    for cell in CELLS:
        if not any(run["cell"] == cell.name for run in records):
            continue
        row = " | ".join(_cell_values(records, cell, server) for server in servers)
        lines.append(f"| {cell.title} | {cell.unit} | {row} |")
    return lines


def latency_table(records: Records) -> list[str]:
    """Percentiles per run, never averaged: each repetition is one row."""
    lines = [
        (
            "| cell | server | run | p50 ms | p99 ms | p99.9 ms | max ms | server / load cores "
            "| foreign / steal cores | MB | checkpoints |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in records:
        if "machine" not in run or "latency_us" not in run["result"]:
            continue
        latency = run["result"]["latency_us"]
        millis = " | ".join(f"{latency[key] / 1000:.2f}" for key in ("p50", "p99", "p99_9", "max"))
        cores = run["machine"]
        noisy = " !" if cores["foreign_cores"] > machine.QUIET_CORES else ""
        completed = f"{run['checkpoints']['completed']:.0f}" if "checkpoints" in run else ""
        lines.append(
            f"| {run['cell']} | {run['server']} | {run['repetition'] + 1} | {millis} "
            f"| {cores['server_cores']:.2f} / {cores['load_cores']:.2f} "
            f"| {cores['foreign_cores']:.2f} / {cores['steal_cores']:.2f}{noisy} "
            f"| {run['rss_bytes'] / MEGABYTE:.0f} "
            f"| {completed} |"
        )
    return lines


def checkpoint_lines(records: Records) -> list[str]:
    """What each durable write run of a Millstream says about its checkpoints."""
    lines = []
    for run in records:
        if "checkpoints" not in run:
            continue
        found = run["checkpoints"]
        text = f"{found['completed']:.0f} checkpoints, {found['seconds']:.2f} s in all"
        if found["ratio"] is not None:
            fits = "" if found["ratio"] <= checkpoints.MOST_SLOWDOWN else " TOO MUCH"
            text += (
                f"; p99 {found['p99_during_ms']:.2f} ms during, {found['p99_outside_ms']:.2f} ms "
                f"outside: {found['ratio']:.2f}x{fits}"
            )
        if found["completed"] < checkpoints.FEWEST:
            text += f"; fewer than {checkpoints.FEWEST}: run longer to judge"
        lines.append(f"- {run['cell']}, {run['server']}, run {run['repetition'] + 1}: {text}")
    return lines


def memory_lines(records: Records) -> list[str]:
    lines = []
    for run in records:
        head = f"- {run['cell']}, {run['server']}, run {run['repetition'] + 1}: "
        if run["cell"] == "creates" and "restart_seconds" in run:
            lines.append(
                f"{head}{run['result']['per_second']:,.0f} creates/s, "
                f"{run['rss_empty_bytes'] / MEGABYTE:.0f} MB empty, "
                f"{run['rss_bytes'] / MEGABYTE:.0f} MB after the creates, restart after kill -9 "
                f"{run['restart_seconds']:.2f} s, {run['rss_restarted_bytes'] / MEGABYTE:.0f} MB then, "
                f"{run['verify']['right']:,} of {run['result']['asked']:,} streams read back right "
                f"({run['rss_read_bytes'] / MEGABYTE:.0f} MB after that)"
            )
        elif run["cell"] == "idle" and "extra_rss_bytes" in run:
            lines.append(
                f"{head}{run['extra_rss_bytes'] / MEGABYTE:.1f} MB for 1,000 idle SSE subscribers"
            )
    return lines


def failure_lines(records: Records) -> list[str]:
    lines = []
    for run in records:
        if run["ok"]:
            continue
        result = run.get("result", {})
        reasons = [run["error"]] if "error" in run else []
        reasons += (
            result.get("complaints", [])[:3] + result.get("verify", {}).get("complaints", [])[:3]
        )
        if result.get("deliveries_lost"):
            reasons.append(
                f"{result['deliveries_lost']:,} deliveries not made in time; "
                f"{result['events_complete']} of {result['events']} events reached everybody"
            )
        text = "; ".join(reasons) or "see results.json"
        lines.append(f"- {run['cell']}, {run['server']}, run {run['repetition'] + 1}: {text}")
    return lines


def write(
    folder: Path,
    records: Records,
    verdicts: Sequence[Verdict],
    options: dict[str, Any],
    final: bool,
) -> None:
    folder.mkdir(parents=True)
    servers = [name for name in KINDS if any(run["server"] == name for run in records)]
    kind = "Full run." if final else "Short run: verdicts are indicative."
    sections = [
        "# Comparison on one machine",
        (
            f"{kind} {options['repetitions']} repetitions of {options['seconds']:g} s per cell, interleaved "
            "between the servers, fresh data directory each time; server and load generator share the cores. "
            f"Two builds of Millstream run side by side and are measured in {TURNS} turns each. "
            "Each run reads back what was acknowledged (there once, in order); those that failed are listed."
        ),
        "## Bounds\n\nRatios are Millstream / peer of the same repetition.",
        "\n".join(bounds_table(verdicts, final)),
        "## Figures\n\nMedian (range) over the repetitions.",
        "\n".join(figures_table(records, servers)),
        (
            "## Runs\n\n`!` marks more than "
            f"{machine.QUIET_CORES} cores of foreign load. Undelivered events count with the time waited."
        ),
        "\n".join(latency_table(records)),
    ]
    spans = checkpoint_lines(records)
    if spans:
        limit = f"p99 during one may be {checkpoints.MOST_SLOWDOWN:g} times the p99 outside."
        sections += [f"## Checkpoints\n\n{limit}", "\n".join(spans)]
    memory, failures = memory_lines(records), failure_lines(records)
    if memory:
        sections += ["## Memory and restart", "\n".join(memory)]
    if failures:
        sections += ["## Runs that failed", "\n".join(failures)]
    (folder / "REPORT.md").write_text("\n\n".join(sections) + "\n")
    (folder / "PROVENANCE.md").write_text(provenance(servers, options))
    content = {
        "options": options,
        "final": final,
        "verdicts": [vars(verdict) | {"median": verdict.middle} for verdict in verdicts],
        "runs": list(records),
    }
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")


def provenance(servers: Sequence[str], options: dict[str, Any]) -> str:
    lines = ["# Provenance", "", f"- taken: {options['started']}", f"- source: {commit(ROOT)}"]
    lines += [f"- {name}: {value}" for name, value in options["machine"].items()]
    lines.append(f"- load generator: bench/loadgen of the same source, {_version('rustc')}")
    shown = {name: value for name, value in options.items() if name not in ("machine", "started")}
    lines += [
        f"- options: `{json.dumps(shown)}`",
        "",
        "| server | version | durability |",
        "|---|---|---|",
    ]
    for name in servers:
        lines.append(f"| {name} | {KINDS[name].version()} | {KINDS[name].durability} |")
    return "\n".join(lines) + "\n"


def _version(tool: str) -> str:
    return run_checked([tool, "--version"], tool, ROOT)
