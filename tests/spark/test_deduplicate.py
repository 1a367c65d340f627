"""Job `deduplicate` in a real Spark: each key once within its time, as a fold in plain Python says, also after failed commits."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.errors import MillstreamError
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
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

BEGIN = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)


def record(key: str, minutes: float) -> bytes:
    at = (BEGIN + timedelta(minutes=minutes)).replace(tzinfo=None)  # without a zone it is UTC
    return json.dumps({"order": {"id": key}, "at": at.isoformat()}).encode()


def keys(found: list[bytes]) -> list[str]:
    return [json.loads(text)["order"]["id"] for text in found]


def test_repetitions_are_left_out_after_failed_commits(
    spark: Any, server: Server, client: Client, tmp_path: Path, full: bool
) -> None:
    chance = random.Random(3)
    sent = [record(f"k{n}", n / 20) for n in range(300)]
    sent += [text for text in sent if chance.random() < 0.5]
    chance.shuffle(sent)
    client.create("in", content_type=JSON).append_many(sent)
    asked = {"key": "order.id", "within": "1h", "event_time": "at", "checkpoint": tmp_path / "cp"}
    asked |= {"max_rows": 250, "create": True}
    run_through_faults(spark, server, "deduplicate", "in", "stream:out", full=full, **asked)
    for _ in range(2):
        run(spark, "deduplicate", "in", "stream:out", url=server.url, **asked)
        wanted = dict.fromkeys(sent)  # the first of each, since repetitions are the same text
        assert checksum(sorted(records(client, "out"))) == checksum(sorted(wanted))
        forget_last_batch(tmp_path / "cp")


def test_a_key_is_forgotten_after_its_time_and_late_records_are_counted(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    batches = [
        [("a", 0), ("b", 1), ("a", 2)],
        [("c", 180), ("c", 181), ("a", 30)],
        [("c", 182), ("d", 183), ("c", 183)],
        [("late", 90), ("a", 184), ("d", 186)],
    ]
    stream = client.create("in", content_type=JSON)
    for batch in batches:
        stream.append_many([record(*entry) for entry in batch])
    query = jobs.deduplicate(
        spark, "in", tmp_path / "lake", url=server.url, key="order.id", within="1h", event_time="at", max_rows=3
    )  # fmt: skip
    found = driver.watch(query, lambda _: None)
    assert (found.rows, found.state and found.state.late) == (5, 1)
    assert found.state is not None
    assert "came late" in str(found.state)
    assert keys([row["value"] for row in rows(tmp_path / "lake")]) == ["a", "b", "c", "d", "a"]
    before = sorted((tmp_path / "lake").rglob("*.parquet"))
    forget_last_batch(tmp_path / "lake" / "_millstream" / "checkpoint")
    run(
        spark, "deduplicate", "in", tmp_path / "lake", url=server.url, key="order.id", within="1h", event_time="at", max_rows=3
    )  # fmt: skip
    assert sorted((tmp_path / "lake").rglob("*.parquet")) == before


def test_a_record_without_its_key_is_one_clear_error(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    client.create("in", content_type=JSON).append_many([record("a", 0), b'{"order":{"id":null}}'])
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    with pytest.raises(
        MillstreamError, match=r"record 1 of stream `in` has no `order.id`"
    ) as caught:
        run(
            spark, "deduplicate", "in", "stream:out", url=server.url, key="order.id", within="1h",
            checkpoint=tmp_path / "cp", create=True,
        )  # fmt: skip
    assert caught.value.code == "field_missing"
    assert "decode" in (caught.value.hint or "")
    assert spark.conf.get("spark.sql.shuffle.partitions") == partitions
    assert "RocksDB" not in spark.conf.get("spark.sql.streaming.stateStore.providerClass")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"within": "1h"}, "needs the option `key`"),
        ({"key": "id"}, "needs the option `within`"),
        ({"key": "id", "within": "soon"}, "`soon` is not a duration"),
        ({"key": "id", "within": "1h", "table": "delta"}, "--table means nothing for a stream"),
    ],
)
def test_what_cannot_work_is_refused_before_spark_starts(
    options: dict[str, str], said: str
) -> None:
    request = Request("u", ("s",), Target.parse("stream:t"), options, checkpoint="c")
    with pytest.raises(MillstreamError, match=said):
        driver.check(jobs.deduplicate, request)
