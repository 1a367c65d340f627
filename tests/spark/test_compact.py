"""Job `compact` in a real Spark: fewer files, the same records, whatever happens at the same time or in the middle."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from millstream.client.sync.client import Client
from millstream.errors import CheckpointBusy, InvalidArgument, PipelineError
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.lake import iceberg, rewrite
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.run.lock import locked
from support.lakes import Lake, seen
from support.server import Server
from support.spark_jobs import JSON, forget_last_batch, run

NAMES = ["a b", "ümlaut", "a#b", "50%", "chat/1", "日本"]
YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
TABLES = ("delta", "iceberg")


def batch(first: int, count: int = 60, at: datetime.datetime = YESTERDAY) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.record_batch(
        {
            "stream": [NAMES[n % len(NAMES)] for n in numbers],
            "offset": pa.array([n // len(NAMES) for n in numbers], pa.int64()),
            "timestamp": pa.array([at] * count, pa.timestamp("us", "Asia/Kolkata")),
            "value": [b'{"n":%d}' % n for n in numbers],
        }
    )


def filled(root: Path, table: str, by: str = "date", batches: int = 4) -> Lake:
    lake = Lake(root, table, by)
    for number in range(batches):
        lake.add([batch(number * 60)])
    return lake


def compact(spark: Any, lake: Path, to: Path | None = None, **given: Any) -> dict[str, Any]:
    assert spark.conf.get("spark.sql.session.timeZone") != "UTC"
    found: dict[str, Any] = jobs.compact(spark, str(lake), to, **given).document()
    return found


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("by", [pytest.param("date", marks=pytest.mark.long), "date,stream"])
def test_closed_partitions_of_a_table_become_few_files_in_one_commit(
    spark: Any, tmp_path: Path, table: str, by: str
) -> None:
    lake = filled(tmp_path / ("läke 1" if table == "iceberg" else "läke #1"), table, by)
    today = batch(240, at=datetime.datetime.now(datetime.UTC))
    lake.add([today])
    lake.add([today])
    before, versions = seen(lake.root, table), version(lake)
    report = compact(spark, lake.root)
    one_each = len(NAMES) if "stream" in by else 1
    assert (report["replaced"], report["written"]) == (4 * one_each, one_each)
    assert report["files_after"] == 3 * one_each  # those of today are as they were
    assert (seen(lake.root, table), version(lake)) == (before, versions + 1)
    assert compact(spark, lake.root)["replaced"] == 0
    assert version(lake) == versions + 1
    assert compact(spark, lake.root, all=True)["files_after"] == 2 * one_each
    assert seen(lake.root, table) == before
    assert not list((lake.root / "_millstream" / "tmp").rglob("*.tmp"))


def version(lake: Lake) -> int:
    if lake.layout.table == "delta":
        return deltalake.DeltaTable(lake.root).version()
    catalog = iceberg.open_catalog(lake.layout)
    try:
        return len(catalog.load_table(iceberg.IDENTIFIER).snapshots())
    finally:
        catalog.close()


@pytest.mark.parametrize("table", ["delta", pytest.param("iceberg", marks=pytest.mark.long)])
def test_land_goes_on_behind_a_compaction_and_knows_its_batches(
    spark: Any, server: Server, client: Client, tmp_path: Path, table: str
) -> None:
    stream = client.create("s #ü", content_type=JSON)
    lake = tmp_path / "lake"
    for first in (0, 45):
        stream.append_many([{"n": n} for n in range(first, first + 45)])
        run(spark, "land", "s #ü", lake, url=server.url, table=table)
    assert compact(spark, lake, all=True)["replaced"] == 2
    # Spark runs the newest batch again: the table must know it.
    forget_last_batch(lake / "_millstream" / "checkpoint")
    stream.append_many([{"n": n} for n in range(90, 100)])
    run(spark, "land", "s #ü", lake, url=server.url, table=table)
    assert [row[1] for row in seen(lake, table)] == list(range(100))
    assert jobs.audit(spark, "s #ü", lake, url=server.url, skip_verify=True).ok


@pytest.mark.parametrize("table", TABLES)
def test_a_batch_that_lands_meanwhile_is_neither_lost_nor_doubled(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """The other one commits after the files were chosen and written, right before the commit of the compaction."""
    lake = filled(tmp_path / "lake", table)
    if table == "delta":
        optimizer = deltalake.table.TableOptimizer
        inner = optimizer.compact

        def late(self: Any, **given: Any) -> Any:
            lake.add([batch(240)])
            return inner(self, **given)

        monkeypatch.setattr(optimizer, "compact", late)
    else:
        replace = iceberg.replace_files

        def between(*given: Any) -> None:
            load = given[1].load_table

            def stale(*named: Any) -> Any:
                table = load(*named)
                given[1].load_table = load
                lake.add([batch(240)])
                return table

            given[1].load_table = stale
            replace(*given)

        monkeypatch.setattr(iceberg, "replace_files", between)
    report = compact(spark, lake.root)
    monkeypatch.undo()
    assert (report["replaced"], report["files_after"]) == (4, 2)
    assert len(set(seen(lake.root, table))) == len(seen(lake.root, table)) == 300
    lake.add([batch(300)])
    assert len(seen(lake.root, table)) == 360


@pytest.mark.parametrize("table", TABLES)
def test_a_second_compaction_in_between_loses_cleanly(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    lake = filled(tmp_path / "lake", table)
    before = seen(lake.root, table)
    with locked(lake.root / "_millstream" / "compact"), pytest.raises(CheckpointBusy, match="lake"):
        compact(spark, lake.root)
    if table == "iceberg":
        replace = iceberg.replace_files

        def twice(*given: Any) -> None:
            monkeypatch.undo()
            monkeypatch.setattr(compact_job_module(), "locked", unlocked)
            compact(spark, lake.root)
            replace(*given)

        monkeypatch.setattr(iceberg, "replace_files", twice)
        with pytest.raises(PipelineError, match="has changed while it was compacted") as caught:
            compact(spark, lake.root)
        assert caught.value.code == "lake_changed"
    else:
        compact(spark, lake.root)
    assert seen(lake.root, table) == before


def compact_job_module() -> Any:
    import sys

    return sys.modules["millstream.spark.jobs.compact"]


class unlocked:  # noqa: N801 - stands for a function
    """The lock of another machine is not seen here."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Died(BaseException):
    """As if the process had ended: nothing catches it."""


