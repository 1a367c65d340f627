"""`make test` and `.ci/run` fail when anything they run fails: the check of the checker.

Each test builds a small copy of the project: the real Makefile, `.ci/run`, runner, `pyproject.toml` and `conftest.py`, beside
tests of a line each. What make would build or install first is named as old (`-o`), so that it is left alone.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import ROOT

DEADLINE_S = 100.0
READY = (".venv/.synced", ".venv/.built", "setup")
PASSES = "def test_it() -> None: ..."
FAILS = "def test_it() -> None: assert False"
LIGHT = "ARGS=--numprocesses=0 -p no:hypothesispytest"  # starting is all the time it takes
BOTH_EMPTY = "neither half found a test"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project like this one, without tests and without programs."""
    for name in (
        "Makefile",
        "pyproject.toml",
        ".ci/run",
        "tests/conftest.py",
        "tools/run_tests.py",
    ):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    (tmp_path / "tests" / "spark").mkdir()
    (tmp_path / "tests" / "support").symlink_to(ROOT / "tests" / "support")
    (tmp_path / "bench" / "loadgen").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    add_program(tmp_path, "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    return tmp_path


def add_program(project: Path, name: str, text: str) -> None:
    program = project / ".venv" / "bin" / name
    program.write_text(text)
    program.chmod(0o755)


def run(project: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The make that runs these tests must not hand its flags and targets to the one under test.
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTEST_"))}
    return subprocess.run(
        command,
        cwd=project,
        env={**ours, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )


def make(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    olds = [f"--old-file={name}" for name in (*READY, "lint", "test-rust")]
    return run(project, "make", *olds, *arguments, **environment)


@pytest.mark.parametrize("target", ["test-python", "test"])
def test_a_failing_test_without_spark_fails_the_run(project: Path, target: str) -> None:
    (project / "tests" / "test_first.py").write_text(FAILS)
    (project / "tests" / "spark" / "test_second.py").write_text(PASSES)
    ended = make(project, target, LIGHT)
    assert ended.returncode != 0, ended.stdout
    assert "1 failed" in ended.stdout
    assert "1 passed" in ended.stdout, "a failure hid the results of the other half"


def test_a_choice_of_tests_may_leave_one_half_empty_but_not_both(project: Path) -> None:
    (project / "tests" / "test_first.py").write_text(PASSES)
    chosen = make(project, "test-python", LIGHT)
    assert chosen.returncode == 0, chosen.stdout
    nothing = make(project, "test-python", f"{LIGHT} -k nothing")
    assert nothing.returncode != 0, nothing.stdout
    assert BOTH_EMPTY in nothing.stdout


# `python -m pytest` finds this file first: pytest's exit codes without pytest's second per start.
STAND_IN_FOR_PYTEST = """
import os, signal, sys
half = "FIRST" if "--spark=without" in sys.argv else "SECOND"
assert half == "FIRST" or "--spark=only" in sys.argv
print("ran", half)
code = int(os.environ[half])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
FAILURES = {
    1: "tests failed",
    2: "interrupted",
    3: "internal error",
    4: "wrong usage",
    -9: "killed",
}
ENDINGS = {0: "passed", 5: "empty", **FAILURES}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *itertools.product((0, 1, 5), (0, 1, 5)),
        *itertools.product((2, 3, 4, -9), (0, 5)),
        *itertools.product((0, 5), (2, 3, 4, -9)),
    ],
    ids=lambda code: ENDINGS[code],
)
def test_the_run_fails_unless_each_half_passed_or_one_of_them_was_empty(
    project: Path, first: int, second: int
) -> None:
    (project / "pytest.py").write_text(STAND_IN_FOR_PYTEST)
    ended = make(project, "test-python", FIRST=str(first), SECOND=str(second))
    succeeds = {first, second} <= {0, 5} and {first, second} != {5}
    assert (ended.returncode == 0) == succeeds, ended.stdout
    assert (BOTH_EMPTY in ended.stdout) == (first == second == 5), ended.stdout
    assert [line for line in ended.stdout.splitlines() if line.startswith("ran ")] == [
        "ran FIRST", "ran SECOND",
    ]  # fmt: skip


STAND_IN = """#!/bin/sh
line="$(basename "$0") $*"
echo "$line" >> "$RAN"
[ "$line" != "$BREAKS" ]
"""
STOOD_IN_FOR = {"ruff", "mypy", "lint-imports", "python", "cargo"}


def test_every_command_of_the_whole_run_can_fail_it(project: Path) -> None:
    """Each program only notes its call; then, call by call, that one fails."""
    for name in STOOD_IN_FOR:
        add_program(project, name, STAND_IN)
    olds = " ".join(f"--old-file={name}" for name in READY)
    add_program(project, "make", f'#!/bin/sh\nexec {shutil.which("make")} {olds} "$@"\n')
    search = f"{project / '.venv' / 'bin'}:{os.environ['PATH']}"
    noted = project / "ran"

    def run_ci(breaks: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        noted.write_text("")
        ended = run(project, ".ci/run", PATH=search, RAN=str(noted), BREAKS=breaks)
        return ended, noted.read_text().splitlines()

    ended, lines = run_ci("")
    assert ended.returncode == 0, ended.stdout
    programs = [line.split()[0] for line in lines]
    assert set(programs) == STOOD_IN_FOR
    assert programs.count("cargo") == 6, "format, clippy and tests"
    assert programs[-1] == "python", "the Python tests come last"
    for line in lines:
        ended, _ = run_ci(line)
        assert ended.returncode != 0, f"`{line}` failed and nobody noticed\n{ended.stdout}"
