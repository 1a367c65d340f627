"""A lake after kill -9 at every step of publishing, as pyarrow, a plain glob, deltalake and pyiceberg read it.

No Spark here: the steps are those of `millstream.spark.jobs.lake.publish`, run in real processes that really die. The
whole way through Spark, with a driver that dies, is tests/spark/test_land.py.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
SCRIPT = TESTS / "support" / "lake_steps.py"
DEADLINE_S = 280.0
pytestmark = pytest.mark.timeout(300)
ROWS = 600
POINTS = (
    "written",
    "drafted",
    "decided",
    "renamed-1",
    "renamed-2",
    "renamed-3",
    "placed",
    "entered",
    "cleaned",
)
TABLE_POINTS = ("decided", "renamed-2", "placed", "entered")
FIRST_POINTS = ("drafted", "placed")
READERS = {"parquet": {"pyarrow", "glob"}, "delta": {"deltalake"}, "iceberg": {"pyiceberg"}}


def play(folder: Path, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        # -P: the folder of the script has modules named like those of the standard library.
        [sys.executable, "-P", str(SCRIPT), str(folder), json.dumps(scenarios)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(results) == len(scenarios)
    return results


def check(scenario: dict[str, Any], result: dict[str, Any]) -> None:
    said = f"{scenario} -> {result['left']}"
    before = set(range(scenario["batch"] * ROWS))
    most = set(range((scenario["batch"] + 1) * ROWS))
    for seen in result["between"]:
        for reader, numbers in seen.items():
            assert len(numbers) == len(set(numbers)), f"{reader} sees duplicates: {said}"
            assert before <= set(numbers) <= most, f"{reader} sees too little or too much: {said}"
    for (_, point), kind in zip(scenario["kills"], result["kinds"], strict=True):
        nothing_landed = scenario["batch"] == 0 and point in ("written", "drafted")
        assert kind == (None if nothing_landed else scenario["table"]), f"after {point}: {said}"
    assert result["after"].keys() == READERS[scenario["table"]], said
    for reader, numbers in result["after"].items():
        assert numbers == list(range(3 * ROWS)), f"{reader} sees {len(numbers)} records: {said}"
    assert result["left"] == [], said


def single_deaths(full: bool) -> list[dict[str, Any]]:
    """Each table, one death at each step, the replay cut into other tasks; and the same in the very first batch."""
    return [
        {
            "table": table,
            "partition_by": ["date"],
            "batch": batch,
            "kills": [[2, point]],
            "tasks": 1 + number % 4,
        }
        for table in READERS
        for batch, points in ((1, TABLE_POINTS), (0, FIRST_POINTS))
        for number, point in enumerate(
            POINTS if full or (table, batch) == ("parquet", 1) else points
        )
    ]


def repeated_deaths(full: bool) -> list[dict[str, Any]]:
    """Replays that die too, each further on the way than the one before."""
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED", random.randrange(1 << 32)))
    print(f"MILLSTREAM_TEST_SEED={seed}")
    chance = random.Random(seed)
    scenarios = []
    for _ in range(60 if full else 3):
        partition_by = chance.choice([["date", "stream"], ["stream"], []])
        points = [*chance.choices(["written", "drafted"], k=chance.randint(0, 2)), "decided"]
        if partition_by:  # else one file per task: too few to die between renames
            points.append(chance.choice(["renamed-1", "renamed-2"]))
        points.append(chance.choice(["placed", "entered", "cleaned"]))
        scenarios.append(
            {
                "table": chance.choice(list(READERS)),
                "partition_by": partition_by,
                "batch": chance.choice([0, 1]),
                "kills": [[chance.randint(1, 5), point] for point in points],
                "tasks": chance.randint(1, 6),
            }
        )
    return scenarios


def test_a_replay_after_kill_at_any_step_leaves_every_record_once(
    tmp_path: Path, full: bool
) -> None:
    # One run for all: what costs time is loading the libraries.
    scenarios = single_deaths(full) + repeated_deaths(full)
    for scenario, result in zip(scenarios, play(tmp_path, scenarios), strict=True):
        check(scenario, result)
