"""kill -9 of the driver in the middle of a job: the next run goes on, and the result is the fold of the records, in plain Python.

In `make test` one job, by the seed, is killed once; at the full counts each of the four is killed ten times on its way. The
seed is printed, and MILLSTREAM_TEST_SEED takes it back. What is killed and compared is in tests/support/spark_faults/kills.py.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.client.sync.client import Client
from support.server import Server
from support.spark import Driver, DriverFailed, session_processes
from support.spark_faults.kills import JOBS, Killed, run_all

KILLS_FULL = 10
BATCHES_PER_KILL = 6
BATCHES_BEHIND = 4
BATCHES_SHORT = 6
BEGIN_DEADLINE_S = 240.0
END_DEADLINE_S = 60.0
LAST_RUN_DEADLINE_S = 600.0
START_S = 4.0
"""What the first batch takes at least: a kill that waits for no batch comes before it."""
BATCH_S = 0.8
NewDriver = Callable[..., Driver]


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED") or random.randrange(1 << 32))
    print(f"MILLSTREAM_TEST_SEED={seed}")
    return random.Random(seed)


def test_a_job_goes_on_after_its_driver_was_killed(
    server: Server,
    client: Client,
    tmp_path: Path,
    new_driver: NewDriver,
    standalone_driver: Driver,
    chance: random.Random,
) -> None:
    kind = JOBS[chance.choice(list(JOBS))]
    killed = kind(client, tmp_path / kind.job, chance, BATCHES_SHORT)
    kill_while_it_runs(killed, server, new_driver, chance, behind=chance.choice([1, 2]))
    check_to_the_end(killed, server, standalone_driver)


@pytest.mark.long
@pytest.mark.timeout(3600)  # ten starts of Spark; each wait has a deadline of its own
@pytest.mark.parametrize("name", JOBS)
def test_a_job_goes_on_after_each_of_many_kills(
    server: Server,
    client: Client,
    tmp_path: Path,
    new_driver: NewDriver,
    standalone_driver: Driver,
    chance: random.Random,
    name: str,
) -> None:
    batches = KILLS_FULL * BATCHES_PER_KILL + BATCHES_BEHIND
    killed = JOBS[name](client, tmp_path / name, chance, batches)
    for _ in range(KILLS_FULL):
        kill_while_it_runs(killed, server, new_driver, chance, behind=chance.randrange(4))
    check_to_the_end(killed, server, standalone_driver)


def kill_while_it_runs(
    killed: Killed, server: Server, new_driver: NewDriver, chance: random.Random, *, behind: int
) -> None:
    """Start the job in a driver of its own, and end that, so many batches later, at a moment that nobody has chosen."""
    dying = new_driver(master="local[2]")
    number = chance.randrange(len(killed.runs()))
    begun = killed.batches(number)
    dying.begin(run_all, url=server.url, job=killed.job, runs=killed.runs())
    wait_until(lambda: killed.batches(number) >= begun + behind, dying)
    time.sleep(chance.uniform(0, BATCH_S if behind else START_S))  # the moment is the chance
    whole = chance.random() < 0.5
    now = [killed.batches(run) for run in range(len(killed.runs()))]
    print(f"{killed.job}: killed at batches {now}, {'all at once' if whole else 'Python first'}")
    if whole:
        dying.kill()
    else:
        # What is left of it has lost its head and ends by itself, whatever it still does until then.
        os.kill(dying.process.pid, signal.SIGKILL)
        wait_until(lambda: not session_processes(dying.process.pid), None)
    with pytest.raises(DriverFailed, match="ended with -9"):
        dying.finish()


def wait_until(reached: Callable[[], bool], driver: Driver | None) -> None:
    until = time.monotonic() + (END_DEADLINE_S if driver is None else BEGIN_DEADLINE_S)
    while not reached():
        assert time.monotonic() < until, "not in time\n" + (driver.log() if driver else "")
        time.sleep(0.01)


def check_to_the_end(killed: Killed, server: Server, driver: Driver) -> None:
    """Another driver takes it to the end; after that the same command changes nothing."""
    asked = {"url": server.url, "job": killed.job, "runs": killed.runs()}
    rows = driver.call(run_all, deadline_s=LAST_RUN_DEADLINE_S, **asked)
    print(f"{killed.job}: {rows} rows after the last kill")
    assert any(rows), "there was nothing left to do"
    killed.check()
    before = killed.everything()
    assert driver.call(run_all, **asked) == [0] * len(rows)
    assert killed.everything() == before
