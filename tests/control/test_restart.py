"""Subscriptions across a clean restart and across kill -9."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from control.conftest import ROOT, Subscriptions, eventually
from control.receiver import ACCEPT, DONE, Receiver

StartReceiver = Callable[..., Receiver]
FAIL = (503, b"")


@pytest.fixture(params=["restart", "kill"])
def restart(request: pytest.FixtureRequest, subscriptions: Subscriptions) -> Callable[[], None]:
    """Brings the server down, politely or not, and up again over the same directory."""

    def go() -> None:
        if request.param == "kill":
            subscriptions.server.kill()
        subscriptions.server.restart()

    return go


def test_configuration_keys_and_offsets_survive(
    subscriptions: Subscriptions, start_receiver: StartReceiver, restart: Callable[[], None]
) -> None:
    receiver = start_receiver(DONE)
    subscriptions.hook("s", receiver, streams=["side"], description="d", lease_ttl_ms=5000)
    tail = subscriptions.create("events/a", b"[1]")
    generation = receiver.next().json["generation"]
    eventually(lambda: subscriptions.acked("s")["events/a"] == tail, "the wake is acknowledged")
    before = subscriptions.get("s")
    jwks = subscriptions.call("GET", "/v1/stream/__ds/jwks.json").json()
    restart()
    assert subscriptions.call("GET", "/v1/stream/__ds/jwks.json").json() == jwks
    after = subscriptions.get("s")
    for view in (before, after):
        del view["webhook"]["signing"]["jwks_url"]  # the port is another one
    assert after == before
    receiver.expect_silence(0.3)
    subscriptions.append("events/a")
    wake = receiver.next()
    wake.verify(jwks)
    assert wake.json["generation"] == generation + 1


def test_a_wake_in_flight_goes_on_with_the_same_token(
    subscriptions: Subscriptions, start_receiver: StartReceiver, restart: Callable[[], None]
) -> None:
    receiver = start_receiver(ACCEPT)
    subscriptions.hook("s", receiver, lease_ttl_ms=60_000)
    tail = subscriptions.create("events/a", b"[1]")
    wake = receiver.next().json
    # The response is taken note of when a second callback shows the lease running.
    assert subscriptions.answer("s", "callback", wake).status == 200
    restart()
    receiver.expect_silence(0.3)
    done = subscriptions.answer("s", "callback", wake, {"events/a": tail}, done=True)
    assert done.json() == {"ok": True, "next_wake": False}
    assert subscriptions.acked("s") == {"events/a": tail}


def test_a_claim_keeps_its_holder_and_its_fence(
    subscriptions: Subscriptions, restart: Callable[[], None]
) -> None:
    subscriptions.pull("s", lease_ttl_ms=60_000)
    tail = subscriptions.create("events/a", b"[1]")
    claim = subscriptions.claim("s", "one").json()
    restart()
    busy = subscriptions.claim("s", "two").json()["error"]
    assert (busy["code"], busy["current_holder"]) == ("ALREADY_CLAIMED", "one")
    done = subscriptions.answer("s", "ack", claim, {"events/a": tail}, done=True)
    assert done.json() == {"ok": True, "next_wake": False}
    restart()
    assert subscriptions.acked("s") == {"events/a": tail}
    stale = subscriptions.answer("s", "ack", claim, done=True)
    assert stale.json()["error"]["code"] == "FENCED"


def test_a_lease_that_ends_while_the_server_is_down_wakes_again(
    subscriptions: Subscriptions, restart: Callable[[], None]
) -> None:
    subscriptions.pull("s", lease_ttl_ms=1000)
    subscriptions.create("events/a", b"[1]")
    claim = subscriptions.claim("s").json()
    restart()
    eventually(
        lambda: any(w["generation"] == claim["generation"] + 1 for w in subscriptions.wakes("s")),
        "a wake event of the next generation",
    )


def test_the_retry_schedule_survives(
    subscriptions: Subscriptions, start_receiver: StartReceiver, restart: Callable[[], None]
) -> None:
    receiver = start_receiver(FAIL, FAIL, FAIL, DONE)
    subscriptions.hook("s", receiver)
    subscriptions.create("events/a", b"[1]")
    first, second = receiver.next(), receiver.next()

    def due() -> datetime:
        return datetime.fromisoformat(subscriptions.get("s").get("next_attempt_at", "1970-01-01Z"))

    eventually(lambda: due().timestamp() > second.at, "a third attempt is planned")
    planned = due()
    restart()
    assert due() == planned
    third = receiver.next()
    assert third.json["wake_id"] == first.json["wake_id"]
    assert 1.5 <= third.at - second.at <= 6.0, "neither at once nor from the first delay again"
    assert receiver.next().json["wake_id"] == first.json["wake_id"]
    eventually(lambda: subscriptions.get("s")["status"] == "active", "the wake is taken")


def test_nothing_appended_around_a_kill_is_forgotten(subscriptions: Subscriptions) -> None:
    """Every acknowledged append is acked or pending after each kill, and no generation repeats."""
    subscriptions.pull("s", lease_ttl_ms=1000)
    claims: list[dict[str, Any]] = []

    def claimed() -> bool:
        response = subscriptions.claim("s")
        if response.status == 200:
            claims.append(response.json())
        return response.status == 200

    def linked(path: str) -> bool:
        return path in subscriptions.acked("s")

    for number in range(4):
        name = f"events/{number}"
        tail = subscriptions.create(name, b"[1]")
        if number % 2:
            assert claimed()  # and the worker dies with the server
        subscriptions.server.kill()
        subscriptions.server.restart()
        eventually(partial(linked, name), f"{name} is linked")
        eventually(claimed, "the work can be claimed", deadline_s=5.0)
        work = {v["path"]: v["tail_offset"] for v in claims[-1]["streams"] if v["has_pending"]}
        assert work == {name: tail}
        assert subscriptions.answer("s", "ack", claims[-1], work, done=True).status == 200
        assert subscriptions.acked("s")[name] == tail
    generations = [claim["generation"] for claim in claims]
    assert generations == sorted(set(generations))


def test_deleted_subscriptions_stay_deleted(
    subscriptions: Subscriptions, restart: Callable[[], None]
) -> None:
    subscriptions.pull("s")
    subscriptions.pull("t")
    assert subscriptions.call("DELETE", ROOT + "s").status == 204
    restart()
    assert subscriptions.call("GET", ROOT + "s").status == 404
    assert subscriptions.get("t")["id"] == "t"


def test_reserved_streams_are_out_of_reach(subscriptions: Subscriptions) -> None:
    subscriptions.pull("s")
    for target in ("state/keys", "state/subscriptions/0000000000000001"):
        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            response = subscriptions.api.call(method, f"/v1/stream/__ds/{target}")
            assert response.status in (404, 405), (method, target)
