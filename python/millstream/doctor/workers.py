"""Checks of the Python that Spark's workers run: the same as the driver's, with what the connector needs.

Where it sits: one theme of `millstream doctor`. Without a cluster it looks at the interpreter that Spark would start here;
with `--master` or `--remote` it starts a session and asks the workers themselves.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.doctor.finding import Finding, fail, ok, warn
from millstream.errors import MillstreamError
from millstream.spark.deploy import required_versions

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_DEADLINE_S: Final = 60.0
PROBE: Final = """
import importlib.util, json, platform
def version(name):
    from importlib import metadata
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
try:
    found = importlib.util.find_spec("millstream") is not None
except Exception:
    found = False
seen = {"python": platform.python_version(), "pyarrow": version("pyarrow"), "millstream": found}
"""
COLUMNS: Final = "host string, python string, pyarrow string, millstream boolean"
SHIP_REMEDY: Final = (
    "install millstream there, or send it along: see docs/guides/spark-standalone.md for three ways"
)


def local_python(elsewhere: str | None) -> Iterator[Finding]:
    """The interpreter that Spark would start on this machine."""
    if required_versions.installed("pyspark") is None or elsewhere is not None:
        return
    named = os.environ.get("PYSPARK_PYTHON")
    drivers = os.environ.get("PYSPARK_DRIVER_PYTHON")
    if named and drivers and named != drivers:
        yield warn(
            "worker python",
            f"PYSPARK_DRIVER_PYTHON ({drivers}) is not PYSPARK_PYTHON ({named}): for the connector "
            "Spark starts the driver's path on executors, too",
            "give both the same path, one that is there on every machine",
        )
    named = drivers or named
    command = named or shutil.which("python3")
    if command is None:
        yield warn("worker python", "there is no `python3` on PATH", _set_python())
        return
    seen = ask(command)
    if seen is None:
        yield fail("worker python", f"`{command}` does not run", _set_python())
        return
    ours = platform.python_version_tuple()[:2]
    same = tuple(str(seen["python"]).split(".")[:2]) == ours
    lacks = [name for name in ("pyarrow", "millstream") if not seen[name]]
    text = f"{command} is Python {seen['python']}"
    if same and not lacks:
        yield ok("worker python", text)
    elif named:
        problem = f"has no {' and no '.join(lacks)}" if same else f"this is {'.'.join(ours)}"
        yield fail("worker python", f"PYSPARK_PYTHON {text}; {problem}", _set_python())
    else:
        yield warn(
            "worker python",
            f"{text}, not this one: plain `spark-submit` would use it (sessions of Millstream do not)",
            _set_python(),
        )


def _set_python() -> str:
    return f"export PYSPARK_PYTHON={sys.executable}"


def ask(command: str) -> dict[str, Any] | None:
    """What an interpreter has; `None` if it does not run or answer."""
    try:
        done = subprocess.run(
            [command, "-c", PROBE + "print(json.dumps(seen))"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_DEADLINE_S,
            cwd="/",
        )
        seen = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return seen if isinstance(seen, dict) else None


def on_cluster(master: str | None, remote: str | None) -> Iterator[Finding]:
    """Start a session and let its workers say what they have."""
    from millstream.spark.session import build_session

    folder = Path(tempfile.mkdtemp(prefix="millstream-doctor-"))
    log_file = folder / "spark.log"
    where = str(master or remote)
    try:
        session = build_session(
            "millstream doctor", master=master, remote=remote, log_file=log_file
        )
        try:
            seen = ask_workers(session)
        finally:
            session.stop()
    except MillstreamError:
        raise
    except Exception as error:  # noqa: BLE001 - pyspark has no common base for what goes wrong here
        first = str(error).strip().splitlines() or [type(error).__name__]
        yield fail("workers", f"{where}: {first[0]}", f"the log of Spark is in {log_file}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    yield from judge(where, seen)


def ask_workers(session: Any) -> list[dict[str, Any]]:
    """One answer from each host that took part; a task per core, so that hosts do not stay idle."""
    probe = PROBE

    def look(_: Any) -> Any:
        import socket

        import pyarrow

        scope: dict[str, Any] = {}
        exec(probe, scope)  # noqa: S102 - a constant of this module; workers need not have Millstream
        row = {"host": socket.gethostname(), **scope["seen"]}
        yield pyarrow.RecordBatch.from_pylist([row])

    tasks = 8
    frame = session.range(tasks * 4, numPartitions=tasks).mapInArrow(look, COLUMNS)
    rows = frame.distinct().limit(1000).collect()
    return [row.asDict() for row in rows]


def judge(where: str, seen: list[dict[str, Any]]) -> Iterator[Finding]:
    """Compare what the workers said with this interpreter."""
    ours = platform.python_version_tuple()[:2]
    for row in sorted(seen, key=lambda row: str(row["host"])):
        text = f"{where}: {row['host']} has Python {row['python']}, pyarrow {row['pyarrow']}"
        if tuple(row["python"].split(".")[:2]) != ours:
            remedy = f"the workers need Python {'.'.join(ours)}: set PYSPARK_PYTHON there"
            yield fail("workers", text, remedy)
        elif not row["millstream"]:
            yield warn("workers", f"{text}, but no millstream", SHIP_REMEDY)
        else:
            yield ok("workers", f"{text}, millstream")
