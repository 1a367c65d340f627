"""`POST /v1/tails`: where streams end, where something is in them, and what has changed since."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from support.classes import as_class, set_class
from support.http import Api, Response, request_bytes
from support.pipeline import Pipeline
from support.server import Server
from support.staging import rows_body

pytestmark = pytest.mark.one_server

JSON = "application/json"


@pytest.fixture
def pipeline(api: Api) -> Pipeline:
    return Pipeline(api)


@pytest.fixture
def shared_pipeline(shared: Api) -> Pipeline:
    return Pipeline(shared)


def names(told: dict[str, Any]) -> list[str]:
    return [stream["name"] for stream in told["streams"]]


def put_many(api: Api, paths: list[str], method: str = "PUT", body: bytes = b"x") -> None:
    """Many small writes over one connection, some hundred under way at once."""
    with api.connect() as connection:
        for start in range(0, len(paths), 500):
            some = paths[start : start + 500]
            connection.send(
                b"".join(
                    request_bytes(
                        method, Api.target(quote(path)), {"Content-Type": "text/plain"}, body
                    )
                    for path in some
                )
            )
            for path in some:
                answer = connection.read_response()
                assert answer.status in (201, 204), (path, answer.body)


# --- what is told about a stream --------------------------------------------------------------


def test_everything_about_a_stream(shared_pipeline: Pipeline, shared: Api, path: str) -> None:
    created = shared.put(path, b"", "application/json; charset=utf-8", as_class("disk"))
    empty = shared_pipeline.tail(path)
    assert empty == {
        "name": path,
        "incarnation": created["stream-incarnation"],
        "content_type": "application/json; charset=utf-8",
        "class": "disk",
        "closed": False,
        "first": {"offset": created.offset, "number": 0},
        "tail": {"offset": created.offset, "number": 0},
        "bytes": 0,
        "time_ms": None,
        "epochs": 1,
    }
    before_ms = shared_pipeline.tails(streams=[])["now_ms"]
    tail = shared.post(path, b"[1, 22, 333]", JSON).offset
    told = shared_pipeline.tails(streams=[path])
    (full,) = told["streams"]
    assert full["tail"] == {"offset": tail, "number": 3}
    assert full["bytes"] == len("1,22,333,")
    assert before_ms <= full["time_ms"] <= told["now_ms"]
    assert full["first"] == empty["first"]
    shared.close_stream(path)
    closed = shared_pipeline.tail(path)
    assert closed["closed"] is True
    assert closed["tail"] == full["tail"]


@pytest.mark.parametrize("place", ["memory", "files"])
def test_places_by_number_time_byte_and_offset(
    server: Server, api: Api, pipeline: Pipeline, path: str, place: str
) -> None:
    api.put(path, b"", JSON)
    begins = [api.head(path).offset]
    sizes = [3, 1, 2]
    for size in sizes:
        # Times differ, so that each append is found by its own.
        time.sleep(0.003)
        begins.append(api.post(path, json.dumps(list(range(size))).encode(), JSON).offset)
    if place == "files":
        server.restart()
    owner = [(begins[0], 0), (begins[0], 1), (begins[0], 2), (begins[1], 3), (begins[2], 4)]
    owner += [(begins[2], 5), (begins[3], 6)]
    wanted: list[dict[str, Any]] = [{"number": number} for number in [*range(7), 99]]
    found = pipeline.tail(path, *wanted)["at"]
    assert [(at["offset"], at["number"]) for at in found] == [*owner, owner[-1]]
    assert all(at["gap"] is None for at in found)
    times = [found[0]["time_ms"], found[3]["time_ms"], found[4]["time_ms"]]
    assert times == sorted(set(times))
    assert found[-1]["time_ms"] is None
    edges = [0, times[0], times[0] + 1, times[1], times[2], times[2] + 1]
    found = pipeline.tail(path, *[{"time_ms": edge} for edge in edges])["at"]
    assert [at["number"] for at in found] == [0, 0, 3, 3, 4, 6]
    ends = [int(offset[17:]) for offset in begins]
    found = pipeline.tail(path, *[{"byte": byte} for byte in range(ends[-1] + 3)])["at"]
    expected = [
        next((start for start in ends if start >= byte), ends[-1]) for byte in range(ends[-1] + 3)
    ]
    assert [int(at["offset"][17:]) for at in found] == expected
    found = pipeline.tail(path, *[{"offset": offset} for offset in [*begins, "-1", "now"]])["at"]
    assert [at["number"] for at in found] == [0, 3, 4, 6, 0, 6]
    epoch = begins[0][:16]
    wrong = ["x", f"{epoch}_{1:016}", f"{epoch}_{999:016}", f"{int(epoch) + 5:016}_{0:016}"]
    found = pipeline.tail(path, *[{"offset": offset} for offset in wrong])["at"]
    codes = [at["error"]["code"] for at in found]
    assert codes == ["offset_invalid", "offset_invalid", "offset_beyond_tail", "offset_invalid"]
    assert all(at["error"]["detail"] for at in found)


def test_places_in_forks(pipeline: Pipeline, api: Api, path: str) -> None:
    api.put(path, b"", JSON)
    api.post(path, b"[1,2,3]", JSON)
    middle = api.post(path, b"[4,5]", JSON).offset
    api.post(path, b"[6]", JSON)
    fork = f"{path}-fork"
    headers = {"Stream-Forked-From": Api.target(path), "Stream-Fork-Offset": middle}
    own = api.put(fork, b"", JSON, headers)["stream-incarnation"]
    assert pipeline.tail(fork)["tail"] == {"offset": middle, "number": 5}
    api.post(fork, b"[7,8]", JSON)
    found = pipeline.tail(fork, *[{"number": number} for number in range(8)])["at"]
    assert [at["number"] for at in found] == list(range(8))
    places = [at["offset"] for at in found]
    assert places[0] == places[2]
    assert places[3] == places[4] != places[2]
    # The fork point has two names: the source's, and the one under which the fork's own records begin.
    assert places[5] == places[6] == f"{int(own):016}{middle[16:]}"
    assert pipeline.tail(fork, {"offset": middle})["at"][0] == {**found[5], "offset": middle}


def test_a_lost_tail_is_a_gap_at_the_offset(
    server: Server, api: Api, pipeline: Pipeline, path: str
) -> None:
    api.put(path, b"", JSON, as_class("ephemeral"))
    lost = api.post(path, b"[1,2,3]", JSON).offset
    server.crash_and_restart()
    (found,) = pipeline.tail(path, {"offset": lost})["at"]
    tail = pipeline.tail(path)
    assert found["gap"] == {
        "from": lost,
        "to": tail["tail"]["offset"],
        "reason": "crash",
        "certain": True,
    }
    assert (found["offset"], found["number"]) == (tail["tail"]["offset"], 0)
    assert tail["epochs"] == 2


def test_missing_streams_and_reserved_ones(
    shared_pipeline: Pipeline, shared: Api, path: str
) -> None:
    shared.put(path)
    told = shared_pipeline.tails(streams=[f"{path}-no", path, "", "x" * 5000])
    assert (names(told), told["missing"]) == ([path], [f"{path}-no", "", "x" * 5000])
    assert told["complete"] is True
    for name in ("__ds", "__ds/x"):
        answer = shared_pipeline.post("/v1/tails", {"streams": [path, name]})
        assert (answer.status, answer.code) == (400, "bad_request")
        assert "__ds" in answer.json()["detail"]


def bad_questions() -> list[tuple[Any, str]]:
    return [
        (b"", "bad_request"),
        (b"nonsense", "bad_request"),
        (b'{"streams":["a"]} x', "bad_request"),
        ({}, "bad_request"),
        ({"streams": ["a"], "pattern": "a"}, "bad_request"),
        ({"streams": "a"}, "bad_request"),
        ({"streams": [1]}, "bad_request"),
        ({"streams": [{}]}, "bad_request"),
        ({"streams": [{"name": "a", "at": [{"number": -1}]}]}, "bad_request"),
        ({"streams": [{"name": "a", "at": [{"number": 1, "byte": 2}]}]}, "bad_request"),
        ({"streams": [{"name": "a", "at": [{"when": 1}]}]}, "bad_request"),
        ({"streams": [{"name": "a", "at": [{"byte": 0}] * 100_001}]}, "bad_request"),
        ({"streams": ["a"] * 20_001}, "too_many_streams"),
        ({"streams": ["a"], "surprise": 1}, "bad_request"),
        ({"streams": ["a"], "wait_ms": 60_001}, "bad_request"),
        ({"streams": ["a"], "wait_ms": -1}, "bad_request"),
        ({"streams": ["a"], "cursor": 7}, "bad_request"),
        ({"streams": ["a"], "after": ""}, "bad_request"),
        ({"pattern": "a", "after": "", "cursor": "x"}, "bad_request"),
        ({"pattern": "a("}, "pattern_invalid"),
        ({"pattern": "(?=a)"}, "pattern_invalid"),
        ({"pattern": r"(a)\1"}, "pattern_invalid"),
        ({"pattern": "(a{1000}){1000}"}, "pattern_invalid"),
        ({"pattern": "a" * 4097}, "pattern_invalid"),
    ]


@pytest.mark.parametrize("number", range(len(bad_questions())))
def test_bad_questions_are_told_apart(shared_pipeline: Pipeline, number: int) -> None:
    body, code = bad_questions()[number]
    answer = shared_pipeline.post("/v1/tails", body)
    assert (answer.status, answer.code) == (400, code), answer.body
    assert answer.get("access-control-allow-origin") is None


@pytest.mark.own_server
def test_a_pattern_matches_whole_names_in_memory_and_not(
    server: Server, api: Api, pipeline: Pipeline
) -> None:
    paths = ["a", "ab", "abc", "b/1", "b/22", "B/3", "c.d", "cxd", "ü/1"]
    put_many(api, paths)
    expected = {
        "a": ["a"],
        "a|ab": ["a", "ab"],
        "ab.*": ["ab", "abc"],
        r"b/\d": ["b/1"],
        r"(?i)b/\d+": ["B/3", "b/1", "b/22"],
        r"c\.d": ["c.d"],
        "c.d": ["c.d", "cxd"],
        "(b|c).*": ["b/1", "b/22", "c.d", "cxd"],
        "ü/.": ["ü/1"],
        ".*": sorted(paths),
        "": [],
        "__ds/.*": [],
        "nothing": [],
    }
    for _ in range(2):
        for pattern, matching in expected.items():
            told = pipeline.tails(pattern=pattern)
            assert (names(told), told["complete"]) == (matching, True), pattern
        server.restart()


def test_a_pattern_leaves_out_what_is_kept_for_forks_alone(
    api: Api, pipeline: Pipeline, path: str
) -> None:
    put_many(api, [f"{path}/source", f"{path}/other"])
    forked_from = {"Stream-Forked-From": Api.target(f"{path}/source")}
    assert api.put(f"{path}/fork", b"", None, forked_from).status == 201
    assert api.delete(f"{path}/source").status == 204
    assert api.get(f"{path}/source").status == 410
    told = pipeline.tails(pattern=f"{path}/.*")
    assert names(told) == [f"{path}/fork", f"{path}/other"]
    named = pipeline.tails(streams=[f"{path}/source", f"{path}/fork"])
    assert (names(named), named["missing"]) == ([f"{path}/fork"], [f"{path}/source"])


# --- what has changed -------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["streams", "pattern"])
def test_a_cursor_gets_what_has_changed(api: Api, pipeline: Pipeline, path: str, by: str) -> None:
    paths = [f"{path}/{name}" for name in "abcdef"]
    put_many(api, paths[:-1])
    asked = {"streams": paths} if by == "streams" else {"pattern": f"{path}/.*"}
    cursor = pipeline.tails(**asked)["cursor"]

    def news() -> tuple[list[str], list[str]]:
        nonlocal cursor
        told = pipeline.tails(**asked, cursor=cursor)
        assert told["complete"] is False
        cursor = told["cursor"]
        return [name[-1] for name in names(told)], [name[-1] for name in told["missing"]]

    assert news() == ([], [])
    api.post(paths[0], b"y")
    api.post(paths[1], b"y")
    assert news() == (["a", "b"], [])
    assert news() == ([], [])
    api.close_stream(paths[2])
    set_class(api, paths[3], "memory")
    assert news() == (["c", "d"], [])
    api.post(paths[3], b"y")
    assert news() == (["d"], [])
    # What is only in memory is told again when the log has it; a strong append behind it waits for that.
    api.post(paths[1], b"y")
    assert news() in ((["b"], []), (["b", "d"], []))
    api.delete(paths[4])
    assert news() == ([], ["e"])
    assert news() == ([], [])
    api.delete(paths[0])
    api.put(paths[0], b"z")
    api.put(paths[5], b"z")
    assert news() == (["a", "f"], [])
    put_many(api, [paths[5]], "POST")
    api.put("elsewhere")
    assert news() == (["f"], [])


def test_a_cursor_of_another_run_or_made_up_gets_everything(
    server: Server, api: Api, pipeline: Pipeline, path: str
) -> None:
    api.put(path)
    cursor = pipeline.tails(streams=[path])["cursor"]
    assert pipeline.tails(streams=[path], cursor=cursor)["complete"] is False
    for foreign in ("", "x", "0-0", cursor[:-1] + "99999", "-" + cursor):
        told = pipeline.tails(streams=[path], cursor=foreign, wait_ms=20_000)
        assert (told["complete"], names(told)) == (True, [path]), foreign
    server.restart()
    told = pipeline.tails(streams=[path], cursor=cursor, wait_ms=20_000)
    assert (told["complete"], names(told)) == (True, [path])


def test_streams_that_left_memory_are_not_forgotten(start_server: Callable[..., Server]) -> None:
    settings = {"streams_cached_max": 20, "checkpoint_bytes": "64KiB", "sweep_interval_ms": 100}
    api = Api(start_server(settings=settings))
    pipeline = Pipeline(api)
    paths = [f"s/{number:03}" for number in range(200)]
    put_many(api, [*paths, "other"])
    cursor = pipeline.tails(pattern="s/.*")["cursor"]
    # All change behind the cursor: on a slow machine they may have left before it.
    put_many(api, paths, "POST")
    tail = api.post(paths[7], b"changed").offset
    # Checkpoints make streams clean, clean ones leave.
    deadline = time.monotonic() + 20
    while api.metric("millstream_streams_cached") > 30:
        assert time.monotonic() < deadline
        put_many(api, ["other"] * 3, "POST", b"x" * 30_000)
    told = pipeline.tails(pattern="s/.*", cursor=cursor)
    assert told["complete"] is True
    assert names(told) == paths
    assert told["streams"][7]["tail"] == {"offset": tail, "number": 3}
    again = pipeline.tails(streams=paths, cursor=cursor)
    assert (again["complete"], names(again)) == (True, paths)


# --- waiting ----------------------------------------------------------------------------------


class Later:
    """A question asked in a thread of its own."""

    def __init__(self, pipeline: Pipeline, **question: Any) -> None:
        self.answer: dict[str, Any] = {}
        self.took_s = 0.0

        def ask() -> None:
            began = time.monotonic()
            self.answer = Pipeline(Api(pipeline.api.server, deadline_s=40)).tails(**question)
            self.took_s = time.monotonic() - began

        self.thread = threading.Thread(target=ask)
        self.thread.start()

    def get(self) -> dict[str, Any]:
        self.thread.join(40)
        assert not self.thread.is_alive()
        return self.answer


@pytest.mark.parametrize("name", ["ephemeral", "memory", "disk", "fsync"])
def test_a_change_wakes_who_waits_for_it(
    api: Api, pipeline: Pipeline, path: str, name: str
) -> None:
    api.put(path, b"", "text/plain", as_class(name))
    cursor = pipeline.tails(pattern=f"{path}.*")["cursor"]
    by_pattern = Later(pipeline, pattern=f"{path}.*", cursor=cursor, wait_ms=30_000)
    by_name = Later(pipeline, streams=[path], cursor=cursor, wait_ms=30_000)
    api.wait_for_metric("millstream_pipeline_waiting", 2)
    api.put("elsewhere")
    api.wait_for_metric("millstream_pipeline_waiting", 2)
    tail = api.post(path, b"x").offset
    for later in (by_pattern, by_name):
        told = later.get()
        assert names(told) == [path]
        assert told["streams"][0]["tail"] == {"offset": tail, "number": 1}
        assert later.took_s < 15
    api.wait_for_metric("millstream_pipeline_waiting", 0)


def test_creation_and_deletion_wake_too(api: Api, pipeline: Pipeline, path: str) -> None:
    cursor = pipeline.tails(streams=[path])["cursor"]
    later = Later(pipeline, streams=[path], cursor=cursor, wait_ms=30_000)
    api.wait_for_metric("millstream_pipeline_waiting", 1)
    api.put(path)
    told = later.get()
    assert names(told) == [path]
    cursor = pipeline.tails(streams=[path])["cursor"]
    later = Later(pipeline, pattern=f"{path}.*", cursor=cursor, wait_ms=30_000)
    api.wait_for_metric("millstream_pipeline_waiting", 1)
    api.delete(path)
    assert later.get()["missing"] == [path]


def test_without_a_change_the_time_runs_out(
    shared_pipeline: Pipeline, shared: Api, path: str
) -> None:
    shared.put(path)
    told = shared_pipeline.tails(streams=[path])
    began = time.monotonic()
    told = shared_pipeline.tails(streams=[path], cursor=told["cursor"], wait_ms=300)
    assert 0.29 < time.monotonic() - began < 10
    assert (told["complete"], told["streams"], told["missing"]) == (False, [], [])


def test_who_leaves_is_not_waited_for(api: Api, pipeline: Pipeline, path: str) -> None:
    api.put(path)
    cursor = pipeline.tails(streams=[path])["cursor"]
    question = json.dumps({"streams": [path], "cursor": cursor, "wait_ms": 60_000}).encode()
    for leave in ("close", "abort"):
        with api.connect() as connection:
            connection.send(request_bytes("POST", "/v1/tails", None, question))
            api.wait_for_metric("millstream_pipeline_waiting", 1)
            getattr(connection, leave)()
            api.wait_for_metric("millstream_pipeline_waiting", 0)


@pytest.mark.own_server
def test_a_stop_answers_who_waits(server: Server, api: Api, pipeline: Pipeline, path: str) -> None:
    api.put(path)
    cursor = pipeline.tails(streams=[path])["cursor"]
    question = json.dumps({"streams": [path], "cursor": cursor, "wait_ms": 60_000}).encode()
    with api.connect() as connection:
        connection.send(request_bytes("POST", "/v1/tails", None, question))
        api.wait_for_metric("millstream_pipeline_waiting", 1)
        assert server.stop() < 5
        answer: Response = connection.read_response()
        assert answer.status == 200
        assert answer.json()["streams"] == []


# --- many -------------------------------------------------------------------------------------


@pytest.mark.own_server
def test_ten_thousand_streams_by_pattern(api: Api, pipeline: Pipeline) -> None:
    count = 10_000
    paths = [f"chat/{number:05}" for number in range(count)]
    put_many(api, [*paths, "other/1"])
    pipeline.api.deadline_s = 30
    told = pipeline.tails(pattern="chat/.*")
    assert names(told) == paths
    assert all(stream["tail"]["number"] == 1 for stream in told["streams"])
    active = paths[:: count // 500]
    put_many(api, active, "POST")
    told = pipeline.tails(pattern="chat/.*", cursor=told["cursor"])
    assert (names(told), told["complete"]) == (active, False)
    ranges = [
        {
            "stream": stream["name"],
            "incarnation": stream["incarnation"],
            "from": {**stream["first"], "number": 0},
            "to": stream["tail"],
        }
        for stream in told["streams"]
    ]
    read = pipeline.read(ranges, columns=["stream", "value"])
    assert read.column("stream") == [name for name in active for _ in range(2)]


@pytest.mark.own_server
def test_more_streams_than_allowed_are_refused(api: Api, pipeline: Pipeline) -> None:
    put_many(api, [f"many/{number:05}" for number in range(20_001)])
    pipeline.api.deadline_s = 30
    answer = pipeline.post("/v1/tails", {"pattern": "many/.*"})
    assert (answer.status, answer.code) == (400, "too_many_streams")
    assert len(pipeline.tails(pattern="many/.*[1-9]")["streams"]) > 15_000
    # Page by page they are all told, in order and each once.
    first = pipeline.tails(pattern="many/.*", after="")
    assert (len(first["streams"]), first["next"]) == (20_000, "many/19999")
    api.delete("many/00007")
    put_many(api, ["many/00000-new", "many/20001"])
    second = pipeline.tails(pattern="many/.*", after=first["next"])
    assert (names(second), "next" in second) == (["many/20000", "many/20001"], False)
    # What changed meanwhile is news since the first page.
    news = pipeline.tails(pattern="many/.*", cursor=first["cursor"])
    assert (names(news), news["missing"]) == (["many/00000-new", "many/20001"], ["many/00007"])
    assert names(pipeline.tails(pattern="many/.*", after="many/2")) == names(second)
    assert names(pipeline.tails(pattern="many/.*", after="z")) == []


def test_more_requests_than_the_queue_holds_are_refused(
    start_server: Callable[..., Server],
) -> None:
    """Stages wait for a slow log with their workers; who comes when the queue is full is told at once, and nobody hangs."""
    server = start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "4000"})
    api = Api(server, deadline_s=20)
    # After one slow sync the reactors leave the others to the log's own thread.
    assert api.put("first").status == 201
    created = api.metric("millstream_streams_created_total")
    body = rows_body([("late", b"x")])
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(api.connect()) for _ in range(340)]
        writer = stack.enter_context(api.connect())
        writer.send(request_bytes("PUT", Api.target("late"), {"Content-Type": "text/plain"}, b"x"))
        api.wait_for_metric("millstream_streams_created_total", created + 1)
        for number, connection in enumerate(connections):
            connection.send(request_bytes("PUT", f"/v1/stage/{number}", None, body))
        answers = [connection.read_response() for connection in connections]
        assert writer.read_response().status == 201
    refused = [answer for answer in answers if answer.status == 503]
    assert {answer.code for answer in refused} == {"server_busy"}
    assert {answer.get("retry-after") for answer in refused} == {"1"}
    assert 0 < len(refused) <= 340 - 256
    assert {answer.status for answer in answers} == {201, 503}
    assert api.metric("millstream_pipeline_queue") == 0
    server.kill()  # an orderly stop would wait for the slow log
