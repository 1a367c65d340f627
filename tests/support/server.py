"""A real `millstream serve` process for tests.

Every test that speaks HTTP goes through this class; nothing here looks inside the server. Invariants:
every wait has a deadline; no process outlives the test run (own session, killed with its parent); what
the server printed is kept, bounded, and shown when a test fails; a server that panicked or died by
itself fails the test that used it, whatever the test asserted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from support.forking import Forked, fork_server_for
from support.http import Connection

ROOT = Path(__file__).resolve().parent.parent.parent
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 5.0
LOG_LINES_KEPT = 2000
LISTENING = re.compile(r"listening on (?P<url>http://(?P<host>[\d.]+):(?P<port>\d+))\b")
PR_SET_PDEATHSIG = 1

Setting = str | int | bool


def binary() -> Path:
    """The command under test: the one in .venv, or another build named by the environment."""
    named = os.environ.get("MILLSTREAM_TEST_BINARY")
    return Path(named) if named else ROOT / ".venv" / "bin" / "millstream"


def from_commands() -> bool:
    """Another build than the one in .venv, and the full counts, are started as a shell would start them."""
    full = os.environ.get("MILLSTREAM_TEST_FULL", "") not in ("", "0")
    return full or "MILLSTREAM_TEST_BINARY" in os.environ


class ServerError(AssertionError):
    """The process did not do what a healthy server does; carries what it printed."""


class Server:
    """One server process on a free port, over one data directory.

    `settings` are passed as MILLSTREAM_* variables, so every line of the settings table can be set.
    With `working_dir` the server starts there and gets no `--data-dir`: it chooses its own.
    With `from_command` it is started as a shell would, not forked from one that has loaded everything.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        working_dir: Path | None = None,
        settings: Mapping[str, Setting] | None = None,
        flags: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        files_max: int | None = None,
        before_exec: Callable[[], None] | None = None,
        deadline_s: float = START_DEADLINE_S,
        from_command: bool = False,
    ) -> None:
        self.data_dir = data_dir
        self.working_dir = working_dir
        self.settings: dict[str, Setting] = dict(settings or {})
        self.flags = flags
        self.environment = dict(environment or {})
        self.files_max = files_max
        self.before_exec = before_exec
        self.from_command = from_command or from_commands()
        self.start_seconds = 0.0
        self.url = ""
        self.port = 0
        self._log: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._logged = threading.Condition()
        self._ended_on_purpose = False
        self.process = self._spawn(deadline_s)

    # --- life ---------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", "0"]
        if self.working_dir is None:
            place += ["--data-dir", str(self.data_dir)]
        return [str(binary()), "serve", *place, *self.flags]

    def _start_process(self, environment: dict[str, str]) -> subprocess.Popen[str] | Forked:
        if not (self.from_command or self.files_max or self.before_exec):
            forks = fork_server_for(environment)
            if forks is not None:
                where = str(self.working_dir or Path.cwd())
                return Forked(forks, self._command(), environment, where)
        return subprocess.Popen(
            self._command(),
            env=environment,
            cwd=self.working_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=self._before_exec,
        )

    def _spawn(self, deadline_s: float) -> subprocess.Popen[str] | Forked:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MILLSTREAM_")}
        for name, value in self.settings.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            environment[f"MILLSTREAM_{name.upper()}"] = text
        environment.update(self.environment)
        began = time.monotonic()
        process = self._start_process(environment)
        self._ended_on_purpose = False
        listening = threading.Event()
        self._reader = threading.Thread(
            target=self._read_output, args=(process, listening), daemon=True
        )
        self._reader.start()
        while not listening.wait(0.05):
            if process.poll() is not None:
                self._reader.join(STOP_DEADLINE_S)
                if listening.is_set():
                    break
                self._close_output(process)
                raise ServerError(f"ended with {process.returncode} before ready\n{self.log()}")
            if time.monotonic() - began > deadline_s:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_DEADLINE_S)
                self._close_output(process)
                raise ServerError(f"not listening after {deadline_s:.0f} s\n{self.log()}")
        self.start_seconds = time.monotonic() - began
        return process

    def _before_exec(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.files_max is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files_max, self.files_max))
        if self.before_exec is not None:
            self.before_exec()

    def _read_output(
        self, process: subprocess.Popen[str] | Forked, listening: threading.Event
    ) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._logged:
                self._log.append(line.rstrip("\n"))
                self._logged.notify_all()
            found = LISTENING.search(line)
            if found and not listening.is_set():
                self.url, self.port = found["url"], int(found["port"])
                listening.set()

    def _close_output(self, process: subprocess.Popen[str] | Forked) -> None:
        self._reader.join(STOP_DEADLINE_S)
        if process.stdout is not None:
            process.stdout.close()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> float:
        """SIGTERM; the process must exit 0 within the deadline. Returns the seconds it took."""
        self._ended_on_purpose = True
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"still running {deadline_s} s after SIGTERM\n{self.log()}") from None
        took = time.monotonic() - began
        self._close_output(self.process)
        if code != 0:
            raise ServerError(f"exit code {code} after SIGTERM\n{self.log()}")
        return took

    def kill(self) -> None:
        """SIGKILL to the whole process group: the nearest thing to a crash."""
        self._ended_on_purpose = True
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_DEADLINE_S)
        self._close_output(self.process)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP until the block ends; entered only when every thread stands still."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        until = time.monotonic() + STOP_DEADLINE_S
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            while any(_state(task) != "T" for task in tasks.iterdir()):
                if time.monotonic() > until:
                    raise ServerError(f"still running {STOP_DEADLINE_S} s after SIGSTOP")
                time.sleep(0.005)
            yield
        finally:
            if self.process.poll() is None:
                os.kill(self.process.pid, signal.SIGCONT)

    def restart(self, *, deadline_s: float = START_DEADLINE_S, **settings: Setting) -> Server:
        """Start again over the same directory (stopping first if it still runs)."""
        if self.process.poll() is None:
            self.stop()
        self.settings.update(settings)
        self.process = self._spawn(deadline_s)
        return self

    def crash_and_restart(self, **settings: Setting) -> Server:
        self.kill()
        return self.restart(**settings)

    def close(self) -> None:
        """End of the test: whatever happened, nothing may be left, and nothing may have broken."""
        self.check_life()
        if self.process.poll() is None:
            self.stop()
        self.check_log()

    def check_life(self) -> None:
        """It runs, or was ended by the test; and it is whole."""
        code = self.process.poll()
        if code is not None and not self._ended_on_purpose:
            self._close_output(self.process)
            raise ServerError(f"the server ended by itself with {code}\n{self.log()}")
        self.check_log()

    def check_log(self) -> None:
        """A panic that was caught is still a defect."""
        if any("panicked at" in line or "Traceback (most recent" in line for line in self._log):
            raise ServerError(f"the server reported an internal fault\n{self.log()}")

    # --- looking at it ------------------------------------------------------------------------

    def log(self) -> str:
        return "\n".join(list(self._log)[-200:])

    def wait_for_log(self, text: str, deadline_s: float = 10.0) -> None:
        """Until the server has printed it: a line comes through a pipe, after what it tells of."""
        with self._logged:
            if not self._logged.wait_for(lambda: text in self.log(), deadline_s):
                raise ServerError(f"did not print {text!r} within {deadline_s} s\n{self.log()}")

    def connect(self, deadline_s: float = 10.0) -> Connection:
        return Connection("127.0.0.1", self.port, deadline_s=deadline_s)

    def processes(self) -> list[int]:
        """Every process of the server's session, the server itself first."""
        group = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == self.process.pid:
                group.append(int(entry.name))
        return sorted(group, key=lambda pid: pid != self.process.pid)

    def rss_bytes(self) -> int:
        """Resident memory of the whole process group."""
        return sum(self._status_kib(pid, "VmRSS") for pid in self.processes()) * 1024

    def peak_rss_bytes(self) -> int:
        return sum(self._status_kib(pid, "VmHWM") for pid in self.processes()) * 1024

    def thread_seconds(self, name: str) -> float:
        """Processor time of the threads whose name begins so."""
        ticks = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            if (task / "comm").read_text().startswith(name):
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _status_kib(pid: int, field: str) -> int:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _state(task: Path) -> str:
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]


if sys.platform != "linux":
    raise ImportError("the tests read /proc and need Linux")
