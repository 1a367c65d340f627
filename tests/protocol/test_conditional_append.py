"""`If-Match` on an append: only if the tail is still where the writer saw it."""

from __future__ import annotations

import threading

from support.http import Api


def test_append_at_the_expected_tail(shared: Api, path: str) -> None:
    tail = shared.put(path, b"a").offset
    done = shared.post(path, b"b", headers={"If-Match": f'"{tail}"'})
    assert done.status == 204
    assert shared.get(path).body == b"ab"
    lost = shared.post(path, b"c", headers={"If-Match": f'"{tail}"'})
    assert (lost.status, lost.code, lost.offset) == (412, "precondition_failed", done.offset)
    assert shared.get(path).body == b"ab"


def test_refused_condition_leaves_sequence_alone(shared: Api, path: str) -> None:
    tail = shared.put(path).offset
    shared.post(path, b"a")
    stale = {"If-Match": f'"{tail}"', "Stream-Seq": "z"}
    assert shared.post(path, b"b", headers=stale).status == 412
    assert shared.post(path, b"c", headers={"Stream-Seq": "b"}).status == 204


def test_conditional_close(shared: Api, path: str) -> None:
    tail = shared.put(path).offset
    now = shared.post(path, b"a").offset
    stale = {"If-Match": f'"{tail}"', "Stream-Closed": "true"}
    assert shared.post(path, b"", None, stale).status == 412
    assert shared.head(path).get("stream-closed") is None
    fresh = {"If-Match": f'"{now}"', "Stream-Closed": "true"}
    assert shared.post(path, b"", None, fresh).status == 204


def test_offset_of_an_earlier_incarnation_never_matches(shared: Api, path: str) -> None:
    tail = shared.put(path).offset
    shared.delete(path)
    shared.put(path)
    assert shared.post(path, b"x", headers={"If-Match": f'"{tail}"'}).status == 412


def test_of_many_racing_writers_exactly_one_wins_each_round(shared: Api, path: str) -> None:
    tail = shared.put(path).offset
    for turn in range(10):
        answers: list[int] = []
        barrier = threading.Barrier(8)

        headers = {"If-Match": f'"{tail}"'}

        def race(
            body: bytes, headers: dict[str, str], start: threading.Barrier, out: list[int]
        ) -> None:
            start.wait(10)
            out.append(shared.post(path, body, headers=headers).status)

        racers = [
            threading.Thread(target=race, args=(b"%d;" % turn, headers, barrier, answers))
            for _ in range(8)
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(20)
        assert sorted(answers) == [204] + [412] * 7
        tail = shared.head(path).offset
    assert shared.get(path).body == b"".join(b"%d;" % turn for turn in range(10))
