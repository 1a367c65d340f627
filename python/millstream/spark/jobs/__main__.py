"""Runs a job inside a Spark application: what `spark-submit` starts on a cluster.

    spark-submit ... run_job.py land --url URL --from NAME --to PATH --checkpoint DIR [--every 10s]
    python -m millstream.spark.jobs land ...

Where it sits: beside `cli/pipeline.py`, which does the same for a person at a terminal; here are only
the standard library and pyspark, and the master and all settings come from `spark-submit`.
Invariant I-JMN-1: it takes the same names and values as `millstream pipeline run`.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from millstream.errors import InvalidArgument, MillstreamError
from millstream.spark.jobs import JOBS, find
from millstream.spark.jobs.job import Request, seconds_of
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.shared import state
from millstream.spark.observe.lag import lag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.spark.jobs.run.batch import Report
    from millstream.spark.jobs.run.driver import Step


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="millstream.spark.jobs", description="Run a job.")
    names = found.add_subparsers(dest="job", required=True)
    for job in JOBS.values():
        command = names.add_parser(job.name, help=job.summary, allow_abbrev=False)
        command.add_argument("--url", required=True, help="server that has the streams")
        command.add_argument("--from", dest="streams", action="append", required=True)
        command.add_argument("--to", dest="target")
        command.add_argument("--checkpoint")
        command.add_argument("--every", help="10s, 5m, ...; without it the run ends at the tail")
        command.add_argument("--once", action="store_true", help="the default")
        command.add_argument("--max-rows", type=int)
        command.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
        for option in job.options:
            kind: dict[str, Any] = (
                {"action": "store_const", "const": "yes"} if option.is_flag else {}
            )
            command.add_argument(f"--{option.name}", dest=f"job_{option.name}", **kind)
    return found


def request_of(given: argparse.Namespace) -> Request:
    options = {
        name.removeprefix("job_"): value
        for name, value in vars(given).items()
        if name.startswith("job_") and value is not None
    }
    pairs = {}
    for text in given.option:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"`{text}` is not NAME=VALUE")
        pairs[name] = value
    return Request(
        url=given.url,
        streams=tuple(given.streams),
        target=find(given.job).target(tuple(given.streams), given.target),
        options=options,
        source_options=pairs,
        rows_per_batch=given.max_rows,
        checkpoint=given.checkpoint,
    )


def run(arguments: Sequence[str] | None = None) -> bool:
    given = parser().parse_args(arguments)
    job, request = find(given.job), request_of(given)
    pause = None if given.once or given.every is None else float(seconds_of(given.every))
    driver.check(job, request, every_seconds=pause)
    driver.reach(job, request)
    from pyspark.sql import SparkSession

    with driver.hold(job, request):
        session = SparkSession.builder.appName(f"millstream {job.name}").getOrCreate()
        with driver.closing(session):
            if job.runs_once:
                report: Report = job.begin(request, session, None)
                print("\n".join(report.lines()))
                return report.ok
            checkpoint = driver.local_checkpoint(request)
            if job.stateful:
                asked: Any = session.conf.get(state.PARTITIONS, None)
                print(state.described(session, job, checkpoint, asked), file=sys.stderr)
            query = job.begin(request, session, pause)
            with driver.running(query):
                summary = driver.watch(query, _tell, remembers=job.remembers, checkpoint=checkpoint)
    print(f"done: {summary.rows} rows in {summary.batches} batches", file=sys.stderr)
    if summary.state is not None:
        print(summary.state, file=sys.stderr)
    if summary.left_out:
        print(f"{summary.left_out} records were left out", file=sys.stderr)
    return True


def _tell(step: Step) -> None:
    behind = lag(step.progress).records
    print(
        f"batch {step.batch}: {step.rows} rows in {step.seconds:.1f} s, "
        f"{behind} records behind the tail",
        file=sys.stderr,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job; 0 if it was done, 1 with one sentence on stderr if not, or if an audit found differences."""
    try:
        return 0 if run(arguments) else 1
    except MillstreamError as error:
        print(f"error: {error.code}: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
