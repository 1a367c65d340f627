"""Every job as a line of a table: what it reads, what it is asked for. For tests that run all of them somewhere.

Where it sits: used by tests/spark/test_cluster_jobs.py; drivers load this file by its path for `run_steps`.

Invariants: `{place}` in a text stands for where a job runs and `{folder}` for a directory of that place: two runs of one line
share what they read and nothing that they write. What a line leaves behind is compared as a whole: streams below `{place}/`, files below `{place}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from millstream.client.sync.client import Client
from millstream.spark import jobs
from millstream.spark.jobs.run import driver
from support import changelog, json_orders
from support.spark_jobs import JSON, next_second, records

COUNT = 300
ROWS_PER_APPEND = 30
USUAL: dict[str, Any] = {"max_rows": 120, "minPartitions": 2}
"""Several batches, each of several tasks."""
Texts = Callable[[], list[bytes]]


@dataclass(frozen=True)
class Step:
    """One run of a job."""

    job: str
    streams: str
    to: str | None
    options: dict[str, Any]
    is_query: bool = True
    """Whether it has batches and a checkpoint; else it is done when the call returns."""


@dataclass(frozen=True)
class Line:
    """Steps one after another; the last one is the job that the line is about."""

    texts: Texts
    """What is in the stream `in`."""
    steps: tuple[Step, ...]
    spread: bool = False
    """Whether the server accepts the last record in another second than those before it."""

    def fill(self, client: Client) -> None:
        *texts, last = self.texts()
        stream = client.create("in", content_type=JSON)
        for first in range(0, len(texts), ROWS_PER_APPEND):
            stream.append_many(texts[first : first + ROWS_PER_APPEND])
        if self.spread:
            next_second(client)
        stream.append_many([last])

    def at(self, place: str, folder: Path) -> list[dict[str, Any]]:
        """What `run_steps` is told."""
        return [
            {
                "job": step.job,
                "is_query": step.is_query,
                "given": _placed(
                    {
                        "streams": step.streams,
                        "to": step.to,
                        **(
                            {**USUAL, "checkpoint": f"{{folder}}/{number}"} if step.is_query else {}
                        ),
                        **step.options,
                    },
                    place,
                    folder,
                ),
            }
            for number, step in enumerate(self.steps)
        ]


def _placed(given: dict[str, Any], place: str, folder: Path) -> dict[str, Any]:
    marks = {"{place}": place, "{folder}": str(folder / place)}
    found = dict(given)
    for name, value in given.items():
        for mark, meant in marks.items():
            if isinstance(value, str):
                value = value.replace(mark, meant)
        found[name] = value
    return found


def run_steps(spark: Any, *, url: str, steps: list[dict[str, Any]]) -> list[Any]:
    """Runs in a driver. The rows of each step that is a query, the report of each other one."""
    found: list[Any] = []
    for step in steps:
        begun = jobs.JOBS[step["job"]](spark, url=url, **step["given"])
        if step["is_query"]:
            found.append(driver.watch(begun, lambda _: None).rows)
        else:
            assert begun.ok, begun.lines()
            found.append(begun.document())
    return found


def left_at(client: Client, place: str, folder: Path, told: list[Any]) -> dict[str, Any]:
    """What a line has left: records of streams and rows of files, by name, whatever their order; and what `run_steps` has told."""
    streams = {
        info.path.removeprefix(place): sorted(records(client, info.path))
        for info in client.list()
        if info.path.startswith(f"{place}/")
    }
    rows: list[str] = []
    for path in (folder / place).rglob("*.parquet"):
        partition = path.parent.relative_to(folder / place).as_posix()
        table = pq.read_table(path, partitioning=None)
        rows += [f"{partition}: {sorted(row.items())}" for row in table.to_pylist()]
    said = json.dumps(told).replace(str(folder / place), "{folder}").replace(f"stream:{place}/", "")
    return {"streams": streams, "rows": sorted(rows), "told": json.loads(said)}


def orders() -> list[bytes]:
    return json_orders.orders(COUNT, seed=31)


def good_orders() -> list[bytes]:
    """The id of each is its offset."""
    return json_orders.orders(COUNT, seed=34, bad_share=0)


def repeated() -> list[bytes]:
    found = json_orders.orders(COUNT // 2, seed=32, bad_share=0)
    return found + found[::-1]


def clicks() -> list[bytes]:
    """Seven users in turn, and now and then a pause of two hours."""
    times = [
        datetime.fromtimestamp(1_700_000_000 + n * 300 + n // 70 * 7200, UTC) for n in range(COUNT)
    ]
    texts = [{"user": f"u{n % 7}", "at": at.isoformat()} for n, at in enumerate(times)]
    return [json.dumps(text).encode() for text in texts]


def changes() -> list[bytes]:
    return [json.dumps(change).encode() for change in changelog.changes(COUNT, seed=33)]


ENRICH = {
    "key": "id",
    "lookup": "{folder}/table",
    "lookup_key": "offset",
    "add": "landed=timestamp,order=value:json",
}
AUDIT = {"range": 70, "skip_verify": True}
DECODE = {"schema": json_orders.SCHEMA, "dead_letters": "{place}/dead", "create": True}
LINES: dict[str, Line] = {
    "land": Line(orders, (Step("land", "in", "{folder}/lake", {"table": "delta"}),)),
    "copy": Line(orders, (Step("copy", "in", "stream:{place}/out", {"create": True}),)),
    "replay": Line(
        orders,
        (
            Step(
                "replay",
                "in",
                "stream:{place}/out",
                {"create": True, "start_offset": 50, "end_offset": 250},
            ),
        ),
    ),
    "decode": Line(
        orders,
        (
            Step("decode", "in", "stream:{place}/out", DECODE),
            Step("decode", "in", "{folder}/lake", {**DECODE, "dead_letters": "{place}/dead-2"}),
        ),
    ),
    "redrive": Line(
        orders,
        (
            Step("decode", "in", "stream:{place}/out", DECODE),
            Step(
                "redrive",
                "{place}/dead",
                "{folder}/lake",
                {
                    "schema": json_orders.SCHEMA.replace(" NOT NULL", ""),
                    "dead_letters": "{place}/still-dead",
                    "create": True,
                },
            ),
        ),
    ),
    "deduplicate": Line(
        repeated,
        (
            Step(
                "deduplicate",
                "in",
                "stream:{place}/out",
                {"key": "id", "within": "1h", "create": True},
            ),
        ),
    ),
    "materialise": Line(
        changes,
        (
            Step("materialise", "in", "{folder}/state", {}),
            Step("materialise", "in", "stream:{place}/out", {"create": True}),
        ),
    ),
    "sessionise": Line(
        clicks,
        (
            Step(
                "sessionise",
                "in",
                "stream:{place}/out",
                {"key": "user", "gap": "40m", "event_time": "at", "create": True},
            ),
        ),
    ),
    "metrics": Line(
        orders,
        (Step("metrics", "in", "{folder}/lake", {"window": "1s", "late": "0s"}),),
        spread=True,
    ),
    "enrich": Line(
        good_orders,
        (
            Step("land", "in", "{folder}/table", {"table": "delta"}),
            Step("enrich", "in", "stream:{place}/out", {**ENRICH, "create": True}),
            Step("enrich", "in", "{folder}/lake", ENRICH),
        ),
    ),
    "compact": Line(
        orders,
        (
            Step("land", "in", "{folder}/lake", {}),
            Step("compact", "{folder}/lake", "{folder}/large", {}, False),
        ),
    ),
    "audit": Line(
        orders,
        (
            Step("land", "in", "{folder}/lake", {}),
            Step("copy", "in", "stream:{place}/out", {"create": True}),
            Step("audit", "in", "{folder}/lake", {**AUDIT, "checkpoint": "{folder}/0"}, False),
            Step("audit", "in", "stream:{place}/out", {**AUDIT, "checkpoint": "{folder}/1"}, False),
        ),
    ),
}
