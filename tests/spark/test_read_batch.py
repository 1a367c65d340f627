"""Batch reads of a real server by a real Spark: columns, ranges, tasks, filters."""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.http import Api
from support.server import Server
from support.spark_reading import JSON, batch, filled, more, numbers


def test_the_four_columns_and_their_types(spark: Any, server: Server, client: Client) -> None:
    before = dt.datetime.now(dt.UTC)
    filled(client, "orders", 3)
    frame = batch(spark, server.url, subscribe="orders")
    assert frame.schema.simpleString() == (
        "struct<stream:string,offset:bigint,timestamp:timestamp,value:binary>"
    )
    rows = frame.orderBy("offset").collect()
    assert [(row.stream, row.offset, bytes(row.value)) for row in rows] == [
        ("orders", index, b'{"i":%d}' % index) for index in range(3)
    ]
    seen = [row.timestamp.timestamp() for row in rows]  # without a zone: local time
    now = dt.datetime.now(dt.UTC)
    assert before.timestamp() - 1 <= min(seen) <= max(seen) <= now.timestamp() + 1
    assert seen == sorted(seen)


def test_many_records_in_many_tasks_come_once_and_in_order(
    spark: Any, server: Server, client: Client
) -> None:
    filled(client, "a", 5_000, per_append=100)
    filled(client, "b", 300)
    frame = batch(spark, server.url, subscribe="a,b", minPartitions=5)
    assert frame.rdd.getNumPartitions() == 5
    assert numbers(frame) == [*range(5_000), *range(300)]
    in_order = [(row.stream, row.offset) for row in frame.select("stream", "offset").collect()]
    assert in_order == sorted(in_order), "a plan without a shuffle keeps the order"


def test_other_columns_by_name(spark: Any, server: Server, client: Client) -> None:
    stream = client.create("users", content_type="application/json")
    stream.append_many([{"user": {"id": 'ä"1'}}, {"user": {"id": 7}}, {"user": None}, {}])
    frame = batch(
        spark, server.url, subscribe="users", columns="key,position,epoch,offset", keyPath="user.id"
    )
    assert frame.schema.simpleString() == (
        "struct<key:binary,position:string,epoch:bigint,offset:bigint>"
    )
    rows = frame.orderBy("offset").collect()
    assert [None if row.key is None else bytes(row.key).decode() for row in rows] == [
        'ä"1', "7", None, None,
    ]  # fmt: skip
    assert len({row.position for row in rows}) == 1, "one append"
    assert rows[0].position.startswith(f"{rows[0].epoch:016d}_")


def test_the_columns_of_kafka(spark: Any, server: Server, client: Client) -> None:
    filled(client, "orders", 2)
    frame = batch(spark, server.url, subscribe="orders", kafkaColumns=True)
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    rows = frame.orderBy("offset").collect()
    assert [(r.key, r.topic, r.partition, r.offset, r.timestampType) for r in rows] == [
        (None, "orders", 0, 0, 1),
        (None, "orders", 0, 1, 1),
    ]
    keyed = batch(spark, server.url, subscribe="orders", kafkaColumns=True, keyPath="i")
    assert [bytes(row.key) for row in keyed.orderBy("offset").collect()] == [b"0", b"1"]


def test_byte_streams_are_one_record_per_append(spark: Any, server: Server, client: Client) -> None:
    stream = client.create("bytes", content_type="application/octet-stream")
    for data in (b"\x00\xff", b"a,b", b"[1,2]"):
        stream.append(data)
    rows = batch(spark, server.url, subscribe="bytes").orderBy("offset").collect()
    assert [bytes(row.value) for row in rows] == [b"\x00\xff", b"a,b", b"[1,2]"]


def test_a_pattern_reads_what_matches_as_a_whole(
    spark: Any, server: Server, client: Client
) -> None:
    for name in ("chat/1", "chat/2", "chat/2/x", "other"):
        filled(client, name, 2)
    client.create("chat/3", content_type="application/json")
    frame = batch(spark, server.url, subscribePattern="chat/[0-9]+")
    names = {row.stream for row in frame.collect()}
    assert names == {"chat/1", "chat/2"}
    assert batch(spark, server.url, subscribePattern="nothing.*").count() == 0


def test_offsets_say_where_to_begin_and_end(spark: Any, server: Server, client: Client) -> None:
    a = filled(client, "a", 10, per_append=5)
    tail = a.info().tail
    more(a, 10, first=10)
    filled(client, "b", 4)

    def read(**options: Any) -> list[int]:
        return numbers(batch(spark, server.url, **options))

    assert read(subscribe="a", startingOffsets=3, endingOffsets=7) == [3, 4, 5, 6]
    assert read(subscribe="a", startingOffsets=tail) == list(range(10, 20))
    assert read(subscribe="a", endingOffsets=tail) == list(range(10))
    assert read(subscribe="a", endingOffsets=1000) == list(range(20))
    assert read(subscribe="a,b", startingOffsets={"a": 18, "b": {"0": 3}}) == [18, 19, 3]
    assert read(subscribe="a,b", startingOffsets={"a": "latest"}) == [0, 1, 2, 3]
    assert read(subscribe="a", startingOffsets=20) == []


