"""A disk that is slow to read: only those wait who need what it has.

One reactor, and a disk whose every first read takes its time. A request that needs a stream, an index or bytes from it
is answered late; everybody else's requests, on the same reactor, go on meanwhile. Proven by order: hundreds of hot
requests are answered between a cold request and its answer.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.http import Api, Connection, Response, request_bytes
from support.many_streams import create_many
from support.server import Server
from support.sse import EventStream

TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}
BINARY = "application/octet-stream"
READ_DELAY_MS = 400
# Far fewer than fit into one delay, far more than slip in between two steps of a reactor that waits itself.
HOT_BETWEEN = 20
# In one answer and in a file of its own; and in many pieces.
SMALL = b"".join(b"%06d;" % number for number in range(6000))
LARGE = b"".join(b"%09d;" % number for number in range(250_000))
# Names this long make a catalog that its own cache does not hold. The walk through it that follows a start begins in front,
# and does not come to those that are used.
CATALOG_STREAMS = 9_000
MEMORY = {"Stream-Durability": "memory"}


KINDS = ["source", "fork", "small", "poll", "sse", "tail", "since", "json", "large", "large-sse"]


def long_name(number: int, kind: str = "plain") -> str:
    return f"catalog/{number:05d}-{kind}-" + "x" * 900


# Far from each other in the catalog.
NAME = {kind: long_name(3_000 + 500 * number, kind) for number, kind in enumerate(KINDS)}


def slow(delay_ms: int) -> dict[str, str]:
    return {"MILLSTREAM_FAULT_READ_DELAY_MS": str(delay_ms)}


@pytest.fixture
def cold(start_server: Callable[..., Server], tmp_path: Path) -> Iterator[Api]:
    """A server that has just started over streams of all kinds, none of them in memory."""
    server = start_server(settings={"reactors": 1, "checkpoint_bytes": "64MiB"})
    api = Api(server, deadline_s=60)
    for kind in ("source", "small", "poll", "sse", "tail", "since"):
        assert api.put(NAME[kind]).status == 201
        for at in range(0, len(SMALL), 7_000):
            assert api.post(NAME[kind], SMALL[at : at + 7_000]).status == 204
    records = b"[" + b",".join([b'{"a":1}'] * 60_000) + b"]"
    assert api.put(NAME["json"], records, "application/json").status == 201
    for kind in ("large", "large-sse"):
        assert api.put(NAME[kind], LARGE, BINARY).status == 201
    fork = {"Stream-Forked-From": Api.target(NAME["source"])}
    assert api.put(NAME["fork"], headers=fork).status == 201
    create_many(server, [long_name(number) for number in range(CATALOG_STREAMS)])
    server.stop(30)
    server.environment.update(slow(READ_DELAY_MS))
    server.restart()
    assert api.put("hot", b"hot", "text/plain", MEMORY).status == 201
    yield api
    # An orderly stop would wait for what is being read.
    server.kill()


def answered(connection: Connection) -> bool:
    return bool(select.select([connection.socket], [], [], 0)[0])


def hot_requests(api: Api, ended: Callable[[], bool]) -> int:
    """How many requests of others are answered until then."""
    count = 0
    with api.connect() as hot:
        while not ended():
            assert hot.request("POST", Api.target("hot"), TEXT, b"h").status == 204
            assert hot.request("GET", Api.target("hot", offset="now")).status == 200
            assert hot.request("GET", "/-/health").status == 200
            count += 3
    return count


def test_no_cold_request_holds_up_hot_ones(cold: Api) -> None:
    def target(kind: str, **query: str) -> str:
        return Api.target(NAME[kind], **query)

    def plain(number: int) -> str:
        return Api.target(long_name(number))

    fork = {"Stream-Forked-From": plain(5_250)}
    # With a look at what must be in the answer.
    requests: list[tuple[str, str, dict[str, str], bytes | None, Callable[[Response], bool]]] = [
        ("HEAD", plain(3_250), {}, None, lambda a: a.status == 200),
        ("POST", plain(3_750), JSON, b'{"i":1}', lambda a: a.status == 204),
        ("PUT", plain(4_250), JSON, b"", lambda a: a.status == 200),
        ("DELETE", plain(4_750), {}, None, lambda a: a.status == 204),
        ("PUT", Api.target("new-fork"), fork, b"", lambda a: a.status == 201),
        ("GET", plain(5_750), {}, None, lambda a: a.json() == [{"i": 0}]),
        ("GET", target("small"), {}, None, lambda a: a.body == SMALL),
        ("GET", target("large"), {}, None, lambda a: a.body == LARGE),
        ("GET", target("fork"), {}, None, lambda a: a.body == SMALL),
        ("GET", target("tail", tail="1"), {}, None, lambda a: a.body == SMALL[-7_000:]),
        ("GET", target("since", since="1"), {}, None, lambda a: a.body == SMALL),
        ("GET", target("poll", offset="-1", live="long-poll"), {}, None, lambda a: a.body == SMALL),
        ("GET", target("json", tail="1"), {}, None, lambda a: a.json() == [{"a": 1}]),
    ]
    between = {}
    for method, path, headers, body, good in requests:
        with cold.connect() as connection:
            connection.send(request_bytes(method, path, headers, body))
            between[method, path[:30]] = hot_requests(cold, lambda c=connection: answered(c))
            answer = connection.read_response(head_only=method == "HEAD")
            assert good(answer), (method, path[:40], answer.status, answer.body[:200])
    assert min(between.values()) >= HOT_BETWEEN, between
    assert cold.get(long_name(3_750)).json() == [{"i": 0}, {"i": 1}]
    assert cold.get(long_name(4_750)).status == 404
    assert cold.get("new-fork").json() == [{"i": 0}]


def test_the_first_event_of_a_cold_stream_holds_up_nobody(cold: Api) -> None:
    for kind, wanted in (("sse", SMALL), ("large-sse", LARGE)):
        target = Api.target(NAME[kind], offset="-1", live="sse")
        with cold.connect() as connection:
            connection.send(request_bytes("GET", target))
            assert hot_requests(cold, lambda c=connection: answered(c)) >= HOT_BETWEEN
            events = EventStream(connection, connection.read_head())
            received = b""
            while len(received) < len(wanted):
                event = events.next()
                if event.kind == "data":
                    received += event.data.encode() if kind == "sse" else event.decoded()
            assert received == wanted


def test_a_large_cold_body_holds_up_nobody_while_it_leaves(cold: Api) -> None:
    with cold.connect() as connection:
        connection.send(request_bytes("GET", Api.target(NAME["large"])))
        head = connection.read_head()
        received = bytearray(b"".join(connection.take_what_is_there()))

        def whole() -> bool:
            received.extend(b"".join(connection.take_what_is_there()))
            return len(received) >= int(head["content-length"])

        # A reactor that waits for each piece answers a few others between two of them.
        assert hot_requests(cold, whole) >= 10 * HOT_BETWEEN
        assert received == LARGE


def test_a_burst_of_cold_readers_gets_every_byte_while_others_go_on(cold: Api) -> None:
    names = [long_name(number) for number in range(3_000, CATALOG_STREAMS, 60)]
    connections = [cold.connect() for _ in names]
    large = [cold.connect() for _ in range(5)]
    try:
        for connection, name in zip(connections, names, strict=True):
            connection.send(request_bytes("GET", Api.target(name)))
        for connection in large:
            connection.send(request_bytes("GET", Api.target(NAME["large"])))

        def any_answer() -> bool:
            return any(answered(connection) for connection in connections + large)

        assert hot_requests(cold, any_answer) >= HOT_BETWEEN
        for connection in connections:
            assert connection.read_response().json() == [{"i": 0}]
        for connection in large:
            assert connection.read_response().body == LARGE
    finally:
        for connection in connections + large:
            connection.close()
    assert cold.metric("millstream_cold_loads_total") > 0
    cold.wait_for_metric("millstream_cold_loads_waiting", 0)


def test_pipelined_answers_keep_their_order_behind_a_cold_one(cold: Api) -> None:
    with cold.connect() as connection:
        connection.send(
            request_bytes("GET", Api.target("hot"))
            + request_bytes("GET", Api.target(NAME["small"]))
            + request_bytes("POST", Api.target(NAME["small"]), TEXT, b"new")
            + request_bytes("GET", Api.target("hot"))
            + request_bytes("GET", Api.target("nothing"))
            + request_bytes("GET", Api.target(NAME["small"]))
        )
        answers = [connection.read_response() for _ in range(6)]
    assert [answer.status for answer in answers] == [200, 200, 204, 200, 404, 200]
    bodies = [answers[at].body for at in (0, 1, 3, 5)]
    assert bodies == [b"hot", SMALL, b"hot", SMALL + b"new"]


def evicted(start_server: Callable[..., Server], delay_ms: int, names: list[str]) -> Api:
    """A server that has let go of streams which it has not read since, and has nothing else to do."""
    settings = {"reactors": 1, "checkpoint_bytes": "64KiB", "streams_cached_max": 16,
                "sweep_interval_ms": 50}  # fmt: skip
    api = Api(start_server(settings=settings, environment=slow(delay_ms)), deadline_s=60)
    for name in [*names, *(f"other-{number}" for number in range(40))]:
        assert api.put(name, LARGE[:200_000], BINARY).status == 201
    until = time.monotonic() + 60
    while api.metric("millstream_streams_cached") > 16:
        assert time.monotonic() < until, "the streams do not leave memory"
        time.sleep(0.02)
    return api


def test_a_stream_that_is_deleted_while_it_is_fetched_is_gone_for_its_reader(
    start_server: Callable[..., Server],
) -> None:
    api = evicted(start_server, 700, ["a", "b", "c"])
    with api.connect() as reader, api.connect() as other:
        reader.send(request_bytes("GET", Api.target("b")))
        api.wait_for_metric("millstream_cold_loads_waiting", 1)
        other.send(request_bytes("DELETE", Api.target("b")))
        other.send(request_bytes("PUT", Api.target("b"), {"Content-Type": BINARY}, b"next"))
        answers = [other.read_response() for _ in range(2)]
        assert [answer.status for answer in answers] == [204, 201]
        answer = reader.read_response()
        assert answer.status == 404 or answer.body in (LARGE[:200_000], b"next"), answer
    assert api.get("b").body == b"next"
    api.server.kill()


def test_a_disk_that_does_not_answer_does_not_keep_the_server_from_ending(
    start_server: Callable[..., Server],
) -> None:
    api = evicted(start_server, 7_000, ["a", "b", "c"])
    with api.connect() as reader:
        reader.send(request_bytes("GET", Api.target("b")))
        api.wait_for_metric("millstream_cold_loads_waiting", 1)
        assert api.call("GET", "/-/health").status == 200
        api.server.stop()


def test_a_stop_does_not_wait_for_the_walk_through_the_catalog(cold: Api) -> None:
    """It follows each start and takes a minute here."""
    assert isinstance(cold.server, Server)
    cold.server.stop(30.0)


def test_a_request_that_names_two_removed_streams_is_answered(
    start_server: Callable[..., Server],
) -> None:
    """Both may be in the catalog as far as memory knows, and neither leaves a trace when it is looked for there."""
    settings = {"checkpoint_bytes": 65536, "wal_file_bytes": 65536, "streams_cached_max": 16}
    api = Api(start_server(settings=settings))

    def checkpoint() -> None:
        """Twice: one that was under way may have missed what was written before."""
        for _ in range(2):
            before = api.metric("millstream_checkpoints_total")
            while api.metric("millstream_checkpoints_total") == before:
                api.post("filler", b"z" * 30_000)

    api.put("filler")
    for name in ("source", "target"):
        assert api.put(name, b"1").status == 201
    checkpoint()
    for name in ("source", "target"):
        assert api.delete(name).status == 204
    checkpoint()
    forked = api.put("target", headers={"Stream-Forked-From": api.target("source")})
    assert (forked.status, forked.code) == (404, "fork_source_missing")
