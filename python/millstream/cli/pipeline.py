"""`millstream pipeline`: what jobs there are, and running one of them here.

Where it sits: turns the command line into a `Request`, makes the session and shows the progress; the
run itself is `millstream.spark.jobs.run.driver`. Spark is imported only when a job is run.

Invariants:
- I-PIP-1  What can be refused is refused before a JVM is started, and nothing is written then.
- I-PIP-2  When the command has ended, by success, failure, Ctrl-C or SIGTERM, no process of it is left.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.cli.context import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_TERMINATED,
    App,
    client_options,
    complete_stream,
    duration_seconds,
)
from millstream.cli.interrupts import Interrupts, Terminated
from millstream.cli.pipeline_progress import Display
from millstream.cli.processes import none_left
from millstream.cli.render import harmless

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.spark.jobs.job import Job, JobOption, Request
    from millstream.spark.jobs.run.batch import BatchJob, Report

LOG_NAME: Final = "driver.log"
POLL_SECONDS: Final = 0.2
LOOPBACK: Final = ("sc://127.0.0.1", "sc://localhost", "sc://[::1]", "local")

EPILOG: Final = """\b
Examples:
  millstream pipeline run land --from orders --to lake
      what is in `orders` now, then end; run it again and only what is new is added
  millstream pipeline run land --from 'chat/**' --to lake --every 10s
      all streams below chat/, also those to come, until Ctrl-C
  millstream pipeline run land --from orders --to table --table delta
      a Delta table: the same files, and a commit per batch
  millstream pipeline run copy --from 'orders/*' --to stream:all-orders --checkpoint cp
      several streams merged into one
  millstream pipeline run decode --from orders --to lake --schema 'id BIGINT, price DOUBLE' \\
      --dead-letters orders-dead --create
      typed columns; records that do not fit go to a stream of their own
