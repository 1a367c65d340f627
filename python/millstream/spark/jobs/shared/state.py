"""What jobs with state have in common: where they keep it, in how many parts, how late records may come, times and keys inside of them.

Where it sits: between `driver`, which starts the query inside `settings`, and the stateful jobs.

Invariants:
- I-STA-1  State is in RocksDB, in `PARTITIONS_PER_CORE` parts per core of the master unless the caller has said how many; a
           checkpoint keeps what it was begun with, and that is what people are told.
- I-STA-2  The session of the caller is left as it was: only the query sees the settings.
- I-STA-3  A record without a field that the job needs ends it with one clear error; it is never taken for another one.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument, SetupError
from millstream.spark.jobs.job import JobOption, seconds_of
from millstream.spark.jobs.shared.refusal import refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import Column, SparkSession

    from millstream.spark.jobs.job import Job, Request

PARTITIONS: Final = "spark.sql.shuffle.partitions"
PARTITIONS_PER_CORE: Final = 2
PROVIDER: Final = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
EVENT_TIME: Final = JobOption(
    "event-time",
    "Field with the time of a record, names joined by dots; without it, when it was accepted.",
    fixed=True,
    is_field=True,
)
LATE: Final = JobOption(
    "late",
    "How long after later ones a record may come before it is late: 0s, 10m, 1d, ...",
    "10m",
)
PROCESSORS_NEED: Final = ("pandas", "protobuf")
_LOCAL: Final = re.compile(r"local(?:\[([0-9]+|\*)(?:,[^]]*)?\])?")
_LOCAL_CLUSTER: Final = re.compile(r"local-cluster\[([0-9]+),([0-9]+),[0-9]+\]")
_ZONED: Final = r"(Z|[+-][0-9]{2}:?[0-9]{2})$"


def session_settings(job: Job, master: str, given: Mapping[str, str]) -> dict[str, str]:
    """For a session on this machine that is made for the job; the cores of others are known once it is there."""
    cores = _cores(master)
    if not job.stateful or PARTITIONS in given or cores is None:
        return {}
    return {PARTITIONS: str(PARTITIONS_PER_CORE * cores)}


def _cores(master: str) -> int | None:
    """How many a master of this machine has; None if it is another one."""
    if (workers := _LOCAL_CLUSTER.fullmatch(master)) is not None:
        return int(workers[1]) * int(workers[2])
    if (local := _LOCAL.fullmatch(master)) is None:
        return None
    return (os.cpu_count() or 1) if local[1] == "*" else int(local[1] or 1)


@contextmanager
def settings(session: SparkSession, job: Job) -> Iterator[None]:
    """A query that is started inside keeps its state as the job wants it."""
    wanted = _settings(session) if job.stateful else {}
    before = {name: session.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)


def _settings(session: SparkSession) -> dict[str, str]:
    wanted = {PROVIDER: ROCKSDB}
    context: Any = getattr(session, "_sc", None)  # a Connect session has none
    if context is not None and session.conf.get(PARTITIONS, None) is None:
        wanted[PARTITIONS] = str(PARTITIONS_PER_CORE * context.defaultParallelism)
    return wanted


def described(
    session: SparkSession, job: Job, checkpoint: Path | None, asked: str | None = None
) -> str:
    """One line for people; `checkpoint` is None if it is not on this machine, `asked` the number that the caller has given."""
    begun = None if checkpoint is None else _begun_with(checkpoint)
    if begun is not None:
        but = "" if asked in (None, begun) else f": {asked} would need a new one"
        return (
            f"state in RocksDB, {begun} shuffle partitions, as the checkpoint was begun with{but}"
        )
    with settings(session, job):
        parts = session.conf.get(PARTITIONS)
    keeps = "; the checkpoint keeps their number"
    if checkpoint is None:
        keeps = ", unless the checkpoint was begun with others"
    return f"state in RocksDB, {parts} shuffle partitions{keeps}"


def _begun_with(checkpoint: Path) -> str | None:
    """The number of parts as Spark has logged it with its newest batch; None if it has logged none."""
    batches = [path for path in (checkpoint / "offsets").glob("*") if path.name.isdigit()]
    try:
        newest = max(batches, key=lambda path: int(path.name))
        return str(
            json.loads(newest.read_text(encoding="utf-8").splitlines()[1])["conf"][PARTITIONS]
        )
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None


def some_seconds(job: Job, request: Request, name: str) -> int:
    """An option that is a duration, and not 0."""
    seconds = seconds_of(request.option(job, name))
    if seconds == 0:
        raise InvalidArgument(f"`{name}` is 0", hint="write it like 10s, 5m or 1h")
    return seconds


def lateness(job: Job, request: Request) -> str:
    """The delay of the watermark, as Spark writes it."""
    return f"{seconds_of(request.option(job, LATE.name))} seconds"


def require_processors(job: Job) -> None:
    """What `transformWithState` needs beside pyspark, here: it would say so only after Spark has started."""
    from millstream.spark.deploy.required_versions import INSTALL_HINT, installed

    for package in PROCESSORS_NEED:
        if installed(package) is None:
            raise SetupError(f"job `{job.name}` needs {package}", hint=INSTALL_HINT)


def needed(column: Column, path: str) -> Column:
    """The column; a record in which it is null ends the query."""
    from pyspark.sql import functions as f

    missing = refused(
        "field_missing",
        f"has no `{path}` that can be used",
        hint="use job `decode` first, with the field NOT NULL: such records are dead letters then",
    )
    return f.when(column.isNotNull(), column).otherwise(missing)


def key(path: str) -> Column:
    """What the source has found at `keyPath`, as text; it writes `null` as it writes the text "null", but that is no key."""
    from pyspark.sql import functions as f

    found = f.col("key").cast("string")
    return needed(f.when((found != "null") | _inside(path).isNotNull(), found), path)


def _inside(path: str) -> Column:
    """A field of a JSON record, as text."""
    from pyspark.sql import functions as f

    steps = "".join(f"['{name}']" for name in path.split("."))
    return f.get_json_object(f.col("value").cast("string"), f"${steps}")


def event_time(path: str) -> Column:
    """The time of a record: ISO 8601, in UTC where it names no zone, or milliseconds since 1970."""
    from pyspark.sql import functions as f

    if not path:
        return f.col("timestamp")
    text = _inside(path)
    zoned = f.when(text.rlike(_ZONED), text).otherwise(f.concat(text, f.lit("Z")))
    in_text = zoned.try_cast("timestamp")
    number = text.try_cast("bigint")
    found = f.when(number.isNotNull(), f.timestamp_millis(number)).otherwise(in_text)
    return needed(found.cast("string"), path).cast("timestamp")
