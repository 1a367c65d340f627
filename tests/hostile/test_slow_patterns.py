"""Patterns that take long over the names that there are: their question ends, and nobody else waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from support.http import Api, request_bytes
from support.pipeline import Pipeline
from support.server import Server

MIB = 1 << 20
TEXT = {"Content-Type": "text/plain"}
# The automaton of this one grows with every letter that it sees: milliseconds for each name.
SLOW = "(a?b?){700}[ab]*a[ab]{700}c"


def with_long_names(start_server: Callable[..., Server]) -> Api:
    api = Api(start_server(), deadline_s=60.0)
    names = [format(number, "012b").translate({48: "a", 49: "b"}) * 80 for number in range(2000)]
    with api.connect() as connection:
        connection.send(b"".join(request_bytes("PUT", Api.target(n), TEXT) for n in names))
        for _ in names:
            assert connection.read_response().status == 201
    return api


def test_a_pattern_that_takes_too_long_is_refused(start_server: Callable[..., Server]) -> None:
    api = with_long_names(start_server)
    pipeline = Pipeline(api)
    refused = pipeline.post("/v1/tails", {"pattern": SLOW})
    assert (refused.status, refused.code) == (400, "pattern_invalid")
    assert "takes too long" in refused.json()["detail"]
    # Others over the same names are answered.
    answer = pipeline.post("/v1/tails", {"pattern": "[ab]*a"})
    assert (answer.status, len(answer.json()["streams"])) == (200, 1000)


def test_large_writes_and_a_stop_do_not_wait_for_slow_questions(
    start_server: Callable[..., Server],
) -> None:
    api = with_long_names(start_server)
    assert api.put("kept", headers={"Stream-Durability": "memory"}).status == 201
    tail = api.post("kept", b"x" * MIB).offset
    question = request_bytes("POST", "/v1/tails", None, json.dumps({"pattern": SLOW}).encode())
    connections = [api.connect() for _ in range(20)]
    for connection in connections:
        connection.send(question)
    with ThreadPoolExecutor(1) as pool:
        append = pool.submit(api.post, "kept", b"y" * MIB)
        assert append.result(60).status == 204
    # Some of the twenty still wait for their turn of a second.
    assert api.metric("millstream_pipeline_queue") > 0
    for connection in connections:
        connection.close()
    server = api.server
    assert isinstance(server, Server)
    server.restart()
    answer = api.get("kept", offset=tail)
    assert (answer.get("stream-gap"), len(answer.body)) == (None, MIB), "the stop was clean"
