"""What a stream is may not be final yet: who asks waits for the log, and nobody else waits with him."""

from __future__ import annotations

import contextlib
import json
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.http import Api, Connection, request_bytes
from support.pipeline import Pipeline
from support.server import Server
from support.staging import rows_body

SYNC_DELAY_MS = 3000  # far longer than all that is asked meanwhile
SYNC_DELAY = "MILLSTREAM_FAULT_SYNC_DELAY_MS"
TEXT = {"Content-Type": "text/plain"}
MEMORY = {**TEXT, "Stream-Durability": "memory"}
QUESTIONS = 20  # more than there are workers


@pytest.fixture
def slow_log(start_server: Callable[..., Server]) -> Iterator[Api]:
    """A server with some streams whose log has become slow."""
    server = start_server()
    api = Api(server)
    for path in ("gone", "kept"):
        assert api.put(path, b"x").status == 201
    for path in ("weak", "other"):
        assert api.put(path, b"x", headers=MEMORY).status == 201
    server.stop()
    server.environment = {SYNC_DELAY: str(SYNC_DELAY_MS)}
    api = Api(server.restart(), deadline_s=30)
    # After one slow sync the reactors leave the others to the log's own thread.
    assert api.put("first").status == 201
    yield api
    server.kill()  # an orderly stop would wait for the slow log


def has_answer(connection: Connection) -> bool:
    return bool(select.select([connection.socket], [], [], 0)[0])


def sender(api: Api, stack: contextlib.ExitStack) -> Callable[[bytes], Connection]:
    """Sends each request on a connection of its own."""

    def send(request: bytes) -> Connection:
        connection = stack.enter_context(api.connect())
        connection.send(request)
        return connection

    return send


def question(body: dict[str, Any]) -> bytes:
    return request_bytes("POST", "/v1/tails", None, json.dumps(body).encode())


def whole(told: dict[str, Any]) -> bytes:
    """A read of all that a stream has."""
    ranges = [{"stream": told["name"], "from": told["first"], "to": told["tail"]}]
    return request_bytes("POST", "/v1/read", None, json.dumps({"ranges": ranges}).encode())


def test_streams_that_are_not_final_hold_up_no_questions_about_others(slow_log: Api) -> None:
    api, pipeline = slow_log, Pipeline(slow_log)
    gone, kept = pipeline.tail("gone"), pipeline.tail("kept")
    deletes = api.metric("millstream_streams_deleted_total")
    with contextlib.ExitStack() as stack:
        send = sender(api, stack)
        writer = send(request_bytes("DELETE", Api.target("gone")))
        api.wait_for_metric("millstream_streams_deleted_total", deletes + 1)
        named = [send(question({"streams": ["gone", "kept"]})) for _ in range(QUESTIONS)]
        matching = [send(question({"pattern": "gone|kept"})) for _ in range(QUESTIONS)]
        reads = [send(whole(gone)) for _ in range(QUESTIONS)]
        waiting = named + matching + reads
        assert pipeline.tail("kept") == kept
        assert [row["name"] for row in pipeline.tails(pattern="kep.*")["streams"]] == ["kept"]
        assert send(whole(kept)).read_response().status == 200
        assert not [connection for connection in (writer, *waiting) if has_answer(connection)]

        assert writer.read_response().status == 204
        for connection in named:
            told = connection.read_response().json()
            assert (told["missing"], told["streams"]) == (["gone"], [kept])
            assert [end["incarnation"] for end in told["removed"]] == [gone["incarnation"]]
        for connection in matching:
            assert connection.read_response().json()["streams"] == [kept]
        for connection in reads:
            assert connection.read_response().status == 404
    assert api.metric("millstream_pipeline_waiting") == 0
    assert api.metric("millstream_pipeline_waiting_bytes") == 0


