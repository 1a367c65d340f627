"""Durability classes as a client meets them: choosing one, seeing it, changing it while in use."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import pytest

from support.classes import CLASSES, NOT_OFFERED, PAIRS, as_class, change, fork_as, set_class
from support.http import Api, Closed, producer
from support.server import Server, ServerError
from support.sse import EventStream

SYNC_DELAY_MS = 200


# --- choosing and seeing ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_reported_wherever_a_stream_is(shared: Api, path: str, name: str) -> None:
    created = shared.put(path, b"body", headers=as_class(name))
    assert (created.status, created["stream-durability"]) == (201, name)
    again = shared.put(path, headers=as_class(name))
    assert (again.status, again["stream-durability"]) == (200, name)
    for answer in (
        shared.head(path),
        shared.get(path),
        shared.get(path, offset="now"),
        shared.get(path, offset="-1", live="long-poll"),
    ):
        assert answer["stream-durability"] == name, answer
    with EventStream.open(shared, path) as events:
        assert events.response["stream-durability"] == name
    assert shared.call("GET", f"/-/api/streams/{path}").json()["durability"] == name
    listed = shared.call("GET", f"/-/api/streams?prefix={path}").json()["streams"]
    assert [(row["path"], row["durability"]) for row in listed] == [(path, name)]


@pytest.mark.parametrize("name", CLASSES)
def test_the_server_default_is_for_streams_that_ask_for_none(
    start_server: Callable[..., Server], path: str, name: str
) -> None:
    server = start_server(flags=("--durability", name))
    assert f"durability={name}" in server.log()
    api = Api(server)
    assert api.put(f"{path}/plain")["stream-durability"] == name
    other = CLASSES[(CLASSES.index(name) + 1) % len(CLASSES)]
    assert api.put(f"{path}/other", headers=as_class(other))["stream-durability"] == other
    forked = {"Stream-Forked-From": Api.target(f"{path}/other")}
    assert api.put(f"{path}/fork", b"", None, forked)["stream-durability"] == name


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_server_does_not_start_with_a_class_that_it_cannot_keep(
    start_server: Callable[..., Server], name: str
) -> None:
    with pytest.raises(ServerError, match=name):
        start_server(flags=("--durability", name))


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_class_that_is_not_offered_is_refused_with_what_it_needs(
    shared: Api, path: str, name: str
) -> None:
    refused = shared.put(path, b"x", headers=as_class(name))
    assert (refused.status, refused.code) == (501, "durability_unavailable")
    assert NOT_OFFERED[name] in refused.json()["detail"]
    assert shared.head(path).status == 404
    shared.put(path, b"x")
    refused = change(shared, path, name)
    assert (refused.status, refused.code) == (501, "durability_unavailable")
    assert NOT_OFFERED[name] in refused.json()["detail"]
    assert shared.head(path)["stream-durability"] == "fsync"


@pytest.mark.parametrize("name", ["sync", "FSYNC", "fsync,memory", "", "disk ephemeral"])
def test_an_unknown_class_is_refused(shared: Api, path: str, name: str) -> None:
    refused = shared.put(path, b"x", headers=as_class(name))
    assert (refused.status, refused.code) == (400, "durability_unknown")
    assert shared.head(path).status == 404
    shared.put(path)
    refused = change(shared, path, name)
    assert (refused.status, refused.code) == (400, "durability_unknown")
    assert shared.head(path)["stream-durability"] == "fsync"


def test_a_class_that_is_no_text_is_unknown(shared: Api, path: str) -> None:
    shared.put(path)
    refused = shared.call("PATCH", f"/-/api/streams/{path}", body=b'{"durability": "\\ud800"}')
    assert (refused.status, refused.code) == (400, "durability_unknown")


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_put_compares_the_class_in_force_and_only_if_it_is_named(
    shared: Api, path: str, before: str, after: str
) -> None:
    shared.put(path, b"x", headers=as_class(before))
    set_class(shared, path, after)
    unnamed = shared.put(path)
    assert (unnamed.status, unnamed["stream-durability"]) == (200, after)
    for name in CLASSES:
        named = shared.put(path, headers=as_class(name))
        assert named.status == (200 if name == after else 409), name
        if name != after:
            assert named.code == "stream_conflict"
    assert shared.get(path).body == b"x"


# --- changing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"durability": None},
        {"durability": 3},
        {"durability": ["disk"]},
        {"durability": "disk", "ttl": 3},
        ["disk"],
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(
    shared: Api, path: str, document: object
) -> None:
    shared.put(path)
    refused = change(shared, path, document)
    assert (refused.status, refused.code) == (400, "bad_request")
    assert shared.head(path)["stream-durability"] == "fsync"


def test_a_change_needs_a_stream(shared: Api, path: str) -> None:
    missing = change(shared, path, "disk")
    assert (missing.status, missing.code) == (404, "stream_not_found")
    shared.put(f"{path}/longer")
    assert change(shared, path, "disk").status == 404, "a prefix is not a stream"
    shared.put(path)
    shared.put(f"{path}/fork", b"", None, {"Stream-Forked-From": Api.target(path)})
    assert shared.delete(path).status == 204
    gone = change(shared, path, "disk")
    assert (gone.status, gone.code) == (410, "stream_gone")
    assert change(shared, "__ds/subscriptions", "disk").status == 404
    wrong = shared.call("PATCH", "/-/api/streams/" + path, body=b"{not json")
    assert (wrong.status, wrong.code) == (400, "bad_request")


@pytest.mark.parametrize("name", ["a b", "ü/%25", "q?x#y", "a//b", "a+b&c=d"])
def test_a_change_reaches_streams_of_every_name(shared: Api, path: str, name: str) -> None:
    from urllib.parse import quote

    raw = f"{path}/{quote(name, safe='/')}"
    assert shared.put(raw, headers=as_class("disk")).status == 201
    answer = change(shared, raw, "memory")
    assert (answer.status, answer.json()["path"]) == (200, f"{path}/{name}")
    assert shared.head(raw)["stream-durability"] == "memory"


def test_a_change_answers_with_the_stream_as_it_is_then(shared: Api, path: str) -> None:
    shared.put(path, b'[1,2,{"a":3}]', "application/json", as_class("ephemeral"))
    shared.post(path, b"4", "application/json")
    before = shared.call("GET", f"/-/api/streams/{path}").json()
    assert (before["records"], before["durability"]) == (4, "ephemeral")
    answer = change(shared, path, "fsync")
    assert answer.json() == {**before, "durability": "fsync"}
    assert answer.json() == shared.call("GET", f"/-/api/streams/{path}").json()


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_change_disturbs_neither_bytes_nor_offsets_nor_producers(
    shared: Api, path: str, before: str, after: str
) -> None:
    created = shared.put(path, b"0,", headers=as_class(before))
    first = shared.post(path, b"1,", headers=producer("p", 1, 0)).offset
    with EventStream.open(shared, path, first) as events:
        assert events.control()["upToDate"]
        set_class(shared, path, after)
        duplicate = shared.post(path, b"1,", headers=producer("p", 1, 0))
        assert (duplicate.status, duplicate.offset) == (204, first)
        assert shared.post(path, b"2,", headers={"If-Match": f'"{first}"'}).status == 204
        last = shared.post(path, b"3,", headers=producer("p", 1, 1)).offset
        seen = b""
        while seen != b"2,3,":
            event = events.next()
            if event.kind == "data":
                seen += event.data.encode()
                assert b"2,3,".startswith(seen)
            else:
                assert "streamGapFrom" not in event.json()
    whole = shared.get(path)
    assert (whole.body, whole.offset) == (b"0,1,2,3,", last)
    assert whole.get("stream-gap") is None
    assert whole["stream-incarnation"] == created["stream-incarnation"]
    rest = shared.get(path, offset=first)
    assert (rest.body, rest.get("stream-gap")) == (b"2,3,", None)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_closed_stream_can_change_and_stays_closed(
    shared: Api, path: str, before: str, after: str
) -> None:
    shared.put(path, b"all", headers={**as_class(before), "Stream-Closed": "true"})
    set_class(shared, path, after)
    read = shared.get(path)
    assert (read.body, read["stream-closed"], read["stream-durability"]) == (b"all", "true", after)
    assert shared.post(path, b"more").code == "stream_closed"


def test_a_waiting_reader_is_served_by_the_class_of_the_append(shared: Api, path: str) -> None:
    """A long-poll that began before a change gets what is written after it."""
    tail = shared.put(path, headers=as_class("fsync")).offset
    for name in ("ephemeral", "memory", "disk", "fsync"):
        with shared.connect() as waiting:
            target = shared.target(path, offset=tail, live="long-poll")
            waiting.send(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            set_class(shared, path, name)
            posted = shared.post(path, name.encode())
            answer = waiting.read_response()
            if answer.status == 204:  # its time was up before the append came
                answer = shared.get(path, offset=tail, live="long-poll")
            assert (answer.body, answer.offset) == (name.encode(), posted.offset)
            tail = posted.offset


class Appender:
    """Appends numbered records with a producer until it is told to stop; nothing may be refused."""

    def __init__(self, api: Api, path: str, name: str) -> None:
        self.name, self.count, self.faults = name, 0, list[str]()
        self._api, self._path = api, path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def record(self, number: int) -> bytes:
        return f"{self.name}{number};".encode()

    def _run(self) -> None:
        with self._api.connect() as connection:
            while not self._stop.is_set():
                headers = {"Content-Type": "text/plain", **producer(self.name, 0, self.count)}
                try:
                    answer = connection.request(
                        "POST", Api.target(self._path), headers, self.record(self.count)
                    )
                except (Closed, AssertionError, OSError) as error:
                    self.faults.append(repr(error))
                    return
                if answer.status != 200:
                    self.faults.append(f"{self.count}: {answer.status} {answer.text}")
                    return
                self.count += 1

    def finish(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.faults == []


def test_appends_go_on_while_the_class_changes(server: Server, api: Api, path: str) -> None:
    api.put(path, headers=as_class("fsync"))
    writers = [Appender(api, path, name) for name in "abc"]
    reached = [0] * len(writers)
    for name in itertools.chain.from_iterable(PAIRS):
        set_class(api, path, name)
        # Every class is really used before the next one comes.
        until = time.monotonic() + 20
        while any(w.count <= n and not w.faults for w, n in zip(writers, reached, strict=True)):
            assert time.monotonic() < until, "appends do not go on"
            time.sleep(0.001)
        reached = [writer.count for writer in writers]
    for writer in writers:
        writer.finish()
    set_class(api, path, "fsync")
    records = [record + b";" for record in api.read_all(path).split(b";")[:-1]]
    server.crash_and_restart()
    assert api.read_all(path) == b"".join(records), "what was made durable is not there"
    for writer in writers:
        own = [record for record in records if record.startswith(writer.name.encode())]
        assert own == [writer.record(number) for number in range(writer.count)]


# --- the strong do not tax the weak -----------------------------------------------------------


def test_weak_appends_do_not_wait_for_a_slow_sync(
    start_server: Callable[..., Server], path: str
) -> None:
    delay = {"MILLSTREAM_FAULT_SYNC_DELAY_MS": str(SYNC_DELAY_MS)}
    api = Api(start_server(environment=delay))
    for name in CLASSES:
        assert api.put(f"{path}/{name}", headers=as_class(name)).status == 201
    strong = Appender(api, f"{path}/fsync", "s")
    times: dict[str, list[float]] = {}
    for name in ("ephemeral", "memory", "disk"):
        with api.connect() as connection:
            took = times.setdefault(name, [])
            for number in range(200):
                began = time.monotonic()
                answer = connection.request(
                    "POST",
                    Api.target(f"{path}/{name}"),
                    {"Content-Type": "text/plain"},
                    b"%d," % number,
                )
                took.append(time.monotonic() - began)
                assert answer.status == 204, answer
                # Spread over several syncs of the strong stream.
                time.sleep(0.004)
    began, before = time.monotonic(), strong.count
    while strong.count < before + 3:
        assert not strong.faults, strong.faults
        assert time.monotonic() < began + 20
        time.sleep(0.001)
    strong_seconds = (time.monotonic() - began) / (strong.count - before)
    strong.finish()
    # The delay is real, so a median far below it was not paid by the weak classes.
    assert strong_seconds > SYNC_DELAY_MS / 1000 / 2
    for name, took in times.items():
        assert statistics.median(took) < strong_seconds / 8, (name, statistics.median(took))
        slow = sum(1 for seconds in took if seconds > strong_seconds / 2)
        assert slow <= len(took) // 20, f"{name}: {slow} of {len(took)} waited like fsync"
    for name in ("ephemeral", "memory", "disk"):
        expected = b"".join(b"%d," % number for number in range(200))
        assert api.read_all(f"{path}/{name}") == expected


def test_a_fork_can_have_any_class(shared: Api, path: str) -> None:
    for source, fork in PAIRS:
        one, two = f"{path}/{source}-{fork}", f"{path}/{source}-{fork}-fork"
        shared.put(one, b"in,", headers=as_class(source))
        at = shared.post(one, b"herited,").offset
        shared.post(one, b"later")
        made = shared.put(two, b"", None, fork_as(one, fork, at))
        assert (made.status, made["stream-durability"], made.offset) == (201, fork, at)
        shared.post(two, b"own")
        assert shared.get(two).body == b"in,herited,own"
        assert shared.get(one).body == b"in,herited,later"
        same = shared.put(two, b"", None, fork_as(one, fork, at))
        assert same.status == 200
        for other in CLASSES:
            if other != fork:
                assert shared.put(two, b"", None, fork_as(one, other, at)).status == 409
