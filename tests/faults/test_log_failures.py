"""A log that fails: one sync, one write or one short write, at a call of the test's choice.

What was waiting is told that nobody knows, what comes later is refused, what was visible is still read,
and a restart finds everything that was acknowledged. No sync is tried a second time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.classes import change
from support.http import Api, Closed, Response, producer, request_bytes
from support.pipeline import Pipeline
from support.server import Server
from support.sse import EventStream

FAIL, SYNC_DELAY = "MILLSTREAM_FAULT_FAIL", "MILLSTREAM_FAULT_SYNC_DELAY_MS"
TEXT = {"Content-Type": "text/plain"}
# Late enough that the server's own first writes are through, early enough to be quick.
CALL = 60


def body(number: int) -> bytes:
    return f"part {number}\n".encode()


def append_until_it_fails(api: Api, path: str) -> tuple[int, Response]:
    """How many were acknowledged, and what the first other answer was."""
    with api.connect() as connection:
        for number in range(1000):
            headers = {**TEXT, **producer("p", 0, number)}
            answer = connection.request("POST", Api.target(path), headers, body(number))
            if answer.status != 200:
                return number, answer
    raise AssertionError("the log never failed")


def check_failed_state(server: Server, api: Api, path: str, acknowledged: int) -> None:
    """The one defined behaviour of a log that has failed."""
    ready = api.call("GET", "/-/ready")
    assert (ready.status, ready.json()["status"]) == (503, "log_failed")
    assert ready.get("retry-after") is not None
    assert api.call("GET", "/-/health").status == 200
    assert api.metric("millstream_wal_failed") == 1
    server.wait_for_log("takes no more writes until a restart")
    for answer in (
        api.post(path, b"later"),
        api.put("another", b"x"),
        api.delete(path),
        api.close_stream(path),
    ):
        assert answer.status == 503, answer
        assert answer.code in ("server_busy", "outcome_unknown"), answer
    # Nothing that was not acknowledged may be seen, and nothing that was may be missing.
    assert api.read_all(path) == b"".join(body(number) for number in range(acknowledged))
    assert api.head(path).status == 200


@pytest.mark.parametrize("fault", ["sync", "write", "short"])
def test_a_failed_log_call_stops_writes_and_loses_nothing(
    start_server: Callable[..., Server], fault: str
) -> None:
    server = start_server(environment={FAIL: f"{fault}:{CALL}"})
    api = Api(server)
    assert api.put("s").status == 201
    acknowledged, first = append_until_it_fails(api, "s")
    assert acknowledged > 0
    assert (first.status, first.code) == (503, "outcome_unknown"), first
    check_failed_state(server, api, "s", acknowledged)

    server.kill()
    server.environment = {}
    server.restart()
    found = api.read_all("s")
    # What nobody knew is decided now: there whole, or not at all. The same answer holds from here on.
    survived = acknowledged + (1 if body(acknowledged) in found else 0)
    assert found == b"".join(body(number) for number in range(survived))
    if fault != "sync":
        assert survived == acknowledged, "a batch that was not written cannot be there"
    retry = api.post("s", body(acknowledged), headers=producer("p", 0, acknowledged))
    assert retry.status == (204 if survived > acknowledged else 200)
    assert api.metric("millstream_wal_failed") == 0
    server.crash_and_restart()
    assert api.read_all("s") == b"".join(body(number) for number in range(acknowledged + 1))


@pytest.mark.parametrize("fault", ["sync", "write", "short"])
def test_a_stop_after_a_failure_is_not_a_clean_one(
    start_server: Callable[..., Server], fault: str
) -> None:
    """SIGTERM ends the process, and memory streams still learn that something may be missing."""
    server = start_server(environment={FAIL: f"{fault}:{CALL}"})
    api = Api(server)
    api.put("weak", headers={"Stream-Durability": "memory"})
    assert api.post("weak", b"weak").status == 204
    old_tail = api.head("weak").offset
    api.put("s")
    acknowledged, _ = append_until_it_fails(api, "s")
    server.process.terminate()
    server.process.wait(10)
    server.kill()
    server.environment = {}
    server.restart()
    assert api.read_all("s")[: 7 * acknowledged].startswith(body(0))
    resumed = api.get("weak", offset=old_tail)
    assert resumed.status == 200
    assert "reason=crash" in resumed["stream-gap"]


@pytest.mark.parametrize("fault", ["sync", "write", "short"])
def test_everybody_who_waits_is_told(start_server: Callable[..., Server], fault: str) -> None:
    """Many appends in one failing group commit, pipelined and not, and a duplicate among them."""
    server = start_server(environment={FAIL: f"{fault}:{CALL}", SYNC_DELAY: "50"})
    api = Api(server, deadline_s=20)
    assert api.put("s").status == 201
    answers: list[list[Response]] = []

    def send(name: str) -> None:
        """One append and its duplicate, pipelined; a failed log may end the connection after the first."""
        once = request_bytes("POST", Api.target("s"), {**TEXT, **producer(name, 0, 0)}, b"x")
        got: list[Response] = []
        with contextlib.suppress(Closed), api.connect() as connection:
            connection.send(once + once)
            got.append(connection.read_response())
            got.append(connection.read_response())
        answers.append(got)

    for turn in range(200):
        threads = [threading.Thread(target=send, args=(f"p{turn}-{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "somebody was never answered"
        if any(got[0].status != 200 for got in answers):
            break
    assert all(answers), "somebody got no answer at all"
    refused = [answer for got in answers for answer in got if answer.status == 503]
    assert {answer.code for answer in refused} <= {"outcome_unknown", "server_busy"}
    assert any(answer.code == "outcome_unknown" for answer in refused)
    accepted = [got for got in answers if got[0].status == 200]
    for got in answers:
        statuses = [answer.status for answer in got]
        assert statuses in ([200, 204], [200, 503], [200], [503], [503, 503]), statuses
    server.kill()
    server.environment = {}
    server.restart()
    assert api.get("s").body.count(b"x") >= len(accepted)


def test_a_failed_close_can_be_tried_again(start_server: Callable[..., Server]) -> None:
    """The close that failed is not confirmed from memory: not before the restart, not after it."""
    server = start_server(environment={FAIL: f"write:{CALL}"})
    api = Api(server)
    closed = 0
    for number in range(100):
        if api.put(f"s{number}").status != 201:
            break
        answer = api.close_stream(f"s{number}")
        if answer.status != 204:
            assert answer.code == "outcome_unknown"
            assert api.close_stream(f"s{number}").status == 503
            break
        closed += 1
    assert closed < 100
    server.kill()
    server.environment = {}
    server.restart()
    for number in range(closed):
        assert api.head(f"s{number}")["stream-closed"] == "true"
    assert api.put("last").status == 201
    assert api.close_stream("last").status == 204


def delete_and_create(api: Api, path: str) -> Response:
    """Both in one batch of the log. Returns the first answer that is no success."""
    with api.connect() as connection:
        create = request_bytes("PUT", Api.target(path), {"Content-Type": "text/plain"}, b"z")
        connection.send(request_bytes("DELETE", Api.target(path)) + create)
        deleted = connection.read_response()
        return deleted if deleted.status != 204 else connection.read_response()


def test_a_read_has_no_outcome_that_could_be_unknown(start_server: Callable[..., Server]) -> None:
    """One that waits for a delete which never becomes final may be tried again."""
    server = start_server(environment={FAIL: "sync:20", SYNC_DELAY: "200"})
    api = Api(server, deadline_s=30)
    names = [f"s{number}" for number in range(30)]
    with api.connect() as connection:
        connection.send(b"".join(request_bytes("PUT", Api.target(n), TEXT) for n in names))
        assert {connection.read_response().status for _ in names} == {201}
    for number, name in enumerate(names):
        with api.connect() as writer, api.connect() as reader:
            writer.send(request_bytes("DELETE", Api.target(name)))
            api.wait_until_metric(
                "millstream_streams_deleted_total", lambda n, least=number: n > least
            )
            reader.send(request_bytes("GET", Api.target(name, offset="-1")))
            deleted, read = writer.read_response(), reader.read_response()
        if deleted.status != 204:
            break
        assert (read.status, read.code) == (404, "stream_not_found")
    assert (deleted.status, deleted.code) == (503, "outcome_unknown")
    assert (read.status, read.code) == (503, "server_busy")


# What is under way when the log fails, and how the stream is shown from then on: as it was before.
UNDER_WAY: dict[str, tuple[Callable[[Api, str], Response], bool]] = {
    "create": (lambda api, path: api.put(path, b"x"), False),
    "append": (lambda api, path: api.post(path, b"y"), True),
    "close": (lambda api, path: api.close_stream(path), True),
    "delete": (lambda api, path: api.delete(path), True),
    "class": (lambda api, path: change(api, path, "disk"), True),
    "delete and create": (delete_and_create, True),
}


@pytest.mark.parametrize("kind", UNDER_WAY)
def test_after_a_failure_streams_are_listed_as_they_were_last(
    start_server: Callable[..., Server], kind: str
) -> None:
    server = start_server(
        settings={"sweep_interval_ms": 3_600_000}, environment={FAIL: f"sync:{CALL}"}
    )
    api = Api(server)
    act, there = UNDER_WAY[kind]
    assert api.put("expired", b"x", headers={"Stream-TTL": "1"}).status == 201
    names = [f"s{number:02}" for number in range(CALL)]
    if there:
        # Each of them takes a sync, and as many are left for what is under way.
        names = names[: CALL // 2]
        for name in names:
            assert api.put(name, b"x").status == 201
    before = {entry["path"]: entry for entry in listed(api)}
    done = next(number for number, name in enumerate(names) if act(api, name).status == 503)
    failed = names[done]
    assert api.metric("millstream_wal_failed") == 1
    time.sleep(1.01)  # the stream has expired, and nothing can say so any more

    shown = {entry["path"]: entry for entry in listed(api)}
    assert shown.get(failed) == before.get(failed)
    assert (failed in shown) == there
    assert shown["expired"] == before["expired"]
    assert api.get("expired").status == 503
    told = {stream["name"]: stream for stream in Pipeline(api).tails(pattern=".*")["streams"]}
    assert told.keys() == shown.keys()
    for name, stream in told.items():
        entry = shown[name]
        as_listed = (entry["tail"], entry["closed"], entry["durability"])
        assert (stream["tail"]["offset"], stream["closed"], stream["class"]) == as_listed
    if kind in ("create", "delete"):
        others = set(names[:done])
        assert others & shown.keys() == (others if kind == "create" else set())
    asked = Pipeline(api).tails(streams=[failed])
    assert ([stream["name"] for stream in asked["streams"]] == [failed]) == there
    # What is visible is read, or nobody says anything about it: not that it is gone.
    if there:
        stream = told[failed]
        ranges = [{"stream": failed, "from": stream["first"], "to": stream["tail"]}]
        read = Pipeline(api).post("/v1/read", {"ranges": ranges})
        deleted = kind.startswith("delete")
        assert read.status == (503 if deleted else 200), read.body
        for answer in (api.get(failed), api.head(failed)):
            assert answer.status == (503 if deleted else 200), answer
            if not deleted:
                durability = answer["stream-durability"]
                assert (answer.offset, durability) == (stream["tail"]["offset"], stream["class"])
                assert answer.get("stream-closed") is None
        if not deleted:
            with EventStream.open(api, failed) as events:
                assert events.response["stream-durability"] == stream["class"]
        server.kill()
        server.environment = {}
        server.restart()
        if not deleted:
            assert api.get(failed).body.startswith(b"x")
            assert api.get(failed, offset=stream["tail"]["offset"]).status == 200


def test_behind_a_failed_log_nobody_waits_for_a_checkpoint(
    start_server: Callable[..., Server],
) -> None:
    """To or from `ephemeral` a class changes with a checkpoint, and there will be none."""
    # Each answer within a fraction of what a change that may come is waited for.
    api = Api(start_server(environment={FAIL: f"sync:{CALL}"}), deadline_s=10)
    weak = {**TEXT, "Stream-Durability": "memory"}
    assert [api.put(name, b"x", headers=weak).status for name in ("a", "b")] == [201, 201]
    assert api.put("s").status == 201
    append_until_it_fails(api, "s")
    for name in ("a", "b", "a"):
        answer = change(api, name, "ephemeral")
        assert (answer.status, answer.code) == (503, "server_busy"), answer.body
        assert "restart" in answer.json()["detail"]
        assert api.get(name).body == b"x"


def listed(api: Api) -> list[dict[str, Any]]:
    answer = api.call("GET", "/-/api/streams?limit=1000")
    assert answer.status == 200, answer.body
    streams: list[dict[str, Any]] = answer.json()["streams"]
    return streams


def test_a_misspelt_fault_is_no_fault(start_server: Callable[..., Server]) -> None:
    """A test that asks for a fault must not pass on a healthy disk."""
    with pytest.raises(AssertionError, match="not a test fault"):
        start_server(environment={FAIL: "fsync:1"})
