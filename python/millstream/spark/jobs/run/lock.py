"""One run at a time on a checkpoint: a lock that the kernel gives up when its holder dies.

Where it sits: taken by `driver` before a session is started.
Invariant I-LCK-1: the lock is held by `flock`, not by the file's existence: after `kill -9` the next
run takes it at once, and the process id in the file is only told to people.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.errors import CheckpointBusy

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = ".millstream.lock"


@contextmanager
def locked(checkpoint: Path, what: str = "checkpoint") -> Iterator[None]:
    """Hold the checkpoint, or another directory of one run at a time; raises `CheckpointBusy` with the holder's process id."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(checkpoint / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise CheckpointBusy(
                f"{what} `{checkpoint}` is in use by process {holder}",
                hint=f"wait for that run, stop it with Ctrl-C, or choose another {what}",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
