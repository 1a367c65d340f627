"""`millstream pipeline` as a person and a script use it: a real server, a real Spark, signals, locks, exit codes."""

from __future__ import annotations

import fcntl
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow.dataset as dataset
import pytest

import millstream
from millstream.cli.context import App, exit_code
from millstream.cli.pipeline_progress import Display
from millstream.client.sync.client import Client
from millstream.errors import StreamNotFound
from millstream.spark.jobs import JOBS, find
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.run.driver import Step
from support.commands import Run
from support.server import Server
from support.spark import SMALL
from support.spark_cluster import ConnectServer

pytestmark = pytest.mark.long

PROGRESS = {
    "numInputRows": 10,
    "durationMs": {"triggerExecution": 2000},
    "sources": [
        {
            "endOffset": {"streams": {"s": {"at": f"{0:016d}_{10:016d}", "id": "i", "n": 5}}},
            "latestOffset": {"streams": {"s": {"at": f"{0:016d}_{20:016d}", "id": "i", "n": 10}}},
        }
    ],
}
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


def batches(run: Run) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, list(run.out)) if "batch" in line]


def rows(run: Run) -> int:
    return sum(line["rows"] for line in batches(run))


def test_land_goes_on_until_it_is_stopped_and_then_where_it_was(
    spark: Any, start: Callable[..., Run], server: Server, client: Client, tmp_path: Path
) -> None:
    orders = client.create("shop/orders", content_type="application/json")
    orders.append_many([{"n": number} for number in range(300)])
    lake = tmp_path / "lake"
    land = ("--json", "pipeline", "run", "land", "--from", "shop/*", "--to", "lake", *CONF)

    first = start(*land, "--every", "1s", "--max-rows", "100")
    first.wait_until(lambda: rows(first) == 300)
    assert [line["lag_records"] for line in batches(first)] == [200, 100, 0]
    second = start(*land)
    assert second.end(60.0) == 4
    error = json.loads(second.err[0])["error"]
    assert f"in use by process {first.process.pid}" in error["message"]
    client.create("shop/returns", content_type="application/json").append_many([{"n": 1}] * 50)
    first.wait_until(lambda: rows(first) == 350)
    first.process.send_signal(signal.SIGINT)
    assert (first.end(60.0), first.err) == (130, [])
    assert first.left() == []
    assert (lake / "_millstream" / "checkpoint" / "driver.log").stat().st_size > 0

    orders.append_many([{"n": number} for number in range(300, 400)])
    request = Request(server.url, ("shop/*",), Target.parse(str(lake)))
    driver.check(find("land"), request)
    with driver.hold(find("land"), request):
        summary = driver.watch(find("land").begin(request, spark, None), lambda _: None)
    assert (summary.batches, summary.rows) == (1, 100)
    wanted = [("shop/orders", n) for n in range(400)] + [("shop/returns", n) for n in range(50)]
    assert offsets(lake) == wanted


def test_sigterm_is_the_end_of_a_run_that_goes_on_and_a_failure_of_one_that_ends(
    start: Callable[..., Run], client: Client
) -> None:
    client.create("s", content_type="application/json")
    land = ("pipeline", "run", "land", "--from", "s", *CONF)
    runs = [(start(*land, "--to", "a"), 143), (start(*land, "--to", "b", "--every", "1s"), 0)]
    for run, code in runs:
        run.wait_for_line("starting Spark")
        run.process.send_signal(signal.SIGTERM)
        assert run.end(60.0) == code, run.err
        assert run.left() == []