def test_stages_for_a_stream_that_is_not_final_hold_up_nobody(slow_log: Api) -> None:
    api, pipeline = slow_log, Pipeline(slow_log)
    kept = pipeline.tail("kept")
    creates = api.metric("millstream_streams_created_total")
    with contextlib.ExitStack() as stack:
        send = sender(api, stack)
        writer = send(request_bytes("PUT", Api.target("new"), TEXT))
        api.wait_for_metric("millstream_streams_created_total", creates + 1)
        rows = rows_body([("new", b"x")])
        stages = [
            send(request_bytes("PUT", f"/v1/stage/s{number}", None, rows))
            for number in range(QUESTIONS)
        ]
        assert send(whole(kept)).read_response().status == 200
        assert pipeline.tail("kept") == kept
        assert not [connection for connection in (writer, *stages) if has_answer(connection)]
        assert writer.read_response().status == 201
        for stage in stages:
            assert stage.read_response().status in (200, 201, 204)


def test_reads_that_wait_again_and_again_leave_time_for_others(
    start_server: Callable[..., Server],
) -> None:
    """Each look through their ranges takes longer than the log needs for a step, and finds the last stream changed."""
    api = Api(start_server(environment={SYNC_DELAY: "20"}), deadline_s=60)
    assert api.put("kept").status == 201
    place = {"offset": "-1", "number": 0}
    ranges = [{"stream": name, "from": place, "to": place} for name in ["kept"] * 15_000 + ["some"]]
    read = request_bytes("POST", "/v1/read", None, json.dumps({"ranges": ranges}).encode())
    ended = threading.Event()

    def come_and_go() -> None:
        both = request_bytes("PUT", Api.target("some"), TEXT) + request_bytes(
            "DELETE", Api.target("some")
        )
        with api.connect() as connection:
            while not ended.is_set():
                connection.send(both * 16)
                for _ in range(32):
                    connection.read_response()

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(api.connect()).send(read)
        for thread in threads:
            thread.start()
        try:
            began = time.monotonic()
            for _ in range(20):
                Pipeline(api).tail("kept")
            assert time.monotonic() - began < 20
        finally:
            ended.set()
            for thread in threads:
                thread.join(30)


def test_who_waits_for_a_change_is_not_held_up_by_one_that_is_not_final(slow_log: Api) -> None:
    api, pipeline = slow_log, Pipeline(slow_log)
    cursor = pipeline.tails(pattern=".*")["cursor"]
    with contextlib.ExitStack() as stack:

        def ask(wait_ms: int, **asked: Any) -> Connection:
            connection = stack.enter_context(api.connect())
            connection.send(question({**asked, "cursor": cursor, "wait_ms": wait_ms}))
            return connection

        unsettled = ask(60_000, pattern="weak")
        told = ask(60_000, streams=["other"])
        late = ask(SYNC_DELAY_MS // 10, streams=["kept"])
        api.wait_for_metric("millstream_pipeline_waiting", 3)
        writer = stack.enter_context(api.connect())
        # The append is seen at once, and what is behind it is not final for long.
        append = request_bytes("POST", Api.target("weak"), TEXT, b"y")
        writer.send(append + request_bytes("DELETE", Api.target("weak")))
        assert writer.read_response().status == 204
        assert api.post("other", b"y").status == 204
        (other,) = told.read_response().json()["streams"]
        assert (other["name"], other["tail"]["number"]) == ("other", 2)
        assert late.read_response().json()["streams"] == []
        assert not has_answer(writer)

        assert writer.read_response().status == 204
        weak = unsettled.read_response().json()
        # Who looked between the two saw the append.
        assert weak["missing"] == ["weak"] or weak["streams"][0]["tail"]["number"] == 2


def test_a_pattern_is_answered_though_streams_come_and_go_all_the_time(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(environment={SYNC_DELAY: "50"})
    api = Api(server, deadline_s=30)
    assert api.put("kept").status == 201
    ended = threading.Event()

    def come_and_go(number: int) -> None:
        with api.connect() as connection:
            while not ended.is_set():
                target = Api.target(f"some/{number}")
                assert connection.request("PUT", target, TEXT).status == 201
                assert connection.request("DELETE", target).status == 204

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            began = time.monotonic()
            told = Pipeline(api).tails(pattern=".*")
            assert "kept" in [stream["name"] for stream in told["streams"]]
            assert time.monotonic() - began < 20
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
