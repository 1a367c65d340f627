"""How far a run has come: what its checkpoint says is done, read without Spark.

    CHECKPOINT/commits/7        batch 7 is done
    CHECKPOINT/offsets/7        where it ended: a line of Spark's own, and the offset of the source as JSON

Where it sits: below `audit`, which tells what is still to come from what is missing.
Invariant I-POS-1: what is told is done. A batch that is planned or half published is not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.errors import MillstreamError, PipelineError
from millstream.spark.jobs.run import checkpoint_note
from millstream.spark.read import offsets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from millstream.spark.read.offsets import Entry


@dataclass(frozen=True, slots=True)
class Position:
    """What one checkpoint says."""

    job: str | None = None
    """None: it is older than notes."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """The options that belong to the checkpoint."""
    streams: Mapping[str, Entry] = field(default_factory=dict)
    """The next record of each stream, and the incarnation that it is a record of."""


def position(checkpoint: Path) -> Position | None:
    """None if no run has begun with it."""
    if not (checkpoint / "metadata").is_file():
        return None
    said = checkpoint_note.read(checkpoint / checkpoint_note.NAME)
    job, fixed = (None, {}) if said is None else (said.job, said.fixed)
    done = [int(path.name) for path in (checkpoint / "commits").glob("*") if path.name.isdigit()]
    if not done:
        return Position(job, fixed)
    path = checkpoint / "offsets" / str(max(done))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = offsets.checked(json.loads(lines[2]))
    except (OSError, ValueError, IndexError, MillstreamError) as error:
        raise PipelineError(
            f"`{path}` does not say where streams were read to: {error}",
            hint="name the checkpoint of a run that has read streams of Millstream",
        ) from error
    return Position(job, fixed, found["streams"])
