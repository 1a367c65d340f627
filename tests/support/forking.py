"""Server processes from `support.fork_server`, with the part of `subprocess.Popen` that the tests use.

`support.server` starts its servers here when the command is the one in .venv and the environment differs from that
of the tests by Millstream's own variables alone: the interpreter has read the others by the time it forks. Everything else,
and every server at the full counts, is started from its command.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

PROGRAM = Path(__file__).with_name("fork_server.py")
ANSWER_DEADLINE_S = 60.0  # the first answer comes after everything was loaded
END_DEADLINE_S = 10.0
PACKET_BYTES_MAX = 4096
# What changes from test to test and nothing reads that was loaded before.
FREE = ("MILLSTREAM_", "PYTEST_")


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(FREE)}


class ForkServer:
    """The program and the socket to it; requests take turns."""

    def __init__(self) -> None:
        self.environment = _fixed(os.environ)
        self._turn = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(ANSWER_DEADLINE_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # for its children only; what it has to say itself is an error
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is for pytest, which then ends its servers in order
            )

    def ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> Any:
        with self._turn:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors or [])
            answer = self._channel.recv(PACKET_BYTES_MAX)
        assert answer, "the fork server ended by itself"
        return json.loads(answer)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(END_DEADLINE_S)


class Forked:
    """One child: a `Popen` as far as the tests need one."""

    def __init__(
        self, forks: ForkServer, command: list[str], environment: dict[str, str], cwd: str
    ):
        self._forks = forks
        ours, theirs = os.pipe()
        try:
            request = {"start": command, "cwd": cwd, "environment": environment}
            self.pid: int = forks.ask(request, [theirs])["pid"]
        finally:
            os.close(theirs)
        self.stdout: IO[str] | None = os.fdopen(ours, errors="replace")
        self.returncode: int | None = None
        self._handle = os.pidfd_open(self.pid)
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"server process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        with self._reaping:
            if self.returncode is None:
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            watched = select.poll()
            watched.register(self._handle, select.POLLIN)
            if not watched.poll(None if seconds is None else seconds * 1000):
                return None
        with self._reaping:  # of two threads that saw the end, one asks
            if self.returncode is None:
                status = self._forks.ask({"reap": self.pid})["status"]
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._handle)
        return self.returncode


_forks: ForkServer | None = None
_starting = threading.Lock()


def fork_server_for(environment: Mapping[str, str]) -> ForkServer | None:
    """The one of this process of pytest, if its children can have this environment."""
    global _forks
    with _starting:
        if _forks is None:
            _forks = ForkServer()
        return _forks if _fixed(environment) == _forks.environment else None


def close() -> None:
    """At the end of a run, when its servers are gone."""
    global _forks
    if _forks is not None:
        _forks.close()
        _forks = None
