"""The unix socket between the engine's listener and the control application.

Sits below `lifecycle`. Invariants: only this user can reach the socket; its path fits into a socket address; a
killed server leaves at most one small directory per data directory, which the next start takes over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SOCKET_NAME: Final = "control.sock"
PATH_BYTES_MAX: Final = 107
BACKLOG: Final = 1024


@contextmanager
def private_socket(data_dir: str) -> Iterator[tuple[str, socket.socket]]:
    """A listening socket and its path. The caller holds the lock of `data_dir`."""
    directory = _directory(data_dir)
    path = directory / SOCKET_NAME
    path.unlink(missing_ok=True)  # of a server that was killed
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(BACKLOG)
            yield str(path), listener
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory.rmdir()


def _directory(data_dir: str) -> Path:
    """A directory for this user alone, named after the data directory so that it is found again."""
    name = hashlib.sha256(os.path.realpath(data_dir).encode("utf-8", "surrogateescape"))
    directory = _parent() / f"millstream-{os.getuid()}-{name.hexdigest()[:16]}"
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        found = directory.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not ours or found.st_mode & 0o077:  # somebody else was there first: do not go in
            return Path(mkdtemp(prefix="millstream-", dir=_parent()))
    return directory


def _parent() -> Path:
    usual = gettempdir()
    longest = len(os.fsencode(usual)) + len("/millstream-4294967295-0123456789abcdef/control.sock")
    return Path(usual if longest <= PATH_BYTES_MAX else "/tmp")  # noqa: S108 - a private one in it
