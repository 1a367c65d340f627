"""What was told stays true: nobody hears of an end or a change that a crash can take back, on whatever way he asks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from support.classes import change
from support.http import Api, Closed, Truncated, request_bytes
from support.pipeline import Pipeline
from support.server import Server

TTL_S = 1
SYNC_DELAY_MS = 800
SLOW_SYNC = {"MILLSTREAM_FAULT_SYNC_DELAY_MS": str(SYNC_DELAY_MS)}


def ask_entry(api: Api, path: str, _tail: str) -> bool:
    return api.call("GET", f"/-/api/streams/{path}").status == 404


def ask_listing(api: Api, path: str, _tail: str) -> bool:
    return api.call("GET", f"/-/api/streams?prefix={path}").json()["streams"] == []


def ask_change(api: Api, path: str, _tail: str) -> bool:
    return change(api, path, "disk").status == 404


def ask_read(api: Api, path: str, tail: str) -> bool:
    start = {"offset": "-1", "number": 0}
    ranges = [{"stream": path, "from": start, "to": {"offset": tail, "number": 1}}]
    body = json.dumps({"ranges": ranges}).encode()
    return api.call("POST", "/v1/read", body=body).status == 404


def ask_pattern(api: Api, path: str, _tail: str) -> bool:
    return Pipeline(api).tails(pattern=path)["streams"] == []


def ask_name(api: Api, path: str, _tail: str) -> bool:
    return Pipeline(api).tails(streams=[path])["missing"] == [path]


def ask_head(api: Api, path: str, _tail: str) -> bool:
    return api.head(path).status == 404


WAYS = [ask_entry, ask_listing, ask_change, ask_read, ask_pattern, ask_name, ask_head]


def test_a_stream_that_was_told_to_have_expired_stays_so(
    start_server: Callable[..., Server],
) -> None:
    """A restart gives some time again to streams that were used shortly before; not to one whose end was told."""
    server = start_server(settings={"sweep_interval_ms": 3_600_000})
    api = Api(server)
    tails = {}
    for way in WAYS:
        path = way.__name__
        tails[path] = api.put(path, b"x", headers={"Stream-TTL": str(TTL_S)}).offset
    time.sleep(TTL_S + 0.01)
    told = [way for way in WAYS if way(api, way.__name__, tails[way.__name__])]
    assert told == WAYS
    server.kill()
    api = Api(server.restart())
    assert {path: api.get(path).status for path in tails} == dict.fromkeys(tails, 404)


def test_the_control_plane_waits_for_what_is_not_final(start_server: Callable[..., Server]) -> None:
    server = start_server(settings={"reactors": 2}, environment=SLOW_SYNC)
    api = Api(server, deadline_s=30)
    for path in ("busy", "gone", "weaker"):
        assert api.put(path, b"x").status == 201
    with ExitStack() as stack:

        def send(method: str, target: str, body: bytes = b"") -> None:
            connection = stack.enter_context(api.connect())
            headers = {"Content-Type": "text/plain"} if method == "POST" else None
            connection.send(request_bytes(method, target, headers, body))

        # The log is busy with the first, so the others are in the next batch.
        send("POST", Api.target("busy"), b"y")
        api.wait_until_metric("millstream_appends_total", lambda count: count >= 1)
        time.sleep(0.1)
        send("DELETE", Api.target("gone"))
        send("PATCH", "/-/api/streams/weaker", b'{"durability": "memory"}')
        time.sleep(0.1)
        told: dict[str, Any] = {}

        def ask(what: str, path: str) -> None:
            told[what] = api.call("GET", path)

        asked = [
            threading.Thread(target=ask, args=arguments)
            for arguments in (
                ("gone", "/-/api/streams/gone"),
                ("weaker", "/-/api/streams/weaker"),
                ("list", "/-/api/streams"),
            )
        ]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join(30)
        server.kill()
    api = Api(server.restart())
    gone, weaker = api.get("gone").status, api.head("weaker")["stream-durability"]
    listed = {entry["path"]: entry["durability"] for entry in told["list"].json()["streams"]}
    assert told["gone"].status == gone
    assert told["weaker"].json()["durability"] == weaker
    assert ("gone" in listed, listed["weaker"]) == (gone == 200, weaker)


def test_a_server_that_stops_says_nothing_about_offsets(
    start_server: Callable[..., Server],
) -> None:
    """An answer without a place means that the stream does not have the offset: readers skip what lies behind it."""
    for _ in range(3):
        server = start_server()
        api = Api(server, deadline_s=30)
        offset = api.put("stream", b"x").offset
        asked = {"name": "stream", "at": [{"offset": offset}] * 500}
        question = json.dumps({"streams": [asked]}).encode()
        answers: list[Any] = []
        begun = threading.Barrier(5)

        def ask(
            api: Api = api,
            question: bytes = question,
            answers: list[Any] = answers,
            begun: threading.Barrier = begun,
        ) -> None:
            with api.connect() as connection:
                answers.append(connection.request("POST", "/v1/tails", None, question))
                begun.wait(30)
                try:
                    while answers[-1].status == 200:
                        answers.append(connection.request("POST", "/v1/tails", None, question))
                except (Closed, Truncated, OSError):
                    return  # the server has ended

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(30)
        server.stop()
        for thread in threads:
            thread.join(30)
        assert len(answers) >= 4
        for answer in answers:
            if answer.status == 200:
                (stream,) = answer.json()["streams"]
                assert not [place for place in stream["at"] if "error" in place]
            else:
                assert (answer.status, answer.code) == (503, "shutting_down")


def test_a_tail_behind_a_loss_keeps_its_name_while_an_append_is_under_way(
    start_server: Callable[..., Server],
) -> None:
    """Who has been told of the loss is not told again, and who begins at the tail begins behind it."""
    server = start_server(environment=SLOW_SYNC)
    api = Api(server, deadline_s=30)
    api.put("stream", b"x", headers={"Stream-Durability": "memory"})
    server.kill()
    api = Api(server.restart(), deadline_s=30)
    assert change(api, "stream", "fsync").status == 200
    before = api.head("stream").offset
    with api.connect() as writer:
        headers = {"Content-Type": "text/plain"}
        writer.send(request_bytes("POST", Api.target("stream"), headers, b"y"))
        until = time.monotonic() + SYNC_DELAY_MS / 2000
        while time.monotonic() < until:
            begins = api.get("stream", offset="now")
            (told,) = Pipeline(api).tails(streams=["stream"])["streams"]
            assert {api.head("stream").offset, begins.offset, told["tail"]["offset"]} == {before}
            assert begins.get("stream-gap") is None
            behind = api.get("stream", offset=before)
            assert (behind.body, behind.offset, behind.get("stream-gap")) == (b"", before, None)
        assert writer.read_response().status == 204
    answer = api.get("stream", offset=before)
    assert (answer.body, answer.get("stream-gap")) == (b"y", None)
