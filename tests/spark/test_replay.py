"""Job `replay` in a real Spark: the range, byte for byte and in order, also when commits fail on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.errors import InvalidArgument
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from support.server import Server
from support.spark_jobs import JSON, checksum, forget_last_batch, records, run, run_through_faults

ODD = [b'{"a": 1.0}', b'{ "b" :"\\u00fc","\xc3\xbc":1e3 }', b'{"a":1,"a":2}', b"[1,  2]", b'"x"']
"""Texts that a parser would write otherwise."""


def filled(client: Client, name: str, count: int) -> list[bytes]:
    texts = [b'{"n":%d , "odd":%b}' % (n, ODD[n % len(ODD)]) for n in range(count)]
    stream = client.create(name, content_type=JSON)
    for first in range(0, count, 50):
        stream.append_many(texts[first : first + 50])
    return texts


def test_a_range_by_offset_is_the_same_bytes_after_failed_commits(
    spark: Any, server: Server, client: Client, tmp_path: Path, full: bool
) -> None:
    texts = filled(client, "in", 600)
    first, last = 101, 571
    asked: dict[str, Any] = {
        "checkpoint": tmp_path / "checkpoint",
        "start_offset": first,
        "end_offset": last,
        "max_rows": 150,
        "create": True,
    }
    run_through_faults(spark, server, "replay", "in", "stream:out", full=full, **asked)
    assert len(records(client, "out")) == 300
    for _ in range(2):
        run(spark, "replay", "in", "stream:out", url=server.url, **asked)
        assert checksum(records(client, "out")) == checksum(texts[first:last])
        forget_last_batch(tmp_path / "checkpoint")


def test_a_range_by_time_of_a_stream_of_bytes(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    kind = "application/octet-stream"
    stream = client.create("in", content_type=kind)
    for n in range(40):
        stream.append(bytes([n, 0, 255]) * (n + 1))
    with stream.read_arrow(columns=["time", "value"]) as batches:
        found = [row for batch in batches for row in batch.to_pylist()]
    begin, end = found[10]["time"], found[30]["time"]
    asked = {"start_time": begin.isoformat(), "end_time": end.isoformat()}
    run(
        spark, "replay", "in", "stream:out", url=server.url, checkpoint=tmp_path / "checkpoint",
        create=True, content_type=kind, **asked,
    )  # fmt: skip
    wanted = [row["value"] for row in found if begin <= row["time"] < end]
    assert checksum(records(client, "out")) == checksum(wanted)
    assert client.stream("out").info().content_type == kind


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a bound"),
        ({"start-offset": "1", "start-time": "0"}, "both --start-offset and --start-time"),
        ({"end-offset": "soon"}, "endingOffsets"),
        ({"start-time": "yesterday"}, "startingTimestamp"),
        ({"from-offset": "1"}, "no option `from-offset`"),
    ],
)
def test_a_wrong_bound_is_refused_before_spark_starts(options: dict[str, str], said: str) -> None:
    request = Request(
        "http://127.0.0.1:1", ("s",), Target.parse("stream:t"), options, checkpoint="c"
    )
    with pytest.raises(Exception, match=said) as caught:
        driver.check(jobs.replay, request)
    assert getattr(caught.value, "hint", None)


def test_another_range_needs_another_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    request = Request(
        "u", ("s",), Target.parse("stream:t"), {"end-offset": "5"}, checkpoint=str(tmp_path)
    )
    with driver.hold(jobs.replay, request):
        (tmp_path / "offsets" / "0").write_text("v1\n")
    other = Request(
        "u", ("s",), Target.parse("stream:t"), {"end-offset": "6"}, checkpoint=str(tmp_path)
    )
    with pytest.raises(InvalidArgument, match="option `end-offset` `5`, not `6`"):
        driver.check(jobs.replay, other)
