"""One clear error for whatever is wrong: our code, one sentence, a hint; and never the token.

Classic session here; the same texts in a Connect session at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.client._sync import Client
from support.reverse_proxy import ReverseProxy
from support.server import Server
from support.spark import Driver, available_now
from support.spark_reading import batch, filled, stream

TOKEN = "a-token-that-must-not-show-17"


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


def test_an_unreachable_server(spark: Any) -> None:
    frame = batch(spark, "http://127.0.0.1:9", subscribe="a", readTimeout="1s")
    check(text_of(frame.collect), "unreachable", "cannot reach http://127.0.0.1:9")


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
    client: Client,
    proxy: ReverseProxy,
    token_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    filled(client, "a", 5)
    options = {"subscribe": "a", "tokenFile": str(token_file), "startingOffsets": "earliest"}
    frame = stream(spark, proxy.url, **options)
    checkpoint = tmp_path / "checkpoint"
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    progress = available_now(writer)
    assert sum(item["numInputRows"] for item in progress) == 5
    batch(spark, proxy.url, **options).explain(mode="extended")
    proxy.refusal = 403
    error = text_of(batch(spark, proxy.url, **options).collect)
    kept = [file.read_text(errors="replace") for file in checkpoint.rglob("*") if file.is_file()]
    assert len(kept) >= 3
    shown = capfd.readouterr()
    assert "Physical Plan" in shown.out
    for text in (*kept, shown.out, shown.err, error, str(progress)):
        assert TOKEN not in text


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
