"""Pull-wake subscriptions on a real server."""

from __future__ import annotations

import threading

from control.conftest import ROOT, Subscriptions, eventually
from support.http import Response


def code(response: Response) -> tuple[int, str]:
    return response.status, response.json()["error"]["code"]


def test_a_wake_is_written_claimed_and_acknowledged(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s")
    tail = subscriptions.create("events/a", b"[1]")
    eventually(lambda: bool(subscriptions.wakes("s")), "a wake event")
    (event,) = subscriptions.wakes("s")
    assert (event["type"], event["stream"], event["generation"]) == ("wake", "events/a", 1)
    claim = subscriptions.claim("s").json()
    assert claim["lease_ttl_ms"] == 30_000
    assert [(v["path"], v["tail_offset"], v["has_pending"]) for v in claim["streams"]] == [
        ("events/a", tail, True)
    ]
    done = subscriptions.answer("s", "ack", claim, {"events/a": tail}, done=True)
    assert done.json() == {"ok": True, "next_wake": False}
    assert code(subscriptions.claim("s")) == (409, "NO_PENDING_WORK")
    assert code(subscriptions.answer("s", "ack", claim, done=True)) == (409, "FENCED")


def test_a_claim_right_after_an_append_succeeds(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s")
    subscriptions.create("events/a")
    for number in range(1, 21):
        tail = subscriptions.append("events/a", number)
        claim = subscriptions.claim("s")
        assert claim.status == 200, claim.body
        body = claim.json()
        assert body["streams"][0]["tail_offset"] == tail
        subscriptions.answer("s", "ack", body, {"events/a": tail}, done=True)


def test_one_of_many_racing_workers_wins(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s")
    subscriptions.create("events/a", b"[1]")
    eventually(lambda: bool(subscriptions.wakes("s")), "a wake event")
    answers: list[Response] = []
    start = threading.Barrier(8)

    def work(name: str) -> None:
        start.wait(10)
        answers.append(subscriptions.claim("s", name))

    workers = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert sorted(response.status for response in answers) == [200] + [409] * 7
    losers = [response.json()["error"] for response in answers if response.status == 409]
    assert {error["code"] for error in losers} == {"ALREADY_CLAIMED"}
    assert len({error["current_holder"] for error in losers}) == 1
    assert {error["generation"] for error in losers} == {1}


def test_release_writes_another_wake(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s")
    subscriptions.create("events/a", b"[1]")
    claim = subscriptions.claim("s").json()
    assert subscriptions.answer("s", "release", claim).status == 204
    eventually(
        lambda: any(w["generation"] == claim["generation"] + 1 for w in subscriptions.wakes("s")),
        "a wake event of the next generation",
    )
    assert code(subscriptions.answer("s", "release", claim)) == (409, "FENCED")
    assert subscriptions.claim("s", "two").status == 200


def test_an_expired_lease_wakes_again_and_fences_its_worker(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s", lease_ttl_ms=1000)
    tail = subscriptions.create("events/a", b"[1]")
    claim = subscriptions.claim("s", "slow").json()
    eventually(
        lambda: any(w["generation"] == claim["generation"] + 1 for w in subscriptions.wakes("s")),
        "a wake event of the next generation",
        deadline_s=4.0,
    )
    late = subscriptions.answer("s", "ack", claim, {"events/a": tail}, done=True)
    assert code(late) == (409, "FENCED")
    assert subscriptions.acked("s") == {"events/a": "-1"}
    assert subscriptions.claim("s", "quick").json()["generation"] == claim["generation"] + 1


def test_acks_are_all_or_nothing(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s")
    tail_a = subscriptions.create("events/a", b"[1]")
    tail_b = subscriptions.create("events/b", b"[1]")
    eventually(lambda: len(subscriptions.get("s")["streams"]) == 2, "both are linked")
    claim = subscriptions.claim("s").json()
    beyond = tail_b[:-1] + "9" if tail_b[-1] != "9" else tail_b[:17] + "9" * 16
    for wrong in ({"events/b": beyond}, {"events/b": "-1"}, {"events/none": tail_b}):
        response = subscriptions.answer("s", "ack", claim, {"events/a": tail_a, **wrong})
        assert code(response) == (409, "INVALID_OFFSET"), wrong
    assert set(subscriptions.acked("s").values()) == {"-1"}
    assert subscriptions.answer("s", "ack", claim, {"events/a": tail_a}).status == 200
    assert subscriptions.acked("s") == {"events/a": tail_a, "events/b": "-1"}


def test_a_deleted_wake_stream_fails_the_wake_but_not_the_work(
    subscriptions: Subscriptions,
) -> None:
    subscriptions.pull("s")
    assert subscriptions.api.delete("wake/pool").status == 204
    tail = subscriptions.create("events/a", b"[1]")
    eventually(lambda: subscriptions.get("s")["status"] == "failed", "the failure shows")
    subscriptions.create("wake/pool", b"[]")
    eventually(lambda: bool(subscriptions.wakes("s")), "the wake event, on a retry", 15.0)
    assert subscriptions.get("s")["status"] == "active"
    claim = subscriptions.claim("s").json()
    done = subscriptions.answer("s", "ack", claim, {"events/a": tail}, done=True)
    assert done.status == 200


def test_the_wake_stream_must_exist_and_be_json(subscriptions: Subscriptions) -> None:
    config = {"type": "pull-wake", "pattern": "**", "wake_stream": "pool"}
    assert code(subscriptions.put("s", **config)) == (400, "INVALID_REQUEST")
    subscriptions.api.put("pool", b"", "text/plain")
    assert code(subscriptions.put("s", **config)) == (400, "INVALID_REQUEST")


def test_a_subscription_to_everything_is_not_woken_by_its_own_wakes(
    subscriptions: Subscriptions,
) -> None:
    subscriptions.pull("s", pattern="**")
    tail = subscriptions.create("any/where/x", b"[1]")
    eventually(lambda: bool(subscriptions.wakes("s")), "a wake event")
    claim = subscriptions.claim("s").json()
    assert [view["path"] for view in claim["streams"]] == ["any/where/x"]
    done = subscriptions.answer("s", "ack", claim, {"any/where/x": tail}, done=True)
    assert done.json() == {"ok": True, "next_wake": False}
    assert code(subscriptions.claim("s")) == (409, "NO_PENDING_WORK")
    assert len(subscriptions.wakes("s")) == 1


def test_claims_need_an_existing_pull_subscription(subscriptions: Subscriptions) -> None:
    assert code(subscriptions.claim("none")) == (404, "SUBSCRIPTION_NOT_FOUND")
    response = subscriptions.put(
        "hook", type="webhook", streams=["x"], webhook={"url": "http://127.0.0.1:9/"}
    )
    assert response.status == 201
    assert code(subscriptions.claim("hook")) == (400, "INVALID_REQUEST")
    assert subscriptions.call("GET", ROOT + "none").status == 404
