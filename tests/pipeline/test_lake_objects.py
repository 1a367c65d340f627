"""A lake on a real object store, without Spark: what a commit makes visible, and what comes again, dies or does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pytest

from millstream.errors import InvalidArgument, PipelineError
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.lake.files import WrittenFile, write_files
from millstream.spark.jobs.lake.iceberg import open_catalog
from millstream.spark.jobs.lake.layout import Layout, TaskPlace
from millstream.spark.jobs.lake.objects import ObjectPublisher, queries_at
from millstream.spark.jobs.lake.store import storage_options
from millstream.spark.jobs.lake.tables import publisher_of, table_of
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.shared.lookup import Lookup, parse_added
from support.lake_steps import QUERY, records
from support.object_store import BUCKET, ObjectStore, catalog_environment

pytestmark = pytest.mark.timeout(120)
ROWS = 90


@pytest.fixture(params=["delta", "iceberg"])
def layout(
    request: pytest.FixtureRequest,
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Layout:
    for name, value in {
        **object_store.environment(),
        **catalog_environment("own", tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    table = request.param
    root = Path(BUCKET, f"{tmp_path.name}-{table}")
    by = ("date", "stream") if table == "iceberg" else ("date",)
    return Layout(root, table, by, "s3", "own" if table == "iceberg" else "", "shop.orders")


def written(layout: Layout, batch: int, tasks: int) -> list[WrittenFile]:
    files = []
    size = ROWS // tasks
    for task in range(tasks):
        rows = records(batch * ROWS + task * size, size)
        files += write_files(rows, layout, TaskPlace(QUERY, batch, task))
    return files


def land(layout: Layout, batch: int, tasks: int, publisher: type[Any] = ObjectPublisher) -> None:
    publisher(layout, table_of(layout)).publish(QUERY, batch, written(layout, batch, tasks))


def seen(layout: Layout) -> list[int]:
    """The records that a reader of the table finds."""
    if layout.table == "delta":
        options = storage_options(layout)
        if not deltalake.DeltaTable.is_deltatable(layout.url, options):
            return []
        found = deltalake.DeltaTable(layout.url, storage_options=options).to_pyarrow_table()
    else:
        catalog = open_catalog(layout)
        try:
            if not catalog.table_exists(layout.identifier):
                return []
            found = catalog.load_table(layout.identifier).scan().to_arrow()
        finally:
            catalog.close()
    return sorted(found.column("offset").to_pylist())


class Fails(ObjectPublisher):
    """Dies before its commit; what the tasks wrote is there."""

    def enter(self, _: Any) -> None:
        raise OSError("the driver died")


class FailsAfter(ObjectPublisher):
    """The commit was made and its answer was lost."""

    def enter(self, manifest: Any) -> None:
        super().enter(manifest)
        raise OSError("the driver died")


def test_a_batch_is_there_once_however_often_it_runs(
    layout: Layout, object_store: ObjectStore
) -> None:
    assert publisher_of(layout) is ObjectPublisher
    with pytest.raises(PipelineError, match="the driver died"):
        land(layout, 0, 2, Fails)
    assert seen(layout) == [], "something is visible before the commit"
    files = written(layout, 0, 3)
    failing = FailsAfter(layout, table_of(layout))
    with pytest.raises(PipelineError, match="the driver died"):
        failing.publish(QUERY, 0, files)
    failing.discard(QUERY, 0, files)  # Spark does that also when only the answer was lost
    assert seen(layout) == list(range(ROWS))
    prefix = layout.root.name
    before = object_store.names(prefix)
    land(layout, 0, 2)
    assert object_store.names(prefix) == before, "what came again left something, or took something"
    assert seen(layout) == list(range(ROWS))
    land(layout, 1, 1)
    assert seen(layout) == list(range(2 * ROWS))
    with pytest.raises(PipelineError, match="batch 0 comes after batch 1") as caught:
        land(layout, 0, 1)
    assert caught.value.code == "batch_out_of_order"
    assert queries_at(layout) == [QUERY]


def test_what_was_landed_is_a_table_to_look_up_in(layout: Layout) -> None:
    land(layout, 0, 2)
    path = f"catalog:own/{layout.identifier}" if layout.catalog else layout.url
    table = Lookup(path, "offset", parse_added("from=stream"))
    first = table.snapshot()
    assert sorted(table.load(first).to_pylist(), key=lambda row: int(row["key"])) == [
        {"key": str(n), "from": f"chat/{n % 3}"} for n in range(ROWS)
    ]
    assert table.snapshot().version == first.version
    land(layout, 1, 1)
    second = table.snapshot()
    assert second.version != first.version
    assert [table.load(one).num_rows for one in (first, second)] == [ROWS, 2 * ROWS]
    with pytest.raises(PipelineError, match="there is no table at"):
        Lookup(f"{path}-none", "offset", ()).snapshot()


def request_for(layout: Layout, checkpoint: Path, **options: str) -> Request:
    asked = {"table": layout.table, "partition-by": ",".join(layout.partition_by)}
    if layout.catalog:
        asked |= {"catalog": layout.catalog, "catalog-table": layout.identifier}
    return Request(
        "u", ("s",), Target.parse(layout.url), {**asked, **options}, checkpoint=str(checkpoint)
    )


def test_what_does_not_fit_is_refused_before_spark_starts(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    land(layout, 0, 1)
    checkpoint = tmp_path / "cp"
    with pytest.raises(InvalidArgument, match="was filled with another checkpoint"):
        driver.check(jobs.land, request_for(layout, checkpoint))
    driver.check(jobs.land, request_for(layout, checkpoint, shared="yes"))
    other = "iceberg" if layout.table == "delta" else "delta"
    own = {"catalog": "own"} if other == "iceberg" else {"catalog": "", "catalog-table": "millstream.records"}  # fmt: skip
    with pytest.raises(InvalidArgument, match=f"holds a lake of kind `{layout.table}`"):
        driver.check(jobs.land, request_for(layout, checkpoint, table=other, **own))
    otherwise = Layout(
        layout.root, layout.table, ("stream",), "s3", layout.catalog, layout.identifier
    )
    before = seen(layout)
    with pytest.raises(PipelineError, match=r"is partitioned by date|do not fit the") as caught:
        land(otherwise, 1, 1)
    assert caught.value.code == "lake_schema_differs"
    assert seen(layout) == before
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PipelineError, match="cannot be used") as refused:
        driver.check(jobs.land, request_for(layout, checkpoint))
    assert refused.value.code == "store_unreachable"
    assert "wrong" not in str(refused.value)


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("s3://b/p", {}, "plain Parquet files on an object store"),
        ("s3://b/p", {"table": "iceberg"}, "needs a catalog of your own"),
        ("s3://b", {"table": "delta"}, "has no prefix"),
        ("gs://b/p", {"table": "delta"}, "cannot be on `gs://`"),
        ("s3://b/p", {"table": "delta", "catalog": "c"}, "--catalog is for Iceberg"),
        ("s3://b/p", {"table": "iceberg", "catalog": "nobody"}, "knows no catalog `nobody`"),
        ("lake", {"table": "iceberg", "catalog-table": "records"}, "not a table of a catalog"),
    ],
)
def test_places_that_cannot_work_are_one_clear_error(
    tmp_path: Path, to: str, options: dict[str, str], said: str
) -> None:
    request = Request("u", ("s",), Target.parse(to), options, checkpoint=str(tmp_path / "cp"))
    with pytest.raises((InvalidArgument, PipelineError), match=said) as caught:
        driver.check(jobs.land, request)
    assert caught.value.hint
    without = Request("u", ("s",), Target.parse("s3://b/p"), {"table": "delta"})
    with pytest.raises(InvalidArgument, match="needs a checkpoint elsewhere"):
        driver.check(jobs.land, without)


def test_jobs_that_work_in_directories_say_so() -> None:
    """Before a checkpoint is asked for, and nothing of renames, which tables do without."""
    place: Any = "s3://b/p"
    no_session: Any = None  # nothing here comes as far as one
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: jobs.compact(no_session, place), "`audit` and `compact` work on lakes in direct"),
        (lambda: jobs.audit(no_session, "s", place), "`audit` and `compact` work on lakes in dir"),
        (lambda: jobs.materialise(no_session, "s", place), "versions of a table are directories"),
        (lambda: jobs.materialise(no_session, "s", place, checkpoint="cp"), "versions of a table"),
    ]
    for call, said in cases:
        with pytest.raises(InvalidArgument, match=said) as caught:
            call()
        assert "rename" not in caught.value.message
        assert caught.value.hint


def test_a_lake_of_ones_own_catalog_may_be_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in catalog_environment("own", tmp_path).items():
        monkeypatch.setenv(name, value)
    layout = Layout(tmp_path / "lake", "iceberg", ("date",), "", "own", "shop.orders")
    publisher = publisher_of(layout)
    for _ in range(2):
        land(layout, 0, 2, publisher)
        assert seen(layout) == list(range(ROWS))
    elsewhere = Layout(tmp_path / "other", "iceberg", ("date",), "", "own", "shop.orders")
    with pytest.raises(PipelineError, match=r"`shop\.orders` of catalog `own` is at"):
        land(elsewhere, 0, 1, publisher)
