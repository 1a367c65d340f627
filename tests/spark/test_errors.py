"""One clear error for whatever is wrong: our code, one sentence, a hint; and never the token.

Classic session here; the same texts in a Connect session at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.reverse_proxy import ReverseProxy
from support.server import Server
from support.spark import TOKEN, TOKEN_VARIABLE, Driver, available_now
from support.spark_reading import batch, filled, stream

READ_TIMEOUT_S = 120.0
DEADLINE_S = 60.0


def text_of(action: Any) -> str:
    with pytest.raises(Exception) as caught:
        action()
    return str(caught.value)


def check(text: str, code: str, *words: str) -> None:
    """Our code, the words and a hint, in one line of the message."""
    lines = [line for line in text.splitlines() if f"{code}: " in line]
    assert lines, text
    for word in (*words, "Hint: "):
        assert any(word in line for line in lines), (word, lines)


def test_a_wrong_option_fails_at_load(spark: Any, server: Server) -> None:
    for read in (spark.read, spark.readStream):
        loading = read.format("millstream").option("url", server.url)
        text = text_of(
            lambda loading=loading: loading.option("kafka.bootstrap.servers", "x").load()
        )
        check(text, "option_invalid", "`kafka.bootstrap.servers`", "`url`")
        text = text_of(lambda loading=loading: loading.option("startingOffset", "x").load())
        check(text, "option_invalid", "did you mean `startingOffsets`?")


def test_a_wrong_option_fails_at_start_of_a_write(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    filled(client, "a", 1)
    frame = stream(spark, server.url, subscribe="a", startingOffsets="earliest").select("value")
    writer = frame.writeStream.format("millstream").option("url", server.url)
    writer = writer.option("checkpointLocation", str(tmp_path / "c")).option("topic", "b")
    check(text_of(lambda: available_now(writer)), "option_invalid", "`topic`", "`stream`")


def test_a_missing_stream(spark: Any, server: Server, tmp_path: Path) -> None:
    text = text_of(lambda: batch(spark, server.url, subscribe="nope").collect())
    check(text, "stream_not_found", "stream `nope` does not exist")
    writer = stream(spark, server.url, subscribe="nope").writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(tmp_path / "c"))
    text = text_of(lambda: available_now(writer))
    check(text, "stream_not_found", "stream `nope` does not exist")


def test_a_wrong_schema(spark: Any, server: Server, client: Client) -> None:
    filled(client, "a", 1)
    reading = spark.read.format("millstream").option("url", server.url).option("subscribe", "a")
    text = text_of(lambda: reading.schema("value string").load().collect())
    check(text, "schema_mismatch", "the source gives stream, offset, timestamp, value")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("valueSchema", "id BIGNT", "`BIGNT` is not a type that can be decoded"),
        ("valueSchema", "id INT, x ARRAY<STRIN>", "`STRIN` is not a type that can be decoded"),
        ("valueSchema", "a-b INT", "`a-b` is not a name"),
        ("timeZone", "Mars/Phobos", "option `timeZone` is `Mars/Phobos`"),
    ],
)
def test_options_of_json_are_refused_by_name(
    spark: Any, server: Server, option: str, value: str, said: str
) -> None:
    """Spark's own parser would speak of the columns around them, or nobody at all."""
    options = {"valueFormat": "json", "valueSchema": "id INT", option: value}
    text = text_of(lambda: batch(spark, server.url, subscribe="a", **options))
    check(text, "option_invalid", f"option `{option}` is `{value}`", said)


def test_an_unreachable_server_is_told_soon(spark: Any, tmp_path: Path) -> None:
    """Whatever a query begins with, it fails after `connectTimeout`: long before `readTimeout`, here the default."""
    nobody, soon = "http://127.0.0.1:9", {"connectTimeout": "1s"}
    read = batch(spark, nobody, subscribe="a", **soon)
    follow = stream(spark, nobody, subscribe="a", **soon).writeStream.format("noop")
    rows = spark.range(1).selectExpr("'1' AS value")
    write = rows.write.format("millstream").mode("append").options(url=nobody, stream="a", **soon)
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    sink = numbers.selectExpr("CAST(value AS STRING) AS value").writeStream.format("millstream")
    sink = sink.options(url=nobody, stream="a", **soon)
    for number, action in enumerate(
        (
            read.collect,
            lambda: available_now(follow.option("checkpointLocation", str(tmp_path / "follow"))),
            write.save,
            lambda: available_now(sink.option("checkpointLocation", str(tmp_path / "sink"))),
        )
    ):
        began = time.monotonic()
        text = text_of(action)
        assert time.monotonic() - began < READ_TIMEOUT_S / 2, f"action {number}"
        check(text, "unreachable", f"cannot reach {nobody}", "`url`", "tried for 1 s")


def test_a_server_without_the_paths_of_the_pipeline(spark: Any, server: Server) -> None:
    frame = batch(spark, f"{server.url}/-/nothing", subscribe="a", readTimeout="1s")
    check(text_of(frame.collect), "not_supported", "does not offer `/v1/tails`")


