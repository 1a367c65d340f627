"""`millstream doctor` asks the workers of a running Spark what they have."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millstream.doctor.finding import State
from millstream.doctor.workers import judge
from support.server import Server
from support.spark import environment
from support.spark_cluster import ConnectServer


def doctor(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "millstream.cli", "doctor", "--json", *flags],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    report = json.loads(done.stdout)
    return done.returncode, {finding["check"]: finding for finding in report["checks"]}


def test_workers_of_a_connect_server(
    connect_server: ConnectServer, server: Server, tmp_path: Path
) -> None:
    code, seen = doctor(tmp_path, "--remote", connect_server.url, "--url", server.url)
    assert code == 0, seen
    assert seen["workers"]["state"] == "ok"
    assert f"Python {platform.python_version()}" in seen["workers"]["message"]


def test_a_master_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    code, seen = doctor(tmp_path, "--master", "no-such-master")
    assert code == 1
    assert seen["workers"]["state"] == "fail"
    assert "no-such-master" in seen["workers"]["message"]
    assert "spark.log" in seen["workers"]["remedy"]


@pytest.mark.parametrize(
    ("python", "has", "state"),
    [
        (platform.python_version(), True, State.OK),
        (platform.python_version(), False, State.WARN),
        ("3.9.2", True, State.FAIL),
    ],
)
def test_judgement(python: str, has: bool, state: State) -> None:
    row = {"host": "h", "python": python, "pyarrow": "20.0", "millstream": has}
    assert [finding.state for finding in judge("here", [row])] == [state]
