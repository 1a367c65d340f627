"""Jobs in the shared session: one run as a program has it, a fault at its commit, and what streams and lakes hold.

Invariants: a run has a deadline of its own (the test's); what is compared is count and checksum of everything, in order where the
job keeps an order.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset as dataset
import pytest

from millstream.client.sync.client import Client
from millstream.client.sync.reads import PipelineReads
from millstream.spark import jobs
from millstream.spark.jobs.run import driver
from support.fault_proxy import FaultProxy, Moment, drop
from support.server import Server

COMMIT = "/v1/commit"
JSON = "application/json"
CLOCK_DEADLINE_S = 10.0
Sum = tuple[int, int]


def run(spark: Any, name: str, streams: Any, to: Any, **given: Any) -> int:
    """One run to the tail; returns its rows."""
    query = jobs.JOBS[name](spark, streams, to, **given)
    return driver.watch(query, lambda _: None).rows


def checksum(parts: Iterable[bytes]) -> Sum:
    """How many, and what they are, in this order."""
    count = value = 0
    for count, part in enumerate(parts, 1):  # noqa: B007 - the last one is the count
        value = zlib.crc32(b"%d:%b" % (len(part), part), value)
    return count, value


def records(client: Client, stream: str) -> list[bytes]:
    """Every record as it was sent."""
    found: list[bytes] = []
    with client.stream(stream).read_arrow(columns=["value"]) as batches:
        for batch in batches:
            found += batch.column("value").to_pylist()
    return found


def rows(lake: Path) -> list[dict[str, Any]]:
    """What a plain reader finds in a lake."""
    table = dataset.dataset(lake, format="parquet", partitioning="hive").to_table()
    return sorted(table.to_pylist(), key=lambda row: (row["stream"], row["offset"]))


@contextmanager
def failing_commit(server: Server, nth: int, moment: Moment) -> Iterator[str]:
    """The address of a server that is not reached any more from its n-th commit on; the block must fail by it."""
    proxy = FaultProxy(server)
    rule = proxy.at("POST", COMMIT, drop, nth=nth, times=1_000_000, moment=moment)
    try:
        with pytest.raises(Exception, match="cannot reach"):
            yield proxy.url
        assert rule.seen >= nth, "no commit failed"
    finally:
        proxy.close()


def run_through_faults(
    spark: Any, server: Server, name: str, streams: Any, to: Any, *, full: bool, **given: Any
) -> None:
    """A run that never hears of its second, applied, commit; at the full counts before it one whose first reaches nobody."""
    faults: list[tuple[int, Moment]] = [(1, "before"), (2, "after")]
    for nth, moment in faults if full else faults[1:]:
        with failing_commit(server, nth, moment) as url:
            run(spark, name, streams, to, url=url, readTimeout="1s", **given)


def next_second(client: Client) -> None:
    """Returns when the server's clock shows another second than now."""
    reads = PipelineReads(client)

    def second() -> int:
        return reads.tails(streams=[]).now_ms // 1000

    began, deadline = second(), time.monotonic() + CLOCK_DEADLINE_S
    while second() == began:
        assert time.monotonic() < deadline, "the server's clock stands still"


def forget_last_batch(checkpoint: Path) -> None:
    """As if the driver had died between the commit to the sink and Spark's own note of it."""
    last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
