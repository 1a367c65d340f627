"""`valueFormat=json` through Spark: the same as `from_json`, and bad records stay alone."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from millstream.client.sync.client import Client
from millstream.spark.json.decoder import Decoder, JsonForm
from support.json_cases import CASES
from support.json_rows import comparable
from support.server import Server
from support.spark_reading import batch


@pytest.mark.parametrize("name", CASES)
def test_tricky_values_are_as_in_from_json(spark: Any, name: str) -> None:
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import to_arrow_type

    ddl, texts = CASES[name]
    rows = [(index, text.encode()) for index, text in enumerate(texts)]
    frame = spark.createDataFrame(rows, "i int, v binary").coalesce(1)
    ddl += ", _corrupt_record string"
    parsed = f.from_json(f.col("v").cast("string"), ddl, {"timeZone": "UTC"})
    found = frame.select("i", parsed.alias("x")).orderBy("i")
    kind = to_arrow_type(found.schema["x"].dataType, timezone="UTC")
    expected = pa.concat_arrays(found.toArrow().column("x").chunks)
    decoder = Decoder(JsonForm("", "PERMISSIVE", "_corrupt_record", "UTC"), kind)
    ours, keep = decoder.decode(pa.array([data for _, data in rows], pa.binary()))
    assert keep is None
    pairs = zip(texts, comparable(expected), comparable(ours), strict=True)
    different = [f"{text}\n  spark {theirs}\n  ours  {mine}" for text, theirs, mine in pairs if theirs != mine]  # fmt: skip
    assert not different, "\n".join(different)


def test_a_stream_of_mixed_records(spark: Any, server: Server, client: Client) -> None:
    """Through the server, in all three modes, against `from_json` over the raw bytes."""
    stream = client.create("mixed", content_type="text/plain")
    texts = [text for _, records in CASES.values() for text in records if text]
    texts = [text for text in texts if "'" not in text][::5]
    for text in texts:
        stream.append(text.encode())
    ddl = "k int, v string, other int, i int, st struct<x:int,y:string>"
    raw = batch(spark, server.url, subscribe="mixed")
    raw.createOrReplaceTempView("raw")
    expected = spark.sql(
        f"SELECT offset, from_json(CAST(value AS STRING), '{ddl}, _corrupt_record string') AS x "
        "FROM raw ORDER BY offset"
    ).collect()
    options = {"subscribe": "mixed", "valueFormat": "json", "valueSchema": ddl, "minPartitions": 3}
    permissive = batch(spark, server.url, **options)
    assert permissive.schema["value"].dataType.fieldNames() == [
        "k", "v", "other", "i", "st", "_corrupt_record",
    ]  # fmt: skip
    found = permissive.orderBy("offset").collect()
    assert [(row.offset, row.value) for row in found] == [(row.offset, row.x) for row in expected]
    good = [row.offset for row in expected if row.x is not None and row.x._corrupt_record is None]
    dropped = batch(spark, server.url, mode="DROPMALFORMED", **options)
    assert dropped.schema["value"].dataType.fieldNames()[-1] == "st"
    kept = [row.offset for row in dropped.orderBy("offset").collect()]
    assert kept == good
    with pytest.raises(Exception, match=r"record_malformed: a record does not fit `valueSchema`"):
        batch(spark, server.url, mode="FAILFAST", **options).collect()


def test_a_null_is_no_row_of_nulls(spark: Any, server: Server, client: Client) -> None:
    """Arrow's parser takes it for one, or crashes; also where a block begins with it."""
    for name, values in (("a", [None, {"k": 1}]), ("b", [{"k": 1}, None, {"k": 2}]), ("c", [None])):
        client.create(name, content_type="application/json").append_many(values)
    frame = batch(
        spark,
        server.url,
        subscribe="a,b,c",
        valueFormat="json",
        valueSchema="k INT",
        minPartitions=3,
    )
    rows = frame.select("stream", "value.*").orderBy("stream", "offset").collect()
    bad = (None, "null")
    assert [(row.k, row._corrupt_record) for row in rows] == [
        bad, (1, None), (1, None), bad, (2, None), bad,
    ]  # fmt: skip


def test_one_bad_record_in_a_large_stream(spark: Any, server: Server, client: Client) -> None:
    stream = client.create("events", content_type="application/json")
    values: list[Any] = [{"id": index, "at": "2026-11-16T02:03:04Z"} for index in range(20_000)]
    values[12_345] = {"id": "not a number", "at": "2026-11-16T02:03:04Z"}
    for begin in range(0, len(values), 1000):
        stream.append_many(values[begin : begin + 1000])
    frame = batch(
        spark, server.url, subscribe="events", valueFormat="json",
        valueSchema="id BIGINT, at TIMESTAMP",
    )  # fmt: skip
    rows = frame.selectExpr("offset", "value.*").orderBy("offset").collect()
    assert [row.id for row in rows] == [*range(12_345), None, *range(12_346, 20_000)]
    corrupt = [(row.offset, row._corrupt_record) for row in rows if row._corrupt_record]
    assert [(number, json.loads(text)) for number, text in corrupt] == [(12_345, values[12_345])]
    assert rows[12_345].at == rows[0].at
