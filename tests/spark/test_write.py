"""The writer's contract against a real server: what arrives, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.fault_proxy import FaultProxy
from support.server import Server
from support.spark import available_now

COMMIT = "/v1/commit"


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server)
    yield proxy
    proxy.close()


def write(frame: Any, url: str, mode: str = "append", **options: str) -> None:
    writer = frame.write.format("millstream").mode(mode).option("url", url)
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def texts(client: Client, stream: str) -> list[str]:
    return [record.text for record in client.stream(stream).read()]


def refusal(action: Callable[[], Any]) -> str:
    """The text that a user sees; Java frames may follow, but not instead."""
    with pytest.raises(Exception) as caught:
        action()
    return str(caught.value)


def test_a_row_is_a_record(spark: Any, client: Client, server: Server) -> None:
    values = ['{"a": 1}', "[1,2,3]", "[]", '"text \\u00e9 ü"', "null", " 17 ", "[[1],[2]]"]
    client.create("s", content_type="application/json")
    write(
        spark.createDataFrame([(v,) for v in values], "value string").coalesce(1),
        server.url,
        stream="s",
    )
    records = [json.loads(text) for text in texts(client, "s")]
    assert records == [json.loads(value) for value in values]


def test_rows_keep_their_order_over_partitions_and_stages(
    spark: Any, client: Client, proxy: FaultProxy
) -> None:
    client.create("s", content_type="application/json")
    frame = spark.range(0, 30_000, 1, 3).selectExpr(
        "to_json(struct(id, repeat('x', 100) AS pad)) AS value"
    )
    write(frame, proxy.url, stream="s", stageBytes="64KiB")
    assert [json.loads(text)["id"] for text in texts(client, "s")] == list(range(30_000))
    assert len(proxy.seen("PUT", "/v1/stage/")) > 20
    assert len(proxy.seen("POST", COMMIT)) == 1


def test_bytes_and_records_larger_than_a_stage(spark: Any, client: Client, server: Server) -> None:
    client.create("bytes", content_type="application/octet-stream")
    frame = spark.range(0, 6, 1, 1).selectExpr(
        "CAST(repeat(char(97 + id), 200000) AS BINARY) AS value"
    )
    write(frame, server.url, stream="bytes", stageBytes="64KiB")
    expected = b"".join(bytes([97 + n]) * 200_000 for n in range(6))
    assert b"".join(record.data for record in client.stream("bytes").read()) == expected
    back = (
        spark.read.format("millstream")
        .option("url", server.url)
        .option("subscribe", "bytes")
        .load()
    )
    assert [len(row.value) for row in back.orderBy("offset").collect()] == [200_000] * 6


def test_the_column_stream_chooses_and_the_option_wins(
    spark: Any, client: Client, server: Server
) -> None:
    for name in ("t/0", "t/1", "t/ü x", "one"):
        client.create(name, content_type="application/json")
    frame = spark.range(0, 90, 1, 2).selectExpr(
        "CAST(id AS STRING) AS value",
        "element_at(array('t/0', 't/1', 't/ü x'), CAST(id % 3 + 1 AS INT)) AS stream",
    )
    write(frame, server.url)
    assert texts(client, "t/1") == [str(n) for n in range(90) if n % 3 == 1]
    assert len(texts(client, "t/ü x")) == 30
    write(frame, server.url, stream="one")
    assert texts(client, "one") == [str(n) for n in range(90)]


def test_missing_streams_are_created_on_demand(spark: Any, client: Client, server: Server) -> None:
    frame = spark.range(0, 10, 1, 2).selectExpr(
        "CAST(id AS STRING) AS value", "concat('new/', id % 2) AS stream"
    )
    text = refusal(lambda: write(frame, server.url))
    assert "stream_not_found: " in text
    assert '"new/' in text
    assert "createStreams" in text
    write(frame, server.url, createStreams="true", durability="disk")
    info = client.stream("new/0").info()
    assert (info.content_type, info.durability) == ("application/json", "disk")
    assert sorted(texts(client, "new/0") + texts(client, "new/1")) == [str(n) for n in range(10)]
    # What exists is taken as it is, unless the caller names something that contradicts it.
    write(frame, server.url, createStreams="true")
    text = refusal(lambda: write(frame, server.url, createStreams="true", contentType="text/plain"))
    assert "stream_conflict: " in text


def test_invalid_json_fails_the_batch_with_row_and_reason(
    spark: Any, client: Client, server: Server
) -> None:
    client.create("s", content_type="application/json")
    frame = spark.range(0, 5_000, 1, 1).selectExpr(
        "if(id = 4321, '{\"a\":', to_json(struct(id, repeat('x', 100)))) AS value"
    )
    text = refusal(lambda: write(frame, server.url, stream="s", stageBytes="64KiB"))
    assert "json_invalid: " in text
    assert "row 4321 of partition 0" in text
    assert "to_json" in text
    assert texts(client, "s") == []


def test_a_null_value_is_refused(spark: Any, client: Client, server: Server) -> None:
    client.create("s", content_type="application/json")
    frame = spark.range(0, 10, 1, 1).selectExpr("if(id = 3, null, '1') AS value")
    text = refusal(lambda: write(frame, server.url, stream="s"))
    assert "invalid_argument: `value` is null in row 3 of partition 0. Hint: " in text
    assert texts(client, "s") == []


@pytest.mark.parametrize(
    ("columns", "mode", "options", "expected"),
    [
        (
            ["'1' AS value"],
            "overwrite",
            {},
            "not_supported: a stream cannot be overwritten. Hint: ",
        ),
        (["1 AS value"], "append", {}, "schema_mismatch: column `value` is int"),
        (
            ["'1' AS key", "'1' AS value"],
            "append",
            {},
            "schema_mismatch: a record has no `key`. Hint: ",
        ),
        (
            ["'1' AS value"],
            "append",
            {"batchId": "3"},
            "option_invalid: a batch write takes `producerId`",
        ),
        (["'1' AS value"], "append", {"strem": "x"}, "did you mean `stream`?"),
        (["'1' AS value"], "append", {"kafka.bootstrap.servers": "x"}, "use `url`"),
        (["'1' AS value"], "append", {"maxOffsetsPerTrigger": "3"}, "means nothing for a write"),
    ],
)
def test_what_cannot_work_is_refused_before_a_row_is_computed(
    spark: Any, columns: list[str], mode: str, options: dict[str, str], expected: str
) -> None:
    frame = spark.range(1).selectExpr(*columns)
    # Nothing listens there: whoever asked the server would fail in other words.
    text = refusal(lambda: write(frame, "http://127.0.0.1:9", mode, stream="s", **options))
    assert expected in text


def test_output_mode_complete_is_refused(spark: Any, server: Server, tmp_path: Path) -> None:
    frame = (
        spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
        .groupBy("value").count().selectExpr("CAST(value AS STRING) AS value")
    )  # fmt: skip
    writer = frame.writeStream.format("millstream").option("url", server.url).option("stream", "s")
    writer = writer.outputMode("complete").option("checkpointLocation", str(tmp_path / "c"))
    text = refusal(lambda: available_now(writer))
    assert "not_supported: output mode `complete`" in text
    assert "append" in text


def test_an_empty_batch_commits_nothing(spark: Any, client: Client, proxy: FaultProxy) -> None:
    client.create("s", content_type="application/json")
    frame = spark.range(0, 10, 1, 2).selectExpr("CAST(id AS STRING) AS value")
    write(frame.where("false"), proxy.url, stream="s")
    assert proxy.seen("PUT", "/v1/stage/") == []
    assert proxy.seen("POST", COMMIT) == []
    write(frame.where("value = '3'"), proxy.url, stream="s")
    assert texts(client, "s") == ["3"]


def test_for_each_batch_names_its_batches(
    spark: Any, client: Client, server: Server, tmp_path: Path
) -> None:
    """A batch is written once under its number, and an older one is fenced."""
    client.create("s", content_type="application/json")

    def once(frame: Any, batch_id: int) -> None:
        values = frame.selectExpr("CAST(value AS STRING) AS value")
        write(values, server.url, stream="s", producerId="job", batchId=str(batch_id))

    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).load()
    writer = frame.writeStream.foreachBatch(once).option("checkpointLocation", str(tmp_path / "c"))
    available_now(writer)
    assert sorted(map(int, texts(client, "s"))) == list(range(20))
    one = spark.range(1).selectExpr("'1' AS value")
    write(one, server.url, stream="s", producerId="job", batchId="7")
    text = refusal(lambda: write(one, server.url, stream="s", producerId="job", batchId="5"))
    assert "producer_fenced: " in text
    assert "producerGeneration" in text
    write(one, server.url, stream="s", producerId="job", batchId="5", producerGeneration="1")
    assert len(texts(client, "s")) == 22


def test_a_full_staging_area_is_told(
    spark: Any, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    import millstream

    server = start_server(settings={"stage_bytes_max": 1024 * 1024})
    with millstream.connect(server.url) as client:
        client.create("s", content_type="application/json")
        frame = spark.range(0, 30_000, 1, 2).selectExpr(
            "to_json(struct(id, repeat('x', 200))) AS value"
        )
        text = refusal(lambda: write(frame, server.url, stream="s", stageBytes="256KiB"))
        assert "stage_full: " in text
        assert "stage_bytes_max" in text
        assert texts(client, "s") == []
        # The failed attempts gave up what they had staged, so there is room again.
        write(frame.limit(1000).coalesce(1), server.url, stream="s", stageBytes="64KiB")
        assert len(texts(client, "s")) == 1000


def test_direct_mode(spark: Any, client: Client, server: Server) -> None:
    client.create("json", content_type="application/json")
    client.create("bytes", content_type="text/plain")
    frame = spark.range(0, 500, 1, 2).selectExpr(
        "concat('[', id, ',1]') AS value", "'json' AS stream"
    )
    options = {"exactlyOnce": "direct", "directPartitions": "2", "directRecords": "64"}
    write(frame, server.url, **options)
    assert sorted(json.loads(text)[0] for text in texts(client, "json")) == list(range(500))
    write(
        frame.limit(5).coalesce(1),
        server.url,
        stream="bytes",
        **{**options, "directPartitions": "1"},
    )
    assert "".join(texts(client, "bytes")) == "".join(f"[{n},1]" for n in range(5))
    text = refusal(lambda: write(frame.coalesce(1), server.url, **options))
    assert "option_invalid: the batch had 1 partitions, but `directPartitions` is 2" in text
    two = spark.range(0, 1, 1, 1).selectExpr("'1,2' AS value")
    text = refusal(
        lambda: write(two, server.url, stream="json", **{**options, "directPartitions": "1"})
    )
    assert "json_invalid: row 0 of partition 0 is not JSON" in text
