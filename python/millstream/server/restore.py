"""A data directory from a backup: checked byte by byte, with new epochs.

Sits beside `lifecycle`: no server runs. Everything is collected in a directory of its own inside the target. When all files
are copied and their checksums compared, the engine lives once over them: every stream begins a new epoch, so that an offset
of the server that was backed up leads to a gap and never to other bytes. Then the parts move to their places, the format
file last.

Invariants:
- I-RESTORE-1: nothing that was there is touched: the target does not exist, or is empty.
- I-RESTORE-2: without a format file no server runs: a restore that was cut off, wherever, is never served.
- I-RESTORE-3: a restore that fails or is interrupted removes what it wrote.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream import _engine
from millstream.errors import MillstreamError
from millstream.server import backup_manifest as manifest
from millstream.server.backup_manifest import FileRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    Progress = Callable[[str, int, int], bool]

_HINTS: Final = {
    "restore_refused": "name a directory that does not exist or is empty",
    "backup_incomplete": "name a directory that `millstream backup` has finished",
    "backup_damaged": "do not use this backup; take another one",
}
_PARTIAL: Final = "restore.partial"
_FORMAT_FILE: Final = "format"
_LOCK_FILE: Final = "lock"
_NOT_OURS: Final = "lost+found"
"""What a fresh file system has in its root."""
_PIECE_BYTES: Final = 1 << 20
_STOP_DEADLINE_MS: Final = 120_000
# Its log files are prewritten for this one life only.
_ONE_LIFE: Final = {"listen": False, "reactors": 1, "restored": True, "append_max_bytes": 1 << 20,
                    "wal_file_bytes": 0}  # fmt: skip


class RestoreFailed(MillstreamError):  # noqa: N818 - named by what happened
    """There is no data directory; nothing was left behind."""

    code = "restore_failed"

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail, hint=_HINTS.get(code), code=code)


def restore(backup: str, data_dir: str, progress: Progress) -> tuple[int, int]:
    """Make `data_dir` from `backup`; returns the number of files and of bytes."""
    source, target = Path(backup), Path(data_dir)
    try:
        listed = manifest.read_mark(source)
        with _claimed(target) as partial:
            copy = _Copy(source, partial, progress)
            copy.check_manifest(listed)
            for record in manifest.files(source):
                copy.file(record)
            _sync_names(partial)
            copy.look("opening")
            _begin_new_epochs(partial)
            _move_into_place(partial, target)
    except manifest.NotABackup as error:
        raise RestoreFailed("backup_incomplete", f"{backup}: {error}") from error
    except manifest.Damaged as error:
        raise RestoreFailed("backup_damaged", str(error)) from error
    except OSError as error:
        detail = f"{error.filename or data_dir}: {error.strerror}"
        raise RestoreFailed("restore_failed", detail) from error
    return copy.files, copy.done


@contextmanager
def _claimed(target: Path) -> Iterator[Path]:
    """Where the files are collected. No server may start here meanwhile, and what fails is cleared away."""
    created = not target.exists()
    if created:
        target.mkdir(mode=0o700)
    for name in os.listdir(target):
        if name != _NOT_OURS:
            raise RestoreFailed("restore_refused", f'{target} is not empty: it has "{name}"')
    with (target / _LOCK_FILE).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            detail = f"the data directory {target} is in use by another server"
            raise RestoreFailed("restore_refused", detail) from None
        try:
            partial = target / _PARTIAL
            partial.mkdir()
            yield partial
        except BaseException:
            _clear(target, whole=created)
            raise


def _clear(target: Path, *, whole: bool) -> None:
    if whole:
        shutil.rmtree(target)
        return
    for entry in target.iterdir():
        if entry.is_dir() and entry.name != _NOT_OURS:
            shutil.rmtree(entry)
        elif not entry.is_dir():
            entry.unlink()


class _Copy:
    """Files on their way."""

    def __init__(self, source: Path, partial: Path, progress: Progress) -> None:
        self._source, self._partial, self._progress = source, partial, progress
        self._total = 0
        self.files, self.done = 0, 0

    def look(self, phase: str) -> None:
        if not self._progress(phase, self.done, self._total):
            raise RestoreFailed("restore_cancelled", "it was cancelled")

    def check_manifest(self, listed: FileRecord) -> None:
        """Compare the list with the mark, and count what it lists."""
        for _ in self._checked(listed):
            self.look("checking")
        self._total = sum(record.size for record in manifest.files(self._source))

    def file(self, record: FileRecord) -> None:
        path = self._partial / record.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as out:
            for piece in self._checked(record):
                out.write(piece)
                self.done += len(piece)
                self.look("copying")
            _sync(out)
        self.files += 1

    def _checked(self, record: FileRecord) -> Iterator[bytes]:
        """The bytes of one file of the backup; its length and checksum are compared at the end."""
        try:
            opened = (self._source / record.path).open("rb")
        except OSError as error:
            detail = f"{record.path} of the backup cannot be opened: {error.strerror}"
            raise manifest.Damaged(detail) from error
        with opened:
            size = os.fstat(opened.fileno()).st_size
            if size != record.size:
                detail = f"{record.path} of the backup has {size} bytes, {record.size} were written"
                raise manifest.Damaged(detail)
            checksum = 0
            while piece := opened.read(_PIECE_BYTES):
                checksum = _engine.crc32c(piece, checksum)
                yield piece
        if checksum != record.checksum:
            raise manifest.Damaged(f"{record.path} of the backup fails its checksum")


def _sync(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(partial: Path) -> None:
    """Directories innermost first, then the mark that this is a data directory."""
    for folder, _, _ in os.walk(partial, topdown=False):
        _sync_directory(Path(folder))
    with (partial / _FORMAT_FILE).open("xb") as out:
        out.write(manifest.FORMAT)
        _sync(out)
    _sync_directory(partial)


def _begin_new_epochs(partial: Path) -> None:
    """The one life of the engine that makes every stream's next byte belong to a new epoch."""
    try:
        engine = _engine.Engine({"data_dir": str(partial), **_ONE_LIFE})
        engine.stop(_STOP_DEADLINE_MS)
    except _engine.EngineError as error:
        raise RestoreFailed("restore_failed", error.detail) from error
    if trouble := engine.status()["trouble"]:
        raise RestoreFailed("restore_failed", f"the engine ended with {trouble}")


def _move_into_place(partial: Path, target: Path) -> None:
    """Everything but the format file, then that one."""
    for entry in list(partial.iterdir()):
        if entry.name not in (_FORMAT_FILE, _LOCK_FILE):
            entry.rename(target / entry.name)
    _sync_directory(target)
    (partial / _FORMAT_FILE).rename(target / _FORMAT_FILE)
    shutil.rmtree(partial)
    _sync_directory(target)
    _sync_directory(target.resolve().parent)
