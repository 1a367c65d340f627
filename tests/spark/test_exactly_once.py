"""Exactly once, proven: whatever breaks between source and target, the target equals the source.

Each fault happens once in `make test`, ten times with other seeds under MILLSTREAM_TEST_FULL=1; a failing round prints its
seed, and MILLSTREAM_TEST_SEED repeats it. Faults are placed by a proxy between Spark and the real server, so the code that
runs is the code that is shipped. What happens to what is in tests/support/spark_faults.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.fault_proxy import Call, FaultProxy, drop
from support.server import Server
from support.spark import Driver, session_processes
from support.spark_faults import jobs
from support.spark_faults.processes import executor_of
from support.spark_faults.round import (
    BATCHES,
    COMMIT,
    ROWS_PER_BATCH,
    ROWS_PER_BATCH_FOR_TROUBLE,
    STAGE,
    Round,
)

ROUNDS_FULL = 10
ROUND_DEADLINE_S = 260.0
pytestmark = pytest.mark.timeout(3600)  # ten rounds; each has deadlines of its own
Rounds = Callable[..., Iterator[Round]]


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def rounds(full: bool, server: Server, client: Client, proxy: FaultProxy, tmp_path: Path) -> Rounds:
    """The rounds of one fault; the seed of each is printed before it runs."""

    def play(rows_per_batch: int = ROWS_PER_BATCH) -> Iterator[Round]:
        named = os.environ.get("MILLSTREAM_TEST_SEED")
        first = int(named) if named else random.SystemRandom().randrange(1_000_000)
        for seed in range(first, first + (1 if named or not full else ROUNDS_FULL)):
            print(f"seed {seed}")
            folder = tmp_path / f"round-{seed}"
            folder.mkdir()
            yield Round(server, client, proxy, folder, seed, rows_per_batch)

    return play


def test_failing_tasks(rounds: Rounds, local_cluster: Driver) -> None:
    for round_ in rounds(ROWS_PER_BATCH_FOR_TROUBLE):
        round_.mark_stages()
        ran = local_cluster.call(
            jobs.copy, deadline_s=ROUND_DEADLINE_S, **round_.arguments(trouble="fail once")
        )
        assert ran == list(range(BATCHES))
        attempts = round_.attempts(batch=1)
        assert {(0, 0), (1, 0)} & attempts, "no first attempt got as far as staging"
        assert {(0, 1), (1, 1)} & attempts, "no second attempt ran"
        round_.check()


def test_an_executor_is_killed_while_it_writes(rounds: Rounds, local_cluster: Driver) -> None:
    for round_ in rounds():
        killed: list[int] = []

        def kill(call: Call, killed: list[int] = killed) -> None:
            executor = executor_of(call.client_port, session_processes(local_cluster.process.pid))
            os.kill(executor, signal.SIGKILL)
            killed.append(executor)

        nth = round_.some_stage()
        round_.proxy.at(
            "PUT", STAGE, kill, nth=nth, moment=round_.random.choice(["before", "after"])
        )
        ran = local_cluster.call(jobs.copy, deadline_s=ROUND_DEADLINE_S, **round_.arguments())
        round_.proxy.check()
        assert len(killed) == 1
        assert ran == list(range(BATCHES))
        round_.check()


def test_the_driver_is_killed(
    rounds: Rounds, local_clusters: Callable[[], Driver], standalone_driver: Driver
) -> None:
    """kill -9 at a point between stage, commit and checkpoint; a driver elsewhere, with another plan, goes on."""
    points = [
        ("PUT", STAGE, "before"),
        ("PUT", STAGE, "after"),
        ("POST", COMMIT, "before"),
        ("POST", COMMIT, "after"),
        ("POST", COMMIT, "answered"),
    ]
    for round_ in rounds():
        driver = local_clusters()
        method, path, moment = round_.random.choice(points)
        print(f"kill {moment} {method} {path}")

        def kill(_call: Call, driver: Driver = driver) -> None:
            driver.kill()

        def kill_soon(
            call: Call, kill: Callable[[Call], None] = kill, round_: Round = round_
        ) -> None:
            """The answer leaves; what the driver makes of it until it dies is left to chance."""
            threading.Timer(round_.random.random() * 0.2, kill, (call,)).start()

        nth = round_.some_stage() if path == STAGE else round_.random.randrange(1, BATCHES + 1)
        action, when = (kill_soon, "after") if moment == "answered" else (kill, moment)
        round_.proxy.at(method, path, action, nth=nth, moment=when)  # type: ignore[arg-type]
        driver.begin(jobs.copy, **round_.arguments())
        driver.process.wait(ROUND_DEADLINE_S)
        round_.proxy.check()
        before = len(round_.written())
        ran = standalone_driver.call(
            jobs.copy, deadline_s=ROUND_DEADLINE_S, **round_.arguments(partitions=3)
        )
        print(f"{before} records before the kill, then batches {ran}")
        round_.check()


def test_the_answer_to_a_commit_is_lost(rounds: Rounds, spark: Any) -> None:
    for round_ in rounds():
        lost = round_.random.randrange(1, BATCHES + 1)
        round_.proxy.at("POST", COMMIT, drop, nth=lost, moment="after")
        assert jobs.copy(spark, **round_.arguments()) == list(range(BATCHES))
        answers = [commit["duplicate"] for commit in round_.commits()]
        assert answers.count(True) == 1, answers
        assert answers.count(False) == BATCHES, answers
        round_.check()


def test_a_commit_that_spark_believes_to_have_failed(rounds: Rounds, spark: Any) -> None:
    """The answer stays away for longer than the patience: Spark aborts what was applied, and runs it again."""
    for round_ in rounds():
        nth = round_.random.randrange(1, BATCHES + 1)
        rule = round_.proxy.at("POST", COMMIT, drop, nth=nth, times=1_000, moment="after")
        with pytest.raises(Exception, match="unreachable: cannot reach"):
            jobs.copy(spark, **round_.arguments(patience_s=1))
        assert rule.seen > nth, "the commit was not repeated"
        given_up = round_.proxy.seen("DELETE", STAGE)
        assert given_up, "Spark did not abort"
        assert {call.status for call in given_up} == {409}, "a committed stage was given up"
        round_.proxy.clear()
        ran = jobs.copy(spark, **round_.arguments())
        assert ran == list(range(nth - 1, BATCHES))
        assert next(round_.commits())["duplicate"] is True
        round_.check()


def test_a_batch_runs_again_with_other_partitions(rounds: Rounds, spark: Any) -> None:
    for round_ in rounds():
        before, after = round_.random.sample([1, 2, 3, 4], 2)
        jobs.copy(spark, **round_.arguments(partitions=before))
        last = BATCHES - 1
        assert {partition for partition, _ in round_.attempts(last)} == set(range(before))
        forget_batch(round_.checkpoint, last)
        round_.proxy.clear()
        assert jobs.copy(spark, **round_.arguments(partitions=after)) == [last]
        assert {partition for partition, _ in round_.attempts(last)} == set(range(after))
        assert [commit["duplicate"] for commit in round_.commits()] == [True]
        given_up = [call.status for call in round_.proxy.seen("DELETE", STAGE)]
        assert given_up == [204] * len(round_.proxy.seen("PUT", STAGE)), "stages were left behind"
        round_.check()


def test_speculation(rounds: Rounds, standalone_driver: Driver) -> None:
    for round_ in rounds(ROWS_PER_BATCH_FOR_TROUBLE):
        round_.mark_stages()
        ran = standalone_driver.call(
            jobs.copy, deadline_s=ROUND_DEADLINE_S, **round_.arguments(trouble="wait for twin")
        )
        assert ran == list(range(BATCHES))
        for batch in range(BATCHES):
            assert {(1, 0), (1, 1)} <= round_.attempts(batch), f"no second attempt in batch {batch}"
        round_.check()


@pytest.mark.own_server
def test_the_server_is_killed_in_mid_batch(rounds: Rounds, spark: Any) -> None:
    for round_ in rounds():
        server = round_.server
        server.flags = ("--port", str(server.port))

        def crash(_call: Call, server: Server = server) -> None:
            server.crash_and_restart()

        method, path = round_.random.choice([("PUT", STAGE), ("POST", COMMIT)])
        nth = round_.some_stage() if path == STAGE else round_.random.randrange(1, BATCHES + 1)
        moment = round_.random.choice(["before", "after"])
        print(f"kill the server {moment} {method} {path} {nth}")
        round_.proxy.at(method, path, crash, nth=nth, moment=moment)
        assert jobs.copy(spark, **round_.arguments()) == list(range(BATCHES))
        round_.check()


def test_a_shuffle_keeps_every_record(rounds: Rounds, spark: Any) -> None:
    """Behind a shuffle rows come in another order in each attempt; the batch is still one."""
    for round_ in rounds():
        jobs.copy(spark, **round_.arguments(shuffle=2))
        forget_batch(round_.checkpoint, BATCHES - 1)
        jobs.copy(spark, **round_.arguments(shuffle=2))
        round_.check(ordered=False)


def test_direct_mode_with_a_fixed_plan(rounds: Rounds, spark: Any) -> None:
    """The source's own partitions, the same in each run: a replay repeats the same appends."""
    for round_ in rounds():
        options = {"exactlyOnce": "direct", "directPartitions": "2", "directRecords": "70"}
        arguments = round_.arguments(write_options=options)
        jobs.copy(spark, **arguments)
        forget_batch(round_.checkpoint, BATCHES - 1)
        round_.proxy.clear()
        jobs.copy(spark, **arguments)
        appends = round_.proxy.seen("POST", f"/v1/stream/{round_.target}")
        assert appends
        assert {call.status for call in appends} == {204}, "the replay appended something"
        round_.check(ordered=False)


def forget_batch(checkpoint: Path, batch: int) -> None:
    """What a driver leaves that died between the commit to the sink and its own note of it."""
    entry = checkpoint / "commits" / str(batch)
    assert entry.exists()
    entry.unlink()
    (checkpoint / "commits" / f".{batch}.crc").unlink(missing_ok=True)
