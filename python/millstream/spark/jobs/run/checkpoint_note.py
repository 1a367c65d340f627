"""The note in a checkpoint: which job it belongs to, where that writes, and what must not change.

    CHECKPOINT/.millstream.json
    {"v": 1, "job": "land", "target": "/data/lake", "fixed": {"partition-by": "date", "valueFormat": "raw", ...}}

Where it sits: compared by `driver.check` before a session is started, written by `driver.hold` under the lock.
A checkpoint only says how far its query has read. Under another job or target, Spark would go on there: nothing of
what was read before would arrive, and the run would say that all is done.

A checkpoint that has no note, because it is older than notes, is taken as it is and gets one: to refuse it would
stop every job at an upgrade, and what it belongs to cannot be told from it.

Invariants:
- I-NOT-1  The note is there, synced, before the first batch is planned, and is never changed after that.
- I-NOT-2  As long as no batch is planned it binds nobody: a first run with a wrong option may be put right.
- I-NOT-3  What it does not name has its default: an option that a later version adds binds from then on.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.errors import InvalidArgument, PipelineError
from millstream.spark.jobs.job import STREAM_PREFIX
from millstream.spark.jobs.lake.files import sync_directories
from millstream.spark.jobs.lake.layout import S3, root_of
from millstream.spark.options import TABLE, Options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.spark.jobs.job import Job, Request

NAME: Final = ".millstream.json"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Note:
    job: str
    target: str
    """A stream, or a directory: relative to the checkpoint if that is inside it, so that it may be moved."""
    fixed: Mapping[str, str]
    """Options of job and source that need a new checkpoint: what each of them is, given or not."""


def check(checkpoint: Path, job: Job, request: Request) -> Note | None:
    """Refuse a checkpoint of something else; returns the note that it has yet to get."""
    wanted = _wanted(checkpoint, job, request)
    found = read(checkpoint / NAME) if is_planned(checkpoint) else None
    if found is None:
        return wanted
    defaults = _wanted(checkpoint, job, replace(request, options={}, source_options={})).fixed
    _same(checkpoint, "job", found.job, wanted.job)
    _same(checkpoint, "target", *(_shown(checkpoint, note) for note in (found, wanted)))
    for name, value in wanted.fixed.items():
        _same(checkpoint, f"option `{name}`", found.fixed.get(name, defaults[name]), value)
    return None


def keep(checkpoint: Path, job: Job, request: Request) -> None:
    """Check the note, or write it."""
    note = check(checkpoint, job, request)
    if note is None:
        return
    document = {"v": VERSION, "job": note.job, "target": note.target, "fixed": note.fixed}
    checkpoint.mkdir(parents=True, exist_ok=True)
    draft = checkpoint / f"{NAME}.{uuid.uuid4().hex}.tmp"
    with draft.open("x", encoding="utf-8") as stream:
        json.dump(document, stream, ensure_ascii=False, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(checkpoint / NAME)
    sync_directories({checkpoint}, checkpoint)


def _wanted(checkpoint: Path, job: Job, request: Request) -> Note:
    source = Options(request.source_options).for_use("stream")
    fixed = {
        option.name: source.plain(option)
        for option in TABLE
        if option.change == "new" and "stream" in option.use
    }
    for option in job.options:
        if option.fixed:
            fixed[option.name] = request.option(job, option.name)
    target = str(request.target)
    if request.target.path is not None:
        scheme, root = root_of(request.target.path)
        inside = not scheme and checkpoint.absolute().is_relative_to(root)
        target = os.path.relpath(root, checkpoint.absolute()) if inside else str(root)
        target = f"{scheme}://{target}" if scheme else target
    return Note(job.name, target, fixed)


def _shown(checkpoint: Path, note: Note) -> str:
    if note.target.startswith((STREAM_PREFIX, f"{S3}://")):
        return note.target
    return os.path.normpath(checkpoint.absolute() / note.target)


def is_planned(checkpoint: Path) -> bool:
    """Whether Spark has logged a batch."""
    try:
        return any(entry.name.isdigit() for entry in (checkpoint / "offsets").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def read(path: Path) -> Note | None:
    """The note in this file; `None` if there is none."""
    try:
        document = json.loads(path.read_bytes())
        if document["v"] != VERSION:
            raise ValueError(f"version {document['v']}")
        return Note(str(document["job"]), str(document["target"]), dict(document["fixed"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"`{path}` is not a note that this version can read: {error}",
            hint="was it written by a newer Millstream, or changed by hand?",
        ) from error


def _same(checkpoint: Path, what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise InvalidArgument(
            f"checkpoint `{checkpoint}` belongs to a run with {what} `{found}`, not `{wanted}`",
            hint="go on with what it was begun with, or name another --checkpoint and another target",
        )
