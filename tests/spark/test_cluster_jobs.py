"""On a standalone cluster with two workers every job gives what it gives in one process: the same records, the same rows.

The jobs and what they are asked for are in tests/support/spark_job_table.py: a new job is a line there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.client.sync.client import Client
from millstream.spark.jobs import JOBS
from support.server import Server
from support.spark import Driver
from support.spark_job_table import LINES, left_at, run_steps

DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def local_driver(spark_folder: Path) -> Iterator[Driver]:
    with Driver(spark_folder / "local-jobs", master="local[2]") as driver:
        yield driver


def test_every_job_is_in_the_table() -> None:
    assert LINES.keys() == JOBS.keys()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LINES)
def test_a_cluster_gives_the_local_result(
    server: Server,
    client: Client,
    tmp_path: Path,
    local_driver: Driver,
    standalone_driver: Driver,
    name: str,
) -> None:
    line = LINES[name]
    line.fill(client)
    found = {}
    for place, driver in (("local", local_driver), ("cluster", standalone_driver)):
        steps = line.at(place, tmp_path)
        told = driver.call(run_steps, url=server.url, steps=steps, deadline_s=DEADLINE_S)
        assert all(told), told
        found[place] = left_at(client, place, tmp_path, told)
    assert any(found["local"]["streams"].values()) or found["local"]["rows"]
    assert found["cluster"] == found["local"]
