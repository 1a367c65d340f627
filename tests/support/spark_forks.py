"""Python processes of the shared Spark session, forked from one that has loaded everything.

Spark starts a Python process for every query, and forks one for every batch and commit, each of which loads pyspark, pyarrow
and Millstream anew: half of what a short run costs. Where it sits: `tests/spark/conftest.py` gives the session the program that
`SparkForks` writes as its interpreter; that program hands arguments, environment and descriptors to this one, which forks. The
child goes on as `python -m MODULE` does. At the full counts, and in every driver of its own, Spark starts real commands.

Over the socket, one JSON object per packet, with descriptors 0, 1 and 2:

    {"module": "pyspark.daemon", "argv": [...], "cwd": ..., "environment": {...}}  ->  {"status": 0} when it has ended

Invariants: nothing is run before a fork, only loaded; a child ends when the program that asked for it does; all of them end with
the process of pytest.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

PACKET_BYTES_MAX = 1 << 18
END_DEADLINE_S = 10.0
PR_SET_PDEATHSIG = 1
LOADED = (
    "deltalake",
    "encodings.idna",
    "millstream.client.sync.client",
    "millstream.spark.jobs.lake.sink",
    "millstream.spark.source",
    "millstream.spark.write.writer",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.json",
    "pyarrow.parquet",
    "pyiceberg.catalog.sql",
    "pyspark.daemon",
    "pyspark.sql.streaming.proto.StateMessage_pb2",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.streaming.transform_with_state_driver_worker",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.worker",
)
PROGRAM = """#!{python} -SE
import json, os, socket, sys
if sys.argv[1:2] != ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
asked = {{"module": sys.argv[2], "argv": sys.argv[3:], "cwd": os.getcwd(), "environment": dict(os.environ)}}
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect({address!r})
socket.send_fds(channel, [json.dumps(asked).encode()], [0, 1, 2])
for descriptor in (0, 1):  # the pipes are the child's
    os.close(descriptor)
answer = channel.recv(4096)
sys.exit(json.loads(answer)["status"] if answer else 1)
"""


class SparkForks:
    """The process that forks, below one process of pytest; `python` is the interpreter for Spark."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        address = (
            f"\0millstream-spark-{secrets.token_hex(16)}"  # a path might be too long for a socket
        )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(64)
        self.python = folder / "python"
        self.python.write_text(PROGRAM.format(python=sys.executable, address=address))
        self.python.chmod(0o700)
        with listener:
            self._process = subprocess.Popen(
                # -P: the folder of the script has modules named like those of the standard library.
                [sys.executable, "-P", str(Path(__file__).resolve()), str(listener.fileno())],
                # A thread of numpy's would be there before a fork.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_DEADLINE_S)


class Forking:
    """The loop of the process that forks. In a child `serve` returns what it was asked for."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.children: dict[int, tuple[int, socket.socket]] = {}
        """Descriptor of a channel or of a process -> number of the process, and its channel."""

    def serve(self) -> dict[str, object] | None:
        waiting = select.poll()
        for descriptor in (sys.stdin.fileno(), self.listener.fileno()):
            waiting.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in waiting.poll():
                if descriptor == sys.stdin.fileno():
                    return None
                if descriptor == self.listener.fileno():
                    asked = self.begin(waiting)
                    if asked is not None:
                        return asked
                elif descriptor in self.children:
                    self.end(descriptor, waiting)

    def begin(self, waiting: select.poll) -> dict[str, object] | None:
        channel, _ = self.listener.accept()
        packet, descriptors, _, _ = socket.recv_fds(channel, PACKET_BYTES_MAX, 3)
        if not packet:
            channel.close()
            return None
        asked: dict[str, object] = json.loads(packet)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it ended before the line above
                os._exit(1)
            channel.close()
            self.listener.close()
            for handle, (_, other) in self.children.items():
                if handle != other.fileno():
                    os.close(handle)
            for _, other in self.children.values():
                other.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return asked
        for descriptor in descriptors:
            os.close(descriptor)
        for handle in (os.pidfd_open(pid), channel.fileno()):
            self.children[handle] = (pid, channel)
            waiting.register(handle, select.POLLIN)
        return None

    def end(self, descriptor: int, waiting: select.poll) -> None:
        """A child has ended, or the program that asked for it has."""
        pid, channel = self.children[descriptor]
        if descriptor == channel.fileno():
            os.kill(pid, signal.SIGTERM)
            waiting.unregister(descriptor)
            del self.children[descriptor]
            return
        _, status = os.waitpid(pid, 0)
        waiting.unregister(descriptor)
        del self.children[descriptor]
        os.close(descriptor)
        if channel.fileno() in self.children:
            waiting.unregister(channel.fileno())
            del self.children[channel.fileno()]
            code = os.waitstatus_to_exitcode(status)
            channel.send(json.dumps({"status": code if code >= 0 else 128 - code}).encode())
        channel.close()


def become(asked: dict[str, object]) -> NoReturn:
    """What `python -m` does."""
    environment, argv = asked["environment"], asked["argv"]
    assert isinstance(environment, dict)
    assert isinstance(argv, list)
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(environment)
    given = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:0] = [part for part in given if part not in sys.path]
    gc.unfreeze()
    name = str(asked["module"])
    sys.argv = [name, *argv]
    sys.modules.pop("__main__")
    sys.modules.pop(name, None)  # else Python warns that it is there before it runs
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    for module in LOADED:
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    chosen = Forking(socket.socket(fileno=int(sys.argv[1]))).serve()
    if chosen is not None:
        become(chosen)
