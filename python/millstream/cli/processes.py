"""Processes that a command starts: a server of its own, and nothing left of anything at the end.

Where it sits: used by `demo` and `pipeline`. Linux only, like the server.

Invariants:
- I-PRC-1  A server started here dies with this process, also when it is killed with -9.
- I-PRC-2  When `none_left` ends, no child of this process is alive: not the JVM that Ctrl-C met in the
           middle of its start either.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS: Final = 30.0
END_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.02
PR_SET_PDEATHSIG: Final = 1
_LISTENING: Final = re.compile(r"listening on (http://\S+)")


@contextmanager
def own_server(data_dir: Path, log_file: Path) -> Iterator[str]:
    """A `millstream serve` on a free port; yields its URL and stops it in the end."""
    command = [sys.executable, "-m", "millstream.cli", "serve", "--port", "0"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")
    }
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--data-dir", str(data_dir)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=data_dir.parent,
            start_new_session=True,  # Ctrl-C is ours; the server is stopped in order
            preexec_fn=_die_with_parent,
        )
    try:
        yield _listening(process, log_file)
    finally:
        _end(process)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _listening(process: subprocess.Popen[bytes], log_file: Path) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        found = _LISTENING.search(log_file.read_text(errors="replace"))
        if found is not None:
            return found[1]
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        break
    last = (log_file.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    raise MillstreamError(f"the server did not start: {last}", code="server_failed")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)


@contextmanager
def none_left() -> Iterator[None]:
    """End every child that the block started and did not end."""
    before = set(_children())
    try:
        yield
    finally:
        left = [pid for pid in _children() if pid not in before]
        for kind in (signal.SIGTERM, signal.SIGKILL):
            left = _signal_and_wait(left, kind)


def _signal_and_wait(pids: list[int], kind: signal.Signals) -> list[int]:
    """Those that are still there `END_SECONDS` after the signal."""
    for pid in pids:
        try:
            os.kill(pid, kind)
        except ProcessLookupError:
            continue
    until = time.monotonic() + END_SECONDS
    while pids and time.monotonic() < until:
        pids = [pid for pid in pids if not _reaped(pid)]
        if pids:
            time.sleep(POLL_SECONDS)  # no event tells the end of a child that others may wait for
    return pids


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue  # a thread that has just ended
    return found
