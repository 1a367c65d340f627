"""The durability table never shows a broken promise, and never a loss that was not reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.server import ROOT

RESULTS = ROOT / "docs/concepts/results"
STAMP = {"date": "2026-01-01", "command": "c", "commit": "abc"}
ENDS = {"ends": 9, "ends_with_loss": 0, "records_lost": 0, "streams_with_loss": 0, "losses_reported": 0}  # fmt: skip
WAYS = ("clean_stop", "kill", "power_cut", "kill_after_failed_log")
CLASSES = ("ephemeral", "memory", "disk", "fsync")


def kills(**changed: dict[str, int]) -> dict[str, Any]:
    counts = {"rounds": 5, "acknowledged": 10, "lost": 0, "reported": 0, "promise": "p"}
    classes = {name: {**counts, **changed.get(name, {})} for name in CLASSES}
    return {**STAMP, "frozen_rounds": 1, "classes": classes}


def simulation(name: str = "fsync", way: str = "kill", **changed: int) -> dict[str, Any]:
    classes: dict[str, Any] = {
        each: {"records_acknowledged": 3, **{w: dict(ENDS) for w in WAYS}} for each in CLASSES
    }
    classes[name][way].update(changed)
    totals = {"seeds": 1, "starts": 2, "faults_injected": 3, "promise_violations": 0}
    return {**STAMP, **totals, "classes": classes}


def render(tmp_path: Path, what: str, result: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs the generator's own function over one result, without touching the kept ones."""
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    program = (
        f"import json, sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import durability_table as d\n"
        f"print(d.{what}_table(json.load(open({str(file)!r}))))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("kills", kills(fsync={"lost": 1, "reported": 1})),
        ("kills", kills(disk={"lost": 1, "reported": 1})),
        ("kills", kills(memory={"lost": 2, "reported": 1})),
        ("simulation", simulation("fsync", "power_cut", records_lost=1)),
        ("simulation", simulation("disk", "kill", records_lost=1)),
        ("simulation", simulation("memory", "clean_stop", records_lost=1)),
        ("simulation", simulation("memory", "power_cut", streams_with_loss=2, losses_reported=1)),
        ("simulation", {**simulation(), "promise_violations": 1}),
    ],
)
def test_a_broken_promise_is_no_row(tmp_path: Path, what: str, result: dict[str, Any]) -> None:
    done = render(tmp_path, what, result)
    assert done.returncode != 0
    assert "Broken" in done.stderr


@pytest.mark.parametrize(
    ("what", "result", "row"),
    [
        ("kills", kills(memory={"lost": 1200, "reported": 1200}), "| 10 | 1,200 | 1,200 |"),
        ("simulation", simulation("disk", "power_cut", records_lost=1), "power cut | 9 | 1 |"),
    ],
)
def test_a_kept_promise_is(tmp_path: Path, what: str, result: dict[str, Any], row: str) -> None:
    done = render(tmp_path, what, result)
    assert done.returncode == 0, done.stderr
    assert row in done.stdout
    assert "`c`, 2026-01-01, commit `abc`" in done.stdout


def test_the_kept_run_is_a_full_one() -> None:
    result = json.loads((RESULTS / "kills.json").read_text())
    for name in CLASSES:
        assert result["classes"][name]["rounds"] >= 200
    assert result["frozen_rounds"] > 0
