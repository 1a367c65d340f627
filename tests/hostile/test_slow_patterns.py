"""Patterns that take long over the names that there are: their question ends, and nobody else waits for it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.http import Api, Connection, Response, request_bytes
from support.pipeline import Pipeline
from support.server import Server

MIB = 1 << 20
TEXT = {"Content-Type": "text/plain"}
# The automaton of this one grows with every letter that it sees: milliseconds for each name.
SLOW = "(a?b?){700}[ab]*a[ab]{700}c"
NAMES = [format(number, "012b").translate({48: "a", 49: "b"}) * 80 for number in range(2000)]
# One name of this length takes a tenth of a second, so that a turn must end within it.
LONG_NAME = "a" * 990
SLOW_WITHIN_A_NAME = "(?:a?){4000}z"
# Each class is a million letters, and the case of each is looked up: five seconds.
SLOW_TO_COMPILE = "(?i)" + "[!-\U0010ffff]" * 500
SLOW_COUNT = 20
POLITE_S = 4.0  # for a wait of one second; one slow question after the other takes twenty


def question(**asked: Any) -> bytes:
    return request_bytes("POST", "/v1/tails", None, json.dumps(asked).encode())


def busy_seconds(api: Api, name: str) -> float:
    """How long the server's threads with this name have worked, or would have if others had left them a core."""
    server = api.server
    assert isinstance(server, Server)
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    named = [task for task in tasks if (task / "comm").read_text().strip() == name]
    assert named
    return sum(sum(map(int, (task / "schedstat").read_text().split()[:2])) for task in named) / 1e9


def for_all_names(api: Api, method: str, body: bytes = b"") -> None:
    with api.connect() as connection:
        connection.send(b"".join(request_bytes(method, Api.target(n), TEXT, body) for n in NAMES))
        for _ in NAMES:
            assert connection.read_response().status in (201, 204)


def with_long_names(start_server: Callable[..., Server]) -> Api:
    api = Api(start_server(), deadline_s=60.0)
    for_all_names(api, "PUT")
    return api


@contextlib.contextmanager
def slow_ones_wait(api: Api) -> Iterator[tuple[str, list[Connection]]]:
    """Questions whose slow patterns have met no name yet: the cursor is new. The cursor, and who waits."""
    cursor = Pipeline(api).tails(streams=[])["cursor"]
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(api.connect()) for _ in range(SLOW_COUNT)]
        for number, connection in enumerate(waiting):
            pattern = f"{SLOW}{number}"
            connection.send(question(pattern=pattern, cursor=cursor, wait_ms=60_000))
        api.wait_for_metric("millstream_pipeline_waiting", SLOW_COUNT)
        yield cursor, waiting


def test_a_pattern_that_takes_too_long_is_refused(start_server: Callable[..., Server]) -> None:
    api = with_long_names(start_server)
    pipeline = Pipeline(api)
    refused = pipeline.post("/v1/tails", {"pattern": SLOW})
    assert (refused.status, refused.code) == (400, "pattern_invalid")
    assert "takes too long" in refused.json()["detail"]
    # Others over the same names are answered.
    answer = pipeline.post("/v1/tails", {"pattern": "[ab]*a"})
    assert (answer.status, len(answer.json()["streams"])) == (200, 1000)


def post_with_room(api: Api, path: str, body: bytes) -> Response:
    """An append of a weak class does not wait for the next log file, which is being prepared: it is to come again."""
    until = time.monotonic() + api.deadline_s
    while (answer := api.post(path, body)).status == 503 and time.monotonic() < until:
        assert answer.code == "server_busy"
        time.sleep(0.01)
    return answer


def test_large_writes_and_a_stop_do_not_wait_for_slow_questions(
    start_server: Callable[..., Server],
) -> None:
    api = with_long_names(start_server)
    assert api.put("kept", headers={"Stream-Durability": "memory"}).status == 201
    tail = post_with_room(api, "kept", b"x" * MIB).offset
    connections = [api.connect() for _ in range(SLOW_COUNT)]
    for connection in connections:
        connection.send(question(pattern=SLOW))
    api.wait_for_metric("millstream_pipeline_waiting", SLOW_COUNT)
    with ThreadPoolExecutor(1) as pool:
        append = pool.submit(post_with_room, api, "kept", b"y" * MIB)
        assert append.result(60).status == 204
    # Some of the twenty are still being compared.
    assert api.metric("millstream_pipeline_waiting") > 0
    for connection in connections:
        connection.close()
    server = api.server
    assert isinstance(server, Server)
    server.restart()
    answer = api.get("kept", offset=tail)
    assert (answer.get("stream-gap"), len(answer.body)) == (None, MIB), "the stop was clean"


@pytest.mark.parametrize("asked", [{"pattern": "none/.*"}, {"streams": ["none"]}])
def test_a_wait_ends_in_time_beside_slow_questions(
    start_server: Callable[..., Server], asked: dict[str, Any]
) -> None:
    api = with_long_names(start_server)
    with slow_ones_wait(api) as (cursor, _), api.connect() as polite:
        polite.send(question(**asked, cursor=cursor, wait_ms=1000))
        api.wait_for_metric("millstream_pipeline_waiting", SLOW_COUNT + 1)
        began = time.monotonic()
        for_all_names(api, "POST", b"x")
        answer = polite.read_response()
        assert (answer.status, answer.json()["streams"]) == (200, [])
        assert time.monotonic() - began < POLITE_S
        # And again, now that the slow ones are known to be slow.
        began = time.monotonic()
        polite.send(question(**asked, cursor=cursor, wait_ms=1000))
        assert polite.read_response().status == 200
        assert 0.9 < time.monotonic() - began < POLITE_S


