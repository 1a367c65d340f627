"""Which process of Spark made a request, and which executor it belongs to: so that a test kills the right one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

EXECUTOR_CLASS = "CoarseGrainedExecutorBackend"


def executor_of(client_port: int, candidates: list[int]) -> int:
    """The executor JVM whose Python worker holds the connection from `client_port`."""
    pid = owner(client_port, candidates)
    assert pid is not None, f"none of {candidates} holds port {client_port}"
    while pid > 1:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if EXECUTOR_CLASS in command:
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    raise AssertionError("the connection does not belong to an executor")


def owner(client_port: int, candidates: list[int]) -> int | None:
    """Which of these processes holds the local end of a connection to us."""
    sockets = {f"socket:[{inode}]" for inode in _socket_inodes(client_port)}
    for pid in candidates if sockets else ():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if link.readlink().name in sockets:
                        return pid
    return None


def _socket_inodes(local_port: int) -> Iterator[str]:
    """Strangers may use the same port towards other servers, so there can be several."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines = Path(table).read_text().splitlines()
        for fields in map(str.split, itertools.islice(lines, 1, None)):
            if int(fields[1].rsplit(":", 1)[1], 16) == local_port and fields[9] != "0":
                yield fields[9]
