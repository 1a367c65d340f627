"""Runs the Python tests in two halves, and fails when either does: the recipe of `make test-python`.

Most tests wait for a process of their own, so three at a time fit on two cores. Those with Spark use both cores and run after
the others, in two processes (tests/support/spark_halves.py).

Every argument goes to both halves. The rules:
- Both halves run, whatever becomes of the first, so that one run shows every failure. Ctrl-C ends it.
- A half succeeds when pytest ends with 0, or with 5: its tests were all left out by the arguments.
- Everything else is a failure: a test that fails, a file that cannot be loaded, a pytest that crashes or is killed.
- That both halves found no test is a failure as well.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

HALVES = {
    "without Spark": ("--spark=without", "--numprocesses=3", "--dist=worksteal"),
    "with Spark": ("--spark=only", "--numprocesses=2", "--dist=loadscope"),
}
PASSED = 0
EMPTY = 5
INTERRUPTED = 130


def verdict(codes: Sequence[int]) -> str | None:
    """What is wrong with these exit codes of the halves, in their order; None if nothing is."""
    if all(code == EMPTY for code in codes):
        return "neither half found a test: check the arguments"
    failed = [
        f"the tests {name} {ending(code)}"
        for name, code in zip(HALVES, codes, strict=True)
        if code not in (PASSED, EMPTY)
    ]
    return "; ".join(failed) or None


def ending(code: int) -> str:
    return f"ended with {code}" if code >= 0 else f"were killed by {signal.Signals(-code).name}"


def run(options: Sequence[str]) -> int:
    """One pytest; its exit code, or minus the signal that killed it."""
    process = subprocess.Popen([sys.executable, "-m", "pytest", *options])
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # it got the same Ctrl-C, and takes its servers with it
        raise


def main(arguments: Sequence[str]) -> int:
    try:
        codes = [run([*options, *arguments]) for options in HALVES.values()]
    except KeyboardInterrupt:
        return INTERRUPTED
    wrong = verdict(codes)
    if wrong is not None:
        print(f"error: {wrong}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
