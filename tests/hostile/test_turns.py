"""What makes much work at once is done in turns: everybody else goes on between them."""

from __future__ import annotations

import itertools
import json
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from support.http import Api, Connection, request_bytes
from support.server import Server
from support.sse import EventStream

CLIENTS, PIPELINED = 20, 300
CROWD = 400
READERS = 3000


def test_pipelined_requests_let_others_go_first(start_server: Callable[..., Server]) -> None:
    api = Api(start_server(settings={"reactors": 1}), deadline_s=60)
    api.put("large", b"", "application/json")
    assert api.post("large", json.dumps([1] * 120_000).encode(), "application/json").status == 204
    # Each of these searches 240 KB.
    expensive = request_bytes("GET", Api.target("large", tail=1), {"If-None-Match": "*"})

    def requests() -> int:
        return api.metric("millstream_requests_total")

    before = requests()
    with ExitStack() as stack:
        connections = [stack.enter_context(api.connect()) for _ in range(CLIENTS)]
        for connection in connections:
            connection.send(expensive * PIPELINED)
        seen = [requests()]
        while seen[-1] < before + CLIENTS * PIPELINED:
            seen.append(requests())
        for connection in connections:
            for _ in range(PIPELINED):
                assert connection.read_response().status == 304
    assert len(seen) > 8, "one turn of those who pipeline, not all of it"


def test_a_crowd_of_costly_requests_lets_others_go_first(
    start_server: Callable[..., Server],
) -> None:
    """One small request of each at a time, that searches 240 KB: whoever asks for little waits for no round of them."""
    api = Api(start_server(settings={"reactors": 1}), deadline_s=60)
    api.put("large", b"", "application/json")
    assert api.post("large", json.dumps([1] * 120_000).encode(), "application/json").status == 204
    expensive = request_bytes("GET", Api.target("large", tail=1), {"If-None-Match": "*"})
    stop, answered = threading.Event(), itertools.count()

    def ask_on(crowd: list[Connection]) -> None:
        with selectors.DefaultSelector() as ready:
            for member in crowd:
                member.send(expensive)
                ready.register(member.socket, selectors.EVENT_READ)
            while not stop.is_set():
                for key, _ in ready.select(1):
                    asking = key.fileobj
                    assert isinstance(asking, socket.socket)
                    assert asking.recv(4096).startswith(b"HTTP/1.1 304 ")
                    next(answered)
                    asking.sendall(expensive)

    with ExitStack() as stack:
        crowd = [stack.enter_context(api.connect()) for _ in range(CROWD)]
        neighbour = stack.enter_context(api.connect())
        asking = threading.Thread(target=ask_on, args=(crowd,))
        asking.start()
        try:
            # What they cost is known after a few rounds.
            while next(answered) < 4 * CROWD:
                assert neighbour.request("GET", "/-/health").status == 200
            served, since = 0, next(answered)
            while next(answered) < since + 4 * CROWD:
                assert neighbour.request("GET", "/-/health").status == 200
                served += 1
        finally:
            stop.set()
            asking.join()
    assert served > 16, f"{served} answers while each of the crowd had four"


def falling(api: Api, gauge: str) -> list[int]:
    """What others see of a gauge until it is zero."""
    seen = [READERS]
    with api.connect() as connection:
        while seen[-1] > 0:
            text = connection.request("GET", "/-/metrics").text
            seen.append(int(text.partition(f"\n{gauge} ")[2].split()[0]))
    return seen


def in_between(seen: list[int]) -> list[int]:
    """What one reactor can tell of its own work only if others are served while it is done.

    How often it is asked is the machine's matter: the one who asks may be held up, and see few of the turns.
    """
    return [number for number in seen if 0 < number < READERS]


@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_readers_of_one_stream_are_woken_in_turns(
    start_server: Callable[..., Server], path: str, live: str
) -> None:
    api = Api(start_server(settings={"reactors": 1}), deadline_s=60)
    tail = api.put(path).offset
    gauge = {"long-poll": "millstream_long_polls", "sse": "millstream_sse_subscribers"}[live]
    with ExitStack() as stack:
        readers = [stack.enter_context(api.connect()) for _ in range(READERS)]
        for reader in readers:
            reader.send(request_bytes("GET", Api.target(path, offset=tail, live=live)))
        api.wait_for_metric(gauge, READERS)
        writer = stack.enter_context(api.connect())
        headers = {"Content-Type": "text/plain", "Stream-Closed": "true"}
        writer.send(request_bytes("POST", Api.target(path), headers, b"the end"))
        seen = falling(api, gauge)
        assert writer.read_response().status == 204
        for reader in readers:
            answer = reader.read_response()
            assert (answer.status, answer.body.count(b"the end")) == (200, 1)
    assert in_between(seen), "a turn of those who read, not all of them"


def test_readers_whose_time_is_up_together_are_told_in_turns(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"reactors": 1, "long_poll_timeout_ms": 3000})
    api = Api(server, deadline_s=60)
    tail = api.put(path).offset
    with ExitStack() as stack:
        readers = [stack.enter_context(api.connect()) for _ in range(READERS)]
        with server.frozen():
            for reader in readers:
                reader.send(request_bytes("GET", Api.target(path, offset=tail, live="long-poll")))
        api.wait_for_metric("millstream_long_polls", READERS)
        seen = falling(api, "millstream_long_polls")
        for reader in readers:
            assert reader.read_response().status == 204
    assert in_between(seen), "a turn of those who are told, not all of them"


