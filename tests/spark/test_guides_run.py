"""The Python of the guides runs as it is shown, block after block, in the shared session.

Address and port are those of the test. What cannot run here is in `ELSEWHERE`, with the reason: a new guide runs, or is
named there. The guide to the client needs no Spark: tests/docs/test_python_guide.py runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.spark import jobs
from support.guides import GUIDES, python_of
from support.server import Server
from support.spark import wait_for

ADDRESS = "http://127.0.0.1:4437"
PORT = "port=9464"
CHECKPOINT = "all-clicks-checkpoint"
DEADLINE_S = 60.0
ELSEWHERE = {
    "python": "tests/docs/test_python_guide.py runs it: it needs no Spark",
    "scheduling": "a DAG needs Airflow; tests/docs/test_guides.py looks at its commands",
    "spark-connect": "needs a Connect server: tests/spark/test_packaging.py runs it there",
    "spark-pipelines": "needs a command of its own; tests/spark/test_pipelines.py runs it",
    "spark-standalone": "needs a cluster without Millstream: tests/spark/test_packaging.py runs it there",
}
Namespace = dict[str, Any]


PAGES = [page.stem for page in sorted(GUIDES.glob("*.md")) if python_of(page.stem)]


def before_land(spark: Any, server: Server, client: Client) -> None:
    """The first command of the page, in this session."""
    client.create("orders", content_type="application/json").append_many([{"id": 1}, {"id": 2}])
    wait_for(jobs.land(spark, "orders", "lake", url=server.url))


def after_land(_client: Client, found: Namespace) -> None:
    assert found["query"].exception() is None
    assert sorted(path.name for path in Path("table").iterdir())[:2] == [
        "_delta_log",
        "_millstream",
    ]


def before_spark(_spark: Any, _server: Server, client: Client) -> None:
    client.create("orders", content_type="application/json").append_many([{"id": 1}])
    client.create("clicks/a", content_type="application/json").append_many([{"n": 1}, {"n": 2}])


def after_spark(client: Client, found: Namespace) -> None:
    assert [record.value for record in client.stream("all-clicks").read()] == [{"n": 1}, {"n": 2}]
    # The listener hears of the next batch.
    client.stream("clicks/a").append({"n": 3})
    deadline = time.monotonic() + DEADLINE_S
    while not any(client.list("metrics/spark")):
        assert time.monotonic() < deadline, "the listener has told nothing"
    found["spark"].streams.removeListener(found["listener"])
    found["listener"].close()
    assert client.stream("metrics/spark").info().content_type == "application/json"


AROUND: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "land": (before_land, after_land),
    "spark": (before_spark, after_spark),
}


def test_every_guide_with_python_is_run_somewhere() -> None:
    assert set(PAGES) == AROUND.keys() | ELSEWHERE.keys()


@pytest.mark.usefixtures("queries")
@pytest.mark.parametrize("page", AROUND)
def test_the_blocks_run(
    spark: Any,
    server: Server,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = AROUND[page]
    before(spark, server, client)
    found: Namespace = {"spark": spark}
    for text in python_of(page):
        shown = text.replace(ADDRESS, server.url).replace(PORT, "port=0")
        shown = shown.replace(
            CHECKPOINT, str(tmp_path / CHECKPOINT)
        )  # else it is the JVM's directory
        exec(compile(shown, f"{page}.md", "exec"), found)
        if "query" in found and found["query"].isActive:
            found["query"].processAllAvailable()
    after(client, found)
