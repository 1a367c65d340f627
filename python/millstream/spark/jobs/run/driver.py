"""One run of a job: checks, lock, query, progress, end. The same code for `--once` and `--every`.

Where it sits: between the commands (`cli/pipeline.py`, `jobs/__main__.py`), which make the session and
show the progress, and the jobs.

Invariants:
- I-DRV-1  A checkpoint on this machine is locked for as long as its query runs, and says whose it is (`checkpoint_note`).
- I-DRV-2  The trigger is the only difference between a run that ends and one that goes on.
- I-DRV-3  A query that failed ends the run with the connector's own error if there is one, never with a
           Java stack trace alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.spark.jobs.job import (
    Job,
    QueryJob,
    Request,
    check_options,
    read_streams,
    selection,
    source_options,
)
from millstream.spark.jobs.lake.layout import HIDDEN, root_of
from millstream.spark.jobs.run import checkpoint_note, left_open, left_out
from millstream.spark.jobs.run.batch import BatchJob
from millstream.spark.jobs.run.lock import locked
from millstream.spark.jobs.shared.state import settings
from millstream.spark.jobs.shared.streams import check_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from millstream.spark.jobs.run.batch import Report

_CREDENTIALS_HINT: Final = (
    "say where the token is: --option tokenEnv=NAME for a variable, --option tokenFile=PATH for a file; "
    "driver and executors need it"
)
POLL_SECONDS: Final = 0.2
JVM_END_SECONDS: Final = 10.0
_REMOTE: Final = re.compile(r"^(?!file:)[a-zA-Z][a-zA-Z0-9+.-]+:")
_CLEAR: Final = re.compile(
    r"(?:Error: |\[USER_RAISED_EXCEPTION\] )([a-z][a-z0-9_]{2,63}): (.+?)\.(?: Hint: (.+?)\.)?"
    r"(?: SQLSTATE: \w+)*$",
    re.MULTILINE,
)
"""How an error of the connector or of the lake ends its Python traceback, or one of a job its line of Spark."""
_RAISED: Final = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?=(?:[\w.]+\.)?(\S.*)$)",
    re.MULTILINE,
)
"""The line of a Python traceback that says what was raised; the next traceback may begin in that line."""
_LAST_LINE: Final = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception): .+)$", re.MULTILINE)

_KINDS: Final[dict[str, type[errors.MillstreamError]]] = {
    kind.code: kind
    for kind in (
        errors.CheckpointBusy,
        errors.ConnectionFailed,
        errors.InvalidArgument,
        errors.RequestTimeout,
        errors.SetupError,
    )
}
"""Codes of errors that no server sends; the others are in `errors.CODES`."""


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that was done."""

    batch: int
    rows: int
    seconds: float
    progress: Any
    """Spark's own report, for the lag."""


@dataclass(frozen=True, slots=True)
class State:
    """What a job with state remembers at the end, and what it had to leave out on the way."""

    open: int
    late: int
    what: str = "keys"

    def __str__(self) -> str:
        return (
            f"{self.open:,} {self.what} stay open, {self.late:,} rows came late and were left out"
        )


@dataclass(slots=True)
class Summary:
    """What a run has done."""

    batches: int = 0
    rows: int = 0
    seconds: float = 0.0
    state: State | None = None
    """Of a job that has one."""
    left_out: int = 0
    """Records that the job was told to leave out."""


def check(job: Job, request: Request, *, every_seconds: float | None = None) -> None:
    """Everything that can be refused before a JVM is started."""
    check_options(job, request)
    if isinstance(job, BatchJob):
        job.check_once(request, every_seconds)
        job.check(request, None)
        return
    selection(request.streams)
    check_source(job, request)
    named = request.checkpoint or request.target.path
    directory = local_checkpoint(request) if named else None
    if directory is not None:
        checkpoint_note.check(directory, job, request)
    job.check(request, None if directory is None else query_id(directory))
    checkpoint_of(request)


def check_source(job: Job, request: Request) -> None:
    """The options of the source, as far as they say what is read; where it is read is for `reach`."""
    from millstream.spark.options import Options
    from millstream.spark.read.columns import layout

    layout(Options(source_options(job, request)).for_use("stream"))


