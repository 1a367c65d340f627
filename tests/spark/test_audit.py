"""Job `audit` in a real Spark: what is whole is whole, and each damage is found with its stream and range of records."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument, StreamNotFound
from millstream.spark import jobs
from millstream.spark.jobs.audits.audit_report import AuditReport
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from support.lakes import TABLES, Lake, read
from support.server import Server
from support.spark_jobs import JSON, run

ODD = "shop/ümlaut #1 日本"
COUNT = 250


def fill(client: Client, name: str = "s", count: int = COUNT, **more: Any) -> Any:
    stream = client.create(name, content_type=JSON, **more)
    for first in range(0, count, 50):
        stream.append_many([{"n": n} for n in range(first, min(first + 50, count))])
    return stream


def audit(spark: Any, server: Server, streams: Any, to: Any, **given: Any) -> AuditReport:
    assert spark.conf.get("spark.sql.session.timeZone") != "UTC"
    given = {"skip_verify": True, "range": 100, **given}
    report: AuditReport = jobs.audit(spark, streams, to, url=server.url, **given)
    return report


def told(report: AuditReport) -> list[tuple[str, str, int, int]]:
    return [(one.kind, one.stream, one.first, one.last) for one in report.findings]


@pytest.mark.parametrize(
    "table",
    [name if name == "parquet" else pytest.param(name, marks=pytest.mark.long) for name in TABLES],
)
def test_what_land_has_landed_is_whole_and_what_comes_later_is_only_behind(
    spark: Any, server: Server, client: Client, tmp_path: Path, table: str
) -> None:
    fill(client, ODD)
    fill(client, "shop/2", 30)
    client.create("shop/empty", content_type=JSON)
    lake = tmp_path / ("läke 1" if table == "iceberg" else "läke #1")
    by = "date,stream" if table == "parquet" else "stream"
    run(spark, "land", "shop/*", lake, url=server.url, table=table, partition_by=by)
    client.stream("shop/2").append_many([1, 2, 3])
    fill(client, "shop/new", 7)
    report = audit(spark, server, "shop/*", lake)
    assert report.ok, report.lines()
    found = {
        row.stream: (row.state, row.compared, row.in_target, row.behind) for row in report.streams
    }
    assert found == {
        ODD: ("whole", COUNT, COUNT, 0),
        "shop/2": ("whole", 30, 30, 3),
        "shop/empty": ("whole", 0, 0, 0),
        "shop/new": ("not landed", 0, 0, 7),
    }
    assert json.loads(json.dumps(report.document()))["whole"] is True


def alter(file: Path, row: int, column: str) -> None:
    """Another value, or another time, in one row of a file."""
    table = pq.read_table(file, partitioning=None)
    values = table[column].to_pylist()
    values[row] = b'{"n":321}' if column == "value" else values[row] + datetime.timedelta(hours=1)
    changed = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, changed), file)


def test_each_damage_has_its_stream_and_range(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    """One lake, and one file of each stream is damaged; the tests below have each damage alone."""
    streams = [ODD, "doubled", "altered", "unreadable"]
    for name in streams:
        fill(client, name, 100)
    lake = Lake(tmp_path / "lake", partition_by="stream")
    for first in (0, 50):
        lake.land(client, *streams, first=first, upto=first + 50)
    assert audit(spark, server, streams, lake.root).ok
    missing, doubled, altered, unreadable = (
        next(file for file in lake.files() if f"stream={name}" in str(file))
        for name in ("shop", "doubled", "altered", "unreadable")
    )
    begins = {
        name: pq.read_table(file, partitioning=None)["offset"][0].as_py()
        for name, file in (
            (ODD, missing),
            ("doubled", doubled),
            ("altered", altered),
            ("unreadable", unreadable),
        )
    }
    missing.unlink()
    shutil.copy(doubled, doubled.with_name("again.parquet"))
    alter(altered, 23, "value")
    unreadable.write_bytes(unreadable.read_bytes()[:-20])
    report = audit(spark, server, streams, lake.root)
    assert not report.ok
    at = begins["altered"] + 23
    assert sorted(told(report)) == sorted(
        [
            ("missing", ODD, begins[ODD], begins[ODD] + 49),
            ("doubled", "doubled", begins["doubled"], begins["doubled"] + 49),
            ("altered", "altered", at, at),
            ("missing", "unreadable", begins["unreadable"], begins["unreadable"] + 49),
        ]
    )
    assert {row.state for row in report.streams} == {"differs"}
    assert report.counts == {"missing": 100, "doubled": 50, "altered": 1}
    assert report.files == [unreadable.relative_to(lake.root).as_posix()]


@pytest.mark.long
def test_a_missing_file(spark: Any, server: Server, client: Client, tmp_path: Path) -> None:
    fill(client, ODD)
    lake = Lake(tmp_path / "lake", partition_by="stream")
    for first in range(0, COUNT, 50):
        lake.land(client, ODD, first=first, upto=first + 50)
    assert audit(spark, server, ODD, lake.root).ok
    lake.files()[2].unlink()
    report = audit(spark, server, ODD, lake.root)
    assert not report.ok
    assert told(report) == [("missing", ODD, 100, 149)]
    assert (report.streams[0].state, report.counts) == ("differs", {"missing": 50})


@pytest.mark.parametrize("table", ["delta", pytest.param("iceberg", marks=pytest.mark.long)])
def test_a_missing_file_of_a_table_is_named(
    spark: Any, server: Server, client: Client, tmp_path: Path, table: str
) -> None:
    fill(client)
    lake = Lake(tmp_path / "lake", table, "stream")
    for first in range(0, COUNT, 125):
        lake.land(client, "s", first=first, upto=first + 125)
    lake.files()[0].unlink()
    report = audit(spark, server, "s", lake.root)
    assert told(report) == [("missing", "s", 0, 124)]
    assert len(report.files) == 1
    assert not report.ok


@pytest.mark.long
def test_a_doubled_file(spark: Any, server: Server, client: Client, tmp_path: Path) -> None:
    fill(client)
    lake = Lake(tmp_path / "lake")
    for first in range(0, COUNT, 50):
        lake.land(client, "s", first=first, upto=first + 50)
    file = lake.files()[3]
    shutil.copy(file, file.with_name("again.parquet"))
    report = audit(spark, server, "s", lake.root)
    assert told(report) == [("doubled", "s", 150, 199)]
    assert not report.ok


def test_a_doubled_file_of_a_delta_table(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    fill(client)
    lake = Lake(tmp_path / "lake", "delta", "none")
    lake.land(client, "s")
    deltalake.write_deltalake(str(lake.root), read(client, "s", 7, 9), mode="append")
    report = audit(spark, server, "s", lake.root)
    assert told(report) == [("doubled", "s", 7, 8)]


@pytest.mark.long
@pytest.mark.parametrize("column", ["value", "timestamp"])
def test_an_altered_value(
    spark: Any, server: Server, client: Client, tmp_path: Path, column: str
) -> None:
    fill(client)
    lake = Lake(tmp_path / "lake")
    lake.land(client, "s")
    [file] = lake.files()
    alter(file, 123, column)
    report = audit(spark, server, "s", lake.root)
    assert told(report) == [("altered", "s", 123, 123)]
    assert not report.ok


@pytest.mark.long
def test_a_file_that_cannot_be_read_is_named(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    fill(client)
    lake = Lake(tmp_path / "lake")
    lake.land(client, "s", upto=200)
    lake.land(client, "s", first=200)
    file = lake.files()[0]
    file.write_bytes(file.read_bytes()[:-20])
    report = audit(spark, server, "s", lake.root)
    assert report.files == [file.relative_to(lake.root).as_posix()]
    assert told(report) == [("missing", "s", 0, 199)]


def test_deleted_and_recreated_streams_are_told_apart(
    spark: Any, server: Server, client: Client, tmp_path: Path, full: bool
) -> None:
    for name in ("a", "b", "c"):
        fill(client, name, 40)
    lake = tmp_path / "lake"
    run(spark, "land", "*", lake, url=server.url)
    for name in ("a", "b"):
        client.stream(name).delete()
    fill(client, "b", 20)
    report = audit(spark, server, "*", lake)
    assert report.ok, report.lines()
    found = {
        row.stream: (row.state, row.compared, row.unbacked, row.behind) for row in report.streams
    }
    assert found == {
        "a": ("deleted", 0, 40, 0),
        "b": ("recreated", 0, 40, 20),
        "c": ("whole", 40, 0, 0),
    }
    if not full:
        return
    run(spark, "land", "*", lake, url=server.url, failOnDataLoss="false")
    report = audit(spark, server, ["a", "b"], lake)
    assert report.ok, report.lines()
    assert {row.stream: row.compared for row in report.streams} == {"a": 0, "b": 20}
    [file, *_] = sorted(lake.rglob("date=*/*.parquet"))
    file.unlink()
    assert not audit(spark, server, "*", lake).ok


def test_rows_of_a_stream_that_is_gone_are_counted_and_their_numbers_checked(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    fill(client, "old")
    lake = Lake(tmp_path / "lake")
    for first in range(0, COUNT, 50):
        lake.land(client, "old", first=first, upto=first + 50)
    client.stream("old").delete()
    report = audit(spark, server, "old", lake.root)
    assert (report.ok, report.streams[0].unbacked) == (True, COUNT)
    files = lake.files()
    shutil.copy(files[0], files[0].with_name("again.parquet"))
    files[2].unlink()
    report = audit(spark, server, "old", lake.root)
    assert {(one.kind, one.records) for one in report.findings} == {
        ("missing", 50),
        ("doubled", 50),
    }


def test_records_that_a_weak_class_has_lost_are_told_apart(
    spark: Any, start_server: Callable[..., Server], tmp_path: Path, full: bool
) -> None:
    """Numbers are given anew behind what a crash has left."""
    server = start_server()
    lake = tmp_path / "lake"
    with millstream.connect(server.url) as client:
        fill(client, "weak", 100, durability="ephemeral")
        run(spark, "land", "weak", lake, url=server.url)
    server.restart()
    with millstream.connect(server.url) as client:
        client.stream("weak").append_many([{"n": "new"}] * 30)
        for landed in (False, True) if full else (False,):
            report = audit(spark, server, "weak", lake)
            assert report.ok, report.lines()
            assert told(report) == [("lost", "weak", 30, 99)]
            assert (report.streams[0].behind, report.streams[0].compared) == (
                (0, 30) if landed else (30, 0)
            )
            if full and not landed:
                run(spark, "land", "weak", lake, url=server.url, failOnDataLoss="false")


def test_copies(spark: Any, server: Server, client: Client, tmp_path: Path) -> None:
    fill(client, "in/a", 120)
    fill(client, "in/b", 80)
    checkpoint = tmp_path / "cp"
    given: dict[str, Any] = {"url": server.url, "checkpoint": checkpoint}
    run(spark, "copy", "in/*", "stream:out", create=True, **given)
    client.stream("in/a").append({"n": 1000})
    report = audit(spark, server, "in/*", "stream:out", checkpoint=checkpoint)
    assert report.ok, report.lines()
    assert [(row.stream, row.compared, row.behind) for row in report.streams] == [
        ("in/a", 120, 1),
        ("in/b", 80, 0),
        ("stream:out", 0, 0),
    ]
    client.stream("out").delete()
    values = [{"n": n} for n in range(80)] * 2 + [{"n": 5}, {"n": "never sent"}]
    client.create("out", content_type=JSON).append_many(values)
    report = audit(spark, server, "in/*", "stream:out", checkpoint=checkpoint)
    assert told(report) == [
        ("missing", "in/a", 80, 119),
        ("doubled", "stream:out", 5, 5),
        ("doubled", "stream:out", 85, 85),
        ("doubled", "stream:out", 160, 160),
        ("extra", "stream:out", 161, 161),
    ]


@pytest.mark.long
def test_a_copy_of_a_range(spark: Any, server: Server, client: Client, tmp_path: Path) -> None:
    fill(client, "in", 80)
    given: dict[str, Any] = {"url": server.url, "checkpoint": tmp_path / "cp", "create": True}
    run(spark, "replay", "in", "stream:part", start_offset=10, end_offset=60, **given)
    report = audit(spark, server, "in", "stream:part", checkpoint=tmp_path / "cp")
    assert (report.ok, report.streams[0].compared) == (True, 50)


def test_what_cannot_be_audited_is_one_clear_error(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    fill(client, count=3)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "none", {}, "there is no lake at"),
        ("stream:copy", {}, "needs its checkpoint"),
        ("stream:copy", {"checkpoint": tmp_path}, "is not a checkpoint"),
        (tmp_path, {"every": 5}, "--every means nothing"),
        (tmp_path, {"max_rows": 5}, "--max-rows means nothing"),
        (tmp_path, {"range": 0}, "not a number of records"),
        (tmp_path, {"rang": 5}, "no option `rang`"),
    ]
    for to, given, said in cases:
        with pytest.raises(InvalidArgument, match=said) as caught:
            audit(spark, server, "s", to, **given)
        assert caught.value.hint
    lake = Lake(tmp_path / "lake")
    lake.land(client, "s")
    with pytest.raises(StreamNotFound, match="stream `t` does not exist, and the lake"):
        audit(spark, server, "t", lake.root)
    decoded = tmp_path / "decoded"
    run(
        spark, "decode", "s", decoded, url=server.url, schema="n BIGINT", dead_letters="d", create=True
    )  # fmt: skip
    request = Request(server.url, ("s",), Target.parse(str(decoded)))
    with pytest.raises(InvalidArgument, match="belongs to job `decode`"):
        driver.check(jobs.audit, request)


@pytest.mark.parametrize(("damaged", "byte"), [("*.seg", 40_005), ("*.idx", 36)])
def test_what_the_server_finds_in_its_own_bytes_is_passed_on(
    spark: Any, start_server: Callable[..., Server], tmp_path: Path, damaged: str, byte: int
) -> None:
    """A flipped byte of a record, and a wrong entry of an index."""
    server = start_server()
    with millstream.connect(server.url) as client:
        stream = client.create("s", content_type="text/plain")
        for letter in "abcd":
            stream.append(letter * 40_000)
        lake = Lake(tmp_path / "lake")
        lake.land(client, "s")
    server.stop()
    [file] = server.data_dir.glob(f"segments/*/{damaged}")
    data = bytearray(file.read_bytes())
    data[byte] ^= 0x21
    file.write_bytes(data)
    server.restart()
    report = audit(spark, server, "s", lake.root, skip_verify=False)
    assert not report.ok
    assert report.server is not None
    found = [one for one in report.server["findings"] if one["severity"] == "error"]
    assert [(one["stream"], Path(one["file"]).name) for one in found] == [("s", file.name)]
    assert any(line.startswith("server: ") and file.name in line for line in report.lines())
