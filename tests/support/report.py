"""Counts of the crash tests, for the table in docs/concepts/durability.md (tools/durability_table.py)."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from support.crash import Loss
from support.server import ROOT

PROMISES = {
    "ephemeral": "records gone after any restart, reported",
    "memory": "the tail may be gone, reported",
    "disk": "nothing lost",
    "fsync": "nothing lost",
    "changing": "nothing lost that was acknowledged in, or before a change to, disk or fsync",
}


@dataclass
class Counts:
    rounds: int = 0
    acknowledged: int = 0
    lost: int = 0
    reported: int = 0


@dataclass
class Report:
    """One run: what was done how often, and per class what became of what was acknowledged."""

    what: str
    command: str
    seed: int
    classes: dict[str, Counts] = field(default_factory=dict)
    frozen: int = 0

    def add_round(self, losses: list[Loss], *, frozen: bool) -> None:
        self.frozen += frozen
        for durability in {loss.durability for loss in losses}:
            self.classes.setdefault(durability, Counts()).rounds += 1
        for loss in losses:
            counts = self.classes[loss.durability]
            counts.acknowledged += loss.acknowledged
            counts.lost += loss.lost
            counts.reported += loss.reported

    def write(self, file: Path) -> None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        classes = {
            name: {**vars(self.classes[name]), "promise": promise}
            for name, promise in PROMISES.items()
            if name in self.classes
        }
        result = {
            "what": self.what,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": self.command,
            "commit": commit,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "seed": self.seed,
            "frozen_rounds": self.frozen,
            "classes": classes,
        }
        file.write_text(json.dumps(result, indent=2) + "\n")
