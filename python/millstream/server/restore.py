"""A data directory from a backup: the engine's work with the command line's errors.

Sits beside `lifecycle`: no server runs, the engine checks, copies and opens the directory once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream import _engine
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

_HINTS: Final = {
    "restore_refused": "name a directory that does not exist or is empty",
    "backup_incomplete": "name a directory that `millstream backup` has finished",
    "backup_damaged": "do not use this backup; take another one",
}


class RestoreFailed(MillstreamError):  # noqa: N818 - named by what happened
    """There is no data directory; nothing was left behind."""

    code = "restore_failed"


def restore(
    backup: str, data_dir: str, progress: Callable[[str, int, int], bool]
) -> tuple[int, int]:
    """Make `data_dir` from `backup`; returns the number of files and of bytes."""
    try:
        return _engine.restore(backup, data_dir, progress)
    except _engine.EngineError as error:
        raise RestoreFailed(error.detail, hint=_HINTS.get(error.code), code=error.code) from error
