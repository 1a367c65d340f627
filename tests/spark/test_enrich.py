"""Job `enrich` in a real Spark: every record with what one version of the table says, as a fold in plain Python, also after faults."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.client.sync.client import Client
from millstream.errors import MillstreamError, StreamNotFound
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.shared import lookup
from support.server import Server
from support.spark_jobs import JSON, checksum, failing_commit, forget_last_batch, records, rows, run

COUNT = 120
KEYS = 20
ASKED = {"key": "user.id", "lookup_key": "id", "add": "name,born=at,score,more=extra:json"}
ZONE = timezone(timedelta(hours=2))


def sent(n: int) -> bytes:
    """Spaces and numbers that a parser would change: none of them may be."""
    key = n % (KEYS + 5)  # five of them are in no table
    shown = json.dumps(str(key)) if n % 2 else str(key)
    return f'{{ "n": {n}.50, "user": {{"id": {shown}}}, "ü": "}}" }}'.encode()


def table(version: int) -> list[dict[str, Any]]:
    return [
        {
            "id": key,
            "name": f'v{version} "{key}"' if key % 4 else None,
            "at": datetime(2026, 3, 1, key, 30, 0, key * 1000, tzinfo=ZONE),
            "score": Decimal(key) / 4,
            "extra": f'{{"b":[{key}.0],"a":null}}' if key % 3 else None,
        }
        for key in range(KEYS)
    ]


SCHEMA = pa.schema(
    [
        ("id", pa.int32()),
        ("name", pa.string()),
        ("at", pa.timestamp("ns", "Europe/Paris")),
        ("score", pa.decimal128(10, 2)),
        ("extra", pa.string()),
    ]
)


def write_table(root: Path, version: int) -> None:
    root.mkdir(exist_ok=True)
    found = pa.Table.from_pylist(table(version), SCHEMA)
    for old in root.glob("*.parquet"):
        old.unlink()
    for part in range(2):
        pq.write_table(found.slice(part * 15, 15), root / f"{version}-{part}.parquet")


def fold(n: int, version: int) -> dict[str, Any] | None:
    """The fields that a record gets; None if the table does not know it."""
    found = [row for row in table(version) if row["id"] == n % (KEYS + 5)]
    return found[0] if found else None


def enriched(n: int, version: int) -> bytes:
    row = fold(n, version)
    born = row and row["at"].astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    fields = [
        f'"name":{json.dumps(row and row["name"])}',
        f'"born":{json.dumps(born)}',
        f'"score":{row["score"]:.2f}' if row else '"score":null',
        f'"more":{(row and row["extra"]) or "null"}',
    ]
    return sent(n).removesuffix(b" }") + b"," + ",".join(fields).encode() + b"}"


@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.long)])
def test_a_batch_has_one_version_and_is_written_once(
    spark: Any, server: Server, client: Client, tmp_path: Path, moment: Any
) -> None:
    stream = client.create("in", content_type=JSON)
    stream.append_many([sent(n) for n in range(COUNT)])
    write_table(tmp_path / "table", 0)
    asked = {**ASKED, "lookup": tmp_path / "table", "checkpoint": tmp_path / "cp", "create": True}
    asked |= {"max_rows": COUNT // 2}
    with failing_commit(server, 2, moment) as url:
        run(spark, "enrich", "in", "stream:out", url=url, readTimeout="1s", **asked)
    write_table(tmp_path / "table", 1)
    second = 0 if moment == "after" else 1  # what was committed is not made again
    wanted = [enriched(n, 0 if n < COUNT // 2 else second) for n in range(COUNT)]
    for _ in range(2):
        run(spark, "enrich", "in", "stream:out", url=server.url, **asked)
        assert checksum(records(client, "out")) == checksum(wanted)
        forget_last_batch(tmp_path / "cp")
    stream.append_many([sent(n) for n in range(5)])
    run(spark, "enrich", "in", "stream:out", url=server.url, **asked)
    wanted += [enriched(n, 1) for n in range(5)]
    assert checksum(records(client, "out")) == checksum(wanted)


@pytest.mark.parametrize("form", ["delta", pytest.param("iceberg", marks=pytest.mark.long)])
def test_to_a_lake_with_a_table_of_a_job_without_what_has_no_match(
    spark: Any, server: Server, client: Client, tmp_path: Path, form: str
) -> None:
    """`materialise` with Delta, and `land` with Iceberg: what they write is a table to look up in."""
    client.create("in", content_type=JSON).append_many([sent(n) for n in range(COUNT)])
    log = client.create("log", content_type=JSON)
    log.append_many([change(row["id"], row["name"]) for row in table(0)])
    asked = {"url": server.url, "key": "user.id", "lookup": tmp_path / "table", "max_rows": 50}
    if form == "delta":
        log.append_many([change(row["id"], row["name"]) for row in table(1)])
        run(spark, "materialise", "log", tmp_path / "table", url=server.url, table="delta")
        asked |= {"lookup_key": "key", "add": "v=value", "where": "type=user"}
        wanted = [row["name"] for row in table(1)]
    else:
        run(spark, "land", "log", tmp_path / "table", url=server.url, table="iceberg")
        asked |= {"lookup_key": "offset", "add": "v=value"}
        wanted = [change(row["id"], row["name"]) for row in table(0)]
    lake = tmp_path / "lake"
    blocked = lake / "stream=in"
    lake.mkdir()
    blocked.touch()
    asked |= {"partition_by": "stream"}
    with pytest.raises(Exception, match="NotADirectoryError"):
        run(spark, "enrich", "in", lake, matched_only=True, **asked)
    blocked.unlink()
    matching = [n for n in range(COUNT) if n % (KEYS + 5) < KEYS]
    for turn in range(2):
        query = jobs.enrich(spark, "in", lake, matched_only=True, **asked)
        done = driver.watch(query, lambda _: None)
        last = COUNT % 50
        since = range(0 if turn == 0 else COUNT - last, COUNT)
        assert done.left_out == sum(n % (KEYS + 5) >= KEYS for n in since)
        found = rows(lake)
        assert [row["offset"] for row in found] == matching
        assert checksum(row["value"] for row in found) == checksum(map(sent, matching))
        assert [json.loads(row["v"]) for row in found] == [wanted[n % (KEYS + 5)] for n in matching]
        before = sorted(lake.rglob("*.parquet"))
        forget_last_batch(lake / "_millstream" / "checkpoint")
    assert sorted(lake.rglob("*.parquet")) == before


def change(key: int, value: Any) -> dict[str, Any]:
    return {"type": "user", "key": str(key), "value": value, "headers": {"operation": "upsert"}}


@pytest.mark.parametrize(
    ("record", "change", "said", "code"),
    [
        (b'{"other":1}', {}, r"record 0 of stream `in` has no `id`", "field_missing"),
        pytest.param(
            b'{"id":1,"name":null}', {}, "record 0 of stream `in` has a field of its own", "field_taken",
            marks=pytest.mark.long,
        ),
        (b'{"id":1}', {"add": "j=name:json"}, "column `name` of the table is not JSON text at key `1`", "not_json"),
    ],
)  # fmt: skip
def test_a_record_that_does_not_fit_is_one_clear_error(
    spark: Any, server: Server, client: Client, tmp_path: Path,
    record: bytes, change: dict[str, str], said: str, code: str,
) -> None:  # fmt: skip
    client.create("in", content_type=JSON).append_many([record])
    write_table(tmp_path / "table", 0)
    asked = {"key": "id", "lookup": tmp_path / "table", "lookup_key": "id", "add": "name", **change}
    with pytest.raises(MillstreamError, match=said) as caught:
        run(
            spark, "enrich", "in", "stream:out", url=server.url, checkpoint=tmp_path / "cp",
            create=True, **asked,
        )  # fmt: skip
    assert (caught.value.code, bool(caught.value.hint)) == (code, True)
    with pytest.raises(StreamNotFound):
        records(client, "out")


def test_what_cannot_work_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "table", 0)
    asked = {
        "key": "id",
        "lookup": str(tmp_path / "table"),
        "lookup-key": "id",
        "add": "name",
    }
    wide = pa.table({"id": [1, 1, 2], "x": [1.5, 2.5, 3.5], "t": ["a", "b", "a"], "of": [None] * 3})
    wide = wide.append_column("time", pa.array([1, 2, 3], pa.time32("s")))
    pq.write_table(wide, tmp_path / "wide.parquet")
    wide_path = str(tmp_path / "wide.parquet")
    (tmp_path / "empty").mkdir()

    def refused(options: dict[str, str], said: str, to: str = "stream:t") -> None:
        request = Request("u", ("s",), Target.parse(to), {**asked, **options}, checkpoint="c")
        with pytest.raises(MillstreamError, match=said) as caught:
            driver.check(jobs.enrich, request)
        assert caught.value.hint

    for name in asked:
        refused({name: ""}, f"needs the option `{name}`")
    refused({"lookup": str(tmp_path / "none")}, "there is no table at")
    refused({"lookup": str(tmp_path / "empty")}, "there is no table at")
    refused({"lookup-key": "nope"}, "has no column `nope`")
    refused({"add": "name,nope"}, "has no column `nope`")
    refused({"where": "nope=1"}, "has no column `nope`")
    refused({"where": "nope"}, "is not COLUMN=VALUE")
    refused({"add": "name,"}, "is not a column")
    refused({"add": "a=name,a=id"}, "field `a`, but it is named twice")
    refused({"lookup-key": "score"}, r"`score` of .* is `decimal.*does not compare")
    refused({"lookup": wide_path, "add": "x"}, "key `1` is in 2 rows")
    refused({"lookup": wide_path, "where": "t=a", "add": "time"}, "Spark has no type for")
    refused({"lookup": wide_path, "where": "t=a", "add": "x:json"}, "not JSON text")
    refused({"table": "delta"}, "--table means nothing for a stream")
    refused({"add": "Value=name"}, "`Value`, but the lake has one", str(tmp_path / "lake"))
    monkeypatch.setattr(lookup, "BYTES_MAX", 100)
    refused({}, "is larger than")
    monkeypatch.undo()
    chosen = {**asked, "lookup": wide_path, "where": "t=a", "add": "x,of"}
    driver.check(
        jobs.enrich, Request("u", ("s",), Target.parse("stream:t"), chosen, checkpoint="c")
    )


def test_every_version_of_a_table_is_told_apart(tmp_path: Path) -> None:
    root = tmp_path / "table"
    deltalake.write_deltalake(root, pa.table({"id": ["a"], "n": [1]}))
    table = lookup.Lookup(str(root), "id", lookup.parse_added("n"))
    first = table.snapshot()
    deltalake.write_deltalake(root, pa.table({"id": ["b"], "n": [2]}), mode="append")
    second = table.snapshot()
    assert (first.version, second.version) == ("delta 0", "delta 1")
    assert table.snapshot().version == second.version
    assert [table.load(one).num_rows for one in (first, second)] == [1, 2], "each is one version"
    plain = tmp_path / "plain"
    write_table(plain, 0)
    files = lookup.Lookup(str(plain), "id", lookup.parse_added("name"))
    version = files.snapshot().version
    assert files.snapshot().version == version
    write_table(plain, 1)
    assert files.snapshot().version != version
