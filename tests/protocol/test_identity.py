"""A stream deleted and created again is another stream, and says so."""

from __future__ import annotations

import re

from support.http import Api
from support.sse import EventStream

GAP = re.compile(
    r"from=(?P<start>\d{16}_\d{16}); to=(?P<end>\d{16}_\d{16}); reason=(?P<why>\w+); certain=[01]"
)


def test_incarnation_is_on_every_answer_and_the_same(shared: Api, path: str) -> None:
    created = shared.put(path, b"x")
    name = created["stream-incarnation"]
    assert shared.put(path)["stream-incarnation"] == name
    assert shared.head(path)["stream-incarnation"] == name
    assert shared.get(path)["stream-incarnation"] == name
    assert shared.get(path, offset="now")["stream-incarnation"] == name


def test_incarnation_changes_when_the_stream_is_created_again(shared: Api, path: str) -> None:
    seen = set()
    for _ in range(5):
        seen.add(shared.put(path)["stream-incarnation"])
        shared.delete(path)
    assert len(seen) == 5


def test_old_offsets_read_the_new_stream_from_its_start(shared: Api, path: str) -> None:
    shared.put(path, b"old")
    old = shared.post(path, b"older").offset
    shared.delete(path)
    fresh = shared.put(path, b"new").offset
    assert fresh != old
    answer = shared.get(path, offset=old)
    assert (answer.status, answer.body) == (200, b"new")
    gap = GAP.fullmatch(answer["stream-gap"])
    assert gap is not None, answer["stream-gap"]
    assert (gap["why"], gap["start"]) == ("recreated", old)
    assert shared.get(path).get("stream-gap") is None


def test_sse_tells_of_the_gap_too(shared: Api, path: str) -> None:
    old = shared.put(path, b"old").offset
    shared.delete(path)
    shared.put(path, b"new", headers={"Stream-Closed": "true"})
    with EventStream.open(shared, path, old) as events:
        seen = events.until_end()
    fields = [event.json() for event in seen if event.kind == "control"]
    assert any(field.get("streamGapReason") == "recreated" for field in fields), fields
    assert [event.data for event in seen if event.kind == "data"] == ["new"]


def test_long_poll_at_an_old_offset_answers_at_once(shared: Api, path: str) -> None:
    old = shared.put(path, b"old").offset
    shared.delete(path)
    shared.put(path, b"new")
    answer = shared.get(path, offset=old, live="long-poll")
    assert (answer.status, answer.body) == (200, b"new")
    assert "reason=recreated" in answer["stream-gap"]


def test_no_offset_is_ever_given_out_twice(shared: Api, path: str) -> None:
    seen: set[str] = set()
    for _ in range(5):
        offsets = [shared.put(path, b"same").offset]
        offsets.append(shared.post(path, b"same").offset)
        assert not seen & set(offsets)
        seen |= set(offsets)
        shared.delete(path)
