"""Where webhooks may go, and how little a client learns about where they did not arrive."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from control.conftest import Subscriptions, eventually
from control.receiver import DONE, Receiver
from support.server import Server

StartServer = Callable[..., Server]
StartReceiver = Callable[..., Receiver]


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_this_machine_is_no_target_unless_the_operator_names_it(
    shared_server: Server, path: str, host: str
) -> None:
    subscriptions = Subscriptions(shared_server)
    name = path.replace("/", "-")
    response = subscriptions.put(
        name, type="webhook", pattern="a/*", webhook={"url": f"http://{host}:9000/hook"}
    )
    error = response.json()["error"]
    assert (response.status, error["code"]) == (400, "WEBHOOK_URL_REJECTED")
    # Who runs the server and tries it out learns how to go on.
    assert f"--webhook-allow {host}:9000" in error["message"]
    assert subscriptions.call("GET", f"/v1/stream/__ds/subscriptions/{name}").status == 404


@pytest.mark.parametrize("entry", ["127.0.0.0/8", "127.0.0.1:{port}", "10.0.0.0/8, 127.0.0.1"])
def test_a_named_target_is_called(
    start_server: StartServer, start_receiver: StartReceiver, entry: str
) -> None:
    receiver = start_receiver(DONE)
    allow = entry.format(port=receiver.port)
    subscriptions = Subscriptions(start_server(settings={"webhook_allow": allow}))
    subscriptions.hook("s", receiver)
    tail = subscriptions.create("events/a", b"[1]")
    assert receiver.next().pending == {"events/a": tail}
    refused = subscriptions.put(
        "t", type="webhook", pattern="a/*", webhook={"url": "https://169.254.169.254/latest"}
    )
    assert refused.json()["error"]["code"] == "WEBHOOK_URL_REJECTED"


def test_a_target_that_is_named_no_more_is_called_no_more(
    start_server: StartServer, start_receiver: StartReceiver
) -> None:
    receiver = start_receiver(DONE)
    server = start_server(settings={"webhook_allow": "localhost,127.0.0.1"})
    subscriptions = Subscriptions(server)
    by_name = {"url": f"http://localhost:{receiver.port}/hook"}
    subscriptions.hook("address", receiver)
    subscriptions.hook("name", receiver, webhook=by_name)
    subscriptions.create("events/a", b"[1]")
    receiver.next()
    receiver.next()
    server.restart(webhook_allow="")
    subscriptions.append("events/a")
    for name in ("address", "name"):
        eventually(lambda name=name: subscriptions.get(name)["status"] == "failed", "it shows")
        assert subscriptions.get(name)["last_error"] == "not delivered"
    server.wait_for_log("webhook_allow")
    receiver.expect_silence(0.2)


def test_a_client_learns_nothing_of_why_a_webhook_did_not_arrive(
    start_server: StartServer, start_receiver: StartReceiver, closed_port: int
) -> None:
    """Neither a closed port nor an open one, a status or the answer of something that is no web server."""
    server = start_server(settings={"webhook_allow": "127.0.0.1"})
    subscriptions = Subscriptions(server)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(8)
    mute: int = listening.getsockname()[1]
    with listening:
        targets = {
            "closed": f"http://127.0.0.1:{closed_port}/",
            "error": start_receiver((500, b"secret")).url,
            "redirect": start_receiver((307, b"")).url,
            "mute": f"http://127.0.0.1:{mute}/",
            "tls": f"https://127.0.0.1:{start_receiver(DONE).port}/",
        }
        for name, url in targets.items():
            subscriptions.put(
                name,
                type="webhook",
                pattern="events/*",
                webhook={"url": url},
                lease_ttl_ms=1000,
            )
        subscriptions.create("events/a", b"[1]")
        told = set()
        for name in targets:
            eventually(lambda name=name: subscriptions.get(name)["status"] == "failed", name)
            told.add(subscriptions.get(name)["last_error"])
    assert told == {"not delivered"}
    # The operator is told all of it.
    for detail in ("answered 500", "answered 307", "no answer within", "Errno 111"):
        server.wait_for_log(detail)
    assert subscriptions.api.metric("millstream_webhook_failures_total") >= len(targets)
