"""Offsets that were never given out, and the ones that were."""

from __future__ import annotations

import re

import pytest

from support.http import Api
from support.sse import EventStream

SHAPE = re.compile(r"\d{16}_\d{16}")


def moved(offset: str, by: int) -> str:
    epoch, _, position = offset.partition("_")
    return f"{epoch}_{int(position) + by:016d}"


@pytest.mark.parametrize("live", [None, "long-poll", "sse"])
def test_beyond_the_tail_is_refused_in_every_mode(shared: Api, path: str, live: str | None) -> None:
    tail = shared.put(path, b"abc").offset
    for offset in (moved(tail, 1), moved(tail, 10**9)):
        answer = shared.get(path, offset=offset, live=live)
        assert (answer.status, answer.code) == (400, "offset_beyond_tail"), offset
        assert answer.offset == tail, "a reader must learn where the tail is"
    future = shared.get(path, offset="9999999999999999_9999999999999999", live=live)
    assert (future.status, future.code) == (400, "offset_invalid")


@pytest.mark.parametrize("live", [None, "long-poll", "sse"])
def test_inside_an_append_is_refused(shared: Api, path: str, live: str | None) -> None:
    tail = shared.put(path, b"abcdef").offset
    answer = shared.get(path, offset=moved(tail, -3), live=live)
    assert (answer.status, answer.code) == (400, "offset_invalid")


def test_inside_an_append_of_a_checkpointed_stream_is_refused(api: Api, path: str) -> None:
    tail = api.put(path, b"abcdef").offset
    api.server.stop()  # type: ignore[attr-defined]
    api.server.restart()  # type: ignore[attr-defined]
    answer = api.get(path, offset=moved(tail, -3))
    assert (answer.status, answer.code) == (400, "offset_invalid")


@pytest.mark.parametrize(
    "offset",
    [
        "0",
        "-2",
        "NOW",
        "1_2_3",
        "abc_def",
        "0000000000000000",
        "_",
        "00000000000000000_0000000000000000",
        "99999999999999999999999999_99999999999999999999999999",
        "٠000000000000000_0000000000000000",
        "a" * 5000,
    ],
)
def test_malformed_offsets_are_refused(shared: Api, path: str, offset: str) -> None:
    shared.put(path, b"abc")
    answer = shared.get(path, offset=offset)
    assert (answer.status, answer.code) == (400, "offset_invalid")


def test_start_has_three_names(shared: Api, path: str) -> None:
    shared.put(path, b"abc")
    for query in ({}, {"offset": "-1"}, {"offset": "0000000000000000_0000000000000000"}):
        assert shared.get(path, **query).body == b"abc"


def test_every_offset_given_out_resumes_exactly(shared: Api, path: str) -> None:
    offsets = [shared.put(path).offset]
    for number in range(20):
        offsets.append(shared.post(path, b"%d," % number).offset)
    assert offsets == sorted(set(offsets))
    for index, offset in enumerate(offsets):
        assert SHAPE.fullmatch(offset)
        expected = b"".join(b"%d," % number for number in range(index, 20))
        answer = shared.get(path, offset=offset)
        assert (answer.body, answer.offset) == (expected, offsets[-1])


def test_head_now_long_poll_and_sse_name_the_same_tail(shared: Api, path: str) -> None:
    tail = shared.put(path, b"abc").offset
    assert shared.head(path).offset == tail
    assert shared.get(path, offset="now").offset == tail
    assert shared.get(path, offset=tail, live="long-poll").offset == tail
    with EventStream.open(shared, path, "now") as events:
        assert events.control()["streamNextOffset"] == tail


def test_large_reads_come_in_windows_that_rebuild_the_stream(shared: Api, path: str) -> None:
    record = bytes(range(256)) * 1024  # 256 KiB
    shared.put(path, content_type="application/octet-stream")
    for _ in range(40):
        shared.post(path, record, "application/octet-stream")
    offset, total, windows = "-1", 0, 0
    while True:
        answer = shared.get(path, offset=offset)
        assert len(answer.body) % len(record) == 0, "a window ends on a record boundary"
        assert answer.body == record * (len(answer.body) // len(record))
        total, windows, offset = total + len(answer.body), windows + 1, answer.offset
        if answer.get("stream-up-to-date"):
            break
        assert answer.get("stream-closed") is None
    assert total == 40 * len(record)
    assert windows > 1, "ten megabytes in one answer: reads are not bounded"
