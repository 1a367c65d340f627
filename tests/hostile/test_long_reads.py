"""Reads of many ranges that each look through much for little: their windows end, and nobody else waits for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import millstream
from millstream.client.ranges import Place, Range
from millstream.client.sync.ranges import RangeReader
from millstream.client.sync.reads import PipelineReads
from support.http import Api, request_bytes
from support.pipeline import Pipeline
from support.server import Server

JSON = {"Content-Type": "application/json"}
MESSAGES = 7_000_000
# 14 MB, all of which is looked through for a message at its end.
RECORDS = b"[" + b",".join([b"1"] * MESSAGES) + b"]"
RANGES_MAX = 20_000
POLITE_S = 8.0  # one window takes a fraction of a second; 20,000 such ranges take minutes


class Losses:
    """Nothing may be missing."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a loss is told: {name}")


@pytest.fixture
def two(start_server: Callable[..., Server]) -> tuple[Api, list[dict[str, Any]]]:
    """A server, and one range at the end of each of two large appends."""
    api = Api(start_server(), deadline_s=120.0)
    ranges = []
    for name in ("one", "other"):
        assert api.put(name, headers=JSON).status == 201
        assert api.post(name, RECORDS, headers=JSON).status == 204
        begin = Pipeline(api).tail(name)["first"]["offset"]
        ranges.append(
            {
                "stream": name,
                "from": {"offset": begin, "number": MESSAGES - 10},
                "to": {"offset": begin, "number": MESSAGES - 9},
            }
        )
    return api, ranges


def test_windows_end_after_much_was_looked_through_and_go_on(
    two: tuple[Api, list[dict[str, Any]]],
) -> None:
    api, ranges = two
    windows = list(Pipeline(api).windows(ranges * 40, columns=["stream"]))
    assert [window.gaps for window in windows] == [[]] * len(windows)
    assert 2 < len(windows) < 20
    streams = [name for window in windows for name in window.column("stream")]
    assert streams == ["one", "other"] * 40


def test_clients_go_on_behind_such_a_window(two: tuple[Api, list[dict[str, Any]]]) -> None:
    api, ranges = two
    incarnations = {name: Pipeline(api).tail(name)["incarnation"] for name in ("one", "other")}
    asked = [
        Range(
            stream=found["stream"],
            incarnation=incarnations[found["stream"]],
            start=Place(**found["from"]),
            end=Place(**found["to"]),
        )
        for found in ranges * 30
    ]
    server = api.server
    assert isinstance(server, Server)
    with millstream.connect(server.url) as client:
        reader = RangeReader(PipelineReads(client), Losses(), columns=["stream", "offset"])
        batches = list(reader.batches(asked))
    names = [name for batch in batches for name in batch.column("stream").to_pylist()]
    assert names == ["one", "other"] * 30
    numbers = {number for batch in batches for number in batch.column("offset").to_pylist()}
    assert numbers == {MESSAGES - 10}


def test_many_ranges_of_one_append_look_through_it_once(
    two: tuple[Api, list[dict[str, Any]]],
) -> None:
    api, ranges = two
    window = Pipeline(api).window(ranges[:1] * RANGES_MAX, columns=["value"])
    assert (window.next, window.table.num_rows) == (None, RANGES_MAX)


def test_nobody_and_no_stop_waits_for_such_reads(two: tuple[Api, list[dict[str, Any]]]) -> None:
    api, ranges = two
    asked = json.dumps({"ranges": ranges * (RANGES_MAX // 2), "columns": ["value"]}).encode()
    begun = api.metric("millstream_pipeline_requests_total")
    with ExitStack() as stack:
        connections = [stack.enter_context(api.connect()) for _ in range(4)]
        for connection in connections:
            connection.send(request_bytes("POST", "/v1/read", None, asked))
        api.wait_until_metric("millstream_pipeline_requests_total", lambda seen: seen >= begun + 4)
        began = time.monotonic()
        assert Pipeline(api).window(ranges[:1]).table.num_rows == 1
        assert time.monotonic() - began < POLITE_S
        for connection in connections[:2]:
            connection.send(request_bytes("POST", "/v1/read", None, asked))
        server = api.server
        assert isinstance(server, Server)
        assert server.stop() < POLITE_S
