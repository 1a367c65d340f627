"""Weak spots of other servers in the protocol itself. The number names the entry of the list."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from support.http import Api, Connection, Timeout, producer, request_bytes
from support.server import Server
from support.sse import EventStream

TEXT = {"Content-Type": "text/plain"}


def fork_of(source: str, offset: str, sub_offset: str) -> dict[str, str]:
    return {
        "Stream-Forked-From": Api.target(source),
        "Stream-Fork-Offset": offset,
        "Stream-Fork-Sub-Offset": sub_offset,
    }


def test_item_34_what_others_lack_is_there(shared: Api, path: str) -> None:
    keys = shared.call("GET", "/v1/stream/__ds/jwks.json")
    assert (keys.status, keys["content-type"]) == (200, "application/jwk-set+json")
    assert keys.json()["keys"][0]["crv"] == "Ed25519"
    preflight = shared.call("OPTIONS", Api.target(path), {"Origin": "https://page.example"})
    assert preflight["access-control-allow-origin"] == "*"
    assert shared.call("GET", "/-/metrics").status == 200
    assert shared.call("GET", "/-/ready").status == 200
    assert "streams" in shared.call("GET", "/-/api/streams?limit=1").json()


def test_item_34_readiness_ends_while_commits_hang(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "7000"}, deadline_s=60.0)
    api = Api(server, deadline_s=30.0)
    # After one slow sync the reactors leave the others to the log's own thread.
    assert api.put(f"{path}/first").status == 201
    hanging = api.connect()
    hanging.send(request_bytes("PUT", Api.target(path), TEXT, b"x"))
    until = time.monotonic() + 7
    while (answer := api.call("GET", "/-/ready")).status == 200:
        assert time.monotonic() < until, "ready although no commit came back for 7 s"
        time.sleep(0.1)
    assert answer.status == 503
    assert int(answer["retry-after"]) >= 1
    assert api.call("GET", "/-/health").status in (200, 503), "somebody must still answer"
    assert api.call("GET", "/-/metrics").status == 200
    server.kill()
    hanging.close()


@pytest.mark.parametrize(
    ("sub_offset", "expected"),
    [
        ("1", [{"a": 1, "b": [2, 3]}]),
        ("2", [{"a": 1, "b": [2, 3]}, "x,y]}"]),
        ("3", [{"a": 1, "b": [2, 3]}, "x,y]}", 4]),
    ],
)
def test_item_35_json_sub_offsets_count_records_not_commas(
    shared: Api, path: str, sub_offset: str, expected: list[object]
) -> None:
    source = f"{path}/source"
    start = shared.put(source, b"[]", "application/json").offset
    shared.post(source, b'[{"a":1,"b":[2,3]},"x,y]}",4]', "application/json")
    fork = f"{path}/fork"
    assert shared.put(fork, b"", None, fork_of(source, start, sub_offset)).status == 201
    assert shared.get(fork).json() == expected


@pytest.mark.parametrize(
    "sub_offset", ["4", "18446744073709551615", "18446744073709551616", "9" * 40]
)
def test_item_35_sub_offsets_beyond_the_append_are_refused(
    shared: Api, path: str, sub_offset: str
) -> None:
    for kind, body in (("application/json", b"[1,2,3]"), ("text/plain", b"abc")):
        source = f"{path}/{kind}"
        start = shared.put(source, b"[]" if "json" in kind else b"", kind).offset
        shared.post(source, body, kind)
        answer = shared.put(f"{source}/fork", b"", None, fork_of(source, start, sub_offset))
        assert (answer.status, answer.code) == (400, "fork_offset_invalid")


def test_item_35_offsets_inside_a_record_are_refused(shared: Api, path: str) -> None:
    source = f"{path}/source"
    tail = shared.put(source, b'["abc","def"]', "application/json").offset
    epoch, _, position = tail.partition("_")
    inside = f"{epoch}_{int(position) - 3:016d}"
    headers = {"Stream-Forked-From": Api.target(source), "Stream-Fork-Offset": inside}
    answer = shared.put(f"{path}/fork", b"", None, headers)
    assert (answer.status, answer.code) == (400, "fork_offset_invalid")
    read = shared.get(source, offset=inside)
    assert (read.status, read.code) == (400, "offset_invalid")


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b"one\r\ntwo", "one\ntwo"),
        (b"one\rtwo", "one\ntwo"),
        (b"one\n\ntwo\n", "one\n\ntwo\n"),
        (b"\r\n", "\n"),
        (b" leading blank", " leading blank"),
        (b"  two blanks\n next", "  two blanks\n next"),
        (b"event: control\ndata: {}\n\n", "event: control\ndata: {}\n\n"),
        ("h\u00e9llo \u2028 \U0001f600".encode(), "h\u00e9llo \u2028 \U0001f600"),
    ],
)
def test_item_36_sse_text_reaches_the_reader_as_it_was(
    shared: Api, path: str, body: bytes, seen: str
) -> None:
    shared.put(path, body, headers={"Stream-Closed": "true"})
    with EventStream.open(shared, path) as events:
        data, control = events.until_end()
    assert (data.kind, data.data) == ("data", seen)
    assert control.json()["streamClosed"] is True


def test_item_36_a_character_split_over_appends_is_not_replaced(shared: Api, path: str) -> None:
    whole = "\u20ac".encode()
    shared.put(path)
    with EventStream.open(shared, path) as events:
        events.control()
        for number in range(3):
            shared.post(path, whole[number : number + 1])
        shared.close_stream(path)
        events.until_end()
        assert b"\xef\xbf\xbd" not in events.raw
        assert all(piece in events.raw for piece in (whole[:1], whole[1:2], whole[2:]))
    with EventStream.open(shared, path) as events:
        assert "".join(e.data for e in events.until_end() if e.kind == "data") == "\u20ac"
    assert shared.get(path).body == whole


def test_item_37_closing_renews_the_lifetime(shared: Api, path: str) -> None:
    plain, by_producer = f"{path}/plain", f"{path}/producer"
    for name in (plain, by_producer):
        shared.put(name, headers={"Stream-TTL": "2"})
    time.sleep(1.3)
    assert shared.close_stream(plain).status == 204
    closing = {**producer("p", 0, 0), "Stream-Closed": "true"}
    assert shared.post(by_producer, b"", None, closing).status == 204
    time.sleep(1.3)
    assert shared.head(plain).status == 200
    assert shared.head(by_producer).status == 200


def test_item_38_an_offset_beyond_the_tail_is_never_confirmed(shared: Api, path: str) -> None:
    tail = shared.put(path, b"abc").offset
    epoch, _, position = tail.partition("_")
    beyond = f"{epoch}_{int(position) + 1000:016d}"
    for live in (None, "long-poll", "sse"):
        answer = shared.get(path, offset=beyond, live=live)
        assert (answer.status, answer.code) == (400, "offset_beyond_tail")
        assert answer.get("stream-up-to-date") is None


def test_item_39_tails_are_not_cacheable(shared: Api, path: str) -> None:
    shared.put(path, b"abc")
    policy = shared.get(path)["cache-control"]
    assert "public" not in policy
    assert "no-cache" in policy or "no-store" in policy


def test_item_40_tails_never_go_back_and_every_append_wakes(
    server: Server, api: Api, path: str
) -> None:
    tail = api.put(path).offset
    done = threading.Event()
    faults: list[str] = []

    def write() -> None:
        with api.connect() as connection:
            for _ in range(30):
                connection.send(request_bytes("POST", Api.target(path), TEXT, b"r") * 20)
                for _ in range(20):
                    assert connection.read_response().status == 204

    def watch_head() -> None:
        last = tail
        with api.connect() as connection:
            while not done.is_set():
                seen = connection.request("HEAD", Api.target(path)).offset
                if seen < last:
                    faults.append(f"tail went back from {last} to {seen}")
                last = seen

    def follow() -> None:
        offset, received = tail, 0
        with api.connect() as connection:
            while received < 4 * 600:
                began = time.monotonic()
                answer = connection.request(
                    "GET", Api.target(path, offset=offset, live="long-poll")
                )
                waited = time.monotonic() - began
                if answer.status == 204 and not done.is_set():
                    faults.append(f"a poll slept through appends ({waited:.1f} s)")
                if answer.offset < offset:
                    faults.append(f"offset went back from {offset} to {answer.offset}")
                received += len(answer.body)
                offset = answer.offset

    writers = [threading.Thread(target=write) for _ in range(4)]
    watchers = [
        threading.Thread(target=watch_head),
        *(threading.Thread(target=follow) for _ in range(3)),
    ]
    for thread in [*watchers, *writers]:
        thread.start()
    for thread in writers:
        thread.join(60)
    done.set()
    for thread in watchers:
        thread.join(30)
        assert not thread.is_alive()
    assert faults == []
    assert len(api.read_all(path)) == 4 * 600


def test_item_41_delete_and_expiry_wake_those_who_wait(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"long_poll_timeout_ms": 20_000, "sweep_interval_ms": 200})
    api = Api(server)
    deleted, expiring = f"{path}/deleted", f"{path}/expiring"
    polls: list[Connection] = []
    for name, headers in ((deleted, {}), (expiring, {"Stream-TTL": "1"})):
        tail = api.put(name, headers=headers).offset
        poll = api.connect()
        poll.send(request_bytes("GET", Api.target(name, offset=tail, live="long-poll")))
        polls.append(poll)
    api.wait_for_metric("millstream_long_polls", 2)
    api.delete(deleted)
    for poll in polls:
        poll.deadline_s = 6.0
        assert poll.read_response().status == 404
        poll.close()


def test_item_42_producer_names_are_bytes(shared: Api, path: str) -> None:
    shared.put(path)
    answers = []
    for name in (b"\xff", b"\xfe", "\u00e9".encode()):
        headers = {"Producer-Id": name, "Producer-Epoch": "0", "Producer-Seq": "0"}
        answers.append(shared.post(path, b"x", headers=headers).status)
    # Either every such name is refused, or each is a producer of its own.
    assert answers in ([400, 400, 400], [200, 200, 200], [400, 400, 200])
    assert len(shared.get(path).body) == answers.count(200)


def test_item_44_location_lists_and_instants(shared: Api, path: str) -> None:
    headers = {**TEXT, "X-Forwarded-Proto": "https", "Host": "s.example"}
    headers["Stream-Expires-At"] = "2990-01-01T00:00:00Z"
    created = shared.call("PUT", Api.target(path), headers, b"x")
    assert created["location"] == f"https://s.example{Api.target(path)}"
    tag = shared.get(path)["etag"]
    assert shared.get(path, {"If-None-Match": f'"other", W/{tag}'}).status == 304
    assert shared.get(path, {"If-None-Match": "*"}).status == 304
    headers["Stream-Expires-At"] = "2990-01-01T01:00:00+01:00"
    assert shared.call("PUT", Api.target(path), headers, b"").status == 200


def test_timeouts_are_not_confused_with_answers(shared: Api, path: str) -> None:
    """The helper itself: a wait that ends by deadline is never read as an empty answer."""
    tail = shared.put(path).offset
    with shared.connect() as connection:
        connection.deadline_s = 0.1
        connection.send(request_bytes("GET", Api.target(path, offset=tail, live="long-poll")))
        with pytest.raises(Timeout):
            connection.read_response()