def reach(job: Job, request: Request) -> None:
    """A server or a stream that is missing is told now: before a JVM is started, and nothing is written."""
    from millstream.client.sync.reads import PipelineReads
    from millstream.spark.access import access
    from millstream.spark.options import Options
    from millstream.spark.read.selection import selection as chosen

    if isinstance(job, BatchJob) and not job.reads_streams:
        return
    options = Options(source_options(job, request))
    try:
        with access(options).connect_first() as client:
            streams = chosen(options)
            seconds = options.required_number("connectTimeout") / 1000
            tails = streams.ask(PipelineReads(client, seconds), walk=True)
            if job.runs_once:  # it says itself what became of a stream
                return
            there = streams.all_there(tails)
            directory = local_checkpoint(request)
            if directory is None or not checkpoint_note.is_planned(directory):
                job.check_tails(request, there)
            check_targets(client, job, request, seconds)
    except errors.Unauthorized as error:
        raise error.reworded(hint=_CREDENTIALS_HINT) from None


def is_connect(session: Any) -> bool:
    """Whether the driver is a Connect server, elsewhere perhaps."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def checkpoint_of(request: Request) -> str:
    """A lake keeps its own checkpoint, unless the caller names one; a stream cannot."""
    if request.checkpoint:
        return request.checkpoint
    if request.target.path is None:
        raise errors.InvalidArgument(
            "a stream as target needs a checkpoint", hint="add --checkpoint DIR"
        )
    scheme, root = root_of(request.target.path)
    if scheme:
        raise errors.InvalidArgument(
            "a lake on an object store needs a checkpoint elsewhere",
            hint="add --checkpoint DIR, a directory that stays",
        )
    return str(root / HIDDEN / "checkpoint")


def is_elsewhere(checkpoint: str) -> bool:
    """True if it is not a directory of this machine's file system."""
    return _REMOTE.match(checkpoint) is not None


def absolute(checkpoint: str) -> str:
    """A directory here, for a JVM that was started in another one."""
    return (
        checkpoint
        if is_elsewhere(checkpoint)
        else os.path.abspath(checkpoint.removeprefix("file://"))
    )


def local_checkpoint(request: Request) -> Path | None:
    """The checkpoint as a directory of this machine; `None` if it is elsewhere."""
    checkpoint = checkpoint_of(request)
    return None if is_elsewhere(checkpoint) else Path(checkpoint.removeprefix("file://"))


