"""Job `materialise` in a real Spark: every version is the fold of the changes so far, also when publishing one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument, MillstreamError
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from support.changelog import State, as_sum, changes, fold, snapshots, state_of, without_offsets
from support.server import Server
from support.spark_jobs import JSON, forget_last_batch, records, run, run_through_faults

PER_BATCH = 200
BATCHES = 2


def version(root: Path, number: int) -> State:
    found = pq.read_table(root / f"version={number:08d}", partitioning=None)
    assert found.schema.field("timestamp").type == pa.timestamp("us", "UTC")
    return state_of(found)


def test_every_version_is_the_fold_of_the_changes_so_far(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    sent = changes(PER_BATCH * BATCHES, seed=11)
    client.create("log", content_type=JSON).append_many(sent)
    root = tmp_path / "state"
    asked = {"url": server.url, "max_rows": PER_BATCH, "table": "delta"}
    blocked = root / "version=00000001"
    root.mkdir()
    blocked.touch()
    with pytest.raises(MillstreamError, match="NotADirectoryError"):
        run(spark, "materialise", "log", root, **asked)
    blocked.unlink()
    before: list[Path] = []
    for _ in range(2):
        run(spark, "materialise", "log", root, **asked)
        for number in range(BATCHES):
            wanted = fold(sent[: PER_BATCH * (number + 1)])
            assert as_sum(version(root, number)) == as_sum(wanted), f"version {number}"
        delta = deltalake.DeltaTable(root)
        assert as_sum(state_of(pa.table(delta.to_pyarrow_table()))) == as_sum(fold(sent))
        assert delta.version() == BATCHES
        found = sorted(path for path in root.glob("version=*/*"))
        assert before in ([], found)
        before = found
        forget_last_batch(root / "_millstream" / "checkpoint")


def test_snapshots_in_a_stream_are_the_state_of_whoever_reads_it(
    spark: Any, server: Server, client: Client, tmp_path: Path, full: bool
) -> None:
    sent = changes(PER_BATCH * BATCHES, seed=12)
    client.create("log", content_type=JSON).append_many(sent)
    asked = {"max_rows": PER_BATCH, "checkpoint": tmp_path / "cp", "create": True}
    run_through_faults(spark, server, "materialise", "log", "stream:now", full=full, **asked)
    for _ in range(2):
        run(spark, "materialise", "log", "stream:now", url=server.url, **asked)
        found = snapshots(records(client, "now"))
        wanted = [fold(sent[: PER_BATCH * number]) for number in range(1, BATCHES + 1)]
        assert list(map(as_sum, found)) == list(map(as_sum, map(without_offsets, wanted)))
        forget_last_batch(tmp_path / "cp")


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
