"""Job `materialise` in a real Spark: every version is the fold of the changes so far, also when publishing one fails."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument, MillstreamError
from millstream.spark import jobs
from millstream.spark.jobs import driver
from millstream.spark.jobs.job import Request, Target
from support.server import Server
from support.spark_jobs import JSON, checksum, failing_commit, forget_last_batch, records, run

PER_BATCH = 150
BATCHES = 3
VALUES = (lambda n: {"n": n, "ü": [n, None]}, str, lambda n: n, lambda n: f'"{n}"', lambda _: None)
"""A string that spells a number is not that number."""
State = dict[tuple[str, str], tuple[int, Any]]


def changes(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    found: list[dict[str, Any]] = []
    for n in range(PER_BATCH * BATCHES):
        if n in (40, 330):
            found.append({"headers": {"control": "reset"}})
            continue
        if n % 97 == 5:
            found.append({"headers": {"control": "snapshot-start", "offset": "x"}})
            continue
        operation = chance.choice(["insert", "update", "upsert", "delete"])
        found.append(
            {
                "type": chance.choice(["user", "order"]),
                "key": f"k{chance.randrange(60)}",
                **({} if operation == "delete" else {"value": VALUES[n % len(VALUES)](n)}),
                "headers": {"operation": operation, "timestamp": "2026-01-01T00:00:00Z"},
            }
        )
    return found


def fold(sent: list[dict[str, Any]]) -> State:
    state: State = {}
    for offset, change in enumerate(sent):
        if change["headers"].get("control") == "reset":
            state.clear()
        if "control" in change["headers"]:
            continue
        key = (change["type"], change["key"])
        state.pop(key, None)
        if change["headers"]["operation"] != "delete":
            state[key] = (offset, change["value"])
    return state


def as_sum(state: State) -> tuple[int, int]:
    return checksum(json.dumps(entry).encode() for entry in sorted(state.items()))


def state_of(table: pa.Table) -> State:
    return {
        (row["type"], row["key"]): (row["offset"], json.loads(row["value"]))
        for row in table.to_pylist()
    }


def version(root: Path, number: int) -> State:
    found = pq.read_table(root / f"version={number:08d}", partitioning=None)
    assert found.schema.field("timestamp").type == pa.timestamp("us", "UTC")
    return state_of(found)


@pytest.mark.parametrize("table", ["parquet", "delta"])
def test_every_version_is_the_fold_of_the_changes_so_far(
    spark: Any, server: Server, client: Client, tmp_path: Path, table: str
) -> None:
    sent = changes(seed=11)
    client.create("log", content_type=JSON).append_many(sent)
    root = tmp_path / "state"
    asked = {"url": server.url, "max_rows": PER_BATCH, "table": table}
    blocked = root / "version=00000001"
    root.mkdir()
    blocked.touch()
    with pytest.raises(MillstreamError, match="NotADirectoryError"):
        run(spark, "materialise", "log", root, **asked)
    blocked.unlink()
    for _ in range(2):
        run(spark, "materialise", "log", root, **asked)
        for number in range(BATCHES):
            wanted = fold(sent[: PER_BATCH * (number + 1)])
            assert as_sum(version(root, number)) == as_sum(wanted), f"version {number}"
        if table == "delta":
            delta = deltalake.DeltaTable(root)
            assert as_sum(state_of(pa.table(delta.to_pyarrow_table()))) == as_sum(fold(sent))
            assert delta.version() == BATCHES
        before = sorted(path for path in root.glob("version=*/*"))
        forget_last_batch(root / "_millstream" / "checkpoint")
    assert sorted(path for path in root.glob("version=*/*")) == before


def test_snapshots_in_a_stream_are_the_state_of_whoever_reads_it(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    sent = changes(seed=12)
    client.create("log", content_type=JSON).append_many(sent)
    asked = {"max_rows": PER_BATCH, "checkpoint": tmp_path / "cp", "create": True}
    with failing_commit(server, 2, "after") as url:
        run(spark, "materialise", "log", "stream:now", url=url, readTimeout="1s", **asked)
    for _ in range(2):
        run(spark, "materialise", "log", "stream:now", url=server.url, **asked)
        found = [json.loads(text) for text in records(client, "now")]
        assert found.count({"headers": {"control": "reset"}}) == BATCHES
        ends = [
            n for n, one in enumerate(found, 1) if one["headers"].get("control") == "snapshot-end"
        ]
        for number, end in enumerate(ends, 1):
            now = {key: (0, value) for key, (_, value) in fold(found[:end]).items()}
            wanted = fold(sent[: PER_BATCH * number])
            assert as_sum(now) == as_sum({key: (0, value) for key, (_, value) in wanted.items()})


def test_a_record_that_is_not_a_change_is_one_clear_error(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    client.create("log", content_type=JSON).append_many(
        [{"key": "a", "headers": {"operation": "bump"}}]
    )
    with pytest.raises(MillstreamError, match="record 0 of stream `log` is not a change") as caught:
        run(spark, "materialise", "log", tmp_path / "state", url=server.url)
    assert caught.value.code == "not_a_change"
    assert not list((tmp_path / "state").glob("version=*"))


def test_what_cannot_work_is_refused_before_spark_starts(tmp_path: Path) -> None:
    to = Target.parse("stream:t")
    for streams, options, said in (
        (("a", "b"), {}, "of one changelog"),
        (("a/*",), {}, "of one changelog"),
        (("t",), {}, "read and written by the same job"),
        (("a",), {"table": "parquet"}, "--table means nothing"),
    ):
        request = Request("u", streams, to, options, checkpoint=str(tmp_path / "cp"))
        with pytest.raises(InvalidArgument, match=said):
            driver.check(jobs.materialise, request)
    (tmp_path / "_millstream").mkdir()
    (tmp_path / "_millstream" / "owner").write_text("another\n")
    with pytest.raises(InvalidArgument, match="another checkpoint, of query another"):
        driver.check(jobs.materialise, Request("u", ("s",), Target.parse(str(tmp_path))))
