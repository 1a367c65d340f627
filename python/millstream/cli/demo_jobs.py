"""What the demo makes of its records beside the lake: the stock of the shop as a table, the visits of its customers as a stream.

Where it sits: called by `demo` in the session that lands; the jobs are `materialise` and `sessionise` of `millstream.spark.jobs`.
Invariant I-DMJ-1: what a job has made is compared with a fold of the stream in plain Python, through the client; if they differ, the
demo fails.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.demo_load import CLICKS, STOCK
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from millstream.client.sync.client import Client

VISITS: Final = "shop/visits"
GAP_MINUTES: Final = 15
LATE_MINUTES: Final = 1


@dataclass(frozen=True, slots=True)
class Stock:
    """The state of the changelog `shop/stock`."""

    keys: int
    changes: int
    files: Path
    """The version that holds it."""

    def __str__(self) -> str:
        return (
            f"{self.changes:,} changes of the stock make {self.keys} rows in {self.files.name}: "
            "the table and a fold of the stream agree"
        )


def materialise(
    session: Any, client: Client, directory: Path, on_poll: Callable[[], None]
) -> Stock:
    """The latest stock of each product, as a table in versions."""
    from millstream.spark import jobs
    from millstream.spark.jobs.run import driver
    from millstream.spark.jobs.shared.table_versions import Versions

    root = directory / "stock"
    query = jobs.materialise(session, STOCK, root, url=client.url)
    with driver.running(query):
        driver.watch(query, lambda _: None, on_poll)
    versions = Versions(root)
    files = versions.path(versions.numbers()[-1])
    changes, wanted = _folded(client)
    found = _rows(files)
    if found != wanted:
        raise MillstreamError(
            f"the table of the stock has {len(found)} rows, the stream makes {len(wanted)}, and they differ",
            code="demo_failed",
        )
    return Stock(len(found), changes, files)


@dataclass(frozen=True, slots=True)
class Visits:
    """The sessions in `shop/clicks` that are over."""

    closed: int
    clicks: int
    open: int

    def __str__(self) -> str:
        return (
            f"{self.clicks:,} clicks are {self.closed:,} visits in `{VISITS}`, {self.open} more are not "
            "over: the stream and a fold of the clicks agree"
        )


def sessionise(
    session: Any, client: Client, directory: Path, on_poll: Callable[[], None]
) -> Visits:
    """The visits of each visitor, as records of a stream."""
    from millstream.spark import jobs
    from millstream.spark.jobs.run import driver

    query = jobs.sessionise(
        session, CLICKS, f"stream:{VISITS}", url=client.url, key="visitor", gap=f"{GAP_MINUTES}m",
        event_time="at", late=f"{LATE_MINUTES}m", checkpoint=directory / "visits-checkpoint", create=True,
    )  # fmt: skip
    with driver.running(query):
        driver.watch(query, lambda _: None, on_poll)
    found = sorted(_visit(record.value) for record in client.stream(VISITS).read())
    wanted, still_open = _visits(client)
    if found != wanted:
        raise MillstreamError(
            f"there are {len(found)} visits in `{VISITS}`, the clicks make {len(wanted)}, and they differ",
            code="demo_failed",
        )
    return Visits(len(found), sum(count for *_, count in found), len(still_open))


def _visit(value: dict[str, Any]) -> tuple[str, str, str, int]:
    times = [datetime.datetime.fromisoformat(value[name]).isoformat() for name in ("start", "end")]
    return value["key"], times[0], times[1], value["count"]


def _visits(client: Client) -> tuple[list[tuple[str, str, str, int]], list[Any]]:
    """Visits that are over, and those that are not; the clicks are in the order of their times."""
    gap, late = (datetime.timedelta(minutes=m) for m in (GAP_MINUTES, LATE_MINUTES))
    last: dict[str, list[Any]] = {}
    done: list[list[Any]] = []
    at = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    for record in client.stream(CLICKS).read():
        at = datetime.datetime.fromisoformat(record.value["at"])
        visit = last.get(record.value["visitor"])
        if visit is None or at - visit[2] > gap:
            visit = last[record.value["visitor"]] = [record.value["visitor"], at, at, 0]
            done.append(visit)
        visit[2:] = [at, visit[3] + 1]
    over = [one for one in done if one[2] + gap <= at - late]
    rest = [one for one in done if one[2] + gap > at - late]
    return sorted((k, b.isoformat(), e.isoformat(), n) for k, b, e, n in over), rest


def _folded(client: Client) -> tuple[int, dict[str, Any]]:
    """How many changes there are, and what they come to."""
    state: dict[str, Any] = {}
    count = 0
    for count, record in enumerate(client.stream(STOCK).read(), 1):  # noqa: B007 - the last one is the count
        change = record.value
        state.pop(change["key"], None)
        if change["headers"]["operation"] != "delete":
            state[change["key"]] = change["value"]
    return count, state


def _rows(files: Path) -> dict[str, Any]:
    import json

    import pyarrow.parquet as pq

    table = pq.read_table(files, columns=["key", "value"], partitioning=None)
    return {row["key"]: json.loads(row["value"]) for row in table.to_pylist()}
