"""`valueFormat=json` through Spark: the same as `from_json`, and bad records stay alone."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pyarrow as pa
import pytest

from millstream.client.sync.client import Client
from millstream.spark.json.decoder import Decoder, JsonForm
from support import json_random
from support.json_cases import CASES
from support.json_rows import numbered
from support.server import Server
from support.spark_reading import batch


def both(
    spark: Any, ddl: str, texts: list[bytes], zone: str = "UTC"
) -> tuple[pa.StructArray, pa.StructArray]:
    """The rows of Spark's `from_json`, and ours, as values that can be compared."""
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import to_arrow_type

    frame = spark.createDataFrame(list(enumerate(texts)), "i int, v binary").coalesce(1)
    ddl += ", _corrupt_record string"
    parsed = f.from_json(f.col("v").cast("string"), ddl, {"timeZone": zone})
    found = frame.select("i", parsed.alias("x")).orderBy("i")
    kind = to_arrow_type(found.schema["x"].dataType, timezone="UTC")
    expected = pa.concat_arrays(found.toArrow().column("x").chunks)
    decoder = Decoder(JsonForm("", "PERMISSIVE", "_corrupt_record", zone), kind)
    ours, keep = decoder.decode(pa.array(texts, pa.binary()))
    assert keep is None
    return numbered(expected), numbered(ours)


@pytest.mark.parametrize("name", CASES)
def test_tricky_values_are_as_in_from_json(spark: Any, name: str) -> None:
    ddl, texts = CASES[name]
    rows = (
        map(repr, one.to_pylist()) for one in both(spark, ddl, [text.encode() for text in texts])
    )
    pairs = zip(texts, *rows, strict=True)
    different = [f"{text}\n  spark {theirs}\n  ours  {mine}" for text, theirs, mine in pairs if theirs != mine]  # fmt: skip
    assert not different, "\n".join(different)


def test_random_records_are_as_in_from_json(spark: Any, full: bool) -> None:
    """Each gives the same row. One that is no JSON is corrupt in both; but which of its fields are kept may differ."""
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED") or random.randrange(1 << 32))
    print(f"MILLSTREAM_TEST_SEED={seed}")
    chance = random.Random(seed)
    for _ in range(30 if full else 8):
        fields = json_random.schema(chance)
        ddl = ", ".join(f"{name} {json_random.ddl(kind)}" for name, kind in fields.items())
        texts = [text.encode() for text in json_random.records(fields, 300, chance)]
        zone = chance.choice(["UTC", "UTC", "Europe/Rome"])
        expected, ours = both(spark, ddl, texts, zone)
        for text, theirs, mine in zip(texts, expected.to_pylist(), ours.to_pylist(), strict=True):
            told = f"{ddl} in {zone}\n{text.decode()}\n  spark {theirs}\n  ours  {mine}"
            if is_json(text) or repr(theirs) == repr(mine):
                assert repr(theirs) == repr(mine), told
                continue
            assert theirs["_corrupt_record"] == mine["_corrupt_record"] is not None, told
            for name in fields:
                kept = (theirs[name], mine[name])
                assert None in kept or repr(kept[0]) == repr(kept[1]), told


def is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
