"""Job `sessionise` in a real Spark: closed sessions as a fold in plain Python says, also after a failed commit and in any order."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from millstream.errors import MillstreamError
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from support.server import Server
from support.spark_jobs import JSON, checksum, failing_commit, forget_last_batch, records, run

BEGIN = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
GAP = timedelta(minutes=10)
Entry = tuple[str, int, str, datetime]
"""Stream, offset, key, time."""


def as_text(key: str, found: list[Entry]) -> bytes:
    times = [found[side][3].strftime("%Y-%m-%dT%H:%M:%S.%fZ") for side in (0, -1)]
    places = [{"stream": found[side][0], "offset": found[side][1]} for side in (0, -1)]
    session = {"key": key, "start": times[0], "end": times[1], "count": len(found)}
    session |= {"first": places[0], "last": places[1]}
    return json.dumps(session, ensure_ascii=False, separators=(",", ":")).encode()


def fold(sent: list[Entry], late: timedelta) -> tuple[list[bytes], int]:
    """Closed sessions, and how many stay open."""
    watermark = max(entry[3] for entry in sent) - late
    watermark = watermark.replace(microsecond=watermark.microsecond // 1000 * 1000)
    closed, still_open = [], 0
    for key in {entry[2] for entry in sent}:
        mine = sorted((one for one in sent if one[2] == key), key=lambda one: (one[3], one[:2]))
        cuts = [n for n, one in enumerate(mine) if n and one[3] - mine[n - 1][3] > GAP]
        for first, end in zip([0, *cuts], [*cuts, len(mine)], strict=True):
            if mine[end - 1][3] + GAP <= watermark:
                closed.append(as_text(key, mine[first:end]))
            else:
                still_open += 1
    return closed, still_open


def value(key: Any, at: datetime, form: int = 0) -> bytes:
    """A key may be a number; a time has no zone (and is UTC), another zone, or is a number."""
    times: list[Any] = [
        at.replace(tzinfo=None).isoformat(),
        at.astimezone(datetime.strptime("-0330", "%z").tzinfo).isoformat(),
        int(at.timestamp() * 1000),
    ]
    return json.dumps({"user": {"id": key}, "at": times[form]}, ensure_ascii=False).encode()


def some_events(seed: int, count: int) -> list[Entry]:
    """Dense in time, so that many records join, split and close sessions; out of order by less than half an hour."""
    chance = random.Random(seed)
    keys = ["7", "ada", "ü", "b/1", "null", *(f"k{n}" for n in range(20))]
    found = []
    for _ in range(count):
        minutes = chance.choice([chance.uniform(0, 900), chance.randrange(0, 900, 10)])
        at = BEGIN + timedelta(milliseconds=round(minutes * 60_000))
        found.append((at.timestamp() + chance.uniform(0, 1800), chance.choice(keys), at))
    streams = ["web", "app/1"]
    numbers = dict.fromkeys(streams, 0)
    entries: list[Entry] = []
    for n, (_, key, at) in enumerate(sorted(found)):
        stream = streams[n % 2]
        entries.append((stream, numbers[stream], key, at))
        numbers[stream] += 1
    return entries


def append(client: Client, sent: list[Entry]) -> None:
    for stream in sorted({entry[0] for entry in sent}):
        values = [
            value(7 if key == "7" and offset % 2 else key, at, offset % 3)
            for name, offset, key, at in sent
            if name == stream
        ]
        client.stream(stream).append_many(values)


def test_sessions_are_those_of_a_fold_however_the_run_is_split(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    sent = some_events(seed=5, count=600)
    for stream in ("web", "app/1"):
        client.create(stream, content_type=JSON)
    asked: dict[str, Any] = {"key": "user.id", "gap": "10m", "event_time": "at"}
    asked |= {"checkpoint": tmp_path / "cp", "create": True, "max_rows": 200}
    append(client, sent[:400])
    with failing_commit(server, 2, "after") as url:
        run(
            spark, "sessionise", ["web", "app/1"], "stream:out", url=url, late="2h", readTimeout="1s", **asked
        )  # fmt: skip
    # The bound is no property of the checkpoint: with a smaller one more is closed.
    for known, late in ((sent[:400], timedelta(hours=2)), (sent, timedelta(minutes=30))):
        query = jobs.sessionise(
            spark, ["web", "app/1"], "stream:out", url=server.url, late=f"{late.seconds}s", **asked
        )
        found = driver.watch(query, lambda _: None, remembers=jobs.sessionise.remembers)
        closed, still_open = fold(known, late)
        assert len(closed) > len(known) / 6
        assert checksum(sorted(records(client, "out"))) == checksum(sorted(closed))
        assert found.state == driver.State(still_open, 0, "sessions")
        if known is not sent:
            forget_last_batch(tmp_path / "cp")
            append(client, sent[400:])


def test_what_joins_what_closes_and_what_is_late(
    spark: Any, server: Server, client: Client, tmp_path: Path
) -> None:
    tick = 1 / 60_000_000
    batches: list[list[tuple[str, float]]] = [
        [("a", 0), ("a", 10), ("c", 0)],  # as long as the gap is not longer
        [("a", 20 + tick), ("c", 15), ("c", 30)],
        [("c", 8), ("c", 22.5), ("c", 0)],  # out of order: all of them are one
        [("z", 200), ("z", 200), ("d", 190)],
        [("a", 100), ("a", 21), ("z", 205)],  # before the watermark of this batch, not before the one that counted
        [("a", 40), ("late", 169.9), ("z", 210)],
    ]  # fmt: skip
    stream = client.create("in", content_type=JSON)
    sent: list[Entry] = []
    for batch in batches:
        entries = [
            ("in", len(sent) + n, key, BEGIN + timedelta(minutes=minutes))
            for n, (key, minutes) in enumerate(batch)
        ]
        stream.append_many([value(key, at) for _, _, key, at in entries])
        sent += entries
    asked: dict[str, Any] = {"key": "user.id", "gap": "10m", "event_time": "at", "late": "30m"}
    asked |= {"url": server.url, "checkpoint": tmp_path / "cp", "create": True, "max_rows": 3}
    query = jobs.sessionise(spark, "in", "stream:out", **asked)
    found = driver.watch(query, lambda _: None, remembers="sessions")
    assert str(found.state) == "2 sessions stay open, 2 rows came late and were left out"
    kept = [one for one in sent if one[1] not in (15, 16)]
    closed, still_open = fold(kept, timedelta(minutes=30))
    assert sorted(records(client, "out")) == sorted(closed)
    counts = sorted((json.loads(text)["key"], json.loads(text)["count"]) for text in closed)
    assert (counts, still_open) == ([("a", 1), ("a", 2), ("a", 2), ("c", 6)], 2)
    assert run(spark, "sessionise", "in", "stream:out", **asked) == 0
    assert len(records(client, "out")) == len(closed)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        pytest.param(b'{"user":{"id":null},"at":0}', "user.id", marks=pytest.mark.long),
        (b'{"user":{"id":1},"at":"soon"}', "at"),
    ],
)
def test_a_record_without_key_or_time_is_one_clear_error(
    spark: Any, server: Server, client: Client, tmp_path: Path, bad: bytes, field: str
) -> None:
    client.create("in", content_type=JSON).append_many([value("a", BEGIN), bad])
    with pytest.raises(
        MillstreamError, match=rf"record 1 of stream `in` has no `{field}`"
    ) as caught:
        run(
            spark, "sessionise", "in", "stream:out", url=server.url, key="user.id", gap="1h", event_time="at",
            checkpoint=tmp_path / "cp", create=True,
        )  # fmt: skip
    assert caught.value.code == "field_missing"


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("stream:t", {"gap": "1h"}, "needs the option `key`"),
        ("stream:t", {"key": "id"}, "needs the option `gap`"),
        ("stream:t", {"key": "id", "gap": "soon"}, "`soon` is not a duration"),
        ("stream:t", {"key": "id", "gap": "0s"}, "`gap` is 0"),
        ("stream:t", {"key": "id", "gap": "1h", "late": "-1s"}, "`-1s` is not a duration"),
        ("stream:t", {"key": "id", "gap": "1h", "within": "1h"}, "has no option `within`"),
        ("stream:s", {"key": "id", "gap": "1h"}, "read and written by the same job"),
        ("lake", {"key": "id", "gap": "1h"}, "writes a stream, not the directory"),
    ],
)
def test_what_cannot_work_is_refused_before_spark_starts(
    to: str, options: dict[str, str], said: str
) -> None:
    request = Request("u", ("s",), Target.parse(to), options, checkpoint="c")
    with pytest.raises(MillstreamError, match=said):
        driver.check(jobs.sessionise, request)


def test_a_package_that_is_missing_is_told_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from millstream.spark.deploy import required_versions

    monkeypatch.setattr(
        required_versions, "installed", lambda name: None if name == "pandas" else "9"
    )
    request = Request(
        "u", ("s",), Target.parse("stream:t"), {"key": "id", "gap": "1h"}, checkpoint="c"
    )
    with pytest.raises(MillstreamError, match="job `sessionise` needs pandas") as caught:
        driver.check(jobs.sessionise, request)
    assert "millstream[spark]" in (caught.value.hint or "")