\b
A glob: `*` stands for text within a segment, `**` for any number of segments.
\b
The checkpoint remembers what was done: with the same checkpoint a run goes on where the last one
ended, also after kill -9, and every record arrives exactly once. It is below the target directory
unless --checkpoint names another place; only one run can use it at a time.
\b
Exit codes: 0 done, or SIGTERM came and `--every` was given; 1 the job failed, or `audit` found
differences; 2 the command line or an option is wrong; 3 a stream is missing; 4 the checkpoint is in
use; 5 the server cannot be reached; 130 interrupted by Ctrl-C; 143 SIGTERM came before it was done.
"""


@click.group()
def pipeline() -> None:
    """Move streams with Spark: into a lake, a table, another stream.

    Needs the extra [spark] and Java 17 or newer; `millstream doctor` says what is missing.
    """


@pipeline.command("list")
@client_options
@click.pass_obj
def list_jobs(app: App) -> None:
    """List the jobs and their options."""
    from millstream.spark.jobs import JOBS

    for job in JOBS.values():
        if app.json:
            app.result(
                {
                    "name": job.name,
                    "summary": job.summary,
                    "options": [
                        {
                            "name": option.name,
                            "help": option.help,
                            "default": option.default,
                            "choices": list(option.choices),
                            "required": option.required,
                        }
                        for option in job.options
                    ],
                }
            )
            continue
        click.echo(f"{job.name:<13}{job.summary}")
        for option in job.options:
            several = option.choices and not option.is_flag
            choices = f" ({', '.join(option.choices)})" if several else ""
            click.echo(f"               --{option.name}  {option.help}{choices}")


def _pair(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"`{value}` is not NAME=VALUE", param=parameter)
        pairs[name] = text
    return pairs


def batch_options(job: BatchJob) -> list[click.Parameter]:
    """What a batch job is told; the flags of queries are known, so that they are refused in words."""
    where = "NAME|GLOB" if job.reads_streams else "PATH"
    found: list[click.Parameter] = [
        click.Option(
            ["--from", "streams"], metavar=where, multiple=True, required=True, help=job.from_help
        ),
        click.Option(
            ["--to", "target"],
            metavar="PATH|stream:NAME" if job.reads_streams else "PATH",
            required=job.to_required,
            help=job.to_help,
        ),
        click.Option(
            ["--checkpoint"],
            metavar="DIR",
            help=job.checkpoint_help,
            hidden=not job.checkpoint_help,
        ),
    ]
    return [
        *found,
        click.Option(["--every"], hidden=True),
        click.Option(["--once"], is_flag=True, hidden=True),
        click.Option(["--max-rows"], type=int, hidden=True),
    ]


def shared_options() -> list[click.Parameter]:
    """What every other job is told, in the order of the help."""
    return [
        click.Option(
            ["--from", "streams"],
            metavar="NAME|GLOB",
            multiple=True,
            required=True,
            shell_complete=complete_stream,
            help="Stream or glob to read; may be given several times.",
        ),
        click.Option(
            ["--to", "target"], metavar="PATH|stream:NAME", required=True, help="Where to write."
        ),
        click.Option(
            ["--checkpoint"], metavar="DIR", help="Where the run remembers what it has done."
        ),
        click.Option(
            ["--once"], is_flag=True, help="Process what is there now, then exit (the default)."
        ),
        click.Option(
            ["--every"], metavar="TIME", help="Keep running, with a batch every 10s, 5m, ..."
        ),
        click.Option(
            ["--max-rows"],
            type=click.IntRange(min=1),
            metavar="N",
            help="At most N records per batch.",
        ),
    ]


def spark_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--option", "source_options"],
            metavar="NAME=VALUE",
            multiple=True,
            callback=_pair,
            help="Option of the source, as in Spark.",
        ),
        click.Option(
            ["--conf"],
            metavar="NAME=VALUE",
            multiple=True,
            callback=_pair,
            help="Setting of Spark.",
        ),
    ]


def job_option(option: JobOption) -> click.Option:
    """The flag of an option of a job."""
    name = f"job_{option.name.replace('-', '_')}"
    if option.is_flag:
        return click.Option([f"--{option.name}", name], is_flag=True, help=option.help)
    default = f"  [default: {option.default}]" if option.default else ""
    return click.Option(
        [f"--{option.name}", name],
        type=click.Choice(option.choices) if option.choices else str,
        required=option.required,
        help=option.help + default,
    )


class JobCommands(click.Group):
    """A command for each job, made from it when it is asked for."""

    def __init__(self, make: Callable[[Job], click.Command], **given: Any) -> None:
        super().__init__(**given)
        self._make = make

    def list_commands(self, _: click.Context) -> list[str]:
        from millstream.spark.jobs import JOBS

        return list(JOBS)

    def get_command(self, _: click.Context, name: str) -> click.Command:
        from millstream.spark.jobs import find

        return self._make(find(name))


def job_command(
    job: Job, callback: Callable[..., int], own: list[click.Parameter]
) -> click.Command:
    """A job as a command; `own` are the options of the way in which it is run."""
    from millstream.spark.jobs.run.batch import BatchJob

    options = [job_option(option) for option in job.options]
    shared = batch_options(job) if isinstance(job, BatchJob) else shared_options()
    command = click.Command(
        job.name,
        callback=partial(callback, job),
        params=[*shared, *options, *spark_options(), *own],
        help=job.summary[:1].upper() + job.summary[1:] + ".",
    )
    return client_options(command)


def _run_command(job: Job) -> click.Command:
    log = f"millstream-{job.name}.log" if job.runs_once else "in the checkpoint"
    own: list[click.Parameter] = [
        click.Option(["--master"], metavar="URL", help="Spark master.  [default: local[*]]"),
        click.Option(
            ["--remote"], metavar="sc://HOST:PORT", help="Spark Connect server to run on."
        ),
        click.Option(
            ["--log-file"],
            metavar="FILE",
            help=f"Where Spark's log goes.  [default: {log}]",
        ),
    ]
    return job_command(job, _run_here, own)


def _run_here(job: Job, /, **given: Any) -> int:
    from millstream.spark.jobs.run import driver

    app = click.get_current_context().ensure_object(App)
    request = request_of(app, job, given)
    every_seconds = interval_of(given)
    driver.check(job, request, every_seconds=every_seconds)
    if _is_here(given["remote"]):
        driver.reach(job, request)
    interrupts = Interrupts()
    try:
        with interrupts.taken(), _hold(job, request, given["remote"]), none_left():
            return _run(app, job, request, given, every_seconds, interrupts)
    except Terminated:
        # The usual end of a run that goes on; for one that ends by itself, it is not done.
        return EXIT_TERMINATED if every_seconds is None else EXIT_OK


pipeline.add_command(
    JobCommands(
        _run_command,
        name="run",
        help="Run a job here: `millstream pipeline run JOB --help` shows its options.",
        epilog=EPILOG,
    )
)


def request_of(app: App, job: Job, given: dict[str, Any]) -> Request:
    from millstream.settings import client_url
    from millstream.spark.jobs.job import Request

    if given["master"] and given["remote"]:
        raise click.UsageError("choose --master or --remote")
    options = {
        name[len("job_") :].replace("_", "-"): "yes" if value is True else value
        for name, value in given.items()
        if name.startswith("job_") and value is not None and value is not False
    }
    return Request(
        url=client_url(app.url),
        streams=tuple(given["streams"]),
        target=job.target(tuple(given["streams"]), given["target"]),
        options=options,
        source_options=given["source_options"],
        rows_per_batch=given["max_rows"],
        checkpoint=given["checkpoint"],
    )


def interval_of(given: dict[str, Any]) -> float | None:
    if given["every"] is None:
        return None
    if given["once"]:
        raise click.UsageError("choose --once or --every")
    return float(duration_seconds(given["every"]))


def _hold(job: Job, request: Request, remote: str | None) -> Any:
    """The lock is a file: it means something only where the checkpoint's directory is ours."""
    from contextlib import nullcontext

    from millstream.spark.jobs.run import driver

    return driver.hold(job, request) if _is_here(remote) else nullcontext()


