"""A standalone Spark cluster and a Connect server, as processes on loopback.

Where it sits: beside `spark.py`; used by the session fixtures of tests/spark. The pip package has no start scripts for
master and workers, so `bin/spark-class` runs their classes.

Invariants: ports are chosen by the processes and read from what they print; every wait has a deadline; each process
leads its own session and is ended with everything it started.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from support.spark import (
    SPARK_HOME,
    START_DEADLINE_S,
    die_with_parent,
    environment,
    kill_session,
)

WORKER_HOSTS = ("127.0.0.1", "127.0.0.2")
"""Two addresses, because Spark never runs a speculative attempt on the host of the first one."""
MASTER_READY = re.compile(r"Starting Spark master at (spark://[\d.]+:\d+)")
WORKER_READY = re.compile(r"Successfully registered with master")
CONNECT_READY = re.compile(r"Spark Connect server started at: \S*?:(\d+)")
END_DEADLINE_S = 15.0

LOG_CONFIGURATION = """rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


class Daemon:
    """One long-lived Spark process; its output goes to a file and is searched for the line that says it is ready."""

    def __init__(self, name: str, command: list[str], folder: Path, env: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log_file = folder / f"{name}.log"
        configuration = folder / "log4j2.properties"
        configuration.write_text(LOG_CONFIGURATION)
        options = f"-Dlog4j2.configurationFile={configuration.as_uri()}"
        self.process = subprocess.Popen(
            command,
            env={**env, "SPARK_DAEMON_JAVA_OPTS": options, "SPARK_SUBMIT_OPTS": options},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log_file.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                with self._changed:
                    if len(self._lines) < 500:  # what says "ready" comes early
                        self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, line: re.Pattern[str], deadline_s: float = START_DEADLINE_S) -> str:
        """The first group (or all) of the first line that matches."""

        def found() -> re.Match[str] | None:
            return next((match for text in self._lines if (match := line.search(text))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._ended, deadline_s)
            match = found()
        if match is None:
            self.kill()
            text = self.log_file.read_text(errors="replace")[-5000:]
            raise AssertionError(f"{self.name} is not ready after {deadline_s:.0f} s\n{text}")
        return match[match.lastindex or 0]

    def stop(self) -> None:
        """SIGTERM, then whatever is needed; nothing is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed below
                self.process.wait(END_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        kill_session(self.process)
        self._reader.join(END_DEADLINE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


class StandaloneCluster:
    """A master and two workers (1 core, 1 GiB each) on two loopback addresses.

    `python` is the interpreter of the executors. `master` is the address to give to Spark.
    """

    def __init__(self, folder: Path, *, python: str = sys.executable) -> None:
        self.folder = folder
        self._daemons: list[Daemon] = []
        env = {"PYSPARK_PYTHON": python, "SPARK_DAEMON_MEMORY": "256m"}
        try:
            self._start(env)
        except BaseException:
            self.stop()
            raise

    def _start(self, env: dict[str, str]) -> None:
        spark_class = str(SPARK_HOME / "bin" / "spark-class")
        start = [spark_class, "org.apache.spark.deploy.master.Master"]
        master = Daemon(
            "master",
            [*start, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"],
            self.folder / "master",
            environment(self.folder / "master", env),
        )
        self._daemons.append(master)
        self.master = master.wait_for(MASTER_READY)
        workers = [self._worker(spark_class, host, env) for host in WORKER_HOSTS]
        for worker in workers:
            worker.wait_for(WORKER_READY)

    def _worker(self, spark_class: str, host: str, env: dict[str, str]) -> Daemon:
        folder = self.folder / f"worker-{host}"
        start = [spark_class, "org.apache.spark.deploy.worker.Worker", "--host", host]
        # Room for two applications: the shared driver keeps its half as long as it runs.
        room = ["--cores", "2", "--memory", "2g", "--webui-port", "0"]
        worker = Daemon(
            f"worker-{host}",
            [*start, *room, "--work-dir", str(folder / "apps"), self.master],
            folder,
            environment(folder, {**env, "SPARK_LOCAL_IP": host}),
        )
        self._daemons.append(worker)
        return worker

    def executor_logs(self) -> str:
        """What the executors of all applications wrote to stderr, newest file last."""
        files = sorted(
            self.folder.glob("worker-*/apps/*/*/stderr"), key=lambda f: f.stat().st_mtime
        )
        return "".join(f"--- {f}\n{f.read_text(errors='replace')[-5000:]}\n" for f in files)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.stop()
        self._daemons.clear()


class ConnectServer:
    """A Spark Connect server over `local[2]`; `url` is what a remote session is given."""

    def __init__(
        self,
        folder: Path,
        *,
        conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        began = time.monotonic()
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            **(conf or {}),
        }
        options = [
            part for name, value in settings.items() for part in ("--conf", f"{name}={value}")
        ]
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]", *options]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
        self._daemon = Daemon(
            "connect", [*command, "spark-internal"], folder, environment(folder, env)
        )
        port = self._daemon.wait_for(CONNECT_READY)
        self.url = f"sc://127.0.0.1:{port}"
        self.start_seconds = time.monotonic() - began

    def log(self) -> str:
        return self._daemon.log_file.read_text(errors="replace")

    def stop(self) -> None:
        self._daemon.stop()