def test_every_reader_gets_what_is_appended_while_others_are_woken(
    start_server: Callable[..., Server], path: str
) -> None:
    api = Api(start_server(settings={"reactors": 1}), deadline_s=60)
    tail = api.put(path).offset
    lines = [b"%04d " % number for number in range(200)]
    with ExitStack() as stack:
        readers = [stack.enter_context(api.connect()) for _ in range(READERS // 3)]
        for reader in readers:
            reader.send(request_bytes("GET", Api.target(path, offset=tail, live="sse")))
        api.wait_for_metric("millstream_sse_subscribers", len(readers))
        with api.connect() as writer:
            headers = {"Content-Type": "text/plain"}
            for number, line in enumerate(lines):
                assert writer.request("POST", Api.target(path), headers, line).status == 204
                if number % 10 == 0:
                    # Those who leave in the middle take nobody's place.
                    readers.pop(number * 7 % len(readers)).close()
        assert api.close_stream(path).status == 204
        for reader in readers:
            events = EventStream(reader, reader.read_head()).until_end()
            data = [event.data for event in events if event.kind == "data"]
            assert "".join(data).encode() == b"".join(lines)
    api.wait_for_metric("millstream_sse_subscribers", 0)


def test_a_backlog_of_short_lines_is_rendered_in_turns(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"reactors": 1})
    api = Api(server, deadline_s=60)
    offsets = [api.put(path).offset]
    # As an event each of these lines is seven times as long.
    offsets += [api.post(path, b"\n" * 16_384).offset for _ in range(200)]

    def read_bytes(connection: Connection) -> int:
        text = connection.request("GET", "/-/metrics").text
        return int(text.partition("\nmillstream_read_bytes_total ")[2].split()[0])

    with ExitStack() as stack:
        asking = stack.enter_context(api.connect())
        readers = [stack.enter_context(api.connect()) for _ in offsets[:160]]
        before = read_bytes(asking)
        with server.frozen():
            for reader, offset in zip(readers, offsets, strict=False):
                reader.send(request_bytes("GET", Api.target(path, offset=offset, live="sse")))
        # Nobody takes anything: it ends when the sockets are full.
        seen, same = [before], 0
        while same < 200 or seen[-1] == before:
            seen.append(read_bytes(asking))
            same = same + 1 if seen[-1] == seen[-2] else 0
    steps = [later - earlier for earlier, later in itertools.pairwise(seen) if later > earlier]
    assert sum(steps) > 160 * 100_000
    assert len(steps) > 3, "others were answered only when everything was rendered"


def test_what_a_fork_takes_along_is_copied_by_a_worker(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"reactors": 1})
    api = Api(server, deadline_s=60)
    size = 15 << 20
    api.put(path, b"x" * size, "application/octet-stream")
    headers = {
        "Stream-Forked-From": Api.target(path),
        "Stream-Fork-Offset": "0000000000000000_0000000000000000",
        "Stream-Fork-Sub-Offset": str(size - 1),
    }

    def spent() -> tuple[float, float]:
        workers = server.thread_seconds("millstream-writ") + server.thread_seconds(
            "millstream-pipe"
        )
        return server.thread_seconds("millstream-reac"), workers

    before = spent()
    with ExitStack() as stack:
        connections = [stack.enter_context(api.connect()) for _ in range(20)]
        for number, connection in enumerate(connections):
            connection.send(request_bytes("PUT", Api.target(f"{path}/{number}"), headers))
        for connection in connections:
            assert connection.read_response().status == 201
    reactor, workers = (now - then for now, then in zip(spent(), before, strict=True))
    assert reactor < workers / 2, "it was copied where everybody waits"
    assert api.head(f"{path}/0").offset.endswith(str(size - 1))


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_large_array_keeps_nobody_waiting_until_it_is_looked_through(
    start_server: Callable[..., Server], path: str, method: str
) -> None:
    api = Api(start_server(settings={"reactors": 1, "durability": "memory"}), deadline_s=60)
    headers = {"Content-Type": "application/json"}
    body = b"[" + b"1," * 7_000_000 + b"1]"
    stop, waits = threading.Event(), list[tuple[float, float]]()

    def ask() -> None:
        with api.connect() as connection:
            while not stop.is_set():
                began = time.monotonic()
                assert connection.request("GET", "/-/health").status == 200
                waits.append((began, time.monotonic()))

    def share_of_the_longest_wait(target: str) -> float:
        whole = request_bytes(method, target, headers, body)
        with api.connect() as writer:
            status = 503
            while status == 503:  # This class does not wait for a log that has no room yet.
                writer.send(whole[:-1])
                began = time.monotonic()
                writer.send(whole[-1:])
                status = writer.read_response().status
                ended = time.monotonic()
            assert status in (201, 204)
        while waits[-1][0] < ended:
            assert time.monotonic() < ended + api.deadline_s
        longest = max(to - since for since, to in waits if to > began and since < ended)
        return longest / (ended - began)

    if method == "POST":
        api.put(path, b"", "application/json")
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        targets = [path if method == "POST" else f"{path}/{number}" for number in range(5)]
        shares = [share_of_the_longest_wait(Api.target(target)) for target in targets]
    finally:
        stop.set()
        asking.join()
    assert statistics.median(shares) < 0.5, "others waited until it was looked through"
