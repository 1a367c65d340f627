"""Receivers that never answer keep nothing from the others: neither many of them nor many wakes for one."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from control.conftest import Subscriptions, eventually
from control.receiver import DONE, Answer, Receiver
from support.server import Server

StartReceiver = Callable[..., Receiver]
MANY = 1000


class Hanging:
    """Listens and never accepts: a connection is made, a request is taken, and nothing comes back."""

    def __init__(self, ports: int) -> None:
        self._sockets = ExitStack()
        self._called = self._sockets.enter_context(selectors.DefaultSelector())
        self.urls: list[str] = []
        for _ in range(ports):
            listening = self._sockets.enter_context(socket.socket())
            listening.bind(("127.0.0.1", 0))
            listening.listen(MANY)
            self._called.register(listening, selectors.EVENT_READ)
            self.urls.append(f"http://127.0.0.1:{listening.getsockname()[1]}/hook")

    def expect_call(self) -> None:
        assert self._called.select(10), "nobody connected within 10 s"

    def close(self) -> None:
        self._sockets.close()


@pytest.fixture(params=[1, MANY], ids=["one target", "many targets"])
def hanging(request: pytest.FixtureRequest) -> Iterator[Hanging]:
    targets = Hanging(request.param)
    yield targets
    targets.close()


def subscribe_all(server: Server, urls: list[str]) -> None:
    """Subscriptions to `slow/*`, one for each of these."""

    def subscribe(part: int) -> None:
        subscriptions = Subscriptions(server)
        for number in range(part, len(urls), 8):
            response = subscriptions.put(
                f"slow-{number}", type="webhook", pattern="slow/*", webhook={"url": urls[number]}
            )
            assert response.status == 201, response.body

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(subscribe, range(8)))


def test_receivers_that_never_answer_delay_no_other_target_and_no_pull_wake(
    subscriptions: Subscriptions, start_receiver: StartReceiver, hanging: Hanging
) -> None:
    receiver = start_receiver(DONE)
    subscribe_all(subscriptions.server, hanging.urls * (MANY // len(hanging.urls)))
    subscriptions.hook("healthy", receiver)
    subscriptions.pull("pull", pattern="pulled/*")
    for path in ("events/a", "pulled/a"):
        subscriptions.create(path)
    subscriptions.create("slow/a", b"[1]")
    hanging.expect_call()

    subscriptions.append("pulled/a")
    eventually(lambda: len(subscriptions.wakes("pull")) == 1, "a pull-wake waits for nobody", 2)
    # A thousand first attempts take four seconds in all; from then on they are retries, which have their own turns.
    for _ in range(3):
        tail = subscriptions.append("events/a")
        assert receiver.next(8).pending == {"events/a": tail}
        eventually(lambda tail=tail: subscriptions.acked("healthy")["events/a"] == tail, "done")
    subscriptions.append("events/a")
    receiver.next(2)
    if len(hanging.urls) == 1:
        assert subscriptions.api.metric("millstream_webhooks_waiting") >= MANY - 2 * 32


def test_a_receiver_may_take_its_time_while_few_do(subscriptions: Subscriptions) -> None:
    """Longer than a turn lasts: the answer still counts."""
    never = threading.Event()

    def answer_late(_: object) -> Answer:
        never.wait(2)
        return DONE

    receiver = Receiver(answer_late)
    try:
        subscriptions.hook("s", receiver)
        subscriptions.create("events/a")
        tail = subscriptions.append("events/a")
        eventually(
            lambda: subscriptions.acked("s").get("events/a") == tail, "the late answer counts"
        )
        receiver.next(0)
        receiver.expect_silence(0)
        assert subscriptions.api.metric("millstream_webhook_failures_total") == 0
    finally:
        receiver.close()


def test_who_has_answered_before_comes_first_and_a_stop_waits_for_none(
    start_server: Callable[..., Server], start_receiver: StartReceiver
) -> None:
    """However many wait, here each with a target of its own; first attempts to all of them take about ten seconds."""
    many, receiver = 2500, start_receiver(DONE)
    server = start_server(settings={"webhook_allow": "127.0.0.0/8"})
    subscriptions = Subscriptions(server)
    subscriptions.hook("healthy", receiver)
    subscriptions.create("events/a")
    subscriptions.append("events/a")
    receiver.next()
    with socket.create_server(("0.0.0.0", 0), backlog=many) as listening:
        port = listening.getsockname()[1]
        urls = [
            f"http://127.1.{number // 200}.{number % 200 + 1}:{port}/" for number in range(many)
        ]
        subscribe_all(server, urls)
        subscriptions.create("slow/a", b"[1]")
        waiting = "millstream_webhooks_waiting"
        subscriptions.api.wait_until_metric(waiting, lambda seen: seen > many - 600)
        for _ in range(3):
            subscriptions.append("events/a")
            receiver.next(2)
        assert subscriptions.api.metric(waiting) > 300, "first attempts were still under way"
        assert server.stop() < 2