def _is_here(remote: str | None) -> bool:
    """Whether the driver runs on this machine: what it reaches and writes is what we do."""
    return remote is None or remote.startswith(LOOPBACK)


def _log_file(job: Job, request: Request) -> Path:
    from millstream.spark.jobs.run import driver

    checkpoint = "" if job.runs_once else driver.checkpoint_of(request)
    if job.runs_once or driver.is_elsewhere(checkpoint):
        return Path(f"millstream-{job.name}.log")
    return Path(checkpoint.removeprefix("file://")) / LOG_NAME


def _run(
    app: App,
    job: Job,
    request: Request,
    given: dict[str, Any],
    every_seconds: float | None,
    interrupts: Interrupts,
) -> int:
    from millstream.spark.jobs.run import driver
    from millstream.spark.jobs.shared.state import PARTITIONS, described, session_settings
    from millstream.spark.session import DEFAULT_MASTER, build_session

    display = Display(app, sys.stderr)
    conf: dict[str, str] = given["conf"]
    where = given["remote"] or given["master"] or DEFAULT_MASTER
    here = not job.runs_once and _is_here(given["remote"])
    checkpoint = driver.local_checkpoint(request) if here else None
    log_file = None
    if given["remote"] is None:
        log_file = Path(given["log_file"] or _log_file(job, request))
        display.say(f"Spark's log: {log_file}")
    display.say("starting Spark ...")
    try:
        session = build_session(
            f"millstream {job.name}",
            master=given["master"],
            remote=given["remote"],
            conf={**session_settings(job, where, conf), **conf},
            log_file=log_file,
        )

        def poll() -> None:
            interrupts.check()
            display.poll()

        with driver.closing(session), interrupts.noted():
            if job.runs_once:
                display.begin(job.name, request)
                return tell(app, beside(partial(job.begin, request, session, None), poll))
            if job.stateful:
                display.say(described(session, job, checkpoint, conf.get(PARTITIONS)))
            query = job.begin(request, session, every_seconds)
            with driver.running(query):
                display.begin(job.name, request)
                summary = driver.watch(
                    query, display.step, poll, remembers=job.remembers, checkpoint=checkpoint
                )
    finally:
        display.clear()
    display.end(request, summary)
    return EXIT_OK


def tell(app: App, report: Report) -> int:
    """The report of a batch job on stdout, and the exit code that it means."""
    if app.json:
        app.result(report.document())
    else:
        for line in report.lines():
            click.echo(harmless(line))
    return EXIT_OK if report.ok else EXIT_FAILURE


def beside(work: Callable[[], Report], poll: Callable[[], None]) -> Report:
    """Do the work in a thread of its own; `poll` may end the wait, and then whatever the thread still does ends with the process."""
    done: Queue[Report | BaseException] = Queue()

    def run() -> None:
        try:
            done.put(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.put(error)

    threading.Thread(target=run, name="millstream-job", daemon=True).start()
    while True:
        try:
            found = done.get(timeout=POLL_SECONDS)
        except Empty:
            poll()
            continue
        if isinstance(found, BaseException):
            raise found
        return found