def query_id(checkpoint: Path) -> str | None:
    """The query that a checkpoint belongs to; `None` if it is new."""
    try:
        return str(json.loads((checkpoint / "metadata").read_bytes())["id"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise errors.PipelineError(
            f"`{checkpoint}` is not a checkpoint: {error}", hint="name another --checkpoint"
        ) from error


@contextmanager
def hold(job: Job, request: Request) -> Iterator[None]:
    """Lock a checkpoint of this machine, and note in it whose it is; another one is left to Spark's own check."""
    directory = None if job.runs_once else local_checkpoint(request)
    if directory is None:
        yield
        return
    with locked(directory):
        checkpoint_note.keep(directory, job, request)
        yield


def start(
    job: QueryJob,
    request: Request,
    session: SparkSession,
    *,
    every_seconds: float | None = None,
    source: DataFrame | None = None,
) -> Any:
    """Start the query of a job; `source` replaces the streams, for records from elsewhere."""
    with plainly(), settings(session, job):
        return _start(job, request, session, every_seconds, source)


def _start(
    job: QueryJob,
    request: Request,
    session: SparkSession,
    every_seconds: float | None,
    source: DataFrame | None,
) -> Any:
    directory = local_checkpoint(request)
    if directory is not None and not is_connect(session):
        checkpoint_note.keep(directory, job, request)  # for programs that do without `hold`
    records = read_streams(session, job, request) if source is None else source
    writer = job.write(records, request)
    writer = writer.option("checkpointLocation", checkpoint_of(request)).queryName(
        query_name(job, request)
    )
    if every_seconds is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(
            processingTime=f"{max(1, round(every_seconds * 1000))} milliseconds"
        )
    return writer.start()


def run(job: BatchJob, request: Request, session: SparkSession) -> Report:
    """Do a batch job, from its beginning to its end."""
    with plainly():
        return job.run(session, request)


def query_name(job: Job, request: Request) -> str:
    """No two queries of a session may share a name; no two that run share a checkpoint."""
    own = f" ({request.checkpoint})" if request.checkpoint else ""
    return f"millstream-{job.name} {request.target}{own}"


def watch(
    query: Any,
    on_step: Callable[[Step], None],
    on_poll: Callable[[], None] | None = None,
    *,
    remembers: str = Job.remembers,
    checkpoint: Path | None = None,
) -> Summary:
    """Report each batch until the query ends; raises what it failed with.

    `on_poll` is called several times a second, for whoever holds something back; `remembers` is what the job says of its state,
    `checkpoint` where a run that finds nothing new looks what the last one left open.
    """
    began = time.monotonic()
    summary = Summary()
    seen = -1
    while True:
        with plainly():
            ended = query.awaitTermination(POLL_SECONDS)
        for step in _news(query, seen):
            seen = step.batch
            if step.rows:
                summary.batches += 1
                summary.rows += step.rows
            summary.state = _state(step.progress, summary.state, remembers)
            if checkpoint is not None and summary.state is not None:
                left_open.keep(checkpoint, step.batch, summary.state.open)
            on_step(step)
        summary.seconds = time.monotonic() - began
        summary.left_out += left_out.taken(str(query.id))
        if on_poll is not None:
            on_poll()
        if ended:
            if checkpoint is not None and summary.state is None:
                before = left_open.kept(checkpoint)
                summary.state = None if before is None else State(before, 0, remembers)
            return summary


def _news(query: Any, seen: int) -> Iterator[Step]:
    last = query.lastProgress
    if last is None or last["batchId"] <= seen:
        return
    reports = [last] if last["batchId"] == seen + 1 else query.recentProgress
    for report in reports:
        # A trigger without data reports the number of the batch that it did not run.
        if report["batchId"] > seen and "addBatch" in (report["durationMs"] or {}):
            seen = report["batchId"]
            yield _step(report)


def _state(report: Any, before: State | None, what: str) -> State | None:
    operators = report["stateOperators"] or []
    if not operators:
        return before
    late = sum(operator["numRowsDroppedByWatermark"] or 0 for operator in operators)
    total = sum(operator["numRowsTotal"] or 0 for operator in operators)
    return State(total, late + (before.late if before else 0), what)


def _step(report: Any) -> Step:
    written = report["sink"]["numOutputRows"]
    rows = written if isinstance(written, int) and written >= 0 else report["numInputRows"]
    milliseconds = (report["durationMs"] or {}).get("triggerExecution", 0)
    return Step(report["batchId"], int(rows or 0), milliseconds / 1000, report)


@contextmanager
def running(query: Any) -> Iterator[None]:
    """End the query however the block ends; a batch that is cut off is run again next time."""
    try:
        yield
    finally:
        if query.isActive:
            query.stop()


@contextmanager
def closing(session: SparkSession) -> Iterator[None]:
    """End the session and, if this process started one, its JVM; returns when the JVM is gone."""
    try:
        yield
    finally:
        session.stop()
        from pyspark import SparkContext

        gateway: Any = SparkContext._gateway
        if gateway is not None and gateway.proc is not None:  # else spark-submit's JVM started us
            gateway.shutdown()
            SparkContext._gateway = None
            SparkContext._jvm = None
            process = gateway.proc
            process.stdin.close()  # the JVM lives as long as its input
            try:
                process.wait(JVM_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(JVM_END_SECONDS)


@contextmanager
def plainly() -> Iterator[None]:
    """Errors of Spark leave the block as one sentence (I-DRV-3)."""
    try:
        yield
    except Exception as error:
        failure = plain_error(error)
        if failure is None:
            raise
        raise failure from error


def plain_error(error: BaseException) -> errors.MillstreamError | None:
    """The error that stopped a query, as one sentence; `None` if it is not Spark's."""
    if not type(error).__module__.startswith(("pyspark.", "py4j.")):
        return None
    text = str(error)
    clear = _CLEAR.search(text)
    if clear is not None:
        code, message, hint = clear.groups()
        kind = _KINDS.get(code) or errors.CODES.get(code, errors.PipelineError)
        return kind(message, code=code, hint=hint)
    lines = _RAISED.findall(text) or _LAST_LINE.findall(text) or text.splitlines()[:1] or [""]
    message = lines[-1].strip()
    return errors.PipelineError(f"the query failed: {message}", code="query_failed")
