"""Job `land` into tables on a real object store, in a real Spark: once, again, and after a commit whose answer was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.errors import MillstreamError
from millstream.spark.jobs.lake import sink
from millstream.spark.jobs.lake.iceberg import open_catalog
from millstream.spark.jobs.lake.layout import Layout
from millstream.spark.jobs.lake.objects import ObjectPublisher
from millstream.spark.jobs.lake.store import storage_options
from support.object_store import BUCKET, ObjectStore, catalog_environment
from support.server import Server
from support.spark_jobs import JSON, checksum, forget_last_batch, run

COUNT = 200


def failing_sink() -> Any:
    """A class inside of a function: it travels as it is, and not as a name that workers cannot import."""

    class FailsAfter(ObjectPublisher):
        def enter(self, manifest: Any) -> None:
            super().enter(manifest)
            if manifest.batch_id == 1:
                raise OSError("the answer was lost")

    class FailingSink(sink.LakeSink):
        publisher = FailsAfter

    return FailingSink


@pytest.mark.parametrize("table", ["delta", pytest.param("iceberg", marks=pytest.mark.long)])
def test_a_table_on_an_object_store_holds_each_record_once(
    spark: Any, server: Server, client: Client, object_store: ObjectStore, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, table: str,
) -> None:  # fmt: skip
    variables = {**object_store.environment(), **catalog_environment("own", tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
        # The JVM is older than the store: what it starts would not have these.
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    sent = [f'{{"n":{n}}}'.encode() for n in range(COUNT)]
    client.create("in", content_type=JSON).append_many(sent)
    own = "own" if table == "iceberg" else ""
    layout = Layout(Path(BUCKET, f"spark-{table}"), table, ("date",), "s3", own)
    asked = {"url": server.url, "table": table, "max_rows": 120, "checkpoint": tmp_path / "cp"}
    if own:
        asked["catalog"] = own
    with monkeypatch.context() as patch:
        patch.setattr(sink, "LakeSink", failing_sink())
        with pytest.raises(MillstreamError, match="the answer was lost"):
            run(spark, "land", "in", layout.url, **asked)
    for _ in range(2):
        run(spark, "land", "in", layout.url, **asked)
        found = sorted(rows(layout), key=lambda row: row["offset"])
        assert checksum(row["value"] for row in found) == checksum(sent)
        assert [row["offset"] for row in found] == list(range(COUNT))
        before = object_store.names(layout.root.name)
        forget_last_batch(tmp_path / "cp")
    assert object_store.names(layout.root.name) == before


def rows(layout: Layout) -> list[dict[str, Any]]:
    if layout.table == "delta":
        import deltalake

        table: Any = deltalake.DeltaTable(layout.url, storage_options=storage_options(layout))
        return list(table.to_pyarrow_table().to_pylist())
    catalog = open_catalog(layout)
    try:
        return list(catalog.load_table(layout.identifier).scan().to_arrow().to_pylist())
    finally:
        catalog.close()
