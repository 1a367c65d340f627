"""Job `decode` in a real Spark: every record is a typed row or a dead letter, as a fold in plain Python says, also after faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from support.json_orders import SCHEMA, as_letters, fold, good, letters, orders, plain
from support.server import Server
from support.spark_jobs import (
    JSON,
    checksum,
    forget_last_batch,
    records,
    rows,
    run,
    run_through_faults,
)

COUNT = 400


@pytest.fixture
def texts(client: Client) -> list[bytes]:
    found = orders(COUNT, seed=5)
    stream = client.create("in", content_type=JSON)
    for first in range(0, COUNT, 40):
        stream.append_many(found[first : first + 40])
    return found


def check_letters(client: Client, texts: list[bytes]) -> None:
    found = records(client, "dead")
    assert as_letters(found) == letters(texts)
    told = [json.loads(letter) for letter in found]
    assert {(letter["stream"], letter["attempt"]) for letter in told} == {("in", 1)}
    assert {letter["reason"] for letter in told} == {"not_an_object", "wrong_type", "missing"}


def test_to_a_stream_good_and_bad_are_one_commit(
    spark: Any, server: Server, client: Client, tmp_path: Path, texts: list[bytes], full: bool
) -> None:
    """A commit that does not come through, one whose answer is lost, the rest, and the same command again."""
    asked: dict[str, Any] = {
        "schema": SCHEMA,
        "dead_letters": "dead",
        "checkpoint": tmp_path / "checkpoint",
        "max_rows": 150,
        "create": True,
    }
    run_through_faults(spark, server, "decode", "in", "stream:out", full=full, **asked)
    assert len(records(client, "out")) + len(records(client, "dead")) == 300
    for _ in range(2):
        run(spark, "decode", "in", "stream:out", url=server.url, **asked)
        found = [plain(json.loads(record)) for record in records(client, "out")]
        assert checksum(found) == checksum(good(texts))
        check_letters(client, texts)
        forget_last_batch(tmp_path / "checkpoint")


def test_to_a_lake_letters_are_committed_before_the_batch_is_published(
    spark: Any, server: Server, client: Client, tmp_path: Path, texts: list[bytes]
) -> None:
    lake = tmp_path / "lake"
    client.create("dead", content_type=JSON)
    asked = {"schema": SCHEMA, "dead_letters": "dead", "url": server.url}
    asked["partition_by"] = "stream"
    blocked = lake / "stream=in"
    lake.mkdir()
    blocked.touch()
    with pytest.raises(Exception, match="NotADirectoryError"):
        run(spark, "decode", "in", lake, **asked)
    assert len(records(client, "dead")) == len(letters(texts))
    assert blocked.is_file(), "something was published"
    blocked.unlink()
    for _ in range(2):
        run(spark, "decode", "in", lake, **asked)
        found = rows(lake)
        assert checksum(map(plain, found)) == checksum(good(texts))
        assert [row["offset"] for row in found] == [
            n for n, text in enumerate(texts) if isinstance(fold(text), dict)
        ]
        assert "letter" not in found[0]
        check_letters(client, texts)
        forget_last_batch(lake / "_millstream" / "checkpoint")


def refused(options: dict[str, str], said: str, to: str = "stream:t") -> None:
    asked = {"schema": "id BIGINT", "dead-letters": "dead", **options}
    request = Request("u", ("s",), Target.parse(to), asked, checkpoint="c")
    with pytest.raises(Exception, match=said) as caught:
        driver.check(jobs.decode, request)
    assert getattr(caught.value, "hint", None)


def test_what_cannot_work_is_refused_before_spark_starts(tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    refused({"schema": ""}, "needs the option `schema`")
    refused({"dead-letters": ""}, "needs the option `dead-letters`")
    refused({"schema": "id BIGNIT"}, "`BIGNIT` is not a type")
    refused({"schema": "a STRUCT<b: INT>, a_b INT"}, "column `a_b`, but there are two")
    refused({"schema": "id INT, ID INT"}, "column `ID`, but there are two")
    refused({"schema": "offset INT"}, "column `offset`, but the lake has one", lake)
    refused({"dead-letters": "s"}, "read and written by the same job")
    refused({"dead-letters": "t"}, "would be in one stream")
    refused({"table": "delta"}, "--table means nothing for a stream")
    request = Request(
        "u", ("s",), Target.parse("stream:t"), {"schema": "id INT", "dead-letters": "d"},
        {"valueSchema": "id INT"}, checkpoint="c",
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="sets the option `valueSchema`"):
        driver.check(jobs.decode, request)


def test_a_missing_dead_letter_stream_is_told_at_once(server: Server, client: Client) -> None:
    for name in ("s", "t"):
        client.create(name, content_type=JSON)
    asked = {"schema": "id INT", "dead-letters": "nowhere"}
    request = Request(server.url, ("s",), Target.parse("stream:t"), asked, checkpoint="c")
    with pytest.raises(Exception, match="`nowhere` does not exist") as caught:
        driver.reach(jobs.decode, request)
    assert "--create" in str(getattr(caught.value, "hint", ""))
