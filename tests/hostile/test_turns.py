"""Clients that pipeline expensive requests take turns with everybody else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack

from support.http import Api, request_bytes
from support.server import Server

CLIENTS, PIPELINED = 20, 300


def test_pipelined_requests_let_others_go_first(start_server: Callable[..., Server]) -> None:
    api = Api(start_server(settings={"reactors": 1}), deadline_s=60)
    api.put("large", b"", "application/json")
    assert api.post("large", json.dumps([1] * 120_000).encode(), "application/json").status == 204
    # Each of these searches 240 KB.
    expensive = request_bytes("GET", Api.target("large", tail=1), {"If-None-Match": "*"})

    def requests() -> int:
        return api.metric("millstream_requests_total")

    before = requests()
    with ExitStack() as stack:
        connections = [stack.enter_context(api.connect()) for _ in range(CLIENTS)]
        for connection in connections:
            connection.send(expensive * PIPELINED)
        seen = [requests()]
        while seen[-1] < before + CLIENTS * PIPELINED:
            seen.append(requests())
        for connection in connections:
            for _ in range(PIPELINED):
                assert connection.read_response().status == 304
    passed = [later - earlier for earlier, later in zip([before, *seen], seen, strict=False)]
    assert max(passed) < CLIENTS * PIPELINED / 10, "one turn of those who pipeline, not all of it"
