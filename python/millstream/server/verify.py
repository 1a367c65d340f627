"""Verification of a stopped server's directory: the engine's work with the command line's errors.

Sits beside `lifecycle`: no server runs, the engine locks the directory while it looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream import _engine
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream._engine import VerifyReport

_HINTS: Final = {
    "directory_locked": (
        "a server is running on it: verify it with `millstream verify --url URL`; "
        "to repair it, stop the server first"
    ),
    "catalog_damaged": "keep a copy, and restore a backup of the whole directory",
}


class VerifyFailed(MillstreamError):  # noqa: N818 - named by what happened
    """The directory could not be looked at; nothing was changed."""

    code = "verify_failed"


def verify(data_dir: str, *, repair: bool, progress: Callable[[int, int], bool]) -> VerifyReport:
    """What is wrong with `data_dir`; with `repair` it is repaired if it has to be."""
    try:
        return _engine.verify(data_dir, repair, progress)
    except _engine.EngineError as error:
        raise VerifyFailed(error.detail, hint=_HINTS.get(error.code), code=error.code) from error
