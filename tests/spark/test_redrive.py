"""Job `redrive` in a real Spark: each letter is in the target, or again a letter with one attempt more; then the lag is 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument
from millstream.spark import jobs, lag
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.run.driver import Step
from support.json_orders import SCHEMA, fold, orders, plain
from support.server import Server
from support.spark_jobs import JSON, checksum, records, rows, run

RELAXED = SCHEMA.replace(" NOT NULL", "")
FOREIGN = b'{"hello": "who put this here?"}'


@pytest.fixture
def texts(spark: Any, server: Server, client: Client, tmp_path: Path) -> list[bytes]:
    """Records that `decode` has seen: good ones in a lake, letters in `dead`."""
    found = orders(120, seed=9, bad_share=0.4)
    client.create("in", content_type=JSON).append_many(found)
    client.create("dead", content_type=JSON)
    run(
        spark, "decode", "in", tmp_path / "lake", schema=SCHEMA, dead_letters="dead", url=server.url
    )
    return found


def test_letters_of_a_lake_go_through_a_repaired_schema(
    spark: Any, server: Server, client: Client, tmp_path: Path, texts: list[bytes]
) -> None:
    client.stream("dead").append_many([FOREIGN])
    tried = len(records(client, "dead")) - 1
    client.create("still-dead", content_type=JSON)
    asked = {"schema": RELAXED, "dead_letters": "still-dead", "checkpoint": tmp_path / "cp"}
    steps: list[Step] = []
    for _ in range(2):
        query = jobs.redrive(spark, "dead", tmp_path / "lake", url=server.url, **asked)
        driver.watch(query, steps.append)
        assert lag(steps[-1].progress).records == 0

        folded = [fold(text, with_id=False) for text in texts]
        good = [(n, plain(row)) for n, row in enumerate(folded) if isinstance(row, dict)]
        found = rows(tmp_path / "lake")
        assert [(row["stream"], row["offset"]) for row in found] == [("in", n) for n, _ in good]
        assert checksum(map(plain, found)) == checksum(text for _, text in good)

        *letters, foreign = map(json.loads, records(client, "still-dead"))
        still = [n for n, row in enumerate(folded) if isinstance(row, tuple)]
        assert [(letter["offset"], letter["attempt"]) for letter in letters] == [
            (n, 2) for n in still
        ]
        assert [letter["value"].encode() for letter in letters] == [texts[n] for n in still]
        assert len(still) < tried, "the repaired schema has repaired nothing"
        assert (foreign["reason"], foreign["stream"]) == ("not_a_letter", "dead")
        assert (foreign["offset"], foreign["attempt"]) == (tried, 1)
        assert foreign["value"].encode() == FOREIGN


def test_letters_would_never_be_drained_into_their_own_stream() -> None:
    asked = {"schema": "id INT", "dead-letters": "dead"}
    to = Target.parse("stream:t")
    with pytest.raises(InvalidArgument, match="`dead` would be read and written"):
        driver.check(jobs.redrive, Request("u", ("dead",), to, asked, checkpoint="c"))
    with pytest.raises(InvalidArgument, match="needs a checkpoint"):
        driver.check(jobs.redrive, Request("u", ("d",), Target.parse("lake"), asked))
