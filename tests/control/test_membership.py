"""Which streams a subscription follows, and what happens when they come and go."""

from __future__ import annotations

from functools import partial

from control.conftest import ROOT, Subscriptions, eventually
from support.server import Server

ZERO = "0000000000000000_0000000000000000"


def links(subscriptions: Subscriptions, name: str) -> dict[str, str]:
    return {link["path"]: link["link_type"] for link in subscriptions.get(name)["streams"]}


def test_explicit_and_glob_links(subscriptions: Subscriptions) -> None:
    tail = subscriptions.create("events/a", b"[1]")
    subscriptions.pull("s", streams=["events/a", "later"])
    assert links(subscriptions, "s") == {"events/a": "explicit", "later": "explicit"}
    assert subscriptions.acked("s") == {"events/a": tail, "later": ZERO}
    assert subscriptions.call("DELETE", f"{ROOT}s/streams/events%2Fa").status == 204
    assert subscriptions.call("DELETE", f"{ROOT}s/streams/later").status == 204
    assert links(subscriptions, "s") == {"events/a": "glob"}
    assert subscriptions.acked("s") == {"events/a": tail}


def test_a_stream_that_does_not_exist_yet_is_followed_from_its_start(
    subscriptions: Subscriptions,
) -> None:
    subscriptions.pull("s", pattern=None, streams=["later"])
    assert subscriptions.claim("s").status == 409
    tail = subscriptions.create("later", b"[1,2]")
    claim = subscriptions.claim("s").json()
    (view,) = claim["streams"]
    assert (view["acked_offset"], view["tail_offset"]) == (ZERO, tail)
    whole = subscriptions.api.get("later", offset=view["acked_offset"]).json()
    assert whole == [1, 2]


def test_a_stream_added_later_starts_at_its_tail(subscriptions: Subscriptions) -> None:
    tail = subscriptions.create("side", b"[1]")
    subscriptions.pull("s")
    body = {"streams": ["side"]}
    assert subscriptions.call("POST", f"{ROOT}s/streams", body).status == 204
    assert subscriptions.call("POST", f"{ROOT}s/streams", body).status == 204
    assert subscriptions.acked("s") == {"side": tail}
    assert subscriptions.claim("s").status == 409
    subscriptions.append("side")
    assert subscriptions.claim("s").status == 200


def test_deleted_streams_leave_and_come_back_from_their_start(subscriptions: Subscriptions) -> None:
    subscriptions.create("events/a", b"[1]")
    subscriptions.create("side", b"[1]")
    subscriptions.pull("s", streams=["side"])
    subscriptions.api.delete("events/a")
    subscriptions.api.delete("side")
    eventually(lambda: subscriptions.acked("s") == {"side": ZERO}, "the links are reset")
    tails = {path: subscriptions.create(path, b'["again"]') for path in ("side", "events/a")}
    eventually(lambda: "events/a" in subscriptions.acked("s"), "the new stream is linked")
    claim = subscriptions.claim("s").json()
    assert {v["path"]: v["tail_offset"] for v in claim["streams"] if v["has_pending"]} == tails
    done = subscriptions.answer("s", "ack", claim, tails, done=True)
    assert done.json() == {"ok": True, "next_wake": False}


def test_a_stream_deleted_while_it_is_worked_on(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s")
    tail = subscriptions.create("events/a", b"[1]")
    claim = subscriptions.claim("s").json()
    subscriptions.api.delete("events/a")
    eventually(lambda: subscriptions.acked("s") == {}, "the link is gone")
    response = subscriptions.answer("s", "ack", claim, {"events/a": tail}, done=True)
    assert response.json()["error"]["code"] == "INVALID_OFFSET"
    assert subscriptions.answer("s", "ack", claim, done=True).json()["next_wake"] is False
    subscriptions.create("events/b", b"[1]")
    assert subscriptions.claim("s").status == 200


def test_globs(subscriptions: Subscriptions) -> None:
    patterns = {"one": "a/*", "deep": "a/**", "mid": "**/x", "all": "**"}
    for name, pattern in patterns.items():
        subscriptions.pull(name, pattern=pattern)
    for path in ("a", "a/x", "a/b/x", "x", "b"):
        subscriptions.create(path, b"[1]")
    expected = {
        "one": {"a/x"},
        "deep": {"a", "a/x", "a/b/x"},
        "mid": {"a/x", "a/b/x", "x"},
        "all": {"a", "a/x", "a/b/x", "x", "b"},
    }

    def has(name: str, paths: set[str]) -> bool:
        return set(links(subscriptions, name)) == paths

    for name, paths in expected.items():
        eventually(partial(has, name, paths), f"links of {name}")


def test_the_same_configuration_confirms_and_another_conflicts(
    subscriptions: Subscriptions,
) -> None:
    subscriptions.pull("s", streams=["b", "a"], description="d")
    same = {"type": "pull-wake", "pattern": "/events/*/", "wake_stream": "wake/pool"}
    again = subscriptions.put("s", **same, streams=["a", "b", "a"], description="d")
    assert again.status == 200
    other = subscriptions.put("s", **same, streams=["a"], description="d")
    assert (other.status, other.json()["error"]["code"]) == (409, "SUBSCRIPTION_ALREADY_EXISTS")


def test_links_are_counted_and_take_memory_only_while_something_is_outstanding(
    server: Server, subscriptions: Subscriptions
) -> None:
    for number in range(5):
        subscriptions.create(f"events/{number}", b"[1]")
    for name in ("s", "t", "u"):
        subscriptions.pull(name)
    api = subscriptions.api

    def kept() -> tuple[int, int]:
        links = api.metric("millstream_subscription_links")
        return links, api.metric("millstream_subscription_offsets")

    assert kept() == (15, 0)
    subscriptions.append("events/3")
    eventually(lambda: kept() == (15, 3), "three of them have something to acknowledge")
    server.restart()
    eventually(lambda: kept() == (15, 3), "as before the restart")
    assert subscriptions.call("DELETE", f"{ROOT}t").status == 204
    assert kept() == (10, 2)