def test_news_is_told_in_time_beside_slow_questions(start_server: Callable[..., Server]) -> None:
    api = with_long_names(start_server)
    with slow_ones_wait(api) as (cursor, _), api.connect() as polite:
        polite.send(question(streams=["late"], cursor=cursor, wait_ms=60_000))
        api.wait_for_metric("millstream_pipeline_waiting", SLOW_COUNT + 1)
        for_all_names(api, "POST", b"x")
        began = time.monotonic()
        assert api.put("late").status == 201
        answer = polite.read_response()
        assert [stream["name"] for stream in answer.json()["streams"]] == ["late"]
        assert time.monotonic() - began < POLITE_S


def test_who_waits_takes_a_share_of_a_core(start_server: Callable[..., Server]) -> None:
    """Together they need far more than there is, and all names change all the time."""
    api = Api(start_server(), deadline_s=60.0)
    names = [f"{number:03}" + "b" * 900 for number in range(900)]
    weak = TEXT | {"Stream-Durability": "ephemeral"}
    with contextlib.ExitStack() as stack:
        writer, *waiting = [stack.enter_context(api.connect()) for _ in range(201)]
        for name in names:
            assert writer.request("PUT", Api.target(name), weak).status == 201
        cursor = Pipeline(api).tails(streams=[])["cursor"]
        for number, connection in enumerate(waiting):
            pattern = f"[0-9]+[ab]*none{number}"
            connection.send(question(pattern=pattern, cursor=cursor, wait_ms=60_000))
        api.wait_for_metric("millstream_pipeline_waiting", len(waiting))
        posts = b"".join(request_bytes("POST", Api.target(name), TEXT, b"x") for name in names)

        def share(seconds: float) -> float:
            began, before = time.monotonic(), busy_seconds(api, "millstream-tail")
            while (took := time.monotonic() - began) < seconds:
                writer.send(posts)
                for _ in names:
                    assert writer.read_response().status == 204
            return (busy_seconds(api, "millstream-tail") - before) / took

        share(1.0)
        taken = share(4.0)
        print("SHARE", taken)
        assert taken < 0.6
        cursor = Pipeline(api).tails(streams=[])["cursor"]
        polite = stack.enter_context(api.connect())
        polite.send(question(streams=["late"], cursor=cursor, wait_ms=60_000))
        api.wait_until_metric("millstream_pipeline_waiting", lambda count: count > 0)
        assert api.put("late").status == 201
        began = time.monotonic()
        assert polite.read_response().status == 200
        assert time.monotonic() - began < POLITE_S


def test_questions_and_reads_do_not_wait_for_slow_questions(
    start_server: Callable[..., Server],
) -> None:
    api = with_long_names(start_server)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(api.connect()) for _ in range(SLOW_COUNT)]
        for number, connection in enumerate(slow):
            connection.send(question(pattern=f"{SLOW}{number}"))
        api.wait_for_metric("millstream_pipeline_waiting", SLOW_COUNT)
        began = time.monotonic()
        answer = Pipeline(api).post("/v1/tails", {"pattern": "[ab]*a"})
        assert (answer.status, len(answer.json()["streams"])) == (200, 1000)
        assert time.monotonic() - began < POLITE_S


def test_a_pattern_that_takes_long_to_compile_is_refused(shared: Api) -> None:
    pipeline = Pipeline(shared)
    refused = pipeline.post("/v1/tails", {"pattern": SLOW_TO_COMPILE})
    assert (refused.status, refused.code) == (400, "pattern_invalid")
    assert "ignores case" in refused.json()["detail"]
    # With case there is nothing to look up.
    answer = pipeline.post("/v1/tails", {"pattern": SLOW_TO_COMPILE.removeprefix("(?i)")})
    assert answer.status == 200


@pytest.mark.parametrize(
    "pattern",
    [
        "(shop|chat)/.*",
        r"(?i)[\w.-]+/[\w.-]+/\p{L}+",
        r"\w+/[0-9]{4}-\d\d",
        "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        "|".join(f"shop/{number:04}/orders" for number in range(200)),
        "(?i)" + "|".join(f"shop/{number:04}/orders" for number in range(200)),
        "|".join(f"(?:shop/{number}(?:/.*)?/[^/]*)" for number in range(120)),
        r"(?x) shop / \d+  # the orders",
    ],
)
def test_ordinary_patterns_are_answered(shared: Api, pattern: str) -> None:
    answer = Pipeline(shared).post("/v1/tails", {"pattern": pattern})
    assert answer.status == 200, answer.body


def test_questions_do_not_wait_for_patterns_that_take_long_within_a_name(
    start_server: Callable[..., Server],
) -> None:
    api = Api(start_server(), deadline_s=60.0)
    for number in range(20):
        assert api.put(f"{LONG_NAME}/{number}").status == 201
    with contextlib.ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(api.connect())
            connection.send(question(pattern=f"{SLOW_WITHIN_A_NAME}{number}"))
        began = time.monotonic()
        answer = Pipeline(api).post("/v1/tails", {"pattern": "a+/1[0-9]"})
        assert (answer.status, len(answer.json()["streams"])) == (200, 10)
        assert time.monotonic() - began < POLITE_S


def test_a_stop_answers_slow_questions_that_wait(start_server: Callable[..., Server]) -> None:
    api = with_long_names(start_server)
    server = api.server
    assert isinstance(server, Server)
    with slow_ones_wait(api) as (_, waiting):
        for_all_names(api, "POST", b"x")
        assert server.stop() < POLITE_S
        codes = {connection.read_response().status for connection in waiting}
        # Told that there is no news, that it takes too long, or that the server stops.
        assert codes <= {200, 400, 503}
