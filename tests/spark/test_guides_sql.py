"""What the documents show of Spark besides the Python of the guides: the SQL of spark.md, the Python of exactly-once.md."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.guides import GUIDES, blocks_of
from support.server import ROOT, Server
from support.spark_jobs import JSON, records

ADDRESS = "http://127.0.0.1:4437"
EXACTLY_ONCE = ROOT / "docs" / "concepts" / "exactly-once.md"
CHECKPOINT = "/data/checkpoints/copy"
SENT = [b'{"id":1}', b'{"id":2}']


def test_the_sql_of_the_guide_runs(spark: Any, server: Server, client: Client) -> None:
    client.create("orders", content_type=JSON).append_many(SENT)
    client.create("all-orders", content_type=JSON)
    (block,) = blocks_of(GUIDES / "spark.md", "sql")
    assert ADDRESS in block
    text = re.sub(r"--.*", "", block).replace(ADDRESS, server.url)
    session = spark.newSession()  # the views end with it
    found = [session.sql(one).collect() for one in text.split(";") if one.strip()]
    assert [rows[0][0] for rows in found if rows] == [len(SENT)]
    assert records(client, "all-orders") == SENT


@pytest.mark.usefixtures("queries")
def test_the_python_of_exactly_once_runs(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    orders, copy = (client.create(name, content_type=JSON) for name in ("orders", "orders-copy"))
    found: dict[str, Any] = {"spark": spark}
    # It leaves the address to MILLSTREAM_URL, which the shared JVM was started without.
    here = f'format("millstream").option("url", "{server.url}")'
    shown = blocks_of(EXACTLY_ONCE, "python")
    copying, writing = (text.replace('format("millstream")', here) for text in shown)
    assert CHECKPOINT in copying
    exec(copying.replace(CHECKPOINT, str(tmp_path / "copy")), found)
    (query,) = spark.streams.active
    query.processAllAvailable()  # it begins at the tail
    orders.append_many(SENT)
    until = time.monotonic() + 60
    while not records(client, copy.path) and time.monotonic() < until:
        query.processAllAvailable()  # as far as the query has heard of what was appended
    assert records(client, copy.path) == SENT
    query.stop()

    exec(writing, found)
    rows = spark.createDataFrame([('{"id":3}',)], "value STRING")
    for _ in range(2):  # a batch that comes again is dropped
        found["write"](rows, 7)
    assert records(client, copy.path) == [*SENT, b'{"id":3}']
