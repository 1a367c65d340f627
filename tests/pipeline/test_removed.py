"""Where removed streams ended: told by `/v1/tails`, through kill -9, checkpoints and re-creation."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.classes import as_class
from support.http import Api
from support.pipeline import Pipeline
from support.server import Server

JSON = "application/json"


@pytest.fixture
def pipeline(api: Api) -> Pipeline:
    return Pipeline(api)


def come_and_go(
    api: Api, pipeline: Pipeline, name: str, count: int, durability: str = "fsync"
) -> dict[str, Any]:
    """A stream of `count` records is created and deleted; returns what must be told about it."""
    assert api.put(name, b"", JSON, as_class(durability)).status == 201
    for number in range(count):
        assert api.post(name, f"[{number}]".encode(), JSON).status == 204
    tail = pipeline.tail(name)
    began_ms = tail["time_ms"] or 0
    assert api.delete(name).status == 204
    (told,) = pipeline.tails(streams=[name])["removed"]
    assert began_ms <= told["time_ms"] <= pipeline.tails(streams=[])["now_ms"]
    assert told == {
        "name": name,
        "incarnation": tail["incarnation"],
        "tail": tail["tail"],
        "epoch": int(tail["tail"]["offset"][:16]),
        "time_ms": told["time_ms"],
    }
    return told


def removed(pipeline: Pipeline, *asked: Any) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = pipeline.tails(streams=list(asked))["removed"]
    return told


def one(end: dict[str, Any]) -> dict[str, Any]:
    """A question for exactly this incarnation."""
    return {"name": end["name"], "incarnation": end["incarnation"]}


def test_a_missing_stream_and_one_that_was_created_again(api: Api, pipeline: Pipeline) -> None:
    first = come_and_go(api, pipeline, "orders", 3)
    told = pipeline.tails(streams=["orders", "never"])
    assert (told["missing"], told["removed"]) == (["orders", "never"], [first])
    second = come_and_go(api, pipeline, "orders", 0)
    assert removed(pipeline, "orders") == [second], "the newest of the name"
    assert removed(pipeline, one(first), one(second)) == [first, second]
    api.put("orders", b"[1]", JSON)
    living = pipeline.tail("orders")
    told = pipeline.tails(streams=["orders", one(first), one(living)])
    assert told["missing"] == []
    assert [stream["incarnation"] for stream in told["streams"]] == [living["incarnation"]] * 3
    assert told["removed"] == [first], "only the one that was meant and is gone"
    unknown = {"name": "orders", "incarnation": "1"}
    assert removed(pipeline, unknown) == []
    answer = pipeline.post("/v1/tails", {"streams": [{"name": "orders", "incarnation": "x"}]})
    assert (answer.status, answer.code) == (400, "bad_request")


def test_who_follows_hears_it(api: Api, pipeline: Pipeline) -> None:
    api.put("chat/1", b"[1]", JSON)
    api.put("chat/2", b"[1,2]", JSON)
    by_pattern = pipeline.tails(pattern="chat/.*")
    assert by_pattern["removed"] == []
    by_name = pipeline.tails(streams=["chat/1", "chat/2"])
    tail = by_name["streams"][1]
    # Behind the last look of those who follow.
    behind = api.post("chat/2", b"[3,4,5]", JSON).offset
    api.delete("chat/2")
    for told in (
        pipeline.tails(pattern="chat/.*", cursor=by_pattern["cursor"], wait_ms=5000),
        pipeline.tails(streams=["chat/1", "chat/2"], cursor=by_name["cursor"], wait_ms=5000),
    ):
        assert (told["complete"], told["missing"]) == (False, ["chat/2"])
        (end,) = told["removed"]
        assert end["incarnation"] == tail["incarnation"]
        assert end["tail"] == {"offset": behind, "number": 5}


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_it_survives_kill_9_and_a_checkpoint(
    server: Server, api: Api, pipeline: Pipeline, durability: str
) -> None:
    ends = [come_and_go(api, pipeline, name, 4, durability) for name in ("a", "b", "a")]
    server.crash_and_restart()
    assert removed(pipeline, *map(one, ends)) == ends, "from the log"
    # An orderly stop makes a checkpoint, which takes the streams out of the catalog.
    server.restart()
    assert removed(pipeline, *map(one, ends)) == ends, "from the catalog"
    ends.append(come_and_go(api, pipeline, "c", 1, durability))
    server.crash_and_restart()
    assert removed(pipeline, *map(one, ends)) == ends, "from both"
    server.restart()
    server.crash_and_restart()
    assert removed(pipeline, *map(one, ends)) == ends


def test_an_expired_stream_has_an_end_as_soon_as_it_is_missing(
    server: Server, api: Api, pipeline: Pipeline
) -> None:
    assert api.put("short", b"", JSON, {"Stream-TTL": "1"}).status == 201
    assert api.post("short", b"[1,2,3]", JSON).status == 204
    until = time.monotonic() + 15
    while not (told := pipeline.tails(streams=["short"]))["missing"]:
        tail = told["streams"][0]
        assert time.monotonic() < until
        time.sleep(0.02)
    (end,) = told["removed"]
    assert (end["incarnation"], end["tail"]) == (tail["incarnation"], tail["tail"])
    server.crash_and_restart()
    assert removed(pipeline, "short") == [end]


def test_a_fork_and_its_source(server: Server, api: Api, pipeline: Pipeline) -> None:
    api.put("source", b"[1,2]", JSON)
    fork = {"Stream-Forked-From": Api.target("source")}
    assert api.put("fork", b"", JSON, fork).status == 201
    tail = pipeline.tail("source")["tail"]
    api.delete("source")
    assert [end["tail"] for end in removed(pipeline, "source")] == [tail]
    server.restart()
    assert [end["tail"] for end in removed(pipeline, "source")] == [tail], "kept for the fork"
    api.post("fork", b"[3]", JSON)
    ended = pipeline.tail("fork")["tail"]
    api.delete("fork")
    server.restart()
    assert [end["tail"] for end in removed(pipeline, "source", "fork")] == [tail, ended]
