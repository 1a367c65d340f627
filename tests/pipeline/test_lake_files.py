"""The files that a task writes into a lake: partitions, names, bounds, and nothing after a failure."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as pq
import pytest

from millstream.errors import InvalidArgument, PipelineError
from millstream.spark.jobs.lake import files as lake_files
from millstream.spark.jobs.lake.files import WrittenFile, write_files
from millstream.spark.jobs.lake.layout import Layout, TaskPlace, local_root, partition_columns
from millstream.spark.jobs.lake.publish import Publisher
from millstream.spark.jobs.lake.tables import table_of
from millstream.spark.jobs.lake.target import check_kind

QUERY = "0c3a9d52-6a1f-4a37-9d1c-3b2f7c6e8a10"
DAY = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


ODD_NAMES = (
    "chat/1",
    "a=b",
    "50%",
    "%41",
    "ümlaut",
    "日本",
    "a b",
    "x+y",
    "a:b?c#d",
    "a'b*[c]{d}^",
)


def batch(
    times: list[datetime.datetime | None], streams: list[str], zone: str = "UTC"
) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "stream": streams,
            "offset": pa.array(range(len(times)), pa.int64()),
            "timestamp": pa.array(times, pa.timestamp("us", zone)),
            "value": [b"x"] * len(times),
        }
    )


def write(layout: Layout, *batches: pa.RecordBatch, batch_id: int = 0) -> list[WrittenFile]:
    return write_files(iter(batches), layout, TaskPlace(QUERY, batch_id, 0))


def test_days_are_days_in_utc_whatever_the_session_zone_is(tmp_path: Path) -> None:
    last = DAY - datetime.timedelta(microseconds=1)
    early = datetime.datetime(1969, 12, 31, 23, tzinfo=datetime.UTC)
    layout = Layout(tmp_path)
    files = write(layout, batch([last, DAY, early, None], ["s"] * 4, "Asia/Tokyo"))
    Publisher(layout, None).publish(QUERY, 0, files)
    days = sorted(path.parent.name for path in tmp_path.rglob("*.parquet"))
    assert days == [
        "date=1969-12-31",
        "date=2026-02-28",
        "date=2026-03-01",
        "date=__HIVE_DEFAULT_PARTITION__",
    ]
    table = dataset.dataset(tmp_path, partitioning="hive").to_table().sort_by("offset")
    assert table.schema.field("timestamp").type == pa.timestamp("us", "UTC")
    assert table.column("timestamp").to_pylist() == [last, DAY, early, None]


def test_times_at_every_depth_become_utc(tmp_path: Path) -> None:
    local = pa.timestamp("us", "Asia/Kolkata")
    inner = pa.struct([("at", local), ("plain", pa.timestamp("us"))])
    value = pa.struct([("list", pa.list_(inner)), ("map", pa.map_(pa.string(), local))])
    found = {"list": [{"at": DAY, "plain": DAY.replace(tzinfo=None)}], "map": [("k", DAY)]}
    rows = batch([DAY], ["s"], "Asia/Kolkata").set_column(3, "value", pa.array([found], value))
    (file,) = write(Layout(tmp_path), rows)
    table = pq.read_table(tmp_path / file.temporary)
    zones = str(table.schema.field("value").type)
    assert (zones.count("tz=UTC"), zones.count("tz="), zones.count("timestamp")) == (2, 2, 3)
    assert table.column("value").to_pylist() == [found]


def test_any_stream_name_comes_back_from_its_directory(tmp_path: Path) -> None:
    names = [*ODD_NAMES, "..", "."]
    layout = Layout(tmp_path, partition_by=("stream",))
    files = write(layout, batch([DAY] * len(names), names))
    Publisher(layout, None).publish(QUERY, 0, files)
    table = dataset.dataset(tmp_path, partitioning="hive").to_table().sort_by("offset")
    assert table.column("stream").to_pylist() == names
    assert all(path.is_relative_to(tmp_path) for path in tmp_path.rglob("*.parquet"))
    assert len(list(tmp_path.glob("stream=*/*.parquet"))) == len(names)
    # As Spark spells them, which does not put the bytes of a letter together again.
    spelled = {path.name for path in tmp_path.glob("stream=*")}
    assert {"stream=ümlaut", "stream=日本", "stream=a b", "stream=a%3Ab%3Fc%23d"} <= spelled


def test_more_partitions_than_open_files_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_files, "OPEN_FILES_MAX", 3)
    monkeypatch.setattr(lake_files, "BUFFER_BYTES", 2000)
    layout = Layout(tmp_path, partition_by=("stream",))
    names = [f"s{number % 10}" for number in range(200)]
    files = write(layout, *(batch([DAY] * 200, names) for _ in range(3)))
    assert len(files) > 10
    assert len({file.path for file in files}) == len(files)
    Publisher(layout, None).publish(QUERY, 0, files)
    assert dataset.dataset(tmp_path, partitioning="hive").count_rows() == 600
    assert sum(file.rows for file in files) == 600


def test_small_batches_become_one_row_group(tmp_path: Path) -> None:
    files = write(Layout(tmp_path), *(batch([DAY] * 50, ["s"] * 50) for _ in range(40)))
    (file,) = files
    assert pq.ParquetFile(tmp_path / file.temporary).num_row_groups == 1
    assert (tmp_path / file.temporary).stat().st_size == file.bytes


def test_a_task_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield batch([DAY], ["s"])
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_files(broken(), Layout(tmp_path), TaskPlace(QUERY, 0, 0))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_that_the_driver_does_not_see_is_refused(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    files = write(layout, batch([DAY], ["s"]))
    (tmp_path / files[0].temporary).unlink()
    with pytest.raises(PipelineError, match="driver does not see it") as caught:
        Publisher(layout, None).publish(QUERY, 0, files)
    assert caught.value.code == "lake_not_shared"
    assert not list(tmp_path.rglob("*.json"))


def test_a_published_file_that_is_gone_is_not_passed_over(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    files = write(layout, batch([DAY], ["s"]))
    Publisher(layout, None).publish(QUERY, 0, files)
    (tmp_path / files[0].path).unlink()
    with pytest.raises(PipelineError, match="is gone") as caught:
        Publisher(layout, None).publish(QUERY, 0, write(layout, batch([DAY], ["s"])))
    assert caught.value.code == "lake_file_missing"


def test_an_abort_after_the_decision_touches_nothing(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    publisher = Publisher(layout, None)
    undecided = write(layout, batch([DAY], ["s"]))
    publisher.discard(QUERY, 0, undecided)
    assert not (tmp_path / undecided[0].temporary).exists()
    files = write(layout, batch([DAY], ["s"]))
    publisher.decide(QUERY, 0, files)
    publisher.discard(QUERY, 0, files)
    publisher.publish(QUERY, 0, [])
    assert dataset.dataset(tmp_path).count_rows() == 1


def forget_the_form(layout: Layout) -> None:
    """As manifests were before they named columns and partitions."""
    for path in layout.batches(QUERY).iterdir():
        document = json.loads(path.read_bytes())
        for name in ("partition_by", "columns", "schema"):
            del document[name]
        path.write_text(json.dumps(document))


@pytest.mark.parametrize("known", ["by its manifest", "by its files"])
@pytest.mark.parametrize("table", ["parquet", "delta", "iceberg"])
def test_what_does_not_fit_a_lake_is_refused_before_anything_is_decided(
    tmp_path: Path, table: str, known: str
) -> None:
    layout = Layout(tmp_path, table)
    Publisher(layout, table_of(layout)).publish(QUERY, 0, write(layout, batch([DAY], ["s"])))
    if known == "by its files":
        forget_the_form(layout)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    other = batch([DAY], ["s"]).set_column(3, "value", pa.array([{"id": 1}]))
    by_stream = Layout(tmp_path, table, ("stream",))
    for wrong, rows, said in (
        (layout, other, "`value` binary, they have `value` struct<id: int64>"),
        (
            layout,
            batch([DAY], ["s"]).append_column("more", pa.array([1])),
            "they have `more` int64",
        ),
        (by_stream, batch([DAY], ["s"]), "partitioned by date, and this run"),
    ):
        publisher = Publisher(wrong, table_of(wrong))
        files = write(wrong, rows, batch_id=1)
        with pytest.raises(PipelineError, match=re.escape(said)) as caught:
            publisher.publish(QUERY, 1, files)
        assert (caught.value.code, bool(caught.value.hint)) == ("lake_schema_differs", True)
        publisher.discard(QUERY, 1, files)
        assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    with pytest.raises(PipelineError, match="partitioned by date"):
        check_kind(by_stream)
    check_kind(layout)
    again = write(layout, batch([DAY], ["s"]), batch_id=1)
    Publisher(layout, table_of(layout)).publish(QUERY, 1, again)
    if table == "delta":
        assert deltalake.DeltaTable(tmp_path).to_pyarrow_table().num_rows == 2


def test_a_delta_table_of_others_is_asked_before_anything_is_decided(tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path, pa.table({"mine": [1]}))
    layout = Layout(tmp_path, "delta")
    with pytest.raises(PipelineError, match="fit the Delta table: it has `mine`"):
        Publisher(layout, table_of(layout)).publish(QUERY, 0, write(layout, batch([DAY], ["s"])))
    assert not layout.batches(QUERY).exists()


def test_delta_knows_least_and_greatest_of_each_file(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "delta")
    times = [DAY + datetime.timedelta(microseconds=away) for away in (1500, 1, 2001)]
    files = write(layout, batch([*times, DAY], ["b", "a", "ü", "b"]))
    Publisher(layout, table_of(layout)).publish(QUERY, 0, files)
    (entry,) = pa.table(deltalake.DeltaTable(tmp_path).get_add_actions(flatten=True)).to_pylist()
    found = {name: (entry[f"min.{name}"], entry[f"max.{name}"], entry[f"null_count.{name}"])
             for name in ("stream", "offset", "timestamp")}  # fmt: skip
    upwards = DAY + datetime.timedelta(milliseconds=3)
    assert found == {"stream": ("a", "ü", 0), "offset": (0, 3, 0), "timestamp": (DAY, upwards, 0)}
    assert entry["num_records"] == 4
    later = [("timestamp", ">", times[0])]
    kept = deltalake.DeltaTable(tmp_path).to_pyarrow_table(filters=later)
    assert kept.column("offset").to_pylist() == [2], "the bounds hide nothing"


@pytest.mark.parametrize("table", ["delta", "iceberg"])
def test_a_type_that_a_table_does_not_have_is_refused_before_anything_is_decided(
    tmp_path: Path, table: str
) -> None:
    layout = Layout(tmp_path, table)
    rows = batch([DAY], ["s"]).append_column("took", pa.array([1], pa.duration("us")))
    files = write(layout, rows)
    with pytest.raises(PipelineError, match=r"has no type for a column .*uration") as caught:
        Publisher(layout, table_of(layout)).publish(QUERY, 0, files)
    assert caught.value.code == "lake_schema_differs"
    assert [path.name for path in tmp_path.iterdir()] == ["_millstream"]
    assert not layout.batches(QUERY).exists()


def test_manifests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.spark.jobs.lake.publish.MANIFESTS_KEPT", 3)
    layout = Layout(tmp_path)
    for batch_id in range(8):
        files = write(layout, batch([DAY], ["s"]), batch_id=batch_id)
        Publisher(layout, None).publish(QUERY, batch_id, files)
    kept = sorted(path.name for path in layout.batches(QUERY).iterdir())
    assert kept == ["00000005.json", "00000006.json", "00000007.json"]
    assert dataset.dataset(tmp_path).count_rows() == 8


def test_where_a_lake_can_be() -> None:
    assert local_root("file:///a/b") == Path("/a/b")
    assert local_root("/a b/%41") == Path("/a b/%41")
    with pytest.raises(InvalidArgument, match="s3"):
        local_root("s3://bucket/lake")
    assert partition_columns("none") == ()
    assert partition_columns("date, stream") == ("date", "stream")
    for wrong in (("hour",), ("date", "date")):
        with pytest.raises(InvalidArgument):
            Layout(Path("/x"), partition_by=wrong)
