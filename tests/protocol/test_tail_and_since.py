"""The last N records, and reads from a point in time."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable

import pytest

from support.http import Api, request_bytes
from support.pipeline import Pipeline
from support.server import Server
from support.sse import EventStream

TEXT = {"Content-Type": "text/plain"}


@pytest.fixture
def numbered(shared: Api, path: str) -> str:
    shared.put(path, b"[]", "application/json")
    shared.post(path, b"[0,1,2]", "application/json")
    for number in range(3, 10):
        shared.post(path, b"%d" % number, "application/json")
    return path


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 9, 10, 11, 1000])
def test_last_records(shared: Api, numbered: str, count: int) -> None:
    answer = shared.get(numbered, tail=count)
    assert answer.status == 200
    assert answer.json() == list(range(10))[max(0, 10 - count) :]
    assert answer["stream-up-to-date"] == "true"
    assert answer.offset == shared.head(numbered).offset


def test_last_records_of_bytes_are_appends(shared: Api, path: str) -> None:
    shared.put(path, b"one,")
    shared.post(path, b"two,")
    shared.post(path, b"three")
    assert shared.get(path, tail=2).body == b"two,three"


def test_last_record_then_live(shared: Api, numbered: str) -> None:
    with shared.connect() as connection:
        target = shared.target(numbered, tail=1, live="sse")
        connection.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        events = EventStream(connection, connection.read_head())
        assert events.next().json() == [9]
        assert events.control()["upToDate"] is True
        shared.post(numbered, b"10", "application/json")
        assert events.next().json() == [10]


def test_last_records_by_long_poll(shared: Api, numbered: str) -> None:
    assert shared.get(numbered, tail=2, live="long-poll").json() == [8, 9]


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "", "18446744073709551616"])
def test_tail_that_is_no_count_is_refused(shared: Api, numbered: str, value: str) -> None:
    answer = shared.get(numbered, tail=value)
    assert (answer.status, answer.code) == (400, "bad_request")


def test_several_starting_points_at_once_are_refused(shared: Api, numbered: str) -> None:
    for query in (
        {"tail": 1, "offset": "-1"},
        {"since": "0", "offset": "-1"},
        {"since": "0", "tail": 1},
    ):
        answer = shared.get(numbered, **query)
        assert (answer.status, answer.code) == (400, "bad_request"), query


def test_since_a_moment(shared: Api, path: str) -> None:
    shared.put(path, b"[]", "application/json")
    shared.post(path, b'"before"', "application/json")
    time.sleep(0.05)
    moment_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    shared.post(path, b'"after"', "application/json")
    moment = datetime.datetime.fromtimestamp(moment_ms / 1000, datetime.UTC)
    for since in (
        str(moment_ms),
        moment.isoformat(timespec="milliseconds"),
        moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    ):
        answer = shared.get(path, since=since)
        assert answer.status == 200, since
        assert json.loads(answer.body) == ["after"], since
    assert shared.get(path, since="0").json() == ["before", "after"]
    assert shared.get(path, since="2000-01-01T00:00:00Z").json() == ["before", "after"]
    future = shared.get(path, since="2999-01-01T00:00:00Z")
    assert (future.json(), future.offset) == ([], shared.head(path).offset)


def test_no_append_is_older_than_its_request(
    start_server: Callable[..., Server], path: str
) -> None:
    """Also one that comes while a reactor syncs for others, again and again within one round."""
    slow = {"MILLSTREAM_FAULT_SYNC_DELAY_MS": "2"}  # short enough for a reactor to sync by itself
    api = Api(start_server(settings={"reactors": 1}, environment=slow))
    for name in (path, f"{path}/other"):
        api.put(name)
    other = Api.target(f"{path}/other")
    pair = request_bytes("POST", other, TEXT, b"x") + request_bytes("HEAD", other)
    asked: dict[bytes, int] = {}
    with api.connect() as beside, api.connect() as connection:
        for number in range(200):
            beside.send(pair * 4)
            record = b"<%d>" % number
            asked[record] = time.time_ns() // 1_000_000
            assert connection.request("POST", Api.target(path), TEXT, record).status == 204
            for _ in range(4):
                assert beside.read_response().status == 204
                assert beside.read_response(head_only=True).status == 200
    for record, moment_ms in asked.items():
        assert record in api.get(path, since=str(moment_ms)).body


def test_since_after_a_restart(api: Api, path: str) -> None:
    api.put(path, b"[]", "application/json")
    api.post(path, b"1", "application/json")
    time.sleep(0.05)
    moment_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    api.post(path, b"2", "application/json")
    api.server.stop()  # type: ignore[attr-defined]
    api.server.restart()  # type: ignore[attr-defined]
    assert api.get(path, since=str(moment_ms)).json() == [2]
    assert api.get(path, tail=1).json() == [2]


@pytest.mark.parametrize("value", ["yesterday", "", "-5", "2024-13-01T00:00:00Z", "9" * 40])
def test_since_that_is_no_time_is_refused(shared: Api, numbered: str, value: str) -> None:
    answer = shared.get(numbered, since=value)
    assert (answer.status, answer.code) == (400, "bad_request")


SEARCHED = "millstream_message_search_bytes_total"
SEARCH_MAX_BYTES = 256 * 1024


@pytest.fixture(scope="session")
def large(shared_server: Server) -> tuple[Api, str, list[object]]:
    """A stream whose second append is an array of many messages, some of them long."""
    api, path = Api(shared_server, deadline_s=30.0), "t/large-array"
    messages: list[object] = [
        {"n": number, "s": 'a "quote", [and] more'} for number in range(90_000)
    ]
    messages[70_000] = "x" * 400_000
    messages[89_998] = ["y" * 300_000]
    assert api.put(path, b"[0,1]", "application/json").status == 201
    body = json.dumps(messages).encode()
    assert len(body) > 4_000_000
    assert api.post(path, body, "application/json").status == 204
    return api, path, [0, 1, *messages]


@pytest.mark.parametrize("count", [1, 2, 3, 100, 20_001, 20_002, 50_000, 90_000, 90_001])
def test_last_messages_of_a_large_append_are_found_without_searching_it(
    large: tuple[Api, str, list[object]], count: int
) -> None:
    api, path, messages = large
    before = api.metric(SEARCHED)
    answer = api.get(path, tail=count)
    assert api.metric(SEARCHED) - before <= SEARCH_MAX_BYTES
    found = answer.json()
    while answer.get("stream-up-to-date") != "true":
        answer = api.get(path, offset=answer.offset)
        found += answer.json()
    assert found == messages[-count:]


@pytest.mark.parametrize("count", [1, 70_000, 70_001, 89_999, 90_000])
def test_a_fork_takes_along_messages_of_a_large_append(
    large: tuple[Api, str, list[object]], path: str, count: int
) -> None:
    api, source, messages = large
    headers = {
        "Stream-Forked-From": Api.target(source),
        "Stream-Fork-Offset": Pipeline(api).place(source, number=2)["offset"],
        "Stream-Fork-Sub-Offset": str(count),
    }
    before = api.metric(SEARCHED)
    assert api.put(path, b"", None, headers).status == 201
    assert api.metric(SEARCHED) - before <= SEARCH_MAX_BYTES
    answer = api.get(path, offset="-1")
    found = answer.json()
    while answer.get("stream-up-to-date") != "true":
        answer = api.get(path, offset=answer.offset)
        found += answer.json()
    assert found == messages[: count + 2]


def test_a_sub_offset_beyond_a_large_append_is_refused(
    large: tuple[Api, str, list[object]], path: str
) -> None:
    api, source, _ = large
    headers = {
        "Stream-Forked-From": Api.target(source),
        "Stream-Fork-Offset": Pipeline(api).place(source, number=2)["offset"],
        "Stream-Fork-Sub-Offset": "90001",
    }
    answer = api.put(path, b"", None, headers)
    assert (answer.status, answer.code) == (400, "fork_offset_invalid")
