"""Job `audit`: streams against what was made of them: a lake of `land`, or a stream of `copy` or `replay`. It changes nothing.

Where it sits: a batch job, found through `jobs`. `position` says how far the target has come, `lake/contents` what is in it, `compare`
computes; the server looks at its own bytes (`verify`).

Invariants:
- I-AUD-1  The position is read first, then the list of files, then the tails: so whatever is done was there when it is looked for, and a
           run that goes on meanwhile is never taken for damage.
- I-AUD-2  What no stream has any more is counted, and its numbers are looked at; it is not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, Request, check_no_loop, flag
from millstream.spark.jobs.run.batch import BatchJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.spark.jobs.run.batch import Report
    from millstream.spark.jobs.run.position import Position

RANGE: Final = "range"
SKIP_VERIFY: Final = "skip-verify"


class Audit(BatchJob):
    """Streams against a lake or a copy."""

    name = "audit"
    summary = "streams against a lake or a copy: whether each record is there, once and unchanged"
    options: ClassVar[tuple[JobOption, ...]] = (
        JobOption(RANGE, "Records that are summed up together.", "100000"),
        flag(SKIP_VERIFY, "Leave out what `millstream verify` finds in the server's own bytes."),
    )
    to_help = "The lake or the copy to look at."
    checkpoint_help = (
        "Checkpoint of the run that made the target.  [default: the one inside of a lake]"
    )

    def check(self, request: Request, query_id: str | None) -> None:  # noqa: ARG002
        from millstream.spark.jobs.lake.contents import lake_at
        from millstream.spark.options import Options

        Options(request.source_options).for_use("batch")
        self.range_of(request)
        if request.target.path is not None:
            lake_at(request.target.path)
        elif request.checkpoint is None:
            raise InvalidArgument(
                "an audit of a copy needs its checkpoint: only that says how far it has come",
                hint="add --checkpoint DIR, with the checkpoint of the run of `copy` or `replay`",
            )
        else:
            check_no_loop(self, request)
        self.made_by(request)

    def run(self, session: SparkSession, request: Request) -> Report:
        from millstream.client.control import verified
        from millstream.spark.access import access
        from millstream.spark.jobs.audits.audit_copy import audit_copy
        from millstream.spark.jobs.audits.audit_lake import audit_lake
        from millstream.spark.jobs.job import source_options
        from millstream.spark.options import Options

        options = Options(source_options(self, request))
        seconds = options.required_number("connectTimeout") / 1000
        with access(options).connect_first() as client:
            server = None
            if not request.flag(self, SKIP_VERIFY):
                # Before anything is read: of damage that a reader has met, `verify` makes a note only.
                server = verified(client, lambda *_: None, or_running=True)
            compare = audit_copy if request.target.path is None else audit_lake
            report = compare(self, session, request, client, seconds)
        report.server = server
        return report

    def range_of(self, request: Request) -> int:
        text = request.option(self, RANGE)
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1_000_000_000):
            raise InvalidArgument(f"`{text}` is not a number of records", hint="write 100000")
        return int(text)

    def made_by(self, request: Request) -> Position | None:
        """How far the run has come that made the target; None if it has left no checkpoint there."""
        from millstream.spark.jobs.run import driver
        from millstream.spark.jobs.run.position import position

        directory = driver.local_checkpoint(request)
        if directory is None:
            raise InvalidArgument(
                f"`{request.checkpoint}` is not a directory of this machine",
                hint="copy the checkpoint here, or leave it out",
            )
        found = position(directory)
        if found is None and request.checkpoint is not None:
            raise InvalidArgument(
                f"`{directory}` is not a checkpoint",
                hint="name that of the run that made the target",
            )
        wanted = ("land",) if request.target.path is not None else ("copy", "replay")
        if found is not None and found.job is not None and found.job not in wanted:
            raise InvalidArgument(
                f"`{directory}` belongs to job `{found.job}`, which does not keep records as they are",
                hint=f"an audit is for targets of {' and '.join(f'`{name}`' for name in wanted)}",
            )
        return found