@pytest.fixture
def proxy(server: Server) -> Iterator[ReverseProxy]:
    with ReverseProxy(server.port, TOKEN) as running:
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file


def test_a_proxy_that_refuses(
    spark: Any, client: Client, proxy: ReverseProxy, token_file: Path
) -> None:
    filled(client, "a", 3)
    check(text_of(batch(spark, proxy.url, subscribe="a").collect), "unauthorized", "(401)")
    wrong = token_file.with_name("wrong")
    wrong.write_text("another")
    frame = batch(spark, proxy.url, subscribe="a", tokenFile=str(wrong))
    text = text_of(frame.collect)
    check(text, "unauthorized", "(401)")
    assert "another" not in text
    assert batch(spark, proxy.url, subscribe="a", tokenFile=str(token_file)).count() == 3
    proxy.refusal = 403
    frame = batch(spark, proxy.url, subscribe="a", tokenFile=str(token_file))
    check(text_of(frame.collect), "forbidden", "(403)")


def test_a_missing_token(spark: Any, server: Server) -> None:
    assert "MILLSTREAM_ABSENT" not in os.environ
    frame = batch(spark, server.url, subscribe="a", tokenEnv="MILLSTREAM_ABSENT")
    check(text_of(frame.collect), "option_invalid", "`MILLSTREAM_ABSENT`", "spark.executorEnv")


def test_the_token_is_nowhere_to_be_seen(
    spark: Any,
    spark_folder: Path,
    client: Client,
    proxy: ReverseProxy,
    token_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not in the plan, the checkpoint, the progress, the errors, the logs of the JVM, or Spark's event log."""
    filled(client, "a", 5)
    client.create("b", content_type="application/json")
    texts = []
    for number, token in enumerate(({"tokenFile": str(token_file)}, {"tokenEnv": TOKEN_VARIABLE})):
        proxy.refusal = None
        frame = stream(spark, proxy.url, subscribe="a", startingOffsets="earliest", **token)
        checkpoint = tmp_path / f"checkpoint-{number}"
        writer = frame.select("value").writeStream.format("millstream")
        writer = writer.options(url=proxy.url, stream="b", **token)
        progress = available_now(writer.option("checkpointLocation", str(checkpoint)))
        assert sum(item["numInputRows"] for item in progress) == 5
        kept = [
            file.read_text(errors="replace") for file in checkpoint.rglob("*") if file.is_file()
        ]
        assert len(kept) >= 3
        read = batch(spark, proxy.url, subscribe="a", **token)
        read.explain(mode="extended")
        assert read.count() == 5
        proxy.refusal = 403
        error = text_of(batch(spark, proxy.url, subscribe="a", **token).collect)
        check(error, "forbidden", "(403)")
        texts += [*kept, str(progress), error]
    shown = capfd.readouterr()
    assert shown.out.count("Physical Plan") == 2
    events = event_log(spark, spark_folder / "events")
    for plan in ("BatchScan millstream", "MicroBatchScan", "QueryProgressEvent"):
        assert plan in events, f"no {plan}: the event log is not whole"
    jvm = (spark_folder / "jvm.log").read_text(errors="replace")
    for text in (*texts, shown.out, shown.err, events, jvm):
        assert TOKEN not in text


def event_log(spark: Any, folder: Path) -> str:
    """All that Spark has noted until now. Events are written behind the caller's back: the last one is awaited."""
    mark = f"the end of {time.monotonic_ns()}"
    spark.sparkContext.setJobDescription(mark)
    spark.range(1).collect()
    spark.sparkContext.setJobDescription(None)
    until = time.monotonic() + DEADLINE_S
    while True:
        files = [file for file in folder.rglob("*") if file.is_file()]
        text = "".join(file.read_text(errors="replace") for file in files)
        if mark in text:
            return text
        assert time.monotonic() < until, f"no event of the last job in {files}"
        time.sleep(0.05)


def errors_in_connect(spark: Any, url: str) -> list[str]:
    """Runs in a driver with a Connect session: the texts of some errors."""
    texts = []
    for options in (
        {"subscribe": "a", "startingOffset": "x"},
        {"subscribe": "nope"},
        {"subscribe": "a", "readTimeout": "1s", "url": "http://127.0.0.1:9"},
    ):
        try:
            spark.read.format("millstream").options(**{"url": url, **options}).load().collect()
        except Exception as error:  # noqa: BLE001 - its text is what is tested
            texts.append(str(error))
    return texts


def test_the_same_errors_in_a_connect_session(connect: Driver, server: Server) -> None:
    texts = connect.call(errors_in_connect, url=server.url)
    check(texts[0], "option_invalid", "did you mean `startingOffsets`?")
    check(texts[1], "stream_not_found", "stream `nope` does not exist")
    check(texts[2], "unreachable", "cannot reach http://127.0.0.1:9")
