"""Runs of jobs as a program has them: against a server that wants a token, and what a run that finds nothing says of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.errors import Unauthorized
from millstream.spark import jobs
from millstream.spark.jobs.run import driver
from support.reverse_proxy import ReverseProxy
from support.server import Server
from support.spark import TOKEN
from support.spark_jobs import JSON, records, rows, run


def test_sources_and_sinks_of_a_job_have_the_token(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    sent = [b'{"id":%d}' % number for number in range(20)] + [b'{"id":"none"}']
    client.create("in", content_type=JSON).append_many(sent)
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    with ReverseProxy(server.port, TOKEN) as proxy:
        asked = {"url": proxy.url, "tokenFile": str(token), "create": True}
        with pytest.raises(Unauthorized, match="401"):
            jobs.copy(spark, "in", "stream:out", url=proxy.url, checkpoint=tmp_path / "none")
        assert not (tmp_path / "none").exists()
        run(spark, "copy", "in", "stream:out", checkpoint=tmp_path / "copy", **asked)
        run(
            spark, "decode", "in", tmp_path / "lake", schema="id BIGINT", dead_letters="dead", **asked
        )  # fmt: skip
    assert records(client, "out") == sent
    assert [row["id"] for row in rows(tmp_path / "lake")] == list(range(20))
    assert len(records(client, "dead")) == 1
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path != token]
    assert kept
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]


def test_a_run_that_finds_nothing_new_says_what_stays_open(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    client.create("in", content_type=JSON).append_many([{"id": n} for n in range(5)])
    found = []
    for _ in range(2):
        query = jobs.deduplicate(
            spark, "in", tmp_path / "lake", url=server.url, key="id", within="1h", checkpoint=tmp_path / "cp"
        )  # fmt: skip
        found.append(driver.watch(query, lambda _: None, checkpoint=tmp_path / "cp"))
    assert [summary.rows for summary in found] == [5, 0]
    assert [summary.state for summary in found] == [driver.State(5, 0)] * 2
