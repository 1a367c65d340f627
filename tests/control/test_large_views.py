"""Views of subscriptions with very many streams, asked for by many: short calls and deliveries go on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from control.conftest import ROOT, Subscriptions
from control.receiver import DONE, Receiver
from support.http import Response

STREAMS = 20_000
CLIENTS = 96
DEADLINE_S = 2.0


PATHS = [f"many/{number:06}" for number in range(STREAMS)]


def link_many(subscriptions: Subscriptions) -> None:
    subscriptions.pull("large")
    for paths in (PATHS[: STREAMS // 2], PATHS[STREAMS // 2 :]):
        response = subscriptions.call("POST", ROOT + "large/streams", {"streams": paths})
        assert response.status == 204, response.body


def show(subscriptions: Subscriptions) -> Response:
    return subscriptions.call("GET", ROOT + "large")


def test_large_views_delay_neither_webhooks_nor_short_calls(
    subscriptions: Subscriptions, start_receiver: Callable[..., Receiver]
) -> None:
    receiver = start_receiver(DONE)
    subscriptions.hook("healthy", receiver)
    subscriptions.create("events/a")
    link_many(subscriptions)
    enough = threading.Event()
    answers: Counter[int] = Counter()

    def ask_on() -> None:
        while not enough.is_set():
            answers[show(subscriptions).status] += 1
            enough.wait(0.2)

    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(ask_on) for _ in range(CLIENTS)]
        try:
            until = time.monotonic() + 30
            while answers[200] < 20:
                assert time.monotonic() < until, answers
                tail = subscriptions.append("events/a")
                assert receiver.next(DEADLINE_S).pending == {"events/a": tail}
                began = time.monotonic()
                assert subscriptions.call("GET", "/-/api/streams").status == 200
                assert time.monotonic() - began < DEADLINE_S
        finally:
            enough.set()
        for one in asking:
            one.result(30)
    assert set(answers) <= {200, 503}, "who finds no place is told so"


def test_a_large_view_is_whole(subscriptions: Subscriptions) -> None:
    link_many(subscriptions)
    view = show(subscriptions).json()
    assert sorted(link["path"] for link in view["streams"]) == PATHS
    assert {link["link_type"] for link in view["streams"]} == {"explicit"}
    assert (view["type"], view["status"]) == ("pull-wake", "active")


def test_a_view_of_long_names_fits_into_an_answer_and_says_what_it_lacks(
    subscriptions: Subscriptions,
) -> None:
    def named(batch: int) -> list[str]:
        return [f"long/{batch}/{number:06}".ljust(1000, "x") for number in range(1000)]

    subscriptions.pull("large", pattern=None, streams=named(0))
    assert "streams_total" not in show(subscriptions).json()
    for batch in range(1, 8):
        added = subscriptions.call("POST", ROOT + "large/streams", {"streams": named(batch)})
        assert added.status == 204, added.body
    answer = show(subscriptions)
    assert answer.status == 200, answer.body
    view = answer.json()
    assert view["streams_total"] == 8000
    assert 5000 < len(view["streams"]) < 8000
    assert len({link["path"] for link in view["streams"]}) == len(view["streams"])
