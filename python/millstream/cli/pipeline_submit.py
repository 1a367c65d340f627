"""`millstream pipeline submit`: the `spark-submit` line that runs a job on a cluster, printed or run.

Where it sits: beside `pipeline.py`, whose options it takes. What runs on the cluster is `millstream.spark.jobs`, from a zip
of pure Python that goes with it (`millstream.spark.deploy.ship`).

Invariants:
- I-SUB-1  What can be refused is refused here, before anything is submitted.
- I-SUB-2  The printed line is what would be run: it works as typed in a shell.
- I-SUB-3  The zip is on the driver's PYTHONPATH *and* in `--py-files`: Spark's planner sees only the first, executors
           only the second.
- I-SUB-4  Driver and executors are given the same path of Python, in the environment: for a Python source Spark starts one
           path on both sides, and does not look at `spark.pyspark.python`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.cli.context import EXIT_OK, App
from millstream.cli.pipeline import JobCommands, interval_of, job_command, pipeline, request_of
from millstream.errors import SetupError

if TYPE_CHECKING:
    from millstream.spark.jobs.job import Job, Request

ZIP_NAME: Final = "millstream.zip"
MAIN_NAME: Final = "run_job.py"
MAIN_TEXT: Final = '''"""Runs a Millstream job: the program that `millstream pipeline submit` gives to spark-submit."""

import sys

from millstream.spark.jobs.__main__ import main

sys.exit(main())
'''

EPILOG: Final = """\b
Examples:
  millstream pipeline submit land --master spark://host:7077 --from orders --to /shared/lake
  millstream pipeline submit land --master yarn --deploy-mode cluster --print \\
      --from 'chat/**' --to /shared/lake --checkpoint hdfs:///checkpoints/chat --every 1m
\b
The cluster needs pyspark's Python packages (pyarrow), not Millstream: a zip of pure Python goes
with the job. Paths must be on storage that the driver and all executors share.
docs/guides/ has a page each for standalone, YARN, Kubernetes and Connect.
"""


def _submit(job: Job, /, **given: Any) -> int:
    from millstream.spark.jobs.run import driver

    app = click.get_current_context().ensure_object(App)
    request = request_of(app, job, {**given, "remote": None})
    driver.check(job, request, every_seconds=interval_of(given))
    folder = Path(given["folder"]) if given["folder"] else _cache_folder()
    archive, main = write_files(folder)
    command = [spark_submit(), *spark_arguments(given, archive, f"millstream {job.name}")]
    command += [str(main), job.name, *job_arguments(job, request, given)]
    environment = driver_environment(given, archive)
    if not given["only_print"]:
        from millstream.spark.java import ensure_java

        ensure_java()
        os.execve(command[0], command, {**os.environ, **environment})  # noqa: S606 - no shell on purpose
    if app.json:
        app.result({"environment": environment, "command": command})
    else:
        words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        click.echo(" ".join([*words, shlex.join(command)]))
    return EXIT_OK


def write_files(folder: Path) -> tuple[Path, Path]:
    """The zip and the program; both are replaced, so that they fit this version."""
    from millstream.spark.deploy.ship import build_zip

    folder.mkdir(parents=True, exist_ok=True)
    main = folder / MAIN_NAME
    main.write_text(MAIN_TEXT)
    return build_zip(folder / ZIP_NAME).absolute(), main.absolute()


def _cache_folder() -> Path:
    """One folder per version and installation; a job that runs keeps what it was submitted with."""
    import millstream

    base = os.environ.get("XDG_CACHE_HOME")
    mark = hashlib.sha256(f"{sys.prefix}\0{millstream.__version__}".encode()).hexdigest()[:12]
    return (Path(base) if base else Path.home() / ".cache") / "millstream" / f"submit-{mark}"


def spark_submit() -> str:
    """The command of SPARK_HOME, else the one of pyspark, else the first on PATH."""
    import importlib.util

    home = os.environ.get("SPARK_HOME")
    if home:
        named = Path(home) / "bin" / "spark-submit"
        if named.exists():
            return str(named)
        raise SetupError(f"SPARK_HOME is `{home}`, which has no bin/spark-submit")
    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "bin" / "spark-submit")
    on_path = shutil.which("spark-submit")
    if on_path is None:
        raise SetupError("there is no spark-submit", hint="pip install 'millstream[spark]'")
    return on_path


def spark_arguments(given: dict[str, Any], archive: Path, name: str) -> list[str]:
    """What is for Spark: everything before the program."""
    arguments = ["--master", given["master"], "--name", name]
    if given["deploy_mode"] is not None:
        arguments += ["--deploy-mode", given["deploy_mode"]]
    arguments += ["--py-files", str(archive)]
    for key, value in given["conf"].items():
        arguments += ["--conf", f"{key}={value}"]
    return arguments


def job_arguments(job: Job, request: Request, given: dict[str, Any]) -> list[str]:
    """What is for the job: everything behind its name."""
    arguments = ["--url", request.url]
    for stream in request.streams:
        arguments += ["--from", stream]
    arguments += ["--to", str(request.target)]
    for flag, value in (
        ("--checkpoint", given["checkpoint"]),
        ("--every", given["every"]),
        ("--max-rows", request.rows_per_batch),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    for option in job.options:
        if option.name in request.options:
            value = [] if option.is_flag else [request.options[option.name]]
            arguments += [f"--{option.name}", *value]
    for name, value in request.source_options.items():
        arguments += ["--option", f"{name}={value}"]
    return arguments


def driver_environment(given: dict[str, Any], archive: Path) -> dict[str, str]:
    """What a driver on this machine needs; one in the cluster has an environment of its own."""
    if given["deploy_mode"] == "cluster":
        return {}
    python = given["python"] or os.environ.get("PYSPARK_PYTHON") or sys.executable
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(archive), os.environ.get("PYTHONPATH")))),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }


def _submit_command(job: Job) -> click.Command:
    own: list[click.Parameter] = [
        click.Option(["--master"], metavar="URL", required=True, help="Cluster to run on."),
        click.Option(
            ["--deploy-mode"],
            type=click.Choice(["client", "cluster"]),
            help="Where the driver runs.  [default: client, here]",
        ),
        click.Option(
            ["--python"],
            metavar="PATH",
            help="Python of driver and executors: the same path on every machine.  "
            "[env PYSPARK_PYTHON; default: this one]",
        ),
        click.Option(
            ["--files", "folder"],
            metavar="DIR",
            help="Where the zip and the program are written.  [default: the cache folder]",
        ),
        click.Option(
            ["--print", "only_print"], is_flag=True, help="Print the line instead of running it."
        ),
    ]
    return job_command(job, _submit, own)


pipeline.add_command(
    JobCommands(
        _submit_command,
        name="submit",
        help="Run a job on a cluster: write the spark-submit line, and run it or print it.",
        epilog=EPILOG,
    )
)