def test_what_cannot_work_is_refused_before_spark_starts(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    before = list(tmp_path.iterdir())
    cases = [
        (("land", "--from", "s", "--to", "stream:x"), 2, "use job `copy`"),
        (("copy", "--from", "s", "--to", "lake"), 2, "use job `land`"),
        (("copy", "--from", "a/*", "--to", "stream:a/b"), 2, "read and written by the same job"),
        (("copy", "--from", "a", "--to", "stream:b"), 2, "needs a checkpoint"),
        (("nope", "--from", "s", "--to", "lake"), 2, "no job `nope`"),
        (("land", "--from", "s", "--to", "s3://bucket/lake"), 2, "s3://"),
        (("land", "--from", "s", "--to", "lake", "--create"), 2, "no such option '--create'"),
        (("land", "--from", "s", "--to", "lake", "--once", "--every", "5s"), 2, "--once or"),
        (("land", "--from", "s", "--to", "lake", "--conf", "x"), 2, "NAME=VALUE"),
    ]
    began = [(start("pipeline", "run", *case), code, text) for case, code, text in cases]
    for run, code, text in began:
        assert run.end(60.0) == code, run.err
        assert any(text in line for line in run.err), run.err
        assert run.err[0].startswith("error: ")
    assert list(tmp_path.iterdir()) == before


def test_a_missing_stream_is_one_clear_error(spark: Any, server: Server, tmp_path: Path) -> None:
    request = Request(server.url, ("nope",), Target.parse(str(tmp_path / "lake")))
    with pytest.raises(StreamNotFound, match="nope") as caught:
        driver.watch(find("land").begin(request, spark, None), lambda _: None)
    assert caught.value.code == "stream_not_found"
    assert caught.value.hint
    assert exit_code(caught.value) == 3


def test_copy_appends_the_records_of_streams_to_one_stream_once(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        stream = client.create(f"in/{name}", content_type="application/json")
        stream.append_many([{"from": name, "n": number} for number in range(100)])
    request = Request(
        server.url,
        ("in/*",),
        Target.parse("stream:out"),
        {"create": "yes"},
        rows_per_batch=120,
        checkpoint=str(tmp_path / "checkpoint"),
    )
    driver.check(find("copy"), request)
    for batches, rows in ((2, 200), (0, 0)):
        summary = driver.watch(find("copy").begin(request, spark, None), lambda _: None)
        assert (summary.batches, summary.rows) == (batches, rows)
    copied = [record.value for record in client.stream("out").read()]
    for name in ("a", "b"):
        assert [value["n"] for value in copied if value["from"] == name] == list(range(100))


def test_land_runs_on_a_connect_server(
    start: Callable[..., Run], connect_server: ConnectServer, client: Client, tmp_path: Path
) -> None:
    stream = client.create("remote/s", content_type="application/json")
    lake = tmp_path / "lake"
    land = ("--json", "pipeline", "run", "land", "--from", "remote/*", "--to", str(lake))
    land += ("--table", "delta", "--remote", connect_server.url)
    for rows, total in ((70, 70), (5, 75)):
        stream.append_many([{"n": 1}] * rows)
        run = start(*land)
        assert run.end() == 0, run.err
        assert sum(line["rows"] for line in batches(run)) == rows
        assert deltalake.DeltaTable(lake).to_pyarrow_table().num_rows == total
        assert run.left() == []


def test_progress_on_a_log_is_one_line_a_second_and_ends_with_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("millstream.cli.pipeline_progress.time.monotonic", lambda: now[0])
    stderr = io.StringIO()
    display = Display(App(), stderr)
    for batch in range(20):
        display.step(Step(batch, 10, 0.1, PROGRESS))
        now[0] += 0.1
    display.poll()
    assert stderr.getvalue().count("\n") == 2
    now[0] += 1.0
    display.poll()
    lines = stderr.getvalue().splitlines()
    assert lines[-1] == (
        "batch 19: 10 rows in 0.1 s (100 rows/s), 200 rows so far, "
        "5 records behind the tail (about 1 s at this pace)"
    )


def test_the_lock_of_a_dead_run_is_free(tmp_path: Path) -> None:
    from millstream.errors import CheckpointBusy
    from millstream.spark.jobs.run.lock import NAME, locked

    program = (
        "import sys; from pathlib import Path; from millstream.spark.jobs.run.lock import locked\n"
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
    assert jobs.keys() == JOBS.keys()
    assert jobs["land"]["options"][0]["choices"] == ["parquet", "delta", "iceberg"]
