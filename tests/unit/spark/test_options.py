"""The options table: names, spelling, values, and the way out that each refusal names."""

from __future__ import annotations

import pytest

from millstream.errors import OptionInvalid
from millstream.spark.access import access
from millstream.spark.options import BY_NAME, TABLE, Options
from millstream.spark.read.selection import selection


def test_names_are_unique_and_found_in_lower_case() -> None:
    assert len(BY_NAME) == len(TABLE)
    options = Options({"maxoffsetspertrigger": "10", "FAILONDATALOSS": "False"})
    assert options.number("maxOffsetsPerTrigger") == 10
    assert options.flag("failOnDataLoss") is False


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("kafka.bootstrap.servers", "`url`"),
        ("topic", "`subscribe` to read, `stream` to write"),
        ("subscribepatern", "`subscribePattern`"),
        ("startingoffset", "`startingOffsets`"),
        ("maxOffsetPerTrigger", "`maxOffsetsPerTrigger`"),
        ("failondataloos", "`failOnDataLoss`"),
        ("token", "`tokenEnv` or `tokenFile`"),
        ("kafka.security.protocol", "`url`"),
        ("createstream", "`createStreams`"),
        ("zzz", "spark-options.md"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(given: str, suggested: str) -> None:
    with pytest.raises(OptionInvalid) as caught:
        Options({given: "1"})
    assert f"`{given}`" in caught.value.message
    assert suggested in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name", ["path", "checkpointLocation", "queryName", "spark.sql.x", "outputMode"]
)
def test_options_of_spark_itself_pass(name: str) -> None:
    assert Options({name: "x"}).raw() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("failOnDataLoss", "yes"),
        ("maxOffsetsPerTrigger", "0"),
        ("maxOffsetsPerTrigger", "-5"),
        ("maxOffsetsPerTrigger", "ten"),
        ("maxBytesPerTrigger", "10 parsecs"),
        ("maxBytesPerPartition", "1k"),
        ("readTimeout", "5 fortnights"),
        ("readTimeout", "1ms"),
        ("mode", "lenient"),
        ("valueFormat", "avro"),
        ("exactlyOnce", "maybe"),
    ],
)
def test_a_wrong_value_is_refused_in_the_documented_spelling(name: str, value: str) -> None:
    with pytest.raises(OptionInvalid) as caught:
        Options({name.lower(): value})
    assert f"`{name}` is `{value}`" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("128", 128), ("1k", 1024), ("2MiB", 2 << 20), ("1MB", 1_000_000), ("3 g", 3 << 30)],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert Options({"maxbytespertrigger": text}).number("maxBytesPerTrigger") == bytes_


@pytest.mark.parametrize(
    ("text", "ms"), [("5s", 5_000), ("2 minutes", 120_000), ("1500", 1_500), ("1h", 3_600_000)]
)
def test_durations(text: str, ms: int) -> None:
    assert Options({"readtimeout": text}).number("readTimeout") == ms


def test_defaults() -> None:
    options = Options({})
    assert options.number("maxBytesPerPartition") == 512 << 20
    assert options.number("maxOffsetsPerTrigger") is None
    assert options.flag("failOnDataLoss") is True
    assert options.text("mode") == "PERMISSIVE"
    assert Options({"mode": "failfast"}).text("mode") == "FAILFAST"


@pytest.mark.parametrize(
    ("use", "name", "said"),
    [
        ("batch", "maxOffsetsPerTrigger", "a streaming read"),
        ("batch", "createStreams", "a write"),
        ("stream", "filterPushdown", "a batch read"),
        ("write", "subscribe", "a batch read or a streaming read"),
    ],
)
def test_an_option_of_another_use_is_refused(use: str, name: str, said: str) -> None:
    values = {"maxOffsetsPerTrigger": "1", "createStreams": "true", "filterPushdown": "true"}
    with pytest.raises(OptionInvalid) as caught:
        Options({name: values.get(name, "s")}).for_use(use)  # type: ignore[arg-type]
    assert said in (caught.value.hint or "")


def test_streams_are_chosen_by_names_or_by_a_pattern() -> None:
    chosen = selection(Options({"subscribe": " a, /b ,a,, c/d "}))
    assert chosen.names == ("a", "b", "c/d")
    assert selection(Options({"subscribePattern": "c/.*"})).pattern == "c/.*"
    for wrong in ({}, {"subscribe": "a", "subscribePattern": "b"}, {"subscribe": " , "}):
        with pytest.raises(OptionInvalid):
            selection(Options(wrong))


def test_the_driver_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_URL", "http://10.0.0.1:99")
    assert access(Options({})).url == "http://10.0.0.1:99"
    assert access(Options({"url": "http://10.0.0.2:1"})).url == "http://10.0.0.2:1"
    with pytest.raises(OptionInvalid):
        access(Options({"url": "ftp://x"}))


def test_the_token_is_read_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    by_name = access(Options({"tokenEnv": "SECRET_TOKEN"}))
    with pytest.raises(OptionInvalid) as caught:
        by_name.token()
    assert "spark.executorEnv.SECRET_TOKEN" in (caught.value.hint or "")
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert by_name.token() == "abc"
    assert "abc" not in repr(by_name)

    file = tmp_path_factory.mktemp("token") / "token"
    by_file = access(Options({"tokenFile": str(file)}))
    with pytest.raises(OptionInvalid):
        by_file.token()
    file.write_text("first\n")
    assert by_file.token() == "first"
    file.write_text("two\nlines")
    with pytest.raises(OptionInvalid) as refused:
        by_file.token()
    assert "lines" not in str(refused.value)


def test_sql_that_cannot_work_says_what_does() -> None:
    """Spark repeats the options of CREATE TABLE with a prefix; later, for a SELECT, it hands over none."""
    with pytest.raises(OptionInvalid, match="table of Spark's catalog") as caught:
        Options({"url": "http://h:1", "option.url": "http://h:1", "subscribe": "s"})
    assert "CREATE TEMPORARY VIEW name USING millstream" in str(caught.value.hint)
    with pytest.raises(OptionInvalid, match="`subscribe` means nothing for a write") as caught:
        Options({"subscribe": "s"}).for_use("write")
    assert "INSERT INTO needs a view of its own: CREATE TEMPORARY VIEW" in str(caught.value.hint)
