"""Webhook subscriptions on a real server with a real receiver."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable

import pytest

from control.conftest import ROOT, Subscriptions, eventually
from control.receiver import ACCEPT, DONE, Receiver

StartReceiver = Callable[..., Receiver]
FAIL = (500, b"no")


def test_a_record_wakes_a_signed_webhook_and_done_acknowledges_it(
    subscriptions: Subscriptions, start_receiver: StartReceiver
) -> None:
    receiver = start_receiver(DONE)
    before = subscriptions.create("events/old", b'["old"]')
    created = subscriptions.hook("s", receiver, streams=["side"]).json()
    assert subscriptions.acked("s")["events/old"] == before
    subscriptions.create("events/new")
    tail = subscriptions.append("events/new")
    wake = receiver.next()
    jwks_url = created["webhook"]["signing"]["jwks_url"]
    assert jwks_url == f"{subscriptions.server.url}/v1/stream/__ds/jwks.json"
    wake.verify(subscriptions.call("GET", jwks_url.removeprefix(subscriptions.server.url)).json())
    assert wake.pending == {"events/new": tail}
    assert wake.streams["events/new"]["acked_offset"] == "-1"
    assert wake.json["callback_url"] == f"{subscriptions.server.url}{ROOT}s/callback"
    eventually(lambda: subscriptions.acked("s")["events/new"] == tail, "the snapshot is acked")
    receiver.expect_silence(0.3)


def test_records_that_arrive_during_a_wake_make_the_next_one(
    subscriptions: Subscriptions, start_receiver: StartReceiver
) -> None:
    receiver = start_receiver(ACCEPT)
    subscriptions.hook("s", receiver)
    subscriptions.create("events/a")
    first = subscriptions.append("events/a")
    wake = receiver.next()
    second = subscriptions.append("events/a")
    third = subscriptions.append("events/a")
    done = subscriptions.answer("s", "callback", wake.json, {"events/a": first}, done=True)
    assert done.json() == {"ok": True, "next_wake": True}
    following = receiver.next()
    assert following.json["generation"] == wake.json["generation"] + 1
    assert following.json["wake_id"] != wake.json["wake_id"]
    assert following.streams["events/a"]["acked_offset"] == first
    assert following.pending["events/a"] in (second, third)
    for token_of in (wake, following):
        stale = {**wake.json, "callback_token": token_of.json["callback_token"]}
        response = subscriptions.answer("s", "callback", stale, done=True)
        assert (response.status, response.json()["error"]["code"]) == (409, "FENCED")
    done = subscriptions.answer("s", "callback", following.json, {"events/a": third}, done=True)
    assert done.json() == {"ok": True, "next_wake": False}


def test_a_lease_is_kept_by_callbacks_and_wakes_again_when_they_stop(
    subscriptions: Subscriptions, start_receiver: StartReceiver
) -> None:
    receiver = start_receiver(ACCEPT)
    subscriptions.hook("s", receiver, lease_ttl_ms=1000)
    subscriptions.create("events/a", b"[1]")
    wake = receiver.next()
    for _ in range(4):
        receiver.expect_silence(0.5)
        assert subscriptions.answer("s", "callback", wake.json).json()["ok"] is True
    again = receiver.next(deadline_s=3.0)
    assert again.json["generation"] == wake.json["generation"] + 1
    assert again.pending == wake.pending


def test_a_failing_receiver_is_retried_with_growing_delays(
    subscriptions: Subscriptions, start_receiver: StartReceiver
) -> None:
    receiver = start_receiver(FAIL, FAIL, DONE)
    subscriptions.hook("s", receiver)
    tail = subscriptions.create("events/a", b"[1]")
    attempts = [receiver.next()]
    eventually(lambda: subscriptions.get("s")["status"] == "failed", "the failure shows")
    attempts += [receiver.next(), receiver.next()]
    assert len({wake.json["wake_id"] for wake in attempts}) == 1
    pauses = [b.at - a.at for a, b in itertools.pairwise(attempts)]
    assert 0.75 <= pauses[0] <= 1.8
    assert 1.55 <= pauses[1] <= 3.0
    eventually(lambda: subscriptions.acked("s")["events/a"] == tail, "the wake is acknowledged")
    assert subscriptions.get("s")["status"] == "active"


def test_a_receiver_that_is_down_gets_its_wake_when_it_comes_up(
    subscriptions: Subscriptions, start_receiver: StartReceiver
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/hook"
    response = subscriptions.put("s", type="webhook", pattern="events/*", webhook={"url": url})
    assert response.status == 201
    tail = subscriptions.create("events/a", b"[1]")
    eventually(lambda: subscriptions.get("s")["status"] == "failed", "the failure shows")
    assert start_receiver(DONE, port=port).next().pending == {"events/a": tail}


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/hook",
        "https://169.254.169.254/latest",
        "https://[::ffff:10.0.0.1]/",
        "https://[::1]/",
        "ftp://example.com/",
        "https://u:p@example.com/",
    ],
)
def test_unsafe_addresses_are_refused_at_registration(
    subscriptions: Subscriptions, url: str
) -> None:
    response = subscriptions.put("s", type="webhook", pattern="a/*", webhook={"url": url})
    assert (response.status, response.json()["error"]["code"]) == (400, "WEBHOOK_URL_REJECTED")


def test_redirects_are_not_followed(
    subscriptions: Subscriptions, start_receiver: StartReceiver
) -> None:
    receiver = start_receiver((307, b""))
    subscriptions.hook("s", receiver)
    subscriptions.create("events/a", b"[1]")
    receiver.next()
    eventually(lambda: subscriptions.get("s")["status"] == "failed", "a redirect is a failure")
    eventually(lambda: "answered 307" in subscriptions.server.log(), "the log says why")


def test_a_deleted_subscription_is_silent_and_refuses_its_old_token(
    subscriptions: Subscriptions, start_receiver: StartReceiver
) -> None:
    receiver = start_receiver(ACCEPT)
    subscriptions.hook("s", receiver)
    subscriptions.create("events/a", b"[1]")
    wake = receiver.next()
    assert subscriptions.call("DELETE", ROOT + "s").status == 204
    assert subscriptions.call("DELETE", ROOT + "s").status == 204
    response = subscriptions.answer("s", "callback", wake.json, done=True)
    assert (response.status, response.json()["error"]["code"]) == (404, "SUBSCRIPTION_NOT_FOUND")
    subscriptions.append("events/a")
    receiver.expect_silence(0.3)
    subscriptions.hook("s", receiver)
    response = subscriptions.answer("s", "callback", wake.json, done=True)
    assert (response.status, response.json()["error"]["code"]) == (409, "FENCED")
