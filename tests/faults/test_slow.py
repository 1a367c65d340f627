"""A slow disk and a process that stands still: waiting is all that happens.

The weak classes do not wait for the disk, reads and health do not either; a frozen server's clients run
into their own time limits and lose nothing.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from support.http import Api, Closed, Timeout, request_bytes
from support.load import Writer, check_survivors
from support.server import Server

TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}
SYNC_DELAY_MS = 1000


def slow_server(start_server: Callable[..., Server], delay_ms: int = SYNC_DELAY_MS) -> Server:
    return start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": str(delay_ms)})


def test_an_empty_stream_is_there_while_a_change_of_it_waits_for_the_disk(
    start_server: Callable[..., Server],
) -> None:
    api = Api(slow_server(start_server), deadline_s=30)
    assert api.put("s").status == 201
    with api.connect() as connection:
        connection.send(request_bytes("POST", Api.target("s"), {"Stream-Closed": "true"}))
        until = time.monotonic() + SYNC_DELAY_MS / 2000
        while time.monotonic() < until:
            assert api.call("GET", "/-/api/streams/s").status == 200
            listed = api.call("GET", "/-/api/streams").json()["streams"]
            assert [entry["path"] for entry in listed] == ["s"]
        assert connection.read_response().status == 204


def test_nobody_waits_for_the_first_sync_but_who_asked_for_it(
    start_server: Callable[..., Server],
) -> None:
    """A disk is not quick until it was seen to be: the first commit of a server keeps no network thread."""
    api = Api(slow_server(start_server), deadline_s=30)
    with api.connect() as creating:
        creating.send(request_bytes("PUT", Api.target("s"), TEXT))
        api.wait_until_metric("millstream_streams_created_total", lambda count: count > 0)
        assert api.call("GET", "/-/health").status == 200
        answered, _, _ = select.select([creating.socket], [], [], 0)
        assert not answered
        assert creating.read_response().status == 201


def test_large_appends_that_wait_for_the_log_hold_up_no_others(
    start_server: Callable[..., Server],
) -> None:
    """As many as there are workers for them, each behind the create of its stream."""
    api = Api(slow_server(start_server, 3 * SYNC_DELAY_MS), deadline_s=60)
    weak = {"Stream-Durability": "ephemeral"}
    large = b"x" * (1 << 20)
    assert api.put("ready", headers=weak).status == 201
    with ExitStack() as stack:
        waiting = [stack.enter_context(api.connect()) for _ in range(4)]
        for number, connection in enumerate(waiting):
            target = Api.target(f"new/{number}")
            connection.send(request_bytes("PUT", target, TEXT | weak))
            connection.send(request_bytes("POST", target, TEXT, large))
        for _ in range(10):
            began = time.monotonic()
            assert api.post("ready", large).status == 204
            assert time.monotonic() - began < SYNC_DELAY_MS / 1000
        for connection in waiting:
            assert connection.read_response().status == 201
            assert connection.read_response().status == 204


def test_a_stop_refuses_calls_of_the_control_plane_as_all_others(
    start_server: Callable[..., Server],
) -> None:
    """But who was under way is not told that nothing was done."""
    server = slow_server(start_server)
    api = Api(server, deadline_s=30)
    assert api.put("s", headers={"Stream-Durability": "memory"}).status == 201
    told = []
    with api.connect() as under_way:
        change = request_bytes("PATCH", "/-/api/streams/s", JSON, b'{"durability": "disk"}')
        under_way.send(change)
        api.wait_until_metric("millstream_control_waiting", lambda count: count > 0)
        server.process.terminate()
        with suppress(Closed, OSError):
            while True:
                told.append(
                    api.call("PATCH", "/-/api/streams/none", JSON, b'{"durability": "disk"}')
                )
        cut = under_way.read_response()
    server.process.wait(30)
    server.kill()
    refused = {answer.code for answer in told if answer.status != 404}
    assert refused <= {"shutting_down", "outcome_unknown"}, refused
    assert "shutting_down" in refused
    assert (cut.status, cut.code) == (503, "outcome_unknown")


def test_a_slow_disk_delays_only_those_who_asked_for_it(
    start_server: Callable[..., Server],
) -> None:
    server = slow_server(start_server)
    api = Api(server, deadline_s=30)
    for name in ("memory", "fsync"):
        assert api.put(name, headers={"Stream-Durability": name}).status == 201
    stop = threading.Event()
    synced_ms: list[float] = []

    def keep_the_disk_busy() -> None:
        with api.connect() as connection:
            while not stop.is_set():
                began = time.monotonic()
                assert connection.request("POST", Api.target("fsync"), TEXT, b"f").status == 204
                synced_ms.append((time.monotonic() - began) * 1000)

    busy = threading.Thread(target=keep_the_disk_busy)
    busy.start()
    taken_ms: list[float] = []
    try:
        with api.connect() as connection:
            until = time.monotonic() + 4
            while time.monotonic() < until or len(synced_ms) < 2:
                for method, target, status in (
                    ("POST", Api.target("memory"), 204),
                    ("GET", Api.target("memory", offset="now"), 200),
                    ("GET", Api.target("fsync"), 200),
                    ("GET", "/-/health", 200),
                    ("GET", "/-/ready", 200),
                ):
                    began = time.monotonic()
                    headers = TEXT if method == "POST" else None
                    answer = connection.request(
                        method, target, headers, b"m" if method == "POST" else None
                    )
                    taken_ms.append((time.monotonic() - began) * 1000)
                    assert answer.status == status, answer
    finally:
        stop.set()
        busy.join(30)
    taken_ms.sort()
    assert min(synced_ms) >= SYNC_DELAY_MS * 0.9
    # An orderly stop would wait for the slow disk, too, for longer than it is given.
    server.kill()
    # One core may be busy elsewhere; a sync is a second, so half of one tells waiting from not waiting.
    assert taken_ms[-1] < SYNC_DELAY_MS / 2, (
        f"the slowest of {len(taken_ms)} took {taken_ms[-3:]} ms"
    )


def test_what_a_slow_disk_has_not_confirmed_nobody_sees(
    start_server: Callable[..., Server],
) -> None:
    server = slow_server(start_server)
    api = Api(server, deadline_s=30)
    api.put("s", b"old")
    with api.connect() as writer:
        writer.send(request_bytes("POST", Api.target("s"), TEXT, b"new"))
        seen = {api.get("s").body for _ in range(20)}
        assert seen == {b"old"}
        assert writer.read_response().status == 204
    assert api.get("s").body == b"oldnew"
    server.kill()


@pytest.mark.slow
def test_a_frozen_server_loses_nothing_and_its_clients_time_out(server: Server, api: Api) -> None:
    writers = [
        Writer(f"w{n}", "shared", depth, with_producer=True) for n, depth in ((0, 1), (1, 16))
    ]
    api.put("shared")
    start = threading.Barrier(len(writers) + 1)
    patient = Api(server, deadline_s=60)
    ended = threading.Event()

    def write(writer: Writer) -> None:
        with patient.connect() as connection:
            start.wait(30)
            while not ended.is_set():
                writer.burst(connection)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    start.wait(30)
    for _ in range(2):
        with server.frozen():
            stuck = [writer.acknowledged for writer in writers]
            with pytest.raises(Timeout):
                Api(server, deadline_s=3.0).get("shared")
            # An answer that was under way when it froze may have arrived since.
            late = [w.acknowledged - s for w, s in zip(writers, stuck, strict=True)]
            assert all(count <= w.depth for count, w in zip(late, writers, strict=True)), late
        until = time.monotonic() + 20
        while any(w.acknowledged <= s + w.depth for w, s in zip(writers, stuck, strict=True)):
            assert time.monotonic() < until, "it did not go on where it stood"
            threading.Event().wait(0.01)
    ended.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [fault for writer in writers for fault in writer.faults] == []
    assert check_survivors(api, writers) == {w.name: w.acknowledged for w in writers}
    assert api.call("GET", "/-/ready").status == 200
    server.crash_and_restart()
    assert check_survivors(api, writers) == {w.name: w.acknowledged for w in writers}


@pytest.mark.slow
def test_a_server_killed_while_frozen_loses_nothing(server: Server, api: Api) -> None:
    writer = Writer("w", "s", 8, with_producer=True)
    api.put("s")
    start = threading.Barrier(2)
    thread = threading.Thread(target=writer.run, args=(api, start))
    thread.start()
    start.wait(30)
    while writer.acknowledged < 50:
        threading.Event().wait(0.01)
    with server.frozen():
        with pytest.raises(Timeout):
            Api(server, deadline_s=1.0).get("s")
        server.kill()
    thread.join(30)
    server.restart()
    check_survivors(api, [writer])
