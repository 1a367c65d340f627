"""What a backup consists of: `backup.json` lists every file, `format.backup` says that all of them are there.

The engine writes both, the latter when everything else is synced; `restore` reads them. One file stands on one line, so
that a million of them are read without holding them. What is read is exactly what is written; anything else is damage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MANIFEST_FILE: Final = "backup.json"
MARK_FILE: Final = "format.backup"
FORMAT: Final = b"millstream 1\n"
_MARK: Final = re.compile(rb"backup\.json (0|[1-9]\d*) ([0-9a-f]{8})\n")
_LINE: Final = re.compile(
    r'\{"path": "([\w./-]+)", "bytes": (0|[1-9]\d*), "crc32c": "([0-9a-f]{8})"\},?\n',
    re.ASCII,
)
_LINE_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a backup."""

    path: str
    size: int
    checksum: int


class NotABackup(Exception):  # noqa: N818 - named by what it is
    """Why this is not a backup that can be restored, in a sentence."""


class Damaged(Exception):  # noqa: N818 - named by what it is
    """What is not as it was written."""


def read_mark(backup: Path) -> FileRecord:
    """What the mark says about the manifest."""
    if not backup.is_dir():
        raise NotABackup("there is no such directory")
    try:
        with (backup / MARK_FILE).open("rb") as opened:
            mark = opened.read(256)
    except FileNotFoundError:
        text = f"there is no {MARK_FILE}: this is not a backup, or one that was not finished"
        raise NotABackup(text) from None
    if not mark.startswith(FORMAT):
        found = mark.split(b"\n")[0].decode("utf-8", "replace")
        own = FORMAT.decode().strip()
        raise NotABackup(f'{MARK_FILE} says "{found}"; this version restores "{own}"')
    parsed = _MARK.fullmatch(mark.removeprefix(FORMAT))
    if parsed is None:
        raise NotABackup(f"{MARK_FILE} is damaged")
    return FileRecord(MANIFEST_FILE, int(parsed[1]), int(parsed[2], 16))


def files(backup: Path) -> Iterator[FileRecord]:
    """Every file of a manifest whose checksum has been compared."""
    with (backup / MANIFEST_FILE).open(encoding="utf-8", errors="strict", newline="\n") as opened:
        try:
            lines = iter(lambda: opened.readline(_LINE_MAX), "")
            yield from _records(lines)
        except UnicodeDecodeError as error:
            raise _misshapen() from error


def _records(lines: Iterator[str]) -> Iterator[FileRecord]:
    if '"files": [\n' not in lines:
        raise _misshapen()
    for line in lines:
        if line == "],\n":
            return
        if line == "\n":
            continue
        parsed = _LINE.fullmatch(line)
        if parsed is None or ".." in parsed[1] or parsed[1].startswith("/"):
            raise _misshapen()
        yield FileRecord(parsed[1], int(parsed[2]), int(parsed[3], 16))
    raise _misshapen()


def _misshapen() -> Damaged:
    return Damaged(f"{MANIFEST_FILE} of the backup is not in the form this version writes")
