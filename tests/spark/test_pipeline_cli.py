"""`millstream pipeline` as a person and a script use it: a real server, a real Spark, signals, locks, exit codes."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.dataset as dataset
import pytest

import millstream
from millstream.client._sync import Client
from support.commands import Run
from support.server import Server
from support.spark import SMALL

CONF = [part for name, value in SMALL.items() for part in ("--conf", f"{name}={value}")]


@pytest.fixture
def start(tmp_path: Path, server: Server) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def begin(*arguments: str) -> Run:
        run = Run(tmp_path, server.url, *arguments)
        started.append(run)
        return run

    yield begin
    for run in started:
        run.kill()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with millstream.connect(server.url) as connected:
        yield connected


def offsets(lake: Path) -> list[tuple[str, int]]:
    table = dataset.dataset(lake, format="parquet", partitioning="hive").to_table(
        columns=["stream", "offset"]
    )
    return sorted((row["stream"], row["offset"]) for row in table.to_pylist())


def test_land_goes_on_until_it_is_stopped_and_then_where_it_was(
    start: Callable[..., Run], client: Client, tmp_path: Path
) -> None:
    orders = client.create("shop/orders", content_type="application/json")
    orders.append_many([{"n": number} for number in range(300)])
    lake = tmp_path / "lake"
    land = ("pipeline", "run", "land", "--from", "shop/*", "--to", "lake", *CONF)

    first = start(*land, "--every", "1s", "--max-rows", "100")
    first.wait_for_line("300 rows so far, at the tail")
    second = start(*land)
    assert second.end() == 4
    assert any(f"in use by process {first.process.pid}" in line for line in second.err)
    client.create("shop/returns", content_type="application/json").append_many([{"n": 1}] * 50)
    first.wait_for_line("350 rows so far, at the tail")
    first.process.send_signal(signal.SIGINT)
    assert first.end(60.0) == 130
    assert first.left() == []
    log = tmp_path / "lake" / "_millstream" / "checkpoint" / "driver.log"
    assert log.stat().st_size > 0
    assert not any("Exception" in line or "WARN" in line for line in first.err), first.err

    orders.append_many([{"n": number} for number in range(300, 400)])
    third = start("--json", *land, "--once")
    assert third.end() == 0, third.err
    lines = [json.loads(line) for line in third.out]
    assert sum(line["rows"] for line in lines if "batch" in line) == 100
    assert lines[-2]["lag_records"] == 0
    assert (lines[-1]["done"], lines[-1]["rows"]) == (True, 100)
    wanted = [("shop/orders", n) for n in range(400)] + [("shop/returns", n) for n in range(50)]
    assert offsets(lake) == wanted


def test_what_cannot_work_is_refused_before_spark_starts(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    cases = [
        (("land", "--from", "s", "--to", "stream:x"), 2, "use job `copy`"),
        (("copy", "--from", "s", "--to", "lake"), 2, "use job `land`"),
        (("copy", "--from", "a/*", "--to", "stream:a/b"), 2, "copied to itself"),
        (("copy", "--from", "a", "--to", "stream:b"), 2, "needs a checkpoint"),
        (("nope", "--from", "s", "--to", "lake"), 2, "no job `nope`"),
        (("land", "--from", "s", "--to", "s3://bucket/lake"), 2, "s3://"),
        (("land", "--from", "s", "--to", "lake", "--create", "yes"), 2, "no option `create`"),
        (("land", "--from", "s", "--to", "lake", "--once", "--every", "5s"), 2, "--once or"),
        (("land", "--from", "s", "--to", "lake", "--conf", "x"), 2, "NAME=VALUE"),
    ]
    began = [(start("pipeline", "run", *case), code, text) for case, code, text in cases]
    for run, code, text in began:
        assert run.end(60.0) == code, run.err
        assert any(text in line for line in run.err), run.err
        assert run.err[0].startswith("error: ")
    assert not any(tmp_path.iterdir())


def test_a_missing_stream_and_a_missing_server_are_one_clear_error(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("pipeline", "run", "land", "--from", "nope", "--to", "lake", *CONF)
    assert run.end() != 0
    complaint = [line for line in run.err if line.startswith(("error:", "hint:"))]
    assert complaint
    assert "nope" in complaint[0]
    assert not any("at org.apache" in line or "Traceback" in line for line in run.err)
    assert run.left() == []


def test_the_lock_of_a_dead_run_is_free(tmp_path: Path) -> None:
    from millstream.errors import CheckpointBusy
    from millstream.spark.jobs.lock import NAME, locked

    program = (
        "import sys; from pathlib import Path; from millstream.spark.jobs.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(CheckpointBusy, match=f"process {holder.pid}"), locked(tmp_path):
        pass
    holder.kill()
    holder.wait(10.0)
    holder.stdout.close()
    with locked(tmp_path), (tmp_path / NAME).open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_jobs_are_listed_without_spark(start: Callable[..., Run]) -> None:
    run = start("--json", "pipeline", "list")
    assert run.end(60.0) == 0
    jobs = {job["name"]: job for job in map(json.loads, run.out)}
    assert jobs.keys() == {"land", "copy"}
    assert jobs["land"]["options"][0]["choices"] == ["parquet", "delta", "iceberg"]
