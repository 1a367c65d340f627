"""Real Spark for tests: environment, streaming runs with a deadline, drivers in processes of their own.

One process can hold one classic session, so the shared `local[2]` session lives in the test process and everything else
(`local-cluster`, a standalone cluster, Connect, drivers that are killed) runs in a `Driver`: a Python process that builds
its session once and then calls functions that tests hand it.

Invariants: every wait has a deadline; a driver and all that it started (JVM, executors, Python workers) die with it, and
with the test process; what it printed is shown when a call fails.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import IO, Any, Self

import pyspark

TESTS = Path(__file__).resolve().parent.parent
SPARK_HOME = Path(pyspark.__file__).resolve().parent
START_DEADLINE_S = 120.0
CALL_DEADLINE_S = 120.0
END_DEADLINE_S = 10.0
LOG_SHOWN_CHARACTERS = 20_000
PR_SET_PDEATHSIG = 1

SMALL: dict[str, str] = {
    "spark.driver.memory": "1g",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Whoever mistakes the zone of the session for UTC is half an hour off at least.
    "spark.sql.session.timeZone": "Asia/Kolkata",
    "spark.sql.streaming.numRecentProgressUpdates": "500",
    "spark.sql.streaming.stopTimeout": "30s",
    # On a busy machine a Python process may take longer than the usual 15 s to come up.
    "spark.python.authenticate.socketTimeout": "60s",
    # A failing task of a test fails on purpose: the second attempt comes at once.
    "spark.excludeOnFailure.enabled": "false",
}
"""Settings that every session of the tests starts from."""
TOKEN_VARIABLE = "MILLSTREAM_TEST_TOKEN"
TOKEN = "a-token-that-must-not-show-17"
"""What the shared session has in its environment, for tests of `tokenEnv`; they look for it everywhere else."""


def environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a Spark process: loopback, this interpreter, all its files below `folder`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK_", "PYSPARK_", "MILLSTREAM_", "PYTEST_"))
        and name not in ("PYTHONPATH", "MASTER")
    }
    return {
        **kept,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_LOG_DIR": str(folder / "logs"),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        **(extra or {}),
    }


def die_with_parent() -> None:
    """Runs in a child between fork and exec: the kernel ends it when the test process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def session_processes(leader: int) -> list[int]:
    """Every process of the session that `leader` leads (Spark's Python daemons have groups of their own)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def kill_session(process: subprocess.Popen[Any]) -> None:
    """kill -9 for a process started with `start_new_session`, and for all that it started."""
    until = time.monotonic() + END_DEADLINE_S
    while left := session_processes(process.pid):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if process.poll() is None:
            process.wait(END_DEADLINE_S)
        if time.monotonic() > until:
            raise AssertionError(f"still alive after kill -9: {left}")
    process.wait(END_DEADLINE_S)


def available_now(writer: Any, *, deadline_s: float = 90.0) -> list[dict[str, Any]]:
    """Run a `DataStreamWriter` over all that is there now; returns the progress of its batches.

    Raises the query's own error if it fails, and `AssertionError` if it is not done in time.
    """
    return wait_for(writer.trigger(availableNow=True).start(), deadline_s=deadline_s)


def wait_for(query: Any, *, deadline_s: float = 90.0) -> list[dict[str, Any]]:
    """Wait until a query has ended by itself; the same result and errors as `available_now`."""
    if not query.awaitTermination(int(deadline_s)):
        status = query.status
        query.stop()
        raise AssertionError(f"the query still runs after {deadline_s:.0f} s: {status}")
    return [_plain(progress) for progress in query.recentProgress]


def _plain(progress: Any) -> dict[str, Any]:
    document = progress if isinstance(progress, dict) else json.loads(progress.json)
    return dict(document)


class DriverFailed(AssertionError):
    """A call in a driver raised, or the driver ended. `.kind` and `.message` are of the exception there."""

    def __init__(self, text: str, kind: str = "", message: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.message = message


class Driver:
    """A Spark driver in its own process.

    `driver.call(function, x=1)` runs `function(spark, x=1)` there and returns its result, which must be JSON. The function is
    found by file and name, so it stands at the top level of a module that can be imported alone; what it closes over is
    not there. With `start_session=False` functions get `None` instead of a session and build their own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        master: str | None = None,
        remote: str | None = None,
        conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        start_session: bool = True,
        deadline_s: float = START_DEADLINE_S,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log_file = folder / "driver.log"
        self._answers: Queue[dict[str, Any]] = Queue()
        told = {
            "master": master,
            "remote": remote,
            "conf": {**({} if remote else SMALL), **(conf or {})},
            "log_file": str(folder / "jvm.log"),
            "start_session": start_session,
        }
        extra = {"MILLSTREAM_TEST_DRIVER": json.dumps(told), **(env or {})}
        if python == sys.executable:
            extra.setdefault("PYTHONPATH", str(TESTS))
        answers_read, answers_write = os.pipe()
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                # -P: the folder of the script has modules named like those of the standard library.
                [python, "-P", str(TESTS / "support" / "spark_driver.py"), str(answers_write)],
                env=environment(folder, extra),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=(answers_write,),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        os.close(answers_write)
        self._reader = threading.Thread(
            target=self._read, args=(os.fdopen(answers_read),), daemon=True
        )
        self._reader.start()
        try:
            self._answer("start", deadline_s)
        except BaseException:
            self.kill()
            raise

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._answers.put(json.loads(line))
        self._answers.put({"ended": True})

    def call(
        self, function: Callable[..., Any], *, deadline_s: float = CALL_DEADLINE_S, **arguments: Any
    ) -> Any:
        """Run `function(spark, **arguments)` in the driver and return its result."""
        self.begin(function, **arguments)
        return self.finish(deadline_s=deadline_s)

    def begin(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Start a call without waiting: for tests that break something while it runs."""
        source = inspect.getsourcefile(function)
        assert source is not None
        self.begin_named(Path(source), function.__qualname__, **arguments)

    def begin_named(self, file: Path, name: str, **arguments: Any) -> None:
        request = {"file": str(file.resolve()), "function": name, "arguments": arguments}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def finish(self, *, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """The result of the call that `begin` started."""
        return self._answer("call", deadline_s)

    def _answer(self, what: str, deadline_s: float) -> Any:
        try:
            answer = self._answers.get(timeout=deadline_s)
        except Empty:
            raise DriverFailed(
                f"no answer to {what} after {deadline_s:.0f} s\n{self.log()}"
            ) from None
        if "ended" in answer:
            code = self.process.wait(END_DEADLINE_S)
            raise DriverFailed(f"the driver ended with {code} during {what}\n{self.log()}")
        if "error" in answer:
            error = answer["error"]
            raise DriverFailed(
                f"{error['kind']}: {error['message']}\n{error['traceback']}\n{self.log()}",
                error["kind"],
                error["message"],
            )
        return answer["result"]

    def log(self) -> str:
        """The end of what driver and JVM printed."""
        files = [self.log_file, self.folder / "jvm.log"]
        return "".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-LOG_SHOWN_CHARACTERS:]}\n"
            for file in files
            if file.exists()
        )

    def kill(self) -> None:
        """kill -9 for the driver, its JVM, its executors and workers."""
        kill_session(self.process)
        self._close()

    def close(self, deadline_s: float = 60.0) -> None:
        """Stop the session and wait for the end; whatever is left then is killed."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise DriverFailed(f"still running after {deadline_s} s\n{self.log()}") from None
        kill_session(self.process)
        self._close()

    def _close(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                self.process.stdin = None
        self._reader.join(END_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


def run_driver(
    script: Path,
    folder: Path,
    *,
    function: str = "main",
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    deadline_s: float = START_DEADLINE_S + CALL_DEADLINE_S,
    **arguments: Any,
) -> Any:
    """Run `function(spark, **arguments)` of a Python file in a new driver; returns its JSON result."""
    began = time.monotonic()
    with Driver(folder, master=master, conf=conf, env=env, deadline_s=deadline_s) as driver:
        driver.begin_named(script, function, **arguments)
        return driver.finish(deadline_s=max(1.0, began + deadline_s - time.monotonic()))
