"""Questions to `/v1/tails` that wait share one bound on memory, whatever they are made of."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from support.http import Api, Connection, Response, request_bytes
from support.pipeline import Pipeline
from support.server import Server

MIB = 1 << 20
# The bound of the engine (`TAILS_WAITING_MAX_BYTES`).
BOUND = 64 * MIB
HELD = "millstream_pipeline_waiting_bytes"
WAITING = "millstream_pipeline_waiting"
REFUSED = "millstream_refusals_total"
# More than the bound has room for.
ASKED = 220


def heavy(path: str, number: int) -> str:
    """Few bytes that are a third of a megabyte as a program."""
    return rf"{path}/(?:{number}\w{{20}})?.*"


class Parked:
    """Questions under way, each on its own connection."""

    def __init__(self, api: Api, stack: contextlib.ExitStack) -> None:
        self.api, self.stack = api, stack
        self.connections: list[Connection] = []
        self.refused = api.metric(REFUSED)

    def ask(self, **question: Any) -> None:
        connection = self.stack.enter_context(self.api.connect())
        body = json.dumps(question | {"wait_ms": 60_000}).encode()
        connection.send(request_bytes("POST", "/v1/tails", None, body))
        self.connections.append(connection)

    def settle(self) -> int:
        """Waits until all that was asked waits or was refused; returns how many wait."""
        until = time.monotonic() + 60
        while True:
            waiting = self.api.metric(WAITING)
            if waiting + self.api.metric(REFUSED) - self.refused == len(self.connections):
                return waiting
            assert time.monotonic() < until, "not everything was looked at"
            time.sleep(0.02)

    def answers(self) -> list[Response]:
        return [connection.read_response() for connection in self.connections]


@pytest.fixture
def parked(api: Api) -> Iterator[Parked]:
    with contextlib.ExitStack() as stack:
        yield Parked(Api(api.server, deadline_s=60), stack)


def cursor(api: Api) -> str:
    return str(Pipeline(api).tails(pattern="nothing")["cursor"])


def test_heavy_patterns_wait_within_the_bound(
    server: Server, api: Api, parked: Parked, path: str
) -> None:
    since, before = cursor(api), server.rss_bytes()
    for number in range(ASKED):
        parked.ask(pattern=heavy(path, number), cursor=since)
    waiting = parked.settle()
    assert server.rss_bytes() - before < BOUND + 48 * MIB
    assert BOUND / 2 < api.metric(HELD) <= BOUND + 2 * MIB
    assert waiting < ASKED
    # A refusal says when to come back; a change wakes all who wait, and gives their memory back.
    api.put(f"{path}/new")
    answers = parked.answers()
    assert Counter(answer.status for answer in answers) == {200: waiting, 503: ASKED - waiting}
    for answer in answers:
        if answer.status == 503:
            assert answer.code == "server_busy"
            assert answer.get("retry-after")
        else:
            assert [stream["name"] for stream in answer.json()["streams"]] == [f"{path}/new"]
    api.wait_for_metric(HELD, 0)


def test_equal_patterns_are_one(api: Api, parked: Parked, path: str) -> None:
    since = cursor(api)
    for _ in range(150):
        parked.ask(pattern=heavy(path, 1), cursor=since)
    assert parked.settle() == 150
    assert api.metric(HELD) < 3 * MIB


def test_long_lists_of_names_wait_within_the_bound(api: Api, parked: Parked, path: str) -> None:
    names = [f"{path}/{'x' * 100}/{number}" for number in range(15_000)]
    since = cursor(api)
    for _ in range(40):
        parked.ask(streams=names, cursor=since)
    waiting = parked.settle()
    assert 5 < waiting < 40
    assert api.metric(HELD) <= BOUND + 4 * MIB
    api.put(names[7_777])
    assert [answer.status for answer in parked.answers()].count(200) == waiting


def test_who_does_not_wait_is_answered_beyond_the_bound(
    api: Api, parked: Parked, path: str
) -> None:
    since = cursor(api)
    for number in range(ASKED):
        parked.ask(pattern=heavy(path, number), cursor=since)
    assert parked.settle() < ASKED
    pipeline = Pipeline(api)
    assert pipeline.tails(pattern=heavy(path, 1000), cursor=since)["streams"] == []
    for connection in parked.connections:
        connection.close()
    api.wait_for_metric(WAITING, 0)
    api.wait_for_metric(HELD, 0)