def test_times_say_where_to_begin_and_end(spark: Any, server: Server, client: Client) -> None:
    stream = filled(client, "a", 5)
    time.sleep(0.01)  # times have milliseconds: the two halves must differ
    middle = int(time.time() * 1000)
    more(stream, 5, first=5)

    def read(**options: Any) -> list[int]:
        return numbers(batch(spark, server.url, subscribe="a", **options))

    assert read(startingTimestamp=middle) == [5, 6, 7, 8, 9]
    assert read(endingTimestamp=middle) == [0, 1, 2, 3, 4]
    text = dt.datetime.fromtimestamp(middle / 1000, dt.UTC).isoformat()
    assert read(startingTimestamp=text, startingOffsets="earliest") == [5, 6, 7, 8, 9]
    assert read(endingTimestamp=middle + 3_600_000) == list(range(10))


def test_conditions_save_reading(spark: Any, server: Server, client: Client) -> None:
    stream = filled(client, "a", 50)
    time.sleep(0.01)
    now = dt.datetime.now(dt.UTC)
    middle = now.replace(microsecond=now.microsecond // 1000 * 1000)
    more(stream, 50, first=50)
    filled(client, "b", 50)
    rows_read = "millstream_pipeline_read_rows_total"
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:

        def frame() -> Any:
            """A new one for each condition: Spark keeps the plan of the last one with its frame."""
            return batch(spark, server.url, subscribe="a,b", filterPushdown=True, minPartitions=4)

        chosen = frame().where("stream = 'a' and offset >= 20 and offset < 25")
        before = Api(server).metric(rows_read)
        assert numbers(chosen) == [20, 21, 22, 23, 24]
        assert Api(server).metric(rows_read) - before == 5, "nothing else was read"
        late = frame().where(f"timestamp >= timestamp'{middle.isoformat()}' and stream in ('a')")
        assert numbers(late) == list(range(50, 100))
        assert numbers(frame().where("stream like 'b%' and offset in (3, 5)")) == [3, 5]
        assert numbers(frame().where("stream = 'c'")) == []
        assert numbers(frame()) == [*range(100), *range(50)]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_sql_reads_a_snapshot_writes_and_says_what_works(
    spark: Any, server: Server, client: Client
) -> None:
    orders = filled(client, "orders", 2)
    out = client.create("out", content_type=JSON)
    made = f"TEMPORARY VIEW sold USING millstream OPTIONS (url '{server.url}', subscribe 'orders')"
    spark.sql(f"CREATE {made}")
    assert spark.sql("SELECT count(*) FROM sold").head()[0] == 2
    more(orders, 1, first=2)
    assert spark.sql("SELECT count(*) FROM sold").head()[0] == 2, "the guide says so"
    spark.sql(f"CREATE OR REPLACE {made}")
    assert spark.sql("SELECT count(*) FROM sold").head()[0] == 3
    into = f"USING millstream OPTIONS (url '{server.url}', stream 'out')"
    spark.sql(f"CREATE TEMPORARY VIEW bought (value STRING) {into}")
    spark.sql("INSERT INTO bought SELECT cast(value AS STRING) FROM sold")
    assert [record.value for record in out.read()] == [{"i": index} for index in range(3)]
    with pytest.raises(Exception, match="CREATE TEMPORARY VIEW name USING millstream"):
        spark.sql(f"CREATE TABLE sold_table {into}")
    with pytest.raises(Exception, match="INSERT INTO needs a view of its own"):
        spark.sql("INSERT INTO sold SELECT * FROM sold")


def test_a_limit_ends_the_read_early(spark: Any, server: Server, client: Client) -> None:
    filled(client, "a", 20_000, per_append=1000)
    assert len(batch(spark, server.url, subscribe="a").limit(5).collect()) == 5


@pytest.mark.parametrize("per_append", [1, 97])
def test_values_larger_than_a_window(
    spark: Any, server: Server, client: Client, per_append: int
) -> None:
    """Windows end inside appends and ranges; nothing is lost or doubled where they meet."""
    stream = client.create("large", content_type="application/json")
    values = [{"i": index, "fill": "x" * 100_000} for index in range(194)]
    for begin in range(0, len(values), per_append):
        stream.append_many(values[begin : begin + per_append])
    frame = batch(spark, server.url, subscribe="large", maxBytesPerPartition="8MiB")
    assert frame.rdd.getNumPartitions() >= 2
    numbers = frame.selectExpr(
        "offset", "length(value) AS length", "get_json_object(CAST(value AS STRING), '$.i') AS i"
    )
    rows = numbers.orderBy("offset").collect()
    assert [(int(row.i), row.length) for row in rows] == [
        (value["i"], len(json.dumps(value, separators=(",", ":")))) for value in values
    ]
