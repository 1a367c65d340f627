"""What a run with state left open, for the next one: Spark says nothing of the state until a batch runs.

    CHECKPOINT/.millstream.open     {"batch": 7, "open": 12}

Where it sits: written and read by `driver.watch`.
Invariant I-OPN-1: what is told is of the newest batch that is done; after batches that nobody watched nothing is told.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = ".millstream.open"


def keep(checkpoint: Path, batch: int, rows: int) -> None:
    """After a batch; a checkpoint that is not on this machine is left alone."""
    if _newest(checkpoint) is None:
        return
    draft = checkpoint / f"{NAME}.{os.getpid()}.tmp"
    with suppress(OSError):  # no run fails by it
        draft.write_text(json.dumps({"batch": batch, "open": rows}))
        draft.replace(checkpoint / NAME)


def kept(checkpoint: Path) -> int | None:
    """The rows of the state after the newest batch; None if nobody knows."""
    try:
        said = json.loads((checkpoint / NAME).read_bytes())
        return int(said["open"]) if said["batch"] == _newest(checkpoint) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _newest(checkpoint: Path) -> int | None:
    names = [path.name for path in (checkpoint / "commits").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=None)
