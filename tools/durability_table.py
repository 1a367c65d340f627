"""The tables of what was killed and what it cost, for docs/concepts/durability.md.

Two kinds of runs are kept below docs/concepts/results: `kills.json` is written by the crash tests
(`pytest tests/crash --full --durability-report FILE`), `simulation.json` by the simulated disk
(`simulate --report FILE 0 10000`). To take in new runs and write the document:

    python tools/durability_table.py --kills FILE --simulation FILE && python tools/gen_docs.py

Invariants: a table says when, with which command and at which commit it was made; a class whose numbers break its
promise is an error, never a row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/concepts/results"
KILLS, SIMULATION = "kills.json", "simulation.json"
CLASSES = ("ephemeral", "memory", "disk", "fsync")
WAYS = {
    "clean_stop": "stop and start",
    "kill": "kill",
    "power_cut": "power cut",
    "kill_after_failed_log": "kill after a failed write or sync",
}
# What may be lost in which way to end; everything else must be nothing.
MAY_LOSE = {
    "clean_stop": {"ephemeral"},
    "kill": {"ephemeral", "memory"},
    "power_cut": {"ephemeral", "memory", "disk"},
    "kill_after_failed_log": {"ephemeral", "memory", "disk"},
}
PROMISES = {
    ("clean_stop", "ephemeral"): "all gone, reported",
    ("kill", "ephemeral"): "all gone, reported",
    ("power_cut", "ephemeral"): "all gone, reported",
    ("kill", "memory"): "the tail may be gone, reported",
    ("power_cut", "memory"): "the tail may be gone, reported",
    ("power_cut", "disk"): "the last `disk_sync_ms` may be gone, reported",
    ("kill_after_failed_log", "ephemeral"): "all gone, reported",
    ("kill_after_failed_log", "memory"): "the tail may be gone, reported",
    ("kill_after_failed_log", "disk"): "what was not synced may be gone, reported",
}


class Broken(Exception):  # noqa: N818 - named by what happened
    """A result breaks a promise, or is not a result."""


def count(number: int) -> str:
    return f"{number:,}"


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def head(*cells: str) -> list[str]:
    return [row(*cells), row(*("---" for _ in cells))]


def provenance(result: Mapping[str, Any]) -> str:
    return f"`{result['command']}`, {result['date']}, commit `{result['commit']}`."


def kills_table(result: Mapping[str, Any]) -> str:
    """Real processes, killed under load."""
    lines = head("class", "rounds of kill -9", "acknowledged", "lost", "reported", "promised")
    for name, counts in result["classes"].items():
        lost, reported = counts["lost"], counts["reported"]
        if lost != reported or (lost and name in ("disk", "fsync")):
            raise Broken(f"kill -9: {name} lost {lost}, of which {reported} were reported")
        shown = "a stream whose class changes all the time" if name == "changing" else f"`{name}`"
        lines.append(
            row(
                shown,
                count(counts["rounds"]),
                count(counts["acknowledged"]),
                count(lost),
                count(reported) if lost else "",
                counts["promise"],
            )
        )
    frozen = f"In {count(result['frozen_rounds'])} of the rounds the server stood still (SIGSTOP) when it was killed."
    return "\n".join([*lines, "", f"{frozen} Made by {provenance(result)}"])


def simulation_table(result: Mapping[str, Any]) -> str:
    """The engine on a simulated disk."""
    if result["promise_violations"]:
        raise Broken(f"the simulation found {result['promise_violations']} violations")
    lines = head(
        "class", "end of the server", "how often", "records lost", "streams that lost, all reported", "promised"
    )  # fmt: skip
    for name in CLASSES:
        tally = result["classes"][name]
        for way, shown in WAYS.items():
            ends = tally[way]
            lost, streams = ends["records_lost"], ends["streams_with_loss"]
            if streams != ends["losses_reported"] or (lost and name not in MAY_LOSE[way]):
                raise Broken(f"simulation: {name}, {way}: {ends}")
            promise = PROMISES.get((way, name), "nothing lost")
            lines.append(
                row(f"`{name}`", shown, count(ends["ends"]), count(lost), count(streams), promise)
            )
    acknowledged = sum(tally["records_acknowledged"] for tally in result["classes"].values())
    totals = (
        f"{count(result['seeds'])} seeds with {count(result['starts'])} starts, "
        f"{count(acknowledged)} acknowledged records, {count(result['faults_injected'])} injected failures of single calls."
    )
    return "\n".join([*lines, "", f"{totals} Made by {provenance(result)}"])


def load(name: str) -> Mapping[str, Any] | None:
    file = RESULTS / name
    if not file.exists():
        return None
    result = json.loads(file.read_text())
    missing = {"date", "command", "commit", "classes"} - result.keys()
    if missing:
        raise Broken(f"{file.name} lacks {', '.join(sorted(missing))}")
    return dict(result)


def durability() -> str:
    """The region of the document: one table per kind of run that is kept."""
    parts = []
    if (kills := load(KILLS)) is not None:
        parts += ["### Real processes", kills_table(kills)]
    if (simulation := load(SIMULATION)) is not None:
        parts += ["### Simulated disk", simulation_table(simulation)]
    if not parts:
        raise Broken(f"no results in {RESULTS.relative_to(ROOT)}")
    return "\n\n".join(parts)


def take_in(file: Path, name: str, command: str | None) -> None:
    """Copies a run to the results; one that does not say where it comes from gets it said."""
    result = json.loads(file.read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )  # fmt: skip
    stamp = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "commit": commit.stdout.strip(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps({**stamp, **result}, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Take in the results of durability runs.")
    parser.add_argument("--kills", type=Path, help="what the crash tests wrote")
    parser.add_argument("--simulation", type=Path, help="what `simulate --report` wrote")
    parser.add_argument(
        "--simulation-command",
        default="simulate --report FILE 0 10000",
        help="with which command the simulation was run",
    )
    arguments = parser.parse_args()
    if arguments.kills:
        take_in(arguments.kills, KILLS, None)
    if arguments.simulation:
        take_in(arguments.simulation, SIMULATION, arguments.simulation_command)
    try:
        print(durability())
    except Broken as broken:
        print(f"error: {broken}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