def test_what_a_crash_leaves_of_an_iceberg_table_is_removed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = filled(tmp_path / "lake", "iceberg")
    before, files = seen(lake.root, "iceberg"), lake.files()

    for point in ("before", "after"):
        replace = iceberg.replace_files

        def dying(*given: Any, point: str = point, replace: Any = replace) -> None:
            if point == "after":
                replace(*given)
            raise Died

        monkeypatch.setattr(iceberg, "replace_files", dying)
        with pytest.raises(Died):
            compact(spark, lake.root)
        monkeypatch.undo()
        assert seen(lake.root, "iceberg") == before
        for left in (lake.root / "_millstream" / "tmp").glob("compact-*"):
            os.utime(left, (0, 0))
    assert len(lake.files()) == len(files) + 1  # of the first crash nothing is left
    assert compact(spark, lake.root)["replaced"] == 0
    assert seen(lake.root, "iceberg") == before
    lake.add([batch(240)])
    assert compact(spark, lake.root)["replaced"] == 2
    assert len(seen(lake.root, "iceberg")) == 300


@pytest.mark.parametrize(
    "by", ["date", "date,stream", pytest.param("none", marks=pytest.mark.long)]
)
def test_a_plain_lake_becomes_another_one(
    spark: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    lake = filled(tmp_path / "lake", "parquet", by)
    to = tmp_path / "new lake #2"
    if by == "date":

        def die(*_: Any, **__: Any) -> None:
            raise Died

        monkeypatch.setattr(rewrite, "rewrite", die)
        with pytest.raises(Died):
            compact(spark, lake.root, to)
        monkeypatch.undo()
        assert not to.exists()
    files, before = lake.files(), seen(lake.root, "parquet")
    report = compact(spark, lake.root, to)
    assert report["files_after"] == (len(NAMES) if "stream" in by else 1)
    assert seen(to, "parquet") == before == seen(lake.root, "parquet")
    assert lake.files() == files
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(InvalidArgument, match="exists already"):
        compact(spark, lake.root, to)
    again = tmp_path / "third"
    compact(spark, to, again)
    assert seen(again, "parquet") == before
    land = Request(server.url, ("s",), Target.parse(str(to)), {"partition-by": by})
    with pytest.raises(InvalidArgument, match="land the same records a second time"):
        driver.check(jobs.land, land)


def test_a_plain_lake_is_taken_at_the_end_of_a_batch(spark: Any, tmp_path: Path) -> None:
    lake = filled(tmp_path / "lake", "parquet", "date,stream")
    before = seen(lake.root, "parquet")
    lake.add([batch(240)])
    # As if this batch were being published: one of its files still has its temporary name.
    from millstream.spark.jobs.lake.publish import Manifest

    path = lake.layout.manifest(lake.query, 4)
    file = Manifest.decode(path.read_bytes(), path).files[0]
    (lake.root / file.temporary).parent.mkdir(parents=True)
    (lake.root / file.path).rename(lake.root / file.temporary)
    compact(spark, lake.root, tmp_path / "new")
    assert seen(tmp_path / "new", "parquet") == before


def test_a_compacted_plain_lake_passes_the_audit(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    stream = client.create("s", content_type=JSON)
    lake = Lake(tmp_path / "lake")
    for first in range(0, 90, 30):
        stream.append_many([{"n": n} for n in range(first, first + 30)])
        lake.land(client, "s", first=first)
    compact(spark, lake.root, tmp_path / "new")
    report = jobs.audit(spark, "s", tmp_path / "new", url=server.url, skip_verify=True)
    assert (report.ok, report.streams[0].in_target) == (True, 90)


def test_what_cannot_be_compacted_is_one_clear_error(spark: Any, tmp_path: Path) -> None:
    plain, delta = filled(tmp_path / "p", "parquet").root, filled(tmp_path / "d", "delta").root
    cases: list[tuple[Path, Path | str | None, dict[str, Any], str]] = [
        (tmp_path / "none", None, {}, "there is no lake at"),
        (plain, None, {}, "in place its readers would see"),
        (plain, plain / "inside", {}, "inside of each other"),
        (plain, tmp_path / "d", {}, "exists already"),
        (plain, tmp_path / "x", {"all": True}, "written anew whole"),
        (plain, "stream:s", {}, "writes files, not"),
        (delta, tmp_path / "x", {}, "compacted where it is"),
        (delta, None, {"every": 3}, "--every means nothing"),
        (delta, None, {"checkpoint": "c"}, "--checkpoint means nothing"),
        (delta, None, {"tokenEnv": "T"}, "reads no stream"),
    ]
    for lake, to, given, said in cases:
        with pytest.raises(InvalidArgument, match=said) as caught:
            jobs.compact(spark, str(lake), to, **given)
        assert caught.value.hint
    assert not (tmp_path / "x").exists()
