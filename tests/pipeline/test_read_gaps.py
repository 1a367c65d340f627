"""Gaps inside the ranges of `/v1/read`: told once each, and the rows go on behind them.

Catch-up reads are the oracle: what they return and report over the same stretch, `/v1/read` returns and reports.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.classes import Gap, as_class, read_through
from support.disk import flip
from support.http import Api
from support.pipeline import Pipeline, Window
from support.server import Server

APPEND_BYTES = 2000
INDEX_ENTRY_BYTES = 32
QUIET = {"scrub_bytes_per_second": 0, "read_window_bytes": "16KiB"}
COLUMNS = ["stream", "offset", "value", "epoch"]


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server(settings=QUIET)


@pytest.fixture
def pipeline(api: Api) -> Pipeline:
    return Pipeline(api)


def told(window: Window) -> list[Gap]:
    return [Gap(gap["from"], gap["to"], gap["reason"], gap["certain"]) for gap in window.gaps]


def check_like_a_catch_up_read(api: Api, path: str, offset: str = "-1") -> Window:
    """Both ways to read say the same, in one window and in many."""
    pipeline = Pipeline(api)
    body, gaps = read_through(api, path, offset)
    (found,) = pipeline.tail(path, {"offset": offset})["at"]
    begin = {"offset": offset, "number": found["number"]}
    ranges = [{"stream": path, "from": begin, "to": pipeline.tail(path)["tail"]}]
    whole = pipeline.read(ranges, columns=COLUMNS)
    assert b"".join(whole.column("value")) == body
    assert told(whole) == gaps
    single = pipeline.read(ranges, columns=COLUMNS, max_bytes=1)
    assert single.table.to_pylist() == whole.table.to_pylist()
    assert told(single) == gaps
    return whole


@pytest.mark.parametrize("name", ["memory", "ephemeral"])
def test_every_crash_is_a_gap(server: Server, api: Api, path: str, name: str) -> None:
    offsets = [api.put(path, b"", "text/plain", as_class(name)).offset]
    for turn in range(4):
        for number in range(3):
            offsets.append(api.post(path, b"<%d.%d>" % (turn, number)).offset)
        if turn == 0 and name == "memory":
            server.restart()  # an orderly stop keeps them
        else:
            server.crash_and_restart()
    offsets.append(api.post(path, b"<last>").offset)
    whole = check_like_a_catch_up_read(api, path)
    assert whole.column("value")[-1] == b"<last>"
    for offset in offsets:
        check_like_a_catch_up_read(api, path, offset)
    if name == "memory":
        assert whole.column("offset") == list(range(whole.table.num_rows))
        assert whole.column("value")[:3] == [b"<0.0>", b"<0.1>", b"<0.2>"]
        assert len(set(whole.column("epoch"))) > 1


def test_a_range_whose_end_was_lost_says_so(
    server: Server, api: Api, pipeline: Pipeline, path: str
) -> None:
    api.put(path, b"", "application/json", as_class("ephemeral"))
    api.post(path, b"[1,2]", "application/json")
    planned = pipeline.whole(path)
    server.crash_and_restart()
    tail = pipeline.tail(path)["tail"]["offset"]
    lost = pipeline.read(planned)
    assert lost.table.num_rows == 0
    gap = {"range": 0, "to": tail, "reason": "crash", "certain": True}
    assert lost.gaps == [{**gap, "from": planned[0]["from"]["offset"]}]
    # Up to where the old epoch certainly goes there is nothing to tell.
    start = {**planned[0], "to": planned[0]["from"]}
    assert pipeline.read([start]).gaps == []


def test_another_incarnation_without_its_name_is_a_gap(
    pipeline: Pipeline, api: Api, path: str
) -> None:
    old = api.put(path, b"old").offset
    api.delete(path)
    api.put(path, b"new")
    begin = {"offset": old, "number": 1}
    ranges = [{"stream": path, "from": begin, "to": pipeline.tail(path)["tail"]}]
    read = pipeline.read(ranges)
    assert read.column("value") == [b"new"]
    assert [(gap["from"], gap["reason"], gap["certain"]) for gap in read.gaps] == [
        (old, "recreated", True)
    ]


# --- damage -----------------------------------------------------------------------------------


def append_of(path: str, number: int) -> bytes:
    return (b"<%s#%d>" % (path.encode(), number) * APPEND_BYTES)[:APPEND_BYTES]


def write(api: Api, path: str, count: int) -> list[str]:
    """Appends of one size; returns the offset in front of and behind each."""
    offsets = [api.put(path).offset]
    offsets += [api.post(path, append_of(path, number)).offset for number in range(count)]
    return offsets


def place_of(data_dir: Path, content: bytes) -> tuple[Path, int]:
    for pattern in ("segments/*/*.seg", "packs/*.pack"):
        for file in data_dir.glob(pattern):
            at = file.read_bytes().find(content)
            if at >= 0:
                return file, at
    raise AssertionError(f"{content[:40]!r} is in no file")


def corruption(begin: str, end: str, number: int = 0) -> dict[str, Any]:
    return {"range": number, "from": begin, "to": end, "reason": "corruption", "certain": True}


@pytest.mark.parametrize("count", [40, 6], ids=["segment", "pack"])
def test_a_damaged_append_is_a_gap_and_the_rest_is_read(
    server: Server, api: Api, pipeline: Pipeline, count: int
) -> None:
    bad = write(api, "bad", count)
    write(api, "good", count)
    server.stop()
    for number in (2, 4):
        file, at = place_of(server.data_dir, append_of("bad", number))
        flip(file, at + APPEND_BYTES // 2)
    server.restart()
    for max_bytes in (1 << 20, 1):
        read = pipeline.read(pipeline.whole("bad", "good"), columns=COLUMNS, max_bytes=max_bytes)
        rows = [(row["stream"], row["offset"], row["value"]) for row in read.table.to_pylist()]
        left = [number for number in range(count) if number not in (2, 4)]
        assert rows == [("bad", number, append_of("bad", number)) for number in left] + [
            ("good", number, append_of("good", number)) for number in range(count)
        ]
        assert read.gaps == [corruption(bad[2], bad[3]), corruption(bad[4], bad[5])]
    check_like_a_catch_up_read(api, "bad")
    check_like_a_catch_up_read(api, "bad", bad[2])
    (found,) = pipeline.tail("bad", {"offset": bad[2]})["at"]
    assert (found["offset"], found["number"], found["gap"]["reason"]) == (bad[3], 3, "corruption")
    assert pipeline.tail("bad", {"number": 3})["at"][0]["offset"] == bad[3]
    begin, end = {"offset": bad[3], "number": 3}, {"offset": bad[4], "number": 4}
    between = pipeline.read([{"stream": "bad", "from": begin, "to": end}])
    assert (between.column("offset"), between.gaps) == ([3], [])


def test_a_damaged_append_of_many_records_is_lost_as_a_whole(
    server: Server, api: Api, pipeline: Pipeline
) -> None:
    api.put("bad", b"", "application/json")
    offsets = [api.head("bad").offset]
    for number in range(3):
        body = b"[" + b",".join(b'"%d-%d"' % (number, n) for n in range(100)) + b"]"
        offsets.append(api.post("bad", body, "application/json").offset)
    begin, end = pipeline.place("bad", number=150), pipeline.place("bad", number=250)
    server.stop()
    file, at = place_of(server.data_dir, b'"1-42",')
    flip(file, at + 1)
    server.restart()
    read = pipeline.read(pipeline.whole("bad"))
    assert read.column("offset") == [*range(100), *range(200, 300)]
    assert read.gaps == [corruption(offsets[1], offsets[2])]
    part = pipeline.read([{"stream": "bad", "from": begin, "to": end}])
    assert part.column("offset") == [*range(200, 250)]
    assert part.gaps == [corruption(offsets[1], offsets[2])]


def test_a_damaged_index_is_a_gap_of_its_extent(
    server: Server, api: Api, pipeline: Pipeline
) -> None:
    bad = write(api, "bad", 40)
    server.stop()
    segment, _ = place_of(server.data_dir, append_of("bad", 0))
    flip(segment.with_suffix(".idx"), 20 * INDEX_ENTRY_BYTES + 17)
    server.restart()
    api.post("bad", b"more")
    read = pipeline.read(pipeline.whole("bad"), columns=COLUMNS)
    assert read.column("value")[-1] == b"more"
    assert read.column("offset")[-1] == 40
    assert read.gaps == [corruption(read_end(read, bad), bad[40])]


def read_end(read: Window, offsets: list[str]) -> str:
    """Where the rows before the gap end: an index is read in blocks, so some may have been good."""
    return offsets[read.table.num_rows - 1]


def test_a_missing_file_is_a_gap(server: Server, api: Api, pipeline: Pipeline) -> None:
    bad = write(api, "bad", 40)
    write(api, "good", 40)
    server.stop()
    segment, _ = place_of(server.data_dir, append_of("bad", 0))
    segment.unlink()
    server.restart()
    read = pipeline.read(pipeline.whole("bad", "good"), columns=COLUMNS)
    assert read.column("stream") == ["good"] * 40
    assert read.gaps == [corruption(bad[0], bad[40])]
