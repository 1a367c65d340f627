"""`Server-Timing` on request, and the histogram per class: both tell what was really waited for."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from support.http import Api, request_bytes
from support.server import Server

SYNC_DELAY_MS = 60
SLOW = {"MILLSTREAM_FAULT_SYNC_DELAY_MS": str(SYNC_DELAY_MS)}
FIGURE = re.compile(r"(queue|wal|fsync|replicate|total);dur=([0-9.]+)")
TIMED = {"Content-Type": "text/plain", "Millstream-Timing": "1"}
CLASSES = ("ephemeral", "memory", "disk", "fsync")


def figures(header: str) -> dict[str, float]:
    return {name: float(value) for name, value in FIGURE.findall(header)}


@pytest.mark.parametrize("durability", CLASSES)
def test_a_sync_counts_only_where_it_was_waited_for(
    start_server: Callable[..., Server], durability: str
) -> None:
    target = Api.target("timed")
    api = Api(start_server(environment=SLOW))
    created = api.call("PUT", target, {**TIMED, "Stream-Durability": durability})
    assert figures(created["Server-Timing"])["fsync"] >= SYNC_DELAY_MS
    append = api.call("POST", target, TIMED, b"x")
    assert append.status == 204
    times = figures(append["Server-Timing"])
    assert list(times) == ["queue", "wal", "fsync", "replicate", "total"]
    assert times["replicate"] == 0
    if durability == "fsync":
        assert SYNC_DELAY_MS <= times["fsync"] <= times["total"]
    else:
        assert times["fsync"] == 0
        assert times["total"] > 0
    assert (times["wal"] > 0) == (durability in ("disk", "fsync"))


def test_nobody_gets_it_unasked(shared: Api, path: str) -> None:
    assert shared.put(path).get("Server-Timing") is None


def test_pipelined_replies_have_their_own_figures(start_server: Callable[..., Server]) -> None:
    api = Api(start_server(environment=SLOW))
    target = Api.target("many")
    api.call("PUT", target, {"Content-Type": "text/plain"})
    with api.connect() as connection:
        connection.send(b"".join(request_bytes("POST", target, TIMED, b"x") for _ in range(20)))
        replies = [connection.read_response() for _ in range(20)]
    assert [reply.status for reply in replies] == [204] * 20
    for reply in replies:
        assert figures(reply["Server-Timing"])["fsync"] >= SYNC_DELAY_MS


def test_refusals_have_it_too(shared: Api, path: str) -> None:
    refused = shared.call("POST", Api.target(path), TIMED, b"x")
    assert refused.status == 404
    assert figures(refused["Server-Timing"])["fsync"] == 0


def test_the_histogram_counts_by_class(start_server: Callable[..., Server]) -> None:
    api = Api(start_server())
    for number, durability in enumerate(CLASSES, start=1):
        target = Api.target(f"h-{durability}")
        api.call("PUT", target, {"Content-Type": "text/plain", "Stream-Durability": durability})
        for _ in range(number):
            assert api.call("POST", target, {"Content-Type": "text/plain"}, b"x").status == 204
    text = api.call("GET", "/-/metrics").text
    for number, durability in enumerate(CLASSES, start=1):
        name = "millstream_append_seconds"
        assert f'{name}_count{{class="{durability}"}} {number}\n' in text
        assert f'{name}_bucket{{class="{durability}",le="+Inf"}} {number}\n' in text
