"""Commands that run Spark, in processes of their own: lines as they come, signals, and what is left of them.

Invariants: every wait has a deadline; a command leads a session, so that whatever it started can be found and is killed
at the end of the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import ctrl_c
from support.spark import environment, session_processes

COMMAND = [sys.executable, "-m", "millstream.cli"]
DEADLINE_S = 200.0


class Run:
    """One command in a session of its own, its output collected as it comes."""

    def __init__(self, folder: Path, url: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env={**environment(folder), "MILLSTREAM_URL": url},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=ctrl_c.taken,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.out), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.err), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: Any, lines: list[str]) -> None:
        with pipe:
            for line in pipe:
                with self._news:
                    lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for_line(self, text: str) -> None:
        self.wait_until(lambda: any(text in line for line in self.err + self.out))

    def wait_until(self, reached: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Until what was printed makes `reached` true; asked again at each line."""
        until = time.monotonic() + deadline_s
        with self._news:
            while not reached():
                left = until - time.monotonic()
                alive = any(thread.is_alive() for thread in self._threads)
                assert left > 0, f"not in time: {self.out} {self.err}"
                assert alive, f"ended before: {self.out} {self.err}"
                self._news.wait(min(left, 1.0))

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        code = self.process.wait(deadline_s)
        for thread in self._threads:
            thread.join(10.0)
        return code

    def left(self) -> list[int]:
        return session_processes(self.process.pid)

    def kill(self) -> None:
        for pid in (self.process.pid, *self.left()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10.0)
