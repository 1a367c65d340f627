"""Health, readiness, metrics, the control plane's guard, and Retry-After."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest

from support.http import Api, request_bytes
from support.server import Server


def test_health_and_readiness(shared: Api) -> None:
    for name in ("/-/health", "/-/ready"):
        answer = shared.call("GET", name)
        assert answer.status == 200
        assert "no-store" in answer["cache-control"]
        assert shared.call("HEAD", name).status == 200
        assert shared.call("POST", name, body=b"").status == 405


def test_metrics_are_prometheus_text_and_count(shared: Api, path: str) -> None:
    before = shared.metric("millstream_appends_total")
    shared.put(path)
    for _ in range(5):
        shared.post(path, b"x")
    assert shared.metric("millstream_appends_total") == before + 5
    answer = shared.call("GET", "/-/metrics")
    assert answer["content-type"].startswith("text/plain; version=0.0.4")
    names = set()
    for line in answer.text.splitlines():
        if line.startswith("# "):
            assert re.fullmatch(r"# (HELP|TYPE) [a-z_]+ .+", line), line
        else:
            found = re.fullmatch(r"([a-z_]+)(\{[^}]*\})? [-0-9.e+]+", line)
            assert found, line
            names.add(found[1])
    assert {"millstream_build_info", "millstream_connections"} <= names


def test_control_plane_refuses_foreign_pages(shared: Api) -> None:
    answer = shared.call("GET", "/-/api/streams", {"Origin": "https://evil.example"})
    assert (answer.status, answer.code) == (403, "origin_refused")
    assert answer.get("access-control-allow-origin") is None
    assert shared.call("GET", "/-/api/streams", {"Origin": "null"}).status == 403
    own = {"Host": "localhost:4437", "Origin": "http://localhost:4437"}
    assert shared.call("GET", "/-/api/streams", own).status == 200
    rebound = shared.call("GET", "/-/api/streams", {"Host": "evil.example"})
    assert (rebound.status, rebound.code) == (403, "host_refused")
    for host in ("127.0.0.1:1", "localhost", "[::1]:80"):
        assert shared.call("GET", "/-/api/streams", {"Host": host}).status == 200


def test_unknown_paths_are_problems(shared: Api) -> None:
    for target in ("/", "/v1", "/v1/streams/x", "/v2/stream/x", "/favicon.ico"):
        answer = shared.call("GET", target)
        assert (answer.status, answer.code) == (404, "not_found"), target
    assert shared.call("GET", "/v1/stream/").status in (400, 404)


def test_too_many_connections_get_503_with_retry_after(start_server: Callable[..., Server]) -> None:
    server = start_server(settings={"connections_max": 10})
    api = Api(server)
    held = [api.connect() for _ in range(10)]
    for connection in held:
        assert connection.request("GET", "/-/health").status == 200
    with api.connect() as refused:
        answer = refused.read_response()
        assert (answer.status, answer.code) == (503, "too_many_connections")
        assert int(answer["retry-after"]) >= 1
        assert refused.is_closed_by_server()
    held.pop().close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with api.connect() as again:
            again.send_what_it_takes(request_bytes("GET", "/-/health"))
            if again.read_response().status == 200:
                break
    else:
        pytest.fail("a freed place was never given out")


def test_problem_bodies_are_complete(shared: Api, path: str) -> None:
    answer = shared.get(path)
    problem = json.loads(answer.body)
    assert problem["code"] == "stream_not_found"
    assert problem["title"]
    assert problem["detail"]
    assert problem["hint"]
    assert problem.get("status", 404) == 404
